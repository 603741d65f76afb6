"""The parts of commands: the base of all structs that cross the wire, and the arguments of operators."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeAlias

import msgspec


class Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """The base of all structs that cross the wire: an array of the fields, led by an integer tag."""


class Hole(Message, frozen=True, tag=1):
    """A gap in a template, for a tensor (``tensor=True``) or a number, which comes from the Call's next argument."""

    tensor: bool


class Complex(Message, frozen=True, tag=2):
    """A complex number."""

    real: float
    imag: float


class DType(Message, frozen=True, tag=3):
    """A torch dtype, named by its number in dtypes.py."""

    id: int


class Device(Message, frozen=True, tag=4):
    """A device of the node: "cpu" or "cuda:1"."""

    name: str


class Layout(Message, frozen=True, tag=5):
    """A torch layout, named by its number."""

    id: int


class MemoryFormat(Message, frozen=True, tag=6):
    """A torch memory format, named by its number."""

    id: int


class Items(Message, frozen=True, tag=7):
    """A list argument."""

    items: tuple[Spec, ...]


Plain: TypeAlias = bool | int | float | str | None
Spec: TypeAlias = bool | int | float | str | Hole | Complex | DType | Device | Layout | MemoryFormat | Items | None
Value: TypeAlias = bool | int | float | str | Complex | None


class Geometry(Message, frozen=True, tag=8):
    """The metadata of one tensor on a node. ``bits``: 1 for a lazy conjugate, 2 for a lazy negative, 3 for both."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: int
    device: str
    bits: int = 0


class Expected(Message, frozen=True, tag=9):
    """The metadata that the master takes a tensor on a node to have. ``bits`` means what it means in Geometry."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: int
    bits: int


class Held(Message, frozen=True):
    """A tensor that a node holds, and the bytes of its storage."""

    ref: int
    bytes: int
    what: str  #: dtype and shape, as "float32 (2, 3)"


class Holdings(Message, frozen=True):
    """The tensors that a node holds on a device, and the memory that the device has. ``largest``: one tensor for each
    of the largest storages."""

    tensors: int
    bytes: int
    free: int
    total: int
    largest: tuple[Held, ...] = ()


class Addresses(Message, frozen=True):
    """A peer's addresses in one data channel: of its DataChannel for transfers, and of the one for collectives."""

    transfers: str
    collectives: str = ""  #: the master's is empty: it takes part in none


def holes(specs: Iterable[Spec]) -> Iterator[bool]:
    """Yields, for each of a Call's arguments that a template's ``specs`` have a hole for, whether it is a tensor."""
    for spec in specs:
        if isinstance(spec, Hole):
            yield spec.tensor
        elif isinstance(spec, Items):
            yield from holes(spec.items)


__all__ = [
    "Addresses",
    "Complex",
    "DType",
    "Device",
    "Expected",
    "Geometry",
    "Held",
    "Holdings",
    "Hole",
    "Items",
    "Layout",
    "MemoryFormat",
    "Message",
    "Plain",
    "Spec",
    "Value",
    "holes",
]  # fmt: skip
