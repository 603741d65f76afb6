"""The launcher whose nodes come by themselves: agents that were started elsewhere join over the network.

    master --> root: JoinStarter --TunnelServer (CURVE)--> agents: `dtrun worker`, scripts that are nodes, schedulers' jobs
                         plan.hosts: agents that the root starts here, beside those

A connection file, or a secret that both ends have, lets them in. What else they need comes over that connection.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence

import msgspec

from ...host.addresses import LOOPBACK
from ...host.interfaces import addresses_of, listening_as
from ...host.launch_spec import Plan
from ...protocol.errors import ProtocolError
from ...transport.tunnel import TunnelServer
from ..output.printer import spans
from ..rendezvous.credentials import ConnectionFile, derived, fresh, invite, shared_secret
from ..rendezvous.torchrun import publish
from ..tree.control import Knock, Listening, News, Order, Refuse
from ..tree.framed import Stream
from ..tree.host_starter import Boss, Branch
from .piped import NearbyEngine
from .root_launcher import PlannedLauncher


def listening(plan: Plan) -> tuple[str, ...]:
    """The addresses of this host on which a plan's nodes reach it. Raises ValueError for another host's."""
    if plan.interface:
        return addresses_of(plan.interface)
    host = plan.options.get("host", "")
    try:
        return listening_as(host) if host else (LOOPBACK,)
    except ValueError as e:
        raise ValueError(f"{e}. By which of these do nodes reach it? (interface=, dtrun --interface)") from None


class JoinLauncher(PlannedLauncher):
    """Lets nodes join. Under torchrun it says in torchrun's store where."""

    unfit = "no node can join"

    def ways(self) -> tuple[str, ...]:
        return listening(self.plan)

    def too_many(self, count: int) -> str:
        return f"{self.capacity} can join"

    def found(self, addresses: Sequence[str]) -> None:
        options = self.plan.options
        if "store" in options:
            publish(options["host"], int(options["store"]), options["meeting"], addresses, self.plan.timeout)


class JoinStarter(NearbyEngine):
    """Opens the door. Options of the plan: ``connection_file``, or ``host``, ``port`` and ``meeting``.

    ``all_come``: something outside starts all that are to join, so each of them has to hear of the end.
    """

    def __init__(self, boss: Boss) -> None:
        super().__init__(boss)
        self.guests: list[_Guest] = []
        self.came = 0  #: how many nodes have been here at once
        self._file: ConnectionFile | None = None
        self._tunnel: TunnelServer | None = None

    def begin(self) -> None:
        options = self.plan.options
        path = options.get("connection_file", "")
        keys = fresh() if path else derived(shared_secret(), options["meeting"])
        super().begin()  # before there are threads: it forks
        addresses = self.open(listening(self.plan), int(options.get("port", 0)), keys.server, keys.guest[0])
        if path:
            self._file = ConnectionFile(path, invite(keys, addresses))
        self.boss.tell(Listening(addresses))

    def open(self, hosts: Sequence[str], port: int, server_keys: tuple[str, str], *guests: str) -> tuple[str, ...]:
        """Lets in who has one of these keys; gives the addresses of the door."""
        self._tunnel = TunnelServer(hosts, port, server_keys, *guests)
        self.loop.watch(self._tunnel.arrivals, self._arrived)
        return self._tunnel.addresses

    def waiting(self) -> str:
        there, least = self._present(), self.plan.least or self.plan.most
        came = ", ".join(f"{slots} on {host}" for host, slots in _by_host(there).items()) or "none"
        text = f"too few have joined yet ({came} of {least or 'any number'} have"
        if there and all(guest.wish >= 0 for guest in there) and not self.plan.hosts:
            taken = {rank for guest in there for rank in range(guest.wish, guest.wish + guest.slots)}
            absent = set(range(least)) - taken
            text += f", of node{'s' * (len(absent) > 1)} {spans(absent)} nothing was heard"
        if self._tunnel is not None:
            text += f"; the door is {', '.join(self._tunnel.addresses)}"
            if self._tunnel.refused:
                text += f"; {self._tunnel.refused} knocked with another job's key"
        return text + ")"

    def awaits(self) -> bool:
        return "all_come" in self.plan.options and self.came < self.plan.most

    def end(self) -> None:
        if self._file is not None:
            self._file.remove()
        for guest in list(self.guests):
            guest.close()
        if self._tunnel is not None:
            self.loop.forget(self._tunnel.arrivals)
            self._tunnel.close()

    def _arrived(self) -> None:
        while self._tunnel is not None and (sock := self._tunnel.accept()) is not None:
            self.guests.append(_Guest(self, sock))

    def admits(self, guest: _Guest, knock: Knock) -> str:
        """Empty, or why not."""
        if self.plan.most and self.slots + guest.slots > self.plan.most:
            return f"the job has {self.slots} of its {self.plan.most} nodes already, so {guest.slots} more are too many"
        for other in self._present():
            both = range(max(guest.wish, other.wish), min(guest.wish + guest.slots, other.wish + other.slots))
            if guest.wish >= 0 <= other.wish and both:
                return f"node {spans(both)} has joined already, from process {other.pid} on {other.host}"
        return ""

    def _present(self) -> list[_Guest]:
        return [guest for guest in self.guests if guest.knock is not None and guest.gone is None]

    @property
    def slots(self) -> int:
        """Of those who are here."""
        return sum(guest.slots for guest in self._present()) + self.plan.slots

    def joined(self) -> None:
        """Somebody was let in: when nobody else may come, nobody needs the file any more."""
        self.came = max(self.came, self.slots)
        if self._file is not None and self.plan.most and self.slots >= self.plan.most:
            self._file.remove()


