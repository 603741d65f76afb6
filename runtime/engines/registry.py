"""Engines by the names that users give (``engine="..."``). A new one: one class, and one line here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from ..interpreter import Interpreter
from ..program import Engine, Program
from .builder import Builder
from .choice import Choice
from .cuda import CudaGraph


class Auto:
    """An Engine: a CUDA graph for what is on a CUDA device, compiled code for other programs, if it is faster."""

    def __init__(self, program: Program, builder: Builder) -> None:
        self._program, self._builder = program, builder
        self._engine: Engine | None = None

    @property
    def static(self) -> bool:
        return self._engine is not None and self._engine.static

    def run(self, inputs: Sequence[Tensor], numbers: Sequence[Any]) -> Sequence[Tensor]:
        if self._engine is None:
            plain = Interpreter(self._program)
            cuda = any(t.device.type == "cuda" for t in inputs)
            self._engine = CudaGraph(self._program, plain) if cuda else _compiled("auto")(self._program, self._builder)
        return self._engine.run(inputs, numbers)

    def halted(self, error: Exception) -> tuple[int, dict[int, Tensor]] | None:
        return None if self._engine is None else self._engine.halted(error)


def _compiled(name: str) -> Callable[[Program, Builder], Engine]:
    return lambda program, builder: Choice(program, Interpreter(program), name, builder)


ENGINES: dict[str, Callable[[Program, Builder], Engine]] = {
    "interpreter": lambda program, builder: Interpreter(program),
    "inductor": _compiled("inductor"),
    "cudagraph": lambda program, builder: CudaGraph(program, Interpreter(program)),
    "auto": Auto,
}
