"""Framed streams between two processes of a launch: messages sent at one end are received at the other, in order."""

from __future__ import annotations

import contextlib
import os
import select
from abc import ABC, abstractmethod
from typing import Any, Generic, TypeVar

import msgspec

from ...protocol.errors import ProtocolError, StartError
from ...protocol.framing import PREFIX, Decoder, length, prefixed
from ..output.lines import plain
from .control import MAX_FRAME
from .loop import EventLoop

In = TypeVar("In")

#: The most bytes that are read in one turn, so that one who never stops does not keep the others waiting.
TURN = 2 * MAX_FRAME

#: The bytes that an agent writes to its stdout before its first frame: a login shell may have written there before.
MARK = b"\n-- disttensor agent --\n"


class FramedStream(ABC, Generic[In]):
    """One end of a stream of messages. Not safe for threads. Nothing blocks, but ``push`` with a timeout."""

    ended: bool = False  #: the other end is gone, and all its messages were received

    @abstractmethod
    def send_message(self, message: msgspec.Struct) -> None:
        """Queues a message and sends the bytes that fit. Raises nothing when the other end is gone: ``ended`` tells."""

    @abstractmethod
    def push(self, timeout: float = 0.0) -> None:
        """Sends queued messages; waits up to ``timeout`` seconds for room each time that there is none."""

    def watch_room(self, loop: EventLoop) -> None:
        """Has the loop's next turn end when there is room for queued bytes."""

    @abstractmethod
    def hear(self) -> list[In]:
        """Returns the complete messages that have arrived (of very many, those of one turn).

        Raises ProtocolError, and nothing else, for bytes that are no such messages.
        """

    @abstractmethod
    def fileno(self) -> int:
        """Returns a descriptor that is readable when ``hear`` may have something."""

    @abstractmethod
    def close(self) -> None:
        """Closes this end. Closing twice is fine."""


def frame(message: msgspec.Struct) -> bytes:
    """Returns the bytes that a ``FramedSocket`` sends for a message. Raises StartError for text that is no UTF-8."""
    try:
        body = msgspec.msgpack.encode(message)
    except UnicodeEncodeError as e:
        raise StartError(
            f"{e.object!r:.200} can't be told to the processes of a job: it is no UTF-8; give it another name"
        ) from None
    return prefixed(body)


class FramedSocket(FramedStream[In]):
    """A stream over descriptors, of a socket or two pipes, which it closes.

    Frame: 4 bytes of length (big endian), a struct. ``kinds`` is the union of the other end's messages.
    """

    def __init__(self, kinds: object, inn: int, out: int | None = None) -> None:
        self.inn, self.out = inn, inn if out is None else out
        for fd in (self.inn, self.out):
            os.set_blocking(fd, False)
            os.set_inheritable(fd, False)
        self._decoder = Decoder[In](kinds, "a frame", "that says nothing")
        self._in = bytearray()
        self._out = bytearray()
        self._closed = False

    @property
    def pending(self) -> bool:
        """True while a message has not left completely, and the other end may still take it."""
        return bool(self._out) and not self.ended

    def watch_room(self, loop: EventLoop) -> None:
        loop.room(self.out, self.pending)

    def fileno(self) -> int:
        return self.inn

    def send_message(self, message: msgspec.Struct) -> None:
        self._out += frame(message)
        self.push()

    def push(self, timeout: float = 0.0) -> None:
        while self._out and not self.ended:
            try:
                del self._out[: os.write(self.out, self._out)]
            except BlockingIOError:
                poller = select.poll()
                poller.register(self.out, select.POLLOUT)
                if timeout <= 0 or not poller.poll(timeout * 1000):
                    return
            except OSError:
                self._out.clear()  # messages that the other end sent before it went can still be read
                return

    def hear(self) -> list[In]:
        read = 0
        while not self.ended and read < TURN:
            try:
                piece = os.read(self.inn, 1 << 16)
            except BlockingIOError:
                break
            except OSError:
                piece = b""
            self._feed(piece)
            self.ended = not piece
            read += len(piece)
        messages = []
        while len(self._in) >= PREFIX:
            size = length(self._in[:PREFIX])
            if size > MAX_FRAME:
                raise ProtocolError(
                    f"a frame of {size} bytes, the limit is {MAX_FRAME}: this is no disttensor launcher"
                )
            end = PREFIX + size
            if len(self._in) < end:
                break
            messages.append(self._decode(self._in[PREFIX:end]))
            del self._in[:end]
        return messages

    def _decode(self, body: bytearray) -> In:
        try:
            return self._decoder.decode(body)
        except ProtocolError as e:  # its text may quote what came: tags are words here
            raise ProtocolError(plain(str(e), 250)) from None

    def _feed(self, piece: bytes) -> None:
        self._in += piece

    def close(self) -> None:
        self.ended = True
        if not self._closed:
            self._closed = True
            for fd in {self.inn, self.out}:
                with contextlib.suppress(OSError):
                    os.close(fd)

    def __enter__(self) -> FramedSocket[In]:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()
