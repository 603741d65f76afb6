"""The state that the parts of a link share: the nodes, their queues, the lock, what can be used still. No I/O."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Iterable, Iterator

from ..process.clock import CLOCK, Clock
from ..process.observing import IssueNotes, ScriptSeam
from ..process.signals import Interrupts, uninterrupted
from ..transport.base import Hub
from . import unusable
from .breakpoints import StoppedFunctions
from .command_queue import CommandQueue, frees_queued
from .connection import Life
from .failures import Failures
from .fan_out import FanOuts
from .node import Node


class LinkState:
    """The nodes, their queues and the lock, which each part of a link is given."""

    __slots__ = (
        "__weakref__",
        "_local",
        "breakpoints",
        "clock",
        "closed",
        "closing",
        "failures",
        "fan_outs",
        "hub",
        "interrupts",
        "is_forked",
        "lock",
        "nodes",
        "parked",
        "patient",
        "queues",
        "roused",
        "seam",
        "told_losses",
        "unissued",
        "used",
        "wake",
    )

    def __init__(
        self,
        hub: Hub,
        nodes: int,
        interrupts: Interrupts | None = None,
        clock: Clock = CLOCK,
        seam: ScriptSeam | None = None,
    ) -> None:
        """``interrupts``: those that have wrapped the handlers of signals already; ``seam``: one that is made before
        the link, for what is."""
        self.hub, self.clock = hub, clock
        self.seam = ScriptSeam(clock) if seam is None else seam  #: where observers look in
        self.nodes = [Node(rank) for rank in range(nodes)]  #: by rank
        self.fan_outs = FanOuts()
        #: all queues; replaced, never changed, as other threads go through it
        self.queues: list[CommandQueue] = [node.outbox for node in self.nodes]
        #: those in which something may be left, as something was ever put in; replaced, too. Those of several nodes are
        #: first, as they leave something to be sent at their members, each of which is here as well
        self.used: list[CommandQueue] = []
        #: queues of several nodes to which nothing was issued yet; replaced, too. Tensors there may be made of members'
        #: ones, without a command, and die
        self.unissued: list[CommandQueue] = []
        self.roused: deque[CommandQueue] = deque()  #: those that the idle flush is to look at, and does not yet
        self.failures = Failures()
        self.breakpoints = StoppedFunctions(clock)
        self.seam.issued.switch = self.watch_queues
        self.told_losses: set[int] = set()  #: lost nodes whose loss the script has been told of
        self.interrupts = interrupts or Interrupts()
        self.patient = True  #: whether a full window blocks; False at the end of a script
        self.closing = False  #: whether nodes have been told to end, so that their end is not a loss
        self.closed = False
        self.is_forked = False  #: whether this is a forked child's copy, which nothing answers
        self.lock = threading.RLock()  #: held around each use of the hub, and where queues are packed
        self.wake = threading.Event()  #: wakes the thread of the idle flush
        self.parked = False  #: whether that thread waits for work
        self._local = threading.local()
        for queue in self.queues:
            self.add_queue(queue)

    def add_queue(self, queue: CommandQueue) -> None:
        """Takes a new queue, which is asleep until something is appended."""
        queue.rouse = self.rouse
        queue.sleep()
        if queue.members != (queue,):
            self.unissued = [*self.unissued, queue]

    @uninterrupted
    def rouse(self, queue: CommandQueue) -> None:
        """Has the idle flush look at a queue from now on, until nothing was left in it for a while."""
        with self.lock:
            if queue.asleep:
                queue.wake_up()
                self.roused.append(queue)
                if not queue.used:
                    new = [member for member in queue.members if not member.used]
                    first = [] if queue in new else [queue]
                    for each in (*first, *new):
                        each.used = True
                    self.used = [*first, *self.used, *new]
                    self.unissued = [other for other in self.unissued if other is not queue]
        if self.parked:
            self.wake.set()

    def rouse_unissued(self) -> None:
        """Rouses the queues of several nodes to which nothing was issued yet, and where something has died."""
        for queue in self.unissued:
            if queue.dead:
                self.rouse(queue)

    def there(self) -> list[Node]:
        """Returns the nodes that have said hello and are not lost. Nothing may be sent to a node before its hello."""
        return [node for node in self.nodes if node.said_hello is not None and node.life is not Life.LOST]

    def check(self, queue: CommandQueue) -> None:
        """Raises the error that makes a place unusable: ForkError, DisttensorError after shutdown, NodeLost. There is
        none while its queue is not ``over``."""
        if self.is_forked:
            raise unusable.forked()
        if self.closed:
            queue.discard()
            raise unusable.error_of_ended()
        lost = queue.lost
        if lost is not None:
            with self.lock:
                if queue.lost is not None:  # else another connection has come meanwhile
                    queue.discard()
            if not getattr(self._local, "unheard", False):
                self.told_losses.add(lost.rank)
            error = lost.fresh_copy()
            if note := queue.where(lost.rank):
                error.add_note(note)
            try:
                raise error
            finally:
                del error  # its frames would have it, and keep a user's tensors until the collector comes

    @contextlib.contextmanager
    def unheard(self) -> Iterator[None]:
        """Surrounds what catches NodeLost itself: a loss that this thread meets in it stays one that the script has not
        been told of."""
        local = self._local
        before = getattr(local, "unheard", False)
        local.unheard = True
        try:
            yield
        finally:
            local.unheard = before

    def issued(self) -> int:
        """Returns how many commands have been issued, without the frees, from some number on that may be below 0. Takes
        no lock: it may be too many while a thread packs a queue."""
        freed = frees_queued()
        return sum([queue.moved + len(queue.queue) // 2 for queue in self.queues]) - freed

    def count_issued(self) -> int:
        """Returns how many commands have been issued, without the frees."""
        with self.lock:
            return self.issued()

    def note_issued(self, notes: IssueNotes | None) -> None:
        """Has it noted there what is issued from now on; None: nowhere."""
        with self.lock:
            self.seam.notes = notes
            self.watch_queues()

    def watch_queues(self) -> None:
        """Has all queues tell of what is issued while observers listen to that, and not otherwise."""
        with self.lock:
            for queue in self.queues:
                self.watch(queue)

    def watch(self, queue: CommandQueue) -> None:
        """Has a queue tell of what is issued, or not. The caller holds the lock."""
        queue.observe(self.seam)

    def set_notes(self, ranks: Iterable[int], words: str) -> None:
        """Has the failures of what is issued to nodes from now on say what the script was at, until the next note."""
        with self.lock:
            for rank in ranks:
                self.nodes[rank].set_note(words)

    def forked(self) -> None:
        """Makes a forked child's copy unusable: nothing works any more, and nothing leaves."""
        self.is_forked = True
        self.lock = threading.RLock()  # a thread of the parent may have held the old one
        self.wake = threading.Event()
        self.hub.forked()
        self.seam.forked()
        for node in self.nodes:
            node.forked()
        for fan_out in self.fan_outs.values():
            fan_out.forked()
