"""The launcher whose nodes come by themselves: agents that were started elsewhere join over the network.

    master --> root: JoinStarter --TunnelServer (CURVE)--> agents: `dtrun worker`, scripts, jobs
                         spec.hosts: agents that the root starts here, beside those

A connection file, or a secret that both ends have, lets them in. All else that they need comes over that connection.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence

from ...host.addresses import LOOPBACK
from ...host.interfaces import addresses_of, listening_as
from ...host.launch_spec import LaunchSpec
from ...protocol.errors import BrokenError, StartError
from ...transport.tunnel import TunnelServer
from ..output.printer import spans
from ..rendezvous.credentials import ConnectionFile, derived, fresh, invite, shared_secret
from ..rendezvous.torchrun import publish
from ..tree.control import AgentHello, AgentNews, Listening, Order
from ..tree.framed import FramedSocket
from ..tree.host_starter import Branch, RootPort
from .piped import LocalAgentStarter
from .root_launcher import RootLauncher


def listening(spec: LaunchSpec) -> tuple[str, ...]:
    """Returns the addresses of this host on which a job's nodes reach it. Raises ValueError for another host's."""
    if spec.interface:
        return addresses_of(spec.interface)
    host = spec.options.get("host", "")
    try:
        return listening_as(host) if host else (LOOPBACK,)
    except ValueError as e:
        raise ValueError(f"{e}. By which of these do nodes reach it? (interface=, dtrun --interface)") from None


class JoinLauncher(RootLauncher):
    """Lets nodes join. Under torchrun it publishes its addresses in torchrun's store."""

    unfit = "no node can join"

    def ways(self) -> tuple[str, ...]:
        return listening(self.spec)

    def too_many(self, count: int) -> str:
        return f"{self.capacity} can join"

    def found(self, addresses: Sequence[str]) -> None:
        options = self.spec.options
        if "store" in options:
            publish(options["host"], int(options["store"]), options["rendezvous"], addresses, self.spec.timeout)


class JoinStarter(LocalAgentStarter):
    """Opens a tunnel server. Options of the launch spec: ``connection_file``, or ``host``, ``port`` and ``meeting``.

    ``all_come``: something outside starts all that are to join, so each of them has to hear of the end.
    """

    def __init__(self, root: RootPort) -> None:
        super().__init__(root)
        self.agents: list[_JoinedAgent] = []
        self.came = 0  #: the most nodes that have been here at once
        self._file: ConnectionFile | None = None
        self._tunnel: TunnelServer | None = None

    def begin(self) -> None:
        options = self.spec.options
        path = options.get("connection_file", "")
        keys = fresh() if path else derived(shared_secret(), options["rendezvous"])
        super().begin()  # before there are threads: it forks
        addresses = self.open(listening(self.spec), int(options.get("port", 0)), keys.server, keys.guest[0])
        if path:
            self._file = ConnectionFile(path, invite(keys, addresses))
        self.root.send_news(Listening(addresses))

    def open(self, hosts: Sequence[str], port: int, server_keys: tuple[str, str], *agents: str) -> tuple[str, ...]:
        """Lets in agents that have one of these keys; returns the addresses of the tunnel server."""
        try:
            self._tunnel = TunnelServer(hosts, port, server_keys, *agents)
        except BrokenError as e:
            if not port:
                raise
            raise StartError(
                f"port {port} of this host is taken, perhaps by another job: name another one on all hosts (dtrun "
                f"--master-port, MASTER_PORT, init_method=) [{e}]"
            ) from e
        self.loop.watch(self._tunnel.arrivals, self._arrived)
        return self._tunnel.addresses

    def waiting(self) -> str:
        there, least = self._present(), self.spec.least or self.spec.most
        came = ", ".join(f"{slots} on {host}" for host, slots in _by_host(there).items()) or "none"
        text = f"too few have joined yet ({came} of {least or 'any number'} have"
        if there and all(agent.first_rank >= 0 for agent in there) and not self.spec.hosts:
            taken = {rank for agent in there for rank in range(agent.first_rank, agent.first_rank + agent.slots)}
            absent = set(range(least)) - taken
            text += f", of node{'s' * (len(absent) > 1)} {spans(absent)} nothing was heard"
        if self._tunnel is not None:
            text += f"; the job listens at {', '.join(self._tunnel.addresses)}"
            if self._tunnel.refused:
                text += f"; {self._tunnel.refused} refused for another job's key"
        return text + ")"

    def awaits(self) -> bool:
        return "all_come" in self.spec.options and self.came < self.spec.most

    def end(self) -> None:
        if self._file is not None:
            self._file.remove()
        for agent in list(self.agents):
            agent.close()
        if self._tunnel is not None:
            self.loop.unwatch(self._tunnel.arrivals)
            self._tunnel.close()

    def _arrived(self) -> None:
        while self._tunnel is not None and (sock := self._tunnel.accept()) is not None:
            self.agents.append(_JoinedAgent(self, sock))

    def admits(self, agent: _JoinedAgent, agent_hello: AgentHello) -> str:
        """Returns the reason for which an agent is not let in; empty if it is."""
        if self.spec.most and self.slots + agent.slots > self.spec.most:
            return f"the job has {self.slots} of its {self.spec.most} nodes already, so {agent.slots} more are too many"
        for other in self._present():
            both = range(
                max(agent.first_rank, other.first_rank),
                min(agent.first_rank + agent.slots, other.first_rank + other.slots),
            )
            if agent.first_rank >= 0 <= other.first_rank and both:
                return f"node {spans(both)} has joined already, from process {other.pid} on {other.host}"
        return ""

    def _present(self) -> list[_JoinedAgent]:
        return [agent for agent in self.agents if agent.agent_hello is not None and agent.gone is None]

    @property
    def slots(self) -> int:
        """The number of nodes of the agents that are here."""
        return sum(agent.slots for agent in self._present()) + self.spec.slots

    def joined(self) -> None:
        """Notes that an agent was let in: when no other may come, nobody needs the connection file any more."""
        self.came = max(self.came, self.slots)
        if self._file is not None and self.spec.most and self.slots >= self.spec.most:
            self._file.remove()


