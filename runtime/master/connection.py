"""The connection of a node: one worker process in a node's place, from its start to its loss.

A node is not its connection (node.py): where one is lost, another worker may come in its place. It has none of the
tensors, and another ``number``.

The life of a connection (`Life`), which the link changes under its lock:

    AWAITED        its hello has not arrived, and nothing may be sent to it
    THERE          its hello has arrived
    UNEXPLAINED    a connection of it has ended, and the launcher has not said why: nothing is sent to it, and what it
                   has still said counts
    LOST           it is gone, and ``lost`` says why

    AWAITED -> THERE                   its hello
    AWAITED, THERE -> UNEXPLAINED      the end of a connection, where there is a launcher to ask
    all -> LOST                        the end of its process, or of the launcher; an end that nobody has explained in
                                       time; a message that breaks the protocol; silence; ``kill``

While a session ends (``Link.closing``) no node becomes unexplained or lost. After LOST there is another connection, or
none: ``Link.reconnect`` begins one, which is awaited.
"""

from __future__ import annotations

import math
from collections import deque
from enum import Enum
from typing import NamedTuple

from ..host.launcher import Sight
from ..protocol import commands as c
from ..protocol import side
from ..protocol.arguments import Addresses
from ..protocol.errors import NodeLost
from .breakpoints import StoppedFunction
from .history import KEPT

#: The least seconds between two sights from which the use of cores is counted: the kernel counts it in hundredths.
COUNTED = 0.2


class Life(Enum):
    """How far a connection is between its start and its loss, as the master knows it."""

    AWAITED = "not there yet"
    THERE = "there"
    UNEXPLAINED = "disconnected"
    LOST = "lost"


#: The states to which each may change.
CHANGES: dict[Life, set[Life]] = {
    Life.AWAITED: {Life.THERE, Life.UNEXPLAINED, Life.LOST},
    Life.THERE: {Life.UNEXPLAINED, Life.LOST},
    Life.UNEXPLAINED: {Life.LOST},
    Life.LOST: set(),
}


class Progress(NamedTuple):
    """How far a node has come with what it was sent, as it has last reported: known without a message to it."""

    rank: int
    incarnation: int  #: the number of its connection: another one has done nothing of what this one was sent
    done: int  #: the number of the first command that it has not reported
    sent: int  #: the number of the first command that it was not sent

    def has_reached(self, mark: Progress) -> bool:
        """Returns whether all is done that the node had been sent when ``mark`` was taken; never, once the connection
        of then is lost."""
        return self.incarnation == mark.incarnation and self.done >= mark.sent


class NodeConnection:
    """The master's record of one worker process in the place of a node."""

    __slots__ = (
        "_used",
        "addresses",
        "answered",
        "busy",
        "cpu",
        "described",
        "described_at",
        "ended",
        "explained",
        "first",
        "flight",
        "flight_at",
        "gone_before",
        "hello",
        "knowing",
        "life",
        "lost",
        "notes",
        "number",
        "process",
        "rank",
        "repeated",
        "seen",
        "seen_at",
        "sight",
        "stops",
        "told_again",
        "unawaited",
    )

    def __init__(self, rank: int, number: int = 0, first: int = 0) -> None:
        self.rank = rank
        self.number = number  #: the incarnation of the node: how many connections it had before
        self.first = first  #: the number of the first command: those before went to earlier incarnations
        self.gone_before = 0  #: the ref below which a tensor is gone that it does not have
        self.life = Life.AWAITED
        self.hello: c.Hello | None = None
        self.lost: NodeLost | None = None  #: the error that says why it is gone, once it is
        self.process = 0  #: its process, while that runs, where the launcher has started it as a child (of a child)
        self.ended = False  #: whether the launcher has told of the end of its process
        self.unawaited: set[int] = set()  #: ids of requests that it may still answer, and nobody waits for
        self.repeated = 0  #: failures that it has told before
        self.sight: Sight | None = None  #: the last sight with stacks, for who waits: reset by who asks for one
        self.seen: Sight | None = None  #: the last sight
        self.seen_at = -math.inf  #: when that came
        self.flight = b""  #: the last flight record of its node (process/flight.py)
        self.flight_at = -math.inf  #: when that came
        self.cpu: float | None = None  #: how many cores it used lately: between two sights, or before the first one
        self._used = 0.0, 0.0  #: the seconds of cores, and since its start, from which that counts
        self.stops: dict[int, StoppedFunction] = {}  #: those at breakpoints, by their debuggers' numbers
        self.described: side.Described | None = None  #: the last description that the node has given of itself
        self.described_at = -math.inf  #: when that came
        self.explained = 0.0  #: when somebody who waits was told what it is at
        #: its addresses in each of its data channels, by the channel's number
        self.addresses: dict[int, Addresses] = {}
        self.knowing: set[int] = set()  #: the nodes that have been told of it, and so are told of its loss
        self.busy = 0.0  #: seconds for which it has worked until its last report, as it says
        self.answered = 0  #: the number of the last request that it has answered
        #: the numbers of commands behind which it knew of other workers in lost peers' places, with the peers' ranks
        #: and the former incarnations, the earliest first
        self.told_again: list[tuple[int, int, int]] = []
        #: what the script was at when it issued a command and those behind it, in words; by the command's number
        self.notes: deque[tuple[int, str]] = deque(maxlen=KEPT)

    def __repr__(self) -> str:
        return f"<NodeConnection {self.number} of node {self.rank} {self.life.value} first={self.first}>"

    def become(self, life: Life) -> None:
        """Changes the connection's life, if that is not what it is already."""
        if life is not self.life:
            if life not in CHANGES[self.life]:
                raise AssertionError(f"node {self.rank} is {self.life.value}, and can't become {life.value}")
            self.life = life

    def greet(self, hello: c.Hello) -> None:
        """Takes the worker's hello, which may come after the end of another connection of it."""
        self.hello = hello
        if self.life is Life.AWAITED:
            self.become(Life.THERE)

    def note_end(self, flight: bytes, at: float) -> None:
        """Notes that its process has ended, as the launcher told at a time, and has left this flight record."""
        self.ended, self.process = True, 0
        if flight:
            self.flight, self.flight_at = flight, at

    def see(self, sight: Sight, at: float) -> None:
        """Notes a sight of it that has come at a time."""
        if sight.flight:
            self.flight, self.flight_at = sight.flight, at
        used, lived = self._used
        if sight.lived - lived >= COUNTED:
            self.cpu = max(0.0, sight.cpu - used) / (sight.lived - lived)
            self._used = sight.cpu, sight.lived
        if sight.stacks:
            self.sight = sight
        self.seen, self.seen_at = sight, at

    def describe(self, description: side.Described, at: float) -> None:
        """Notes a description of itself that it has given at a time."""
        self.described, self.described_at = description, at

    def incarnation_at(self, seq: int, rank: int, now: int) -> int:
        """Returns which of the workers in a peer's place its command ``seq`` was issued for, where ``now`` is there."""
        return next((former for number, peer, former in self.told_again if peer == rank and seq < number), now)

    @property
    def breakpoint(self) -> StoppedFunction | None:
        """The function that waits at a breakpoint for its user, the first one of several; None where none does."""
        return next((stop for stop in list(self.stops.values()) if stop.state != "steps"), None)

    @property
    def at_breakpoint(self) -> str:
        """The words for that; "" where none does."""
        stop = self.breakpoint
        return "" if stop is None else f"it is at a breakpoint in {stop.what}, {stop.position}"

    def lose(self, error: NodeLost) -> None:
        """Notes that the worker is gone."""
        self.lost = error
        self.stops = {}
        self.become(Life.LOST)
