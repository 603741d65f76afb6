"""The control transport over ZeroMQ: one ROUTER on the master, one DEALER on each node, CURVE between them.

    master                                              node r
      ZmqHub  ROUTER, listens  <---- one TCP connection ---- ZmqSpoke  DEALER
      ZapHandler  lets in the keys of this job's nodes           its secret key came with its bundle

A node gets one connection in its life. A cut one has lost messages, so neither end ever resumes it. A hub whose words
can all be said again (``again``) lets a node make another one.
"""

from __future__ import annotations

import ipaddress
import os
import select
import socket
import time
from collections.abc import Mapping, Sequence

import zmq
from zmq.utils import z85

from ..protocol.errors import BrokenError, ClosedError
from . import sockets
from .base import TURN, Hub
from .sockets import MAX_MESSAGE
from .spoke import ZmqSpoke, plain_name
from .zap import ZapHandler

__all__ = ["ZmqHub", "ZmqSpoke"]

#: Set to "yes" to run without encryption and authentication on a real network.
PLAINTEXT_SWITCH = "DISTTENSOR_INSECURE_ALLOW_PLAINTEXT_ON_NETWORK"

# Plain ints: pyzmq looks enum members up on each call, which doubles its cost.
_EVENTS, _POLLIN, _NOBLOCK, _FIRST = int(zmq.EVENTS), int(zmq.POLLIN), int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)


#: The most bytes of a message that has no end yet. libzmq keeps the parts of a message until the last one has come, and
#: limits the size of a part only; ours have one part, of MAX_MESSAGE at most.
MAX_UNFINISHED = 64 << 20
#: The most bytes that the wire has around a message's: a frame's header, and with CURVE a nonce and a tag.
_PLAIN_FRAME, _CURVE_FRAME = 9, 9 + 33


