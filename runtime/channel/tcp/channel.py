"""The data channel "tcp": a direct TCP connection between any two peers, at first use.

Peers authenticate by a mutual challenge-response (``handshake``), every header is authenticated (``frames``). The
payload travels straight from and to the tensors' memory on one host and on a trusted network, else encrypted
(``shield``). There is no pickle anywhere.

Threads: one that listens; per peer in use one that reads and, once something had to be queued, one that writes.
"""

from __future__ import annotations

import math
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import ClassVar

import torch

from ...protocol.errors import BrokenError, ClosedError
from ..base import Capabilities, ChannelContext, DataChannel, PeerInfo, Transfer
from ..carrier import Carrier, Say
from ..pool import WarmPool
from .frames import EAGER
from .handshake import PeerHello, answer
from .listener import Listener
from .peer import Limits, TcpPeer


class TcpChannel(DataChannel):
    """Moves tensors over TCP connections, one per pair of peers.

    A peer that was lost or closed stays broken until ``connect`` tells another key for its rank.
    """

    name: ClassVar[str] = "tcp"
    capabilities: ClassVar[Capabilities] = Capabilities(
        authenticated=True, encrypted=True, checksums=True, takes_back=True
    )
    limits: ClassVar[Limits] = Limits()

    def __init__(self, context: ChannelContext) -> None:
        self._context = context
        self._limits = replace(self.limits, silent=context.silence)
        self._peers: dict[int, TcpPeer] = {}
        self._lock = threading.RLock()  #: guards the table of peers, not the peers
        self._replaced: list[TcpPeer] = []  #: peers that were started anew
        self._closed = ""  #: the reason why nothing can be started any more
        self._pool = WarmPool()
        self._listener = Listener(
            (context.host, *context.further),
            self.limits.handshake,
            self._admit,
            f"disttensor-tcp-{context.rank}-listen",
            self._look,
            lambda: len(self._peers),
        )
        _channels.add(self)

    def __repr__(self) -> str:
        return f"<TcpChannel rank={self._context.rank} {self.address()} {self._closed or list(self._peers.values())}>"

    def address(self) -> str:
        """Returns ``host:port``, or several with commas between them."""
        return self._listener.address

    def connect(self, peers: Mapping[int, PeerInfo]) -> None:
        """Learns ``peers``; this peer's own rank among them is passed over.

        Another key for a known rank means that the rank was started anew: transfers under way with the old one break.
        Raises ValueError for a key that isn't 32 bytes, ClosedError.
        """
        for rank, info in peers.items():
            if len(info.key) != 32 or info.rank != rank:
                raise ValueError(f"rank {rank}: needs its own PeerInfo and a key of 32 bytes, not {len(info.key)}")
        replaced = []
        with self._lock:
            self._check_open()
            for rank, info in peers.items():
                old = self._peers.get(rank)
                if rank == self._context.rank or (old is not None and old.info == info):
                    continue
                if old is not None:
                    replaced.append(old)
                self._peers[rank] = TcpPeer(
                    self._context.rank,
                    self._context.job,
                    info,
                    self._limits,
                    self._context.protection,
                    self.empty,
                    self._carrier(rank),
                )
        self._replaced += replaced
        for old in replaced:
            old.fail(BrokenError, f"rank {old.info.rank} was started anew")

    def isend(self, tensor: torch.Tensor, peer: int, transfer: int) -> Transfer:
        return self._peer(peer, transfer).send(tensor, transfer)

    def irecv(self, tensor: torch.Tensor, peer: int, transfer: int) -> Transfer:
        return self._peer(peer, transfer).receive(tensor, transfer)

    def take_back(self, peer: int, transfer: int) -> bool:
        found = self._peers.get(peer)
        return found is not None and found.take_back(transfer)

    def refuse(self, peer: int, transfer: int, rank: int, seq: int) -> None:
        self._peer(peer, transfer).poison(transfer, rank, seq)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Makes a tensor over a warm buffer, if it is large: receiving into fresh pages costs half of the speed."""
        return self._pool.empty(shape, dtype)

    def staging(self, shape: tuple[int, ...], dtype: torch.dtype, peer: int) -> torch.Tensor:
        nbytes = math.prod(shape) * dtype.itemsize
        carrier = self._peer(peer, 0).carrier if nbytes > EAGER else None
        memory = None if carrier is None else carrier.reserve(nbytes)
        return self.empty(shape, dtype) if memory is None else memory.view(dtype).view(shape)

    def mark_lost(self, peer: int, why: str) -> None:
        found = self._peers.get(peer)
        if found is not None:
            found.fail(BrokenError, f"rank {peer} is lost to rank {self._context.rank}: {why}")

    def expire(self, peer: int, why: str) -> None:
        found = self._peers.get(peer)
        if found is not None:
            found.expire(f"rank {peer} is lost to rank {self._context.rank}: {why}")

    def failure(self, peer: int) -> str:
        found = self._peers.get(peer)
        return "" if found is None or found.failure is None else found.failure[1]

    def close(self) -> None:
        """Waits at most ``limits.flush`` seconds until sends under way have reached the peers' kernels, then ends."""
        self._closed = self._closed or "was closed"
        deadline = time.monotonic() + self.limits.flush
        peers = list(self._peers.values())
        for peer in peers:
            peer.flush(deadline)
        for peer in peers:
            peer.close(self._end_text())
        for peer in peers:
            peer.linger(deadline)
        self._end_threads(5.0)

    def abort(self) -> None:
        self._closed = self._closed or "was aborted"
        self._end_threads(0.5)

    def _end_threads(self, join: float) -> None:
        """Ends everything, and waits up to ``join`` seconds for the threads."""
        self._listener.stop()
        peers = list(self._peers.values())
        for peer in peers:
            peer.fail(ClosedError, self._end_text())
        deadline = time.monotonic() + join
        threads = [thread for peer in [*peers, *self._replaced] for thread in peer.threads]
        for thread in [self._listener.thread, *threads]:
            if thread is not threading.current_thread():  # a done callback may close the channel
                thread.join(max(0.0, deadline - time.monotonic()))

    def _end_text(self) -> str:
        return f"the tcp channel of rank {self._context.rank} {self._closed}"

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(self._end_text())

    def _peer(self, rank: int, transfer: int) -> TcpPeer:
        self._check_open()
        if not 0 <= transfer < 1 << 64:
            raise ValueError(f"a transfer id is an integer from 0 to 2**64 - 1, not {transfer}")
        try:
            return self._peers[rank]
        except KeyError:
            known = ", ".join(map(str, sorted(self._peers))) or "none"
            raise ValueError(f"rank {rank} is not a peer of rank {self._context.rank}; known: {known}") from None

    def _carrier(self, peer: int) -> Callable[[Say], Carrier] | None:
        """Returns a function that makes the carrier of large payloads to ``peer``; None: there is none.

        To be overridden.
        """
        return None

    def _admit(self, sock: socket.socket, hello: PeerHello, nonce: bytes) -> str | None:
        """Handles a hello for the listener.

        None for one that comes too early: others may know this one before, or that a connection has broken.
        """
        me, job = self._context.rank, self._context.job
        if not hello.is_for(job, me, nonce):
            return f"for another job, or for another one than rank {me}"
        peer = self._peers.get(hello.rank)
        if peer is None:
            return None
        secrets = answer(hello, nonce, job, me, peer.info.key)
        if secrets is None:
            return f"without the key of rank {hello.rank} and rank {me}"
        return "" if peer.offer(sock, secrets) else None

    def _look(self) -> None:
        for peer in list(self._peers.values()):
            peer.look()

    def _disown(self) -> None:
        """Closes a forked child's copies of the sockets, which would keep the peers from seeing this one's end."""
        self._closed = "belongs to the process that forked this one; a child cannot use it"
        self._listener.disown()
        for peer in self._peers.values():
            peer.disown()
        self._peers = {}


_channels: weakref.WeakSet[TcpChannel] = weakref.WeakSet()


def _after_fork() -> None:
    for channel in list(_channels):
        channel._disown()


os.register_at_fork(after_in_child=_after_fork)
