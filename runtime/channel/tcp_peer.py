"""One peer of a tcp channel: at most one connection in its life, used in both directions.

    caller                     sender thread                       reader thread
    send: small and idle   ->  (nothing: written at once, without blocking)
    send: otherwise        ->  queue -> write, finish ticket
    receive -> receives                                            frame -> claim -> fill the tensor, finish ticket
    first use              ->  dial (the listener may be faster)
                               a mismatch's nack <- queue  <-----  refuse

Whichever side uses the pair first calls the other. If both do at once, the call of the lower rank is used. A receive
calls too, so that a peer's death is noticed by whoever waits for it.

Everything below ``lock`` is guarded by it; it is held for short, non-blocking steps only. It is re-entrant, since the
collector may run a finalizer that aborts the channel inside of such a step.

Invariant: after ``failure`` was set, ``receives`` and the queue are empty and stay so, and the socket is shut down; a
transfer whose memory a thread is using at that moment is failed by that thread, once it has let go of the memory.
"""

from __future__ import annotations

import fcntl
import socket
import struct
import termios
import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum

import torch

from ..errors import BrokenError, BusyError, ChannelError
from .base import PeerInfo
from .frame import DATA, Frame, Opener, Sealer
from .handshake import CROSSED, TAKEN, WELCOME, Secrets
from .payload import byte_view, describe, dtype_id, is_plain, plain
from .tcp_dial import dial, tune_after
from .tcp_reader import Reader
from .ticket import Ticket, failed

#: Up to this many bytes are written in the caller's thread when nothing is queued.
EAGER = 64 << 10


@dataclass(frozen=True)
class Limits:
    """Seconds."""

    handshake: float = 2.0  #: for a stranger to prove itself
    connect: float = 10.0  #: to reach a peer at first use
    announce: float = 60.0  #: for which a transfer that arrived waits for its irecv
    flush: float = 2.0  #: for which close waits for sends under way


class _State(Enum):
    NEW = "not connected"
    CALLING = "connecting"
    UP = "connected"


@dataclass(eq=False)
class Receive:
    """A receive that waits for its data. ``view`` is None when the tensor has to be staged."""

    tensor: torch.Tensor
    dtype: int
    numel: int
    view: memoryview | None
    ticket: Ticket


@dataclass(eq=False)
class _Out:
    """A frame to write. ``tensor`` keeps the memory alive; ``header`` is set once the frame's turn has come."""

    frame: Frame
    tensor: torch.Tensor | None
    ticket: Ticket
    header: bytes = b""  #: what is to be written before the payload
    rest: bool = False  #: the header and the start of the payload went out: ``header`` holds all that is left


