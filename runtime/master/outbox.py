"""The outbox of a node: its queue of commands. Decides when to flush and what goes into a message; does no I/O.

Issuing threads append without a lock: ``queue`` is a flat list (command, site, command, site, ...) and one
``extend`` of a pair is atomic. Finalizers append to ``dead`` in the same way. Every ref in ``dead`` had its last use
appended before, so a free that is appended for it now follows every use.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator
from operator import sub
from typing import Any

from ..process.signals import uninterrupted
from ..protocol import codec
from ..protocol import commands as c
from ..protocol.errors import DisttensorError, NodeLost
from .failures import Site, line_of
from .history import KEPT, to_keep
from .route import Tap

#: The window: the most commands, and bytes of them, in flight per node. A full one blocks the issuing thread.
MAX_COMMANDS = 10_000
MAX_BYTES = 64 << 20
#: Limits of a message's commands. The first message after a pause takes fewer, so that an idle node starts early.
MAX_BATCH = 128
MIN_BATCH = 2
#: The most refs in one Free; bounds its size below a message's limit whatever the distances.
MAX_FREE = 100_000


#: The number of commands between two sweeps of dead refs.
SWEEP = 16
#: Fewer dead refs than this are left to the end of the batch.
MIN_SWEEP = 4

#: The record of a message: the number after its last command, its size, the commands' sites, its bytes or shorter ones.
_Record = tuple[int, int, list[Site | None], bytes]


def _free(refs: list[int]) -> c.Free:
    """Makes a Free of sorted ``refs``."""
    return c.Free(refs[0], tuple(map(sub, refs[1:], refs)))


class Outbox:
    """The queue of one node, and the count of commands that it has been sent and has done."""

    def __init__(self, rank: int, blocking: bool = False) -> None:
        self.rank = rank
        self.queue: list[c.Command | Site | None] = []
        #: the object that issuing threads append to: the queue, or a Tap while one of them has a route. To be read into
        #: a local name first: `+=` on this attribute could undo a change that another thread's `add_route` just made
        self.commands: Any = self.queue
        self._routes = 0
        self.dead: list[int] = []
        #: refs that recordings and graphs hold, with the number of holders; and those of them that are dead otherwise
        self._holds: dict[int, int] = {}
        self._gone: set[int] = set()
        self._unheld: list[Iterable[int]] = []
        #: ``len(commands)`` at which an issuing thread has to check this outbox: to flush, or to sweep
        self.limit = 2
        #: ``len(commands)`` at which the thread has to flush. 0 makes each next append do so (a lost node)
        self.batch = 2
        #: re-entrant: the collector may run a finalizer that uses tensors while it is held
        self._taking = threading.RLock()
        #: outboxes that must be flushed together with this one: an unsent collective spans their nodes
        self.flush_with: set[Outbox] = set()
        self.ready: deque[bytes] = deque()  #: messages that count as sent; the link sends them, oldest first
        self.sent = 0  #: commands sent; the number of the next one
        self.done = 0  #: commands that the node has reported
        self.messages = 0  #: messages sent (for tests and status)
        self.bytes = 0  #: bytes sent
        self.lost: NodeLost | None = None
        self.unsendable: DisttensorError | None = None  #: a command that could not be sent; the link raises it
        self.blocking = blocking  #: every command is flushed at once (DISTTENSOR_LAUNCH_BLOCKING)
        self._flight: deque[_Record] = deque()  #: messages in flight
        self._flight_bytes = 0
        self._past: deque[_Record] = deque()  #: those before them, while they have some of the last KEPT commands

    def add_route(self, by: int) -> None:
        """Counts one thread more (or, with -1, one less) that has a route."""
        with self._taking:
            self._routes += by
            self.commands = Tap(self.rank, self.queue) if self._routes else self.queue

    def add(self, command: c.Command, site: Site | None = None) -> bool:
        """Appends a command; returns whether the caller has to flush. The hot path has this inlined."""
        commands = self.commands
        commands += (command, site)
        return len(commands) >= self.limit

    def pack(self) -> None:
        """Moves the queue to ``ready``, pending frees last. The caller holds the link's lock.

        Nothing has changed until all of it is packed, so that an error (no memory) loses no command.
        """
        self._queue_frees()
        n = len(self.queue)
        if not n:
            return
        commands: list[c.Command] = self.queue[:n:2]  # type: ignore[assignment]
        sites: list[Site | None] = self.queue[1:n:2]  # type: ignore[assignment]
        packed: list[tuple[bytes, _Record]] = []
        self._pack(self.sent, commands, sites, packed)
        for message, record in packed:
            self._flight.append(record)
            self._flight_bytes += len(message)
            self.bytes += len(message)
            self.ready.append(message)
        self.messages += len(packed)
        self.sent += len(commands)
        del self.queue[:n]
        self.set_flush_threshold(2 if self.blocking else min(2 * MAX_BATCH, max(2 * MIN_BATCH, 2 * self.batch)))

    #: Invariant 3: a free follows every use.
    def _queue_frees(self) -> None:
        """Queues the frees of dead refs. Each ref that is dead now had its last use appended before."""
        if not self.dead and not self._unheld:
            return
        with self._taking:
            while self._unheld:
                self.release(self._unheld.pop())
            n = len(self.dead)
            refs = self.dead[:n]
            del self.dead[:n]
            if self._holds:
                self._gone.update(r for r in refs if r in self._holds)
                refs = [r for r in refs if r not in self._holds]
        refs.sort()
        for start in range(0, len(refs), MAX_FREE):
            self.queue += (_free(refs[start : start + MAX_FREE]), None)

    def hold(self, ref: int) -> None:
        """Keeps ``ref`` from being freed before its ``release``: a graph uses it. The ref is alive now."""
        self._holds[ref] = self._holds.get(ref, 0) + 1

    def release(self, refs: Iterable[int], made: bool = True) -> None:
        """Undoes ``hold`` for each ref; those that died meanwhile are freed, if the node has ever ``made`` them."""
        with self._taking:
            for ref in refs:
                self._holds[ref] -= 1
                if not self._holds[ref]:
                    del self._holds[ref]
                    if ref in self._gone:
                        self._gone.discard(ref)
                        if made:
                            self.dead.append(ref)

    def release_later(self, refs: Iterable[int]) -> None:
        """Has ``release`` called later, for finalizers: takes no lock."""
        self._unheld.append(refs)

    @uninterrupted
    def still_referenced(self, refs: Iterable[int]) -> list[int]:
        """Returns those of these held refs that are not dead otherwise."""
        self._queue_frees()
        return [r for r in refs if r not in self._gone]

    @uninterrupted
    def sweep(self) -> None:
        """Queues frees in the middle of a batch.

        Otherwise memory that a node could reuse at once, still warm, would live to the batch's end.
        """
        if len(self.dead) >= MIN_SWEEP:
            self._queue_frees()
        self.limit = min(self.batch, len(self.queue) + 2 * SWEEP)

    def set_flush_threshold(self, batch: int) -> None:
        """Sets the ``len(commands)`` at which the next message leaves."""
        self.batch = batch
        self.limit = min(batch, 2 * SWEEP)

    def _pack(
        self,
        first: int,
        commands: list[c.Command],
        sites: list[Site | None],
        packed: list[tuple[bytes, _Record]],
    ) -> None:
        why = ""
        try:
            message = codec.encode(c.Batch(first, commands))  # type: ignore[arg-type]  # a list encodes as a tuple
            if len(message) > codec.MAX_MESSAGE:
                why = f"its {len(message)} bytes are over the limit of {codec.MAX_MESSAGE}"
        except (TypeError, ValueError, OverflowError) as e:
            why = str(e)
        if why and len(commands) == 1:
            # the other commands go on, in their places; the thread that flushes gets the error
            self.unsendable = DisttensorError(f"{line_of(sites[0])}: a command can't be sent: {why}")
            commands = [c.Free(0, ())]
            message = codec.encode(c.Batch(first, (c.Free(0, ()),)))
        elif why or len(commands) > MAX_COMMANDS:
            half = len(commands) // 2
            self._pack(first, commands[:half], sites[:half], packed)
            self._pack(first + half, commands[half:], sites[half:], packed)
            return
        packed.append((message, (first + len(sites), len(message), sites, to_keep(first, message, commands))))

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

    def raise_unsendable(self) -> None:
        """Raises, once, the error of a command that could not be sent."""
        error, self.unsendable = self.unsendable, None
        if error is not None:
            raise error

    @property
    def full(self) -> bool:
        """Returns whether the window is full. Much is unsent only while a connection has ended and is not explained."""
        unsent = len(self.queue) // 2
        return max(self.sent - self.done, unsent) > MAX_COMMANDS or self._flight_bytes > MAX_BYTES

    @property
    def idle(self) -> bool:
        """True when the node has nothing to do but perhaps the command that it is answering."""
        return self.sent - self.done <= 1

    def restart(self) -> None:
        """Lowers the flush threshold after an answer from an idle node: the next commands should reach it soon."""
        if self.batch and self.idle:
            self.set_flush_threshold(2 if self.blocking else 2 * MIN_BATCH)

    def site(self, seq: int) -> Site | None:
        """Returns the site where command ``seq`` was issued, while it is in flight."""
        for end, _, sites, _ in self._flight:
            if end - len(sites) <= seq < end:
                return sites[seq - end]
        return None

    def running(self) -> Site | None:
        """Returns the site of the oldest command that the node has not reported, of those that a line issued."""
        flying = (
            site
            for end, _, sites, _ in self._flight
            for seq, site in enumerate(sites, end - len(sites))
            if seq >= self.done
        )
        return next((site for site in flying if site is not None), None)

    def last_messages(self) -> Iterator[tuple[int, list[tuple[c.Command, Site | None]]]]:
        """Yields the messages that the node was sent last, with at least KEPT commands, the newest first: the number of
        the first command, and all with their sites. Those of long messages are without their data."""
        for end, _, sites, kept in reversed([*self._past, *self._flight]):
            yield end - len(sites), list(zip(codec.decode_batch(kept).commands, sites, strict=True))

    def withdraw_unsent(self) -> None:
        """Forgets messages that have not left: the node is gone."""
        for _ in range(len(self.ready)):
            self._flight.pop()
        self.ready.clear()

    def lose(self, error: NodeLost) -> None:
        """Notes that the node is lost: nothing is queued for it any more, and every issuing thread learns of it."""
        self.lost = error
        self.set_flush_threshold(0)
        self.discard()
        self.flush_with.clear()
        self.ready.clear()
        self._past += self._flight
        self._flight.clear()
        self._flight_bytes = 0

    def forked(self) -> None:
        """Closes the outbox in a forked child: nothing leaves, and every issuing thread learns of it."""
        self._taking = threading.RLock()
        self.set_flush_threshold(0)

    def discard(self) -> None:
        """Forgets the queue for a node that gets nothing any more; the lists would grow for ever."""
        self.queue.clear()
        self.dead.clear()

    def __repr__(self) -> str:
        state = "lost" if self.lost else f"queued={len(self.queue) // 2} inflight={self.sent - self.done}"
        return f"<Outbox node={self.rank} {state} dead={len(self.dead)}>"
