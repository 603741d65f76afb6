"""The spoke: a node's end of the ZeroMQ transport."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import threading
import time

import zmq

from ..host.tcp_info import try_often
from ..protocol.errors import BrokenError, ClosedError
from . import sockets
from .base import Spoke
from .sockets import MAX_MESSAGE

# Plain ints: pyzmq looks enum members up on each call, which doubles its cost.
_EVENTS, _NOBLOCK, _POLLIN = int(zmq.EVENTS), int(zmq.NOBLOCK), int(zmq.POLLIN)

#: The pause between attempts to connect, in seconds.
RETRY = 0.1

#: Events each of which ends an attempt or a connection.
_ENDED = zmq.EVENT_CLOSED | zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_AUTH


class KeyRefusedError(BrokenError):
    """The other end knows this key, and refuses it: trying again is of no use."""


def plain_name(rank: int) -> bytes:
    """Returns the name that a node gives itself where nothing authenticates it."""
    return b"node-%d" % rank


class ZmqSpoke(Spoke):
    """Node ``rank``'s end; connected once the constructor returns. Empty keys mean plain text.

    Raises BrokenError when the master refuses the key, or cannot be reached within ``connect_timeout`` seconds.
    ``silence`` is the number of seconds without an answer of the master's kernel after which its host is gone, or the
    network to it.
    """

    # All calls on the socket are under _lock, which nobody holds while waiting: recv waits for zmq.FD with poll. A
    # send by another thread may consume what makes zmq.FD readable, so it looks, and wakes the receiving thread.

    def __init__(
        self,
        address: str,
        server_key: str,
        public: str,
        secret: str,
        rank: int,
        *,
        connect_timeout: float = 30.0,
        silence: float = sockets.SILENCE,
    ) -> None:
        self._address, self._rank = address, rank
        self._lock = threading.Lock()
        self._waiting = False
        self._closed = False
        self._ended = False  # the connection is cut; what arrived before may still be read
        self._ctx = sockets.context()
        curve = sockets.Curve(public, secret, server_key) if server_key else None
        # With keys the master knows the node by its key. The name is one that nobody can guess and take over.
        name = os.urandom(16).hex().encode() if curve else plain_name(rank)
        try:
            self._sock, self._monitor = _connect(self._ctx, address, curve, name, silence, connect_timeout)
        except BaseException:
            self._ctx.destroy(linger=0)
            raise
        self._send, self._recv, _, self._get = sockets.raw_calls(self._sock)
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll = select.poll()
        self._only_messages = [(self._sock.FD, select.POLLIN)]
        for descriptor in (self._sock.FD, self._monitor.FD, self._wake):
            self._poll.register(descriptor, select.POLLIN)
        self._look()  # the FD of a socket announces only events after a vain look into it

    def __repr__(self) -> str:
        return f"<ZmqSpoke node={self._rank} master={self._address}{' closed' if self._closed else ''}>"

    def descriptors(self) -> tuple[int, int]:
        """Returns descriptors that become readable when ``recv`` may have a message, or the end.

        Call it until it has none.
        """
        return self._sock.FD, self._monitor.FD

    def recv(self, timeout: float | None = None) -> bytes | None:
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            with self._lock:
                self._waiting = False
                if self._closed:
                    raise ClosedError(f"node {self._rank} cannot receive: its own end is closed")
                if self._get(_EVENTS) & _POLLIN:
                    return self._recv(_NOBLOCK)
                if self._ended:
                    raise self._master_gone()
                self._waiting = True
            if deadline is None:
                ready = self._poll.poll()
            else:
                # Rounded up, or the last millisecond is spent in a busy loop.
                ready = self._poll.poll(max(0, int((deadline - time.monotonic()) * 1000 + 0.999)))
                if not ready and time.monotonic() >= deadline:
                    return None
            if ready != self._only_messages:
                self._look()

    def send(self, message: bytes) -> None:
        if len(message) > MAX_MESSAGE:
            raise ValueError(f"a message of {len(message)} bytes; at most {MAX_MESSAGE} fit: split it")
        with self._lock:
            if self._closed:
                raise ClosedError(f"node {self._rank} cannot send: its own end is closed")
            if self._ended:
                raise self._master_gone()
            self._send(message, _NOBLOCK)
            if self._waiting and self._get(_EVENTS) & _POLLIN:
                os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._monitor.close()
            self._sock.close(linger=sockets.FLUSH_MS)
            os.eventfd_write(self._wake, 1)
        self._ctx.term()  # waits for the flush
        # _wake is left to __del__: the receiving thread may be polling it, and its number must not be reused meanwhile.

    def __del__(self) -> None:
        wake = getattr(self, "_wake", None)
        if wake is not None:
            os.close(wake)

    def _look(self) -> None:
        """Finds why the receiving thread woke, if not for a message: another thread, or the connection's end."""
        with self._lock:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wake)
            # All that arrived on a connection is in the socket before its end is reported.
            while not self._closed and self._monitor.poll(0):
                self._monitor.recv_multipart()
                self._ended = True

    def _master_gone(self) -> ClosedError:
        return ClosedError(f"node {self._rank}: the connection with the master at {self._address} has ended")


#: By how many times its limit a node waits for a master that has no time for it, at most.
_MOST_WAITS = 10


def _left_ms(deadline: float) -> int:
    return max(0, int((deadline - time.monotonic()) * 1000))


def _try_often(descriptor: int, silence: float) -> None:
    """Has the kernel do so on a connection of ZeroMQ's, which may have ended: the number may be another's by then."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
        try_often(connection, silence)


def _connect(
    ctx: sockets.Context,
    address: str,
    curve: sockets.Curve | None,
    name: bytes,
    silence: float,
    timeout: float,
) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
    """Returns a connected socket and its monitor, whose next event is the connection's end. Raises BrokenError.

    ``timeout`` counts from the last attempt that the master's kernel has answered, and the master itself had no time
    for, as where hundreds of nodes come at once; all of it takes ``_MOST_WAITS`` times as long at most.
    """
    begun = time.monotonic()
    deadline = begun + timeout
    attempt = 0
    while True:
        attempt += 1
        tried = time.monotonic()
        sock = sockets.dealer(ctx, address, curve, name, silence)
        events = _ENDED | zmq.EVENT_CONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED
        sock.monitor(f"inproc://monitor-{attempt}", events)
        monitor = sockets.pair(ctx)
        monitor.connect(f"inproc://monitor-{attempt}")
        sock.connect(address)
        outcome, answered = None, False
        while outcome in (None, zmq.EVENT_CONNECTED) and monitor.poll(_left_ms(deadline)):
            outcome, descriptor = struct.unpack_from("=Hi", monitor.recv_multipart()[0])
            if outcome == zmq.EVENT_CONNECTED:
                answered = True
                _try_often(descriptor, silence)
        if outcome == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            return sock, monitor
        monitor.close()
        sock.close(linger=0)
        if outcome == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            raise KeyRefusedError(
                f"the master at {address} refused this node's key: it is of another job, or the node was connected "
                "before (a lost node does not come back)"
            )
        now = time.monotonic()
        if answered and now - tried > sockets.HANDSHAKE_MS / 2000:  # nobody has hung up on this node
            deadline = min(now + timeout, begun + _MOST_WAITS * timeout)
        if now + RETRY >= deadline:
            raise BrokenError(
                f"cannot reach the master at {address}: {attempt} attempts in {max(timeout, now - begun):.2g} s. Is it "
                "running, may this host connect there, and is the server key this job's?"
            )
        time.sleep(RETRY)
