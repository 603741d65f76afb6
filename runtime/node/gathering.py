"""The events that a node's observers gather for the script: the last ones, which it takes by the side channel.

    script: Watch   -->  listeners at these points of the node's seam, and at no others; each event is noted
            Gather  -->  the events from a number on, which forgets those before: the script has them

Of the commands of a message only the times are noted (``timed``), by the node's thread, in a list that stays its own:
it is made an event when the next message begins, or when the script asks in between.

A word may come twice: both do the same again.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Sequence
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
    MessageBegun,
    NodeSeam,
    Point,
    TransferDone,
)
from ..protocol import side
from ..protocol.codec import MAX_MESSAGE

#: The most events of one message, and about how many bytes after which it takes no more: an event may have a message's
#: times, or a text.
PART, PART_BYTES = 4096, MAX_MESSAGE // 2
#: The bytes of an event, without its times and texts, at most.
EVENT_BYTES = 128

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
        self._events: deque[side.Noted | MessageBegun] = deque()  #: a message that was gone through is one
        self._first = 0  #: the number of the first of them
        self._room = self._commands = 0  #: how many there may be, and commands of which the times are kept
        self._kept = self._timed = 0  #: how many there are
        self._message: MessageBegun | None = None  #: the one that is gone through, or was last
        self._number = 0  #: of the command that began at the first of its moments
        self._is_told = False  #: whether it is told that it has begun
        #: re-entrant: the collector may end a transfer, of which observers are told, while it is held
        self._lock = threading.RLock()

    def __repr__(self) -> str:
        return f"<Gathering {sorted(self._listeners)} events={len(self._events)}>"

    def watch(self, points: Collection[side.Point], room: int, commands: int = 0) -> None:
        """Notes the events of these points from now on, and of no others; keeps the last ``room``, and the times of the
        last ``commands``."""
        found = self._seam.points()
        with self._lock:
            self._room, self._commands = room, commands
            if "timed" not in points:
                self._take_moments()
                self._message = None
            for name in {*self._listeners} - {*points}:
                point, listener = self._listeners.pop(name)
                point.remove(listener)
            for name in {*points} - {*self._listeners}:
                listener = partial(self._keep_timed if name == "timed" else self._keep_event)
                self._listeners[name] = found[name], listener
                found[name].add(listener)

    def gather(self, request: int, first: int) -> side.Gathered:
        """Returns the events from number ``first`` on, as many as one message takes, and forgets those before."""
        with self._lock:
            self._take_moments()
            while self._events and self._first < first:
                self._drop_oldest()
            events, size = list[side.Noted](), 0
            for kept in islice(self._events, PART):
                event = _event_of("timed", kept.number, kept.moments) if isinstance(kept, MessageBegun) else kept
                size += EVENT_BYTES + len(event.moments) + len(event.what.encode()) + len(event.stream)
                if size > PART_BYTES and events:
                    break
                events.append(event)
            more = len(self._events) > len(events)
            return side.Gathered(request, self._seam.clock.now(), self._first, tuple(events), more, self._clock_name)

    def _keep_event(self, event: Any) -> None:
        seen = _NOTED[type(event)](event)
        with self._lock:
            self._events.append(seen)
            self._kept += 1
            while self._kept > self._room:
                self._drop_oldest()

    def _keep_timed(self, event: MessageBegun | CommandBegun | CommandDone) -> None:
        if type(event) is not MessageBegun:
            self._keep_event(event)
            return
        with self._lock:
            before = self._message
            if before is not None:
                if self._number == before.number and len(before.moments) > before.commands > 0:
                    self._append_timed(before, before.commands)  # as it is: it is told of when the script asks
                else:
                    self._take_moments()
            self._message, self._number, self._is_told = event, event.number, False

    def _take_moments(self) -> None:
        """Makes an event of the times that were noted since the last one. The node's thread may note more meanwhile."""
        if self._message is None:
            return
        _, first, commands, moments = self._message
        number, ended = self._number, len(moments) - 1
        if number + ended == first + commands:
            self._message = None
            if ended:
                self._append_moments("timed", number, moments, ended)
        elif ended > 0 or (not ended and not self._is_told):
            self._append_moments("timing", number, moments[: ended + 1], ended or 1)
            del moments[:ended]  # what has begun last is told of next, too
            self._number, self._is_told = number + ended, True

    def _append_moments(self, kind: str, number: int, moments: Sequence[float], events: int) -> None:
        self._append_timed(_event_of(kind, number, moments), events)

    def _append_timed(self, event: side.Noted | MessageBegun, events: int) -> None:
        self._events.append(event)
        self._timed += events
        while self._timed > self._commands:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        dropped = self._events.popleft()
        events = dropped.commands if isinstance(dropped, MessageBegun) else side.events_in(dropped)
        self._first += events
        if dropped.moments:
            self._timed -= events
        else:
            self._kept -= 1


def _event_of(kind: str, number: int, moments: Sequence[float]) -> side.Noted:
    """Returns the event of commands that have begun at these moments, those from a number on."""
    return side.Noted(
        kind, moments[-1], moments[0], "", number, "", -1, -1, 0, False, side.moments_of(moments)
    )  # fmt: skip
