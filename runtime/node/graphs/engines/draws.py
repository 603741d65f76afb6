"""Random numbers for compiled programs: drawn by eager's own kernels, in eager's order, before the library runs.

Generated code would reorder the draws, or leave out one that nobody reads and with it a step of the generator. The
values that a line draws depend on geometry only, where they depend on anything; so nothing is lost by drawing first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..program import Line

#: Operators that fill their first argument.
IN_PLACE = frozenset(
    {"bernoulli_", "uniform_", "normal_", "random_", "exponential_", "geometric_", "cauchy_", "log_normal_"}
)

#: Operators for which only the geometry of their first argument matters.
LIKE = frozenset({"native_dropout", "rand_like", "randn_like", "randint_like"})


def draw(line: Line, geometry: Sequence[Any]) -> Tensor:
    """Draws the values that eager draws when it comes to this line, from the global generator."""
    if not geometry:
        result = line.op(*line.args, **line.kwargs)
        assert isinstance(result, Tensor)
        return result
    size, stride, dtype = geometry
    if line.op is torch.ops.aten.native_dropout.default:
        return torch.empty(size, dtype=torch.bool).bernoulli_(1 - line.args[1])
    like = torch.empty_strided(size, stride, dtype=getattr(torch, dtype.removeprefix("torch.")))
    result = line.op(like, *line.args[1:], **line.kwargs)
    assert isinstance(result, Tensor)
    return result


def drawn(line: Line) -> tuple[int, ...]:
    """Returns the outputs of a random line that are drawn values; its other outputs are computed from those."""
    base = line.op.name().partition(".")[0].removeprefix("aten::")
    return line.outs[1:] if base == "native_dropout" else line.outs
