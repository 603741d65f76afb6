"""The master's record of one node: its queue, what it was told for good, and the connection that it has now.

A node is its rank: places, metas, queues of meshes and the logs of graphs name it for as long as the session lasts. The
worker process in its place is its ``connection``. When one is lost, another one may come (``Link.reconnect``), which
has none of the tensors: refs are never reused, and neither are numbers of commands, so that each names one incarnation.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from itertools import count

from ..protocol import commands as c
from ..protocol.errors import DisttensorError, NodeLost
from ..protocol.traits import request_of
from .connection import Life, NodeConnection, Progress
from .failures import Site
from .history import KEPT, SHOWN, Sent, doing, made_by
from .home import Home
from .outbox import Outbox

#: The fewest commands whose mean time says something of a node.
PACED = 100


class Node(Home):
    """The master's record of one worker process. ``Link.nodes`` has the nodes by rank."""

    outbox: Outbox

    def __init__(self, rank: int, blocking: bool = False) -> None:
        """``blocking``: every command is flushed at once (DISTTENSOR_LAUNCH_BLOCKING)."""
        super().__init__(Outbox(rank, blocking), count())
        self.rank = rank
        self.connection = NodeConnection(rank)
        self.former: list[NodeConnection] = []  #: the connections before, which are lost
        #: what else its connection is to know for as long as the script has it, by what it is: streams, graphs
        self.standing: dict[object, tuple[c.Command, ...]] = {}

    def __repr__(self) -> str:
        if self.said_hello is None:
            return f"<Node {self.rank} {self.life.value}>"
        state = "" if self.life is Life.THERE else f" {self.life.value}"
        state += f" incarnation={self.connection.number}" if self.former else ""
        if self.life is not Life.LOST:
            state += f" gpu={len(self.devices) - 1} queued={len(self.outbox.queue) // 2} inflight={self.behind}"
        return f"<Node {self.rank} {self.hello.host}:{self.hello.pid}{state}>"

    def lose(self, error: NodeLost) -> None:
        """Notes that the node's connection is gone: nothing is queued for it any more."""
        self.outbox.lose(error)
        self.connection.lose(error)

    def begin_connection(self) -> NodeConnection:
        """Begins another connection in the place of one that is lost. Nothing is queued for it before ``resume``."""
        self.former.append(self.connection)
        self.outbox.begin_connection()
        self.connection = NodeConnection(self.rank, len(self.former), self.outbox.first)
        return self.connection

    def incarnation(self, number: int) -> NodeConnection:
        """Returns the connection of this number."""
        return self.former[number] if number < len(self.former) else self.connection

    def resume(self, before: int, state: Sequence[c.Command]) -> None:
        """Has commands leave again, by a connection that has said hello: first what it is to know, and the ``state`` of
        its process. ``before``: the ref below which all is gone. The caller holds the link's lock, and the home's."""
        bounds = [*(each.gone_before for each in self.former[1:]), before]
        self.connection.gone_before = before
        known: dict[int, c.Define] = dict(self.defined)
        standing: list[c.Command] = []
        for command in (each for commands in self.standing.values() for each in commands):
            if isinstance(command, c.Define):
                known.setdefault(command.template, command)
            else:
                standing.append(command)
        forgotten = tuple(known.keys() - self.defined.keys())  # graphs keep them
        self.outbox.resume(
            [
                *(c.Again(self.rank, number, bound) for number, bound in enumerate(bounds, 1)),
                *state,
                *known.values(),
                *standing,
                *([c.Forget(forgotten)] if forgotten else ()),
            ]
        )

    @property
    def progress(self) -> Progress:
        """How far its connection has come, as far as it has reported that."""
        connection = self.connection
        return Progress(self.rank, connection.number, self.outbox.done, self.outbox.sent)

    @property
    def life(self) -> Life:
        """How far its connection is between its start and its loss."""
        return self.connection.life

    @property
    def said_hello(self) -> c.Hello | None:
        """The hello of its connection, once it has arrived."""
        return self.connection.hello

    @property
    def hello(self) -> c.Hello:
        """The node's hello; while another worker comes in its place, that of the former one. Raises DisttensorError
        until one has arrived."""
        if self.said_hello is None:
            if (former := self.last_hello) is not None:
                return former
            raise DisttensorError(f"node {self.rank} has not said hello")
        return self.said_hello

    @property
    def last_hello(self) -> c.Hello | None:
        """The last hello of any of its connections."""
        connections = (self.connection, *reversed(self.former))
        return next((each.hello for each in connections if each.hello is not None), None)

    @property
    def lost(self) -> NodeLost | None:
        """The error that says why the node is gone, once it is."""
        return self.outbox.lost

    @property
    def _former_devices(self) -> tuple[str, ...]:
        return ("cpu",) if self.last_hello is None else self.last_hello.devices

    @property
    def behind(self) -> int:
        """The number of commands that it was sent and has not reported."""
        return self.outbox.sent - self.outbox.done

    @property
    def devices(self) -> tuple[str, ...]:
        """The names of its devices, "cpu" first; only "cpu" for a node that was lost before its first hello."""
        return self.said_hello.devices if self.said_hello is not None else self._former_devices

    @property
    def pace(self) -> float:
        """The seconds that it has worked for one command, on average; 0 where that can't be known."""
        done, busy = self.outbox.done - self.connection.first, self.connection.busy
        return busy / done if done >= PACED and 0 < busy < math.inf else 0.0

    def set_note(self, words: str) -> None:
        """Has the failures of what is issued from now on say what the script was at, until the next note; "" says
        nothing. The caller holds the link's lock."""
        outbox = self.outbox
        queued = sum(len(queue.queue) // 2 for queue in (outbox, *outbox.overlaps))
        self.connection.notes.append((outbox.sent + outbox.waiting + queued, words))

    def note_at(self, seq: int) -> str:
        """Returns what the script was at when it issued a command, in the words of a note; "" where there is none."""
        return next((words for first, words in reversed(self.connection.notes) if first <= seq), "")

    def command(self, number: int) -> Sent | None:
        """Returns a command that it was sent, by its number; None for one that is not kept."""
        found = self.outbox.command(number)
        return None if found is None else Sent(number, self.rank, *found, number < self.outbox.done, self.defined)

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
        rank, answered, defined = self.rank, self.connection.answered, self.defined
        for first, commands in self.outbox.last_messages():
            yield [
                Sent(n, rank, command, site, n < done or request_of(command) == answered, defined)
                for n, (command, site) in enumerate(commands, first)
            ]
