"""The window of a host where nodes run, and their script does not: `dtrun ps`, `status` and their like on that host.

    connection --> JobWindow's thread: HostAnswers --call--> the agent's thread --Look, Kill--> fork server
                                                   <--Seen, what nodes have printed--

The agent shows it each order on its way down and all news on their way up. It opens at the first node of a script that
runs elsewhere, and closes with the session. There is none on the script's own host, whose window answers for all nodes.

A sight that the window has asked for is not the root's: the root takes one that it has not asked for as a lie.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

import msgspec

from ...host.job_sockets import JobAnswer, JobRequest, may_be_asked
from ...host.job_window import JobWindow
from ...host.launcher import Sight
from ...host.socket_folder import NODES, NotOurs
from ...protocol.bundle import ScriptPlace
from ..output.kept import KeptOutput
from ..output.lines import Lines
from .control import Began, Ended, Look, NodeOutput, Order, Seen, ServerNews, SessionEnded, Start
from .loop import EventLoop

T = TypeVar("T")

#: Seconds in which the agent's own thread does what the window's asks for.
TURN = 2.0


class HostNode:
    """A node of this host."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.pid = 0  #: 0 until it has begun
        self.ended: str | None = None  #: how; None while it runs
        self.lines = {1: Lines(), 2: Lines()}  #: what it prints to its stdout and stderr
        self.sight: Sight | None = None  #: the last one that this window has asked for
        self.seen_at = 0.0
        self.cpu: float | None = None  #: how many cores it has used between the last two sights, or since its start
        #: who has asked for its sights that have not come yet, in their order; None: the root
        self.looks = deque[_Sights | None]()
        self.stack_looks = list[_Sights | None]()  #: those with stacks, of which one sight answers all

    def see(self, sight: Sight) -> None:
        """Takes in a sight, and how much it has worked since the one before."""
        before = (self.sight.cpu, self.sight.lived) if self.sight is not None else (0.0, 0.0)
        if sight.lived > before[1]:
            self.cpu = max(0.0, sight.cpu - before[0]) / (sight.lived - before[1])
        self.sight, self.seen_at = sight, time.monotonic()


class _Sights:
    """Sights of nodes that the window has asked for."""

    def __init__(self, ranks: Collection[int]) -> None:
        self.missing = set(ranks)
        self.found: dict[int, Sight] = {}
        self.done = threading.Event()
        self.leave(())

    def add(self, sight: Sight) -> None:
        """Adds a sight that has come."""
        self.found[sight.rank] = sight
        self.leave((sight.rank,))

    def leave(self, ranks: Collection[int]) -> None:
        """Waits for these no more."""
        self.missing.difference_update(ranks)
        if not self.missing:
            self.done.set()


