"""The root: the process beside the master that holds all hosts' agents.

    master --unix socket--> root --engine's branches: ssh, ZeroMQ, ...--> agents --> fork servers --> nodes

It deals nodes to hosts, keeps orders until an agent is there, tells the master which host each piece of news is from,
and prints what nodes say. It imports no torch, and of the ways of launching only its plan's engine.

Who dies when: the end of the master's socket (even by SIGKILL) and SIGTERM make the root end all agents and then
itself. When it is killed, its wires end, and the agents by that (agent.py). A host that is cut off loses its nodes.
"""

from __future__ import annotations

import os
import signal
import time
from collections import deque
from collections.abc import Sequence

import msgspec

from ...host.launch_spec import Plan
from ...host.output_options import Output
from ...process.lifetime import adopt_orphans, die_with_parent, end_children, name_process
from ...protocol.bundle import PROTOCOL, VERSION
from ...protocol.errors import DisttensorError
from ..output.printer import Printer
from ..registry import get_starter
from .control import (
    Beat,
    Began,
    Doing,
    Ended,
    Flush,
    Flushed,
    Kill,
    Knock,
    Modules,
    News,
    Order,
    Ready,
    Refuse,
    Rest,
    SessionEnded,
    Capacity,
    NodeOutput,
    Start,
    Stop,
    Took,
    Unfit,
)
from .dealing import RankAssignment
from .framed import Stream, Wire
from .host_starter import Branch, Engine
from .loop import Loop
from .shipping import offer

#: The exit code of agents, as of nodes, whose master has gone.
EX_ROOT_GONE = 75

#: Seconds between two beats; an agent takes a root that is silent for long to be cut off.
BEAT = 3.0
#: Seconds that agents have to end their nodes and themselves, beyond the grace.
PATIENCE = 5.0
#: More of them where somebody is on the way who has to be told; all of it is less than what dtrun waits (run.py).
LATE = 2.5


