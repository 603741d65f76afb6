"""The writing half of a tcp peer: a queue, a thread that is started when something had to be queued, and a fast path.

A small frame with nothing queued before it is written by its caller, without blocking: a thread less to wake. Bytes
that the kernel does not take are left to the sender thread.

``_with_lock`` methods are called with the peer's lock held; it is held for short, non-blocking steps only.
"""

from __future__ import annotations

import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from ...protocol.errors import BrokenError, ChannelError
from ...protocol.transfer_ids import spoken
from ..carrier import Carrier
from ..payload import byte_view, plain
from ..ticket import Ticket
from .frames import CARRIED, EAGER, Frame, Sealer
from .shield import CHECKSUM, ENCRYPT, Shield, checksum


@dataclass(eq=False)
class Out:
    """A frame to write. ``tensor`` keeps the memory alive; ``header`` is set once the frame's turn has come."""

    frame: Frame
    tensor: torch.Tensor | None
    ticket: Ticket
    extra: bytes = b""  #: bytes that go with the frame, under its MAC
    header: bytes = b""  #: bytes to write before the payload
    rest: bool = False  #: ``header`` holds all that is left to be written


class Peer(Protocol):
    """The part of its peer that the writing half knows."""

    me: int
    rank: int
    lock: threading.RLock
    failure: tuple[type[ChannelError], str] | None
    carrier: Carrier | None

    def start_with_lock(self, target: Callable[[], None], what: str) -> threading.Thread: ...

    def call_if_new(self) -> None: ...

    def fail(self, kind: type[ChannelError], why: str) -> None: ...

    def lost(self, error: Exception) -> str: ...

    def leave(self) -> None: ...


class Sender:
    """Writes frames in the order in which they were put. Before ``attach_with_lock`` they wait."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self._work = threading.Condition(peer.lock)  #: notified of something to write, or a failure
        self._idle = threading.Condition(peer.lock)  #: notified when there is nothing to write, or of a failure
        self._queue: deque[Out] = deque()
        self._writing: Out | None = None  #: the frame that the thread is writing
        self._sock: socket.socket | None = None
        self._sealer: Sealer | None = None
        self._mode = 0  #: what the two have agreed on, bits of ``shield``
        self._shield: Shield | None = None  #: None: payloads go as they are
        self._thread: threading.Thread | None = None

    def __len__(self) -> int:
        return len(self._queue) + (self._writing is not None)

    def attach_with_lock(self, sock: socket.socket, key: bytes, mode: int, shield: Shield | None) -> None:
        """Starts writing: the connection is up. ``key`` is for headers; payloads are protected by ``shield``."""
        self._sock, self._sealer, self._mode, self._shield = sock, Sealer(key), mode, shield
        self._work.notify_all()

    def put_with_lock(self, out: Out) -> None:
        """Writes or queues a frame."""
        if not (self._sock and out.frame.nbytes <= EAGER and not len(self) and self._write_now_with_lock(out)):
            self._queue.append(out)
            self.want_thread_with_lock()

    def want_thread_with_lock(self) -> None:
        """Has the thread look at the queue; starts it if need be, and it connects first if nobody has."""
        if self._thread is None:
            self._thread = self._peer.start_with_lock(self._run, "send")
        self._work.notify()

    def give_up_with_lock(self) -> list[Ticket]:
        """Empties the queue after the peer's failure; returns its tickets. The frame being written ends by itself."""
        tickets = [out.ticket for out in self._queue]
        self._queue.clear()
        self._work.notify_all()
        self._idle.notify_all()
        return tickets

    def writing(self) -> Out | None:
        """Returns the frame that the thread is writing."""
        return self._writing

    def flush(self, deadline: float) -> None:
        """Waits until all queued frames have been written, at most until ``deadline`` (time.monotonic)."""
        with self._peer.lock:
            while len(self) and self._peer.failure is None and (left := deadline - time.monotonic()) > 0:
                self._idle.wait(left)

    def _write_now_with_lock(self, out: Out) -> bool:
        """Writes the bytes that the kernel takes at once. False if some are left, which are in ``out`` then."""
        if self._sock is None or self._sealer is None:
            return False
        header = self._sealer.seal(out.frame, out.extra)
        payload: memoryview | bytes = byte_view(out.tensor) if out.tensor is not None else b""
        if self._shield is not None:
            payload = self._shield.pack(self._sealer.last, memoryview(payload))
        try:
            sent = self._sock.sendmsg((header, payload), (), socket.MSG_DONTWAIT)
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
            self._peer.call_if_new()
            while self._write_next():
                pass
        finally:
            self._peer.leave()

    def _write_next(self) -> bool:
        """Waits for the next frame and writes it; False after a failure. Keeps no tensor alive while it waits."""
        with self._peer.lock:
            while not self._queue or self._sealer is None:
                if self._peer.failure is not None:
                    return False
                self._work.wait()
            out = self._writing = self._queue.popleft()
        self._write(out)
        return True

    def _seal(self, out: Out) -> None:
        """Seals a frame when its turn has come: sequence numbers are those of the wire.

        Large tensors may go to the carrier.
        """
        sealer, carrier = self._sealer, self._peer.carrier
        if sealer is None:
            raise OSError("it was closed")
        if carrier is not None and not carrier.local and self._mode & ENCRYPT:
            carrier = None  # what it carries would leave the host in clear
        if carrier is not None and out.tensor is not None and out.frame.nbytes > EAGER:
            descriptor = carrier.stage(out.tensor)
            if descriptor is not None:
                if self._mode & CHECKSUM:
                    descriptor += checksum(out.tensor)
                out.frame, out.extra, out.rest = out.frame._replace(kind=CARRIED), descriptor, True
        out.header = sealer.seal(out.frame, out.extra)

    def _write(self, out: Out) -> None:
        try:
            sock = self._sock
            if sock is None:
                raise OSError("it was closed")
            if not out.rest:
                self._seal(out)
            if out.rest or out.tensor is None:
                sock.sendall(out.header)
                if out.frame.kind == CARRIED and out.tensor is not None and self._peer.carrier is not None:
                    self._peer.carrier.carry(out.tensor)
            else:
                self._write_payload(sock, out.header, plain(out.tensor))
        except Exception as error:  # not only OSError: a frame of which a part is missing ends the connection
            self._peer.fail(BrokenError, self._peer.lost(error))
            kind, why = self._peer.failure or (BrokenError, str(error))
            self._wrote()
            out.ticket.fail(kind, self._what(out, why))
        else:
            self._wrote()
            out.ticket.finish()

    def _write_payload(self, sock: socket.socket, header: bytes, tensor: torch.Tensor) -> None:
        payload = byte_view(tensor)
        if self._shield is not None and self._sealer is not None:
            sock.sendall(header, socket.MSG_MORE if len(payload) else 0)
            self._shield.send(self._sealer.last, payload, sock)
            return
        sent = sock.sendmsg((header, payload))
        if sent < len(header):
            sock.sendall(header[sent:])
            sent = len(header)
        rest = payload[sent - len(header) :]
        if rest:  # sending nothing would still fail if the peer has read it all and closed
            sock.sendall(rest)

    def _wrote(self) -> None:
        # Before the ticket ends: a thread that waited for it and sends again may then write by itself.
        with self._peer.lock:
            self._writing = None
            if not self._queue:
                self._idle.notify_all()

    def _what(self, out: Out, why: str) -> str:
        number = spoken(out.frame.transfer)
        return f"transfer {number} from rank {self._peer.me} to rank {self._peer.rank} broke off: {why}"
