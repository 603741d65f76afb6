"""Fetches what observers at nodes see, while a job runs: by the side channels, whatever nodes are at.

    watch  -->  Watch  -->  a node's seam: listeners gather events there (node/gathering.py)
    fetch  -->  Gather -->  what they have gathered since the last fetch, and what time it is there

A node knows its commands by number; the lines that have issued them are noted here, as messages leave, while it is
watched.
"""

from __future__ import annotations

import select
from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from ..process.clock import clock_name
from ..process.observing import MessageSent
from ..process.signals import uninterrupted
from ..protocol import codec, side
from ..protocol.errors import DisttensorError, ProtocolError
from ..protocol.failure_ids import position
from .failures import Site
from .link_state import LinkState
from .node import Node
from .side_channels import Answered, SideChannels

#: The events that a node keeps between two fetches, and the commands whose times it keeps. For as many their lines are
#: kept here.
ROOM, COMMANDS = 100_000, 1_000_000
#: Seconds between two looks for an answer: another thread may have taken it.
LOOK = 0.05


#: The lines of a node's commands, by message: (number of its first command, lines).
Lines: TypeAlias = list[tuple[int, Sequence[Site | None]]]


class NodeEvent(NamedTuple):
    """An event of a node's seam. Its times are by the node's clock."""

    node: int
    kind: str  #: "applied", "begun", "done", "collective", "function", "graph", "sent", "received"
    at: float
    began: float
    stream: str
    number: int  #: of its command; -1 for a transfer
    what: str  #: such as the operator's name
    transfer: int  #: its number; -1 for what is none
    peer: int  #: of a transfer
    bytes: int
    failed: bool
    site: Site | None  #: the line that has issued the command


class CommandTimes(NamedTuple):
    """The moments at which a node began with commands that follow each other, each the end of the one before."""

    number: int  #: of the first command
    moments: array[float]
    is_over: bool  #: whether the last moment is an end, and not the begin of one more command

    @property
    def commands(self) -> range:
        """The numbers of the commands."""
        return range(self.number, self.number + len(self.moments) - self.is_over)


@dataclass(frozen=True)
class NodeEvents:
    """The events that a node's observers have noted since the last fetch."""

    events: tuple[NodeEvent, ...]
    dropped: int  #: events that are missing, as there were more than the node keeps
    ahead: float  #: seconds by which the node's clock is ahead of the script's; 0 where both have one
    within: float  #: by how many seconds that may be wrong
    shares_clock: bool = False  #: whether the node has the script's clock
    times: tuple[CommandTimes, ...] = ()  #: those of commands, where nothing else was noted of them


