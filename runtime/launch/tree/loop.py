"""An event loop of one thread that waits for many descriptors and times: roots and agents are built on it."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import select
from collections.abc import Callable

from ...process.clock import CLOCK, Clock


class EventLoop:
    """An event loop. ``turn`` waits for the next events and calls the functions that were registered for them."""

    def __init__(self, clock: Clock = CLOCK) -> None:
        self._clock = clock
        self._poller = select.poll()  # epoll refuses regular files
        self._watched: dict[int, Callable[[], object]] = {}
        self._full: set[int] = set()  #: descriptors whose next room ends a turn
        self._times: list[tuple[float, int, Callable[[], object]]] = []
        self._order = itertools.count()

    def watch(self, fd: int, then: Callable[[], object]) -> None:
        """Calls ``then`` in each turn in which ``fd`` is readable or at its end, until ``unwatch``."""
        self._watched[fd] = then
        self._register(fd)

    def room(self, fd: int, wanted: bool) -> None:
        """Sets whether a turn is to end when ``fd`` becomes writable."""
        if wanted != (fd in self._full):
            (self._full.add if wanted else self._full.discard)(fd)
            self._register(fd)

    def unwatch(self, fd: int) -> None:
        """Stops watching a descriptor, before it is closed; one that is not watched is fine."""
        self._watched.pop(fd, None)
        self._full.discard(fd)
        self._register(fd)

    def later(self, seconds: float, then: Callable[[], object]) -> None:
        """Calls ``then`` once after so many seconds. It cannot be undone: have it check whether it still matters."""
        heapq.heappush(self._times, (self._clock.now() + seconds, next(self._order), then))

    def turn(self, timeout: float | None = None) -> None:
        """Does one round: waits (``timeout`` seconds at most), then calls what is due."""
        if self._times:
            left = max(0.0, self._times[0][0] - self._clock.now())
            timeout = left if timeout is None else min(timeout, left)
        for fd, events in self._clock.poll(self._poller, timeout):
            # an earlier call may have closed it, and its number may be another's by now
            then = self._watched.get(fd)
            if then is not None and events & ~select.POLLOUT:
                then()
        while self._times and self._times[0][0] <= self._clock.now():
            heapq.heappop(self._times)[2]()

    def _register(self, fd: int) -> None:
        events = (select.POLLIN if fd in self._watched else 0) | (select.POLLOUT if fd in self._full else 0)
        if events:
            self._poller.register(fd, events)
        else:
            with contextlib.suppress(KeyError):
                self._poller.unregister(fd)
