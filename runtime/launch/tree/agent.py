"""An agent: a host's end of the tree. It has a fork server, passes orders down to it and news up from it.

    root --wire: ssh's stdin and stdout, or ZeroMQ--> agent --socket--> fork server --> nodes

On a host where the script does not run it also answers `dtrun ps`, `status` and their like (host_window.py).

It imports no torch, so its first message (``AgentHello``) comes in a tenth of a second, while the fork server imports.
Who dies when: the end of the wire, a root that is silent for the lease (its network was cut, so that nobody tells) and
SIGTERM all make it end its fork server, and so the nodes, and then itself. When it is killed itself, the fork server
sees the end of its socket; when that one is killed, the kernel ends the nodes, and the agent says so and ends.

Long before the lease is over it has the nodes stopped (host/silence.py): the master may take them for lost by then, and
what it has sent them must not be run any more. They go on when the root says that it has heard this agent lately.
"""

from __future__ import annotations

import contextlib
import glob
import os
import signal
import subprocess
import sys
from collections.abc import Sequence

from ...host import versions
from ...host.output_options import Output
from ...host.silence import Silence
from ...process.clock import CLOCK, Clock
from ...process.lifetime import adopt_orphans, describe_exit, end_children, name_process
from ...process.own_time import Unheard
from ...protocol.errors import ProtocolError, StartError
from .control import AgentHello, Beat, LaunchFailed, Order, Pause, Ready, Refuse, ServerNews, Stop
from .framed import MARK, FramedSocket, FramedStream
from .host_answers import HostAnswers
from .host_window import HostWindow
from .loop import EventLoop
from .spawn import PRELOAD, spawn_server

#: Seconds for the fork server to end its nodes and itself, beyond the grace.
PATIENCE = 4.0

#: Exit codes: the root is gone; this agent was refused.
EX_ROOT_GONE, EX_REFUSED = 75, 76


def agent_hello(slots: int = 0, first_rank: int = -1, local_rank: int = -1, local_size: int = 0) -> AgentHello:
    """Describes this process for the root."""
    own = versions.own()
    return AgentHello(
        own.protocol, own.disttensor, own.python, own.host, os.getpid(), slots, first_rank, local_rank, local_size,
        len(os.sched_getaffinity(0)), _gpus(), own.executable, dict(own.packages),
    )  # fmt: skip


def _gpus() -> int:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([name for name in visible.split(",") if name.strip() not in ("", "-1")])
    return len(glob.glob("/dev/nvidia[0-9]*"))


