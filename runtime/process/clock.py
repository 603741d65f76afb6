"""The clock: what time it is, and waits that end by it. What counts silences is given one; a test gives its own.

Whoever is given a clock asks nothing else for the time, and waits by nothing else: a test's clock goes on by itself
where a wait finds nothing to do (tests/kit/virtual_time.py), so that a silence of a minute takes a moment.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable
from contextlib import suppress


class Clock:
    """The time of this machine."""

    __slots__ = ()

    #: Returns the seconds since some moment in the past; they never go back. It is C code: what notes a time for each
    #: command calls it itself.
    now: Callable[[], float] = staticmethod(time.monotonic)

    def sleep(self, seconds: float) -> None:
        """Waits so long."""
        time.sleep(seconds)

    def wait(self, event: threading.Event, seconds: float) -> bool:
        """Waits until an event is set, at most so long. Returns whether it is."""
        return event.wait(seconds)

    def poll(self, poller: select.poll, seconds: float | None = None) -> list[tuple[int, int]]:
        """Waits until a poller has something, at most so long (None: without end). Returns (descriptor, events)."""
        return poller.poll(None if seconds is None else seconds * 1000)


def clock_name() -> str:
    """Returns what is the same for all processes whose ``Clock`` is one: the kernel since its start, and the space of
    times that it shows this one, as a container may have its own. "" where that can't be known."""
    with suppress(OSError), open("/proc/sys/kernel/random/boot_id") as boot:
        return f"{boot.read().strip()} {os.stat('/proc/self/ns/time').st_ino}"
    return ""


#: The clock of all that is given no other one.
CLOCK = Clock()
