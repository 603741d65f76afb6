"""The peer of a tcp channel: one connection at a time, used in both directions.

    users' threads             sender thread                       reader thread (or one that waits for a receive)
    send: small and idle   ->  (nothing: written at once, without blocking)
    send: otherwise        ->  queue -> write, end ticket
    receive -> _receives                                           frame -> claim -> fill the tensor, end ticket
    first use              ->  call the peer (it may be faster)
                               a mismatch's nack <- queue  <-----  refuse

The side that uses the pair first calls the other. If both do at once, the call of the lower rank is used. A receive
calls too, so that a thread that waits for it notices the peer's death.

A connection that ends while neither end has said ``BYE`` was broken by something between the two, or the peer has died.
Both call each other then, and go on with what had not arrived (``kept``): nothing is lost, and nothing comes twice. On
one host a call that is refused says that the peer has died; between hosts a firewall may have refused it, and calls go
on until the peer's host would be given up, or until somebody else tells of its loss. A new connection begins only when
no thread uses the old one any more: until then what has arrived is not known.

``lock`` is held for short, non-blocking steps only. It is re-entrant, since the collector may run a finalizer that
aborts the channel inside of such a step.

Invariant: after ``failure`` was set, ``_receives`` and the sender's queue are empty and stay so, and the socket is shut
down; a transfer whose memory a thread is using at that moment is failed by that thread, once it has let go of it.
"""

from __future__ import annotations

import math
import os
import select
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum

import torch

from ...host.silence import Silence
from ...host.tcp_info import Unanswered
from ...protocol.errors import BrokenError, BusyError, ChannelError, ClosedError, ProtocolError
from ...protocol.transfer_ids import sequence_of, spoken
from ..base import PeerInfo, Protection
from ..carrier import Carrier, Say
from ..cipher import no_cipher
from ..payload import byte_view, describe, dtype_id, is_plain, plain
from ..ticket import Ticket, failed
from .dial import DeniedError, dial, shut_down, tune_after, unacknowledged
from .frames import CARRIED, DATA, EAGER, POISON, RECEIPT, WORD, Frame
from .handshake import CROSSED, TAKEN, UNFIT, WELCOME, DirectionKeys, Secrets, Standing
from .kept import Out, TcpConnection
from .reader import PeerReader, Receive, ReceiveTicket
from .sender import FrameSender
from .shield import ENCRYPT, agreed, shield, unprotected, wishes

#: The peer is told how much has arrived after so many frames or bytes, if nothing that is sent has told it by then.
_TELL, _TELL_BYTES = 32, 256 << 10
#: Seconds between two calls for a connection in place of one that has broken; the other end calls, too.
_AGAIN = 0.2
#: Seconds after which a peer is called again that said that its own call was under way.
_CROSSED = 1.0

#: Makes an uninitialised CPU tensor of a shape and dtype.
Empty = Callable[[tuple[int, ...], torch.dtype], torch.Tensor]


@dataclass(frozen=True)
class Limits:
    """The time limits of a connection, in seconds."""

    handshake: float = 2.0  #: for a stranger to prove itself
    connect: float = 9.0  #: to reach a peer's host at first use; its error is promised within 10 s
    greet: float = 60.0  #: for a peer whose kernel has answered to do so itself, from its last answer on
    announce: float = (
        1800.0  #: for which a transfer that arrived waits for its irecv: a peer may compute for long before
    )
    flush: float = 2.0  #: for which close waits for sends under way
    #: without an answer of the peer's kernel after which its host is gone; a node is lost before
    silent: float = Silence().data


class _State(Enum):
    NEW = "not connected"
    CALLING = "connecting"  #: the peer has not been reached, and can't know of it: its own call may come first
    GREETING = "agreeing on a connection"
    UP = "connected"


