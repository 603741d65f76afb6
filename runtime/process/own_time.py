"""Time in which this process ran: what it could not hear while it stood still is nobody's silence."""

from __future__ import annotations

import time


class Unheard:
    """Counts the seconds for which another process has said nothing while this one ran.

    ``look`` is to be called every so many seconds, and counts ``most`` between two calls. So a process that was stopped
    (Ctrl-Z, a debugger, a host that was asleep) finds no more for all of that time.
    """

    def __init__(self, most: float = 2.0) -> None:
        self.seconds = 0.0
        self.most = most
        self._at = time.monotonic()

    def heard(self) -> None:
        """Notes that the other process has said something."""
        self.seconds = 0.0
        self._at = time.monotonic()

    def look(self) -> float:
        """Returns the seconds until now."""
        now = time.monotonic()
        self.seconds += min(now - self._at, self.most)
        self._at = now
        return self.seconds
