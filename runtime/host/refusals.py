"""Refused connections, told to the log: one line, however many strangers come."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from .descriptors import is_shortage, limit

#: Seconds from the first line to the next one at least; each time twice as many, up to the last.
_FIRST, _LAST = 10.0, 3600.0


class Shortages:
    """Logs that a listener can't take connections, which peers see as silence: as often as ``Refusals``."""

    def __init__(self, log: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._log, self._clock = log, clock
        self._next, self._pause = -float("inf"), _FIRST

    def note_shortage(self, name: str, error: OSError) -> None:
        """Notes that a connection could not be taken."""
        now = self._clock()
        if now < self._next:
            return
        self._next, self._pause = now + self._pause, min(2 * self._pause, _LAST)
        why = f"no file descriptors are left; {limit()}" if is_shortage(error) else str(error)
        self._log.warning("%s can't take a connection, and its peer waits in vain: %s", name, why)


class Refusals:
    """Counts the connections that one listener refuses, and logs them; each later line waits twice as long.

    So a port that a scanner or a health check visits for days does not fill the log.
    """

    def __init__(self, log: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._log, self._clock = log, clock
        self._lock = threading.Lock()
        self._next = -float("inf")
        self._pause = _FIRST
        self.count = 0

    def note_refusal(self, address: str, why: str) -> None:
        """Counts a connection from ``address``, refused because of ``why``, and logs it if the time has come."""
        with self._lock:
            self.count += 1
            count, now = self.count, self._clock()
            if now < self._next:
                return
            self._next = now + self._pause
            self._pause = min(2 * self._pause, _LAST)
        self._log.warning("refused a connection from %s: %s; %d refused so far", address, why, count)
