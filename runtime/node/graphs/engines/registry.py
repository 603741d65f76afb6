"""The table of engines by the names that users give (``engine="..."``). A new one: one class, and one line here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from ....process.spelling import shown
from ..interpreter import Interpreter
from ..program import Engine, Program
from .builder import Builder
from .cuda import CudaGraph
from .switching import SwitchingEngine

#: The least number of lines of a program that "auto" has compiled.
WORTH = 4


class Auto:
    """The engine "auto": a CUDA graph for a program on a CUDA device, else compiled code, if that is faster."""

    def __init__(self, program: Program, builder: Builder) -> None:
        self._program, self._builder = program, builder
        self._engine: Engine = Interpreter(program)
        self._chosen = False
        self._short = False

    @property
    def used(self) -> str:
        return self._engine.used

    @property
    def why(self) -> str:
        return "so short a program is not compiled" if self._short else self._engine.why

    @property
    def static(self) -> bool:
        return self._engine.static

    def run(self, inputs: Sequence[Tensor], numbers: Sequence[Any]) -> Sequence[Tensor]:
        if not self._chosen:
            self._chosen = True
            if any(t.device.type == "cuda" for t in inputs):
                self._engine = CudaGraph(self._program, self._engine)
            elif len(self._program.lines) < WORTH:
                self._short = True
            else:
                self._engine = SwitchingEngine(self._program, self._engine, "auto", self._builder)
        return self._engine.run(inputs, numbers)

    def halted(self, error: Exception) -> tuple[int, dict[int, Tensor]] | None:
        return self._engine.halted(error)


ENGINES: dict[str, Callable[[Program, Builder], Engine]] = {
    "interpreter": lambda program, builder: Interpreter(program),
    "inductor": lambda program, builder: SwitchingEngine(program, Interpreter(program), "inductor", builder),
    "cudagraph": lambda program, builder: CudaGraph(program, Interpreter(program)),
    "auto": Auto,
}


def check_engine(name: str) -> str:
    """Returns the name of an engine. Raises ValueError for one that does not exist."""
    if name not in ENGINES:
        raise ValueError(f"engine {shown(name)} is not known; the engines are {', '.join(ENGINES)}")
    return name
