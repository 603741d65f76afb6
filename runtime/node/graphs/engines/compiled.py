"""Calls the library of a compiled program, with all that is done around the call."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from itertools import compress
from operator import attrgetter, is_, is_not
from typing import Any

import torch
from torch import Tensor

from ...store import memory
from ..program import Program, Reg
from . import listing
from .draws import draw

#: Compares tensors with earlier ones, as torch.compile does: class, dispatch keys (and so layout, device, whether it is
#: a lazy conjugate or negative), dtype, whether it wants a gradient, sizes and strides.
_Guards: Any = torch._C._dynamo.guards.TensorGuards  # whose declaration has other types than it takes
_key = attrgetter("_cdata")  #: of a storage: that of ``memory``

#: A compiled library: takes the arguments of a CompiledCall, returns the registers that it says are made.
Library = Callable[[list[Tensor]], list[Tensor]]


class Compiled:
    """A compiled program. ``run(inputs, numbers)`` returns the outputs, or None: then the interpreter has to run."""

    def __init__(self, program: Program, given: tuple[listing.Given, ...], plan: Any, library: Library) -> None:
        """``plan``: the CompiledCall, as JSON has it."""
        self._program = program
        self._given = given
        self._plan = plan
        self._library = library
        self._last: list[Tensor | None] = [None] * len(given)
        #: looks at the geometry of all inputs, in one call of C's; None where ``_last`` are no inputs that fit
        self._guards: Any = None
        self._arguments: list[Tensor] = []
        #: the arguments, as indices of the inputs and, behind these, of ``_bases``
        self._at: list[int] = []
        self._bases: list[Tensor] = []
        self._shared = [g.extent > 0 for g in given]  #: whether an input shares its memory with another one
        self._sized = [0 not in g.size for g in given]  #: whether an input has elements, and so memory
        self._apart = 0  #: the number of different memories
        #: indices of the library's results that have to be copied; known after a run
        self._loose: list[int] | None = None
        self._draws = [(program.lines[i], geometry) for i, *geometry in self._plan["draws"]]
        self._fence = [program.lines[i] for i in self._plan["fence"]]
        registers = list(listing.counted(program))
        self._checks = [(registers[r], low, high, also) for r, low, high, also in self._plan["checks"]]
        self._numbers = array("d", [0.0] * program.numbers)
        self._vector = torch.frombuffer(self._numbers, dtype=torch.float64) if program.numbers else None
        self._results = [_result(*how) for how in self._plan["results"]]

    def run(self, inputs: Sequence[Tensor], numbers: Sequence[Any]) -> list[Tensor] | None:
        """Runs the program; returns its outputs.

        None: the library can't take these inputs, and nothing was written and no random number drawn.
        """
        if self._vector is not None:
            try:
                self._numbers[:] = array("d", numbers)
            except (TypeError, OverflowError):  # a complex number, say
                return None
        if not all(map(is_, self._last, inputs)) and not self._take_inputs(inputs):
            return None
        if self._checks and not self._indices_fit(inputs):
            return None
        arguments = self._arguments
        draws: list[Tensor] = []
        if self._draws:
            draws = [draw(line, geometry) for line, geometry in self._draws]
            arguments = [*arguments, *draws]
        if self._vector is not None:
            arguments = [*arguments, self._vector]
        made = self._library(arguments)
        if self._loose is None:
            self._loose = _loose(made, arguments, self._plan["made"])
        for k in self._loose:
            _, size, stride = self._plan["made"][k]
            made[k] = torch.empty_strided(size, stride, dtype=made[k].dtype).copy_(made[k])
        return [result(inputs, draws, made) for result in self._results]

    def _take_inputs(self, inputs: Sequence[Tensor]) -> bool:
        """Takes input tensors, if they have the geometry that the program was compiled for; returns whether they do.

        A compiled backward is given more than a hundred anew at each step. What is looked at of them is looked at by
        functions of C's, as many for all of them as for one; a difference, even one that is none to the program, has
        ``_adopt_all`` look at each.
        """
        if (
            self._guards is None
            or not self._guards.check(*inputs)
            or any(compress(self._shared, map(is_not, inputs, self._last)))
            or self._count_apart(inputs) != self._apart
        ):
            return self._adopt_all(inputs)
        self._take_fitting(inputs)
        return True

    def _count_apart(self, inputs: Sequence[Tensor]) -> int:
        """Returns the number of different memories of inputs: of those without elements, each has its own."""
        return len({*map(_key, map(Tensor.untyped_storage, compress(inputs, self._sized)))})

    def _take_fitting(self, inputs: Sequence[Tensor]) -> None:
        self._last = [*inputs]
        self._arguments = [*map([*inputs, *self._bases].__getitem__, self._at)]

    def _adopt_all(self, inputs: Sequence[Tensor]) -> bool:
        try:
            fits = listing.input_geometry(inputs) == self._given
        except listing.NotCompilable:
            fits = False
        if not fits:
            self._last, self._guards = [None] * len(inputs), None
            return False
        sizes, strides = [[*g.size] for g in self._given], [[*g.stride] for g in self._given]
        self._guards = _Guards(*inputs, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
        self._at, self._bases = [], []
        for kind, i, *more in self._plan["arguments"]:
            if kind == "input":
                self._at.append(i)
            elif kind == "base":
                self._at.append(len(inputs) + len(self._bases))
                self._bases.append(inputs[i].as_strided((more[0],), (1,), 0))
        self._apart = self._count_apart(inputs)
        self._take_fitting(inputs)
        return True

    def _indices_fit(self, inputs: Sequence[Tensor]) -> bool:
        e = dict(zip(self._program.inputs, inputs, strict=True))
        for line in self._fence:
            result = line.function(*_fill(line.args, e), **{k: _fill(v, e) for k, v in line.kwargs.items()})
            for register, tensor in zip(line.outs, [result] if line.single else result, strict=True):
                e[register] = tensor
        return all(_within(e[register], low, high, also) for register, low, high, also in self._checks)


def _loose(made: Sequence[Tensor], arguments: Sequence[Tensor], expected: Sequence[Any]) -> list[int]:
    """Returns the indices of results that do not fill a memory of their own, as eager's do.

    The library leaves out copies, for instance.
    """
    found: list[int] = []
    seen = {memory(t) for t in arguments}
    for k, (tensor, (_, _, stride)) in enumerate(zip(made, expected, strict=True)):
        whole = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.itemsize
        if memory(tensor) in seen or not whole or list(tensor.stride()) != stride:
            found.append(k)
        seen.add(memory(tensor))
    return found


def _within(index: Tensor, low: int, high: int, also: int | None) -> bool:
    least, most = torch.aminmax(index)
    if low <= least.item() and most.item() < high:
        return True
    return also is not None and not bool((((index < low) | (index >= high)) & (index != also)).any())


def _fill(value: Any, e: dict[int, Tensor]) -> Any:
    if isinstance(value, Reg):
        return e[value.index]
    return [_fill(v, e) for v in value] if isinstance(value, (list, tuple)) else value


Result = Callable[[Sequence[Tensor], Sequence[Tensor], Sequence[Tensor]], Tensor]


def _result(source: str, i: int, *view: Any) -> Result:
    at = ("input", "draw", "made").index(source)
    if not view:
        return lambda *sources: sources[at][i]
    size, stride, offset = view

    def result(*sources: Sequence[Tensor]) -> Tensor:
        owner = sources[at][i]
        return owner.as_strided(size, stride, int(owner.storage_offset()) + offset)

    return result