class ZmqHub(Hub):
    """The master's end. ``node_keys`` maps each rank to its node's public key (Z85); nobody else is let in.

    With ``server_keys`` None nothing is encrypted, and a node is who it says it is: on loopback only, unless the
    environment variable DISTTENSOR_INSECURE_ALLOW_PLAINTEXT_ON_NETWORK is "yes".

    Args:
        host: an address of this machine to listen on, or several.
        port: the port; 0 is any, for each host another.
        server_keys: the master's CURVE key pair; None for plain text.
        node_keys: rank -> public key.
        unread: the most messages of one node that libzmq holds for this process.
        silence: seconds without an answer of a node's kernel after which its host is gone, or the network to it.
        again: whether a node whose connection has ended, as ``gone`` tells, may make another one.

    Raises ValueError for a host that means every interface or does not resolve, for bad keys and for plain text
    on a network; BrokenError when the port cannot be had.
    """

    def __init__(
        self,
        host: str | Sequence[str] = "127.0.0.1",
        port: int = 0,
        *,
        server_keys: tuple[str, str] | None,
        node_keys: Mapping[int, str],
        unread: int = sockets.MOST_UNREAD,
        silence: float = sockets.SILENCE,
        again: bool = False,
    ) -> None:
        self._again = again
        hosts = [host] if isinstance(host, str) else host
        endpoints = [_endpoint(name, port, encrypted=server_keys is not None) for name in hosts]
        keys = None if server_keys is None else _raw_keys(node_keys)
        self._plain = {plain_name(rank): rank for rank in node_keys} if server_keys is None else None
        self._routes: dict[int, bytes] = {}  # rank -> routing id, of live connections
        self._ranks: dict[bytes, int] = {}  # its inverse
        self._lost: set[int] = set()
        self._former: set[bytes] = set()  # routing ids of connections in whose nodes' places others have come
        self._gone: list[int] = []
        self._leaving: list[int] = []  # nodes whose connections have ended, while messages of theirs may be left
        self._dropped = 0
        self._ctx = sockets.context()
        self._left = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)  # readable while ``drain`` has left messages
        self._more = False  # whether it is
        self._closed = False
        #: bytes of the messages that were taken, on the wire, by rank; at least, so that honest ones are never short
        self._taken: dict[int, int] = {}
        self._around = _PLAIN_FRAME if server_keys is None else _CURVE_FRAME
        self._received: dict[int, tuple[int, int]] = {}  #: what had arrived when it was looked at last
        self._emptied = False  #: whether all messages were taken since then
        curve = sockets.Curve(*server_keys) if server_keys else None
        self._sock = sockets.router(self._ctx, endpoints[0], curve, unread, silence)
        self._zap_handler = ZapHandler(self._ctx, self._sock, keys, silence)
        self._epoll = select.epoll()
        self._send, self._recv, self._recv_frame, self._get = sockets.raw_calls(self._sock)
        bound = []
        for endpoint in endpoints:
            try:
                bound.append(sockets.bind(self._sock, endpoint))
            except zmq.ZMQError as error:
                self.close()
                raise BrokenError(f"cannot listen on {endpoint}: {error}; name another port, or 0 for any") from error
        #: The addresses that nodes connect to, such as tcp://127.0.0.1:41233, in the order of the hosts.
        self.addresses: tuple[str, ...] = tuple(bound)
        #: The first of these addresses.
        self.address: str = bound[0]
        # zmq.FD is edge-triggered with respect to messages: it turns readable when something happens inside the
        # socket, and any call on the socket (a send too) may consume that. Hence the duty to drain after sends.
        self._epoll.register(self._sock.FD, select.EPOLLIN)
        self._epoll.register(self._zap_handler.wake, select.EPOLLIN)
        self._epoll.register(self._left, select.EPOLLIN)

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"connected={sorted(self._routes)} lost={sorted(self._lost)}"
        return f"<ZmqHub {self.address} {state} refused={self.refused}>"

    @property
    def connected(self) -> frozenset[int]:
        """The nodes that were heard from and are not gone."""
        return frozenset(self._routes)

    @property
    def refused(self) -> int:
        """The number of refused handshakes, and of messages dropped because the sender was not who it had to be."""
        return self._zap_handler.refused + self._dropped

    def send(self, rank: int, message: bytes) -> None:
        if len(message) > MAX_MESSAGE:
            raise ValueError(f"a message of {len(message)} bytes; at most {MAX_MESSAGE} fit: split it")
        try:
            self._send(self._routes[rank], _FIRST)
            self._send(message, _NOBLOCK)
        except KeyError:
            if self._closed:
                raise ClosedError(f"cannot send to node {rank}: the hub is closed") from None
            state = "gone" if rank in self._lost else "not connected"
            raise BrokenError(f"node {rank} is {state} (connected: {sorted(self._routes)})") from None
        except zmq.ZMQError as error:
            raise BrokenError(f"node {rank} is gone: {error}") from error

    def drain(self) -> list[tuple[int, bytes]]:
        if self._closed:
            raise ClosedError("cannot receive: the hub is closed")
        if self._zap_handler.leaving:
            self._leaving += self._take_ended_ranks()
        out: list[tuple[int, bytes]] = []
        turns = TURN
        while self._get(_EVENTS) & _POLLIN:
            if not turns:
                self._leave_messages(True)
                return out
            turns -= 1
            route = self._recv(_NOBLOCK)
            frame = self._recv_frame(_NOBLOCK, False)
            rank = self._sender(route, frame)
            if rank is not None:
                message = frame.bytes
                out.append((rank, message))
                self._taken[rank] += len(message) + self._around
        self._emptied = True
        if self._more:
            self._leave_messages(False)
        if self._leaving:
            leaving, self._leaving = self._leaving, []
            for rank in leaving:
                self._lose(rank)
        return out

    def _leave_messages(self, more: bool) -> None:
        """Notes whether messages are left, which the socket's own descriptor does not tell again."""
        if more != self._more:
            self._more = more
            if more:
                os.eventfd_write(self._left, 1)
            else:
                os.eventfd_read(self._left)

    def gone(self) -> list[int]:
        """Returns the nodes whose connections ended since the last call; ``drain`` has given out all they had sent."""
        out, self._gone = self._gone, []
        return out

    def admit(self, rank: int, key: str) -> None:
        """Lets in one more node. Raises ValueError for a bad key, or another node's."""
        if self._plain is not None:
            self._plain[plain_name(rank)] = rank
        else:
            self._zap_handler.admit(_raw_keys({rank: key}))

    def readmit(self, rank: int, key: str) -> None:
        """Does what Hub.readmit says. Raises ValueError for a bad key, or another node's.

        In plain text the routing id is the node's name: libzmq takes the new connection once the former one has ended.
        """
        keys = {} if self._plain is not None else _raw_keys({rank: key})
        self._zap_handler.readmit(rank, keys)
        route = self._routes.pop(rank, None)
        if route is not None:
            del self._ranks[route]
            if self._plain is None:
                self._former.add(route)
        self._lost.discard(rank)
        self._leaving = [leaving for leaving in self._leaving if leaving != rank]
        self._gone = [gone for gone in self._gone if gone != rank]

    def cut(self, rank: int) -> None:
        self._zap_handler.cut(rank)

    def cut_deaf(self) -> list[int]:
        return [] if self._closed else self._zap_handler.cut_deaf()

    def cut_endless(self) -> list[int]:
        if self._closed:
            return []
        endless = []
        if self._emptied:
            endless = self._zap_handler.cut_endless(self._received, self._taken, MAX_UNFINISHED)
        self._received = self._zap_handler.received()
        self._emptied = False  # after it: only messages that are taken from now on were there then
        return [rank for rank in endless if rank >= 0]

    def fileno(self) -> int:
        return self._epoll.fileno()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._routes.clear()
        self._epoll.close()
        os.close(self._left)
        self._sock.close(linger=sockets.FLUSH_MS)
        self._ctx.term()  # waits for the flush, and ends the ZAP handler
        self._zap_handler.join()

    def forked(self) -> None:
        """Closes a forked child's copies of the connections. They would hide the master's death from the nodes.

        Calls nothing of libzmq's, whose threads are not here. Every call raises ClosedError from now on.
        """
        if not self._closed:
            self._closed = True
            self._routes.clear()
            self._epoll.close()
            os.close(self._left)
            for descriptor in self._zap_handler.descriptors():
                os.close(descriptor)

    #: Invariant 10: the rank of a sender comes from its authenticated key.
    def _sender(self, route: bytes, frame: zmq.Frame) -> int | None:
        """Returns the rank that sent ``frame``; None (and counted) when it must not be listened to."""
        if frame.more:
            while self._recv_frame(_NOBLOCK, False).more:
                pass
            rank = None  # no message of this protocol has two frames
        elif self._plain is not None:
            rank = self._plain.get(route)
        else:
            # Asked for each message, not once per routing id: the peer chooses that, and could choose a dead node's.
            rank = int(frame.get("User-Id"))
        if rank is not None and self._ranks.get(route) != rank and not self._register(route, rank, frame):
            rank = None
        if rank is None:
            self._dropped += 1
        return rank

    def _register(self, route: bytes, rank: int, frame: zmq.Frame) -> bool:
        """Ties ``rank`` to the connection of its first message, for good. False: the rank may not have it."""
        if rank in self._routes or rank in self._lost or route in self._ranks or route in self._former:
            return False
        self._routes[rank] = route
        self._ranks[route] = rank
        self._taken[rank] = 0
        if not self._zap_handler.watch(int(frame.get(zmq.SRCFD)), rank):
            self._lose(rank)
        return True

    def _take_ended_ranks(self) -> list[int]:
        """Returns the ranks whose connections have ended, once all that they sent has reached this socket.

        The event of the end can overtake the last messages by microseconds. The pipe's end cannot, and a pipe that
        has ended cannot be routed to.
        """
        leaving = self._zap_handler.take_leaving()
        for rank in leaving:
            for _ in range(1000):
                try:
                    self._send(self._routes[rank], _FIRST)
                    self._send(b"", _NOBLOCK)  # to a dead connection: nobody receives it
                except (KeyError, zmq.ZMQError):
                    break
                time.sleep(0)
        return leaving

    def _lose(self, rank: int) -> None:
        route = self._routes.pop(rank, None)
        if route is not None:
            del self._ranks[route]
            self._gone.append(rank)
            if self._again:
                self._zap_handler.let_back(rank)
            else:
                self._lost.add(rank)


