"""The master's I/O: flushes outboxes into the hub, takes reports in, and lets threads wait for answers.

    issuing threads --> Outbox (no lock) --flush--> Hub.send        under `_lock`
    Hub.drain --> Report --> acknowledge, failures, requests        under `_lock`

There is no receiving thread: whoever waits polls the hub's descriptor without the lock and drains with it. Each
draining thread wakes the others whose answers it took. One small thread flushes what lies about after a short idle.
"""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

from ..host.launcher import Exited, Launcher
from ..process.signals import Interrupts, whole
from ..protocol import codec
from ..protocol import commands as c
from ..protocol.errors import BrokenError, ClosedError, DisttensorError, ForkError, NodeLost, ProtocolError, StartError
from ..protocol.failure_ids import position
from ..transport.base import Hub
from .failures import Failure, Failures, Site, line_of
from .outbox import Outbox
from .requests import Request, Waker

#: Commands that nobody flushed leave after about this long (seconds).
IDLE = 0.002
#: A node that neither dies nor answers is looked after at this interval while somebody waits.
TICK = 0.5
#: Seconds for the launcher, which may have other news first, to say why a node is gone.
WORD = 2.0
#: Seconds for which an operation waits at a full window before it says so.
SLOW = 5.0

_log = logging.getLogger("disttensor")


