"""The interpreter: a Program as straight-line Python, whose results are those of its calls one by one, to the bit.

One line of source per line of the program, so that a traceback tells which one failed, and its frame what was alive.

A long program is several functions, of which each gives the next what is alive: the compiler keeps the GIL for as long
as it takes for one, and meanwhile no other thread of the node reports, receives, or says that the node is there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import count
from types import FunctionType
from typing import Any

import torch

from ...process.generated_code import function
from ..template import tensors_of
from .program import Line, Num, Program, Reg, operands

#: The line number, in the source, of a piece's first line.
_FIRST = 5
#: The most lines of a piece. It takes a core a tenth of a second to compile so many.
PIECE = 2000
#: Skips autograd's layers between Python and a kernel: nothing records here, and nobody needs version counts. That
#: saves a tenth of a launch-bound step, and views don't keep the tensors alive that they are views of. Not for
#: operators of libraries: their implementations may want autograd.
_below: Any = torch._C._AutoDispatchBelowADInplaceOrView


class Interpreter:
    """The engine that runs a program as generated Python."""

    used, why, static = "interpreter", "", False

    def __init__(self, program: Program, most: int = PIECE) -> None:
        """``most``: the lines of a piece."""
        self._program, self._most = program, most
        sources, names = sources_of(program, most)
        self._pieces: list[FunctionType] = [function("run", source, names) for source in sources]
        self.run: Callable[[Sequence[torch.Tensor], Sequence[Any]], list[torch.Tensor]] = (
            self._pieces[0] if len(self._pieces) == 1 else self._in_turn
        )

    def _in_turn(self, inputs: Sequence[torch.Tensor], numbers: Sequence[Any]) -> list[torch.Tensor]:
        alive: Any = inputs
        for piece in self._pieces:
            alive = piece(alive, numbers)
        return alive  # type: ignore[no-any-return]

    def halted(self, error: Exception) -> tuple[int, dict[int, torch.Tensor]] | None:
        trace, codes = error.__traceback__, [piece.__code__ for piece in self._pieces]
        while trace is not None and trace.tb_frame.f_code not in codes:
            trace = trace.tb_next
        if trace is None:
            return None
        first = self._most * codes.index(trace.tb_frame.f_code)
        at = first + trace.tb_lineno - _FIRST
        if not first <= at < min(first + self._most, len(self._program.lines)):
            return None
        alive = trace.tb_frame.f_locals
        registers = {int(k[1:]): v for k, v in alive.items() if k[0] == "r" and isinstance(v, torch.Tensor)}
        return at, registers


def sources_of(program: Program, most: int) -> tuple[list[str], dict[str, Any]]:
    """Returns the texts of functions ``run(alive, numbers)``, each of so many lines at ``most``, and the names that
    they use. Each gets what the one before returns, the first the inputs."""
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
    pieces: list[str] = []
    alive = list(program.inputs)
    for first in range(0, len(program.lines) or 1, most):
        here = program.lines[first : first + most]
        used = sorted({v.index for line in here for v in _flat(line) if isinstance(v, Num)})
        lines = [
            "def run(alive, numbers):",
            # what another piece has given is nobody else's: a list that kept it would keep what dies here
            f"    {_unpack([f'r{r}' for r in alive])} = alive" + ("; alive.clear()" if first else ""),
            "    " + ("; ".join(f"n{i} = numbers[{i}]" for i in used) or "pass"),
            "    with guard():",
        ]
        for i, line in enumerate(here, first):
            args = [text(a) for a in line.args] + [f"{k}={text(v)}" for k, v in line.kwargs.items()]
            call = f"{named(line)}({', '.join(args)})"
            if line.outs:
                outs = [f"r{r}" for r in line.outs]
                call = f"{outs[0]} = {call}" if line.single else f"{_unpack(outs)} = {_whole(line, call)}"
            lines.append(f"        {call}" + (f"; del {', '.join(dying[i])}" if i in dying else ""))
        alive += [r for line in here for r in line.outs]
        over = first + most
        if over < len(program.lines):
            alive = [r for r in dict.fromkeys(alive) if r in kept or last.get(r, -1) >= over]
        else:
            alive = list(program.outputs)
        lines.append(f"        return [{', '.join(f'r{r}' for r in alive)}]\n")
        pieces.append("\n".join(lines))
    return pieces, names


def _whole(line: Line, call: str) -> str:
    """Returns an expression for exactly the tensors of a result; some operators have None or numbers among them."""
    returns = line.op._schema.returns
    return call if len(returns) == len(line.outs) or len(returns) == 1 else f"flat({call})"


def _flat(line: Line) -> list[Any]:
    values = (*line.args, *line.kwargs.values())
    return [v for value in values for v in (value if isinstance(value, list) else (value,))]


def _unpack(names: Sequence[str]) -> str:
    return f"[{', '.join(names)}]"