class TcpPeer:
    """One peer, and the connection to it. ``me`` is this side's rank, ``info`` the peer's address and key.

    ``protection`` is what payloads get. ``empty`` makes the memory of a receive if nothing else does.
    """

    def __init__(
        self,
        me: int,
        job: str,
        info: PeerInfo,
        limits: Limits,
        protection: Protection,
        empty: Empty,
        carrier: Callable[[Say], Carrier] | None = None,
    ) -> None:
        self.me, self.rank, self.info = me, info.rank, info
        self._job, self._limits, self._protection = job, limits, protection
        self.empty = empty
        self.carrier = None if carrier is None else carrier(self._send_word)
        self.lock = threading.RLock()
        self._changed = threading.Condition(self.lock)  #: notified when the state or failure changes
        self._posted = threading.Condition(self.lock)  #: notified when a receive was added, or of a failure
        self._state = _State.NEW
        self.failure: tuple[type[ChannelError], str] | None = None
        self._receives: dict[int, Receive] = {}
        self._claimed: int | None = None  #: the transfer whose tensor is being filled
        self._unanswered = Unanswered()
        self._sender = FrameSender(self)
        self.reader: PeerReader | None = None  #: None while there is no connection
        self._connection: TcpConnection | None = None
        self._broken: TcpConnection | None = None  #: the one before, while threads use it
        self._calling: socket.socket | None = None
        self._standing = Standing(os.urandom(8), 0, 0)  #: that of the last connection
        self._instance = b""  #: the peer's, once it is known
        self.received = 0  #: the number of frames that were dealt with
        self._told_bytes = 0  #: the bytes of those since the peer was told
        self._progress = 0.0  #: when something arrived, or was told to have arrived, before the connection broke
        self._why = ""  #: why the last connection has broken
        self._shared = False  #: the peer is known to have had that one
        self._apart = False  #: it led to another host
        self._expired = ""  #: why the peer sends nothing any more, beyond what has arrived
        self._lingering = False  #: between ``close`` and ``linger``
        self._unstarted = ""  #: why a thread of this peer's could not be started
        self._users = 0  #: threads of this peer's; the last one closes the carrier
        self.threads: list[threading.Thread] = []

    def __repr__(self) -> str:
        state = self.failure[1] if self.failure else self._state.value
        return f"<TcpPeer {self.rank} {state} sends={len(self._sender)} receives={len(self._receives)}>"

    @property
    def _sock(self) -> socket.socket | None:
        return None if self._connection is None else self._connection.sock

    # ***** called by users of the channel *****

    def send(self, tensor: torch.Tensor, transfer: int) -> Ticket:
        """Writes or queues the tensor."""
        frame = Frame(DATA, transfer, dtype_id(tensor), tensor.numel(), tensor.numel() * tensor.element_size())
        if frame.nbytes <= EAGER:
            tensor = plain(tensor)
        elif tensor.device.type != "cpu":  # a device's copy belongs on the caller's stream
            tensor = plain(tensor) if self.carrier is None else self.carrier.prepare(tensor)
        out = Out(frame, tensor, Ticket())
        with self.lock:
            if self.failure is not None:
                return failed(*self.failure)
            self._sender.put_with_lock(out)
        self._fail_if_unstarted()
        return out.ticket

    def poison(self, transfer: int, rank: int, seq: int) -> None:
        """Sends, in the order of sends, that there is no tensor because command ``seq`` of node ``rank`` failed."""
        self._put(Out(Frame(POISON, transfer, 0, seq, rank + 1), None, Ticket()))

    def receive(self, tensor: torch.Tensor, transfer: int) -> ReceiveTicket:
        """Announces a transfer. Raises BusyError."""
        view = byte_view(tensor) if is_plain(tensor) else None
        return self._announce(Receive(tensor, dtype_id(tensor), tensor.numel(), view, ReceiveTicket(self)), transfer)

    def arrive(self, shape: tuple[int, ...], dtype: torch.dtype, transfer: int) -> ReceiveTicket:
        """Announces a transfer into memory that is chosen when its data arrives. Raises BusyError."""
        like = torch.empty(0, dtype=dtype)
        entry = Receive(None, dtype_id(like), math.prod(shape), None, ReceiveTicket(self), (shape, dtype))
        return self._announce(entry, transfer)

    def _announce(self, entry: Receive, transfer: int) -> ReceiveTicket:
        with self.lock:
            if self.failure is not None:
                entry.ticket.fail(*self.failure)
                return entry.ticket
            if transfer in self._receives or transfer == self._claimed:
                raise BusyError(
                    f"transfer {spoken(transfer)} from rank {self.rank} to rank {self.me} is received already"
                )
            self._receives[transfer] = entry
            self._posted.notify()
            if self._state is _State.NEW:
                self._sender.want_thread_with_lock()
        self._fail_if_unstarted()
        return entry.ticket

    def take_back(self, transfer: int) -> bool:
        """Has a receive whose data has not begun to arrive go on without its tensor; returns whether it does."""
        with self.lock:
            entry = self._receives.get(transfer)
            if entry is None or entry.tensor is None:
                return False
            entry.form = tuple(entry.tensor.shape), entry.tensor.dtype
            entry.tensor = entry.view = None
            return True

    def flush(self, deadline: float) -> None:
        """Waits until all sends have been written, at most until ``deadline`` (time.monotonic)."""
        self._sender.flush(deadline)

    def close(self, why: str) -> None:
        """Ends as ``fail(ClosedError, why)``, but written bytes may still reach the peer: call ``linger`` next."""
        with self.lock:
            if self.failure is None and self._connection is not None:
                self._users += 1
                self._connection.users += 1
                self._lingering = True
            victims = self._fail_with_lock(ClosedError, why)
        self._fail_tickets(victims, ClosedError, why)

    def linger(self, deadline: float) -> None:
        """Waits until the peer's kernel has all bytes.

        This side's kernel would drop them if it had to refuse more from the peer.
        """
        with self.lock:
            lingers, self._lingering = self._lingering, False
        connection = self._connection
        if lingers and connection is not None:
            with suppress(OSError):  # it was reset
                while unacknowledged(connection.sock) and time.monotonic() < deadline:
                    time.sleep(0.0005)
            shut_down(connection.sock)
            self.leave(connection)

    def expire(self, why: str) -> None:
        """Ends the waiting for a peer that sends nothing any more. What it has sent can still be received."""
        with self.lock:
            if self.failure is not None or self._expired:
                return
            self._expired = why
            shut_down(self._sock, socket.SHUT_RD)  # the reader goes on with the bytes that are here, and finds the end
            self._posted.notify_all()
            connected = self._sock is not None
        if not connected:
            self.fail(BrokenError, why)

    def look(self) -> None:
        """Fails the peer if its host, or the network to it, is gone; the connection does not report its end then."""
        sock = self._sock
        with suppress(OSError):  # closed meanwhile
            if sock is not None and self.failure is None and self._unanswered.lasts(sock, self._limits.silent):
                self.fail(BrokenError, self.lost(TimeoutError("its host has not answered for some time")))

    def fail(self, kind: type[ChannelError], why: str) -> None:
        """Ends all transfers with ``kind(why)``, now and later. Never blocks; only the first failure counts."""
        with self.lock:
            victims = self._fail_with_lock(kind, why)
        self._fail_tickets(victims, kind, why)

    def _fail_with_lock(self, kind: type[ChannelError], why: str) -> list[Ticket]:
        """Returns the tickets to fail once the lock is released: their callbacks may take others."""
        if self.failure is not None:
            return []
        self.failure = kind, why
        self._sender.part_with_lock()
        victims = [*self._sender.give_up_with_lock(), *(entry.ticket for entry in self._receives.values())]
        self._receives.clear()
        shut_down(self._sock, socket.SHUT_WR if self._lingering else socket.SHUT_RDWR)
        shut_down(self._calling)
        self._changed.notify_all()
        self._posted.notify_all()
        if self.reader is not None:
            self.reader.rouse()
        return victims

    def _fail_tickets(self, victims: list[Ticket], kind: type[ChannelError], why: str) -> None:
        """Does the part of a failure that needs the lock to be released: fails the tickets and the carrier."""
        if self.carrier is not None and self.failure is not None:
            self.carrier.fail(self.failure[1])  # first: then nobody reads any more what was lent, and it may change
        for ticket in victims:
            ticket.fail(kind, why)

    def hung_up(self) -> bool:
        """Returns whether the peer has ended the connection, even if not all was read."""
        poll = select.poll()
        with self.lock:
            if self._broken is not None:
                return True
            if self._sock is None or self._sock.fileno() < 0:
                return False
            poll.register(self._sock, select.POLLRDHUP)
            return bool(poll.poll(0))

    def lose(self, connection: TcpConnection, error: Exception, wanted: bool = True) -> None:
        """Handles the end of a connection: it is made anew, unless the peer does not want that, or is gone.

        Called by threads that use it; once is enough.
        """
        why = self.lost(error)
        with self.lock:
            if self.failure is not None or connection is not self._connection:
                return
            if time.monotonic() - connection.since > self._limits.silent:  # it was a good one
                self._progress = 0.0
            # ETIMEDOUT: the peer's host has not answered for as long as anybody waits
            over = bool(self._expired) or not wanted or isinstance(error, TimeoutError)
            if not over and self._sender.has_unacknowledged and self._left_with_lock() <= 0:  # each one breaks too soon
                over, why = True, self._in_vain(why)
            victims = self._fail_with_lock(BrokenError, why) if over else []
            if not over:
                self._why, self._apart = why, not connection.local
                self._break_with_lock(connection)
        if over:
            self._fail_tickets(victims, BrokenError, why)
        self._fail_if_unstarted()

    def _left_with_lock(self) -> float:
        """Returns the seconds that are left for connections that bring nothing."""
        if not self._progress:  # also where the reader was dealing with a frame when the connection broke
            self._progress = time.monotonic()
        return self._progress + self._limits.silent - time.monotonic()

    def _in_vain(self, why: str) -> str:
        return f"{why}; no other one has come about, or has brought anything, within {self._limits.silent:g} s"

    def _break_with_lock(self, connection: TcpConnection) -> None:
        self._shared = self._is_shared_with_lock(connection)
        self._connection, self._broken, self._state = None, connection, _State.NEW
        if not self._progress or not self._sender.has_unacknowledged:
            self._progress = time.monotonic()
        shut_down(connection.sock)  # its threads come out; what has arrived can be read still
        self._sender.detach_with_lock()
        if self.reader is not None:
            self.reader.rouse()
        self.reader = None
        self._free_with_lock(connection)
        self._posted.notify_all()
        self._sender.want_thread_with_lock()

    def _is_shared_with_lock(self, connection: TcpConnection) -> bool:
        """Returns whether the peer is known to have the current connection, too."""
        return connection.dialled or (self.reader is not None and self.reader.has_read)

    def lost(self, error: Exception) -> str:
        """Returns words for a connection that ended by ``error``."""
        if self._expired:
            return self._expired
        return f"rank {self.rank} closed its end or died; its connection with rank {self.me} is gone: {error}"

    # ***** the connection *****

    def start_with_lock(self, target: Callable[[], None], what: str) -> threading.Thread | None:
        """Starts a thread that uses the socket and calls ``leave`` at its end. None: the system has none for it, and
        the peer is to fail as soon as the lock is released (``_fail_if_unstarted``)."""
        thread = threading.Thread(target=target, name=f"disttensor-tcp-{self.me}-{self.rank}-{what}", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            self._unstarted = f"rank {self.me} has no thread for its connection with rank {self.rank}: {error}"
            return None
        self._users += 1
        self.threads.append(thread)
        return thread

    def _fail_if_unstarted(self) -> None:
        """Fails the peer if a thread could not be started. For who has released the lock with which that was tried."""
        if not self._unstarted:
            return
        self.fail(BrokenError, self._unstarted)
        with self.lock:
            if self._connection is not None:
                self._free_with_lock(self._connection)

    def leave(self, connection: TcpConnection | None = None) -> None:
        """Ends a thread, and its use of a connection."""
        with self.lock:
            self._users -= 1
            if connection is not None:
                connection.users -= 1
                self._free_with_lock(connection)
            if self._users == 0 and self.failure is not None and self.carrier is not None:
                self.carrier.close()

    def release(self, connection: TcpConnection) -> None:
        """Ends a use of a connection."""
        with self.lock:
            connection.users -= 1
            self._free_with_lock(connection)

    def _free_with_lock(self, connection: TcpConnection) -> None:
        """Closes a connection that has ended once nobody uses it: the descriptor's number may be used anew at once."""
        if connection.users == 0 and (self.failure is not None or connection is self._broken):
            connection.sock.close()
            if connection is self._broken:
                self._broken = None
                self._changed.notify_all()

    def offer(self, sock: socket.socket, secrets: Secrets) -> bool:
        """Takes or refuses a connection on which the peer has proved itself. False: it is to be offered again.

        Called by the listener.
        """
        victims: list[Ticket] = []
        over: list[Ticket] = []
        why = ""
        with self.lock:
            verdict = self._judge_with_lock(secrets.standing)
            if verdict == WELCOME and self._broken is not None:
                return False
            if verdict == WELCOME:
                verdict, why = self._agree(sock, secrets)
            if verdict == UNFIT:
                victims = self._fail_with_lock(BrokenError, why)
            secrets.acceptors = Standing(self._standing.instance, secrets.standing.connection, self.received)
            try:
                sock.send(secrets.verdict(verdict))
            except OSError:
                verdict = TAKEN
            if verdict == WELCOME:
                over = self._set_up_with_lock(
                    sock, secrets.mode, secrets.of_acceptor, secrets.of_initiator, secrets.standing, dialled=False
                )
            else:
                sock.close()
        if why:
            self._fail_tickets(victims, BrokenError, why)
        for ticket in over:
            ticket.finish()
        self._fail_if_unstarted()
        return True

    def _judge_with_lock(self, theirs: Standing) -> int:
        """Returns the verdict on a call of the peer. Breaks off a connection that the peer has no more."""
        if self.failure is not None or (self._instance and self._instance != theirs.instance):
            return TAKEN
        mine = self._standing.connection
        if theirs.connection < mine or self._sender.knew_with_lock(theirs.received):
            return CROSSED  # it is from before another call, which was faster
        if not self._sender.knows_with_lock(theirs.received):
            return TAKEN
        shared = self._shared if self._connection is None else self._is_shared_with_lock(self._connection)
        if theirs.connection == mine and shared:
            return CROSSED  # it is from before this one, which the peer has, too, or had
        if self._connection is not None:
            self._why = self.lost(EOFError("the other end has lost it"))
            self._break_with_lock(self._connection)
        elif self._state is _State.GREETING and self.me < self.rank:
            return CROSSED
        return WELCOME

    def _agree(self, sock: socket.socket, secrets: Secrets) -> tuple[int, str]:
        """Decides how payloads are protected, in ``secrets.mode``; returns the verdict, and the reason for UNFIT."""
        try:
            mine, lacks = wishes(self._protection, sock)
        except OSError:  # the peer has hung up
            return TAKEN, ""
        mode = agreed(mine, secrets.wishes)
        if mode and mode & ENCRYPT and (lacks := no_cipher(load=True)):
            mode = None
        secrets.mode = mode or 0
        return (UNFIT, str(unprotected(self.me, self.rank, lacks))) if mode is None else (WELCOME, "")

    def has_broken_with_lock(self) -> bool:
        """Returns whether a connection is to be made in place of one that has broken."""
        return self._state is _State.NEW and self._standing.connection > 0 and self.failure is None

    def call_if_new(self) -> bool:
        """Calls the peer unless it has called us. Fails the peer when neither reaches the other. For the sender thread.

        Returns True.
        """
        if self._state is not _State.UP:
            if self._standing.connection:
                self._call_again()
            else:
                self._call_first()
        return True

    def _call_again(self) -> None:
        """Makes a connection in place of one that has broken, if nobody has. Fails the peer if that is in vain."""
        over: Callable[[], bool] = lambda: self.failure is not None or self._state is _State.UP  # noqa: E731
        with self.lock:
            wanted = self.has_broken_with_lock()
            if self._progress < time.monotonic() - _AGAIN:  # the one before has brought nothing
                self._changed.wait_for(over, _AGAIN)
        why, error = "", ""
        while wanted and not why:
            with self.lock:
                self._changed.wait_for(lambda: over() or self._broken is None, 1.0)
                left = self._left_with_lock()
                if over():
                    return
                if left <= 0:
                    why = f"{self._in_vain(self._why)}{error}"
                    break
                if self._broken is not None:
                    continue
                self._state = _State.CALLING
            try:
                wanted = not self._call(min(self._limits.connect, left), min(self._limits.greet, left))
            except BrokenError as failure:
                error = f": {failure}"
                refused = isinstance(failure.__cause__, ConnectionRefusedError) and not self._apart
                if refused or isinstance(failure, DeniedError):
                    why = self._why
            with self.lock:
                if self._state in (_State.CALLING, _State.GREETING):
                    self._state = _State.NEW
                if not why:
                    self._changed.wait_for(over, _AGAIN)
        if why:
            self._fail_unless_up(why)

    def _call(self, limit: float, patience: float) -> bool:
        """Calls the peer once; returns whether there is a connection now. Raises BrokenError."""
        with self.lock:
            standing = Standing(self._standing.instance, self._standing.connection + 1, self.received)
        sock, secrets = dial(
            self.info, self._job, self.me, limit, patience, self._watch, self._reached, self._protection, standing
        )
        over: list[Ticket] = []
        if sock is None:
            return False
        with self.lock:
            theirs = secrets.acceptors
            up = self.failure is None and self._state is _State.GREETING
            other = self._instance not in (b"", theirs.instance) or not self._sender.knows_with_lock(theirs.received)
            if up and not other:
                over = self._set_up_with_lock(
                    sock, secrets.mode, secrets.of_initiator, secrets.of_acceptor, theirs, dialled=True
                )
            else:
                sock.close()
        if up and other:
            raise DeniedError(f"rank {self.rank} at {self.info.address} does not know what rank {self.me} has sent it")
        for ticket in over:
            ticket.finish()
        self._fail_if_unstarted()
        return up

    def _call_first(self) -> None:
        """Calls the peer unless it has called us. Fails the peer when neither reaches the other. For the sender thread.

        One direction is enough: a network may let connections in on one side only. A connection that the peer has made
        meanwhile may have broken again by the time that this thread sees it: it is made anew then, as any other.
        """
        began = time.monotonic()
        limit = 2 * (self._limits.connect + self._limits.greet)  # the peer's own is over before, and it says why
        with self.lock:
            if self._state is not _State.NEW or self._standing.connection:  # it has come, and may have broken again
                return
            self._state = _State.CALLING
        while time.monotonic() < began + limit:
            try:
                called = self._call(self._limits.connect, self._limits.greet)
            except BrokenError as error:
                if not isinstance(error, DeniedError):
                    with self.lock:  # the peer may call
                        over = lambda: self.failure is not None or self._state is not _State.CALLING  # noqa: E731
                        self._changed.wait_for(over, began + self._limits.connect - time.monotonic())
                self._fail_unless_begun(str(error))
                return
            if called:
                return
            with self.lock:  # the peer calls; it is asked again, as it may have failed there and would not say so
                if self._changed.wait_for(lambda: self.failure or self._standing.connection, _CROSSED):
                    return
        why = f"rank {self.rank} at {self.info.address} said that it would call rank {self.me}, but did not"
        self._fail_unless_begun(f"{why} within {limit:g} s")

    def _fail_unless_begun(self, why: str) -> None:
        """Fails the peer if there never was a connection with it."""
        with self.lock:
            victims = [] if self._standing.connection else self._fail_with_lock(BrokenError, why)
        self._fail_tickets(victims, BrokenError, why)

    def _fail_unless_up(self, why: str) -> None:
        with self.lock:
            victims = [] if self._state is _State.UP else self._fail_with_lock(BrokenError, why)
        self._fail_tickets(victims, BrokenError, why)

    def _watch(self, sock: socket.socket | None) -> bool:
        with self.lock:
            self._calling = sock
            return self.failure is None and self._state in (_State.CALLING, _State.GREETING)

    def _reached(self) -> bool:
        """Notes that the peer may hear of the call from now on; returns whether it is still wanted."""
        with self.lock:
            if self.failure is None and self._state is _State.CALLING:
                self._state = _State.GREETING
            return self.failure is None and self._state is _State.GREETING

    def _set_up_with_lock(
        self,
        sock: socket.socket,
        mode: int,
        sends: DirectionKeys,
        receives: DirectionKeys,
        theirs: Standing,
        dialled: bool,
    ) -> list[Ticket]:
        """Begins a connection; returns tickets to end well once the lock is released."""
        connection = TcpConnection(sock, dialled)
        with suppress(OSError):  # it was reset already, as its reader will find out
            tune_after(sock, self._limits.silent)
        self._unanswered = Unanswered()
        self._connection, self._state, self._instance = connection, _State.UP, theirs.instance
        self._standing = self._standing._replace(connection=theirs.connection)
        shut_down(self._calling)  # the peer was faster
        self.reader = PeerReader(self, connection, receives.frames, mode, shield(mode, receives.payloads))
        over = self._sender.attach_with_lock(
            connection, sends.frames, mode, shield(mode, sends.payloads), theirs.received
        )
        if over:
            self._progress = 0.0
        self.threads = [thread for thread in self.threads if thread.is_alive()]
        if self.start_with_lock(self.reader.run, "read") is not None:
            connection.users += 1
        self._changed.notify_all()
        return over

    def disown(self) -> None:
        """Closes a forked child's descriptors without a word to the peer. Takes no lock: its holder is gone."""
        for connection in (self._connection, self._broken):
            if connection is not None:
                connection.sock.close()
        if self._calling is not None:
            self._calling.close()

    # ***** called by the reader *****

    def claim(self, transfer: int, patient: bool, connection: TcpConnection) -> Receive | None:
        """Takes the receive announced for ``transfer``.

        Waits for it if ``patient``, else returns None if it isn't there yet. Raises BrokenError after a failure, or
        when it wasn't announced within ``limits.announce``; ProtocolError if another one is due in its place; EOFError
        where it would wait and the connection has broken: the peer sends it again.
        """
        limit = self._limits.announce
        deadline = time.monotonic() + limit
        with self.lock:
            while transfer not in self._receives:
                self._check_due_with_lock(transfer)
                left = deadline - time.monotonic()
                if self.failure is not None:
                    raise BrokenError(self.failure[1])
                if not patient:
                    return None
                if connection is not self._connection:
                    raise EOFError("the connection has ended")
                if self._expired and self._receives:  # it is none of those that are waited for: nobody can go on
                    raise BrokenError(self._expired)
                if left <= 0:
                    raise BrokenError(
                        f"rank {self.rank} sent transfer {spoken(transfer)}, which rank {self.me} was not told to "
                        f"receive within {limit:g} s"
                    )
                self._posted.wait(left)
            if next(iter(self._receives)) != transfer:
                self._check_due_with_lock(transfer)
            self._claimed = transfer
            return self._receives.pop(transfer)

    #: Invariant 5: every pair of peers sees transfers in the same order at both ends.
    def _check_due_with_lock(self, transfer: int) -> None:
        """Raises ProtocolError if another transfer of the same sequence has to come first."""
        sequence = sequence_of(transfer)
        if sequence:
            due = next((other for other in self._receives if sequence_of(other) == sequence), transfer)
            if due != transfer:
                raise ProtocolError(f"rank {self.rank} sent transfer {spoken(transfer)} where {spoken(due)} was due")

    def unclaim(self) -> None:
        """Notes that the claimed receive's memory is no longer used."""
        self._claimed = None

    def return_claim(self, transfer: int, entry: Receive) -> None:
        """Has the claimed receive wait again: its connection has broken before all of the payload had come."""
        if entry.tensor is None:
            entry.view = entry.ticket.tensor = None
        with self.lock:
            failure = self.failure
            if failure is None:
                self._receives = {transfer: entry, **self._receives}
        if failure is not None:
            entry.ticket.fail(*failure)

    def count(self, frame: Frame, awaited: bool = False) -> None:
        """Notes that a frame was dealt with. Tells the peer now and then, so that it need not keep what it has sent; at
        once where it waits for that."""
        self.received += 1
        self._progress = 0.0
        self._told_bytes += frame.nbytes if frame.kind == DATA else 0
        untold = self.received - self._sender.told
        if untold >= _TELL or (self._told_bytes >= _TELL_BYTES and untold) or awaited:
            self._told_bytes = 0
            self._put(Out(Frame(RECEIPT, 0, 0, 0, 0), None, Ticket()))

    def acknowledge(self, receipt: int) -> None:
        """Notes the number of frames that the peer has dealt with. Raises ProtocolError."""
        if self._sender.acknowledge(receipt):
            self._progress = 0.0

    def refuse(self, frame: Frame) -> None:
        """Sends a nack, without ever waiting for room to write."""
        self._put(Out(frame, None, Ticket()))

    def _send_word(self, word: bytes) -> None:
        """Sends the peer's carrier a word of this side's carrier."""
        self._put(Out(Frame(WORD, 0, 0, 0, len(word)), None, Ticket(), word))

    def _put(self, out: Out) -> None:
        with self.lock:
            if self.failure is None:
                self._sender.put_with_lock(out)
        self._fail_if_unstarted()

    def refused(self, frame: Frame) -> None:
        """Handles the peer's nack: fails the send if it is still under way."""
        out = self._sender.unread(frame.transfer)
        if out is not None and out.frame.kind in (DATA, CARRIED):
            out.ticket.fail(
                BrokenError,
                f"transfer {spoken(frame.transfer)}: rank {self.me} sends "
                f"{describe(out.frame.dtype, out.frame.numel)} but rank {self.rank} receives "
                f"{describe(frame.dtype, frame.numel)}",
            )
