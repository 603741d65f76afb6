"""The root: the process beside the master that holds all hosts' agents.

    master --unix socket--> root --host starter's branches: ssh, ZeroMQ, ...--> agents --> fork servers --> nodes

It deals nodes to hosts, keeps orders until an agent has come, tells the master which host each piece of news is from,
and prints the output of nodes. It imports no torch, and of the host starters only the one of its launch spec.

What agents say is checked (agent_check.py): one that is broken, or hostile, loses its own nodes and no others.

Who dies when: the end of the master's socket (even by SIGKILL) and SIGTERM make the root end all agents and then
itself. When it is killed, its wires end, and the agents by that (agent.py). A host that is silent for long
(host/silence.py) loses its nodes; a silence counts while the root itself runs.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import traceback
from collections.abc import Iterator, Sequence

import msgspec

from ...host import descriptors, versions
from ...host.launch_spec import LaunchSpec
from ...host.output_options import Output
from ...host.socket_folder import living_sockets
from ...process.clock import CLOCK, Clock
from ...process.lifetime import adopt_orphans, die_with_parent, end_children, name_process
from ...process.own_time import Unheard
from ...protocol.bundle import names_from_text
from ...protocol.errors import DisttensorError, ProtocolError
from ..output.lines import plain
from ..output.printer import Printer
from ..registry import get_starter
from .agent_check import REASON, check_news
from .control import (
    AgentHello,
    AgentNews,
    Beat,
    Began,
    Capacity,
    Ended,
    EndSession,
    Flush,
    Flushed,
    Kill,
    LaunchFailed,
    Look,
    Modules,
    News,
    NodeOutput,
    Order,
    OutputAck,
    OutputRead,
    ReadOutput,
    Ready,
    Refuse,
    Seen,
    SessionEnded,
    Start,
    Status,
    Stop,
)
from .dealing import RankAssignment
from .framed import FramedSocket, FramedStream
from .host_starter import Branch, HostStarter
from .loop import EventLoop
from .shipping import offer

#: The exit code of agents, and of nodes, whose master has gone.
EX_ROOT_GONE = 75

#: Seconds that agents have to end their nodes and themselves, beyond the grace.
PATIENCE = 5.0
#: Further seconds where agents are on the way that have to be told. The sum is less than dtrun waits (cli/main.py).
LATE = 2.5


class Root:
    """The root's state and loop.

    ``run`` returns when the master has gone or sent Stop, and nothing that was started is left.
    """

    def __init__(self, wire: FramedStream[Order], clock: Clock = CLOCK) -> None:
        self.clock = clock
        self.loop = EventLoop(clock)
        self.spec = LaunchSpec("")
        self._up = wire
        self._starter: HostStarter | None = None
        self._modules: bytes | None = None  #: modules, packed; empty if there are none, None until an agent has come
        self._branches: list[Branch] = []
        self._seats = RankAssignment()
        self._asked = 0  #: nodes that the master has asked for
        self._printer = Printer()
        self._unshown: dict[str, int] = {}  #: by host or program: lines of its own that there was no room for
        self._flushing: dict[int, set[Branch]] = {}  #: by the id of a Flush: branches that have not answered it yet
        self._awake: set[Branch] = set()  #: branches that are to end the session and have nodes left
        self._ending: float | None = None  #: when the end has to be done at the latest
        self._dismissed = False  #: the master has ended it
        self._hurries = False  #: a signal has ended it
        self._wakeup = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)  #: readable after SIGTERM
        signal.set_wakeup_fd(self._wakeup[1], warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, lambda *_: None)
        self.loop.watch(wire.fileno(), self._take_orders)
        self.loop.watch(self._wakeup[0], self._take_signal)
        self._beating = False

    def __repr__(self) -> str:
        state = " ending" if self._ending is not None else ""
        return f"<Root {self.spec.launcher or 'without a spec'} branches={self._branches} asked={self._asked}{state}>"

    def run(self) -> None:
        while self._ending is None or (self._is_needed() and self.clock.now() < self._ending):
            self._watch_room()
            due = min((at for at in (self._printer.due, self._ending) if at is not None), default=None)
            self.loop.turn(None if due is None else max(0.0, due - self.clock.now()))
            self._up.push()
            self._printer.push()
            for branch in self._branches:
                branch.push()
            if not self._printer.full:
                self._make_up()
        for branch in list(self._branches):
            self.lost(branch, "was ended", 0, ())
        if self._starter is not None:
            self._starter.end()
        self._printer.flush(0.5)  # the master may not wait for later output
        end_children(2.0)
        self._printer.flush(0.5)
        self._up.push(0.5)

    def _make_up(self) -> None:
        """Says what was left out while output had no room, and lets agents send more."""
        for who, count in self._unshown.items():
            lines = "1 line" if count == 1 else f"{count} lines"
            text = f"disttensor: {lines} of its own left out here, as nothing could be shown at that time"
            self._printer.remark(who, [text.encode()])
        self._unshown.clear()
        for branch in self._branches:
            if branch.owed:
                branch.send_order(OutputAck(branch.owed))
                branch.owed = 0

    def _is_needed(self) -> bool:
        """Returns whether anything is left to wait for while it ends, within the time that it has at most."""
        return bool(self._branches) or (self._starter is not None and not self._hurries and self._starter.awaits())

    def _watch_room(self) -> None:
        self._up.watch_room(self.loop)
        waiting = self._printer.waiting
        for fd in self._printer.outputs:
            self.loop.room(fd, fd in waiting)

    # ---- from the master -------------------------------------------------------------------------------------------

    def _take_orders(self) -> None:
        for order in self._up.hear():
            match order:
                case LaunchSpec():
                    self._begin_job(names_from_text(order))
                case Output():
                    self._printer.show(names_from_text(order))
                case Flush():
                    # to branches that have nodes: a fork server that still imports answers when it has done so
                    with_nodes = {self._seats.branch_of(rank) for rank in self._seats.pids}
                    there = {branch for branch in with_nodes if branch is not None and branch.gone is None}
                    self._flushing[order.id] = there
                    for each in there:
                        each.send_order(order)
                    self._flushed(order.id)
                case ReadOutput():
                    lines, more = self._printer.kept.after(order.after, order.ranks)
                    self._up.send_message(OutputRead(order.id, tuple(lines), more))
                case Start() if self._ending is None:
                    self._asked += 1
                    self._seats.ask(order)
                    self._deal()
                case Kill() | Look():
                    branch = self._seats.branch_of(order.rank)
                    if isinstance(order, Kill) and self._seats.withdraw(order.rank):
                        self._up.send_message(Ended(order.rank, 0, 0, "it was not started, as there was no place", ()))
                        self._tell_capacity()
                    if branch is not None and branch.agent_hello is not None:
                        if isinstance(order, Look):
                            branch.looks[order.rank] += 1
                        branch.send_order(order)
                case Stop():
                    self._dismissed = True
                    self._stop(order.grace)
                case EndSession():
                    self._rest(order)
        if self._up.ended:
            self.loop.unwatch(self._up.fileno())
            self._stop(0, 0 if self._dismissed else EX_ROOT_GONE)

    def _begin_job(self, spec: LaunchSpec) -> None:
        self.spec = spec
        descriptors.make_room_for_agents(max(len(spec.hosts), spec.most))
        self._printer.show(spec.output)
        try:
            self._starter = get_starter(spec)(self)
            self._starter.begin()
        except (DisttensorError, ValueError, OSError, ImportError) as e:
            self._up.send_message(LaunchFailed(f"{type(e).__name__}: {e}"))
            self._stop(0)
        else:
            self._up.send_message(Ready(os.getpid()))

    def _take_signal(self) -> None:
        os.read(self._wakeup[0], 64)
        self._hurries = True
        self._stop(0, EX_ROOT_GONE)

    def _stop(self, grace: float, code: int = 0) -> None:
        late = self._starter is not None and self._starter.awaits()
        deadline = self.clock.now() + grace + PATIENCE + (LATE if late else 0.0)
        self._ending = deadline if self._ending is None else min(self._ending, deadline)
        self._branches = [branch for branch in self._branches if branch.gone is None]
        for branch in list(self._branches):
            if branch.agent_hello is None:
                self.lost(branch, "was not needed any more", 0, ())
            else:
                branch.send_order(Stop(grace, code))

    def _rest(self, order: EndSession) -> None:
        self._seats.unassigned.clear()
        for branch in self._branches:
            branch.waiting.clear()
            if branch.agent_hello is not None and branch.gone is None:
                self._awake.add(branch)
                branch.send_order(order)
            else:
                for rank in self._seats.of(branch):
                    self._seats.leave(rank)
        self._rested()

    def _rested(self, branch: Branch | None = None) -> None:
        """Notes that a branch has ended the session, or is gone; or that there may be none."""
        if branch is not None:
            self._awake.discard(branch)
        if not self._awake:
            self._printer.flush()
            self._printer.kept.clear()
            self._up.send_message(SessionEnded())
            self._deal()

    # ---- dealing ---------------------------------------------------------------------------------------------------

    def _deal(self) -> None:
        if self._ending is not None:
            return
        for branch, start in self._seats.deal(self._branches):
            rank = start.bundle.rank
            try:
                self._printer.begin_node(rank)
            except OSError as e:
                self._seats.leave(rank)
                self._printer.end_node(rank)
                self._up.send_message(
                    Ended(rank, 0, os.EX_CANTCREAT, f"its log files cannot be made: {e}", (), branch.host)
                )
                continue
            if branch.gone is not None:
                self._end_node(branch, rank)
                continue
            if branch.agent_hello is None:
                branch.waiting.append(start)
            else:
                branch.send_order(start)
            self._up.send_message(Status((rank,), branch.host, branch.what))
        if self._seats.unassigned and self._starter is not None:
            self._up.send_message(Status(tuple(self._seats.unassigned), "", self._starter.waiting()))
        self._tell_capacity()

    def _tell_capacity(self) -> None:
        self._up.send_message(Capacity(self._seats.free(self._branches), self._asked))

    def _end_node(self, branch: Branch, rank: int) -> None:
        cause, code, tail = branch.gone or ("", 0, ())
        pid = self._seats.leave(rank)
        self._printer.end_node(rank)
        self._tell_capacity()
        self._up.send_message(Ended(rank, pid, code, cause, tuple(tail), branch.host))

    # ---- from host starters ----------------------------------------------------------------------------------------

    def send_news(self, news: News) -> None:
        self._up.send_message(news)

    def reconsider(self) -> None:
        self._deal()

    def give_up(self, why: str, tail: Sequence[str] = ()) -> None:
        if self._ending is None:
            self._up.send_message(LaunchFailed(why, tuple(tail)))
            self._stop(0)

    def add(self, branch: Branch) -> None:
        branch.unheard = Unheard(clock=self.clock)
        self._branches.append(branch)
        self._deal()

    def remark(self, who: str, lines: Sequence[bytes]) -> None:
        # Who writes it can't be made to wait: ssh would bring nothing of its nodes', either.
        if self._printer.full or who in self._unshown:
            self._unshown[who] = self._unshown.get(who, 0) + len(lines)
        else:
            self._printer.remark(who, lines)

    def report_status(self, branch: Branch, what: str) -> None:
        branch.what = what
        ranks = self._seats.of(branch)
        if ranks:
            self._up.send_message(Status(ranks, branch.host, what))

    def hear(self, branch: Branch, wire: FramedStream[AgentNews]) -> None:
        with self._losing(branch):
            for news in wire.hear():
                self.heard(branch, news)

    def heard(self, branch: Branch, news: AgentNews) -> None:
        branch.unheard.heard()
        if branch.gone is None:
            with self._losing(branch):
                self._take_news(branch, check_news(branch, news, self._seats, self._flushing, self._awake))

    @contextlib.contextmanager
    def _losing(self, branch: Branch) -> Iterator[None]:
        """Loses a branch, and not the root and all other hosts, by whatever is wrong with what its agent has sent."""
        try:
            yield
        except ProtocolError as e:
            self._cast_out(branch, f"what came was not an agent's: {e}", os.EX_PROTOCOL)
        except Exception as e:
            traceback.print_exc()
            cause = plain(f"the root failed at what its agent has sent: {type(e).__name__}: {e}", REASON)
            print(f"disttensor: host {branch.host} is lost; {cause}", file=sys.stderr)
            self._cast_out(branch, cause, os.EX_SOFTWARE)

    def _cast_out(self, branch: Branch, cause: str, code: int) -> None:
        if branch.agent_hello is not None:
            branch.send_order(Refuse(f"cut off by the root: {cause}"))
            if not self._seats.of(branch):  # so that no node's loss says it
                self._printer.remark(branch.host, [f"disttensor: this host is cut off: {cause}".encode()])
        self.lost(branch, cause, code, branch.last_lines())

    def _take_news(self, branch: Branch, news: AgentNews) -> None:
        match news:
            case AgentHello():
                self._let_in(branch, news)
            case NodeOutput():
                self._printer.feed(news.rank, news.fd, news.data)
                branch.owed += len(news.data)
            case SessionEnded():
                self._rested(branch)
            case Flushed():
                self._flushed(news.id, branch)
            case Ready():
                branch.ready = True
                self.report_status(branch, "its nodes have not answered yet")
            case Beat():
                branch.beats -= 1
                branch.heard_at = news.at
            case Seen():
                branch.looks[news.rank] -= 1
                self._up.send_message(news)
            case Began():
                self._seats.pids[news.rank] = news.pid
                self._up.send_message(msgspec.structs.replace(news, host=branch.host))
            case Ended():
                self._seats.leave(news.rank)
                self._printer.end_node(news.rank)
                if news.code:
                    self._printer.flush()
                self._tell_capacity()  # before the end: who hears of that may want the place at once
                self._up.send_message(msgspec.structs.replace(news, host=branch.host))
            case LaunchFailed():
                self.lost(branch, f"no node can be started there: {news.why}", os.EX_UNAVAILABLE, news.tail)

    def _flushed(self, id: int, branch: Branch | None = None) -> None:
        """Notes that a branch has flushed, or is gone; or that there may be none."""
        awaited = self._flushing.get(id)
        if awaited is None:
            return
        if branch is not None:
            awaited.discard(branch)
        if not awaited:
            del self._flushing[id]
            self._printer.flush()
            self._up.send_message(Flushed(id))

    def _let_in(self, branch: Branch, hello: AgentHello) -> None:
        if why := branch.refusal(hello):
            branch.send_order(Refuse(why))
            self.lost(branch, why, os.EX_UNAVAILABLE, ())
            return
        if branch not in self._branches:
            self.add(branch)
        there = versions.Versions(
            hello.host, hello.python, hello.protocol, hello.version, hello.executable, hello.packages
        )
        if why := versions.refusal(versions.own(), there):
            branch.send_order(Refuse(why))
            self.lost(branch, why, os.EX_PROTOCOL, ())
            return
        branch.agent_hello = hello
        self._beat_to(branch)  # before its nodes: only a beat says how long it is to wait for the next one
        if not self._beating:
            self._beating = True
            self.loop.later(self.spec.silence.beat, self._beat)
        if self._modules is None:
            self._modules = offer(self.spec.folder)
        if self._modules:
            branch.send_order(Modules(self._modules))
        self.report_status(branch, "its fork server has not imported torch yet")
        if self._ending is not None:
            branch.send_order(Stop(0))
        for start in branch.waiting:
            branch.send_order(start)
        branch.waiting.clear()
        self._deal()
        branch.let_in()

    def lost(self, branch: Branch, cause: str, code: int, tail: Sequence[str]) -> None:
        if branch.gone is not None:
            return
        branch.gone = cause, code, tuple(tail)
        branch.close()
        for id in list(self._flushing):
            self._flushed(id, branch)
        for rank in self._seats.of(branch):
            self._end_node(branch, rank)
        if branch in self._awake:
            self._rested(branch)
        if branch in self._branches and (not branch.expected or self._ending is not None):
            self._branches.remove(branch)
        self._deal()

    def _beat(self) -> None:
        """Tells agents that this end is there, and gives up those of which nothing was heard for long."""
        silence = self.spec.silence
        for branch in [b for b in self._branches if b.agent_hello is not None and b.gone is None]:
            self._beat_to(branch)
            seconds = branch.unheard.look()
            if seconds > silence.lost:
                cause = f"silent for {seconds:.0f} s: {branch.host} is stopped or gone, or the network to it is"
                self.lost(branch, cause, os.EX_UNAVAILABLE, ())
        self.loop.later(silence.beat, self._beat)

    def _beat_to(self, branch: Branch) -> None:
        silence = self.spec.silence
        branch.unheard.most = silence.most
        branch.beats += 1
        branch.send_order(Beat(silence, branch.heard_at))


def serve(control: int, parent: int) -> int:
    """Runs the root of the master at the other end of the socket ``control``. ``parent``: a pid to die with, or 0."""
    wire: FramedStream[Order] = FramedSocket(Order, control)
    if parent:
        die_with_parent(parent, signal.SIGTERM)  # ends it like the socket's end, which somebody may hold open
    name_process("dt-root")
    adopt_orphans()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        Root(wire).run()
    except ProtocolError as e:
        print(f"disttensor: the root ends, as what came was not its master's: {e}", file=sys.stderr)
        return os.EX_PROTOCOL
    living_sockets()  # the script's own is left where that was killed
    return 0
