"""The listening end: one thread holds all handshakes, so that strangers cost neither threads nor much memory."""

from __future__ import annotations

import ipaddress
import logging
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from ...host.descriptors import is_shortage
from ...host.interfaces import is_loopback
from ...host.refusals import Refusals, Shortages
from .dial import MOST_ADDRESSES, join_address, tune_before
from .handshake import HELLO, NONCE, PeerHello

_log = logging.getLogger(__name__)

#: The most handshakes under way, beside one for each peer that may come. One more pushes the oldest out: a peer needs
#: milliseconds, a silent stranger the limit.
_PENDING = 64
#: The most calls of ranks that are not known yet: a whole job may call a node that is busy.
_UNKNOWN = 1024
#: Connections that wait for the listener's thread, which comes late on a busy host: peers come by the hundred.
_BACKLOG = 1024
#: Why a connection is refused that has not said hello.
_NOISE = "not the handshake of a peer of this job, or none in time"
#: The interval at which a hello from a rank that isn't known yet is looked at again, seconds.
_RETRY = 0.02
#: The interval at which peers are checked, seconds.
_ROUND = 2.0
#: The pause after a connection that could not be accepted, and how long descriptors may be missing before those that
#: call are hung up on, seconds.
_PAUSE, _SHORT = 0.1, 1.0


class _Pending:
    """A connection that has proved nothing yet."""

    def __init__(self, sock: socket.socket, address: str, deadline: float) -> None:
        self.sock, self.address, self.deadline = sock, address, deadline
        self.nonce = os.urandom(NONCE)
        self.said = b""


