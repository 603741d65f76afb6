"""An agent: a host's end of the tree. It has a fork server, passes orders down to it and news up from it.

    root --wire: ssh's stdin and stdout, or ZeroMQ--> agent --socket--> fork server --> nodes

It imports no torch, so its first message (``AgentHello``) comes in a tenth of a second, while the fork server imports.
Who dies when: the end of the wire, a root that is silent for LEASE seconds (its network was cut, so that nobody tells)
and SIGTERM all make it end its fork server, and so the nodes, and then itself. When it is killed itself, the fork
server sees the end of its socket; when that one is killed, the kernel ends the nodes, and the agent says so and ends.
"""

from __future__ import annotations

import contextlib
import glob
import os
import platform
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence

import msgspec

from ...host.output_options import Output
from ...process.lifetime import adopt_orphans, describe_exit, end_children, name_process
from ...protocol.bundle import PROTOCOL, VERSION
from ...protocol.errors import ProtocolError, StartError
from .control import AgentHello, Beat, LaunchFailed, News, Order, Ready, Refuse, Stop
from .framed import MARK, FramedSocket, FramedStream
from .loop import Loop
from .spawn import PRELOAD, spawn_server

#: Seconds without a message from the root after which it is taken to be cut off. It sends heartbeats (root.py: BEAT).
LEASE = 15.0
#: Seconds for the fork server to end its nodes and itself, beyond the grace.
PATIENCE = 4.0

#: Exit codes: the root is gone; this agent was refused.
EX_ROOT_GONE, EX_REFUSED = 75, 76


def agent_hello(slots: int = 0, first_rank: int = -1, local_rank: int = -1, local_size: int = 0) -> AgentHello:
    """Describes this process for the root."""
    return AgentHello(
        PROTOCOL, VERSION, platform.python_version(), socket.gethostname(), os.getpid(), slots, first_rank,
        local_rank, local_size, len(os.sched_getaffinity(0)), _gpus(),
    )  # fmt: skip


def _gpus() -> int:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([name for name in visible.split(",") if name.strip() not in ("", "-1")])
    return len(glob.glob("/dev/nvidia[0-9]*"))


class Agent:
    """An agent's state and loop. ``run`` returns the exit code when nothing that it started is alive."""

    def __init__(
        self, up: FramedStream[Order], agent_hello: AgentHello, preload: Sequence[str] = PRELOAD, lease: float = LEASE
    ) -> None:
        """Starts the fork server. Raises StartError."""
        self._up = up
        self._lease = lease
        self._loop = Loop()
        self._heard = time.monotonic()
        self._ending: float | None = None  #: when the end has to be done at the latest
        self._code = 0
        self._ready = False  #: the fork server is ready
        up.say(agent_hello)
        adopt_orphans()
        sock, self._server = spawn_server(preload, tied=True)
        self._down: FramedStream[News] = FramedSocket(News, sock.detach())
        self._down.say(Output(upward=True))
        self._wakeup = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)  #: readable after SIGTERM
        signal.set_wakeup_fd(self._wakeup[1], warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the master's
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)

    def __repr__(self) -> str:
        state = "ending" if self._ending is not None else "ready" if self._ready else "waits for its fork server"
        return f"<Agent {state} heard {time.monotonic() - self._heard:.1f} s ago>"

    def run(self) -> int:
        self._loop.watch(self._up.fileno(), self._take_orders)
        self._loop.watch(self._down.fileno(), self._take_news)
        self._loop.watch(self._wakeup[0], self._take_signal)
        self._loop.later(1.0, self._look_at_time)
        while not self._down.ended and (self._ending is None or time.monotonic() < self._ending):
            self._loop.turn()
            self._down.push()
            self._up.push()
            self._watch_room()
        self._close()
        return self._code

    def _take_orders(self) -> None:
        for order in self._up.hear():
            self._heard = time.monotonic()
            match order:
                case Refuse():
                    print(f"disttensor: {order.why}", file=sys.stderr)
                    self._end(EX_REFUSED)
                case Stop():
                    self._code = self._code or order.code
                    self._stop(order.grace)
                case Beat():
                    pass
                case _:
                    self._down.say(order)
        if self._up.ended:
            self._loop.forget(self._up.fileno())
            self._end(EX_ROOT_GONE if self._ending is None else 0)

    def _take_news(self) -> None:
        for news in self._down.hear():
            self._up.say(news)
            self._ready = self._ready or isinstance(news, Ready)
            if isinstance(news, LaunchFailed):
                self._end(1)
        if self._down.ended and self._ending is None:
            how = "ended"
            with contextlib.suppress(subprocess.TimeoutExpired):
                how = f"ended ({describe_exit(self._server.wait(1))})"
            self._up.say(LaunchFailed(f"the fork server has {how}, and its nodes with it"))
            self._code = 1

    def _take_signal(self) -> None:
        os.read(self._wakeup[0], 64)
        self._end(EX_ROOT_GONE)

    def _look_at_time(self) -> None:
        if time.monotonic() - self._heard > self._lease and self._ending is None:
            print(f"disttensor: nothing was heard from the root for {self._lease:g} s", file=sys.stderr)
            self._end(EX_ROOT_GONE)
        self._loop.later(1.0, self._look_at_time)

    def _watch_room(self) -> None:
        for wire in (self._up, self._down):
            wire.watch_room(self._loop)

    def _end(self, code: int) -> None:
        self._code = self._code or code
        self._stop(0)

    def _stop(self, grace: float) -> None:
        self._down.say(Stop(grace))
        # before it is ready there are no nodes, and it would read this only when it has imported torch
        deadline = time.monotonic() + (grace + PATIENCE if self._ready else 0)
        self._ending = deadline if self._ending is None else min(self._ending, deadline)

    def _close(self) -> None:
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

    ``argv`` is for tests: the lease, and modules to import instead of those that workers need.
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
        return Agent(up, agent_hello(), argv[1:] or PRELOAD, float(argv[0]) if argv else LEASE).run()
    except (StartError, ProtocolError, msgspec.DecodeError) as e:
        up.say(LaunchFailed(str(e)))
        up.push(1.0)
        return 1
