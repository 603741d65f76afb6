"""Messages as bytes, and out of them: a head (4 bytes of length, msgpack), then the bytes of its tensors, in order."""

from __future__ import annotations

from collections.abc import Generator
from typing import Annotated, Any, NamedTuple, TypeAlias

import msgspec
import torch
from msgspec import Meta

from ..protocol import values
from ..protocol.arguments import Message
from ..protocol.dtypes import IDS
from ..protocol.errors import ProtocolError
from ..protocol.framing import PREFIX, Decoder, length, prefixed
from ..protocol.shared_objects import MAX_SIZE, MAX_TENSOR_DIMS, MAX_WORDS
from ..shared.values import bytes_of, check_filled, decode_plain, empty, encode_plain, fetched, nbytes_of

#: The version of these messages.
VERSION = 1
#: The most bytes of a head: of plain data, and what stands around it.
MAX_HEAD = values.MAX_DATA + (1 << 20)
#: The most bytes of the head of a program's first message, which nobody knows yet.
MAX_FIRST = 4096
#: The most bytes of the tensors of a message, and the most tensors.
MAX_BYTES, MAX_TENSORS = 8 << 30, 4096

_Size = Annotated[int, Meta(ge=0, lt=MAX_SIZE)]
_Words = Annotated[str, Meta(max_length=MAX_WORDS)]


class Shape(Message, frozen=True):
    """A tensor, whose bytes follow."""

    dtype: int
    sizes: Annotated[tuple[_Size, ...], Meta(max_length=MAX_TENSOR_DIMS)]


class EndpointHello(Message, frozen=True, tag=1):
    """A client's first message."""

    version: int
    host: _Words
    pid: _Size
    tag: _Words


class Welcome(Message, frozen=True, tag=2):
    """The answer to it: the client's number."""

    version: int
    id: _Size


class Refused(Message, frozen=True, tag=3):
    """The other answer: why not."""

    why: _Words


class EndpointValue(Message, frozen=True, tag=4):
    """A value."""

    data: bytes
    tensors: Annotated[tuple[Shape, ...], Meta(max_length=MAX_TENSORS)] = ()


class Bye(Message, frozen=True, tag=5):
    """Nothing more comes: this end was closed."""


Said: TypeAlias = EndpointHello | Welcome | Refused | EndpointValue | Bye


class Come(NamedTuple):
    """A message that is complete."""

    said: Said
    tensors: list[torch.Tensor]

    @property
    def nbytes(self) -> int:
        """The bytes of memory that its value takes, about. Raises ProtocolError."""
        data = values.weight(self.said.data, self.tensors) if isinstance(self.said, EndpointValue) else 0
        return data + sum(x.nbytes + 64 for x in self.tensors) + 512


_encode = msgspec.msgpack.Encoder().encode
_heads = Decoder[Said](Said, "a head")


def frame(said: Said) -> bytes:
    """Returns the bytes of a head."""
    return prefixed(_encode(said))


def pack(value: Any) -> list[memoryview]:
    """Returns the bytes of a value, those of contiguous tensors without a copy. A tensor on a node is fetched.

    Raises TypeError for other than plain data and tensors, ValueError for what is too large, and what fetching raises.
    """
    tensors: list[torch.Tensor] = []
    data = encode_plain(value, tensors, "a message", "send")
    size = sum(x.numel() * x.element_size() for x in tensors)
    if size > MAX_BYTES or len(tensors) > MAX_TENSORS:
        raise ValueError(
            f"a message has {len(tensors)} tensors of {size} bytes, and may have {MAX_TENSORS} of {MAX_BYTES >> 30} GiB"
        )
    here = [fetched(x, "a message") for x in tensors]
    head = frame(EndpointValue(data, tuple(Shape(IDS[x.dtype], tuple(x.shape)) for x in here)))
    return [memoryview(head), *(bytes_of(x) for x in here if x.numel())]


def unpack(come: Come) -> Any:
    """Returns the value of a message. Raises ProtocolError."""
    if not isinstance(come.said, EndpointValue):
        raise ProtocolError(f"a value was to come, not {type(come.said).__name__}")
    return decode_plain(come.said.data, come.tensors)


class MessageReader:
    """Makes messages of a stream of bytes: who has read some into ``room()`` says so by ``took``.

    A message that says that it is larger than any is refused before there is memory for it.
    """

    def __init__(self, most: int = MAX_HEAD) -> None:
        self.most = most  #: bytes of a head; it may be raised between two messages
        self._steps = self._messages()
        self._done: Come | None = None
        self._room = next(self._steps)

    def room(self) -> memoryview:
        """Returns where the next bytes go: one at least."""
        return self._room

    def took(self, count: int) -> Come | None:
        """Notes that so many bytes were read; returns the message that they end, if they do. Raises ProtocolError."""
        self._room = self._room[count:]
        if not self._room:
            self._room = next(self._steps)
        done, self._done = self._done, None
        return done

    def close(self) -> None:
        """Drops what was read of a message that does not end."""
        self._room = memoryview(b"")
        self._steps.close()
        self._done = None

    def _messages(self) -> Generator[memoryview]:
        while True:
            prefix = bytearray(PREFIX)
            yield memoryview(prefix)
            size = length(prefix)
            if not 0 < size <= self.most:
                raise ProtocolError(f"a head of {size} bytes, and the most is {self.most}")
            body = bytearray(size)
            yield memoryview(body)
            said, tensors = decode_head(body), []
            for shape in said.tensors if isinstance(said, EndpointValue) else ():
                tensors.append(made := empty(shape.dtype, shape.sizes, "a message"))
                if made.numel():
                    yield bytes_of(made)
                    check_filled(made, "a message")
            self._done = Come(said, tensors)


def decode_head(body: bytes | bytearray) -> Said:
    """Decodes a head. Raises ProtocolError."""
    said = _heads.decode(body)
    if isinstance(said, EndpointValue):
        size = sum(nbytes_of(shape.dtype, shape.sizes, "a message") for shape in said.tensors)
        if size > MAX_BYTES:
            raise ProtocolError(f"a message has tensors of {size} bytes, and may have {MAX_BYTES}")
    return said
