"""What a launcher and its fork server tell each other, over a Unix socket.

    LocalLauncher -- Start, Kill, Stop ----------> fork server
                  <-- Ready, Began, Ended, Unfit --

Frame: 4 bytes of length (big endian), then one of these structs as msgpack. Nothing is ever unpickled. The end of the
socket is a message too: whichever side sees it knows that the other process is gone, even by SIGKILL.
"""

from __future__ import annotations

import select
import socket
from typing import Generic, TypeVar

import msgspec

from ..bundle import Bundle
from ..errors import ProtocolError

#: A bundle is 1 MiB at most (see bundle.py), a tail 20 short lines.
MAX_FRAME = 2 << 20


class Start(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Fork a worker that calls ``entry`` ("module:function") with its life-line."""

    bundle: Bundle
    entry: str


class Kill(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Send a signal to a worker's process group; nothing happens when it has ended already."""

    rank: int
    signal: int


class Stop(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Give the workers ``grace`` seconds, end those that are left, then end yourself."""

    grace: float


class Ready(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The server has imported what workers need. Sent before it looks at any order."""

    pid: int


class Unfit(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The server cannot start workers at all, and ends."""

    why: str


class Began(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """A worker runs."""

    rank: int
    pid: int


class Ended(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """A worker has ended and was reaped; pid 0 means that it could not be forked."""

    rank: int
    pid: int
    code: int
    cause: str
    tail: tuple[str, ...]


Order = Start | Kill | Stop
News = Ready | Unfit | Began | Ended

In = TypeVar("In")


class Wire(Generic[In]):
    """One end of the socket. ``kinds`` is the union of what the other end may say. Not safe for threads."""

    def __init__(self, sock: socket.socket, kinds: object) -> None:
        self.sock = sock
        self.ended = False  #: the other end is gone
        self._decoder: msgspec.msgpack.Decoder[In] = msgspec.msgpack.Decoder(kinds)
        self._in = bytearray()
        self._out = bytearray()

    @property
    def pending(self) -> bool:
        """Whether something that was said has not left yet."""
        return bool(self._out)

    def say(self, message: Order | News) -> None:
        """Queues a message and sends what fits. Raises nothing when the other end is gone: ``ended`` tells."""
        body = msgspec.msgpack.encode(message)
        self._out += len(body).to_bytes(4, "big") + body
        self.push()

    def push(self, timeout: float = 0.0) -> None:
        """Sends what is queued; waits up to ``timeout`` seconds for room each time that there is none."""
        while self._out and not self.ended:
            try:
                sent = self.sock.send(self._out, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
                del self._out[:sent]
            except BlockingIOError:
                if timeout <= 0 or not select.select([], [self.sock], [], timeout)[1]:
                    return
            except OSError:
                self._out.clear()  # what the other end said before it went can still be heard
                return

    def hear(self) -> list[In]:
        """All whole messages that have come; never blocks.

        Raises ProtocolError on an oversize frame, msgspec.DecodeError (ValidationError) on anything unknown.
        """
        while not self.ended:
            try:
                piece = self.sock.recv(1 << 16, socket.MSG_DONTWAIT)
            except BlockingIOError:
                break
            except ConnectionError:
                piece = b""
            self._in += piece
            self.ended = not piece
        messages = []
        while len(self._in) >= 4:
            size = int.from_bytes(self._in[:4], "big")
            if size > MAX_FRAME:
                raise ProtocolError(
                    f"a frame of {size} bytes, the limit is {MAX_FRAME}: this is no disttensor launcher"
                )
            if len(self._in) < 4 + size:
                break
            messages.append(self._decoder.decode(self._in[4 : 4 + size]))
            del self._in[: 4 + size]
        return messages
