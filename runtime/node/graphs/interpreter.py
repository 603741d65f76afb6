"""The interpreter: a Program as straight-line Python, whose results are those of its calls one by one, to the bit.

One line of source per line of the program, so that a traceback tells which one failed, and its frame what was alive.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from itertools import count
from types import FunctionType, TracebackType
from typing import Any

import torch

from ...process.generated_code import function
from ..template import tensors_of
from .program import Line, Num, Program, Reg, operands

#: The line number, in the source, of the program's first line.
_FIRST = 5
#: Skips autograd's layers between Python and a kernel: nothing records here, and nobody needs version counts. That
#: saves a tenth of a launch-bound step, and views don't keep the tensors alive that they are views of. Not for
#: operators of libraries: their implementations may want autograd.
_below: Any = torch._C._AutoDispatchBelowADInplaceOrView


class Interpreter:
    """The engine that runs a program as generated Python."""

    used, why, static = "interpreter", "", False

    def __init__(self, program: Program) -> None:
        self._program = program
        self.source, names = source_of(program)
        self.run: FunctionType = function("run", self.source, names)

    def halted(self, error: Exception) -> tuple[int, dict[int, torch.Tensor]] | None:
        frame = self._frame(error.__traceback__)
        if frame is None or not 0 <= frame.tb_lineno - _FIRST < len(self._program.lines):
            return None
        alive = frame.tb_frame.f_locals
        registers = {int(k[1:]): v for k, v in alive.items() if k[0] == "r" and isinstance(v, torch.Tensor)}
        return frame.tb_lineno - _FIRST, registers

    def _frame(self, trace: TracebackType | None) -> TracebackType | None:
        while trace is not None and trace.tb_frame.f_code is not self.run.__code__:
            trace = trace.tb_next
        return trace


def source_of(program: Program) -> tuple[str, dict[str, Any]]:
    """Returns the text of a function ``run(inputs, numbers)``, and the names that it uses."""
    plain = all(line.op.namespace in ("aten", "prims") for line in program.lines)
    names: dict[str, Any] = {"flat": tensors_of, "guard": _below if plain else nullcontext}
    known: dict[Any, str] = {}
    number = count()

    def constant(value: Any) -> str:
        if value is None or type(value) in (bool, int):
            return repr(value)
        name = f"c{next(number)}"
        names[name] = value
        return name

    def text(value: Any) -> str:
        if isinstance(value, Reg):
            return f"r{value.index}"
        if isinstance(value, Num):
            return f"n{value.index}"
        if isinstance(value, list) and any(isinstance(v, (Reg, Num)) for v in value):
            return f"[{', '.join(map(text, value))}]"
        return constant(value)

    def named(line: Line) -> str:
        function = line.function
        name = known.get(function)
        if name is None:
            name = known[function] = f"f{next(number)}"
            names[name] = function
        return name

    last = {r: i for i, line in enumerate(program.lines) for r in (*line.outs, *operands(line))}
    kept = set(program.outputs)
    dying: dict[int, list[str]] = {}
    for r, i in last.items():
        if r not in kept:
            dying.setdefault(i, []).append(f"r{r}")
    used = sorted({v.index for line in program.lines for v in _flat(line) if isinstance(v, Num)})
    lines = [
        "def run(inputs, numbers):",
        f"    {_unpack([f'r{r}' for r in program.inputs])} = inputs",
        "    " + ("; ".join(f"n{i} = numbers[{i}]" for i in used) or "pass"),
        "    with guard():",
    ]
    for i, line in enumerate(program.lines):
        args = [text(a) for a in line.args] + [f"{k}={text(v)}" for k, v in line.kwargs.items()]
        call = f"{named(line)}({', '.join(args)})"
        if line.outs:
            outs = [f"r{r}" for r in line.outs]
            call = f"{outs[0]} = {call}" if line.single else f"{_unpack(outs)} = {_whole(line, call)}"
        lines.append(f"        {call}" + (f"; del {', '.join(dying[i])}" if i in dying else ""))
    lines.append(f"        return [{', '.join(f'r{r}' for r in program.outputs)}]\n")
    return "\n".join(lines), names


def _whole(line: Line, call: str) -> str:
    """Returns an expression for exactly the tensors of a result; some operators have None or numbers among them."""
    returns = line.op._schema.returns
    return call if len(returns) == len(line.outs) or len(returns) == 1 else f"flat({call})"


def _flat(line: Line) -> list[Any]:
    values = (*line.args, *line.kwargs.values())
    return [v for value in values for v in (value if isinstance(value, list) else (value,))]


def _unpack(names: Sequence[str]) -> str:
    return f"[{', '.join(names)}]"
