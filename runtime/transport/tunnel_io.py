"""The thread at one end of tunnels (tunnel.py): moves bytes between sockets and messages, both ways.

A message is a letter and then bytes: D data, A how many bytes have been taken out at the other end, E the end.
No more than WINDOW bytes are on their way, so a reader that is slow makes the writer wait.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
from collections import deque
from collections.abc import Iterable
from typing import Protocol

from ..protocol.errors import BrokenError, ClosedError

#: Bytes on their way in one direction.
WINDOW = 1 << 20
#: Bytes of one message.
_PIECE = 1 << 16


class MessagePort(Protocol):
    """What a pump moves messages through: a hub, or a spoke that looks like one."""

    def send(self, guest: int, message: bytes) -> None: ...
    def drain(self) -> list[tuple[int, bytes]]: ...
    def gone(self) -> list[int]: ...
    def fileno(self) -> int: ...
    def close(self) -> None: ...


class End:
    """One end of a tunnel: our half of a pair of sockets, and what is on its way."""

    def __init__(self) -> None:
        self.ours, self.theirs = socket.socketpair()
        self.ours.setblocking(False)
        self.away = 0  #: bytes that have left and were not taken out yet
        self.waiting = bytearray()  #: what has come and did not fit into the socket yet
        self.over = False  #: nothing more comes from the other end
        self.mute = False  #: nothing more comes from our socket

    @property
    def finished(self) -> bool:
        return self.over and not self.waiting

    def wants(self) -> int:
        """What to poll our socket for."""
        reading = 0 if self.mute or self.away >= WINDOW else select.POLLIN
        return reading | (select.POLLOUT if self.waiting else 0)

    def read(self) -> list[bytes]:
        """Messages of what our side has written."""
        out: list[bytes] = []
        while not self.mute and self.away < WINDOW:
            try:
                piece = self.ours.recv(_PIECE)
            except BlockingIOError:
                break
            except OSError:
                piece = b""
            self.mute = not piece
            self.away += len(piece)
            out.append(b"D" + piece if piece else b"E")
        return out

    def take(self, message: bytes) -> None:
        """A message of the other end's. An end of ours that does not exist any more needs none of them."""
        kind, rest = message[:1], message[1:]
        if kind == b"D":
            self.waiting += rest
            if len(self.waiting) > WINDOW + _PIECE:  # it does not wait for us, as it should
                self.waiting.clear()
                self.over = True
        elif kind == b"A":
            self.away -= int.from_bytes(rest, "big")
        elif kind == b"E":
            self.over = True

    def write(self) -> list[bytes]:
        """Passes on what waits, as far as there is room; gives the messages that say so."""
        taken = 0
        while self.waiting:
            try:
                sent = self.ours.send(self.waiting, socket.MSG_NOSIGNAL)
            except BlockingIOError:
                break
            except OSError:
                sent = len(self.waiting)  # nobody reads it
            del self.waiting[:sent]
            taken += sent
        return [b"A" + taken.to_bytes(8, "big")] if taken else []


class TunnelPump:
    """The thread at one end of tunnels: between a port and a socket per guest."""

    def __init__(self, port: MessagePort, name: str) -> None:
        self._port = port
        self._ends: dict[int, End] = {}
        self._come: deque[socket.socket] = deque()
        #: Readable while ``accept`` has something to give.
        self.arrivals = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC | os.EFD_SEMAPHORE)
        self._stopping = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll = select.poll()
        self._polled: dict[int, int] = {}  # descriptors of ends, and what each is polled for
        self._next = 0  #: guests are numbered in the order of their coming
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def accept(self) -> socket.socket | None:
        """The socket of somebody who has come since; None when nobody has."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.arrivals)
            return self._come.popleft()
        return None

    def close(self) -> None:
        """What our side has written until now still leaves; then all ends. Close the sockets before."""
        os.eventfd_write(self._stopping, 1)
        self._thread.join()
        while (left := self.accept()) is not None:
            left.close()
        os.close(self.arrivals)
        os.close(self._stopping)

    def _admit(self, guest: int) -> End:
        self._next = guest + 1
        end = self._ends[guest] = End()
        self._come.append(end.theirs)
        os.eventfd_write(self.arrivals, 1)
        return end

    def _run(self) -> None:
        self._poll.register(self._port.fileno(), select.POLLIN)
        self._poll.register(self._stopping, select.POLLIN)
        try:
            stopping = False
            while not stopping:
                stopping = self._stopping in {fd for fd, _ in self._poll.poll()}
                for guest, end in list(self._ends.items()):
                    self._send(guest, end, end.read() + end.write())
                # A send may swallow the sign that something is there, and taking something may send: until nothing is.
                while self._receive():
                    pass
                for guest in [g for g, end in self._ends.items() if end.finished]:
                    self._dismiss(guest)
                self._repoll()
        finally:
            for guest in list(self._ends):
                self._dismiss(guest)
            self._port.close()

    def _receive(self) -> bool:
        messages = self._port.drain()
        for guest, message in messages:
            end = self._ends.get(guest)
            if end is None:
                if guest < self._next:
                    continue  # it has been dismissed
                end = self._admit(guest)
            end.take(message)
            self._send(guest, end, end.write() + end.read())
        for guest in self._port.gone():
            if guest in self._ends:
                self._ends[guest].over = True
        return bool(messages)

    def _send(self, guest: int, end: End, messages: Iterable[bytes]) -> None:
        try:
            for message in messages:
                self._port.send(guest, message)
        except (BrokenError, ClosedError):
            end.over = True

    def _dismiss(self, guest: int) -> None:
        end = self._ends.pop(guest)
        if self._polled.pop(end.ours.fileno(), None) is not None:
            self._poll.unregister(end.ours)
        if not end.mute:  # the other end has ended first, or may still live
            self._send(guest, end, [b"E"])
        end.ours.close()

    def _repoll(self) -> None:
        for end in self._ends.values():
            fd, wanted = end.ours.fileno(), end.wants()
            if self._polled.get(fd, 0) == wanted:
                continue
            if wanted:
                self._poll.register(fd, wanted)  # or modifies
                self._polled[fd] = wanted
            else:  # polled for nothing, it would still tell of its other half's end, and go on telling
                self._poll.unregister(fd)
                del self._polled[fd]
