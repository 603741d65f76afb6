"""The ZAP handler: the master's thread that decides who may connect, and notes whose connection ended.

    libzmq's I/O thread                         ZAP handler's thread               link (drain)
      handshake -- ZAP request (inproc) ------> key on the list? 200 rank : 400
      connection ends -- monitor (inproc) ----> its descriptor was watched? ------> leaving, wake

It sleeps unless somebody connects or a connection ends, so it costs the running job nothing.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
import struct
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import zmq

from ..host.refusals import Refusals
from ..host.tcp_info import Unanswered, bytes_received, try_often
from . import sockets

_log = logging.getLogger(__name__)

# Plain ints and compiled methods, as on the hub's hot path: two events come of each stranger, and of those a thousand a
# second must not cost the script a tenth of a core.
_EVENTS, _POLLIN = int(zmq.EVENTS), int(zmq.POLLIN)
_ACCEPTED, _HUNG_UP = int(zmq.EVENT_ACCEPTED), int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL)
_EVENT = struct.Struct("=Hi")

#: So many events of connections within a second are a crowd's; for so many seconds at a time this thread then lets
#: events pile up, as to be woken costs it more than to handle them.
_CROWD, _PAUSE = 64, 0.01

#: Why a connection is refused on which no key was shown: noise, or another server's key.
_STRANGE = "not the handshake of a node of this job"
_UNKNOWN = "an unknown address"
_INTERNET = (socket.AF_INET, socket.AF_INET6)


class _Accepted(NamedTuple):
    """A connection that libzmq has accepted, and may close at any moment: then its number is soon something else's."""

    descriptor: int
    inode: int  #: which socket it is; 0 if it had ended when it was looked at
    address: str  #: the other end's; _UNKNOWN likewise

    @classmethod
    def look(cls, descriptor: int) -> _Accepted:
        """Notes which socket it is. Noise ends within microseconds; then this may be another one, of any kind, and the
        event of the end comes next."""
        try:
            with _copy(descriptor) as connection:
                if connection.family in _INTERNET:
                    return cls(descriptor, os.fstat(connection.fileno()).st_ino, str(connection.getpeername()[0]))
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):  # there is no descriptor for a look at it: it may be a node
                with contextlib.suppress(OSError):
                    return cls(descriptor, os.fstat(descriptor).st_ino, _UNKNOWN)
        return cls(descriptor, 0, _UNKNOWN)

    @contextlib.contextmanager
    def opened(self) -> Iterator[socket.socket]:
        """Opens it a second time. Raises OSError if it has ended, also where its number is another socket's by now."""
        with _copy(self.descriptor) as connection:
            if os.fstat(connection.fileno()).st_ino != self.inode:
                raise OSError(errno.EBADF, f"descriptor {self.descriptor} is another socket by now")
            yield connection


