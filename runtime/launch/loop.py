"""One thread that waits for many descriptors and times: what relays and servers are built on."""

from __future__ import annotations

import heapq
import itertools
import select
import time
from collections.abc import Callable


class Loop:
    """``turn`` waits for the next things to happen and calls what was asked for."""

    def __init__(self) -> None:
        self._poller = select.poll()  # epoll refuses regular files
        self._watched: dict[int, Callable[[], object]] = {}
        self._times: list[tuple[float, int, Callable[[], object]]] = []
        self._order = itertools.count()

    def watch(self, fd: int, then: Callable[[], object], write: bool = False) -> None:
        """Calls ``then`` in each turn in which ``fd`` is readable (``write``: writable) or at its end."""
        self._watched[fd] = then
        self._poller.register(fd, select.POLLOUT if write else select.POLLIN)

    def forget(self, fd: int) -> None:
        """Before it is closed; one that is not watched is fine."""
        if self._watched.pop(fd, None) is not None:
            self._poller.unregister(fd)

    def later(self, seconds: float, then: Callable[[], object]) -> None:
        """Calls ``then`` once after so many seconds. It cannot be taken back: have it look whether it still matters."""
        heapq.heappush(self._times, (time.monotonic() + seconds, next(self._order), then))

    def turn(self, timeout: float | None = None) -> None:
        """One round: waits (``timeout`` seconds at most), then calls what is due."""
        if self._times:
            left = max(0.0, self._times[0][0] - time.monotonic())
            timeout = left if timeout is None else min(timeout, left)
        for fd, _ in self._poller.poll(None if timeout is None else timeout * 1000 + 0.5):
            # what ran before may have closed it, and its number may be another's by now
            then = self._watched.get(fd)
            if then is not None:
                then()
        while self._times and self._times[0][0] <= time.monotonic():
            heapq.heappop(self._times)[2]()
