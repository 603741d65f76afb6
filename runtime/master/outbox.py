"""The outbox of a node: its own queue of commands, the messages that go to it, and what of them it has done. No I/O."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from ..process.flight import SENT, Trail
from ..protocol import codec
from ..protocol import commands as c
from ..protocol.errors import DisttensorError, NodeLost
from .command_queue import CommandQueue, next_threshold
from .failures import Site, line_of
from .history import KEPT, to_keep

#: The window: the most commands, and bytes of them, in flight per node. A full one blocks the issuing thread.
MAX_COMMANDS = 10_000
MAX_BYTES = 64 << 20
#: The least seconds between two marks of how many commands had been sent by then.
MARKED = 0.1
#: The least share of the time since the oldest mark that lies between two: so they stay few.
SHARE = 0.01
#: A number that takes as many bytes as any: a piece fits a message whatever its number will be.
LONGEST = 1 << 62
#: The bytes of a message that is made of several pieces.
MAX_JOINED = codec.MAX_MESSAGE // 2

#: The record of commands that were sent: the number after the last one, their size, their sites, a message of them or a
#: shorter one.
_Record = tuple[int, int, list[Site | None], bytes]
#: Commands of a message, or of a part of one: encoded, their sites, and encoded as they are to be kept.
Piece = tuple[bytes, list[Site | None], bytes]


class Outbox(CommandQueue):
    """The queue of one node, and the count of commands that it has been sent and has done."""

    __slots__ = (
        "_flight",
        "_flight_bytes",
        "_marks",
        "_past",
        "done",
        "first",
        "flush_with",
        "pieces",
        "rank",
        "sent",
        "trail",
        "waiting",
    )

    def __init__(self, rank: int, blocking: bool = False) -> None:
        super().__init__((rank,), blocking)
        self.rank = rank
        #: outboxes that must be flushed together with this one: an unsent collective spans their nodes
        self.flush_with: set[Outbox] = set()
        self.ready: deque[bytes] = deque()  #: messages that count as sent; the link sends them, oldest first
        self.sent = 0  #: commands sent, to all of the node's connections; the number of the next one
        self.pieces: deque[Piece] = deque()
        self.waiting = 0
        self.trail = Trail()  #: the flight record of what was sent to it and heard of it
        self.begin_connection()

    def begin_connection(self) -> None:
        """Begins the record of what a new connection is sent. Numbers go on, so that each names one connection."""
        self.first = self.sent  #: the number of the connection's first command
        self.done = self.sent  #: commands that are done: those that it has reported, and all of former connections
        self._flight: deque[_Record] = deque()  #: messages in flight
        self._flight_bytes = 0
        self._marks: deque[tuple[float, int]] = deque()  #: times, and how many commands had been sent by then
        self._past: deque[_Record] = deque()  #: those before them, while they have some of the last KEPT commands

    def resume(self, known: Sequence[c.Command]) -> None:
        """Has commands leave again, by a new connection: first those of what it is to know."""
        self.queue[:0] = [each for command in known for each in (command, None)]
        self.reopen()

    @property
    def members(self) -> Sequence[Outbox]:
        return (self,)

    def pack(self) -> None:
        if self.overlaps:
            super().pack()
            return
        # the same in one function, as every question waits for it
        if self.dead or self.unheld:
            self._queue_frees(self.take_dead())
        n = len(self.queue)
        if n:
            first, queue = self.sent, self.queue
            messages, unsendable = packed(first, queue[:n:2], queue[1:n:2], None)  # type: ignore[arg-type]
            for message, record in messages:
                self._flight.append(record)
                self._flight_bytes += len(message)
                self.ready.append(message)
            self.sent = first + n // 2
            self.moved += n // 2
            del queue[:n]
            if unsendable is not None:
                self.unsendable = unsendable
            self.set_flush_threshold(next_threshold(self))

    def _deliver(self, commands: list[c.Command], sites: list[Site | None]) -> None:
        pieces, unsendable = in_pieces(commands, sites, self.unsendable)
        if unsendable is not None:
            self.unsendable = unsendable
        self.add_pieces(pieces, len(commands))

    def add_pieces(self, pieces: Sequence[Piece], count: int) -> None:
        """Takes ``count`` commands that are to be sent next, which other nodes may get, too."""
        self.pieces += pieces
        self.waiting += count

    def join(self, joints: Joints) -> None:
        """Makes messages of the pieces, as few as may be: a script that alternates between queues has packed many."""
        for message, record in joints.of(self.sent, list(self.pieces)):
            self.sent, nbytes, _, _ = record
            self._flight.append(record)
            self._flight_bytes += nbytes
            self.ready.append(message)
        self.waiting = 0
        self.pieces.clear()

    def acknowledge(self, done: int) -> None:
        """Notes that the node has applied ``done`` commands. Earlier commands need no site any more."""
        if done > self.done:
            self.done = done
        flight, past = self._flight, self._past
        while flight and flight[0][0] <= done:
            record = flight.popleft()
            self._flight_bytes -= record[1]
            past.append(record)
        forgotten = self.sent - KEPT
        while past and past[0][0] <= forgotten:
            past.popleft()

    def mark(self, now: float) -> None:
        """Notes how many commands have been sent by now, for ``oldest``. To be called when some may have been."""
        marks = self._marks
        while marks and marks[0][1] <= self.done:
            marks.popleft()
        sent = marks[-1][1] if marks else self.done
        if self.sent > sent and (not marks or now - marks[-1][0] >= max(MARKED, SHARE * (now - marks[0][0]))):
            marks.append((now, self.sent))

    def oldest(self, done: int, now: float) -> float:
        """Returns how long ago the oldest command was sent that is not done, ``done`` being those that are; 0 where all
        are, or that is not known yet. It may be more by a tenth of a second, or by a hundredth of the time since the
        oldest mark."""
        return next((now - at for at, sent in list(self._marks) if sent > done), 0.0)

    @property
    def left(self) -> bool:
        return bool(self.pieces or self.ready)

    @property
    def there(self) -> bool:
        """Returns whether the node is not lost."""
        return self.lost is None

    @property
    def full(self) -> bool:
        """Returns whether the window is full. Much is unsent only while a connection has ended and is not explained."""
        unsent = len(self.queue) // 2
        return max(self.sent + self.waiting - self.done, unsent) > MAX_COMMANDS or self._flight_bytes > MAX_BYTES

    @property
    def idle(self) -> bool:
        """True when the node has nothing to do but perhaps the command that it is answering."""
        return self.sent - self.done <= 1

    def site(self, seq: int) -> Site | None:
        """Returns the site where command ``seq`` was issued, while it is in flight."""
        for end, _, sites, _ in self._flight:
            if end - len(sites) <= seq < end:
                return sites[seq - end]
        return None

    def leaving(self) -> tuple[int, list[Site | None]]:
        """Returns the number of the first command of the oldest message that is ``ready``, and its commands' sites."""
        end, _, sites, _ = self._flight[-len(self.ready)]
        return end - len(sites), sites

    def record_leaving(self, at: float) -> None:
        """Notes in the flight record that the oldest message that is ``ready`` leaves."""
        ready, trail = self.ready, self.trail
        end, _, sites, _ = self._flight[-len(ready)]
        count, slot = len(sites), trail.slot()
        trail.lines[slot >> 5] = sites[0] or next(filter(None, sites), None)
        trail.write(slot, at, end - count, len(ready[0]), 0.0, count, SENT)

    def running(self) -> Site | None:
        """Returns the site of the oldest command that the node has not reported, of those that a line issued."""
        flying = (
            site
            for end, _, sites, _ in self._flight
            for seq, site in enumerate(sites, end - len(sites))
            if seq >= self.done
        )
        return next((site for site in flying if site is not None), None)

    def command(self, number: int) -> tuple[c.Command, Site | None] | None:
        """Returns the command of this number and its site, if it is in flight or among the last KEPT: one message is
        decoded for it. That of a long message is without its data."""
        for end, _, sites, kept in reversed([*self._past, *self._flight]):
            if end - len(sites) <= number < end:
                return codec.decode_batch(kept).commands[number - end], sites[number - end]
        return None

    def last_messages(self) -> Iterator[tuple[int, list[tuple[c.Command, Site | None]]]]:
        """Yields the messages that the node was sent last, with at least KEPT commands, the newest first: the number of
        the first command, and all with their sites. Those of long messages are without their data."""
        for first, sites, kept in self.last_records():
            yield first, list(zip(codec.decode_batch(kept).commands, sites, strict=True))

    def last_records(self) -> Iterator[tuple[int, list[Site | None], bytes]]:
        """Yields the same, as it is kept: the number of the first command, the sites, and the message."""
        for end, _, sites, kept in reversed([*self._past, *self._flight]):
            yield end - len(sites), sites, kept

    def withdraw_unsent(self) -> None:
        """Forgets what has not left: the node is gone."""
        for _ in range(len(self.ready)):
            self._flight.pop()
        self._forget_unsent()

    def _forget_unsent(self) -> None:
        self.ready.clear()
        self.pieces.clear()
        self.waiting = 0

    def lose(self, error: NodeLost) -> None:
        """Notes that the node is lost: nothing is queued for it any more, and every issuing thread learns of it."""
        self.lost = error
        self.end()
        self.discard()
        self.flush_with.clear()
        self._forget_unsent()
        self._past += self._flight
        self._flight.clear()
        self._flight_bytes = 0

    def __repr__(self) -> str:
        state = "lost" if self.lost else f"queued={len(self.queue) // 2} inflight={self.sent - self.done}"
        return f"<Outbox node={self.rank} {state} dead={len(self.dead)}>"


