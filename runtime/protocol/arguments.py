"""What commands are made of: the base of all structs that cross the wire, and the arguments of operators."""

from __future__ import annotations

from typing import TypeAlias

import msgspec


class Wire(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """Base of all structs that cross the wire: an array of the fields, led by an integer tag."""


class Hole(Wire, frozen=True, tag=1):
    """In a template: a tensor (``tensor=True``) or a number, taken from the Call's next argument."""

    tensor: bool


class Complex(Wire, frozen=True, tag=2):
    real: float
    imag: float


class DType(Wire, frozen=True, tag=3):
    """A torch dtype, by its number in dtypes.py."""

    id: int


class Device(Wire, frozen=True, tag=4):
    """A device of the node: "cpu" or "cuda:1"."""

    name: str


class Layout(Wire, frozen=True, tag=5):
    id: int


class MemoryFormat(Wire, frozen=True, tag=6):
    id: int


class Items(Wire, frozen=True, tag=7):
    """A list argument."""

    items: tuple[Spec, ...]


Plain: TypeAlias = bool | int | float | str | None
Spec: TypeAlias = bool | int | float | str | Hole | Complex | DType | Device | Layout | MemoryFormat | Items | None
Value: TypeAlias = bool | int | float | str | Complex | None


class Geometry(Wire, frozen=True, tag=8):
    """The metadata of one tensor on a node. ``bits``: 1 for a lazy conjugate, 2 for a lazy negative, 3 for both."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: int
    device: str
    bits: int = 0


class Expected(Wire, frozen=True, tag=9):
    """The metadata that the master takes a tensor on a node to have. ``bits``: as of Geometry."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: int
    bits: int


__all__ = [
    "Complex", "DType", "Device", "Expected", "Geometry", "Hole", "Items", "Layout", "MemoryFormat", "Plain", "Spec",
    "Value", "Wire",
]  # fmt: skip