class _Guest(Branch):
    """An agent that has joined. The root gets to know it when it has said who it is."""

    def __init__(self, engine: JoinStarter, sock: socket.socket) -> None:
        super().__init__("?", 1, expected=False)
        self.pid = 0
        self._engine, self._root, self._loop = engine, engine.boss, engine.loop
        self._wire: Stream[News] = Stream(News, sock.detach())
        self._loop.watch(self._wire.fileno(), self._hear)

    def say(self, order: Order) -> None:
        if not self._wire.ended:
            self._wire.say(order)
            self._wire.watch_room(self._loop)

    def push(self) -> None:
        if not self._wire.ended:
            self._wire.push()
            self._wire.watch_room(self._loop)

    def close(self) -> None:
        if self in self._engine.guests:
            self._engine.guests.remove(self)
            self._loop.forget(self._wire.fileno())
            self._wire.close()

    def _hear(self) -> None:
        try:
            for news in self._wire.hear():
                if self.pid:
                    self._root.heard(self, news)
                elif not isinstance(news, Knock) or not self._greet(news):
                    return
        except (ProtocolError, msgspec.DecodeError) as e:
            self._end(f"what came was not an agent's: {e}")
            return
        if self._wire.ended:
            self._end("the connection with its agent has ended")

    def _greet(self, knock: Knock) -> bool:
        self.host, self.pid, self.slots, self.wish = knock.host, knock.pid, max(1, knock.slots), knock.wish
        self.place = max(0, knock.local_rank), knock.local_size
        if why := self._engine.admits(self, knock):
            self.say(Refuse(why))
            self.close()
            return False
        self._root.add(self)
        self._root.heard(self, knock)
        self._engine.joined()
        return True

    def _end(self, why: str) -> None:
        if self.pid:
            self._root.lost(self, why, os.EX_UNAVAILABLE, ())
        else:
            self.close()


def _by_host(guests: Sequence[_Guest]) -> dict[str, int]:
    out: dict[str, int] = {}
    for guest in guests:
        out[guest.host] = out.get(guest.host, 0) + guest.slots
    return out
