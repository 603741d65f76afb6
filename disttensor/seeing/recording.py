"""Records the events of a profile: of the script's end, and of each node's, in rings that forget the oldest.

    script  seam (process/observing.py)  --> Recording's listeners   --> rings here
            its queues, notes            --> the time and line of some commands, by thread
    node    its seam --> node/gathering.py, a ring there --> LookingIn.fetch, by the side channel --> NodeRecord
            its loop --> the time at which each command begins, by the same way

Nothing is computed while it records: what belongs to what is found afterwards (timed_commands.py, arrows.py,
chrome_trace.py). Of each command only the time is noted on its node, as anything more would cost too much, and in the
script that of every sixteenth: all others are issued between two of these.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from threading import get_ident
from time import time_ns
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from ..dispatch.call_site import here
from ..runtime.master.failures import Site, short_line
from ..runtime.master.link import Link
from ..runtime.master.looking_in import COMMANDS, ROOM, CommandTimes, NodeEvent, NodeEvents
from ..runtime.process.observing import IssueNotes, MessageSent, NodeGone, Point, TransferDone, WaitEnded
from ..runtime.process.signals import uninterrupted
from ..runtime.protocol import commands as c
from ..runtime.protocol import side
from ..runtime.protocol.errors import DisttensorError
from . import regions
from .timed_commands import IssuedCommand, NamedCommands, SentMessage, issued_commands, node_events, to_keep

#: The points of nodes at which a profile listens.
POINTS: tuple[side.Point, ...] = ("collective", "function", "graph", "timed", "transferred")
#: The most bytes of messages that are kept, without the functions and other data that travel in them.
MOST_BYTES = 64 << 20
#: The number of commands sent between two looks whether more is kept than need be.
TRIMMED = COMMANDS // 4
#: Seconds in which a node says what it has recorded. Its side channel answers whatever the node is at.
ANSWER = 5.0
#: How often each node is asked for the time at either end of a profile: the shortest way there and back counts.
TRIES = 4

T = TypeVar("T")


class Waited(NamedTuple):
    """A wait of a thread for a node, with the line."""

    at: float
    began: float
    node: int
    request: int  #: the request that it waited for; below -1 a transfer's number, negated
    site: Site | None
    thread: int


class Named(NamedTuple):
    """A part of the script that has a name."""

    at: float
    began: float
    name: str
    thread: int


class Loss(NamedTuple):
    """The loss of a node."""

    at: float
    node: int
    why: str


class EventRing(Generic[T]):
    """The last events of one kind: ``room``, and those since the last trim. Any thread may append."""

    def __init__(self, room: int = ROOM) -> None:
        self._kept: list[T] = []
        self._room, self._dropped = room, 0
        #: keeps an event; a list's own, as a step may have some
        self.append: Callable[[T], None] = self._kept.append

    def trim(self) -> None:
        """Forgets the oldest events, where there are more than it has room for. To be called now and then."""
        over = len(self._kept) - self._room
        if over > 0:
            del self._kept[:over]
            self._dropped += over

    def kept_events(self) -> tuple[list[T], int]:
        """Returns the events, and how many were forgotten."""
        self.trim()
        return list(self._kept), self._dropped


class MessageRing:
    """The last messages, with at most ``COMMANDS`` and ``MOST_BYTES``. Its caller holds the link's lock."""

    def __init__(self, room: int = COMMANDS, most: int = MOST_BYTES) -> None:
        self._kept: deque[SentMessage] = deque()
        self._room, self._most = room, most
        self._commands = self._bytes = self._dropped = 0

    def append(self, sent: SentMessage) -> None:
        self._kept.append(sent)
        self._commands = commands = self._commands + len(sent.sites)
        self._bytes = size = self._bytes + len(sent.message)
        if commands > self._room or size > self._most:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        while self._commands > self._room or self._bytes > self._most:
            old = self._kept.popleft()
            self._commands -= len(old.sites)
            self._bytes -= len(old.message)
            self._dropped += len(old.sites)

    def kept_events(self) -> tuple[list[SentMessage], int]:
        """Returns the messages, and how many commands were in those that were forgotten."""
        return list(self._kept), self._dropped


@dataclass
class NodeRecord:
    """The events of one node, and its clock."""

    rank: int
    host: str = ""
    device: str = "cpu"
    events: list[NodeEvent] = field(default_factory=list)
    times: list[CommandTimes] = field(default_factory=list)  #: of the commands that are not among the events yet
    dropped: int = 0  #: events that are missing, as there were more than the node keeps
    ahead: float = 0.0  #: seconds by which its clock is ahead of the script's
    within: float = float("inf")  #: by how many seconds that may be wrong
    shares_clock: bool = False  #: whether that is the script's
    missing: str = "it was not asked"  #: why its events could not be had; "" where they could


