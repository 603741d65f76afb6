"""The writing half of a tcp peer: a queue, a thread that is started when something had to be queued, and a fast path.

A small frame with nothing queued before it is written by its caller, without blocking: a thread less to wake. Bytes
that the kernel does not take are left to the sender thread. What was written is ``Kept`` until its receipt is known.

``_with_lock`` methods are called with the peer's lock held; it is held for short, non-blocking steps only.
"""

from __future__ import annotations

import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

import torch

from ...protocol.errors import BrokenError, ChannelError
from ...protocol.transfer_ids import spoken
from ..carrier import Carrier, FullError
from ..payload import byte_view, plain
from ..ticket import Passing, Ticket
from .frames import BYE, CARRIED, COUNTED, DATA, EAGER, RECEIPT, Frame, Sealer
from .inbound import PIECE
from .kept import Kept, Out, TcpConnection
from .shield import CHECKSUM, ENCRYPT, Shield, checksum

#: The first and the longest pause between two questions whether a carrier has room, or what was lent has been read,
#: seconds.
_SPIN, _PAUSE = 1e-4, 2e-3


class SenderPeer(Protocol):
    """The part of its peer that the writing half knows."""

    me: int
    rank: int
    lock: threading.RLock
    failure: tuple[type[ChannelError], str] | None
    carrier: Carrier | None
    received: int

    def start_with_lock(self, target: Callable[[], None], what: str) -> threading.Thread | None: ...

    def call_if_new(self) -> bool: ...

    def has_broken_with_lock(self) -> bool: ...

    def lose(self, connection: TcpConnection, error: Exception) -> None: ...

    def release(self, connection: TcpConnection) -> None: ...

    def fail(self, kind: type[ChannelError], why: str) -> None: ...

    def lost(self, error: Exception) -> str: ...

    def leave(self) -> None: ...