class Agent:
    """An agent's state and loop. ``run`` returns the exit code when nothing that it started is alive."""

    def __init__(
        self,
        up: FramedStream[Order],
        agent_hello: AgentHello,
        preload: Sequence[str] = PRELOAD,
        clock: Clock = CLOCK,
    ) -> None:
        """Starts the fork server. Raises StartError."""
        self._up = up
        self._silence = Silence()  #: the root's beats say which
        self._clock = clock
        self._loop = EventLoop(clock)
        self._unheard = Unheard(clock=clock)
        self._paused = False  #: the nodes are stopped, because nothing is heard
        self._ending: float | None = None  #: when the end has to be done at the latest
        self._code = 0
        self._ready = False  #: the fork server is ready
        up.send_message(agent_hello)
        adopt_orphans()
        sock, self._server = spawn_server(preload, tied=True)
        self._down: FramedStream[ServerNews] = FramedSocket(ServerNews, sock.detach())
        self._down.send_message(Output(upward=True))
        self._window = HostWindow(self._loop, self._down.send_message, HostAnswers)
        self._wakeup = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)  #: readable after SIGTERM
        signal.set_wakeup_fd(self._wakeup[1], warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the master's
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)

    def __repr__(self) -> str:
        state = "ending" if self._ending is not None else "ready" if self._ready else "waits for its fork server"
        return f"<Agent {state}{' paused' if self._paused else ''} heard {self._unheard.seconds:.1f} s ago>"

    def run(self) -> int:
        """Raises ProtocolError when what answers above is no root; nothing that it started is alive then, either."""
        try:
            self._run()
        finally:
            self._close()
        return self._code

    def _run(self) -> None:
        self._loop.watch(self._up.fileno(), self._take_orders)
        self._loop.watch(self._down.fileno(), self._take_news)
        self._loop.watch(self._wakeup[0], self._take_signal)
        self._look_at_time()
        while not self._down.ended and (self._ending is None or self._clock.now() < self._ending):
            self._loop.turn()
            self._down.push()
            self._up.push()
            self._watch_room()

    def _take_orders(self) -> None:
        try:
            orders = self._up.hear()
        except ProtocolError as e:
            self._up.send_message(LaunchFailed(f"what came was not the root's: {e}"))
            raise
        for order in orders:
            self._unheard.heard()
            match order:
                case Refuse():
                    print(f"disttensor: {order.why}", file=sys.stderr)
                    self._end_with(EX_REFUSED)
                case Stop():
                    self._code = self._code or order.code
                    self._stop(order.grace)
                case Beat():
                    self._silence = order.silence
                    now = self._clock.now()
                    self._up.send_message(Beat(order.silence, now))
                    # Whatever was under way when the link was cut arrives when it heals, beats too. What the root has
                    # heard so lately, it has not given up.
                    if now - order.at < order.silence.lost:
                        self._pause(False)
                case _:
                    self._window.note_order(order)
                    self._down.send_message(order)
        if self._up.ended:
            self._loop.unwatch(self._up.fileno())
            self._end_with(EX_ROOT_GONE if self._ending is None else 0)

    def _take_news(self) -> None:
        try:
            all_news = self._down.hear()
        except ProtocolError as e:
            self._up.send_message(LaunchFailed(f"what came was not the fork server's: {e}"))
            self._loop.unwatch(self._down.fileno())
            self._down.close()  # which ends the server and its nodes
            self._code = 1
            return
        for news in all_news:
            if self._window.note_news(news):
                self._up.send_message(news)
            self._ready = self._ready or isinstance(news, Ready)
            if isinstance(news, LaunchFailed):
                self._end_with(1)
        if self._down.ended and self._ending is None:
            how = "ended"
            with contextlib.suppress(subprocess.TimeoutExpired):
                how = f"ended ({describe_exit(self._server.wait(1))})"
            self._up.send_message(LaunchFailed(f"the fork server has {how}, and its nodes with it"))
            self._code = 1

    def _take_signal(self) -> None:
        os.read(self._wakeup[0], 64)
        self._end_with(EX_ROOT_GONE)

    def _look_at_time(self) -> None:
        silence = self._silence
        self._unheard.most = silence.most
        seconds = self._unheard.look()
        if seconds > silence.lease and self._ending is None:
            print(f"disttensor: nothing was heard from the root for {silence.lease:g} s", file=sys.stderr)
            self._end_with(EX_ROOT_GONE)
        if seconds > silence.pause:
            self._pause(True)
        self._loop.later(silence.beat / 2, self._look_at_time)

    def _pause(self, on: bool) -> None:
        """Has the nodes stopped, or go on."""
        if on != self._paused:
            self._paused = on
            self._down.send_message(Pause(on))

    def _watch_room(self) -> None:
        for wire in (self._up, self._down):
            wire.watch_room(self._loop)

    def _end_with(self, code: int) -> None:
        self._code = self._code or code
        self._stop(0)

    def _stop(self, grace: float) -> None:
        self._down.send_message(Stop(grace))
        # before it is ready there are no nodes, and it would read this only when it has imported torch
        deadline = self._clock.now() + (grace + PATIENCE if self._ready else 0)
        self._ending = deadline if self._ending is None else min(self._ending, deadline)

    def _close(self) -> None:
        self._window.close()
        self._up.push(0.5)
        self._down.close()  # by itself enough: the server ends its nodes when the socket ends
        try:
            self._server.wait(1.0)
        except subprocess.TimeoutExpired:
            self._server.kill()
            self._server.wait()
        end_children(0)
        self._up.close()
        for fd in self._wakeup:
            os.close(fd)


def main(argv: Sequence[str] = ()) -> int:
    """Runs an agent whose wire is its stdin and stdout: ssh starts this on a host.

    ``argv`` is for tests: modules to import instead of those that workers need.
    """
    inn, out = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)  # prints of other code go beside the wire
    name_process("dt-agent")
    os.write(out, MARK)
    up: FramedStream[Order] = FramedSocket(Order, inn, out)
    try:
        return Agent(up, agent_hello(), argv or PRELOAD).run()
    except (StartError, ProtocolError) as e:
        up.send_message(LaunchFailed(str(e)))
        up.push(1.0)
        return 1
