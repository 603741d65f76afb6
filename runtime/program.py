"""L4: what a graph has recorded for one node, as a program: lines in single assignment form over registers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch._ops import OpOverload


@dataclass(frozen=True)
class Reg:
    """A tensor: an input of the program, or what an earlier line put out."""

    index: int


@dataclass(frozen=True)
class Num:
    """A Python number that each replay gives anew."""

    index: int


@dataclass(frozen=True)
class Line:
    """One operator call. ``args`` and ``kwargs`` hold constants, Regs, Nums, and lists of these."""

    op: OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outs: tuple[int, ...]  #: registers of the tensors that it puts out, flat; () for one that only writes its arguments
    single: bool  #: it puts out one tensor, not a tuple or list


@dataclass(frozen=True)
class Program:
    """``inputs`` are the registers that hold the tensors given, in order; ``outputs`` those to give back."""

    lines: tuple[Line, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    numbers: int
