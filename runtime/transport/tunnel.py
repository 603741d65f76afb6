"""Tunnels: sockets between processes of two hosts, through one authenticated ZeroMQ connection each.

    root                                                                     agent
      TunnelServer.accept() = socket ==== thread ==== ZmqHub <-- CURVE --> ZmqSpoke ==== thread ==== TunnelClient.socket

Both ends are ordinary Unix sockets, so programs speak over them as between two processes of one host. The end of one
is the end of the other, also when a process dies or the network is cut. Joining agents share one key pair, so a tunnel
server tells them apart by their connections, never by their messages.
"""

from __future__ import annotations

import os
import select
import socket
import time
from collections.abc import Sequence

import zmq

from ..host import descriptors
from ..protocol.errors import BrokenError, ClosedError
from .spoke import RETRY, KeyRefusedError, ZmqSpoke
from .tunnel_io import TunnelPump
from .zmq import ZmqHub

#: The key of the joining agents (further ones: below it), where ranks stand for keys elsewhere: no agent has such a
#: number, so that a key is never used up.
_TUNNEL_KEYS = -1

#: Seconds for one attempt to connect.
_ATTEMPT = 3.0

_NOBLOCK = int(zmq.NOBLOCK)


class _TunnelHub(ZmqHub):
    """A hub whose peers share a key: each connection gets a number, in the order of their first messages."""

    def __init__(
        self, hosts: str | Sequence[str], port: int, server_keys: tuple[str, str], peers: Sequence[str]
    ) -> None:
        keys = {_TUNNEL_KEYS - number: key for number, key in enumerate(peers)}
        super().__init__(hosts, port, server_keys=server_keys, node_keys=keys)
        self._next = 0
        self.came_from: dict[int, str] = {}  #: by peer: its address

    def _sender(self, route: bytes, frame: zmq.Frame) -> int | None:
        if frame.more:
            while self._recv_frame(_NOBLOCK, False).more:
                pass
        elif (peer := self._ranks.get(route)) is not None:
            return peer
        else:
            self._next += 1
            if self._register(route, self._next - 1, frame):
                self.came_from[self._next - 1] = str(frame.get("Peer-Address"))
                return self._next - 1
        self._dropped += 1
        return None


class TunnelServer(TunnelPump):
    """The root's end: listens on addresses of this host and a port (0: any) for peers with a key of ``peer_keys``.

    Raises as ZmqHub: ValueError for a host that is not this machine's or means every interface, BrokenError for a
    port that is taken.
    """

    def __init__(self, hosts: str | Sequence[str], port: int, server_keys: tuple[str, str], *peer_keys: str) -> None:
        self._hub = _TunnelHub(hosts, port, server_keys, peer_keys)
        super().__init__(self._hub, "disttensor-tunnel-server")
        #: The addresses that joining agents connect to, such as tcp://10.0.0.1:41233.
        self.addresses = self._hub.addresses
        self.start()

    def came_from(self, peer: int) -> str:
        """Returns the address of a peer that was accepted; asked once."""
        return self._hub.came_from.pop(peer, "")

    def forked(self) -> None:
        """Closes a forked child's copies of the connections."""
        self._hub.forked()
        for end in self._ends.values():
            end.ours.close()
        for fd in (self.arrivals, self._stopping):
            os.close(fd)

    @property
    def refused(self) -> int:
        """The number of refused handshakes (with another key than the agents'), and of dropped messages."""
        return self._hub.refused


class TunnelClient(TunnelPump):
    """A joining agent's end. ``socket`` is its end of the tunnel.

    ``addresses`` are the tunnel server's, such as tcp://node1:41233; names may have several, and the first that answers
    is taken. Goes on trying for ``timeout`` seconds, as the root may start later than its agents.

    Raises BrokenError with the last reason of each address, OSError at once where this process has too few descriptors.
    """

    def __init__(self, addresses: Sequence[str], keys: tuple[str, str], server_key: str, timeout: float) -> None:
        self._spoke = _reach(addresses, keys, server_key, timeout)
        super().__init__(_SpokeMessages(self._spoke), "disttensor-tunnel-client")
        self.socket = self._admit(0).theirs
        self.accept()
        self.start()


class _SpokeMessages:
    """A spoke in the shape of a hub with one peer, number 0."""

    def __init__(self, spoke: ZmqSpoke) -> None:
        self._spoke = spoke
        self._gone: list[int] = []
        self._epoll = select.epoll()
        for fd in spoke.descriptors():
            self._epoll.register(fd, select.EPOLLIN)

    def send(self, peer: int, message: bytes) -> None:
        self._spoke.send(message)

    def drain(self) -> list[tuple[int, bytes]]:
        out = []
        try:
            while not self._gone and (message := self._spoke.recv(0)) is not None:
                out.append((0, message))
        except ClosedError:
            self._gone.append(0)
        return out

    def gone(self) -> list[int]:
        return self._gone

    def fileno(self) -> int:
        return self._epoll.fileno()

    def close(self) -> None:
        self._epoll.close()
        self._spoke.close()


def _reach(addresses: Sequence[str], keys: tuple[str, str], server_key: str, timeout: float) -> ZmqSpoke:
    descriptors.check_context()
    deadline, reasons = time.monotonic() + timeout, dict[str, str]()
    while True:
        for address in addresses:
            host, _, port = address.removeprefix("tcp://").rpartition(":")
            try:
                found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
            except ValueError:
                reasons[address] = "this is no address such as tcp://10.0.0.1:41233"
                continue
            except OSError as e:
                reasons[address] = f"the name does not resolve ({e.strerror})"
                continue
            for _, _, _, _, (number, *_rest) in found:
                left = max(RETRY, deadline - time.monotonic())
                endpoint = f"tcp://[{number}]:{port}" if ":" in str(number) else f"tcp://{number}:{port}"
                try:
                    # a plain connection first: ZeroMQ would not say why there is none
                    socket.create_connection((str(number), int(port)), min(left, _ATTEMPT)).close()
                    return ZmqSpoke(endpoint, server_key, *keys, 0, connect_timeout=min(left, _ATTEMPT))
                except KeyRefusedError:
                    raise BrokenError(f"{endpoint} refused the key: it is another job's") from None
                except BrokenError:
                    reasons[endpoint] = "something answers, but it does not prove to know this job's secret"
                except OSError as e:
                    if descriptors.is_shortage(e):  # of this process: another attempt would lack them, too
                        raise
                    reasons[endpoint] = e.strerror or "no answer"
        if time.monotonic() + RETRY >= deadline:
            raise BrokenError("; ".join(f"{where}: {why}" for where, why in reasons.items()))
        time.sleep(RETRY)