@dataclass
class ProfileRecord:
    """All that was recorded. Times of the script's events are by its clock, those of a node's by the node's."""

    began: float
    ended: float
    wall: int  #: nanoseconds since 1970 at the begin
    issued: Sequence[IssuedCommand]
    sent: Sequence[SentMessage]
    waits: Sequence[Waited]
    transfers: Sequence[TransferDone]  #: of the script
    losses: Sequence[Loss]
    regions: Sequence[Named]
    nodes: dict[int, NodeRecord]
    last: dict[int, int]  #: by node: the number of the first command that was sent after the end
    threads: dict[int, str]  #: the names of the script's threads, by identifier; "" is the main one
    dropped: dict[str, int] = field(default_factory=dict)  #: events of the script that were forgotten, by kind


class Looks(Protocol):
    """The way to nodes' events: ``LookingIn``."""

    def watch(self, ranks: Iterable[int], points: Collection[Any], room: int = ROOM, commands: int = 0) -> None: ...

    def fetch(self, rank: int, timeout: float = ANSWER) -> NodeEvents: ...


class Recording:
    """A recording of one session's events, from ``begin`` to ``end``."""

    def __init__(self, link: Link, looking: Looks | None = None) -> None:
        """``looking``: the way to nodes' events, where it is not the link's own."""
        self._link = link
        self._looking: Looks = link.looking if looking is None else looking
        self._issued, self._untrimmed = IssueNotes(COMMANDS), TRIMMED
        self._waits, self._transfers = EventRing[Waited](), EventRing[TransferDone]()
        self._losses, self._regions = EventRing[Loss](), EventRing[tuple[float, float, str, int]]()
        self._sent = MessageRing()
        #: a part of the script that has a name begins or ends now: what was issued is in none that begin, and in those
        #: that end
        self.note_edge = link.sender.lines_noter(self._issued)
        self._nodes: dict[int, NodeRecord] = {}
        self._began = self._ended = 0.0
        self._wall = 0
        self._last: dict[int, int] = {}
        self._before: dict[int, list[SentMessage]] = {}  #: by node: what was sent last before the begin
        self._defined: dict[int, dict[int, c.Define]] = {}  #: by node: the templates that it knew then
        seam = link.seam
        self._listeners: list[tuple[Point[Any], Callable[[Any], None]]] = [
            (seam.sent, self._note_sent),
            (seam.waited, self._note_waited),
            (seam.transferred, self._transfers.append),
            (seam.lost, self._note_lost),
        ]

    def begin(self) -> None:
        """Has the script and the nodes note what happens. A node that does not answer notes it as soon as it can.

        Raises DisttensorError for nodes that are threads of the script, which can't be watched.
        """
        link = self._link
        ranks = [node.rank for node in link.nodes if node.lost is None]
        self._looking.watch(ranks, POINTS, ROOM, COMMANDS)
        for rank in ranks:
            hello = link.nodes[rank].said_hello
            devices = link.nodes[rank].devices
            self._nodes[rank] = NodeRecord(
                rank, "" if hello is None else hello.host, devices[1:2][0] if devices[1:] else "cpu"
            )
            self._ask_time(self._nodes[rank])
        link.sender.flush_all()  # each command that is sent from now on is issued from now on
        self._add_listeners()

    def _ask_time(self, node: NodeRecord) -> None:
        """Asks a node what time it is; drops what it has noted so far."""
        with suppress(DisttensorError, TimeoutError):  # what is the matter with it is noted at the end
            for _ in range(TRIES):
                _keep_clock(node, self._looking.fetch(node.rank, ANSWER))

    @uninterrupted
    def _add_listeners(self) -> None:
        link = self._link
        with link.lock:
            for rank in self._nodes:
                node = link.nodes[rank]
                self._defined[rank] = dict(node.defined)
                kept = [SentMessage(0.0, rank, *record) for record in node.outbox.last_records()]
                self._before[rank] = kept[::-1]
            for point, listener in self._listeners:
                point.add(listener)
            link.note_issued(self._issued)
            regions.recorder = self
            self._began, self._wall = link.clock.now(), time_ns()

    @uninterrupted
    def stop(self) -> None:
        """Has the script note nothing more. Calling it twice is fine."""
        link = self._link
        with link.lock:
            for point, listener in self._listeners:
                point.remove(listener)
            if link.seam.notes is self._issued:
                link.note_issued(None)
            if regions.recorder is self:
                regions.recorder = None
            if not self._ended:
                self._ended = link.clock.now()
                self._last = {node.rank: node.outbox.sent for node in link.nodes}

    def collect(self) -> None:
        """Fetches what nodes have noted, and has them note nothing more. Of one that can't say it the reason is kept.

        Each is asked in pieces, beside the commands: what the node is at does not matter.
        """
        for rank, node in self._nodes.items():
            try:
                for _ in range(TRIES):
                    found = self._looking.fetch(rank, ANSWER)
                    node.events += found.events
                    node.times += found.times
                    node.dropped += found.dropped
                    _keep_clock(node, found)
                node.missing = ""
            except (DisttensorError, TimeoutError) as e:
                node.missing = str(e).partition("\n")[0]

    def end(self) -> None:
        """Has nobody note anything more. Calling it twice is fine."""
        self.stop()
        for rank in self._nodes:
            with suppress(DisttensorError):  # it is lost, or all is over
                self._looking.watch([rank], ())

    def record(self) -> ProfileRecord:
        """Returns what was recorded."""
        dropped = dict[str, int]()
        names = {each.ident: each.name for each in threading.enumerate() if each.ident is not None}
        names[threading.main_thread().ident or 0] = ""
        sent, dropped["sent"] = self._sent.kept_events()
        for node in self._nodes.values():
            self._name_commands(node, sent)
        waits, dropped["waits"] = self._waits.kept_events()
        dropped["issued"] = dropped["sent"]
        transfers, dropped["transfers"] = self._transfers.kept_events()
        losses, dropped["losses"] = self._losses.kept_events()
        ended, dropped["regions"] = self._regions.kept_events()
        named = [Named(*each) for each in ended]
        pauses = [(it.thread, it.at) for it in waits]
        pauses += [(it.thread, edge) for it in named for edge in (it.began, it.at)]
        issued = issued_commands(self._issued, sent, pauses, self._began)
        return ProfileRecord(
            self._began, self._ended or self._link.clock.now(), self._wall, issued, sent, waits, transfers, losses,
            named, self._nodes, self._last, names, dropped,
        )  # fmt: skip

    def _name_commands(self, node: NodeRecord, sent: Iterable[SentMessage]) -> None:
        """Makes events of the times that a node has told of."""
        defined = self._defined.get(node.rank, {}) | self._link.nodes[node.rank].defined
        messages = [*self._before.get(node.rank, ()), *(each for each in sent if each.node == node.rank)]
        times, node.times = node.times, []
        node.events += node_events(node.rank, times, NamedCommands(messages, defined))
        node.events.sort(key=lambda event: event.at)

    # ---- listeners ---------------------------------------------------------------------------------------------------

    def _note_sent(self, event: MessageSent) -> None:
        self._sent.append(to_keep(event))
        self._untrimmed -= len(event.sites)
        if self._untrimmed < 0:
            self._untrimmed = TRIMMED
            self._issued.drop_oldest()
            for ring in (self._waits, self._transfers, self._losses, self._regions):
                ring.trim()

    def _note_waited(self, event: WaitEnded) -> None:
        self._waits.append(Waited(event.at, event.began, event.node, event.request, here(), get_ident()))

    def note_region(self, began: float, name: str) -> float:
        """Keeps a part of the script that has a name, and ends now in this thread. Returns the time."""
        at = self.note_edge()
        self._regions.append((at, began, name, get_ident()))  # a plain tuple: a Named costs twice as much
        return at

    def _note_lost(self, event: NodeGone) -> None:
        self._losses.append(Loss(event.at, event.node, str(event.error).partition("\n")[0]))


class LineNames:
    """The lines of sites in words, each of which is found once."""

    def __init__(self) -> None:
        self._found: dict[tuple[int, int], str] = {}

    def of(self, site: Site | None) -> str:
        """Returns a line such as "train.py:12"; "" where it is not known. The site's code has to stay."""
        if site is None:
            return ""
        key = id(site[0]), site[1]  # by id: hashing a code object hashes its bytecode each time
        found = self._found.get(key)
        if found is None:
            found = self._found[key] = short_line(site)
        return found


def _keep_clock(node: NodeRecord, found: NodeEvents) -> None:
    """Keeps what an answer says of a node's clock, if it came faster than others."""
    if found.within < node.within:
        node.ahead, node.within, node.shares_clock = found.ahead, found.within, found.shares_clock
