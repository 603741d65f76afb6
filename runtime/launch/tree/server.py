"""The fork server: a process that has imported torch once and forks a worker from itself for each bundle.

    master              fork server (one thread)                          worker of node k
    LocalLauncher --control socket--> Server --life-line pipe: bundle, then silence--> stdin of its protocol
       events    <-- Began, Ended --    |    <-- stdout, stderr pipes, shown by output/printer.py --------
                                        +-- pidfd: when and how it ended

Who dies when: the control socket's end (the master is gone, even by SIGKILL) or SIGTERM makes the server end all
workers and then itself. When the server itself is killed, the kernel kills its workers (PR_SET_PDEATHSIG) and their
life-lines end. What a worker's functions have started, daemons too, ends with the worker (``_reap``). No
descriptor of a worker's is left open in its siblings.

It uses neither threads nor CUDA nor torch's thread pool: none of them survive a fork.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import resource
import selectors
import signal
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial

from ...host import descriptors
from ...host.memory_limit import MemoryKills, resident
from ...host.output_options import Output
from ...host.process_use import UNKNOWN, use_of
from ...host.socket_folder import living_sockets
from ...process.lifetime import adopt_orphans, children, describe_exit, die_with_parent, end_children, process_stat
from ...process.page import Page
from ...protocol.bundle import Bundle, names_from_text, write_bundle
from ...protocol.errors import ProtocolError
from ..output.lines import Tail
from ..output.printer import Printer
from ..output.relay import Source
from .control import (
    CREDIT,
    Began,
    Ended,
    EndSession,
    Flush,
    Flushed,
    Kill,
    LaunchFailed,
    Look,
    Modules,
    NodeOutput,
    Order,
    OutputAck,
    OutputRead,
    Pause,
    ReadOutput,
    Ready,
    Seen,
    SessionEnded,
    Start,
    Stop,
)
from .fork_child import STACKS, become_worker
from .framed import FramedSocket
from .shipping import import_shipped

#: Between SIGTERM and SIGKILL for a worker (seconds). The promise is that none outlives its master by 2 s.
TERM_TIME = 1.0
#: Seconds that the end of what a dead worker has left behind may take; then it is left to the server's own end.
ORPHAN_TIME = 0.5
#: Seconds in which a worker that runs has written its stacks; and the most characters of them that are passed on.
LOOK_TIME, MAX_STACK = 0.2, 16 << 10
#: Of the kernel's clock in which it counts the time of processes, a second.
_TICKS = os.sysconf("SC_CLK_TCK")


class ForkedWorker:
    """A running worker, as its server sees it."""

    def __init__(
        self, rank: int, pid: int, lifeline: int, sources: tuple[Source, ...], tail: Tail, stacks: int, page: Page
    ) -> None:
        self.rank = rank
        self.pid = pid
        self.pidfd = os.pidfd_open(pid)
        self.lifeline = lifeline  #: write end; the worker dies when it closes
        self.sources = sources
        self.tail = tail
        self.stacks = stacks  #: read end; the worker writes its stacks there
        self.page = page
        self.stack = b""  #: what has come of them
        self.look_by = 0.0  #: when to say what was seen; 0: nobody has asked
        self.killed = False  #: by this server

    def signal(self, number: int) -> None:
        """Signals its process group, and so children of user functions. It is not reaped yet: the pid is its own."""
        self.killed = self.killed or number == signal.SIGKILL
        self.signal_group(number)

    def signal_group(self, number: int) -> None:
        """Does so for what it has left behind, when it has ended itself."""
        try:
            os.killpg(self.pid, number)
        except OSError:  # its user code moved it to another group
            with contextlib.suppress(OSError):
                os.kill(self.pid, number)

    def pause(self, on: bool) -> None:
        """Stops it, or has it go on. A stopped one stays so, whoever else continues it."""
        self.page.paused = on
        self.signal_group(signal.SIGSTOP if on else signal.SIGCONT)

    def state(self) -> str:
        """Returns the state of its process, as in /proc."""
        with contextlib.suppress(OSError):
            return process_stat(self.pid)[0]
        return "?"

    def seen(self, stacks: bool, flight: bool = False) -> Seen:
        """Returns the sight of it from outside; with the ``stacks`` that it has written and its
        ``flight`` record, where they were asked for."""
        seq, kind, peer, seconds, deaf = self.page.read()
        state, rss, cpu, lived, peak, use = "?", 0, 0.0, 0.0, 0, UNKNOWN
        with contextlib.suppress(OSError):
            fields = process_stat(self.pid)
            state, rss = fields[0], int(fields[21]) * resource.getpagesize()
            cpu = (int(fields[11]) + int(fields[12])) / _TICKS
            lived = max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / _TICKS)
            peak = max(rss, resident(pid=self.pid)[1])
            use = use_of(self.pid, self.page.tally(), int(fields[9]))
        return Seen(
            self.rank, state, self.page.paused, seq, kind, peer, seconds, deaf, rss,
            self.stack.decode(errors="replace")[:MAX_STACK] if stacks else "", self.page.beside, stacks, cpu, lived,
            peak, self.tail.last(), self.page.flight() if flight else b"", use,
        )  # fmt: skip

    def end_in_words(self, code: int, peak: int, memory: MemoryKills) -> str:
        """Returns how it has ended. ``peak``: the most bytes that it had in memory."""
        lacked = memory.words(peak) if code == -signal.SIGKILL and not self.killed else ""
        return describe_exit(code) + lacked


class Server:
    """Forks, relays, reaps. ``run`` returns when the master has gone or sent Stop and no worker is left."""

    def __init__(self, wire: FramedSocket[Order]) -> None:
        self._wire = wire
        self._wakeup = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)  #: readable after SIGTERM
        self._printer = Printer()
        self._nodes: dict[int, ForkedWorker] = {}
        self._memory = MemoryKills()
        self._selector = selectors.PollSelector()  # epoll refuses regular files
        self._deadline: float | None = None  #: set while stopping: when to use more force
        self._resting = False  #: only the session ends
        self._force: int | None = None  #: the signal that the workers were sent last
        self._preloaded = children()  #: of before there was any node
        self._upward = False  #: the root shows the output of nodes
        self._unacknowledged = 0  #: bytes of that output that are not acknowledged yet
        self._paused = False  #: too much is waiting to be written, so sources wait
        self._waiting: list[int] = []  #: descriptors that are watched for room
        self._watch(wire.fileno(), self._take_orders)
        self._watch(self._wakeup[0], self._take_signal)
        signal.set_wakeup_fd(self._wakeup[1], warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, lambda *_: None)

    def __repr__(self) -> str:
        state = " stopping" if self._deadline is not None else ""
        return f"<Server nodes={sorted(self._nodes)}{state}>"

    def run(self) -> None:
        while True:
            if not self._nodes and self._deadline is not None:
                if not self._resting:
                    break
                self._wake()
            self._watch_room()
            looks = [node.look_by for node in self._nodes.values() if node.look_by]
            times = [t for t in (self._deadline, self._printer.due, *looks) if t is not None]
            timeout = max(0.0, min(times) - time.monotonic()) if times else None
            for key, mask in self._selector.select(timeout):
                # an earlier call may have closed it, and its number may be another's by now
                if mask & selectors.EVENT_READ and self._selector.get_map().get(key.fd) is key:
                    key.data()
            if looks:
                self._tell_seen()
            self._wire.push()
            self._printer.push()
            if self._deadline is not None and time.monotonic() >= self._deadline:
                self._press()
        end_children(0)  # processes that the workers' own children left behind
        self._printer.flush(0.5)
        self._wire.push(0.5)

    # ---- orders ----------------------------------------------------------------------------------------------------

    def _take_orders(self) -> None:
        for order in self._wire.hear():
            match order:
                case Output():
                    self._upward = order.upward
                    self._printer.show(names_from_text(order))
                case Modules():
                    try:
                        import_shipped(order.packed)
                    except ValueError as e:
                        raise ProtocolError(str(e)) from e
                case OutputAck():
                    self._unacknowledged -= order.size
                case Flush():
                    self._flush(order.id)
                case ReadOutput():
                    lines, more = self._printer.kept.after(order.after, order.ranks)
                    self._wire.send_message(OutputRead(order.id, tuple(lines), more))
                case Start() if self._deadline is None:
                    self._start(order.bundle, order.entry)
                case Kill() if order.rank in self._nodes:
                    self._nodes[order.rank].signal(order.signal)
                case Look():
                    self._look(order)
                case Pause():
                    for node in self._nodes.values():
                        node.pause(order.on)
                case Stop():
                    self._stop(order.grace)
                case EndSession():
                    self._stop(order.grace)
                    self._resting = True
        if self._wire.ended:
            self._selector.unregister(self._wire)
            self._stop(0)

    def _take_signal(self) -> None:
        os.read(self._wakeup[0], 64)
        self._stop(0)

    def _wake(self) -> None:
        """Ends a session, of which no worker is left, and after which there may be another."""
        self._deadline = self._force = None
        self._resting = False
        end_children(0)
        self._printer.flush()
        self._printer.kept.clear()
        self._wire.send_message(SessionEnded())

    def _stop(self, grace: float) -> None:
        self._resting = False
        deadline = time.monotonic() + grace
        if self._deadline is None or (self._force is None and deadline < self._deadline):
            self._deadline = deadline

    def _press(self) -> None:
        """Uses more force when the time is over: TERM first, KILL later."""
        self._force = signal.SIGTERM if self._force is None else signal.SIGKILL
        self._deadline = time.monotonic() + TERM_TIME
        for node in self._nodes.values():
            node.signal(signal.SIGKILL if node.page.paused else self._force)  # a stopped one would not hear of TERM

    # ---- workers ---------------------------------------------------------------------------------------------------

    def _start(self, bundle: Bundle, entry: str) -> None:
        fds: list[int] = []
        if not self._nodes:
            self._memory.start_counting()
        descriptors.make_room_for_nodes(len(self._nodes) + 1)
        try:
            for _ in range(3):
                fds += os.pipe()
            fds += os.pipe2(os.O_NONBLOCK)
            line_out, line_in, out, out_in, err, err_in, stacks, stacks_in = fds
            self._printer.begin_node(bundle.rank)
            page = Page.shared()
            pid = self._fork(bundle.rank, entry, line_out, out_in, err_in, stacks_in, page, (line_in, out, err, stacks))
            for fd in (line_out, out_in, err_in, stacks_in):
                fds.remove(fd)
                os.close(fd)
            tail = Tail()
            then = partial(self._take_output, bundle.rank, tail)
            node = ForkedWorker(
                bundle.rank, pid, line_in, (Source(out, 1, then), Source(err, 2, then)), tail, stacks, page
            )
            with contextlib.suppress(BrokenPipeError):  # it has ended already, which its pidfd will tell
                write_bundle(line_in, bundle)
        except OSError as e:  # no descriptors, no processes, no memory left
            for fd in fds:
                os.close(fd)
            self._printer.end_node(bundle.rank)
            hint = ""
            if e.errno == errno.EMFILE:
                limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
                hint = f": a node takes 5 of the {limit} that one process may have here (ulimit -n)"
            self._wire.send_message(Ended(bundle.rank, 0, os.EX_OSERR, f"could not be started: {e}{hint}", ()))
            return
        self._nodes[bundle.rank] = node
        self._watch(node.pidfd, lambda: self._reap(node))
        self._watch(node.stacks, lambda: self._take_stack(node))
        for source in node.sources:
            self._watch_source(source)
        self._wire.send_message(Began(bundle.rank, pid))

    def _fork(
        self, rank: int, entry: str, lifeline: int, out: int, err: int, stacks: int, page: Page, others: tuple[int, ...]
    ) -> int:
        server = os.getpid()
        # A signal for the child between fork and its own handlers would be taken for one to the server.
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        try:
            pid = os.fork()
            if pid == 0:
                become_worker(server, rank, entry, lifeline, out, err, stacks, page, [*others, *self._own_fds()])
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
        with contextlib.suppress(OSError):
            os.setpgid(pid, pid)  # the child does the same: one of the two comes first
        return pid

    def _own_fds(self) -> list[int]:
        """Returns all descriptors that a worker must not keep open."""
        fds = [self._wire.fileno(), *self._wakeup, *self._printer.fds()]
        for node in self._nodes.values():
            fds += [node.pidfd, node.lifeline, node.stacks, *(s.fd for s in node.sources)]
        return fds

    def _reap(self, node: ForkedWorker) -> None:
        node.signal_group(signal.SIGKILL)  # its children; it is a zombie itself, so the group's number is still its own
        _, status, usage = os.wait4(node.pid, 0)
        code = os.waitstatus_to_exitcode(status)
        cause = node.end_in_words(code, usage.ru_maxrss << 10, self._memory)
        ran, beside, flight = node.page.running, tuple(each.number for each in node.page.beside), node.page.flight()
        for source in node.sources:
            self._unwatch(source.fd)
            source.close()
        for fd in (node.pidfd, node.stacks):
            self._unwatch(fd)
            os.close(fd)
        os.close(node.lifeline)
        del self._nodes[node.rank]
        if self._deadline is None:  # else all end, and one look is enough, at the end
            # What left its process group, with a session of its own: whoever is no node has lost its node. Those of
            # nodes that live are below these. Whatever was preloaded may have started something, too.
            end_children(0, ORPHAN_TIME, {*self._preloaded, *(other.pid for other in self._nodes.values())})
        self._printer.end_node(node.rank)
        if code:  # before the master hears of it and prints the same again
            self._printer.flush()
        tail = node.tail.lines()
        self._wire.send_message(Ended(node.rank, node.pid, code, cause, tail, "", ran, beside, flight))

    # ---- looks -----------------------------------------------------------------------------------------------------

    def _look(self, order: Look) -> None:
        """Looks at a worker. One that runs is asked for its stacks, where these are wanted, which come in a moment."""
        node = self._nodes.get(order.rank)
        if node is None:
            return
        if not order.stacks:
            self._wire.send_message(node.seen(False, order.flight))
            return
        node.stack = b""
        node.look_by = time.monotonic()
        if node.page.has_begun and node.state() not in "TtZX?":
            node.look_by += LOOK_TIME
            with contextlib.suppress(OSError):
                os.kill(node.pid, STACKS)

    def _take_stack(self, node: ForkedWorker) -> None:
        with contextlib.suppress(BlockingIOError):
            while piece := os.read(node.stacks, 1 << 16):
                node.stack = (node.stack + piece)[:MAX_STACK]
            self._unwatch(node.stacks)  # it has closed them all

    def _tell_seen(self) -> None:
        for node in self._nodes.values():
            if node.look_by and time.monotonic() >= node.look_by:
                node.look_by = 0.0
                self._wire.send_message(node.seen(True))

    # ---- the selector ----------------------------------------------------------------------------------------------

    def _watch(self, fd: int, then: Callable[[], object]) -> None:
        self._selector.register(fd, selectors.EVENT_READ, then)

    def _watch_source(self, source: Source) -> None:
        if not self._paused:
            self._watch(source.fd, lambda: self._relay(source))

    def _relay(self, source: Source) -> None:
        source.read()
        if source.ended:  # the worker closed its stdout; only its pidfd says that it has ended
            self._unwatch(source.fd)

    def _flush(self, id: int) -> None:
        if not self._paused:  # else output waits for its readers, and another process may wait for this one
            for source in [s for n in self._nodes.values() for s in n.sources if not s.ended]:
                for _ in range(16):  # not for ever, as it may print on and on
                    if not source.read():
                        break
        self._printer.flush()
        self._wire.send_message(Flushed(id))

    def _take_output(self, rank: int, tail: Tail, stream: int, piece: bytes) -> None:
        tail.add(stream, piece)
        if self._upward:
            self._unacknowledged += len(piece)
            self._wire.send_message(NodeOutput(rank, stream, piece))
        else:
            self._printer.feed(rank, stream, piece)

    def _unwatch(self, fd: int) -> None:
        if fd in self._selector.get_map():
            self._selector.unregister(fd)

    def _watch_room(self) -> None:
        """Waits for room where writing was incomplete; lets sources wait while too much output is."""
        for fd in self._waiting:
            self._unwatch(fd)
        self._waiting = self._printer.waiting
        for fd in self._waiting:
            self._selector.register(fd, selectors.EVENT_WRITE)
        if not self._wire.ended:
            writing = selectors.EVENT_WRITE if self._wire.pending else 0
            self._selector.modify(self._wire, selectors.EVENT_READ | writing, self._take_orders)
        full = self._printer.full or self._unacknowledged > CREDIT
        if full != self._paused:
            self._paused = full
            for source in [s for n in self._nodes.values() for s in n.sources if not s.ended]:
                self._unwatch(source.fd)
                self._watch_source(source)


def serve(control: int, parent: int) -> int:
    """Serves the socket with this number until its end. ``parent`` is a pid to die with, or 0. One thread only."""
    wire: FramedSocket[Order] = FramedSocket(Order, control)
    if parent:
        die_with_parent(parent, signal.SIGTERM)  # ends it like the socket's end, which somebody may hold open
    adopt_orphans()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if it were ignored, exit codes would be lost
    # numpy's OpenBLAS has threads, and a handler that stops them around a fork
    warnings.filterwarnings("ignore", ".*multi-threaded, use of fork", DeprecationWarning)
    gc.freeze()  # a collection in a worker would otherwise touch, and so copy, every page
    server = Server(wire)
    wire.send_message(Ready(os.getpid(), _torch()))
    try:
        server.run()
    except ProtocolError as e:  # the kernel ends its nodes with it
        wire.send_message(LaunchFailed(f"what came was not an order of this version's: {e}"))
        wire.push(1.0)
        return os.EX_PROTOCOL
    living_sockets()  # the script's own is left where that was killed
    return 0


def _torch() -> str:
    return str(getattr(sys.modules.get("torch"), "__version__", ""))


def decline(control: int, why: str, lines: list[str]) -> None:
    """Tells the root that there won't be any worker, and the last lines about it."""
    tail = Tail()
    tail.add(2, "\n".join(lines).encode(errors="replace"))
    FramedSocket(Order, control).send_message(LaunchFailed(why, tail.lines()))
