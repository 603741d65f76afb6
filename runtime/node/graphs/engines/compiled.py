"""Calls the library of a compiled program, with all that is done around the call."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor

from ...store import memory
from ..program import Program, Reg
from . import listing
from .draws import draw

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
        self._arguments: list[Tensor] = []
        self._place: dict[int, int] = {}  #: input -> argument
        self._memories: list[int] = []  #: the memory of each input
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
        """Takes input tensors, if they have the geometry that the program was compiled for; returns whether they do."""
        for i, tensor in enumerate(inputs):
            if tensor is self._last[i]:
                continue
            if self._last[i] is None or not listing.like(tensor, self._given[i]):
                return self._adopt_all(inputs)
            self._memories[i] = listing.whose(tensor, i)
            self._arguments[self._place[i]] = self._last[i] = tensor
        return len(set(self._memories)) == self._apart or self._adopt_all(inputs)

    def _adopt_all(self, inputs: Sequence[Tensor]) -> bool:
        try:
            fits = listing.input_geometry(inputs) == self._given
        except listing.NotCompilable:
            fits = False
        self._last = [*inputs] if fits else [None] * len(inputs)
        if not fits:
            return False
        self._arguments = []
        for kind, i, *more in self._plan["arguments"]:
            if kind == "input":
                self._place[i] = len(self._arguments)
                self._arguments.append(inputs[i])
            elif kind == "base":
                self._arguments.append(inputs[i].as_strided((more[0],), (1,), 0))
        self._memories = [listing.whose(t, i) for i, t in enumerate(inputs)]
        self._apart = len(set(self._memories))
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
