"""The ZAP handler: the master's thread that decides who may connect, and notes whose connection ended.

    libzmq's I/O thread                         ZAP handler's thread               link (drain)
      handshake -- ZAP request (inproc) ------> key on the list? 200 rank : 400
      connection ends -- monitor (inproc) ----> its descriptor was watched? ------> leaving, wake

It sleeps unless somebody connects or a connection ends, so it costs the running job nothing.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping

import zmq

from ..host.tcp_info import Unanswered, bytes_received
from . import sockets

_log = logging.getLogger(__name__)

#: Strangers can connect a thousand times a second; the log gets one line in so many seconds.
LOG_EVERY = 10.0


@contextlib.contextmanager
def _connection(descriptor: int) -> Iterator[socket.socket]:
    """Opens a connection of libzmq's a second time, as that may close it at any moment. Raises OSError if it has, also
    where the number is something else's by now."""
    copy = os.dup(descriptor)
    try:
        connection = socket.socket(fileno=copy)
    except OSError:  # it leaves the descriptor open
        os.close(copy)
        raise
    with connection:
        yield connection


class ZapHandler:
    """Authenticates the peers of ``router``, which must not be bound yet.

    ``keys`` maps raw public keys to ranks (None: plain text). A key is let in until ``watch`` reports its rank as
    registered, never again after that: so neither a second worker with the same key nor a restarted one gets through,
    while a handshake cut short may be tried again.
    """

    def __init__(
        self,
        ctx: sockets.Context,
        router: zmq.Socket[bytes],
        keys: Mapping[bytes, int] | None,
    ) -> None:
        self._keys = None if keys is None else dict(keys)
        self._lock = threading.Lock()
        self._open: set[int] = set()  # descriptors of accepted connections
        self._watched: dict[int, int] = {}  # descriptor -> rank; its keys are in _open
        self._unanswered: dict[int, Unanswered] = {}  # by rank, which has one connection in its life
        self._taken: set[int] = set()
        self._logged = -LOG_EVERY
        #: The number of refused handshakes.
        self.refused = 0
        #: Ranks whose connection ended, not yet taken by ``take_leaving``.
        self.leaving: deque[int] = deque()
        #: Readable while ``leaving`` is not empty.
        self.wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._zap = sockets.rep(ctx)
        self._zap.bind("inproc://zeromq.zap.01")  # the name that libzmq looks for
        router.monitor("inproc://door", zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        self._monitor = sockets.pair(ctx)
        self._monitor.connect("inproc://door")
        self._thread = threading.Thread(target=self._run, name="disttensor-zap", daemon=True)
        self._thread.start()

    def admit(self, keys: Mapping[bytes, int]) -> None:
        """Puts further keys on the list. Raises ValueError for a key that is on it already."""
        if self._keys is None:
            raise ValueError("without encryption there are no keys")
        with self._lock:
            for key, rank in keys.items():
                if self._keys.setdefault(key, rank) != rank:
                    raise ValueError(f"the nodes {self._keys[key]} and {rank} have the same public key")

    def watch(self, descriptor: int, rank: int) -> bool:
        """Has the end of the connection ``descriptor``, on which ``rank`` is registered, reported.

        Returns False when it has ended already.
        """
        with self._lock:
            self._taken.add(rank)
            if descriptor not in self._open:
                return False
            self._watched[descriptor] = rank
            return True

    def take_leaving(self) -> list[int]:
        """Takes the ranks whose connection has ended since the last call."""
        with self._lock:
            out = list(self.leaving)
            self.leaving.clear()
            if out:
                os.eventfd_read(self.wake)
            return out

    def cut(self, rank: int) -> None:
        """Breaks the connection that ``rank`` is registered on, if there is one."""
        with self._lock:
            for descriptor in [d for d, watched in self._watched.items() if watched == rank]:
                with contextlib.suppress(OSError), _connection(descriptor) as connection:
                    connection.shutdown(socket.SHUT_RDWR)

    def cut_deaf(self, silence: float) -> list[int]:
        """Breaks each registered connection whose other end's kernel has not answered for so many seconds; returns the
        ranks. (When nothing is under way the kernel finds out by itself.)
        """
        deaf = []
        with self._lock:
            for descriptor, rank in self._watched.items():
                with contextlib.suppress(OSError), _connection(descriptor) as connection:
                    if self._unanswered.setdefault(rank, Unanswered()).lasts(connection, silence):
                        connection.shutdown(socket.SHUT_RDWR)
                        deaf.append(rank)
        return deaf

    def received(self) -> dict[int, tuple[int, int]]:
        """Returns for each connection, by descriptor, the rank that is registered on it (-1: none yet), and how many
        bytes of it libzmq has read at least."""
        found = {}
        with self._lock:
            for descriptor in self._open:
                with contextlib.suppress(OSError), _connection(descriptor) as connection:
                    unread = connection.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)  # at most
                    found[descriptor] = self._watched.get(descriptor, -1), bytes_received(connection) - unread
        return found

    def cut_endless(self, received: Mapping[int, tuple[int, int]], taken: Mapping[int, int], most: int) -> list[int]:
        """Breaks each connection of which more than ``most`` bytes were read and given to nobody; returns the ranks.

        ``received``: what the method of this name has returned before all messages that were there were taken.
        ``taken``: the bytes of all messages that were taken, by rank.
        """
        now, endless = self.received(), []
        with self._lock:
            for descriptor, (rank, count) in received.items():
                # A descriptor's number may be another connection's by now, which would have received less.
                same = self._watched.get(descriptor, -1) == rank and now.get(descriptor, (rank, -1))[1] >= count
                if same and count - taken.get(rank, 0) > most:
                    with contextlib.suppress(OSError), _connection(descriptor) as connection:
                        connection.shutdown(socket.SHUT_RDWR)
                        endless.append(rank)
        return endless

    def descriptors(self) -> list[int]:
        """Returns the connections and the wake-up, for a forked child to close.

        No lock: its holder does not exist there.
        """
        return [*self._open, self.wake]

    def join(self) -> None:
        """Waits for the thread; to be called when the context has been terminated, which ends the thread."""
        self._thread.join()
        os.close(self.wake)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._zap, zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)
        try:
            while True:
                poller.poll()
                # The monitor first: a connection is in _open before its handshake can succeed, so before `watch`.
                while self._monitor.poll(0):
                    self._note(*self._monitor.recv_multipart())
                if self._zap.poll(0):
                    self._zap.send_multipart(self._answer(self._zap.recv_multipart()))
        except zmq.ContextTerminated:
            pass
        finally:
            self._zap.close()
            self._monitor.close()

    def _note(self, event: bytes, endpoint: bytes) -> None:
        kind, descriptor = struct.unpack("=Hi", event)
        with self._lock:
            if kind == zmq.EVENT_ACCEPTED:
                self._open.add(descriptor)
                return
            self._open.discard(descriptor)
            rank = self._watched.pop(descriptor, None)
            if rank is not None:
                self.leaving.append(rank)
                os.eventfd_write(self.wake, 1)

    def _answer(self, request: list[bytes]) -> list[bytes]:
        """Makes the reply to one ZAP request (RFC 27). Its user id, the rank, becomes a property of each message."""
        version, number, domain, address, _, mechanism, *credentials = request
        rank = None
        if self._keys is not None and mechanism == b"CURVE" and len(credentials) == 1:
            rank = self._keys.get(credentials[0])
        allowed = version == b"1.0" and domain == sockets.ZAP_DOMAIN
        if self._keys is None:
            allowed = allowed and mechanism == b"NULL"
            reason = b"plain text expected"
        else:
            with self._lock:
                allowed = allowed and rank is not None and rank not in self._taken
            reason = b"unknown key" if rank is None else b"key in use"
        if allowed:
            return [version, number, b"200", b"OK", b"" if rank is None else b"%d" % rank, b""]
        self.refused += 1
        now = time.monotonic()
        if now - self._logged >= LOG_EVERY:
            self._logged = now
            who = "" if rank is None else f" (node {rank}'s)"
            text = "refused a connection from %s: %s%s; %d refused so far"
            _log.warning(text, address.decode("ascii", "replace"), reason.decode(), who, self.refused)
        return [version, number, b"400", reason, b"", b""]