class _Call:
    """Something that the agent's thread is to do for the window's."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function
        self.done = threading.Event()
        self.result: Any = None
        self.error: Exception | None = None

    def do(self) -> None:
        """Does it."""
        try:
            self.result = self._function()
        except Exception as e:  # raised where it was asked for
            self.error = e
        self.done.set()


class HostWindow:
    """The window of an agent's nodes. Everything but ``call`` and ``sights`` is for the agent's own thread."""

    def __init__(
        self,
        loop: EventLoop,
        send_order: Callable[[Order], None],
        answers: Callable[[HostWindow, ScriptPlace], Callable[[JobRequest], JobAnswer]],
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        """``send_order`` sends an order to the fork server; ``answers`` makes what answers for a script's nodes."""
        self._loop, self.send_order, self._answers = loop, send_order, answers
        self._may_open = may_be_asked(environment)
        self._window: JobWindow | None = None
        self._wake = -1
        self._calls = deque[_Call]()
        self._closed = True
        self.nodes: dict[int, HostNode] = {}
        self.kept = KeptOutput()  #: what they have printed last

    def note_order(self, order: Order) -> None:
        """Notes an order of the root's that the agent passes on."""
        match order:
            case Start():
                script = order.bundle.script
                if self._window is None and self._may_open and script and script.host != socket.gethostname():
                    self._open(script)
                if self._window is not None:
                    self.nodes[order.bundle.rank] = HostNode(order.bundle.rank)
            case Look() if (node := self.running(order.rank)) is not None:
                (node.stack_looks if order.stacks else node.looks).append(None)

    def note_news(self, news: ServerNews) -> bool:
        """Notes news of the fork server's. Returns whether they are the root's as well."""
        match news:
            case Seen() if (node := self.running(news.rank)) is not None:
                return self._note_sight(node, news)
            case Began() if (node := self.running(news.rank)) is not None:
                node.pid = news.pid
            case Ended() if (node := self.running(news.rank)) is not None:
                node.ended = news.cause
                self._forget_looks(node)
            case NodeOutput() if (node := self.running(news.rank)) is not None and news.fd in node.lines:
                self.kept.add(news.rank, node.lines[news.fd].feed(news.data))
            case SessionEnded():
                self.close()
        return True

    def running(self, rank: int) -> HostNode | None:
        """Returns a node of this host that has not ended; None for none."""
        node = self.nodes.get(rank)
        return node if node is not None and node.ended is None else None

    # ---- sights ------------------------------------------------------------------------------------------------------

    def _note_sight(self, node: HostNode, news: Seen) -> bool:
        if news.stacks:
            asked, node.stack_looks = node.stack_looks, []
        else:
            asked = [node.looks.popleft()] if node.looks else []
        own = [each for each in asked if each is not None]
        if own:
            sight = Sight(*msgspec.structs.astuple(news))
            node.see(sight)
            for each in own:
                each.add(sight)
        return None in asked

    def _forget_looks(self, node: HostNode) -> None:
        """Has nobody wait for the sights of a node that has ended."""
        for each in (*node.looks, *node.stack_looks):
            if each is not None:
                each.leave((node.rank,))
        node.looks.clear()
        node.stack_looks.clear()

    def _look(self, sights: _Sights, stacks: bool) -> None:
        for rank in tuple(sights.missing):
            if (node := self.running(rank)) is None:
                sights.leave((rank,))
                continue
            (node.stack_looks if stacks else node.looks).append(sights)
            self.send_order(Look(rank, stacks))

    def sights(self, ranks: Collection[int], stacks: bool, seconds: float) -> dict[int, Sight]:
        """Returns the sights of nodes that have come within so many seconds. For the window's thread."""
        sights = _Sights(ranks)
        self.call(lambda: self._look(sights, stacks))
        sights.done.wait(seconds)
        return self.call(lambda: dict(sights.found))

    # ---- the window's thread, and the agent's ------------------------------------------------------------------------

    def call(self, function: Callable[[], T]) -> T:
        """Has the agent's thread call a function, and returns what that returns. For the window's thread."""
        call = _Call(function)
        self._calls.append(call)
        if self._closed:
            raise RuntimeError("the nodes of this host have ended")
        os.eventfd_write(self._wake, 1)
        if not call.done.wait(TURN):
            raise RuntimeError("the agent of this host has something else to do")
        if call.error is not None:
            raise call.error
        result: T = call.result
        return result

    def _do_calls(self) -> None:
        os.eventfd_read(self._wake)
        while self._calls:
            self._calls.popleft().do()

    def _open(self, script: ScriptPlace) -> None:
        self.nodes.clear()
        self.kept.clear()
        self._calls.clear()
        self._closed = False
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        window = JobWindow()
        try:
            window.open(self._answers(self, script), NODES)
        except Exception as e:  # the nodes do not need it
            os.close(self._wake)
            self._closed, self._may_open = True, False
            if isinstance(e, NotOurs):
                print(
                    f"disttensor: `dtrun ps` on {socket.gethostname()} does not see the nodes there: {e}",
                    file=sys.stderr,
                )
            return
        self._window = window
        self._loop.watch(self._wake, self._do_calls)

    def close(self) -> None:
        """Removes the socket. Calling it twice is fine."""
        window, self._window = self._window, None
        if window is None:
            return
        self._closed = True  # what the window's thread asks for from now on is refused
        for node in self.nodes.values():
            self._forget_looks(node)
        while self._calls:
            self._calls.popleft().do()
        window.close()
        self._loop.unwatch(self._wake)
        os.close(self._wake)