def packed(
    first: int, commands: list[c.Command], sites: list[Site | None], unsendable: DisttensorError | None
) -> tuple[list[tuple[bytes, _Record]], DisttensorError | None]:
    """Encodes commands, numbered from ``first``, as messages with their records. Returns them, and the error of a
    command that cannot be sent, else ``unsendable``."""
    why = ""
    try:
        message = codec.encode(c.Batch(first, commands))  # type: ignore[arg-type]  # a list encodes as a tuple
        if len(message) > codec.MAX_MESSAGE:
            why = f"its {len(message)} bytes are over the limit of {codec.MAX_MESSAGE}"
    except (TypeError, ValueError, OverflowError) as e:
        why = str(e)
    if why and len(commands) == 1:
        # the other commands go on, in their places; the thread that flushes gets the error
        unsendable = DisttensorError(f"{line_of(sites[0])}: a command can't be sent: {why}")
        commands = [c.Free(0, ())]
        message = codec.encode(c.Batch(first, (c.Free(0, ()),)))
    elif why or len(commands) > MAX_COMMANDS:
        half = len(commands) // 2
        before, unsendable = packed(first, commands[:half], sites[:half], unsendable)
        behind, unsendable = packed(first + half, commands[half:], sites[half:], unsendable)
        return before + behind, unsendable
    return [(message, (first + len(sites), len(message), sites, to_keep(first, message, commands)))], unsendable


