"""The master's I/O: flushes outboxes into the hub, takes reports in, and lets threads wait for answers.

    issuing threads --> Outbox (no lock) --flush--> Hub.send        under `_lock`
    Hub.drain --> Report --> acknowledge, failures, requests        under `_lock`

There is no receiving thread: a thread that waits polls the hub's descriptor without the lock and drains with it. Each
draining thread wakes the others whose answers it took. One small thread flushes commands that were left in queues,
after a short idle.

The end of a connection tells that a node is gone, not why: the launcher knows that, perhaps only after a while. The
launcher is asked with no lock held, by one thread at a time, so that all others go on with the nodes that are left.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count
from typing import Any

from ..host import descriptors
from ..host.launcher import Exited, Launcher, Sight
from ..process.own_time import Standstill
from ..process.signals import Interrupts, uninterrupted
from ..protocol import codec
from ..protocol import commands as c
from ..protocol.arguments import Message
from ..protocol.errors import BrokenError, ClosedError, NodeLost, ProtocolError, StartError
from ..protocol.failure_ids import position
from ..transport.base import Hub
from . import unusable
from .command_queue import MAX_BATCH, CommandQueue, frees_queued
from .failures import Failure, Failures, Site, line_of
from .fan_out import FanOut, FanOuts
from .node import Life, Node
from .outbox import Outbox
from .patience import Patience
from .requests import MeshRequest, Request, Told, Waker
from .side_channels import SideChannels

#: Commands that nobody flushed leave after about this long (seconds).
IDLE = 0.002
#: Seconds between two checks of a node that neither dies nor answers, while a thread waits for it.
TICK = 0.5
#: Seconds to wait for the launcher to report why a node whose connection ended is gone.
EXIT_CAUSE_TIMEOUT = 2.0
#: Seconds more for another thread that asks the launcher to say what it has heard.
_HEARD = 1.0
#: Seconds of one wait for the launcher: ``close`` and a Ctrl-C have to wait for its end.
_LISTEN = 0.05
#: The most failures that a node may tell twice: those of answers too long to be sent, on streams, have one number.
REPEATED = 256
#: Where a program alternates between queues that overlap: the commands in a node's pieces at which these are sent, and
#: those of a queue that are packed between two looks at its window.
WAITING = 2 * MAX_BATCH
LOOK = MAX_BATCH // 2
#: Seconds between two looks for connections whose other end does not answer.
DEAF = 1.0
#: Seconds for which this process stood still after which that is said.
STILL = 5.0
#: Seconds for which an operation waits at a full window before it logs that.
SLOW = 5.0

#: The cause of a loss that no process has told of.
_SILENT = "nothing that it was sent has arrived for long: its host is gone, or the network to it is"
#: The cause of a node's loss that sends a message without an end.
_ENDLESS = "broke the protocol: a message that never ends"

_log = logging.getLogger("disttensor")


class Link:
    """The master's connection with all nodes."""

    def __init__(
        self,
        hub: Hub,
        nodes: int,
        launcher: Launcher | None,
        on_lost: Callable[[NodeLost], None],
        interrupts: Interrupts | None = None,
    ) -> None:
        """``interrupts``: those that have wrapped the handlers of signals already."""
        self.hub = hub
        self._hub_fd = hub.fileno()
        self.side = SideChannels()
        self.launcher = launcher
        self.nodes = [Node(rank) for rank in range(nodes)]  #: by rank
        self.fan_outs = FanOuts()
        #: all queues; replaced, never changed, as other threads go through it
        self.queues: list[CommandQueue] = [node.outbox for node in self.nodes]
        self.failures = Failures()
        self.losses: list[NodeLost] = []  #: the first one most likely explains the others
        self.told_losses: set[int] = set()  #: lost nodes whose loss the script has been told of
        self.interrupts = interrupts or Interrupts()
        self.reports = 0  #: messages received (for tests and status)
        self.patient = True  #: whether a full window blocks; False at the end of a script
        self.closing = False  #: whether nodes have been told to end, so that their end is no loss
        self.closed = False
        self.is_forked = False  #: whether this is a forked child's copy, which nothing answers
        self._on_lost = on_lost
        self._lock = threading.RLock()
        #: of the nodes that are ``Life.UNEXPLAINED``: (cause so far, deadline)
        self._unexplained: dict[int, tuple[str, float]] = {}
        self._to_end: deque[int] = deque()  #: lost nodes that the launcher is to end
        self._to_look: deque[int] = deque()  #: nodes that the launcher is to look at
        self.launcher_died = ""  #: why there is no launcher any more, if it died
        self._asker = 0  #: the thread that asks the launcher
        self._asking = threading.Lock()  #: held by the thread that asks the launcher; only ``close`` waits for it
        self._requests: dict[int, Request] = {}
        self._ids = count(1)
        self._local = threading.local()
        self._wake = threading.Event()
        self._parked = False  #: whether the flushing thread waits for work
        self._flusher = threading.Thread(target=self._flush_idle, name="disttensor-flush", daemon=True)
        self._flusher.start()

    def __repr__(self) -> str:
        boxes = [node.outbox for node in self.nodes]
        queued, flying = sum(len(box.queue) // 2 for box in boxes), sum(box.sent - box.done for box in boxes)
        state = " closed" if self.closed else ""
        return f"<Link nodes={len(boxes)} queued={queued} inflight={flying} waiting={len(self._requests)}{state}>"

    def there(self) -> list[Node]:
        """Returns the nodes that have said hello and are not lost. Nothing may be sent to a node before its hello."""
        return [node for node in self.nodes if node.said_hello is not None and node.life is not Life.LOST]

    def fan_out(self, ranks: tuple[int, ...]) -> FanOut:
        """Returns the one queue of these nodes, each of whose commands goes to all of them."""
        with self._lock:
            made = self.fan_outs.get(ranks)
            if made is None:
                made = FanOut([self.nodes[rank].outbox for rank in ranks])
                overlaps = [queue for queue in self.queues if not set(ranks).isdisjoint(queue.ranks)]
                for queue in (made, *overlaps):
                    queue.open = self.open
                    queue.free_all = self.free_all
                for queue in overlaps:
                    queue.overlaps = (*queue.overlaps, made)
                made.overlaps = tuple(overlaps)
                made.set_shut(True)  # the first command opens it
                if made.lost is not None or self.closed:
                    made.end()
                self.fan_outs[ranks] = made
                self.queues = [made, *self.queues]  # first, as they leave something to be sent at their members
            return made

    @uninterrupted
    def open(self, queue: CommandQueue) -> None:
        """Has a queue gather commands: packs all that overlaps it, in whose place its commands come from now on."""
        with self._lock:
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
        with self._lock:
            if self.closed:
                return
            packed = [each for each in (queue, *queue.overlaps) if each.dead and each.there]
            for each in packed:
                each.pack()
            self._keep_moving(queue, packed)

    def _keep_moving(self, queue: CommandQueue, packed: Sequence[CommandQueue]) -> None:
        """Sends what has been packed if it is much, and has the next append to ``queue`` look at the window. For what
        packs without a flush, which would do both: who only ever does that comes to none."""
        for each in packed:
            for member in each.members:
                if member.waiting >= WAITING:
                    self._send_to(member)  # type: ignore[arg-type]
        if queue.moved - queue.looked >= LOOK:
            queue.limit = 0  # the next append does, in ``tick``

    def extend(self, key: str, side_key: str = "") -> Node:
        """Lets in one more node, by its public keys of both connections; its rank is the next."""
        with self._lock:
            self.hub.admit(len(self.nodes), key)
            self.side.admit(len(self.nodes), side_key)
            self.nodes.append(Node(len(self.nodes), self.nodes[0].outbox.blocking))
            self.queues = [*self.queues, self.nodes[-1].outbox]
            return self.nodes[-1]

    # ---- sending ---------------------------------------------------------------------------------------------------

    def issued(self) -> int:
        """Returns how many commands have been issued, without the frees, from some number on that may be below 0. Takes
        no lock: it may be too many while a thread packs a queue."""
        freed = frees_queued()
        return sum([queue.moved + len(queue.queue) // 2 for queue in self.queues]) - freed

    def count_issued(self) -> int:
        """Returns how many commands have been issued, without the frees."""
        with self._lock:
            return self.issued()

    def tick(self, outbox: CommandQueue) -> None:
        """Flushes a queue that is due, else sweeps it. An issuing thread calls this at ``outbox.limit``."""
        if outbox.shut:
            self.open(outbox)
        if not outbox.limit:
            outbox.looked = outbox.moved
            if self.patient and outbox.full:
                self.flush(outbox)
        if len(outbox.queue) >= outbox.batch:
            self.flush(outbox)
        else:
            self.interrupts.look()
            outbox.sweep()
            if self.interrupts.pending:
                self.interrupts.check()

    def flush(self, outbox: CommandQueue, wait: bool = True) -> None:
        """Sends what is queued for a node; then, if it shall ``wait``, blocks (interruptibly) while its window is full.

        Raises NodeLost, ForkError in a forked child, DisttensorError after shutdown.
        """
        self.check(outbox)
        self.interrupts.look()
        self._push(outbox)
        if self.interrupts.pending:
            self.interrupts.check()
        if self._parked:
            self._wake.set()
        if self._unexplained:
            self._explain_losses()
        if outbox.lost is not None or self.closed:
            self.check(outbox)
        if outbox.unsendable is not None:
            outbox.raise_unsendable()
        if wait and self.patient and outbox.full:
            self._wait_window(outbox)

    def exchange(self, outbox: CommandQueue, request: Request, timeout: float | None) -> c.Reply | None:
        """Sends what is queued anywhere, ``outbox`` last, and waits for the reply.

        The wait follows the send as closely as it can: on a busy machine ZeroMQ's thread runs only then. So nothing is
        drained between them, unless other threads wait too, because a send can swallow the signal that a message has
        arrived.
        """
        self.flush_all(outbox)
        self.check(outbox)
        self.interrupts.look()
        try:
            self._push(outbox, len(self._requests) > 1)
            if self.interrupts.pending:
                self.interrupts.check()
            if self._unexplained:
                self._explain_losses()
            if outbox.unsendable is not None:  # perhaps the request itself
                outbox.raise_unsendable()
        except BaseException:
            self.drop(request)
            raise
        return self.wait(request, timeout)

    #: Invariant 4: before the master blocks on one node it flushes all.
    def flush_all(self, but: CommandQueue | None = None) -> None:
        """Flushes every node that is not lost: before the master blocks on one, or nodes could wait for each other.

        Errors with a node are raised to the next caller that uses that node.
        """
        for outbox in self.queues:
            if (
                (outbox.queue or outbox.dead or outbox.pieces or outbox.ready or outbox.unheld)
                and outbox is not but
                and outbox.there
                and not self.is_forked
            ):
                self.interrupts.look()
                self._push(outbox)
        if self._parked:
            self._wake.set()
        if self._unexplained:
            self._explain_losses()

    def note(self, ranks: Iterable[int], words: str) -> None:
        """Has the failures of what is issued to nodes from now on say what the script was at, until the next note."""
        with self._lock:
            for rank in ranks:
                self.nodes[rank].note(words)

    #: Invariant 5: a Send and its Recv leave in one flush, under the lock.
    def pair(self, first: tuple[int, c.Command], second: tuple[int, c.Command], site: Any) -> None:
        """Queues a Send and its Recv and flushes both, so that every pair of nodes sees transfers in one order.

        Then blocks while the window of either is full. By then both nodes have all commands that they need to go on.
        """
        self.together([(*first, site), (*second, site)])

    def together(self, commands: Sequence[tuple[int, c.Command, Site | None]], hurry: bool = True) -> None:
        """Does for any number of nodes what ``pair`` does for two: queues (rank, command, site) of each and flushes
        all.

        Without ``hurry`` the commands leave with those that are queued after them, but still together.
        """
        self.interrupts.look()
        self.push(commands, hurry)
        self.pushed([self.nodes[rank].outbox for rank, _, _ in commands])

    def pushed(self, outboxes: Sequence[Outbox]) -> None:
        """Does what follows a ``push``: looks at signals, errors and windows, and blocks while one of these is full."""
        if self.interrupts.pending:
            self.interrupts.check()
        if self._parked:
            self._wake.set()
        if self._unexplained:
            self._explain_losses()
        for outbox in outboxes:
            if outbox.unsendable is not None:
                outbox.raise_unsendable()
            if self.patient and outbox.full:
                self._wait_window(outbox)

    @uninterrupted
    def push(self, commands: Sequence[tuple[int, c.Command, Site | None]], hurry: bool = True) -> None:
        """Queues (rank, command, site) of each node and sends all, as ``together``, and waits for nothing."""
        outboxes = [self.nodes[rank].outbox for rank, _, _ in commands]
        with self._lock:
            for outbox in outboxes:
                self.check(outbox)
                if outbox.shut:
                    self.open(outbox)
            for outbox, (_, command, site) in zip(outboxes, commands, strict=True):
                outbox.add(command, site)
                hurry = hurry or len(outbox.queue) >= outbox.batch
            if hurry:
                for outbox in outboxes:
                    self._send(outbox)
                self._drain()
            else:
                for outbox in outboxes:
                    outbox.flush_with.update(outboxes)

    @uninterrupted
    def _push(self, outbox: CommandQueue, drain: bool = True) -> None:
        with self._lock:
            if type(outbox) is Outbox:
                self._send_to(outbox)
            else:
                self._send(outbox)
            if drain:
                self._drain()

    def check(self, outbox: CommandQueue) -> None:
        """Raises the error that makes the node unusable: ForkError, DisttensorError after shutdown, NodeLost."""
        if self.is_forked:
            raise unusable.forked()
        if self.closed:
            outbox.discard()
            raise unusable.ended()
        lost = outbox.lost
        if lost is not None:
            outbox.discard()
            if not getattr(self._local, "unheard", False):
                self.told_losses.add(lost.rank)
            error = lost.again()
            if note := outbox.where(lost.rank):
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

    def _send(self, queue: CommandQueue) -> None:
        """Packs a queue, and sends what has been packed for its nodes. The caller holds the lock."""
        if type(queue) is Outbox:
            self._send_to(queue)
            return
        if not self.closed:
            queue.pack()
        for rank in queue.ranks:
            self._send_to(self.nodes[rank].outbox)

    def _send_to(self, outbox: Outbox) -> None:
        if outbox.lost is not None or self.closed or outbox.rank in self._unexplained:  # perhaps since ``check``
            return
        outbox.pack()
        if outbox.flush_with:
            flush_with, outbox.flush_with = outbox.flush_with, set()
            for mate in flush_with - {outbox}:
                self._send(mate)
        ready = outbox.ready
        if outbox.pieces:
            outbox.join(self.fan_outs.joints)
        try:
            while ready:
                self.hub.send(outbox.rank, ready[0])
                ready.popleft()
        except BrokenError as e:
            self._disconnected(outbox.rank, str(e))

    def _wait_window(self, queue: CommandQueue) -> None:
        for rank in queue.ranks:
            outbox = self.nodes[rank].outbox
            if outbox.full and outbox.lost is None:
                self._wait_window_of(outbox)

    def _wait_window_of(self, outbox: Outbox) -> None:
        request = Request(0, outbox.rank)
        try:
            self.wait(request, SLOW, until=lambda: not outbox.full)
        except TimeoutError:
            _log.warning(
                "node %d is %d commands behind, so this operation waits; it is at what was issued at %s, or behind "
                "that",  # it reports now and then
                outbox.rank,
                outbox.sent - outbox.done,
                line_of(outbox.running()),
            )
            self.wait(request, until=lambda: not outbox.full)

    # ---- receiving -------------------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Takes in what has arrived. Callable by any thread."""
        self._locked_drain()
        if self._unexplained:
            self._explain_losses()

    @uninterrupted
    def _locked_drain(self) -> None:
        with self._lock:
            self._drain()

    def _drain(self) -> None:
        """Takes in what has arrived. The caller holds the lock."""
        if self.closed or self.is_forked:
            return
        for rank, message in self.hub.drain():
            node = self.nodes[rank]
            if node.life is Life.LOST:
                continue  # the node was given up: its messages come too late
            self.reports += 1
            try:
                report = codec.decode_report(message)
                if not 0 <= report.done <= node.outbox.sent:
                    raise ProtocolError(f"node {rank} reports {report.done} of {node.outbox.sent} commands")
                if not report.replies and report.done <= node.outbox.done:
                    raise ProtocolError("a report that says nothing")
                for reply in report.replies:
                    self._take(node, reply)
            except ProtocolError as e:
                self.lose(rank, f"broke the protocol: {e}")
                self.hub.cut(rank)  # what it goes on sending is not to be taken in
                continue
            node.outbox.acknowledge(report.done)
            node.busy = report.busy
        for rank in self.hub.gone():
            self._disconnected(rank, "its connection ended")

    def _take(self, node: Node, reply: c.Reply) -> None:
        codec.check_reply(reply)
        rank, hello = node.rank, node.said_hello
        if isinstance(reply, c.Hello):
            if hello is not None:
                raise ProtocolError("a second hello")
            node.greet(reply)
        elif hello is None:
            raise ProtocolError(f"a {type(reply).__name__} before its hello")
        elif isinstance(reply, c.Failed):
            seq = position(reply.seq)[0]
            if not 0 <= seq < node.outbox.sent:
                raise ProtocolError(f"a failure of command {reply.seq}, and {node.outbox.sent} were sent")
            if not -1 <= reply.lost < len(self.nodes) or reply.lost == rank:
                raise ProtocolError(f"a failure by the loss of node {reply.lost}, and no such peer is there")
            if (rank, reply.seq) not in self.failures:
                site, noted = node.outbox.site(seq), node.noted(seq)
                failure = Failure(rank, hello.host, hello.pid, reply, site, noted=noted)
                if reply.holdings is not None:  # now, as the history forgets
                    failure.makers = node.makers({held.ref for held in reply.holdings.largest})
                self.failures.keep(failure)
                return
            node.repeated += 1
            if node.repeated > REPEATED:
                raise ProtocolError(f"{node.repeated} failures that it has told before")
        elif isinstance(reply, c.Warned):
            seq = position(reply.seq)[0]
            if not 0 <= seq < node.outbox.sent:
                raise ProtocolError(f"a warning of command {reply.seq}, and {node.outbox.sent} were sent")
            self.failures.on_warning(reply, rank, node.outbox.site(seq))
        else:
            request = self._requests.get(reply.request)
            if request is None:
                if reply.request not in node.unawaited:
                    raise ProtocolError(f"{type(reply).__name__} {reply.request}, which nobody has asked for")
                node.unawaited.discard(reply.request)
                return
            if request.node != rank and not request.asks(rank):
                raise ProtocolError(f"node {rank} answers a request to node {request.node}")
            if isinstance(reply, c.Poisoned):
                self._check_cause(reply)
            elif not isinstance(reply, request.kind):
                raise ProtocolError(f"a {type(reply).__name__} where {request.kind.__name__} was asked for")
            elif isinstance(reply, c.Unusable) and len(reply.reasons) != request.due:
                raise ProtocolError(f"{len(reply.reasons)} reasons of node {rank} where {request.due} were asked for")
            node.answered = reply.request
            if request.queue is None or request.take(rank, reply):
                self._requests.pop(reply.request, None)
                request.resolve(reply)

    def _check_cause(self, reply: c.Poisoned) -> None:
        """Refuses a cause that cannot be: the failure of a command that no node was sent. Raises ProtocolError."""
        seq = position(reply.seq)[0]
        if not (0 <= reply.rank < len(self.nodes) and 0 <= seq < self.nodes[reply.rank].outbox.sent):
            raise ProtocolError(
                f"the failure of command {reply.seq} of node {reply.rank}, which was not sent that many"
            )

    @uninterrupted
    def disconnected(self, rank: int, cause: str) -> None:
        """Notes that another connection of a node has ended than the one for commands: it is lost.

        Callable by any thread.
        """
        with self._lock:
            if not (self.closed or self.is_forked):
                self._disconnected(rank, cause)
        self._wake.set()

    def _disconnected(self, rank: int, cause: str) -> None:
        """Notes that a connection has ended.

        If the process has ended, the launcher knows why. It is asked later, because the caller holds the lock.
        """
        node = self.nodes[rank]
        if node.life is not Life.LOST and not self.closing:
            if self.launcher is None:
                self.lose(rank, cause)
            else:
                node.become(Life.UNEXPLAINED)
                self._unexplained.setdefault(rank, (cause, time.monotonic() + EXIT_CAUSE_TIMEOUT))

    def _explain_losses(self) -> None:
        """Waits until the launcher has told why nodes are gone, for EXIT_CAUSE_TIMEOUT at most. They are lost then.

        The caller holds no lock. Interruptible: the flushing thread goes on with it.
        """
        while self._unexplained:
            if not self._ask_launcher(_LISTEN):
                if self._asker != threading.get_ident():  # another thread asks it
                    self._give_up_late(_HEARD)
                    return
                # a finalizer that the collector runs while this very thread asks: all it can do is wait
                self._give_up_late()
                time.sleep(_LISTEN)
            if self.interrupts.pending:
                self.interrupts.check()

    def _give_up_late(self, grace: float = 0.0) -> None:
        """Marks the nodes as lost whose end the launcher has not explained in time."""
        now = time.monotonic()
        with self._lock:
            for rank, (cause, deadline) in list(self._unexplained.items()):
                if now >= deadline + grace or self.closing:
                    self.lose(rank, cause)
                    self._unexplained.pop(rank, None)

    @uninterrupted
    def _ask_launcher(self, timeout: float = 0.0) -> bool:
        """Takes in the launcher's events, waiting for up to ``timeout`` seconds; returns False if another thread does
        so.

        No lock is held meanwhile that a thread could need which issues operations or waits for nodes.
        """
        if not self._asking.acquire(blocking=False):
            return False
        self._asker = threading.get_ident()
        launcher, died = self.launcher, ""
        events: Sequence[Any] = ()
        try:
            if launcher is not None:
                while self._to_end:
                    launcher.end(self._to_end.popleft())
                while self._to_look:
                    launcher.look(self._to_look.popleft())
                if timeout:
                    descriptors.wait_readable([launcher], timeout)
                try:
                    events = launcher.events()
                except StartError as e:  # the launcher died, and its nodes with it
                    died = str(e)
            with self._lock:
                for event in events:
                    if isinstance(event, Exited):
                        self.lose(event.rank, event.cause, event.tail, event.host, event.running, event.beside)
                    elif isinstance(event, Sight):
                        self.nodes[event.rank].sight = event
                if died:
                    self.launcher, self.launcher_died = None, died
                    for node in self.nodes:
                        self.lose(node.rank, died)
        finally:
            self._asker = 0
            self._asking.release()
        self._give_up_late()
        return True

    def lose(
        self,
        rank: int,
        cause: str,
        tail: tuple[str, ...] = (),
        host: str = "",
        running: int = -1,
        beside: Sequence[int] = (),
    ) -> None:
        """Marks a node as lost; ends all waiting for it and tells the other nodes. A second call does nothing.

        ``host`` is the host where it was to run, for a node that has not said hello. ``running``: the number of the
        command whose function it was running; ``beside``: those of the functions on its streams.
        """
        with self._lock:
            node = self.nodes[rank]
            if node.life is Life.LOST or self.closing:
                return
            hello = node.said_hello
            where = (hello.host, hello.pid) if hello else (host or "?", 0)
            self._unexplained.pop(rank, None)
            doing, last = node.last_words(running, beside)
            lost = NodeLost(rank, *where, cause + doing, tail, last)
            for fan_out in self.fan_outs.values():
                if rank in fan_out.ranks:
                    fan_out.pack()  # the other members have what was issued before
                    fan_out.lose(lost)
            node.lose(lost)
            self.losses.append(lost)
            for request in list(self._requests.values()):  # one step: other threads take theirs out without the lock
                if request.asks(rank) and self._requests.pop(request.id, None) is not None:
                    for late in request.ranks:
                        if late != rank:
                            self.nodes[late].unawaited.add(request.id)  # its answer may still come
                    request.resolve()
            if self.launcher is not None:
                # the process may be stopped or cut off, and nodes that wait for its tensors learn from its end
                self._to_end.append(rank)
                self._wake.set()
            for other in self.there():
                other.outbox.add(c.Lost(rank, cause))
            if not self.closed:
                self.side.lost(rank, cause, [other for other in self.nodes if other.life is not Life.LOST])
            self._on_lost(lost)

    @uninterrupted
    def cancel(self, rank: int, request: int) -> bool:
        """Has the function of a request interrupted on its node. Does not wait.

        Returns False, and does nothing, where it has ended, the node is lost, or this is a forked child; and where the
        node has no side channel, which is said once.
        """
        with self._lock:
            node = self.nodes[rank]
            if self.closed or self.is_forked or not self._under_way(node, request):
                return False
            if self.side.hub is None:
                if not self.side.said_deaf:
                    self.side.said_deaf = True
                    _log.warning(
                        "a function on node %d was cancelled, and goes on: functions can't be interrupted on %s",
                        rank,
                        "nodes that are threads of the script (launcher='inproc')"
                        if self.launcher is None
                        else "nodes of a launcher that gives them no side channel",
                    )
                return False
            if request not in self.side.cancelled:
                self.side.cancel(node, request)
                self._wake.set()
            return True

    def _under_way(self, node: Node, request: int) -> bool:
        """Returns whether the node has not answered a request, whether anybody waits for that or not."""
        return node.life is not Life.LOST and (request in node.unawaited or request in self._requests)

    def waited_for(self, rank: int, kind: type[Message]) -> list[int]:
        """Returns the requests for which threads wait that a node answers by such a reply."""
        return [each.id for each in list(self._requests.values()) if each.node == rank and each.kind is kind]

    def kill(self, rank: int, cause: str) -> None:
        """Ends a node and marks it as lost, whatever it is at: a loss of which the script knows. Raises as ``check``
        for one that is lost already."""
        self.check(self.nodes[rank].outbox)
        self.lose(rank, cause)
        self.told_losses.add(rank)
        with self._lock:
            self.hub.cut(rank)
        self._ask_launcher()

    # ---- waiting ---------------------------------------------------------------------------------------------------

    def request(self, node: int, kind: type[Message] = c.Done, due: int = 0) -> Request:
        """Returns a new request to ``node``, whose id goes into a command. ``due``: of reasons, how many are asked for.

        Raises as ``check``: nobody would answer it.
        """
        self.check(self.nodes[node].outbox)
        request = Request(next(self._ids), node, kind, due)
        self._requests[request.id] = request
        return request

    def request_told(self, node: int, kind: type[Message], then: Callable[[], object]) -> Told:
        """Returns a new request to ``node``, at whose end ``then`` is called: by the answer, a loss, or ``close``. Any
        thread may take the answer, and none has to wait. Raises as ``check``."""
        self.check(self.nodes[node].outbox)
        request = Told(next(self._ids), node, kind, then)
        self._requests[request.id] = request
        return request

    def request_all(self, queue: CommandQueue, kind: type[Message] = c.Done, due: int = 0) -> MeshRequest:
        """Returns a new request to all nodes of a queue, which one command asks. Its ``replies`` are by rank.

        Raises as ``check``.
        """
        self.check(queue)
        request = MeshRequest(next(self._ids), queue, kind, due)
        self._requests[request.id] = request
        return request

    def drop(self, request: Request) -> None:
        """Forgets a request for which nobody waits any more; the reply that may still come is passed over.

        Twice is fine.
        """
        if request.done or request.id <= 0:
            return
        late = [self.nodes[rank].unawaited for rank in request.ranks]
        late = [unawaited for unawaited in late if request.id not in unawaited]
        for unawaited in late:
            unawaited.add(request.id)  # first: the reply may come in another thread at any moment
        if late and self._requests.pop(request.id, None) is None:
            for unawaited in late:
                unawaited.discard(request.id)

    def wait(
        self,
        request: Request,
        timeout: float | None = None,
        until: Callable[[], bool] | None = None,
        explain: bool = True,
    ) -> c.Reply | None:
        """Waits until the request is resolved (or ``until()`` holds); returns its reply. ``explain``: say why it takes
        long.

        Interruptible. Raises NodeLost when the node is lost, TimeoutError after ``timeout`` seconds.
        """
        outbox = self.nodes[request.node].outbox if request.queue is None else request.queue
        poller, waker = self._poller()
        request.waker = waker
        deadline = None if timeout is None else time.monotonic() + timeout
        patience, turns = None, 0
        try:
            while not request.done and not (until is not None and until()):
                self.check(outbox)
                left = TICK if deadline is None else min(TICK, deadline - time.monotonic())
                if left <= 0:
                    raise TimeoutError(f"node {request.node} has not answered within {timeout} s")
                ready, turns = self._poll(poller, waker, left), turns + 1
                if self.interrupts.pending:
                    self.interrupts.check()
                if self._unexplained:
                    self._explain_losses()
                if patience is not None:
                    patience.look(self.nodes[request.node], self.there(), self._look)
                elif explain and (not ready or turns > 100):  # a wait that takes long
                    patience = Patience()
        finally:
            request.waker = None
            if not self._local.idle:
                self._local.idle.append((poller, waker))
            self.drop(request)
        if until is None and request.reply is None:  # ended without a reply: by a loss, or by `close`
            self.check(outbox)
        outbox.restart()
        return request.reply

    def _poller(self) -> tuple[select.poll, Waker]:
        """Returns a poll object for this thread and its waker. The caller puts both back, unless some are there:
        those of a wait within its own, which would keep a descriptor for as long as the thread lives.
        """
        try:
            return self._local.idle.pop()  # type: ignore[no-any-return]
        except (AttributeError, IndexError):  # the thread's first wait, or a signal handler's in the middle of another
            poller, waker = select.poll(), Waker()
            for fd in (self._hub_fd, waker.fd):
                poller.register(fd, select.POLLIN)
            self._watch_launcher(poller, waker, True)
            self._local.__dict__.setdefault("idle", [])
            return poller, waker

    def _look(self, node: Node) -> None:
        """Asks for a look at a node's process, from outside."""
        if self.launcher is not None:
            self._to_look.append(node.rank)
            self._wake.set()

    def _poll(self, poller: select.poll, waker: Waker, seconds: float) -> bool:
        """Waits until something may have arrived, and takes it in; returns False if nothing has."""
        waker.polling = True
        ready = poller.poll(seconds * 1000)
        waker.polling = False
        asked = self._readable(ready, waker)
        if not asked or (waker.launcher < 0 and self.launcher is not None):
            self._watch_launcher(poller, waker, asked)
        return bool(ready)

    def _watch_launcher(self, poller: select.poll, waker: Waker, on: bool) -> None:
        """Has a thread's next polls end when the launcher has something to report, or not."""
        if not on and waker.launcher >= 0:
            poller.unregister(waker.launcher)
            waker.launcher = -1
        elif on and waker.launcher < 0:
            with self._lock:  # so that the launcher is not stopped meanwhile
                if self.launcher is not None:
                    waker.launcher = self.launcher.fileno()
                    poller.register(waker.launcher, select.POLLIN)

    @uninterrupted
    def _readable(self, ready: list[tuple[int, int]], waker: Waker) -> bool:
        """Takes in what a poll has found. After a poll that found nothing it asks the launcher, too.

        Returns False where the launcher has something to report that this thread could not take: another one does, or
        there is no launcher any more. A poll would only find that again.
        """
        ask = not ready
        for fd, _ in ready:
            if fd == waker.fd:
                os.eventfd_read(fd)
            elif fd != self._hub_fd:
                ask = True
        asked = not ask or (self._ask_launcher() and (self.launcher is not None or not ready))
        with self._lock:
            self._drain()
        return asked

    def pause(self, seconds: float) -> None:
        """Sleeps until something may have arrived, and takes it in."""
        poller, waker = self._poller()
        try:
            self._poll(poller, waker, seconds)
            if self._unexplained:
                self._explain_losses()
        finally:
            if not self._local.idle:
                self._local.idle.append((poller, waker))

    # ---- the idle flush --------------------------------------------------------------------------------------------

    def _flush_idle(self) -> None:
        """Sends what an issuing thread left behind, so that nodes work while the script does something else."""
        quiet, said, looked, standstill = 0, False, 0.0, Standstill()
        try:
            while not self.closed:
                try:
                    looked = self._look_at_time(standstill, looked)
                    quiet = self._look_about(quiet)
                except ClosedError:  # from the hub: a Ctrl-C came while the session was made
                    return
                except Exception:  # without this thread nothing would leave by itself any more
                    if not said:
                        _log.exception("what flushes behind the script's back failed; it goes on")
                    said = True
        finally:
            standstill.close()

    def _look_at_time(self, standstill: Standstill, looked: float) -> float:
        """Does what is due now and then: has deaf connections cut, tells nodes what they could not be told before, says
        which functions go on although they were cancelled, and logs that this process stood still between two rounds.

        ``looked``: when connections were looked at. Returns that for the next call.
        """
        now, stood = time.monotonic(), standstill.look()
        if now - looked > DEAF:
            looked = now
            self._cut_off()
            with self._lock:
                if not self.closed:
                    self.side.cut_endless()
                    if self.side.behind:
                        self.side.tell(self.there())
        for request, cancelled in list(self.side.cancelled.items()):
            if not self._under_way(cancelled.node, request) or cancelled.look(self._look):
                del self.side.cancelled[request]
        if stood > STILL:
            _log.warning(
                "this script stood still for %.0f s (stopped by Ctrl-Z or a debugger, or its host was): nodes have "
                "waited meanwhile, and those of this host are all there",
                stood,
            )
        return looked

    def _cut_off(self) -> None:
        """Cuts the connections that are of no use any more, and marks their nodes as lost.

        At once: that they end then, as the launcher will say, is not why they are lost.
        """
        with self._lock:
            for ranks, why in ((self.hub.cut_deaf(), _SILENT), (self.hub.cut_endless(), _ENDLESS)):
                for rank in ranks:
                    self.lose(rank, why)

    def _look_about(self, quiet: int) -> int:
        """Does one round of the idle flush; returns the new count.

        ``quiet``: the number of rounds in a row that have found nothing to do.
        """
        if quiet > 10:
            self._wake.clear()
            self._parked = True
            for queue in self.queues:
                if queue.batch:
                    queue.set_flush_threshold(2)  # the next append flushes at once, and wakes this thread
            self._wake.wait(TICK)
            self._parked = False
            quiet = 0
        queues = self.queues
        before = [(q.moved, len(q.queue)) for q in queues]
        time.sleep(IDLE)
        if self.closed:
            return 0
        quiet += 1
        self.interrupts.remind()
        for queue, (moved, queued) in zip(queues, before, strict=True):
            left = queue.pieces or queue.ready
            if queue.moved != moved and not left:
                quiet = 0
            elif (queued or queue.dead or left or queue.unheld) and queue.there:
                quiet = 0
                with self._lock:
                    if not self.closed and (left or not queue.full):
                        self._send(queue)
        if self.launcher is not None and not self._ask_launcher():
            self._give_up_late(_HEARD)
        if self.launcher is not None or quiet == 1:
            self._locked_drain()
        return quiet

    # ---- the end ---------------------------------------------------------------------------------------------------

    def forked(self) -> None:
        """Makes a forked child's copy unusable: nothing works any more, and nothing leaves."""
        self.is_forked = True
        self._lock = threading.RLock()  # a thread of the parent may have held the old one
        self._asking = threading.Lock()
        self._unexplained.clear()  # nothing of the launcher's is to be asked here, nor touched
        self._to_end.clear()
        self._to_look.clear()
        self.launcher = None
        self._wake = threading.Event()
        self.hub.forked()
        self.side.forked()
        for node in self.nodes:
            node.forked()
        for fan_out in self.fan_outs.values():
            fan_out.forked()

    def close(self) -> None:
        """Closes the hub. Requests under way end with an error. Calling it twice is fine."""
        with self._lock:
            if self.closed:
                return
            self.closing = self.closed = True
            self.launcher = None  # the session stops it
            self.hub.close()
            self.side.close()
            for request in list(self._requests.values()):
                request.resolve()
            for queue in self.queues:
                queue.end()
        self._wake.set()
        if self._asker != threading.get_ident():  # else a finalizer, or a handler, closes in the middle of it
            with self._asking:  # the thread that asks the launcher has ended that: it may be stopped now
                pass
        if threading.current_thread() is not self._flusher:
            self._flusher.join(5)
