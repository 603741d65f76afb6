"""Chooses a program's engine: the interpreter until compiled code is ready, then the one asked for, or the faster."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from time import perf_counter
from typing import Any

from torch import Tensor

from ..program import Engine, Program
from . import listing
from .builder import NO_COMPILER_TEXT, Build, Builder
from .compiled import Compiled

_log = logging.getLogger("disttensor")

#: The number of runs of each engine that "auto" compares; the fastest of them counts.
TRIALS = 5


class SwitchingEngine:
    """The engine that chooses: a program's interpreter and, once there is one, its compiled form.

    ``engine``: "inductor" takes the compiled form whenever it is there; "auto" only if it has been the faster one.
    """

    static = False

    def __init__(self, program: Program, plain: Engine, engine: str, builder: Builder) -> None:
        self._program, self._plain, self._engine, self._builder = program, plain, engine, builder
        self._build: Build | None = None
        self._given: tuple[listing.Given, ...] = ()
        self._compiled: Compiled | None = None
        #: seconds of the last runs, by whether they were compiled ones
        self._measured: dict[bool, list[float]] = {False: [], True: []}
        self._settled = False
        self.why = ""  #: the reason for staying with the interpreter
        self.used = "interpreter"  #: the engine that ran last

    def run(self, inputs: Sequence[Tensor], numbers: Sequence[Any]) -> Sequence[Tensor]:
        """Runs the program. Raises what a line of the program raises."""
        if self._settled and self._compiled is None:
            return self._plain.run(inputs, numbers)
        if self._build is None:
            self._start(inputs)
        if self._compiled is None and self._build is not None and self._build.done.is_set():
            self._finish()
        if self._settled:
            return self._once(self._compiled is not None, inputs, numbers)
        compiled = self._compiled is not None and (
            self._engine != "auto" or len(self._measured[False]) >= TRIALS or not self._measured[True]
        )
        began = perf_counter()
        outputs = self._once(compiled, inputs, numbers)
        self._measured[self.used != "interpreter"].append(perf_counter() - began)
        del self._measured[False][:-TRIALS]
        if len(self._measured[True]) >= TRIALS:
            self._settle_choice()
        return outputs

    def halted(self, error: Exception) -> tuple[int, dict[int, Tensor]] | None:
        return self._plain.halted(error) if self.used == "interpreter" else None

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until it is known whether there is a compiled form; False when the time (seconds) is over."""
        return self._build is None or self._build.done.wait(timeout)

    def _once(self, compiled: bool, inputs: Sequence[Tensor], numbers: Sequence[Any]) -> Sequence[Tensor]:
        if compiled and self._compiled is not None:
            self.used = "inductor"
            outputs = self._compiled.run(inputs, numbers)
            if outputs is not None:
                return outputs
        self.used = "interpreter"
        return self._plain.run(inputs, numbers)

    def _start(self, inputs: Sequence[Tensor]) -> None:
        try:
            self._given = listing.input_geometry(inputs)
            self._build = self._builder.build(listing.dump(self._program, self._given))
        except listing.NotCompilable as e:
            self._stay(str(e))
        except Exception as e:  # no cache folder, say: the replay at hand goes on
            self._stay(f"{type(e).__name__}: {e}")

    def _finish(self) -> None:
        assert self._build is not None
        if self._build.plan is None:
            self._stay(self._build.why)
            return
        try:
            self._compiled = Compiled(self._program, self._given, self._build.plan, self._build.library())
        except Exception as e:  # a library that this process can't load
            self._stay(f"{type(e).__name__}: {e}")

    def _stay(self, why: str) -> None:
        if why == NO_COMPILER_TEXT:
            if not self._builder.warned:
                _log.warning("disttensor: graphs stay with the interpreter: %s", why)
            self._builder.warned = True
        elif self._engine != "auto":
            _log.warning("disttensor: a graph stays with the interpreter: %s", why)
        self.why, self._compiled, self._settled, self.used = why, None, True, "interpreter"

    def _settle_choice(self) -> None:
        interpreted, compiled = self._measured[False], self._measured[True]
        if self._engine == "auto" and interpreted and min(interpreted) < min(compiled):
            self._stay("interpreting it is faster")
        self._settled = True