def in_pieces(
    commands: list[c.Command], sites: list[Site | None], unsendable: DisttensorError | None
) -> tuple[list[Piece], DisttensorError | None]:
    """Encodes commands as pieces of messages; else as ``packed``."""
    pieces = []
    messages, unsendable = packed(LONGEST, commands, sites, unsendable)
    for message, (end, _, its, kept) in messages:
        body = codec.body(message, end - len(its), len(its))
        pieces.append((body, its, body if kept is message else codec.body(kept, end - len(its), len(its))))
    return pieces, unsendable


class Joints:
    """Joins pieces to messages. Nodes of a mesh mostly have the same ones, which are joined once, and encoded once for
    all that were sent as many commands before."""

    def __init__(self) -> None:
        self._pieces: list[Piece] = []
        self._joined: list[Piece] = []
        self._first = -1  #: the number of the first command of ``_messages``
        self._messages: list[tuple[bytes, _Record]] = []

    def of(self, first: int, pieces: list[Piece]) -> list[tuple[bytes, _Record]]:
        """Returns the messages of all these commands, the first of which has this number, and their records."""
        if pieces != self._pieces:
            self._first = -1
            if len(pieces) == 1:  # as of a question
                body, sites, kept = pieces[0]
                self._joined = [(body, sites, codec.batch(0, len(sites), (kept,)))]
            else:
                self._join_all(pieces)
            self._pieces = pieces
        if first != self._first:
            self._messages = self._numbered(first)
            self._first = first
        return self._messages

    def _join_all(self, pieces: list[Piece]) -> None:
        self._joined = []
        start, size, count = 0, 0, 0
        for i, (body, sites, _) in enumerate(pieces):
            if i > start and (size + len(body) > MAX_JOINED or count + len(sites) > MAX_COMMANDS):
                self._joined.append(self._join(pieces[start:i]))
                start, size, count = i, 0, 0
            size, count = size + len(body), count + len(sites)
        self._joined.append(self._join(pieces[start:]))

    def _numbered(self, first: int) -> list[tuple[bytes, _Record]]:
        messages = list[tuple[bytes, _Record]]()
        for body, sites, kept in self._joined:
            message = codec.batch(first, len(sites), (body,))
            first += len(sites)
            messages.append((message, (first, len(body), sites, kept)))
        return messages

    @staticmethod
    def _join(pieces: list[Piece]) -> Piece:
        bodies, sites, kept = zip(*pieces, strict=True)
        its = sites[0] if len(sites) == 1 else [site for each in sites for site in each]
        return b"".join(bodies), its, codec.batch(0, len(its), kept)