class Link:
    """The master's connection with all nodes."""

    def __init__(self, hub: Hub, nodes: int, launcher: Launcher | None, on_lost: Callable[[NodeLost], None]) -> None:
        self.hub = hub
        self._hub_fd = hub.fileno()
        self.launcher = launcher
        self.outboxes = [Outbox(rank) for rank in range(nodes)]
        self.hellos: dict[int, c.Hello] = {}
        self.failures = Failures()
        self.losses: list[NodeLost] = []  #: the first is what most likely explains the others
        self.said: set[int] = set()  #: lost nodes whose loss was raised to somebody
        self.interrupts = Interrupts()
        self.reports = 0  #: messages received (for tests and status)
        self.patient = True  #: a full window blocks; not at the end of a script
        self.closing = False  #: nodes have been told to end, so that their end is no loss
        self.closed = False
        self._forked = False
        self._on_lost = on_lost
        self._lock = threading.RLock()
        self._requests: dict[int, Request] = {}
        self._ids = count(1)
        self._local = threading.local()
        self._wake = threading.Event()
        self._parked = False  #: the flushing thread waits for work
        self._flusher = threading.Thread(target=self._flush_idle, name="disttensor-flush", daemon=True)
        self._flusher.start()

    def __repr__(self) -> str:
        boxes = self.outboxes
        queued, flying = sum(len(box.queue) // 2 for box in boxes), sum(box.sent - box.done for box in boxes)
        state = " closed" if self.closed else ""
        return f"<Link nodes={len(boxes)} queued={queued} inflight={flying} waiting={len(self._requests)}{state}>"

    def extend(self, key: str) -> Outbox:  # lets in one more node, by its public key; its rank is the next
        with self._lock:
            self.hub.admit(len(self.outboxes), key)
            self.outboxes.append(Outbox(len(self.outboxes), self.outboxes[0].blocking))
            return self.outboxes[-1]

    # ---- sending ---------------------------------------------------------------------------------------------------

    def tick(self, outbox: Outbox) -> None:
        """What an issuing thread calls at ``outbox.limit``: flushes if it is time to, else sweeps."""
        if len(outbox.queue) >= outbox.batch:
            self.flush(outbox)
        else:
            self.interrupts.look()
            outbox.sweep()
            if self.interrupts.pending:
                self.interrupts.check()

    def flush(self, outbox: Outbox, wait: bool = True) -> None:
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
        if outbox.lost is not None or self.closed:
            self.check(outbox)
        if outbox.unsendable is not None:
            outbox.complain()
        if wait and self.patient and outbox.full:
            self._wait_window(outbox)

    def exchange(self, outbox: Outbox, request: Request, timeout: float | None) -> c.Reply | None:
        """Sends what is queued anywhere, ``outbox`` last, and waits for the reply.

        The wait follows the send as closely as it can: on a busy machine ZeroMQ's thread runs only then. So nothing is
        drained between them, unless other threads wait too, for a send can swallow the sign that a message is there.
        """
        self.flush_all(outbox)
        self.check(outbox)
        self.interrupts.look()
        try:
            self._push(outbox, len(self._requests) > 1)
            if self.interrupts.pending:
                self.interrupts.check()
            if outbox.unsendable is not None:  # perhaps the question itself
                outbox.complain()
        except BaseException:
            self._requests.pop(request.id, None)
            raise
        return self.wait(request, timeout)

    def flush_all(self, but: Outbox | None = None) -> None:
        """Flushes every node that is there: before the master blocks on one, or nodes could wait for each other.

        What goes wrong with a node is said to whoever uses it next.
        """
        for outbox in self.outboxes:
            if (outbox.queue or outbox.dead) and outbox is not but and outbox.lost is None and not self._forked:
                self.interrupts.look()
                self._push(outbox)
        if self._parked:
            self._wake.set()

    def pair(self, first: tuple[int, c.Command], second: tuple[int, c.Command], site: Any) -> None:
        """Queues a Send and its Recv and flushes both, so that every pair of nodes sees transfers in one order.

        Then blocks while the window of either is full. By now both have all that they need to go on.
        """
        self.together([(*first, site), (*second, site)])

    def together(self, commands: Sequence[tuple[int, c.Command, Site | None]], hurry: bool = True) -> None:
        """The same for any number of nodes: (rank, command, site) of each. Without ``hurry`` they leave with what is
        queued after them, but still together."""
        outboxes = [self.outboxes[rank] for rank, _, _ in commands]
        self.interrupts.look()
        self._push_together(outboxes, commands, hurry)
        if self.interrupts.pending:
            self.interrupts.check()
        if self._parked:
            self._wake.set()
        for outbox in outboxes:
            if outbox.unsendable is not None:
                outbox.complain()
            if self.patient and outbox.full:
                self._wait_window(outbox)

    @whole
    def _push_together(
        self, outboxes: list[Outbox], commands: Sequence[tuple[int, c.Command, Site | None]], hurry: bool
    ) -> None:
        with self._lock:
            for outbox in outboxes:
                self.check(outbox)
            for outbox, (_, command, site) in zip(outboxes, commands, strict=True):
                outbox.add(command, site)
                hurry = hurry or len(outbox.queue) >= outbox.batch
            if hurry:
                for outbox in outboxes:
                    self._send(outbox)
                self.drain()
            else:
                for outbox in outboxes:
                    outbox.mates.update(outboxes)

    @whole
    def _push(self, outbox: Outbox, drain: bool = True) -> None:
        with self._lock:
            self._send(outbox)
            if drain:
                self.drain()

    def check(self, outbox: Outbox) -> None:
        """Raises what makes the node unusable: ForkError, DisttensorError after shutdown, NodeLost."""
        if self._forked:
            raise ForkError("this process was forked from the master; only the master can use its nodes")
        if self.closed:
            outbox.discard()
            raise DisttensorError("the session was shut down; its tensors are gone (call init_master_worker again)")
        if outbox.lost is not None:
            outbox.discard()
            self.said.add(outbox.rank)
            raise outbox.lost.again()

    def _send(self, outbox: Outbox) -> None:
        if outbox.lost is not None or self.closed:  # since `check`, perhaps
            return
        outbox.pack()
        if outbox.mates:
            mates, outbox.mates = outbox.mates, set()
            for mate in mates - {outbox}:
                self._send(mate)
        ready = outbox.ready
        try:
            while ready:
                self.hub.send(outbox.rank, ready[0])
                ready.popleft()
        except BrokenError as e:
            self._await_word(outbox, time.monotonic() + WORD)
            self.lose(outbox.rank, str(e))

    def _wait_window(self, outbox: Outbox) -> None:
        request = Request(0, outbox.rank)
        try:
            self.wait(request, SLOW, until=lambda: not outbox.full)
        except TimeoutError:
            _log.warning(
                "node %d is %d commands behind, so this operation waits; it is at what was issued at %s",
                outbox.rank,
                outbox.sent - outbox.done,
                line_of(outbox.running()),
            )
            self.wait(request, until=lambda: not outbox.full)

    # ---- receiving -------------------------------------------------------------------------------------------------

    @whole
    def drain(self) -> None:
        """Takes in what has arrived. Callable by any thread."""
        with self._lock:
            if self.closed:
                return
            for rank, message in self.hub.drain():
                if self.outboxes[rank].lost is not None:
                    continue  # it was given up; whatever it says now comes too late
                self.reports += 1
                try:
                    report = codec.decode_report(message)
                    if not 0 <= report.done <= self.outboxes[rank].sent:
                        raise ProtocolError(f"node {rank} reports {report.done} of {self.outboxes[rank].sent} commands")
                    for reply in report.replies:
                        self._take(rank, reply)
                except ProtocolError as e:
                    self.lose(rank, f"broke the protocol: {e}")
                    continue
                self.outboxes[rank].acknowledge(report.done)
            deadline = time.monotonic() + WORD  # for all of them
            for rank in self.hub.gone():
                if self.outboxes[rank].lost is None and not self.closing:
                    self._await_word(self.outboxes[rank], deadline)
                    self.lose(rank, "its connection ended")

    def _take(self, rank: int, reply: c.Reply) -> None:
        codec.check_reply(reply)
        hello = self.hellos.get(rank)
        if isinstance(reply, c.Hello):
            if hello is not None:
                raise ProtocolError("a second hello")
            self.hellos[rank] = reply
        elif hello is None:
            raise ProtocolError(f"a {type(reply).__name__} before its hello")
        elif isinstance(reply, c.Failed):
            site = self.outboxes[rank].site(position(reply.seq)[0])
            self.failures.keep(Failure(rank, hello.host, hello.pid, reply, site))
        else:
            request = self._requests.get(reply.request)
            if request is not None:
                if request.node != rank:
                    raise ProtocolError(f"node {rank} answers a request to node {request.node}")
                if not isinstance(reply, (request.kind, c.Poisoned)):
                    raise ProtocolError(f"a {type(reply).__name__} where {request.kind.__name__} was asked for")
                del self._requests[reply.request]
                request.resolve(reply)

    def _await_word(self, outbox: Outbox, deadline: float) -> None:
        """Until the launcher has said why the node is gone: it knows, if the process has ended."""
        while self.launcher is not None and outbox.lost is None:
            left = deadline - time.monotonic()
            self._look_at_launcher(max(0.0, left))  # once at least: this process may have been kept from running
            if left <= 0:
                return

    def _look_at_launcher(self, timeout: float) -> None:
        if timeout and self.launcher is not None:
            select.select([self.launcher.fileno()], [], [], timeout)
        try:
            events = self.launcher.events() if self.launcher is not None else []
        except StartError as e:  # it died, and its nodes with it
            self.launcher = None
            for outbox in self.outboxes:
                self.lose(outbox.rank, str(e))
            return
        for event in events:
            if isinstance(event, Exited):
                self.lose(event.rank, event.cause, event.tail, event.host)

    def lose(self, rank: int, cause: str, tail: tuple[str, ...] = (), host: str = "") -> None:
        """Marks a node as lost; ends all waiting for it and tells the other nodes. Saying it twice is fine.

        ``host`` is where it was to run, for one that has not said it itself.
        """
        outbox = self.outboxes[rank]
        if outbox.lost is not None or self.closing:
            return
        hello = self.hellos.get(rank)
        where = (hello.host, hello.pid) if hello else (host or "?", 0)
        outbox.lose(lost := NodeLost(rank, *where, cause, tail))
        self.losses.append(lost)
        for request in [r for r in self._requests.values() if r.node == rank]:
            del self._requests[request.id]
            request.resolve()
        if self.launcher is not None:
            self.launcher.end(rank)  # it may be stopped or cut off, and nodes that wait for its tensors hear of it so
        for other in self.outboxes:
            if other.lost is None and other.rank in self.hellos:
                other.add(c.Lost(rank, cause))
        self._on_lost(lost)

    # ---- waiting ---------------------------------------------------------------------------------------------------

    def request(self, node: int, kind: type[c.Reply] = c.Done) -> Request:
        """A new request to ``node``, whose id goes into a command. Raises as ``check``: nobody would answer it."""
        self.check(self.outboxes[node])
        request = Request(next(self._ids), node, kind)
        self._requests[request.id] = request
        return request

    def drop(self, request: Request) -> None:
        """Nobody waits for it any more; a reply that comes is passed over."""
        self._requests.pop(request.id, None)

    def wait(
        self, request: Request, timeout: float | None = None, until: Callable[[], bool] | None = None
    ) -> c.Reply | None:
        """Waits until the request is resolved (or ``until()`` holds); gives its reply.

        Interruptible. Raises NodeLost when the node is lost, TimeoutError after ``timeout`` seconds.
        """
        outbox = self.outboxes[request.node]
        poller, waker = self._poller()
        request.waker = waker
        deadline = None if timeout is None else time.monotonic() + timeout
        try:
            while not request.done and not (until is not None and until()):
                self.check(outbox)
                left = TICK if deadline is None else min(TICK, deadline - time.monotonic())
                if left <= 0:
                    raise TimeoutError(f"node {request.node} has not answered within {timeout} s")
                waker.polling = True
                ready = poller.poll(left * 1000)
                waker.polling = False
                self._readable(ready, waker)
                if self.interrupts.pending:
                    self.interrupts.check()
        finally:
            request.waker = None
            self._local.idle.append((poller, waker))
            self._requests.pop(request.id, None)
        if until is None and request.reply is None:  # ended without one: by a loss, or by `close`
            self.check(outbox)
        outbox.restart()
        return request.reply

    def _poller(self) -> tuple[select.poll, Waker]:
        """A poll object for this thread and what wakes it; to be put back among the idle ones."""
        try:
            return self._local.idle.pop()  # type: ignore[no-any-return]
        except (AttributeError, IndexError):  # its first wait, or one by a signal's handler in the middle of another
            poller, waker = select.poll(), Waker()
            with self._lock:  # the launcher is not stopped meanwhile
                fds = [self._hub_fd, waker.fd, *([self.launcher.fileno()] if self.launcher else [])]
            for fd in fds:
                poller.register(fd, select.POLLIN)
            self._local.__dict__.setdefault("idle", [])
            return poller, waker

    @whole
    def _readable(self, ready: list[tuple[int, int]], waker: Waker) -> None:
        """Takes in what a poll has found. Finding nothing for so long is a reason to look everywhere."""
        with self._lock:
            for fd, _ in ready:
                if fd == waker.fd:
                    os.eventfd_read(fd)
                elif fd != self._hub_fd:
                    self._look_at_launcher(0)
            if not ready:
                self._look_at_launcher(0)
            self.drain()

    def pause(self, seconds: float) -> None:
        """Sleeps until something may have arrived, and takes it in."""
        poller, waker = self._poller()
        try:
            self._readable(poller.poll(seconds * 1000), waker)
        finally:
            self._local.idle.append((poller, waker))

    # ---- the idle flush --------------------------------------------------------------------------------------------

    def _flush_idle(self) -> None:
        """Sends what an issuing thread left behind, so that nodes work while the script does something else."""
        quiet, said = 0, False
        while not self.closed:
            try:
                quiet = self._look_about(quiet)
            except ClosedError:  # the hub: a session that a Ctrl-C met while it was made
                return
            except Exception:  # without this thread nothing would leave by itself any more
                if not said:
                    _log.exception("what flushes behind the script's back failed; it goes on")
                said = True

    def _look_about(self, quiet: int) -> int:
        """One round; ``quiet`` is how many rounds have found nothing to do. Gives the new count."""
        if quiet > 10:
            self._wake.clear()
            self._parked = True
            for outbox in self.outboxes:
                if outbox.batch:
                    outbox.urge(2)  # the next append flushes at once, and wakes this thread
            self._wake.wait(TICK)
            self._parked = False
            quiet = 0
        outboxes = list(self.outboxes)  # there may be more in a moment
        before = [(o.sent, len(o.queue)) for o in outboxes]
        time.sleep(IDLE)
        if self.closed:
            return 0
        quiet += 1
        self.interrupts.remind()
        for outbox, (sent, queued) in zip(outboxes, before, strict=True):
            if outbox.sent != sent:
                quiet = 0
            elif (queued or outbox.dead) and outbox.lost is None:
                quiet = 0
                with self._lock:
                    if not self.closed and not outbox.full:
                        self._send(outbox)
        if self.launcher is not None or quiet == 1:
            with self._lock:
                if not self.closed:
                    self._look_at_launcher(0)
                    self.drain()
        return quiet

    # ---- the end ---------------------------------------------------------------------------------------------------

    def forked(self) -> None:
        """In a forked child: nothing works any more, and nothing leaves."""
        self._forked = True
        self._lock = threading.RLock()  # a thread that isn't here may have held the other one
        self._wake = threading.Event()
        self.hub.forked()
        for outbox in self.outboxes:
            outbox.forked()

    def close(self) -> None:
        """Closes the hub. Requests under way end with an error. Calling it twice is fine."""
        with self._lock:
            if self.closed:
                return
            self.closing = self.closed = True
            self.launcher = None  # whoever started it stops it
            self.hub.close()
            for request in list(self._requests.values()):
                request.resolve()
            for outbox in self.outboxes:
                outbox.urge(0)
        self._wake.set()
        if threading.current_thread() is not self._flusher:
            self._flusher.join(5)
