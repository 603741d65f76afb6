"""The I/O thread at one end of tunnels (tunnel.py): moves bytes between sockets and messages, both ways.

A message is a letter and then bytes: D data, A the number of bytes taken out at the other end (the credit for the flow
control), E the end. No more than WINDOW bytes are on their way, so a slow reader makes the writer wait (back-pressure).
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

#: The window: the most bytes on their way in one direction.
WINDOW = 1 << 20
#: The most bytes of one message.
_PIECE = 1 << 16


class MessagePort(Protocol):
    """The port that a pump moves messages through: a hub, or a spoke in the shape of one."""

    def send(self, peer: int, message: bytes) -> None: ...
    def drain(self) -> list[tuple[int, bytes]]: ...
    def gone(self) -> list[int]: ...
    def fileno(self) -> int: ...
    def close(self) -> None: ...


class End:
    """One end of a tunnel: this side's half of a pair of sockets, and the bytes on their way."""

    def __init__(self) -> None:
        self.ours, self.theirs = socket.socketpair()
        self.ours.setblocking(False)
        self.away = 0  #: bytes that have left and were not acknowledged yet
        self.waiting = bytearray()  #: bytes that have arrived and did not fit into the socket yet
        self.over = False  #: nothing more comes from the other end
        self.mute = False  #: nothing more comes from this side's socket

    @property
    def finished(self) -> bool:
        return self.over and not self.waiting

    def wants(self) -> int:
        """Returns the events to poll this side's socket for."""
        reading = 0 if self.mute or self.away >= WINDOW else select.POLLIN
        return reading | (select.POLLOUT if self.waiting else 0)

    def read(self) -> list[bytes]:
        """Returns messages of the bytes that this side has written."""
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

    def handle_message(self, message: bytes) -> None:
        """Handles a message of the other end. One that no other end sends is the end of the tunnel."""
        kind, rest = message[:1], message[1:]
        if self.over:
            return
        if kind == b"D" and len(self.waiting) + len(rest) <= WINDOW + _PIECE:
            self.waiting += rest
        elif kind == b"A" and len(rest) == 8 and (taken := int.from_bytes(rest, "big")) <= self.away:
            self.away -= taken
        else:
            if message != b"E":  # it ignores the window, or says that it has taken what it was not sent
                self.waiting.clear()
            self.over = True

    def write(self) -> list[bytes]:
        """Passes on waiting bytes, as far as there is room; returns the messages that acknowledge them."""
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
    """The I/O thread at one end of tunnels: between a port and a socket per peer."""

    def __init__(self, port: MessagePort, name: str) -> None:
        self._port = port
        self._ends: dict[int, End] = {}
        self._come: deque[tuple[socket.socket, int]] = deque()
        #: Readable while ``accept`` has something to give.
        self.arrivals = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC | os.EFD_SEMAPHORE)
        self._stopping = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll = select.poll()
        self._polled: dict[int, int] = {}  # descriptors of ends, and what each is polled for
        self._next = 0  #: peers are numbered in the order of their coming
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def accept(self) -> socket.socket | None:
        """Returns the socket of a peer that has connected since; None when none has."""
        found = self.accept_peer()
        return None if found is None else found[0]

    def accept_peer(self) -> tuple[socket.socket, int] | None:
        """Returns the socket and the number of a peer that has connected since; None when none has."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.arrivals)
            return self._come.popleft()
        return None

    def close(self) -> None:
        """Sends all bytes that this side has written until now; then ends all tunnels. Close the sockets before."""
        os.eventfd_write(self._stopping, 1)
        self._thread.join()
        while (left := self.accept()) is not None:
            left.close()
        os.close(self.arrivals)
        os.close(self._stopping)

    def _admit(self, peer: int) -> End:
        """Raises OSError when this process has no descriptors left: this peer is not let in, and others stay."""
        self._next = peer + 1
        end = self._ends[peer] = End()
        self._come.append((end.theirs, peer))
        os.eventfd_write(self.arrivals, 1)
        return end

    def _run(self) -> None:
        self._poll.register(self._port.fileno(), select.POLLIN)
        self._poll.register(self._stopping, select.POLLIN)
        try:
            stopping = False
            while not stopping:
                stopping = self._stopping in {fd for fd, _ in self._poll.poll()}
                for peer, end in list(self._ends.items()):
                    self._send(peer, end, end.read() + end.write())
                # A send may swallow the sign that a message has arrived, and handling one may send, as the end of a
                # tunnel does: repeat until none is left.
                while self._receive() or self._dismiss_finished():
                    pass
                self._repoll()
        finally:
            for peer in list(self._ends):
                self._dismiss(peer)
            self._port.close()

    def _receive(self) -> bool:
        messages = self._port.drain()
        for peer, message in messages:
            end = self._ends.get(peer)
            if end is None:
                if peer < self._next:
                    continue  # it has been dismissed
                try:
                    end = self._admit(peer)
                except OSError:
                    self._send_end(peer)
                    continue
            end.handle_message(message)
            self._send(peer, end, end.write() + end.read())
        for peer in self._port.gone():
            if peer in self._ends:
                self._ends[peer].over = True
        return bool(messages)

    def _send(self, peer: int, end: End, messages: Iterable[bytes]) -> None:
        try:
            for message in messages:
                self._port.send(peer, message)
        except (BrokenError, ClosedError):
            end.over = True

    def _dismiss_finished(self) -> bool:
        """Ends the tunnels whose other end has ended. Returns whether there were any."""
        finished = [peer for peer, end in self._ends.items() if end.finished]
        for peer in finished:
            self._dismiss(peer)
        return bool(finished)

    def _dismiss(self, peer: int) -> None:
        end = self._ends.pop(peer)
        if self._polled.pop(end.ours.fileno(), None) is not None:
            self._poll.unregister(end.ours)
        if not end.mute:  # the other end has ended first, or may still live
            self._send_end(peer)
        end.ours.close()

    def _send_end(self, peer: int) -> None:
        with contextlib.suppress(BrokenError, ClosedError):
            self._port.send(peer, b"E")

    def _repoll(self) -> None:
        for end in self._ends.values():
            fd, wanted = end.ours.fileno(), end.wants()
            if self._polled.get(fd, 0) == wanted:
                continue
            if wanted:
                self._poll.register(fd, wanted)  # or modifies
                self._polled[fd] = wanted
            else:  # polled for nothing, it would still report its other half's end, and go on reporting
                self._poll.unregister(fd)
                del self._polled[fd]
