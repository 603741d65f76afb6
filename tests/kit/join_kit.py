"""Agents that join a job: stubs that say what a test has them say, and one that is in the middle of a real one."""

from __future__ import annotations

import contextlib
import os
import platform
import select
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from limits import HANG

from disttensor.runtime.host.launch_spec import LaunchSpec
from disttensor.runtime.host.output_options import Output
from disttensor.runtime.launch.rendezvous.credentials import Invitation, read_connection_file
from disttensor.runtime.launch.rendezvous.rendezvous import find_rendezvous
from disttensor.runtime.launch.starters.join import JoinLauncher
from disttensor.runtime.launch.tree.control import AgentHello, Beat, Order, Refuse, ServerNews
from disttensor.runtime.launch.tree.framed import FramedSocket
from disttensor.runtime.launch.tree.spawn import spawn_server
from disttensor.runtime.protocol.bundle import PROTOCOL, VERSION
from disttensor.runtime.transport.tunnel import TunnelClient


@contextlib.contextmanager
def jobs() -> Iterator[Callable[..., JoinLauncher]]:
    """Starts jobs that nodes join, by an init_method and the most nodes; ends them."""
    with contextlib.ExitStack() as stack:

        def start(init_method: str, most: int, **more: object) -> JoinLauncher:
            found = find_rendezvous(init_method)
            assert found is not None
            launcher = JoinLauncher(LaunchSpec("join", most=most, options=found.options, **more))
            stack.callback(launcher.stop, 0)
            return launcher

        yield start


def agent_hello(host: str = "a", slots: int = 1, first_rank: int = -1, protocol: int = PROTOCOL) -> AgentHello:
    return AgentHello(protocol, VERSION, platform.python_version(), host, 4711, slots, first_rank)


class Agent:
    """Joins, and says what an agent would say."""

    def __init__(self, invitation: Invitation, first: AgentHello | None) -> None:
        keys = invitation.public_key, invitation.secret_key
        self._tunnel = TunnelClient(invitation.addresses, keys, invitation.server_key, HANG)
        self.wire: FramedSocket[Order] = FramedSocket(Order, self._tunnel.socket.detach())
        if first is not None:
            self.wire.send_message(first)
        self._heard: list[Order] = []

    def hears(self, kind: type) -> Order:
        """The next order of a kind; others are passed over, and beats are answered."""
        deadline = time.monotonic() + HANG
        while True:
            while self._heard:
                order = self._heard.pop(0)
                if isinstance(order, Beat):
                    self.wire.send_message(order)
                if isinstance(order, kind):
                    return order
            left = deadline - time.monotonic()
            if left < 0 or self.wire.ended:
                break
            select.select([self.wire], [], [], left)
            self._heard += self.wire.hear()
        raise AssertionError(f"no {kind.__name__} came; {self.wire.ended=}")

    def hang_up(self) -> None:
        self.wire.close()
        self._tunnel.close()

    def __enter__(self) -> Agent:
        return self

    def __exit__(self, *_: object) -> None:
        self.hang_up()

    def ended(self, let_in: bool = True) -> None:
        """Waits until the root has hung up; ``let_in``: it may have given this one orders before."""
        deadline = time.monotonic() + HANG
        while not self.wire.ended:
            assert select.select([self.wire], [], [], max(0.0, deadline - time.monotonic()))[0], "it is still let in"
            self._heard += self.wire.hear()
            assert let_in or not self._heard, self._heard


class RelayedAgent:
    """A joined agent with a fork server and real nodes, whose wire says in between what a test has it say."""

    def __init__(self, connection_file: Path, host: str, rank: int) -> None:
        self._hello = agent_hello(host, 1, rank)
        self._file = connection_file
        self._frames: list[bytes] = []
        self._bell = os.eventfd(0)
        self._over = False
        self._thread = threading.Thread(target=self._run, name=f"agent of node {rank}")
        self._thread.start()

    def inject(self, data: bytes) -> None:
        """Sends these bytes up, between two frames."""
        self._frames.append(data)
        os.eventfd_write(self._bell, 1)

    def _run(self) -> None:
        invitation = read_connection_file(self._file, HANG)
        keys = invitation.public_key, invitation.secret_key
        tunnel = TunnelClient(invitation.addresses, keys, invitation.server_key, HANG)
        up: FramedSocket[Order] = FramedSocket(Order, tunnel.socket.detach())
        up.send_message(self._hello)
        sock, server = spawn_server(output=Output(upward=True))
        down: FramedSocket[ServerNews] = FramedSocket(ServerNews, sock.detach())
        try:
            while not (self._over or up.ended or down.ended):
                ready = select.select([up, down, self._bell], [], [])[0]
                for order in up.hear():
                    if not isinstance(order, Beat | Refuse):
                        down.send_message(order)
                for news in down.hear():
                    up.send_message(news)
                down.push(HANG)
                up.push(HANG)
                if self._bell in ready:
                    os.eventfd_read(self._bell)
                    while self._frames:
                        os.write(up.fileno(), self._frames.pop(0))
        finally:
            down.close()
            server.wait()
            up.close()
            tunnel.close()

    def __enter__(self) -> RelayedAgent:
        return self

    def __exit__(self, *_: object) -> None:
        self._over = True
        os.eventfd_write(self._bell, 1)
        self._thread.join()
        os.close(self._bell)