class Listener:
    """Accepts on each of ``hosts`` at a random port and hands each connection that said hello to ``admit``; of more
    hosts than a peer would try, on the first ones.

    ``admit(sock, hello, nonce)`` returns "" when it took the socket, the reason when it refuses it, None when the rank
    isn't known (yet): it is hung up on after the time limit, and calls again. ``look`` is called now and then if this
    is not loopback, where a peer can vanish without a word. Both are called in the listener's thread and must not
    block.

    Whom it refuses is told to the log, but for one who hangs up without a word, as a peer does that was called itself.
    """

    def __init__(
        self,
        hosts: Sequence[str],
        limit: float,
        admit: Callable[[socket.socket, PeerHello, bytes], str | None],
        name: str,
        look: Callable[[], None],
        peers: Callable[[], int] = lambda: 0,
    ) -> None:
        """``peers``: how many may come."""
        self._limit, self._admit, self._look, self._peers = limit, admit, look, peers
        self._pending: dict[_Pending, None] = {}  #: oldest first
        #: the hellos of those of them whose rank is not known yet
        self._unknown: dict[_Pending, PeerHello] = {}
        self._refusals = Refusals(_log)
        self._shortages, self._name = Shortages(_log), name
        self._short_since: float | None = None  #: the first accept that lacked a descriptor, since one succeeded
        self._stopping = threading.Event()
        self._socks: list[socket.socket] = []
        addresses = []
        try:
            for host in hosts[:MOST_ADDRESSES]:
                sock, ip = _listen(host)
                self._socks.append(sock)
                addresses.append(join_address(ip, sock.getsockname()[1]))
        except (OSError, ValueError):
            self._close()
            raise
        self.address = ",".join(addresses)
        self._round = None if all(is_loopback(sock.getsockname()[0]) for sock in self._socks) else _ROUND
        self._poll = selectors.PollSelector()  # poll, not epoll: a forked child shares no kernel object with this one
        for sock in self._socks:
            self._poll.register(sock, selectors.EVENT_READ)
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.thread.start()

    def stop(self) -> None:
        """Ends the thread soon; it closes the sockets. Never blocks."""
        self._stopping.set()
        for sock in self._socks:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)  # wakes the poll

    def disown(self) -> None:
        """Closes a forked child's copies of the descriptors, and leaves the connections to the parent."""
        for pending in list(self._pending):
            pending.sock.close()
        self._close()

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                ready = self._poll.select(self._next_timeout())
                now = (
                    time.monotonic()
                )  # what was not said by now is late; a round itself may take seconds on a busy host
                for key, _ in ready:  # first, as each one that is accepted may push out one of them
                    if key.data is not None:
                        self._hear(key.data)
                for key, _ in ready:
                    if key.data is None:
                        self._accept(key.fileobj)  # type: ignore[arg-type]
                self._look_again(now)
                if self._round is not None:
                    self._look()
        finally:
            for pending in list(self._pending):
                self._drop_pending(pending)
            self._poll.close()
            self._close()

    def _next_timeout(self) -> float | None:
        if not self._pending:
            return self._round
        until = max(0.0, self._oldest.deadline - time.monotonic())
        return min(until, _RETRY) if self._unknown else until

    @property
    def _oldest(self) -> _Pending:
        return next(iter(self._pending))

    def _close(self) -> None:
        for sock in self._socks:
            sock.close()

    def _accept(self, listening: socket.socket) -> None:
        try:
            sock, where = listening.accept()
        except OSError as error:
            if isinstance(error, (BlockingIOError, ConnectionError, InterruptedError)) or self._stopping.is_set():
                return
            # Out of descriptors or memory: give back the oldest handshake's, or wait a moment instead of spinning.
            self._shortages.note_shortage(self._name, error)
            if self._pending:
                self._drop_pending(self._oldest, "no descriptors or memory for one more")
                return
            if is_shortage(error) and self._lasts():
                self._hang_up(listening)
            self._stopping.wait(_PAUSE)
            return
        self._short_since = None
        pending = _Pending(sock, where[0], time.monotonic() + self._limit)
        try:
            sock.setblocking(False)
            sock.send(pending.nonce)
        except OSError:
            sock.close()
            return
        if len(self._pending) - len(self._unknown) >= (most := _PENDING + self._peers()):
            silent = next(one for one in self._pending if one not in self._unknown)
            self._drop_pending(silent, f"too many at once that prove nothing ({most})")
        self._pending[pending] = None
        self._poll.register(sock, selectors.EVENT_READ, pending)

    def _lasts(self) -> bool:
        """Returns whether descriptors have been missing for long enough that callers are not to wait for one."""
        now = time.monotonic()
        if self._short_since is None:
            self._short_since = now
        return now - self._short_since >= _SHORT

    def _hang_up(self, listening: socket.socket) -> None:
        """Hangs up on those that wait to be accepted, and listens again: their kernel has reached this one's, and they
        would take this process for a busy one.

        A descriptor that is kept to accept one with is of no use where the limit was lowered below its number.
        """
        where = listening.getsockname()
        try:
            listening.shutdown(socket.SHUT_RDWR)
            if self._stopping.is_set():  # ``stop`` shuts down only once, which this must not undo
                return
            with suppress(OSError):  # the kernel kept the port
                listening.bind(where)
            listening.listen(_BACKLOG)
        except OSError as error:
            _log.warning("%s can't listen at %s any more: %s", self._name, where[:2], error)
            self._poll.unregister(listening)

    def _hear(self, pending: _Pending) -> None:
        if pending not in self._pending:  # dropped since the poll
            return
        try:
            piece = pending.sock.recv(HELLO - len(pending.said))
        except BlockingIOError:
            return
        except OSError:
            piece = b""
        pending.said += piece
        if not piece:
            self._drop_pending(pending, _NOISE if pending.said else "")
        elif len(pending.said) == HELLO:
            hello = PeerHello.parse(pending.said)
            if hello is None:
                self._drop_pending(pending, _NOISE)
            else:
                # Until the hello's fate is known nothing more is read, and a hang-up must not keep the poll awake.
                self._poll.unregister(pending.sock)
                self._unknown[pending] = hello
                if len(self._unknown) > _UNKNOWN:
                    self._drop_pending(
                        next(iter(self._unknown)), f"too many at once of ranks that are not known ({_UNKNOWN})"
                    )

    def _look_again(self, now: float) -> None:
        for pending, hello in list(self._unknown.items()):
            verdict = self._admit(pending.sock, hello, pending.nonce)
            if verdict == "":
                self._unregister(pending)
            elif verdict is not None:
                self._drop_pending(pending, verdict)
        while self._pending and (oldest := self._oldest).deadline <= now:
            self._drop_pending(oldest, "" if oldest in self._unknown else _NOISE)  # those call again

    def _drop_pending(self, pending: _Pending, why: str = "") -> None:
        if why:
            self._refusals.note_refusal(pending.address, why)
        self._unregister(pending)
        pending.sock.close()

    def _unregister(self, pending: _Pending) -> None:
        del self._pending[pending]
        if self._unknown.pop(pending, None) is None:
            self._poll.unregister(pending.sock)


def _listen(host: str) -> tuple[socket.socket, str]:
    """Returns a listening socket on the host, and its address. Raises ValueError, OSError."""
    if not host:
        raise ValueError("the tcp channel needs the address of an interface to listen on, not an empty one")
    family, kind, proto, _, where = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    ip = str(where[0])
    if ipaddress.ip_address(ip.partition("%")[0]).is_unspecified:
        raise ValueError(f"the tcp channel does not listen on every interface ({host!r}); name one")
    sock = socket.socket(family, kind, proto)
    try:
        tune_before(sock, ip)
        sock.bind(where)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # after bind, which has to find a port of its own
        sock.listen(_BACKLOG)
        sock.setblocking(False)
    except OSError:
        sock.close()
        raise
    return sock, ip
