"""The events that a node's observers gather for the script: the last ones, which it takes by the side channel.

    script: Watch   -->  listeners at these points of the node's seam, and at no others; each event is noted
            Gather  -->  the events from a number on, which forgets those before: the script has them

A word may come twice: both do the same again.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection
from functools import partial
from itertools import islice
from typing import Any

from ..process.clock import clock_name
from ..process.observing import (
    BatchApplied,
    CollectiveDone,
    CommandBegun,
    CommandDone,
    FunctionDone,
    GraphReplayed,
    NodeSeam,
    Point,
    TransferDone,
)
from ..protocol import side

#: The most events of one message.
PART = 4096

#: What is noted of each event.
_NOTED: dict[type, Callable[[Any], side.Noted]] = {
    BatchApplied: lambda it: side.Noted(
        "applied", it.at, it.began, number=it.number, what=f"{it.commands} commands", bytes=it.bytes
    ),
    CommandBegun: lambda it: side.Noted("begun", it.at, it.at, it.stream, it.number, it.what),
    CommandDone: lambda it: side.Noted("done", it.at, it.began, it.stream, it.number, it.what),
    CollectiveDone: lambda it: side.Noted(
        "collective", it.at, it.began, it.stream, it.number, it.what, bytes=it.bytes, failed=it.failed
    ),
    FunctionDone: lambda it: side.Noted(
        "function", it.at, it.began, it.stream, it.number, it.what, failed=it.failed
    ),
    GraphReplayed: lambda it: side.Noted(
        "graph", it.at, it.began, it.stream, it.number, str(it.graph), failed=it.failed
    ),
    TransferDone: lambda it: side.Noted(
        "sent" if it.sent else "received", it.at, it.began, what=f"{it.channel} {it.use}".rstrip(),
        transfer=it.transfer, peer=it.peer, bytes=it.bytes,
    ),
}  # fmt: skip


class Gathering:
    """The listeners of one node that note events for the script, and the events. Any thread may call all methods."""

    def __init__(self, seam: NodeSeam) -> None:
        self._seam = seam
        self._clock_name = clock_name()
        self._listeners: dict[str, tuple[Point[Any], Callable[[Any], None]]] = {}
        self._events: deque[side.Noted] = deque()
        self._first = 0  #: the number of the first of them
        self._room = 0  #: how many there may be
        #: re-entrant: the collector may end a transfer, of which observers are told, while it is held
        self._lock = threading.RLock()

    def __repr__(self) -> str:
        return f"<Gathering {sorted(self._listeners)} events={len(self._events)}>"

    def watch(self, points: Collection[side.Point], room: int) -> None:
        """Notes the events of these points from now on, and of no others; keeps the last ``room``."""
        found = self._seam.points()
        with self._lock:
            self._room = room
            for name in {*self._listeners} - {*points}:
                point, listener = self._listeners.pop(name)
                point.remove(listener)
            for name in {*points} - {*self._listeners}:
                listener = partial(self._keep_event)
                self._listeners[name] = found[name], listener
                found[name].add(listener)

    def gather(self, request: int, first: int) -> side.Gathered:
        """Returns the events from number ``first`` on, as many as one message takes, and forgets those before."""
        with self._lock:
            while self._events and self._first < first:
                self._drop_oldest()
            events = tuple(islice(self._events, PART))
            more = len(self._events) > len(events)
            return side.Gathered(request, self._seam.clock.now(), self._first, events, more, self._clock_name)

    def _keep_event(self, event: Any) -> None:
        seen = _NOTED[type(event)](event)
        with self._lock:
            self._events.append(seen)
            while len(self._events) > self._room:
                self._drop_oldest()

    def _drop_oldest(self) -> None:
        self._events.popleft()
        self._first += 1