class TcpPeer:
    """See above. ``me`` is our rank, ``info`` the peer's."""

    def __init__(self, me: int, job: str, info: PeerInfo, limits: Limits) -> None:
        self.me, self.job, self.info, self.limits = me, job, info, limits
        self.lock = threading.RLock()
        self._work = threading.Condition(self.lock)  #: the sender has something to do, or the state changed
        self._idle = threading.Condition(self.lock)  #: the sender has nothing to do
        self._posted = threading.Condition(self.lock)  #: the receive that the reader waits for is there
        self._state = _State.NEW
        self.failure: tuple[type[ChannelError], str] | None = None
        self._receives: dict[int, Receive] = {}
        self._reading: int | None = None  #: the transfer that the reader fills at this moment
        self._queue: deque[_Out] = deque()
        self._writing: _Out | None = None  #: the frame that the sender thread writes at this moment
        self._sock: socket.socket | None = None
        self._calling: socket.socket | None = None
        self._sealer: Sealer | None = None
        self._sender: threading.Thread | None = None
        self._users = 0  #: threads that use _sock; the last one closes it
        self.threads: list[threading.Thread] = []

    def __repr__(self) -> str:
        state = self.failure[1] if self.failure else self._state.value
        return f"<TcpPeer {self.info.rank} {state} queued={len(self._queue)} receives={len(self._receives)}>"

    # ***** called by users of the channel *****

    def send(self, tensor: torch.Tensor, transfer: int) -> Ticket:
        """Queues or writes the tensor."""
        frame = Frame(DATA, transfer, dtype_id(tensor), tensor.numel(), tensor.numel() * tensor.element_size())
        small = frame.nbytes <= EAGER
        if small or tensor.device.type != "cpu":  # a device's copy belongs on the caller's stream
            tensor = plain(tensor)
        out = _Out(frame, tensor, Ticket())
        with self.lock:
            if self.failure is not None:
                return failed(*self.failure)
            idle = self._state is _State.UP and not self._queue and self._writing is None
            if not (small and idle and self._write_now(out)):
                self._queue.append(out)
                self._want_sender()
        return out.ticket

    def receive(self, tensor: torch.Tensor, transfer: int) -> Ticket:
        """Announces a transfer. Raises BusyError."""
        view = byte_view(tensor) if is_plain(tensor) else None
        entry = Receive(tensor, dtype_id(tensor), tensor.numel(), view, Ticket())
        with self.lock:
            if transfer in self._receives or transfer == self._reading:
                raise BusyError(f"transfer {transfer} from rank {self.info.rank} to rank {self.me} is received already")
            if self.failure is not None:
                return failed(*self.failure)
            self._receives[transfer] = entry
            self._posted.notify()
            if self._state is _State.NEW:
                self._want_sender()
        return entry.ticket

    def fail(self, kind: type[ChannelError], why: str) -> None:
        """Ends all transfers with ``kind(why)``, now and later. Never blocks; only the first failure counts."""
        with self.lock:
            if self.failure is not None:
                return
            self.failure = kind, why
            victims = [entry.ticket for entry in self._receives.values()] + [out.ticket for out in self._queue]
            self._receives.clear()
            self._queue.clear()
            for sock in (self._sock, self._calling):
                _shut_down(sock)
            for condition in (self._work, self._idle, self._posted):
                condition.notify_all()
        for ticket in victims:
            ticket.fail(kind, why)

    def flush(self, deadline: float) -> None:
        """Waits until what was queued has reached the peer's kernel, at most until ``deadline`` (time.monotonic)."""
        with self.lock:
            while self.failure is None and (left := deadline - time.monotonic()) > 0:
                if self._queue or self._writing is not None:
                    self._idle.wait(left)
                elif self._sock is not None and _unacknowledged(self._sock):
                    # Closing while the peer still sends would make our kernel drop what it has not delivered.
                    self._idle.wait(min(left, 0.002))
                else:
                    return

    def offer(self, sock: socket.socket, secrets: Secrets) -> None:
        """A connection on which the peer has proved itself: takes or refuses it. Called by the listener."""
        with self.lock:
            if self.failure is not None or self._state is _State.UP:
                verdict = TAKEN
            elif self._state is _State.CALLING and self.me < self.info.rank:
                verdict = CROSSED
            else:
                verdict = WELCOME
            try:
                sock.send(secrets.verdict(verdict))
            except OSError:
                sock.close()
                return
            if verdict == WELCOME:
                self._set_up(sock, secrets.acceptor_sends, secrets.initiator_sends)
            else:
                sock.close()

    def disown(self) -> None:
        """In a forked child: closes the descriptors without a word to the peer. Takes no lock: its holder is gone."""
        for sock in (self._sock, self._calling):
            if sock is not None:
                sock.close()

    # ***** called by the reader thread *****

    def claim(self, transfer: int) -> Receive:
        """The receive that was announced for ``transfer``; waits for it. Raises BrokenError when it doesn't come."""
        deadline = time.monotonic() + self.limits.announce
        with self.lock:
            while transfer not in self._receives:
                left = deadline - time.monotonic()
                if self.failure is not None:
                    raise BrokenError(self.failure[1])
                if left <= 0:
                    raise BrokenError(
                        f"rank {self.info.rank} sent transfer {transfer}, which rank {self.me} was not told to "
                        f"receive within {self.limits.announce:g} s"
                    )
                self._posted.wait(left)
            self._reading = transfer
            return self._receives.pop(transfer)

    def read_done(self) -> None:
        """The reader no longer uses the memory of what it claimed."""
        self._reading = None

    def refuse(self, frame: Frame) -> None:
        """Queues a nack, so that the reader never waits for room to write."""
        with self.lock:
            if self.failure is None:
                self._queue.append(_Out(frame, None, Ticket()))
                self._want_sender()

    def refused(self, frame: Frame) -> None:
        """The peer's nack: fails the send if it is still under way."""
        with self.lock:
            out = self._writing
        if out is not None and out.frame.kind == DATA and out.frame.transfer == frame.transfer:
            out.ticket.fail(
                BrokenError,
                f"transfer {frame.transfer}: rank {self.me} sends {describe(out.frame.dtype, out.frame.numel)} but "
                f"rank {self.info.rank} receives {describe(frame.dtype, frame.numel)}",
            )

    def read_ended(self, why: str) -> None:
        """The reader's last word."""
        self.fail(BrokenError, why)
        self._leave()

    # ***** the sender thread; the first three with the lock held *****

    def _want_sender(self) -> None:
        if self._sender is None:
            if self._state is _State.NEW:
                self._state = _State.CALLING
            self._sender = self._start(self._run_sender, "send")
        self._work.notify()

    def _start(self, target: object, what: str) -> threading.Thread:
        name = f"disttensor-tcp-{self.me}-{self.info.rank}-{what}"
        thread = threading.Thread(target=target, name=name, daemon=True)  # type: ignore[arg-type]
        self._users += 1
        self.threads.append(thread)
        thread.start()
        return thread

    def _set_up(self, sock: socket.socket, send_key: bytes, receive_key: bytes) -> None:
        tune_after(sock)
        self._sock, self._sealer, self._state = sock, Sealer(send_key), _State.UP
        _shut_down(self._calling)  # if the peer was faster
        self._start(Reader(self, sock, Opener(receive_key)).run, "read")
        self._work.notify_all()

    def _write_now(self, out: _Out) -> bool:
        """Writes a small frame without blocking. False if some of it is left, which is in ``out`` then. With lock."""
        if self._sock is None or self._sealer is None or out.tensor is None:
            return False
        payload = byte_view(out.tensor)
        header = self._sealer.seal(out.frame)
        try:
            sent = self._sock.sendmsg((header, payload), (), socket.MSG_DONTWAIT)
        except BlockingIOError:
            sent = 0
        except OSError as error:
            self.fail(BrokenError, self._lost(error))
            out.ticket.fail(BrokenError, self._lost(error))
            return True
        if sent == len(header) + len(payload):
            out.ticket.finish()
            return True
        out.header, out.rest = (header + payload)[sent:], True
        return False

    def _run_sender(self) -> None:
        try:
            if self._state is _State.CALLING:
                self._call()
            while (out := self._next()) is not None:
                self._write(out)
        finally:
            self._leave()

    def _call(self) -> None:
        try:
            sock, secrets = dial(self.info, self.job, self.me, self.limits.connect, self._watch)
        except BrokenError as error:
            with self.lock:
                if self._state is not _State.UP:
                    self.fail(BrokenError, str(error))
            return
        with self.lock:
            if sock is not None:
                if self.failure is None and self._state is _State.CALLING:
                    self._set_up(sock, secrets.initiator_sends, secrets.acceptor_sends)
                else:
                    sock.close()
            elif not self._work.wait_for(lambda: self._state is _State.UP or self.failure, self.limits.connect):
                self.fail(
                    BrokenError,
                    f"rank {self.info.rank} at {self.info.address} did not call rank {self.me} "
                    f"within {self.limits.connect:g} s, though it said it would",
                )

    def _watch(self, sock: socket.socket | None) -> bool:
        with self.lock:
            self._calling = sock
            return self.failure is None and self._state is _State.CALLING

    def _next(self) -> _Out | None:
        with self.lock:
            self._writing = None
            if not self._queue:
                self._idle.notify_all()
            while self.failure is None:
                if self._queue and self._sealer is not None:
                    out = self._writing = self._queue.popleft()
                    if not out.rest:
                        out.header = self._sealer.seal(out.frame)
                    return out
                self._work.wait()
            return None

    def _write(self, out: _Out) -> None:
        try:
            sock = self._sock
            if sock is None:
                raise OSError("the connection was closed")
            if out.rest or out.tensor is None:
                sock.sendall(out.header)
            else:
                tensor = plain(out.tensor)
                payload = byte_view(tensor)
                sent = sock.sendmsg((out.header, payload))
                if sent < len(out.header):
                    sock.sendall(out.header[sent:])
                    sent = len(out.header)
                sock.sendall(payload[sent - len(out.header) :])
        except Exception as error:  # not only OSError: a frame of which a part is missing ends the connection
            self.fail(BrokenError, self._lost(error))
            kind, why = self.failure or (BrokenError, str(error))
            what = f"rank {self.me} was sending transfer {out.frame.transfer} to rank {self.info.rank}"
            out.ticket.fail(kind, f"{what}: {why}")
        else:
            out.ticket.finish()

    def _lost(self, error: Exception) -> str:
        return f"rank {self.info.rank} closed its end or died; the connection from rank {self.me} is gone: {error}"

    def _leave(self) -> None:
        with self.lock:
            self._users -= 1
            if self._users == 0 and self._sock is not None:
                self._sock.close()
                self._sock = None


def _shut_down(sock: socket.socket | None) -> None:
    """Wakes whoever blocks in ``sock``; closing it is theirs, for the descriptor's number may be used anew at once."""
    if sock is not None:
        with suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)


def _unacknowledged(sock: socket.socket) -> int:
    """Bytes that the peer's kernel does not have yet."""
    (count,) = struct.unpack("i", fcntl.ioctl(sock, termios.TIOCOUTQ, bytes(4)))
    return int(count)