class LookingIn:
    """The script's end of what observers at nodes gather."""

    __slots__ = ("_clock_name", "_next", "_side", "_sites", "_state", "_watched")

    def __init__(self, state: LinkState, side_channels: SideChannels) -> None:
        self._state, self._side = state, side_channels
        self._clock_name = clock_name()
        self._watched: set[int] = set()
        #: by worker, its rank and incarnation, as each counts from 0: the number of the event that comes next
        self._next: dict[tuple[int, int], int] = {}
        #: by rank: the lines of messages that have left while it was watched
        self._sites: dict[int, deque[tuple[int, Sequence[Site | None]]]] = {}

    def watch(self, ranks: Iterable[int], points: Collection[str], room: int = ROOM, commands: int = 0) -> None:
        """Has observers at these points of nodes' seams note what happens there, and at no others; none: nowhere. A
        node keeps the last ``room`` events, and the times of the last ``commands``. Does not wait: a node has heard of
        it when a ``fetch`` that begins afterwards has returned.

        Raises ValueError for a point that nodes don't have, DisttensorError for nodes without a side channel.
        """
        if missing := sorted({*points} - {*side.POINTS}):
            raise ValueError(f"there is no point {missing[0]!r} of a node; there are {', '.join(side.POINTS)}")
        self._watch([*ranks], tuple(name for name in side.POINTS if name in points), room, commands)

    @uninterrupted
    def _watch(self, ranks: list[int], points: tuple[side.Point, ...], room: int, commands: int) -> None:
        state = self._state
        with state.lock:
            for rank in ranks:
                self._check(state.nodes[rank])
                self._side.watch(state.nodes[rank], points, room, commands)
            before = bool(self._watched)
            self._watched = self._watched | {*ranks} if points else self._watched - {*ranks}
            if not before and self._watched:
                state.seam.sent.add(self._note_sites)
            elif before and not self._watched:
                state.seam.sent.remove(self._note_sites)
            state.wake.set()

    @property
    def watched(self) -> set[int]:
        """The nodes that are watched now."""
        return self._watched

    def _check(self, node: Node) -> None:
        """Raises NodeLost for a node that is gone, DisttensorError where it has no side channel. The caller holds the
        lock."""
        state = self._state
        if node.outbox.over:
            state.check(node.outbox)
        if self._side.hub is None:
            raise DisttensorError(
                "nodes that are threads of the script (launcher='inproc') have no side channel by which they could be "
                "watched; start them as processes, as by launcher='local'"
            )

    def fetch(self, rank: int, timeout: float = 10.0) -> NodeEvents:
        """Fetches what a node's observers have noted since the last fetch. Waits for its answer, which comes whatever
        the node is at.

        Raises TimeoutError after ``timeout`` seconds without one, NodeLost, DisttensorError after shutdown, and
        ProtocolError for times that can't be those of the node's commands.
        """
        events, times, dropped = list[NodeEvent](), list[CommandTimes](), 0
        deadline = self._state.clock.now() + timeout
        while True:
            answer = self._exchange(rank, deadline, timeout)
            told, worker = answer.message, self._worker(rank)
            expected = self._next.get(worker, 0)
            dropped += max(0, told.first - expected)
            self._next[worker] = told.first + sum(map(side.events_in, told.events))
            lines = self._lines(rank)
            events += [self._event(rank, seen, lines) for seen in told.events if not seen.moments]
            times += [self._times(rank, seen) for seen in told.events if seen.moments]
            if not (told.more and told.events):
                found = tuple(events), dropped
                if told.clock and told.clock == self._clock_name:
                    return NodeEvents(*found, 0.0, 0.0, True, tuple(times))
                ahead, within = told.now - (answer.asked + answer.came) / 2, (answer.came - answer.asked) / 2
                return NodeEvents(*found, ahead, within, False, tuple(times))

    def _exchange(self, rank: int, deadline: float, timeout: float) -> Answered:
        state = self._state
        node, request = state.nodes[rank], self._ask(rank)
        poller = select.poll()
        poller.register(self._side.hub.fileno(), select.POLLIN)  # type: ignore[union-attr]
        try:
            while (answer := self._take_events(node, request)) is None:
                left = deadline - state.clock.now()
                if left <= 0:
                    raise TimeoutError(f"node {rank} has not answered on its side channel within {timeout:g} s")
                state.clock.poll(poller, min(LOOK, left))
            return answer
        finally:
            with state.lock:
                self._side.withdraw(request)

    @uninterrupted
    def _ask(self, rank: int) -> int:
        with self._state.lock:
            self._check(self._state.nodes[rank])
            return self._side.ask(self._state.nodes[rank], self._next.get(self._worker(rank), 0))

    def _worker(self, rank: int) -> tuple[int, int]:
        return rank, self._state.nodes[rank].connection.number

    @uninterrupted
    def _take_events(self, node: Node, request: int) -> Answered | None:
        """Takes in what has come. Raises NodeLost, DisttensorError after shutdown."""
        with self._state.lock:
            self._check(node)
            self._side.send_untold([node])
            return self._side.answer(request)

    def _event(self, rank: int, seen: side.Noted, lines: Lines) -> NodeEvent:
        number, site = position(seen.number)[0] if seen.number >= 0 else -1, None
        if at := bisect_right(lines, number, key=lambda line: line[0]):
            first, sites = lines[at - 1]
            site = sites[number - first] if number < first + len(sites) else None
        kind, stream, what = map(codec.one_line, (seen.kind, seen.stream, seen.what))
        return NodeEvent(
            rank, kind, seen.at, seen.began, stream, seen.number, what, seen.transfer, seen.peer, seen.bytes,
            seen.failed, site,
        )  # fmt: skip

    def _times(self, rank: int, seen: side.Noted) -> CommandTimes:
        """Returns the times of commands that a node has told of. Raises ProtocolError for commands that it was not
        sent."""
        try:
            found = CommandTimes(seen.number, side.moments_in(seen), seen.kind != "timing")
        except ProtocolError as e:
            raise ProtocolError(f"node {rank} has told of its commands what can't be: {e}") from None
        sent = self._state.nodes[rank].outbox.sent
        if found.commands.start < 0 or found.commands.stop > sent:
            raise ProtocolError(
                f"node {rank} has told of its commands what can't be: of number {found.commands.stop - 1}, and it was "
                f"sent {sent}"
            )
        return found

    def _note_sites(self, event: MessageSent) -> None:
        _, node, number, lines, _ = event
        if node in self._watched:
            sites = self._sites.setdefault(node, deque())
            sites.append((number, lines))
            while number - sites[0][0] > COMMANDS:
                sites.popleft()

    def _lines(self, rank: int) -> Lines:
        with self._state.lock:
            return list(self._sites.get(rank, ()))
