"""The way out: packs queues, and hands their messages to the hub.

issuing threads --> Outbox (no lock) --flush--> Hub.send        under the link's lock

at_limit(queue)     an issuing thread has come to the queue's limit: it opens, flushes or sweeps it
flush(queue)        sends a queue, and waits while a window is full
flush_all()         sends all queues: before the script waits for anything
exchange(request)   sends all, a question last, and waits for the answer
issue_call(...)     queues a command for which nobody waits yet, and sends it if its node may have nothing else to do
together(commands)  queues commands of several nodes, and sends all of them in one step
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from threading import get_ident

from ..process.observing import IssueNotes, MessageSent
from ..process.signals import uninterrupted
from ..protocol import commands as c
from ..protocol.errors import BrokenError
from .command_queue import MAX_BATCH, CommandQueue
from .failures import Site, line_of
from .fan_out import FanOut
from .link_state import LinkState
from .losses import Losses
from .outbox import Outbox
from .replies import Replies
from .requests import Request, Requests
from .waiting import Waiting

#: Where a program alternates between queues that overlap: the commands in a node's pieces at which these are sent, and
#: those of a queue that are packed between two looks at its window.
WAITING = 2 * MAX_BATCH
LOOK = MAX_BATCH // 2
#: So many commands that a node may not have done yet keep it busy while others are gathered: what begins a function
#: leaves by itself below that.
BUSY = 8
#: Seconds for which an operation waits at a full window before it logs that.
SLOW = 5.0

_log = logging.getLogger("disttensor")


class Sender:
    """The queues of a link, and their way to the nodes."""

    __slots__ = (
        "_hub", "_interrupts", "_losses", "_nodes", "_now", "_replies", "_requests", "_seam", "_sent", "_state",
        "_waiting",
    )  # fmt: skip

    def __init__(
        self, state: LinkState, requests: Requests, losses: Losses, replies: Replies, waiting: Waiting
    ) -> None:
        self._state, self._requests, self._losses = state, requests, losses
        self._replies, self._waiting = replies, waiting
        self._hub, self._nodes, self._interrupts = state.hub, state.nodes, state.interrupts
        self._seam, self._sent, self._now = state.seam, state.seam.sent, state.clock.now

    def at_limit(self, queue: CommandQueue) -> None:
        """Flushes a queue that is due, else sweeps it. An issuing thread calls this at ``queue.limit``."""
        if self._seam.notes is not None:
            self._note_line(queue, self._seam.notes)
        if queue.asleep:
            self._state.rouse(queue)
        if queue.shut:
            self.open(queue)
        if not queue.limit:
            queue.looked = queue.moved
            if self._state.patient and queue.full:
                self.flush(queue)
        if len(queue.queue) >= queue.batch:
            self.flush(queue)
        else:
            self._interrupts.look()
            queue.sweep()
            if self._interrupts.pending:
                self._interrupts.check()

    def lines_noter(self, notes: IssueNotes) -> Callable[[], float]:
        """Returns a function that notes the last line of each queue, and returns the time with which it does.

        A closure: where it is called for each region of a step, half of the cost is what it reads.
        """
        state, now = self._state, self._now

        def note_lines() -> float:
            at = now()
            for queue in state.used:
                if queue.queue:
                    notes.lines += (at, queue.queue[-1:], queue.ranks, get_ident())
            return at

        return note_lines

    def _note_line(self, queue: CommandQueue, notes: IssueNotes) -> None:
        """Notes the line that has issued last to a queue. Where that is another thread's than those before it has each
        line noted from now on."""
        notes.lines += (self._now(), queue.queue[-1:], queue.ranks, get_ident())
        if get_ident() != notes.thread and not notes.complete:
            notes.complete = True
            self._state.watch_queues()

    def flush(self, queue: CommandQueue, wait: bool = True) -> None:
        """Sends what is queued for a node; then, if it shall ``wait``, blocks (interruptibly) while its window is full.

        Raises NodeLost, ForkError in a forked child, DisttensorError after shutdown.
        """
        state = self._state
        if queue.over:
            state.check(queue)
        self._interrupts.look()
        self.send(queue)
        if self._interrupts.pending:
            self._interrupts.check()
        if queue.asleep:
            state.rouse(queue)
        if self._losses.unexplained:
            self._losses.explain()
        if queue.over:  # since then
            state.check(queue)
        if queue.unsendable is not None:
            queue.raise_unsendable()
        if wait and state.patient and queue.full:
            self.wait_for_room(queue)

    def exchange(self, queue: CommandQueue, request: Request, timeout: float | None) -> c.Reply | None:
        """Sends what is queued anywhere, ``queue`` last, and waits for the reply.

        The wait follows the send as closely as it can: on a busy machine ZeroMQ's thread runs only then. So nothing is
        drained between them, unless other threads wait too, because a send can swallow the signal that a message has
        arrived.
        """
        self.flush_all(queue)
        if queue.over:
            self._state.check(queue)
        self._interrupts.look()
        try:
            self.send(queue, len(self._requests) > 1)
            if self._interrupts.pending:
                self._interrupts.check()
            if self._losses.unexplained:
                self._losses.explain()
            if queue.unsendable is not None:  # perhaps the request itself
                queue.raise_unsendable()
        except BaseException:
            self._requests.withdraw(request)
            raise
        return self._waiting.wait(request, timeout)

    #: Invariant 4: before the master blocks on one node it flushes all.
    def flush_all(self, but: CommandQueue | None = None) -> None:
        """Flushes every node that is not lost: before the master blocks on one, or nodes could wait for each other.

        Errors with a node are raised to the next caller that uses that node.
        """
        if self._state.unissued:
            self._state.rouse_unissued()
        for queue in self._state.used:
            if (
                (queue.queue or queue.dead or queue.pieces or queue.ready or queue.unheld)
                and queue is not but
                and queue.there
                and not self._state.is_forked
            ):
                self._interrupts.look()
                self.send(queue)
        if self._state.parked:
            self._state.wake.set()
        if self._losses.unexplained:
            self._losses.explain()

    def issue_call(self, rank: int, command: c.Command, site: Site | None, nbytes: int) -> None:
        """Queues a command with so many bytes of data, which begins something for which nobody waits yet. It leaves at
        once where its node may have nothing else to do, else with those that follow, or soon (idle.py).

        Blocks and raises as ``flush``.
        """
        queue = self._nodes[rank].outbox
        due = queue.add_data(command, site, nbytes)
        if queue.over or due or queue.sent - queue.done < BUSY:
            self.flush(queue)

    #: Invariant 5: a Send and its Recv leave in one flush, under the lock.
    def together(self, commands: Sequence[tuple[int, c.Command, Site | None]], hurry: bool = True) -> None:
        """Queues (rank, command, site) of each node and flushes all, so that every pair of nodes sees transfers in one
        order: a Send and its Recv, a collective.

        Then blocks while a window is full. By then all nodes have what they need to go on. Without ``hurry`` the
        commands leave with those that are queued after them, but still together.
        """
        self._interrupts.look()
        self.send_together(commands, hurry)
        self.after_sending([self._nodes[rank].outbox for rank, _, _ in commands])

    @uninterrupted
    def send_together(self, commands: Sequence[tuple[int, c.Command, Site | None]], hurry: bool = True) -> None:
        """Does what ``together`` does, and waits for nothing. ``after_sending`` is to follow."""
        outboxes = [self._nodes[rank].outbox for rank, _, _ in commands]
        with self._state.lock:
            for outbox in outboxes:
                self._state.check(outbox)
                if outbox.shut:
                    self.open(outbox)
            leave = hurry
            for outbox, (_, command, site) in zip(outboxes, commands, strict=True):
                outbox.add(command, site)
                leave = leave or len(outbox.queue) >= outbox.batch
            if leave:
                for outbox in outboxes:
                    self.pack_and_send(outbox)
                    if not hurry:
                        outbox.take_more()
                self._replies.take_in()
            else:
                for outbox in outboxes:
                    outbox.flush_with.update(outboxes)

    def after_sending(self, outboxes: Sequence[Outbox]) -> None:
        """Does what follows ``send_together``: looks at signals and errors, and blocks while a window is full."""
        if self._interrupts.pending:
            self._interrupts.check()
        if self._state.parked:
            self._state.wake.set()
        if self._losses.unexplained:
            self._losses.explain()
        for outbox in outboxes:
            if outbox.unsendable is not None:
                outbox.raise_unsendable()
            if self._state.patient and outbox.full:
                self.wait_for_room(outbox)

    @uninterrupted
    def send(self, queue: CommandQueue, drain: bool = True) -> None:
        """Sends a queue, and (``drain``) takes in what has arrived. Waits for nothing, and raises nothing of a node."""
        with self._state.lock:
            if type(queue) is Outbox:
                self._send_messages(queue)
            else:
                self.pack_and_send(queue)
            if drain:
                self._replies.take_in()

    def pack_and_send(self, queue: CommandQueue) -> None:
        """Packs a queue, and sends what has been packed for its nodes. The caller holds the lock."""
        if type(queue) is Outbox:
            self._send_messages(queue)
            return
        if not self._state.closed:
            queue.pack()
        for member in queue.members:
            self._send_messages(member, False)  # type: ignore[arg-type]

    def _send_messages(self, outbox: Outbox, alone: bool = True) -> None:
        """Packs a node's queue, and hands all of its messages to the hub. The caller holds the lock.

        Not ``alone``: what overlaps the queue is packed.
        """
        if outbox.over or outbox.rank in self._losses.unexplained:  # perhaps since ``check``
            return
        if alone or outbox.queue or outbox.dead or outbox.unheld:
            outbox.pack()
        if outbox.flush_with:
            flush_with, outbox.flush_with = outbox.flush_with, set()
            for mate in flush_with - {outbox}:
                self.pack_and_send(mate)
        ready = outbox.ready
        if outbox.pieces:
            outbox.join(self._state.fan_outs.joints)
        try:
            while ready:
                self._hub.send(outbox.rank, ready[0])
                outbox.record_leaving(self._now())
                if self._sent.listeners:
                    self._report_sent(outbox)
                ready.popleft()
        except BrokenError as e:
            self._losses.connection_ended(outbox.rank, str(e))

    def _report_sent(self, outbox: Outbox) -> None:
        """Tells observers of the message of a node that has just left."""
        number, sites = outbox.leaving()
        self._sent.notify(MessageSent(self._state.clock.now(), outbox.rank, number, sites, outbox.ready[0]))

    def fan_out(self, ranks: tuple[int, ...]) -> FanOut:
        """Returns the one queue of these nodes, each of whose commands goes to all of them."""
        state = self._state
        with state.lock:
            made = state.fan_outs.get(ranks)
            if made is None:
                made = FanOut([self._nodes[rank].outbox for rank in ranks])
                members = made.members
                overlaps = [*dict.fromkeys([other for member in members for other in member.overlaps]), *members]
                for queue in (made, *overlaps):
                    queue.open = self.open
                    queue.free_all = self.free_all
                    queue.lock = state.lock
                for queue in overlaps:
                    queue.overlaps = (*queue.overlaps, made)
                made.overlaps = tuple(overlaps)
                state.add_queue(made)
                made.set_shut(True)  # the first command opens it
                if made.lost is not None or state.closed:
                    made.end()
                state.fan_outs[ranks] = made
                state.queues = [made, *state.queues]
                state.watch(made)
            return made

    @uninterrupted
    def open(self, queue: CommandQueue) -> None:
        """Has a queue gather commands: packs all that overlaps it, in whose place its commands come from now on."""
        with self._state.lock:
            if queue.shut:
                before = [other for other in queue.overlaps if not other.shut]
                for other in before:
                    other.set_shut(True)  # before it is packed
                try:
                    for other in before:
                        other.pack_commands()
                except BaseException:  # no memory: what is not packed comes before all else still
                    for other in before:
                        other.set_shut(not other.queue)
                    raise
                queue.set_shut(False)
                self._keep_moving(queue, before)

    @uninterrupted
    def free_all(self, queue: CommandQueue) -> None:
        """Packs a queue and those that overlap it, with the frees of all that is dead in any of them."""
        state = self._state
        with state.lock:
            if state.closed:
                return
            packed = [each for each in (queue, *queue.overlaps) if each.dead and each.there]
            for each in packed:
                each.pack()
                state.rouse(each)
            self._keep_moving(queue, packed)

    def _keep_moving(self, queue: CommandQueue, packed: Sequence[CommandQueue]) -> None:
        """Sends what has been packed if it is much, and has the next append to ``queue`` look at the window. For what
        packs without a flush, which would do both: who only ever does that comes to none."""
        for each in packed:
            for member in each.members:
                if member.waiting >= WAITING:
                    self._send_messages(member)  # type: ignore[arg-type]
        if queue.moved - queue.looked >= LOOK:
            queue.limit = 0  # the next append does, in ``at_limit``

    def wait_for_room(self, queue: CommandQueue) -> None:
        """Blocks (interruptibly) while the window of a queue's node is full, and says so if that takes long."""
        for rank in queue.ranks:
            outbox = self._nodes[rank].outbox
            if outbox.full and outbox.lost is None:
                self._wait_for_room_of(outbox)

    def _wait_for_room_of(self, outbox: Outbox) -> None:
        request = Request(0, outbox.rank)
        try:
            self._waiting.wait(request, SLOW, until=lambda: not outbox.full)
        except TimeoutError:
            _log.warning(
                "node %d is %d commands behind, so this operation waits; it is at what was issued at %s, or behind "
                "that",  # it reports now and then
                outbox.rank,
                outbox.sent - outbox.done,
                line_of(outbox.running()),
            )
            self._waiting.wait(request, until=lambda: not outbox.full)
