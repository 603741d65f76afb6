"""Time that goes on by itself: a silence of a minute takes a moment."""

from __future__ import annotations

import heapq
import itertools
import math
import select
import threading
from collections.abc import Callable

from disttensor.runtime.process.clock import Clock


class VirtualClock(Clock):
    """A clock of one thread. It goes on where a wait finds nothing: to the wait's end, or to what is planned before."""

    def __init__(self) -> None:
        self._now = 1000.0
        self._planned: list[tuple[float, int, Callable[[], object]]] = []
        self._order = itertools.count()

    def plan(self, seconds: float, then: Callable[[], object]) -> None:
        """Has ``then()`` called so many seconds from now, in a wait."""
        heapq.heappush(self._planned, (self._now + seconds, next(self._order), then))

    def now(self) -> float:
        return self._now

    def sleep(self, seconds: float) -> None:
        end = self._now + seconds
        while self._now < end:
            self._go_on(end)

    def wait(self, event: threading.Event, seconds: float) -> bool:
        end = self._now + seconds
        while not event.is_set() and self._now < end:
            self._go_on(end)
        return event.is_set()

    def poll(self, poller: select.poll, seconds: float | None = None) -> list[tuple[int, int]]:
        end = math.inf if seconds is None else self._now + seconds
        while not (ready := poller.poll(0)) and self._now < end:
            self._go_on(end)
        return ready

    def _go_on(self, end: float) -> None:
        if self._planned and self._planned[0][0] <= end:
            self._now, _, then = heapq.heappop(self._planned)
            then()
        else:
            assert end < math.inf, "a wait without an end, and nothing is planned that would end it"
            self._now = end
