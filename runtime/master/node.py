"""The master's record of one node: its life, its hello, the commands queued for it, and what it was sent last.

The life of a node (`Life`), which the link changes under its lock:

    AWAITED        its hello has not arrived, and nothing may be sent to it
    THERE          its hello has arrived
    UNEXPLAINED    a connection of it has ended, and the launcher has not said why: nothing is sent to it, and what it
                   has still said counts
    LOST           it is gone, and ``lost`` says why

    AWAITED -> THERE                   its hello
    AWAITED, THERE -> UNEXPLAINED      the end of a connection, where there is a launcher to ask
    all -> LOST                        the end of its process, or of the launcher; an end that nobody has explained in
                                       time; a message that breaks the protocol; silence; ``kill``

While a session ends (``Link.closing``) no node becomes unexplained or lost.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from enum import Enum
from itertools import count

from ..host.launcher import Sight
from ..protocol import commands as c
from ..protocol.arguments import Addresses
from ..protocol.errors import DisttensorError, NodeLost
from ..protocol.traits import request_of
from .failures import Site
from .history import KEPT, SHOWN, Sent, doing, made_by
from .home import Home
from .outbox import Outbox

#: The fewest commands whose mean time says something of a node.
PACED = 100


class Life(Enum):
    """How far a node is between its start and its loss, as the master knows it."""

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


class Node(Home):
    """The master's record of one worker process. ``Link.nodes`` has the nodes by rank."""

    outbox: Outbox

    def __init__(self, rank: int, blocking: bool = False) -> None:
        """``blocking``: every command is flushed at once (DISTTENSOR_LAUNCH_BLOCKING)."""
        super().__init__(Outbox(rank, blocking), count())
        self.rank = rank
        self.life = Life.AWAITED
        self.said_hello: c.Hello | None = None
        self.unawaited: set[int] = set()  #: ids of requests that it may still answer, and nobody waits for
        self.repeated = 0  #: failures that it has told before
        self.sight: Sight | None = None  #: what it looked like from outside, when that was asked for last
        self.explained = 0.0  #: when somebody who waits was told what it is at
        #: its addresses in each of its data channels, by the channel's number
        self.addresses: dict[int, Addresses] = {}
        self.busy = 0.0  #: seconds for which it has worked until its last report, as it says
        self.answered = 0  #: the number of the last request that it has answered
        #: what the script was at when it issued a command and those behind it, in words; by the command's number
        self.notes: deque[tuple[int, str]] = deque(maxlen=KEPT)

    def __repr__(self) -> str:
        if self.said_hello is None:
            return f"<Node {self.rank} {self.life.value}>"
        state = "" if self.life is Life.THERE else f" {self.life.value}"
        if self.life is not Life.LOST:
            state += f" gpu={len(self.devices) - 1} queued={len(self.outbox.queue) // 2} inflight={self.behind}"
        return f"<Node {self.rank} {self.hello.host}:{self.hello.pid}{state}>"

    def become(self, life: Life) -> None:
        """Changes the node's life, if that is not what it is already."""
        if life is not self.life:
            if life not in CHANGES[self.life]:
                raise AssertionError(f"node {self.rank} is {self.life.value}, and can't become {life.value}")
            self.life = life

    def greet(self, hello: c.Hello) -> None:
        """Takes the node's hello, which may come after the end of another connection of it."""
        self.said_hello = hello
        if self.life is Life.AWAITED:
            self.become(Life.THERE)

    def lose(self, error: NodeLost) -> None:
        """Notes that the node is gone: nothing is queued for it any more."""
        self.outbox.lose(error)
        self.become(Life.LOST)

    @property
    def hello(self) -> c.Hello:
        """The node's hello. Raises DisttensorError until it has arrived."""
        if self.said_hello is None:
            raise DisttensorError(f"node {self.rank} has not said hello")
        return self.said_hello

    @property
    def lost(self) -> NodeLost | None:
        """The error that says why the node is gone, once it is."""
        return self.outbox.lost

    @property
    def behind(self) -> int:
        """The number of commands that it was sent and has not reported."""
        return self.outbox.sent - self.outbox.done

    @property
    def devices(self) -> tuple[str, ...]:
        """The names of its devices, "cpu" first; only "cpu" for a node that was lost before its hello."""
        return self.said_hello.devices if self.said_hello is not None else ("cpu",)

    @property
    def pace(self) -> float:
        """The seconds that it has worked for one command, on average; 0 where that can't be known."""
        done, busy = self.outbox.done, self.busy
        return busy / done if done >= PACED and 0 < busy < math.inf else 0.0

    def note(self, words: str) -> None:
        """Has the failures of what is issued from now on say what the script was at, until the next note; "" says
        nothing. The caller holds the link's lock."""
        outbox = self.outbox
        queued = sum(len(queue.queue) // 2 for queue in (outbox, *outbox.overlaps))
        self.notes.append((outbox.sent + outbox.waiting + queued, words))

    def noted(self, seq: int) -> str:
        """Returns what the script was at when it issued a command, in the words of a note; "" where there is none."""
        return next((words for first, words in reversed(self.notes) if first <= seq), "")

    def last_commands(self, most: int = KEPT) -> list[Sent]:
        """Returns the last commands that it was sent, ``most`` at most, the oldest first."""
        found: list[Sent] = []
        for sent in self._last(self.outbox.done):
            if len(found) >= most:
                break
            found[:0] = sent
        return found[-most:] if most else []

    def makers(self, refs: Collection[int]) -> dict[int, Site]:
        """Returns the lines of those of its last commands that made these tensors."""
        found: dict[int, Site] = {}
        for _, commands in self.outbox.last_messages():
            for command, site in commands:
                if site is not None:
                    found.update((ref, site) for ref in made_by(command, self.defined) if ref in refs)
        return found

    def last_words(self, running: int = -1, beside: Sequence[int] = ()) -> tuple[str, tuple[str, ...]]:
        """Returns what it was doing, in words that follow the cause of its end, and its last commands.

        ``running``: the number of the command whose function it was running, where that is known; ``beside``: those of
        the functions on its streams. Frees and the like, which no line has issued, are left out.
        """
        self.outbox.withdraw_unsent()
        # nodes tell these, and may tell anything
        running = running if running < self.outbox.sent else -1
        ran = {number for number in (running, *beside) if 0 <= number < self.outbox.sent}
        done = max(self.outbox.done, running)  # what came before the function is done
        found, first = list[Sent](), done
        for sent in self._last(done):
            found[:0] = [each for each in sent if each.counts]
            first = sent[0].number
            if first <= min(ran, default=done) and first <= done and len(found) >= SHOWN:
                break
        return doing(found, ran), tuple(map(str, found[-SHOWN:]))

    def _last(self, done: int) -> Iterator[list[Sent]]:
        """Yields what was sent, a message at a time, the newest first."""
        rank, answered, defined = self.rank, self.answered, self.defined
        for first, commands in self.outbox.last_messages():
            yield [
                Sent(n, rank, command, site, n < done or request_of(command) == answered, defined)
                for n, (command, site) in enumerate(commands, first)
            ]