class Root:
    """``run`` returns when the master has gone or said Stop, and nothing that was started is left."""

    def __init__(self, wire: Wire[Order]) -> None:
        self.loop = Loop()
        self.plan = Plan("")
        self._up = wire
        self._engine: Engine | None = None
        self._modules: bytes | None = None  #: packed; empty if there are none, None until an agent is there
        self._branches: list[Branch] = []
        self._seats = RankAssignment()
        self._asked = 0  #: nodes that the master has asked for
        self._printer = Printer()
        self._owed: deque[tuple[Branch, int]] = deque()  #: what was said and not taken yet, of whom
        self._flushing: dict[int, set[Branch]] = {}  #: by the id of a Flush: who has not answered it yet
        self._awake: set[Branch] = set()  #: who is to rest and has nodes left
        self._ending: float | None = None  #: when to be done with it at the latest
        self._dismissed = False  #: the master has ended it
        self._hurries = False  #: a signal has
        self._wakeup = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)  #: readable after SIGTERM
        signal.set_wakeup_fd(self._wakeup[1], warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, lambda *_: None)
        self.loop.watch(wire.fileno(), self._take_orders)
        self.loop.watch(self._wakeup[0], self._take_signal)
        self.loop.later(BEAT, self._beat)

    def __repr__(self) -> str:
        state = " ending" if self._ending is not None else ""
        return f"<Root {self.plan.launcher or 'without a plan'} branches={self._branches} asked={self._asked}{state}>"

    def run(self) -> None:
        while self._ending is None or (self._is_needed() and time.monotonic() < self._ending):
            self._watch_room()
            due = self._printer.due
            self.loop.turn(None if due is None else max(0.0, due - time.monotonic()))
            self._up.push()
            self._printer.push()
            for branch in self._branches:
                branch.push()
            while self._owed and not self._printer.full:
                branch, size = self._owed.popleft()
                branch.say(Took(size))
        for branch in list(self._branches):
            self.lost(branch, "was ended", 0, ())
        if self._engine is not None:
            self._engine.end()
        self._printer.flush(0.5)  # the master may have no patience with what comes now
        end_children(2.0)
        self._printer.flush(0.5)
        self._up.push(0.5)

    def _is_needed(self) -> bool:
        """While it ends: for the time that it has at most."""
        return bool(self._branches) or (self._engine is not None and not self._hurries and self._engine.awaits())

    def _watch_room(self) -> None:
        self._up.watch_room(self.loop)
        waiting = self._printer.waiting
        for fd in self._printer.outputs:
            self.loop.room(fd, fd in waiting)

    # ---- from the master -------------------------------------------------------------------------------------------

    def _take_orders(self) -> None:
        for order in self._up.hear():
            match order:
                case Plan():
                    self._begin(order)
                case Output():
                    self._printer.show(order)
                case Flush():
                    # of those that have nodes: a fork server that still imports answers when it has done so
                    with_nodes = {self._seats.branch_of(rank) for rank in self._seats.pids}
                    there = {branch for branch in with_nodes if branch is not None and branch.gone is None}
                    self._flushing[order.id] = there
                    for each in there:
                        each.say(order)
                    self._flushed(order.id)
                case Start() if self._ending is None:
                    self._asked += 1
                    self._seats.ask(order)
                    self._deal()
                case Kill():
                    branch = self._seats.branch_of(order.rank)
                    if branch is not None and branch.knock is not None:
                        branch.say(order)
                case Stop():
                    self._dismissed = True
                    self._stop(order.grace)
                case Rest():
                    self._rest(order)
        if self._up.ended:
            self.loop.forget(self._up.fileno())
            self._stop(0, 0 if self._dismissed else EX_ROOT_GONE)

    def _begin(self, plan: Plan) -> None:
        self.plan = plan
        self._printer.show(plan.output)
        try:
            self._engine = get_starter(plan.launcher)(self)
            self._engine.begin()
        except (DisttensorError, ValueError, OSError, ImportError) as e:
            self._up.say(Unfit(f"{type(e).__name__}: {e}"))
            self._stop(0)
        else:
            self._up.say(Ready(os.getpid()))

    def _take_signal(self) -> None:
        os.read(self._wakeup[0], 64)
        self._hurries = True
        self._stop(0, EX_ROOT_GONE)

    def _stop(self, grace: float, code: int = 0) -> None:
        late = self._engine is not None and self._engine.awaits()
        deadline = time.monotonic() + grace + PATIENCE + (LATE if late else 0.0)
        self._ending = deadline if self._ending is None else min(self._ending, deadline)
        self._branches = [branch for branch in self._branches if branch.gone is None]
        for branch in list(self._branches):
            if branch.knock is None:
                self.lost(branch, "was not needed any more", 0, ())
            else:
                branch.say(Stop(grace, code))

    def _rest(self, order: Rest) -> None:
        self._seats.unseated.clear()
        for branch in self._branches:
            branch.waiting.clear()
            if branch.knock is not None and branch.gone is None:
                self._awake.add(branch)
                branch.say(order)
            else:
                for rank in self._seats.of(branch):
                    self._seats.leave(rank)
        self._rested()

    def _rested(self, branch: Branch | None = None) -> None:
        """A branch has, or is gone, or there may be none."""
        if branch is not None:
            self._awake.discard(branch)
        if not self._awake:
            self._printer.flush()
            self._up.say(SessionEnded())
            self._deal()

    # ---- dealing ---------------------------------------------------------------------------------------------------

    def _deal(self) -> None:
        if self._ending is not None:
            return
        for branch, start in self._seats.deal(self._branches):
            rank = start.bundle.rank
            try:
                self._printer.begin(rank)
            except OSError as e:
                self._seats.leave(rank)
                self._printer.end(rank)
                self._up.say(Ended(rank, 0, os.EX_CANTCREAT, f"its log files cannot be made: {e}", (), branch.host))
                continue
            if branch.gone is not None:
                self._end_node(branch, rank)
                continue
            if branch.knock is None:
                branch.waiting.append(start)
            else:
                branch.say(start)
            self._up.say(Doing((rank,), branch.host, branch.what))
        if self._seats.unseated and self._engine is not None:
            self._up.say(Doing(tuple(self._seats.unseated), "", self._engine.waiting()))
        self._up.say(Capacity(self._seats.free(self._branches), self._asked))

    def _end_node(self, branch: Branch, rank: int) -> None:
        cause, code, tail = branch.gone or ("", 0, ())
        pid = self._seats.leave(rank)
        self._printer.end(rank)
        self._up.say(Ended(rank, pid, code, cause, tuple(tail), branch.host))

    # ---- from engines ----------------------------------------------------------------------------------------------

    def tell(self, news: News) -> None:
        self._up.say(news)

    def reconsider(self) -> None:
        self._deal()

    def give_up(self, why: str, tail: Sequence[str] = ()) -> None:
        if self._ending is None:
            self._up.say(Unfit(why, tuple(tail)))
            self._stop(0)

    def add(self, branch: Branch) -> None:
        self._branches.append(branch)
        self._deal()

    def remark(self, who: str, lines: Sequence[bytes]) -> None:
        self._printer.remark(who, lines)

    def doing(self, branch: Branch, what: str) -> None:
        branch.what = what
        ranks = self._seats.of(branch)
        if ranks:
            self._up.say(Doing(ranks, branch.host, what))

    def heard(self, branch: Branch, news: News) -> None:
        match news:
            case Knock():
                self._let_in(branch, news)
            case NodeOutput():
                self._printer.take(news.rank, news.fd, news.data)
                self._owed.append((branch, len(news.data)))
            case SessionEnded():
                self._rested(branch)
            case Flushed():
                self._flushed(news.id, branch)
            case Ready():
                self.doing(branch, "its nodes have not answered yet")
            case Began() if self._seats.branch_of(news.rank) is branch:
                self._seats.pids[news.rank] = news.pid
                self._up.say(msgspec.structs.replace(news, host=branch.host))
            case Ended() if self._seats.branch_of(news.rank) is branch:
                self._seats.leave(news.rank)
                self._printer.end(news.rank)
                if news.code:
                    self._printer.flush()
                self._up.say(msgspec.structs.replace(news, host=branch.host))
            case Unfit():
                self.lost(branch, f"no node can be started there: {news.why}", os.EX_UNAVAILABLE, news.tail)

    def _flushed(self, id: int, branch: Branch | None = None) -> None:
        """A branch has done so, or is gone, or there may be none."""
        awaited = self._flushing.get(id)
        if awaited is None:
            return
        if branch is not None:
            awaited.discard(branch)
        if not awaited:
            del self._flushing[id]
            self._printer.flush()
            self._up.say(Flushed(id))

    def _let_in(self, branch: Branch, knock: Knock) -> None:
        if knock.protocol != PROTOCOL:
            why = (
                f"{knock.host} has disttensor {knock.version} (protocol {knock.protocol}), the master {VERSION} "
                f"(protocol {PROTOCOL}): install one version"
            )
            branch.say(Refuse(why))
            self.lost(branch, why, os.EX_PROTOCOL, ())
            return
        branch.knock = knock
        if self._modules is None:
            self._modules = offer(self.plan.folder)
        if self._modules:
            branch.say(Modules(self._modules))
        self.doing(branch, "its fork server has not imported torch yet")
        if self._ending is not None:
            branch.say(Stop(0))
        for start in branch.waiting:
            branch.say(start)
        branch.waiting.clear()
        self._deal()

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
        if not branch.expected or self._ending is not None:
            self._branches.remove(branch)
        self._deal()

    def _beat(self) -> None:
        for branch in self._branches:
            if branch.knock is not None and branch.gone is None:
                branch.say(Beat())
        self.loop.later(BEAT, self._beat)


def serve(control: int, parent: int) -> int:
    """The root of the master at the other end of the socket with this number. ``parent``: a pid to die with, or 0."""
    wire: Wire[Order] = Stream(Order, control)
    if parent:
        die_with_parent(parent, signal.SIGTERM)  # the way of the socket's end, if somebody holds it open
    name_process("dt-root")
    adopt_orphans()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    Root(wire).run()
    return 0
