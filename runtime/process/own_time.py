"""Time in which this process ran: what it could not hear while it stood still is nobody's silence."""

from __future__ import annotations

import os
import resource
import time
from contextlib import suppress

from .clock import CLOCK, Clock


class Unheard:
    """Counts the seconds for which another process has said nothing while this one ran.

    ``look`` is to be called every so many seconds, and counts ``most`` between two calls. So a process that was stopped
    (Ctrl-Z, a debugger, a host that was asleep) finds no more for all of that time.
    """

    def __init__(self, most: float = 2.0, clock: Clock = CLOCK) -> None:
        self.seconds = 0.0
        self.most = most
        self._clock = clock
        self._at = clock.now()

    def heard(self) -> None:
        """Notes that the other process has said something."""
        self.seconds = 0.0
        self._at = self._clock.now()

    def look(self) -> float:
        """Returns the seconds until now."""
        now = self._clock.now()
        self.seconds += min(now - self._at, self.most)
        self._at = now
        return self.seconds


class Standstill:
    """Tells for how long a thread's process stood still between two looks: stopped, or asleep with its host.

    A thread that only comes late did not: the kernel knows for how long it waited for a core, and one that waits for
    the GIL wakes up every few milliseconds to ask for it. For one thread.
    """

    #: The least share of the time for which a thread that got no core was on the kernel's queue for one; the least
    #: switches a second of one that waits for the GIL; and the seconds between two accounts, which cost system calls.
    _SHARE, _SWITCHES, _ACCOUNT = 0.3, 50.0, 0.1

    def __init__(self) -> None:
        self._account = -1
        with suppress(OSError):
            self._account = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
        self._at, self._ran, self._switched = self._now()

    def look(self) -> float:
        """Returns the seconds for which it stood still just now, to a tenth; 0.0 where it did not, or ran late."""
        then, ran, switched = self._at, self._ran, self._switched
        if time.monotonic() - then < self._ACCOUNT:
            return 0.0
        self._at, self._ran, self._switched = self._now()
        gap = self._at - then
        busy = self._ran - ran >= gap * self._SHARE or self._switched - switched >= gap * self._SWITCHES
        return 0.0 if busy else gap

    def close(self) -> None:
        """Lets go of the descriptor."""
        if self._account >= 0:
            os.close(self._account)
            self._account = -1

    def _now(self) -> tuple[float, float, int]:
        """Returns the time, the seconds for which this thread has run or has waited for a core, and its switches."""
        use = resource.getrusage(resource.RUSAGE_THREAD)
        ran = use.ru_utime + use.ru_stime
        if self._account >= 0:
            with suppress(OSError, ValueError):
                ran = sum(map(int, os.pread(self._account, 100, 0).split()[:2])) / 1e9
        return time.monotonic(), ran, use.ru_nvcsw + use.ru_nivcsw
