"""Bytes of messages: what every vocabulary between two processes needs, whatever it says.

    Decoder              the bytes of another process as a message, or a ProtocolError
    prefixed, length     a message behind its length, in a stream
    pieces, Assembly     a long message in pieces, each well under a message's limit

Who reads a stream does so in its own way: until it is full, as much as there is, or into a tensor's memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar

import msgspec

from .errors import UNDECODABLE, ProtocolError

T = TypeVar("T")

#: The bytes of a length in front of a message, big endian.
PREFIX = 4
#: The bytes of a piece.
PIECE = 512 << 10


class Decoder(Generic[T]):
    """Decodes the messages of another process, which are of one type, or of a union."""

    def __init__(self, kind: object, what: str, wrong: str = "is not of this protocol") -> None:
        """``what``: one of the messages in words, for errors, as "a report"; ``wrong``: what is said of one."""
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(kind)
        self._what, self._wrong = what, wrong

    def decode(self, message: bytes | bytearray) -> T:
        """Decodes a message. Raises ProtocolError."""
        try:
            return self._decoder.decode(message)
        except UNDECODABLE as e:
            raise ProtocolError(f"{self._what} of {len(message)} bytes {self._wrong}: {e}") from None


def prefixed(message: bytes) -> bytes:
    """Returns a message behind its length."""
    return len(message).to_bytes(PREFIX, "big") + message


def length(prefix: bytes | bytearray) -> int:
    """Returns the length of the message behind a prefix."""
    return int.from_bytes(prefix, "big")


def pieces(message: bytes) -> Iterator[tuple[bytes, bool]]:
    """Yields the pieces of a message, one at least, and of each whether it is the last."""
    end = max(0, len(message) - 1) // PIECE * PIECE
    for at in range(0, end, PIECE):
        yield message[at : at + PIECE], False
    yield message[end:], True


class Assembly:
    """Puts the messages of one sender together, of their pieces."""

    def __init__(self, most: int, too_long: str) -> None:
        """``most``: bytes of a message; of a longer one ``too_long`` is said."""
        self._most, self._too_long = most, too_long
        self._parts = bytearray()

    def add(self, piece: bytes | memoryview, last: bool) -> bytes | None:
        """Takes a piece; returns the message that it ends, if it is the last.

        Raises ProtocolError for a message that is too long, of which nothing is kept.
        """
        if len(self._parts) + len(piece) > self._most:
            self._parts = bytearray()
            raise ProtocolError(self._too_long)
        self._parts += piece
        if not last:
            return None
        whole, self._parts = bytes(self._parts), bytearray()
        return whole