class FrameSender:
    """Writes frames in the order in which they were put. Before ``attach_with_lock`` they wait."""

    def __init__(self, peer: SenderPeer) -> None:
        self._peer = peer
        self._work = threading.Condition(peer.lock)  #: notified of something to write, or a failure
        self._idle = threading.Condition(peer.lock)  #: notified when there is nothing to write, or of a failure
        self._queue: deque[Out] = deque()
        self._writing: Out | None = None  #: the frame that the thread is writing
        self._connection: TcpConnection | None = None
        self._sealer: Sealer | None = None
        self._mode = 0  #: what the two have agreed on, bits of ``shield``
        self._shield: Shield | None = None  #: None: payloads go as they are
        self._thread: threading.Thread | None = None
        self._kept = Kept()
        self._flushing = False  #: somebody waits until all has left
        self.told = 0  #: the number of received frames that the peer was told last

    def __len__(self) -> int:
        return len(self._queue) + (self._writing is not None)

    @property
    def has_unacknowledged(self) -> bool:
        """True while something waits to be written, or for its receipt."""
        return len(self) > 0 or self._kept.sent > self._kept.receipt

    def knew_with_lock(self, receipt: int) -> bool:
        """Returns whether the peer has said meanwhile that it has dealt with more."""
        return receipt < self._kept.receipt

    def knows_with_lock(self, receipt: int) -> bool:
        """Returns whether the peer can have dealt with so many frames."""
        return self._kept.receipt <= receipt <= self._kept.sent

    def attach_with_lock(
        self, connection: TcpConnection, key: bytes, mode: int, shield: Shield | None, receipt: int
    ) -> list[Ticket]:
        """Starts writing: the connection is up. Begins with what was written to another one and has not arrived.

        ``key`` is for headers; payloads are protected by ``shield``. ``receipt``: the number of frames that the peer
        has dealt with. Returns tickets to end well once the lock is released. Raises ProtocolError for a wrong receipt.
        """
        over, again = self._kept.begin_connection(receipt)
        self._queue.extendleft(reversed(again))
        self._connection, self._sealer, self._mode, self._shield = connection, Sealer(key), mode, shield
        if self._queue:
            self.want_thread_with_lock()
        self._work.notify_all()
        return over

    def detach_with_lock(self) -> None:
        """Stops writing: the connection has broken, and what was written of frames is void. ``attach_with_lock`` sends
        again what is kept."""
        self._connection = self._sealer = self._shield = None
        if self._peer.carrier is not None:
            self._peer.carrier.stop_lending()
        new = [out for out in self._queue if not out.kept and out.frame.kind != RECEIPT]
        self._queue.clear()
        self._queue.extend(new)

    def put_with_lock(self, out: Out) -> None:
        """Writes or queues a frame."""
        if not (self._connection and out.frame.nbytes <= EAGER and not len(self) and self._write_now_with_lock(out)):
            self._queue.append(out)
            self.want_thread_with_lock()

    def want_thread_with_lock(self) -> None:
        """Has the thread look at the queue; starts it if need be, and it connects first if nobody has."""
        if self._thread is None:
            self._thread = self._peer.start_with_lock(self._run, "send")
        self._work.notify()

    def give_up_with_lock(self) -> list[Ticket]:
        """Empties the queue after the peer's failure; returns its tickets. The frame being written ends by itself."""
        new = [out for out in self._queue if not out.kept]
        tickets = [out.ticket for out in (*self._kept.give_up(), *new) if out is not self._writing]
        self._queue.clear()
        self._work.notify_all()
        self._idle.notify_all()
        return tickets

    def part_with_lock(self) -> None:
        """Tells the peer that this end does not want to go on, if that can be done between two frames, and at once."""
        half = self._writing is not None or (self._queue and self._queue[0].rest)
        if self._connection is not None and self._sealer is not None and not half:
            with suppress(OSError):
                self._connection.sock.send(self._sealer.seal(Frame(BYE, 0, 0, 0, 0)), socket.MSG_DONTWAIT)

    def acknowledge(self, receipt: int) -> bool:
        """Forgets frames that the peer has dealt with, of which it has told the number; returns whether there are any.

        Raises ProtocolError.
        """
        with self._peer.lock:
            over = self._kept.acknowledge(receipt)
            if self._flushing:
                self._idle.notify_all()
        for ticket in over:
            ticket.finish()
        return bool(over)

    def unread(self, transfer: int) -> Out | None:
        """Returns the frame of a transfer if the thread is writing it, or the peer has still to read what was lent."""
        with self._peer.lock:
            under_way = [*self._kept.lent(), *([self._writing] if self._writing is not None else [])]
        return next((out for out in under_way if out.frame.transfer == transfer), None)

    def flush(self, deadline: float) -> None:
        """Waits until all queued frames have been written, and what was lent was read, at most until ``deadline``
        (time.monotonic)."""
        with self._peer.lock:
            self._flushing = True
            while len(self) or self._kept.lent():
                left = deadline - time.monotonic()
                if self._peer.failure is not None or left <= 0:
                    break
                self._idle.wait(left)
            self._flushing = False

    def _seal_with_lock(self, out: Out, sealer: Sealer) -> bytes:
        """Seals a frame when its turn has come: sequence numbers are those of the wire."""
        received = self.told = self._peer.received
        out.header = sealer.seal(out.frame, out.extra, received)
        if out.frame.kind in COUNTED:
            self._kept.add(out)
        return out.header

    def _write_now_with_lock(self, out: Out) -> bool:
        """Writes the bytes that the kernel takes at once. False if some are left, which are in ``out`` then."""
        if self._connection is None or self._sealer is None:
            return False
        header = self._seal_with_lock(out, self._sealer)
        payload = b""
        if out.tensor is not None:
            payload = bytes(byte_view(out.tensor))
            self._kept.keep_copy(out, payload)
            out.tensor = None
        if self._shield is not None:
            payload = self._shield.pack(self._sealer.last, memoryview(payload))
        try:
            sent = self._connection.sock.sendmsg((header, payload), (), socket.MSG_DONTWAIT)
        except OSError:
            # No room, or the end of the connection: the thread will see which, and may call callbacks if it is the end.
            sent = 0
        if sent == len(header) + len(payload):
            out.ticket.finish()
            return True
        out.header, out.rest = (header + payload)[sent:], True
        return False

    def _run(self) -> None:
        try:
            while self._peer.call_if_new() and self._write_next():
                pass
        finally:
            self._peer.leave()

    def _write_next(self) -> bool:
        """Waits for the next frame and writes it; False after a failure. Keeps no tensor alive while it waits.

        Returns, too, when the connection has broken.
        """
        over: list[Ticket] = []
        with self._peer.lock:
            while not self._queue or self._connection is None:
                if self._peer.failure is not None:
                    return False
                if self._peer.has_broken_with_lock():
                    return True
                self._work.wait(_PAUSE if self._kept.lent() else None)
                if over := self._read_with_lock():
                    break
            else:
                connection = self._connection
                connection.users += 1
                out = self._writing = self._queue.popleft()
        if not over:
            self._write(out, connection)
        for ticket in over:
            ticket.finish()
        return True

    def _read_with_lock(self) -> list[Ticket]:
        """Lets go of what was lent and has been read, as the carrier can tell; returns the tickets."""
        carrier = self._peer.carrier
        over = [] if carrier is None else self._kept.end_lent(carrier.read_up_to())
        if over and self._flushing:
            self._idle.notify_all()
        return over

    def _stage(self, out: Out, connection: TcpConnection) -> torch.Tensor | None:
        """Gives a large tensor to the carrier, or returns it as one to be written.

        Returns it, too, where the connection ends before the carrier has room.
        """
        if out.tensor is None or out.rest or out.frame.kind != DATA:
            return None
        carrier = self._peer.carrier
        if carrier is not None and not carrier.local and self._mode & ENCRYPT:
            carrier = None  # what it carries would leave the host in clear
        if carrier is not None and out.frame.nbytes > EAGER:
            descriptor, pause = None, _SPIN
            while self._connection is connection and self._peer.failure is None:
                try:
                    descriptor = carrier.stage(out.tensor)
                    break
                except FullError:
                    time.sleep(pause)
                    pause = min(2 * pause, _PAUSE)
            if descriptor is not None:
                if self._mode & CHECKSUM:
                    descriptor += checksum(out.tensor)
                out.lent = carrier.lent(descriptor[: carrier.size])
                out.frame, out.extra = out.frame._replace(kind=CARRIED), descriptor
                return None
        return plain(out.tensor)

    def _write(self, out: Out, connection: TcpConnection) -> None:
        written, copy, lent = False, b"", False
        try:
            tensor = self._stage(out, connection)
            lent = out.lent > 0
            payload = memoryview(out.copy or b"") if tensor is None else byte_view(tensor)
            written = self._write_to(connection, out, payload)
            if written and out.frame.kind == CARRIED and out.tensor is not None and self._peer.carrier is not None:
                self._peer.carrier.carry(out.tensor)
            if written and out.kept and not out.rest and len(payload) <= connection.most:
                copy = out.copy or bytes(payload)
        except Exception as error:  # a frame of which a part is missing ends it all
            written = False
            self._peer.fail(BrokenError, self._peer.lost(error))
        # Before the ticket ends: a thread that waited for it and sends again may then write by itself.
        with self._peer.lock:
            self._writing = None
            failure = self._peer.failure
            ended = written and not lent
            if ended:
                out.tensor = None
                if copy and out.kept:
                    self._kept.keep_copy(out, copy)
            if not self._queue:
                self._idle.notify_all()
        self._peer.release(connection)
        if ended:
            out.ticket.finish()
        elif failure is not None:
            if lent and self._peer.carrier is not None:
                self._peer.carrier.fail(failure[1])  # before the memory may change: the peer may be reading it
            out.ticket.fail(failure[0], self._what(out, failure[1]))

    def _write_to(self, connection: TcpConnection, out: Out, payload: memoryview) -> bool:
        """Writes a frame. False if the connection has broken: it is written to the next one."""
        with self._peer.lock:
            if self._connection is not connection or self._sealer is None:
                if not out.kept and not out.rest and self._peer.failure is None:
                    out.take_back()
                    self._queue.appendleft(out)
                return False
            header = out.header if out.rest else self._seal_with_lock(out, self._sealer)
            number, shield, sock = self._sealer.last, self._shield, connection.sock
        try:
            if out.rest or not len(payload):
                sock.sendall(header)
            elif shield is not None:
                sock.sendall(header, socket.MSG_MORE)
                shield.send(number, payload, sock)
            else:
                self._send_counted(sock, header, payload, out.ticket)
        except OSError as error:
            self._peer.lose(connection, error)
            return False
        return True

    @staticmethod
    def _send_counted(sock: socket.socket, header: bytes, payload: memoryview, ticket: Ticket) -> None:
        """Sends a header and its payload, and counts a large one on its way."""
        passing = Passing() if len(payload) > PIECE else None
        ticket.passing = passing
        sent = sock.sendmsg((header, payload if passing is None else payload[:PIECE]))
        if sent < len(header):
            sock.sendall(header[sent:])
            sent = len(header)
        done = sent - len(header)
        while done < len(payload):  # sending nothing would still fail if the peer has read it all and closed
            if passing is not None:
                passing.bytes = done
            piece = payload[done:] if passing is None else payload[done : done + PIECE]
            sock.sendall(piece)
            done += len(piece)

    def _what(self, out: Out, why: str) -> str:
        number = spoken(out.frame.transfer)
        return f"transfer {number} from rank {self._peer.me} to rank {self._peer.rank} broke off: {why}"
