"""A queue of commands of one place: of a node, or of the nodes of a mesh. Decides when it has to be flushed; no I/O.

Issuing threads append without a lock: ``queue`` is a flat list (command, site, command, site, ...) and one
``extend`` of a pair is atomic. Finalizers append to ``dead`` in the same way. Every ref in ``dead`` had its last use
appended before, so a free that is appended for it now follows every use.

Two queues overlap if a node takes commands of both, as those of a node and of a mesh that it is in. At most one of two
that overlap is *open*, and gathers commands; the other one is *shut*: its limit is 0, so that whoever appends to it
goes to the link, which packs all that overlaps it and opens it (``Sender.open``). So each node gets its commands in the
order in which they were issued, and the hot path looks at one number as before. What makes that right without a lock:

- Who shuts a queue sets its limit first, and packs it then. Who appends to it appends first, and reads the limit then.
  So a command that was appended to a shut queue is either packed, or its thread finds the limit 0: as long as a queue
  is shut nobody sets another one, not for a moment. So the limit of a queue that overlaps others is raised with the
  link's lock, under which queues are shut.
- A thread that has appended to a shut queue returns only when the link has opened it. So nobody knows of the result
  yet, and no command in another queue depends on it. Where it has to be packed before, it comes behind all that is in
  open queues that overlap this one, on which it may depend (``pack_in_order``); what is appended to it while these are
  packed is left to its thread.

A queue in which nothing was left for a while is *asleep*: the idle flush does not look at it. Its limit is that of one
command, so that whoever appends to it goes to the link, which rouses it. Here, too, who puts it to sleep sets the limit
first, and looks at the queue then; and as long as it is ``eager`` nothing raises the limit.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from operator import sub
from threading import get_ident
from typing import Any

from ..process.observing import CommandIssued, IssueNotes, ScriptSeam
from ..process.signals import uninterrupted
from ..protocol import commands as c
from ..protocol.errors import DisttensorError, NodeLost
from .failures import Site
from .route import Tap

#: Limits of a message's commands. The first message after a pause takes fewer, so that an idle node starts early.
MAX_BATCH = 128
MIN_BATCH = 2
#: The most refs in one Free; bounds its size below a message's limit whatever the distances.
MAX_FREE = 100_000
#: The bytes of data among queued commands with which they leave, however few they are.
MAX_DATA = 192 << 10
#: The number of commands between two sweeps of dead refs.
SWEEP = 16
#: Fewer dead refs than this are left to the end of the batch.
MIN_SWEEP = 4


_frees = count()


def frees_queued() -> int:
    """Returns how many Frees have been queued, in whichever queue."""
    return int(repr(_frees)[6:-1])


def _free(refs: list[int]) -> c.Free:
    """Makes a Free of sorted ``refs``."""
    return c.Free(refs[0], tuple(map(sub, refs[1:], refs)))


def _alone(queue: CommandQueue) -> None:
    """Does nothing: the queue overlaps no other one, so that nothing has to come before it; or nobody looks at it."""


def _nowhere(rank: int) -> str:
    """Returns no words: the place of a queue is the node itself."""
    return ""


class ToldQueue:
    """Takes the place of a queue for issuing threads while observers listen, and tells them of each command."""

    __slots__ = ("_notes", "_queue", "_ranks", "_seam")

    def __init__(
        self, ranks: tuple[int, ...], queue: list[Any], seam: ScriptSeam, notes: IssueNotes | None = None
    ) -> None:
        """``notes``: where it is noted what is issued, too, with the same times."""
        self._ranks, self._queue, self._seam, self._notes = ranks, queue, seam, notes

    def __iadd__(self, items: tuple[Any, ...]) -> ToldQueue:
        self._queue += items
        now, issued = self._seam.clock.now(), self._seam.issued
        if self._notes is not None:
            self._notes.of(self._ranks, get_ident()).extend((now, items[1]))
        for command, site in zip(items[::2], items[1::2], strict=True):
            stream = ""
            if type(command) is c.On:
                stream, command = str(command.stream), command.command
            issued.notify(CommandIssued(now, self._ranks, stream, command, site))
        return self

    extend = __iadd__

    def __len__(self) -> int:
        return len(self._queue)


class NotedQueue:
    """Takes the place of a queue for issuing threads while it is noted what is issued."""

    __slots__ = ("_last", "_notes", "_now", "_queue", "_ranks")

    def __init__(self, ranks: tuple[int, ...], queue: list[Any], notes: IssueNotes, now: Callable[[], float]) -> None:
        self._ranks, self._queue, self._notes, self._now = ranks, queue, notes, now
        self._last = -1, list[Any]()  #: the thread that has appended last, and its list

    def __iadd__(self, items: tuple[Any, ...]) -> list[Any]:
        """Notes one line, of which all commands of a call are. Returns the queue itself: who appends asks for its
        length next, which is quicker so."""
        thread, noted = self._last  # at once: another thread may come in between
        if get_ident() != thread:
            noted = self._begin_thread(get_ident())
        noted += (self._now(), items[1])
        queue = self._queue
        queue += items
        return queue

    def _begin_thread(self, thread: int) -> list[Any]:
        noted = self._notes.of(self._ranks, thread)
        self._last = thread, noted
        return noted

    extend = __iadd__

    def __len__(self) -> int:
        return len(self._queue)


class CommandQueue:
    """The queue of one place, whose commands go to all of ``members``."""

    __slots__ = (
        "_counted",
        "_data",
        "_entry",
        "_gone",
        "_holds",
        "_notes",
        "_observers",
        "_routes",
        "_taking",
        "_tap",
        "asleep",
        "batch",
        "blocking",
        "commands",
        "dead",
        "eager",
        "free_all",
        "limit",
        "lock",
        "looked",
        "lost",
        "moved",
        "open",
        "over",
        "overlaps",
        "queue",
        "ranks",
        "ready",
        "rouse",
        "shut",
        "unheld",
        "unsendable",
        "used",
        "where",
    )

    #: commands of nodes that overlap others, packed but in no message yet; those of several nodes wait at each of them
    pieces: Sequence[object] = ()
    waiting = 0  #: the number of these commands
    #: the most commands of a message
    most = MAX_BATCH

    def __init__(self, ranks: tuple[int, ...], blocking: bool = False) -> None:
        self.ranks = ranks  #: of the members
        self.queue: list[c.Command | Site | None] = []
        #: the object that issuing threads append to: the queue, or a Tap while one of them has a route. To be read into
        #: a local name first: `+=` on this attribute could undo a change that another thread's `add_route` just made.
        #: To be read for each `+=`: that of a NotedQueue gives the queue
        self.commands: Any = self.queue
        #: where commands go that are past any route: the queue, or a NotedQueue or ToldQueue
        self._entry: Any = self.queue
        self._tap = Tap(ranks, self.queue)  #: what routes the commands, and leads there
        self._observers: ScriptSeam | None = None
        self._notes: tuple[IssueNotes, Callable[[], float]] | None = None
        self._routes = 0
        self.dead: list[int] = []
        #: refs that recordings and graphs hold, with the number of holders; and those of them that are dead otherwise
        self._holds: dict[int, int] = {}
        self._gone: set[int] = set()
        self.unheld: list[Iterable[int]] = []
        #: ``len(commands)`` at which an issuing thread has to check this queue: to open it, to flush, or to sweep
        self.limit = 2
        #: ``len(commands)`` at which the thread has to flush. 0 makes each next append do so, once the queue is over
        self.batch = 2
        #: the queues that overlap this one
        self.overlaps: tuple[CommandQueue, ...] = ()
        self.shut = False
        #: opens this queue when it is shut: the link's, for a queue that overlaps others
        self.open: Callable[[CommandQueue], None] = _alone
        #: queues the frees of what is dead in this queue and in all that overlap it: the link's, too
        self.free_all: Callable[[CommandQueue], None] = _alone
        #: the link's lock, for a queue that overlaps others
        self.lock: threading.RLock | None = None
        #: says for a loss which part of the place is gone with a node
        self.where: Callable[[int], str] = _nowhere
        self.lost: NodeLost | None = None  #: the error that says why a node of them is gone, once one is
        self.over = False  #: whether nothing leaves any more: a node is lost, the session has ended, or this is a fork
        #: re-entrant: the collector may run a finalizer that uses tensors while it is held
        self._taking = threading.RLock()
        self.moved = 0  #: commands that were packed
        self.looked = 0  #: those of them that were when a thread looked at the window, having opened the queue
        self.ready: Sequence[bytes] = ()  #: messages that wait to be sent
        self.unsendable: DisttensorError | None = None  #: a command that could not be sent; the link raises it
        self.blocking = blocking  #: every command is flushed at once (DISTTENSOR_LAUNCH_BLOCKING)
        self.asleep = False  #: whether the idle flush does not look at the queue
        self.eager = blocking  #: whether each append is to come to the link: the queue is blocking, or asleep
        #: has the idle flush look at the queue: the link's
        self.rouse: Callable[[CommandQueue], None] = _alone
        self.used = False  #: whether it was ever roused, so that something may be left in it
        self._data = 0, 0  #: ``moved`` when there was data last, and the bytes of it since then
        self._counted = 0, 0  #: the same of commands that stand for several, and the number of these

    @property
    def members(self) -> Sequence[CommandQueue]:
        """The queues of the single nodes that take the commands."""
        raise NotImplementedError

    def add_route(self, by: int) -> None:
        """Counts one thread more (or, with -1, one less) that has a route."""
        with self._taking:
            self._routes = routes = self._routes + by
            self.commands = self._tap if routes else self._entry

    def observe(self, seam: ScriptSeam) -> None:
        """Has the observers at ``issued``, if there are any, told of each command from now on, except frees; has each
        noted where there are ``notes`` that want it."""
        notes = seam.notes
        with self._taking:
            self._observers = seam if seam.issued.listeners else None
            self._notes = (notes, seam.clock.now) if notes is not None and notes.complete else None
            self._switch()

    def _switch(self) -> None:
        """Has issuing threads append to what the observers and the routes want."""
        seam, notes = self._observers, self._notes
        if seam is not None:
            self._entry = ToldQueue(self.ranks, self.queue, seam, None if notes is None else notes[0])
        else:
            self._entry = self.queue if notes is None else NotedQueue(self.ranks, self.queue, *notes)
        self._tap = Tap(self.ranks, self._entry)
        self.commands = self._tap if self._routes else self._entry

    def add(self, command: c.Command, site: Site | None = None) -> bool:
        """Appends a command; returns whether the caller has to flush. The hot path has this inlined."""
        commands = self.commands
        commands += (command, site)
        if self.shut:
            self.open(self)
        if self.asleep:
            self.rouse(self)
        return len(commands) >= self.limit

    def add_data(self, command: c.Command, site: Site | None, nbytes: int) -> bool:
        """Does what ``add`` does for a command with so many bytes of data, of which a queue holds MAX_DATA and no more
        than a command's besides."""
        moved, queued = self._data
        queued = nbytes + (queued if moved == self.moved else 0)
        self._data = self.moved, queued
        return self.add(command, site) or queued >= MAX_DATA

    def add_many(self, command: c.Command, site: Site | None, count: int) -> bool:
        """Does what ``add`` does for a command that gives a node as much to do as ``count`` of them: it leaves when
        these would, and what is dead is freed as often as among these."""
        moved, queued = self._counted
        queued = count + (queued if moved == self.moved else 0)
        self._counted = self.moved, queued
        if queued >= SWEEP and len(self.dead) >= MIN_SWEEP:
            self.sweep()
        return self.add(command, site) or 2 * queued >= self.batch

    def put(self, command: c.Command, site: Site | None = None) -> None:
        """Appends a command past any route: to the nodes' default streams, and into no recording."""
        entry = self._entry
        entry += (command, site)
        if self.shut:
            self.open(self)
        if self.asleep:
            self.rouse(self)

    def pack(self) -> None:
        """Moves the queue to the members' messages, pending frees last. The caller holds the link's lock.

        What overlaps it is moved before frees, as it may have uses of what is dead.
        """
        refs = self.take_dead() if self.dead or self.unheld else None
        if refs:
            for other in self.overlaps:
                if other.queue:
                    other.pack_in_order()
            self._queue_frees(refs)
        if self.shut:
            self.pack_in_order()
        else:
            self.pack_commands()

    def pack_in_order(self) -> None:
        """Moves the commands of the queue to the members' messages, behind those that they may depend on. The caller
        holds the link's lock.

        Of a shut queue only those that are there now: what comes while the others are packed may depend on what has
        come to these since, and its thread opens the queue.
        """
        if self.shut:
            there = len(self.queue)
            for other in self.overlaps:
                if other.queue and not other.shut:
                    other.pack_commands()
            if there:
                self.pack_commands(there)
        else:
            self.pack_commands()

    def pack_commands(self, first: int = 0) -> None:
        """Moves the commands of the queue to the members' messages. The caller holds the link's lock.

        ``first``: how many of what is in the queue, sites too; 0: all of it. Nothing has changed until all of it is
        packed, so that an error (no memory) loses no command.
        """
        queue = self.queue
        n = first or len(queue)
        if not n:
            return
        self._deliver(queue[:n:2], queue[1:n:2])  # type: ignore[arg-type]
        self.moved += n // 2
        del queue[:n]
        self.set_flush_threshold(next_threshold(self, self.most))

    def _deliver(self, commands: list[c.Command], sites: list[Site | None]) -> None:
        """Packs commands for the members, who take them in order."""
        raise NotImplementedError

    def take_dead(self) -> list[int]:
        """Takes the refs that are dead now, and not held. Each had its last use appended before."""
        if not self.dead and not self.unheld:
            return []
        with self._taking:
            while self.unheld:
                self.release(self.unheld.pop())
            n = len(self.dead)
            refs = self.dead[:n]
            del self.dead[:n]
            if self._holds:
                self._gone.update(r for r in refs if r in self._holds)
                refs = [r for r in refs if r not in self._holds]
        return refs

    #: Invariant 3: a free follows every use.
    def _queue_frees(self, refs: list[int]) -> None:
        """Queues the frees of these refs, whose uses are all in this queue, or packed."""
        refs.sort()
        for start in range(0, len(refs), MAX_FREE):
            next(_frees)
            self.queue += (_free(refs[start : start + MAX_FREE]), None)

    def hold_ref(self, ref: int) -> None:
        """Keeps ``ref`` from being freed before its ``release``: a graph uses it. The ref is alive now."""
        with self._taking:
            self._holds[ref] = self._holds.get(ref, 0) + 1

    def release(self, refs: Iterable[int], made: bool = True) -> None:
        """Undoes ``hold_ref`` for each ref; those that died meanwhile are freed, if the node has ever ``made`` them."""
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
        self.unheld.append(refs)

    @uninterrupted
    def still_referenced(self, refs: Iterable[int]) -> list[int]:
        """Returns those of these held refs that are not dead otherwise."""
        self.dead += self.take_dead()  # those that are not held: they are freed with the next message
        return [r for r in refs if r not in self._gone]

    @uninterrupted
    def sweep(self) -> None:
        """Queues frees in the middle of a batch.

        Otherwise memory that a node could reuse at once, still warm, would live to the batch's end.
        """
        if len(self.dead) >= MIN_SWEEP:
            refs = self.take_dead()
            if self.overlaps and any([other.queue for other in self.overlaps]):
                self.dead += refs  # there may be uses of them; whoever packs this queue packs that one first
            else:
                self._queue_frees(refs)
        if self.lock is None:
            self._raise_limit()
        else:
            with self.lock:
                self._raise_limit()

    def _raise_limit(self) -> None:
        """Sets the limit at which the next sweep is due, some commands later."""
        self.limit = 0 if self.shut else min(self.batch, len(self.queue) + 2 * SWEEP)
        if self.over:  # as below
            self.limit = 0
        elif self.asleep and not self.shut:
            self.limit = 2

    @uninterrupted
    def free_dead(self) -> None:
        """Queues the frees of all that is dead before the next command, which is to allocate much memory: the node has
        given up by then what the script has."""
        overlaps = self.overlaps
        if not overlaps:
            if self.dead:
                self._queue_frees(self.take_dead())
        elif self.dead or any([other.dead for other in overlaps]):
            self.free_all(self)

    def set_flush_threshold(self, batch: int) -> None:
        """Sets the ``len(commands)`` at which the next message leaves. The caller holds the lock, if there is one."""
        self.batch = batch
        self.limit = 0 if self.shut else min(batch, 2 * SWEEP)
        if self.over:  # set before the limit by a thread that ends the queue, and looked at after it: it stays 0
            self.batch = self.limit = 0

    def take_more(self) -> None:
        """Doubles the flush threshold once more: what has just left keeps its nodes busy for as long as several
        commands do. The caller holds the lock, if there is one."""
        self.set_flush_threshold(next_threshold(self, self.most))

    def block(self) -> None:
        """Has every command flushed at once from now on."""
        self.blocking = self.eager = True
        self.set_flush_threshold(2)

    @property
    def left(self) -> bool:
        """Returns whether something is packed for a member that is not lost, and has not been sent."""
        return any([member.lost is None and (member.pieces or member.ready) for member in self.members])

    @property
    def has_rest(self) -> bool:
        """Returns whether something waits to be sent."""
        return bool(self.queue or self.dead or self.unheld or self.left) and self.there

    def sleep(self) -> bool:
        """Has nobody look at the queue until the next append, which rouses it. Returns False, and does nothing, if
        something was appended meanwhile. The caller holds the link's lock."""
        self.asleep = self.eager = True
        self.set_flush_threshold(2)
        if self.queue and self.there:
            self.wake_up()
        return self.asleep

    def wake_up(self) -> None:
        """Undoes ``sleep``. The caller holds the link's lock."""
        self.asleep, self.eager = False, self.blocking

    def lose(self, error: NodeLost) -> None:
        """Notes that a member is lost."""
        raise NotImplementedError

    def end(self) -> None:
        """Has each append from now on go to the link, which raises the error of a queue from which nothing leaves."""
        self.over = True
        self.set_flush_threshold(0)

    def reopen(self) -> None:
        """Has commands leave again: each node of the queue has a connection. The caller holds the link's lock."""
        self.lost, self.over = None, False
        self.set_flush_threshold(2 if self.eager else 2 * MIN_BATCH)

    def set_shut(self, shut: bool) -> None:
        """Shuts the queue, or has it gather commands. The caller holds the link's lock."""
        self.shut = shut
        self.limit = 0 if shut else min(self.batch, len(self.queue) + 2 * SWEEP)

    def raise_unsendable(self) -> None:
        """Raises, once, the error of a command that could not be sent."""
        error, self.unsendable = self.unsendable, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # its frames would have it, and keep a user's tensors until the collector comes

    @property
    def full(self) -> bool:
        """Returns whether the window of a member is full."""
        return any([member.full for member in self.members])

    @property
    def idle(self) -> bool:
        """True when the members have nothing to do but perhaps the command that they are answering."""
        return all([member.idle for member in self.members])

    @uninterrupted
    def restart(self) -> None:
        """Lowers the flush threshold after an answer from an idle node: the next commands should reach it soon."""
        if self.batch and self.idle:
            if self.lock is None:
                self._restart()
            else:
                with self.lock:
                    self._restart()

    def _restart(self) -> None:
        self.set_flush_threshold(2 if self.eager else 2 * MIN_BATCH)
        if self.asleep:  # since then
            self.set_flush_threshold(2)

    @property
    def there(self) -> bool:
        """Returns whether some member is not lost, so that there is somebody to send to."""
        return any([member.lost is None for member in self.members])

    def forked(self) -> None:
        """Closes the queue in a forked child: nothing leaves, and every issuing thread learns of it."""
        self._taking = threading.RLock()
        if self.lock is not None:
            self.lock = threading.RLock()  # a thread of the parent may have held the old one
        self.end()

    def discard(self) -> None:
        """Forgets the queue for a node that gets nothing any more; the lists would grow for ever."""
        self.queue.clear()
        self.dead.clear()


def next_threshold(queue: CommandQueue, most: int = MAX_BATCH) -> int:
    """Returns the ``len(commands)`` at which the next message is to leave: it takes twice as many as the last one, up
    to ``most``."""
    return 2 if queue.eager else min(2 * most, max(2 * MIN_BATCH, 2 * queue.batch))