@contextlib.contextmanager
def _copy(descriptor: int) -> Iterator[socket.socket]:
    """Duplicates the descriptor of a socket. Raises OSError for one that is closed, or no socket."""
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
    registered, never again after that (unless by ``let_back``): so neither a second worker with the same key nor a
    restarted one gets through, while a handshake cut short may be tried again.
    """

    def __init__(
        self,
        ctx: sockets.Context,
        router: zmq.Socket[bytes],
        keys: Mapping[bytes, int] | None,
        silence: float = sockets.SILENCE,
    ) -> None:
        """``silence``: the seconds without an answer of a node's kernel after which its connection is cut."""
        self._silence = silence
        self._keys = None if keys is None else dict(keys)
        self._lock = threading.Lock()
        self._open: dict[int, _Accepted] = {}  # by descriptor
        #: by address: the connections that this was asked about, that are open, and that no node is registered on; at
        #: most, as nothing tells which of an address it is that ends
        self._asked: Counter[str] = Counter()
        self._watched: dict[int, int] = {}  # descriptor -> rank; its keys are in _open
        self._unanswered: dict[int, Unanswered] = {}  # by rank, which has one connection at a time
        self._taken: set[int] = set()
        #: connections that were let in and that no node is registered on, at most: those that have ended since count on
        self._let_in = 0
        self._hung_up = False  # whether the next one to end was not at fault: it hung up, or said nothing for too long
        self._refusals = Refusals(_log)
        #: Ranks whose connection ended, not yet taken by ``take_leaving``.
        self.leaving: deque[int] = deque()
        #: Readable while ``leaving`` is not empty.
        self.wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._zap = sockets.rep(ctx)
        self._zap.bind("inproc://zeromq.zap.01")  # the name that libzmq looks for
        router.monitor("inproc://door", _ACCEPTED | _HUNG_UP | zmq.EVENT_DISCONNECTED)
        self._monitor = sockets.pair(ctx)
        self._monitor.connect("inproc://door")
        self._thread = threading.Thread(target=self._run, name="disttensor-zap", daemon=True)
        self._thread.start()

    @property
    def refused(self) -> int:
        """The number of connections that were not let in."""
        return self._refusals.count

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
            self._let_in -= 1
            if descriptor not in self._open:
                return False
            self._watched[descriptor] = rank
            address = self._open[descriptor].address
            with contextlib.suppress(OSError), self._open[descriptor].opened() as connection:
                try_often(connection, self._silence)
            strange = self._is_strange(address)
        if strange:  # not by this thread: it holds the link's lock, for which a handler of the log may wait
            threading.Thread(target=self._refusals.note_refusal, args=(address, _STRANGE), daemon=True).start()
        return True

    def let_back(self, rank: int) -> None:
        """Lets in the key of a rank again whose connection has ended."""
        with self._lock:
            self._taken.discard(rank)
            self._unanswered.pop(rank, None)

    def readmit(self, rank: int, keys: Mapping[bytes, int]) -> None:
        """Puts the key of another worker in the place of a rank's, whose connection is broken, and its end not told.

        Raises ValueError for a key that is on the list already.
        """
        with self._lock:
            if self._keys is not None:
                if any(key in self._keys for key in keys):
                    raise ValueError(f"another worker of node {rank} needs a key of its own")
                self._keys = {key: of for key, of in self._keys.items() if of != rank} | dict(keys)
            for descriptor in [d for d, watched in self._watched.items() if watched == rank]:
                with contextlib.suppress(OSError), self._open[descriptor].opened() as connection:
                    connection.shutdown(socket.SHUT_RDWR)
                del self._watched[descriptor]
            self._taken.discard(rank)
            self._unanswered.pop(rank, None)
            if rank in self.leaving:
                left = [leaving for leaving in self.leaving if leaving != rank]
                self.leaving.clear()
                self.leaving.extend(left)
                if not left:
                    os.eventfd_read(self.wake)

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
                with contextlib.suppress(OSError), self._open[descriptor].opened() as connection:
                    connection.shutdown(socket.SHUT_RDWR)

    def cut_deaf(self) -> list[int]:
        """Breaks each registered connection whose other end's kernel has not answered for long; returns the ranks.
        (When nothing is under way the kernel finds out by itself.)"""
        deaf = []
        with self._lock:
            for descriptor, rank in self._watched.items():
                with contextlib.suppress(OSError), self._open[descriptor].opened() as connection:
                    if self._unanswered.setdefault(rank, Unanswered()).lasts(connection, self._silence):
                        connection.shutdown(socket.SHUT_RDWR)
                        deaf.append(rank)
        return deaf

    def received(self) -> dict[int, tuple[int, int]]:
        """Returns for each connection on which messages may come, by descriptor, the rank that is registered on it
        (-1: none yet), and how many bytes of it libzmq has read at least.

        None comes on one that was not let in: strangers, of whom there may be thousands, are not looked at.
        """
        found = {}
        with self._lock:
            for descriptor in self._open if self._let_in else self._watched:
                with contextlib.suppress(OSError), self._open[descriptor].opened() as connection:
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
                if same and descriptor in self._open and count - taken.get(rank, 0) > most:
                    with contextlib.suppress(OSError), self._open[descriptor].opened() as connection:
                        connection.shutdown(socket.SHUT_RDWR)
                        endless.append(rank)
        return endless

    def descriptors(self) -> list[int]:
        """Returns the connections that have not ended, and the wake-up, for a forked child to close.

        No lock: its holder does not exist there.
        """
        still = []
        for descriptor, accepted in self._open.items():
            with contextlib.suppress(OSError), accepted.opened():
                still.append(descriptor)
        return [*still, self.wake]

    def join(self) -> None:
        """Waits for the thread; to be called when the context has been terminated, which ends the thread."""
        self._thread.join()
        os.close(self.wake)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._zap, zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)
        monitor, zap = sockets.raw_calls(self._monitor), sockets.raw_calls(self._zap)
        came, since = 0, time.monotonic()
        try:
            while True:
                poller.poll()
                came += self._note_events(monitor)
                while zap.getsockopt(_EVENTS) & _POLLIN:
                    request = self._zap.recv_multipart()
                    # A connection is in _open before its handshake can succeed, so before `watch`: libzmq has told of
                    # it before it asked, perhaps since the look above.
                    came += self._note_events(monitor)
                    self._zap.send_multipart(self._answer(request))
                if (now := time.monotonic()) - since > 1:
                    came, since = 0, now
                if came > _CROWD:
                    time.sleep(_PAUSE)
        except zmq.ContextTerminated:
            pass
        finally:
            self._zap.close()
            self._monitor.close()

    def _note_events(self, monitor: sockets.RawCalls) -> int:
        """Takes in what libzmq has told of connections; returns the number of events."""
        came = 0
        while monitor.getsockopt(_EVENTS) & _POLLIN:
            self._note_event(monitor.recv(0))
            monitor.recv(0)  # the endpoint, which nobody asks about
            came += 1
        return came

    def _note_event(self, event: bytes) -> None:
        kind, descriptor = _EVENT.unpack(event)
        with self._lock:
            if kind == _ACCEPTED:
                self._open[descriptor] = _Accepted.look(descriptor)
                return
            if kind == _HUNG_UP:  # such as who looks whether there is a port at all; the end comes right behind it
                self._hung_up = True
                return
            hung_up, self._hung_up = self._hung_up, False
            ended = self._open.pop(descriptor, None)
            address = _UNKNOWN if ended is None else ended.address
            rank = self._watched.pop(descriptor, None)
            if rank is not None:
                self.leaving.append(rank)
                os.eventfd_write(self.wake, 1)
            # One who hung up was hardly asked about, and a node of the same address may be about to be registered.
            strange = rank is None and not hung_up and self._is_strange(address)
        if strange:
            self._refusals.note_refusal(address, _STRANGE)

    def _is_strange(self, address: str) -> bool:
        """Takes one connection off the account of those that were asked about, as it has ended or is registered now.

        Returns whether there was none, so that one has ended that never showed a key: this one, or an earlier one.
        """
        if not self._asked[address]:
            return True
        self._asked[address] -= 1
        if not self._asked[address]:
            del self._asked[address]
        return False

    def _answer(self, request: list[bytes]) -> list[bytes]:
        """Makes the reply to one ZAP request (RFC 27). Its user id, the rank, becomes a property of each message."""
        version, number, domain, raw_address, _, mechanism, *credentials = request
        address, rank = raw_address.decode("ascii", "replace"), None
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
        with self._lock:
            self._asked[address] += 1
        if allowed:
            with self._lock:
                self._let_in += 1  # before libzmq hears it
            return [version, number, b"200", b"OK", b"" if rank is None else b"%d" % rank, b""]
        self._refusals.note_refusal(address, reason.decode() + ("" if rank is None else f" (node {rank}'s)"))
        return [version, number, b"400", reason, b"", b""]
