"""Programs: a graph's recording for one node, as lines in single assignment form over registers.

Recorded Calls become a Program; an Engine runs one. The interpreter (interpreter.py) is the engine that does to the
bit what the calls would have done one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch._ops import OpOverload

from ...protocol import commands as c
from ..call_forms import ArgumentSlot
from ..op_fast_path import fast_path
from ..template import Template


@dataclass(frozen=True)
class Reg:
    """A tensor: an input of the program, or an output of an earlier line."""

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
    outs: tuple[int, ...]  #: registers of its output tensors, flat; () for a line that only writes its arguments
    single: bool  #: its output is one tensor, not a tuple or list
    heard: Callable[..., Any] | None = None  #: the callable that runs it, where the operator's warnings are heard

    @property
    def function(self) -> Callable[..., Any]:
        """The callable that runs the line's operator, called with the values that ``args`` and ``kwargs`` stand for."""
        if self.heard is not None:
            return self.heard
        return fast_path(self.op, bool(self.args) and isinstance(self.args[0], Reg))


@dataclass(frozen=True)
class Program:
    """A program: its lines, the registers that hold the given tensors, in order, and the registers to give back."""

    lines: tuple[Line, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    numbers: int  #: how many numbers each replay gives; lines may use some of them, or none


class Engine(Protocol):
    """Runs one program. Made once per program, used by one thread at a time."""

    @property
    def used(self) -> str:
        """The name of the engine that ran the program last: one may leave it to another."""

    @property
    def why(self) -> str:
        """The reason for which the program is left to another engine; "" if it is not, or not yet known."""

    @property
    def static(self) -> bool:
        """True if the outputs are the same tensors each time, with new values."""

    def run(self, inputs: Sequence[torch.Tensor], numbers: Sequence[Any]) -> Sequence[torch.Tensor]:
        """Does all lines; returns the outputs.

        Inputs may share memory with each other, and are written in place where lines do so. Exceptions of lines come
        through.
        """

    def halted(self, error: Exception) -> tuple[int, dict[int, torch.Tensor]] | None:
        """Returns, after ``run`` has raised ``error``, the line that raised and the registers that were alive.

        So the lines after it can be done one by one; inputs may be among the registers. None for an engine that can't
        tell; then nothing that the program makes or writes can be used.
        """


def operands(line: Line) -> Iterator[int]:
    """Yields the registers that a line reads or writes in place."""
    for value in (*line.args, *line.kwargs.values()):
        for v in value if isinstance(value, list) else (value,):
            if isinstance(v, Reg):
                yield v.index


def writers(program: Program) -> dict[int, int]:
    """Returns the inputs whose memory some line writes, be it through a view: each with the last such line."""
    return written(program)[0]


def written(program: Program) -> tuple[dict[int, int], dict[int, frozenset[int]]]:
    """Returns what ``writers`` does, and the inputs whose memory each register may see."""
    roots: dict[int, frozenset[int]] = {r: frozenset((r,)) for r in program.inputs}
    found: dict[int, int] = {}
    for i, line in enumerate(program.lines):
        infos = {a.name: a.alias_info for a in line.op._schema.arguments}
        aliased: frozenset[int] = frozenset()
        for name, value in (*zip(infos, line.args, strict=False), *line.kwargs.items()):
            info = infos[name]
            for v in value if isinstance(value, list) else (value,):
                if isinstance(v, Reg) and info is not None:
                    aliased |= roots.get(v.index, frozenset())
                    if info.is_write:
                        found |= dict.fromkeys(roots.get(v.index, ()), i)
        roots |= dict.fromkeys(line.outs, aliased)
    return found, roots


def line_of_call(template: Template, call: c.Call, numbers: Mapping[int, int]) -> Line:
    """Turns a recorded call into a line over its refs. ``numbers``: index of an argument -> number that replaces it."""
    at = 0

    def fill(slot: ArgumentSlot) -> Any:
        nonlocal at
        if slot.kind == "constant":
            return slot.value
        if slot.kind == "list":
            return [fill(part) for part in slot.parts]
        value = call.args[at]
        found = numbers.get(at)
        at += 1
        if slot.holes[0]:
            return Reg(call.out - int(value))  # type: ignore[arg-type]
        return value if found is None else Num(found)

    args = tuple([fill(slot) for slot in template.positional])
    kwargs = {name: fill(slot) for name, slot in template.keyword}
    return Line(template.op, args, kwargs, tuple(template.results(call.out, call.args)), template.single)


def program(lines: Sequence[Line], needed: Collection[int], numbers: int) -> Program:
    """Makes a program of these lines; it gives back those of its outputs that are ``needed`` elsewhere."""
    made: dict[int, None] = {}
    inputs: dict[int, None] = {}
    for line in lines:
        inputs |= dict.fromkeys(r for r in operands(line) if r not in made)
        made |= dict.fromkeys(line.outs)
    return Program(tuple(lines), tuple(inputs), tuple(r for r in made if r in needed), numbers)