class _JoinedAgent(Branch):
    """An agent that has joined. The root gets to know it when it has said hello."""

    def __init__(self, starter: JoinStarter, sock: socket.socket) -> None:
        super().__init__("?", 1, expected=False)
        self.pid = 0
        self._starter, self._root, self._loop = starter, starter.root, starter.loop
        self._wire: FramedSocket[AgentNews] = FramedSocket(AgentNews, sock.detach())
        self._loop.watch(self._wire.fileno(), self._hear)
        self._loop.later(starter.spec.timeout, self._too_late)

    def send_order(self, order: Order) -> None:
        if not self._wire.ended:
            self._wire.send_message(order)
            self._wire.watch_room(self._loop)

    def push(self) -> None:
        if not self._wire.ended:
            self._wire.push()
            self._wire.watch_room(self._loop)

    def close(self) -> None:
        if self in self._starter.agents:
            self._starter.agents.remove(self)
            self._loop.unwatch(self._wire.fileno())
            self._wire.close()

    def _hear(self) -> None:
        self._root.hear(self, self._wire)
        if self._wire.ended:
            self._root.lost(self, "the connection with its agent has ended", os.EX_UNAVAILABLE, ())

    def _too_late(self) -> None:
        if self.agent_hello is None:
            self._root.lost(self, "its agent has not said hello", os.EX_UNAVAILABLE, ())

    def refusal(self, agent_hello: AgentHello) -> str:
        self.host, self.pid, self.slots, self.first_rank = (
            agent_hello.host,
            agent_hello.pid,
            max(1, agent_hello.slots),
            agent_hello.first_rank,
        )
        self.place = max(0, agent_hello.local_rank), agent_hello.local_size
        return self._starter.admits(self, agent_hello)

    def let_in(self) -> None:
        self._starter.joined()


def _by_host(agents: Sequence[_JoinedAgent]) -> dict[str, int]:
    out: dict[str, int] = {}
    for agent in agents:
        out[agent.host] = out.get(agent.host, 0) + agent.slots
    return out