def _endpoint(host: str, port: int, encrypted: bool) -> str:
    """Returns the endpoint to bind. Raises ValueError for one on every interface, or in plain text on a network."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0] if host not in ("", "*") else "0.0.0.0"
    except OSError as error:
        raise ValueError(f"the host {host!r} does not resolve ({error}); name an address of this machine") from error
    address = ipaddress.ip_address(str(found).partition("%")[0])
    address = getattr(address, "ipv4_mapped", None) or address  # ::ffff:0.0.0.0 is every interface too
    if address.is_unspecified:
        raise ValueError(
            f"the host {host!r} means every interface; name the one that the nodes reach, such as 127.0.0.1"
        )
    if not (encrypted or address.is_loopback or os.environ.get(PLAINTEXT_SWITCH) == "yes"):
        raise ValueError(
            f"no encryption and no authentication on {host!r}, which is not loopback: anybody there could run code on "
            f'the nodes. Use security="curve", or set {PLAINTEXT_SWITCH}=yes if that is what you want'
        )
    return f"tcp://[{found}]:{port}" if address.version == 6 else f"tcp://{address}:{port}"


def _raw_keys(node_keys: Mapping[int, str]) -> dict[bytes, int]:
    """Maps raw public keys to ranks. Raises ValueError for a bad key, or one that two ranks share."""
    out: dict[bytes, int] = {}
    for rank, key in node_keys.items():
        if len(key) != 40:
            raise ValueError(f"node {rank}'s public key is not Z85 text of 40 characters: {key!r}")
        raw = z85.decode(key)
        if raw in out:
            raise ValueError(f"the nodes {out[raw]} and {rank} have the same public key; each needs a pair of its own")
        out[raw] = rank
    return out
