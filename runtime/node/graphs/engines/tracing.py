"""Traces a Program as a function of tensors only, for torch.export: draws and numbers are arguments of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from ..program import Line, Num, Program, Reg
from .draws import draw, drawn
from .fitness import CompiledCall, inputs_of, tensors_of
from .listing import Given, NotCompilable
from .numbers import call, call_with_tensors

#: Operators that are sums with a factor.
ALPHA = frozenset(
    f"aten::{base}{tail}" for base in ("add", "sub", "rsub", "_foreach_add", "_foreach_sub") for tail in ("", "_")
)


class Traced(torch.nn.Module):
    """A program as a module to export.

    ``forward(*arguments)`` takes the plan's arguments and, if the program has numbers, one float64 vector of those.
    """

    def __init__(self, program: Program, given: Sequence[Given], plan: CompiledCall) -> None:
        super().__init__()
        self.program, self.given, self.plan = program, given, plan

    def forward(self, *arguments: Tensor) -> tuple[Tensor, ...]:
        e: dict[int, Tensor] = {}
        draws: list[Tensor] = []
        bases: dict[int, Tensor] = {}
        for (kind, i, *_), argument in zip(self.plan.arguments, arguments, strict=False):
            if kind == "input":
                e[self.program.inputs[i]] = argument
            elif kind == "base":
                bases[i] = argument
            else:
                draws.append(argument)
        for register, g in zip(self.program.inputs, self.given, strict=True):
            if g.memory in bases:
                e[register] = bases[g.memory].as_strided(g.size, g.stride, g.offset)
        lines = {i: draw for (i, *_), draw in zip(self.plan.draws, draws, strict=True)}
        numbers = arguments[-1] if self.program.numbers else None
        for i, line in enumerate(self.program.lines):
            self._line(line, e, lines.get(i), numbers)
        return tuple(e[register] for register, *_ in self.plan.made)

    def _line(self, line: Line, e: dict[int, Tensor], draw: Tensor | None, numbers: Tensor | None) -> None:
        if draw is not None:
            _use(line, e, draw)
            return
        filled: set[int] = set()
        keep: list[Tensor] = []  # an id belongs to a tensor only while that lives

        def fill(value: Any) -> Any:
            if isinstance(value, Reg):
                return e[value.index]
            if isinstance(value, Num):
                assert numbers is not None
                keep.append(numbers[value.index])
                filled.add(id(keep[-1]))
                return keep[-1]
            return [fill(v) for v in value] if isinstance(value, list) else value

        args, kwargs = tuple(fill(a) for a in line.args), {k: fill(v) for k, v in line.kwargs.items()}
        if line.op is torch.ops.aten.native_batch_norm.default:
            results = tensors_of(_batch_norm(*args))
        elif filled or _scaled(line):
            results = tensors_of(call_with_tensors(line.op, args, kwargs, frozenset(filled)))
        else:
            results = tensors_of(call(line.op, args, kwargs))
        for register, result in zip(line.outs, results, strict=bool(line.outs)):
            e[register] = result


def _scaled(line: Line) -> bool:
    """Returns whether the line is a sum with a factor.

    Inductor (2.13) forgets the factor where the other summand is a matrix product.
    """
    alpha = line.kwargs.get("alpha", 1)
    return alpha != 1 and line.op.name().partition(".")[0] in ALPHA


def _use(line: Line, e: dict[int, Tensor], draw: Tensor) -> None:
    """Computes a random line's outputs from the tensor that was drawn."""
    first = line.args[0] if line.args else None
    if line.op is torch.ops.aten.native_dropout.default:
        assert isinstance(first, Reg)
        p = line.args[1]
        out, mask = line.outs
        e[out] = e[first.index] * draw * (0.0 if p == 1 else 1 / (1 - p))
        e[mask] = draw
    elif drawn(line):
        (out,) = line.outs
        e[out] = draw
    else:
        assert isinstance(first, Reg)
        e[first.index].copy_(draw)


def _batch_norm(x: Tensor, weight: Any, bias: Any, mean: Any, var: Any, training: bool, m: float, eps: float) -> Any:
    """Does batch norm by operators whose schemas say that they write the running statistics.

    The schema of native_batch_norm doesn't.
    """
    legit = torch.ops.aten._native_batch_norm_legit
    if mean is None or var is None:
        return legit.no_stats(x, weight, bias, training, m, eps)
    if not training:
        return torch.ops.aten._native_batch_norm_legit_no_training(x, weight, bias, mean, var, m, eps)
    return legit.default(x, weight, bias, mean, var, training, m, eps)


def examples(given: Sequence[Given], plan: CompiledCall, program: Program) -> list[Tensor]:
    """Makes arguments of the right geometry."""
    inputs = inputs_of(given)
    out: list[Tensor] = []
    for kind, i, *more in plan.arguments:
        if kind == "input":
            out.append(inputs[i])
        elif kind == "base":
            out.append(torch.empty(more[0], dtype=given[i].dtype))
        else:
            out.append(draw(program.lines[plan.draws[i][0]], plan.draws[i][1:]))
    return [*out, torch.zeros(program.numbers, dtype=torch.float64)] if program.numbers else out


def check(traced: Traced, arguments: Sequence[Tensor]) -> None:
    """Raises NotCompilable if the traced program's results do not have the geometry that eager's have."""
    with FakeTensorMode() as mode:
        results = traced(*(mode.from_tensor(a) for a in arguments))
    for (register, size, stride), result in zip(traced.plan.made, results, strict=True):
        if list(result.shape) != size or not _same_strides(size, result.stride(), stride):
            raise NotCompilable(f"register {register} would come out as {tuple(result.shape)}, {result.stride()}")


def _same_strides(size: Sequence[int], one: Sequence[int], other: Sequence[int]) -> bool:
    """Compares strides where they matter: fake tensors are not always right along a dimension of one element."""
    return 0 in size or all(n == 1 or a == b for n, a, b in zip(size, one, other, strict=True))
