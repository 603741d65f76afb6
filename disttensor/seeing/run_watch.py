"""Watches a run for a report, beside its events: memory over time, the lines that hold it, slow nodes, output.

    the thread that flushes --> RunWatch.look --> nodes are asked how they are, and what the last ones said is kept

It is a word to each node by its side channel, every half second at first; nothing is done per command.
"""

from __future__ import annotations

import math
import threading
from contextlib import suppress

from ..runtime.master.connection import Life
from ..runtime.protocol import codec
from ..runtime.protocol import commands as c
from ..runtime.protocol.errors import DisttensorError, NodeLost
from ..session.holdings import by_line
from ..session.session import Session
from .run_report import MEMORY, MemorySample, RunSeen, cut, thinned
from .slow_watch import SlowNodes
from .status import SlowStatus

#: Seconds between two questions to nodes at first, and between two looks whether they have answered.
EVERY, LOOK = 0.5, 0.05
#: Seconds in which nodes answer the last one, and in which a launcher says what they have printed.
ANSWER, OUTPUT = 0.5, 1.0
#: The tensors of a node whose lines are looked for, and the last lines of output: of all nodes, and of each.
LARGEST, READ, KEPT = 1000, 400, 10


class RunWatch:
    """The watch over one session's nodes while a profile is recorded."""

    def __init__(self, session: Session) -> None:
        self._session, self._clock = session, session.link.clock
        self._lock = threading.Lock()
        self._every, self._asked, self._looked = EVERY, -math.inf, -math.inf
        self._open = set[int]()  #: the nodes that were asked, and have not answered yet
        self._memory: dict[int, list[MemorySample]] = {node.rank: [] for node in session.nodes}
        self._slow: dict[int, SlowStatus] = {}

    def begin(self) -> None:
        """Begins: the session's thread that flushes looks from now on."""
        self.look()
        idle = self._session.link.idle
        idle.looks = [*idle.looks, self.look]

    def stop(self) -> None:
        """Has that thread look no more. Calling it twice is fine."""
        idle = self._session.link.idle
        idle.looks = [look for look in idle.looks if look != self.look]

    def look(self) -> None:
        """Keeps what nodes have said, and asks them again, if it is time for that. To be called again and again."""
        now, link = self._clock.now(), self._session.link
        if now - self._looked < LOOK:
            return
        with self._lock:
            self._looked = now
            if self._open:
                link.roll_call.take_answers(self._session.nodes)
                self._keep()
            if now - self._asked >= self._every:
                self._asked, self._open = now, {*self._memory}
                link.roll_call.ask(self._session.nodes)

    def _keep(self) -> None:
        """Keeps what nodes have said since they were asked last."""
        for rank in [*self._open]:
            at = self._session.nodes[rank].connection
            if at.described is not None and at.described_at >= self._asked:
                held = sum(each.bytes for each in at.described.held)
                self._memory[rank].append(MemorySample(self._asked, held, 0 if at.seen is None else at.seen.rss))
                self._open.discard(rank)
        if any(len(samples) > 2 * MEMORY for samples in self._memory.values()):
            self._every *= 2
            self._memory = {rank: thinned(samples, MEMORY) for rank, samples in self._memory.items()}
        self._slow.update((row.node, row) for row in self._session.part(SlowNodes).rows)

    def seen(self, complete: bool) -> RunSeen:
        """Ends the watch, and returns what was seen. ``complete``: all that was issued is done, so that nodes may be
        asked what they hold by commands."""
        self.stop()
        session = self._session
        with self._lock:
            self._asked, self._open = self._clock.now(), {*self._memory}
            if not session.link.closed:
                session.link.roll_call.refresh(session.nodes, ANSWER)
            self._keep()
        memory = {rank: samples for rank, samples in self._memory.items() if samples}
        found = RunSeen(memory, slow=[str(row) for _, row in sorted(self._slow.items())], output=self._output())
        if complete and not session.link.closed:
            for node in session.nodes:
                if node.rank in self._memory and node.life is Life.THERE:
                    with suppress(NodeLost):
                        self._ask_holder(node.rank, found)
        return found

    def _ask_holder(self, rank: int, found: RunSeen) -> None:
        session = self._session
        session.link.sender.flush_all()  # frees ride at the end of messages: those of before come first
        place = session.places.at(rank)
        told = session.ask(place, c.MemoryFigures, lambda id: c.MemoryStats(id, place.name, "", LARGEST), None)
        refs = {each.ref for each in told.holdings.largest}
        found.holds[rank] = by_line(told.holdings, session.nodes[rank].makers(refs))

    def _output(self) -> dict[int, list[str]]:
        launcher, found = self._session.launcher, dict[int, list[str]]()
        if launcher is not None:
            with suppress(DisttensorError, TimeoutError):
                read = launcher.read_output(list(self._memory), -READ, OUTPUT)
                for _, rank, text in () if read is None else read.lines:
                    found.setdefault(rank, []).append(cut(codec.one_line(text)))
        return {rank: lines[-KEPT:] for rank, lines in found.items()}
