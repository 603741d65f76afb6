"""A program on one CUDA device as a CUDA graph: the engine of CUDA nodes.

A CUDA graph does the same to the same memory at each replay. So its outputs are the same tensors each time
(``Engine.static``), and an input that turns out to be another tensor gets a buffer of its own, into which it is copied
from then on. Numbers that change are read from the device's memory (numbers.py).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache
from operator import is_
from typing import Any

import torch
from torch import Tensor

from ...store import memory
from ...template import tensors_of
from ..program import Engine, Line, Num, Program, Reg, operands, writers
from .listing import NotCompilable
from .numbers import call_with_tensors

_log = logging.getLogger("disttensor")

#: Replays by the interpreter before the program is captured: libraries make their handles and workspaces at first use.
WARM_UPS = 3
#: The most captures: each input that changes may need another one.
CAPTURES = 8


class CudaGraph:
    """The engine "cudagraph": captures the program as a CUDA graph, and replays that."""

    static = True

    def __init__(self, program: Program, plain: Engine) -> None:
        self._program, self._plain = program, plain
        self._runs = 0
        self._captures = 0
        self._writes = frozenset(program.inputs.index(r) for r in writers(program))
        self._numbered = any(_has_number(line) for line in program.lines)
        self._graph: Any = None
        self._inputs: list[Tensor] = []  #: the tensors as they were captured; the graph needs their memory
        self._own: dict[int, Tensor] = {}  #: input -> the buffer that stands for it
        self._vector: Tensor | None = None
        self._numbers: Sequence[Any] = ()
        self._outputs: list[Tensor] = []
        self.why = ""  #: the reason for staying with the interpreter
        self.used = "interpreter"  #: the engine that ran last

    def run(self, inputs: Sequence[Tensor], numbers: Sequence[Any]) -> Sequence[Tensor]:
        self._runs += 1
        self.used = "interpreter"
        if self.why or self._runs <= WARM_UPS:
            return self._plain.run(inputs, numbers)
        try:
            if self._graph is None or not all(map(is_, self._inputs, inputs)):
                self._take_inputs(inputs, numbers)
        except Exception as e:  # an operator that waits for the device can't be captured, say: nothing has run
            self.why, self._graph, self._own, self._outputs, self._inputs = str(e) or type(e).__name__, None, {}, [], []
            _log.warning("disttensor: a graph stays with the interpreter: %s", self.why)
            return self._plain.run(inputs, numbers)
        self.used = "cudagraph"
        for i, buffer in self._own.items():
            buffer.copy_(inputs[i])
        if self._vector is not None and numbers != self._numbers:
            # from memory that is not pinned, which has been read when this returns
            self._vector.copy_(torch.tensor(numbers, dtype=torch.float64), non_blocking=True)
            self._numbers = numbers
        self._graph.replay()
        return self._outputs

    def halted(self, error: Exception) -> tuple[int, dict[int, Tensor]] | None:
        return self._plain.halted(error) if self.used == "interpreter" else None

    def _take_inputs(self, inputs: Sequence[Tensor], numbers: Sequence[Any]) -> None:
        """Takes these inputs: captures the program, if it must. Raises NotCompilable, or what capturing raises."""
        if self._graph is not None:
            for i, (old, new) in enumerate(zip(self._inputs, inputs, strict=True)):
                if old is not new and i not in self._own:
                    self._buffer(i, old, inputs)
                    self._graph = None
                elif old is not new and not _alike(old, new):
                    raise NotCompilable(f"input {i} changes its geometry")
        self._inputs = list(inputs)
        if self._graph is None:
            self._capture(numbers)

    def _buffer(self, i: int, old: Tensor, inputs: Sequence[Tensor]) -> None:
        new = inputs[i]
        if i in self._writes or any(memory(new) == memory(t) for k, t in enumerate(inputs) if k != i):
            raise NotCompilable(f"input {i} changes, and is written or shares memory")
        if any(memory(out) == memory(self._inputs[i]) for out in self._outputs):
            raise NotCompilable(f"input {i} changes, and an output shares its memory")
        if not _alike(old, new):
            raise NotCompilable(f"input {i} changes its geometry")
        self._own[i] = torch.empty_strided(new.shape, new.stride(), dtype=new.dtype, device=new.device)

    def _capture(self, numbers: Sequence[Any]) -> None:
        self._captures += 1
        if self._captures > CAPTURES:
            raise NotCompilable("its inputs keep changing")
        devices = {t.device for t in self._inputs}
        if len(devices) != 1 or not _on_cuda(device := devices.pop()):
            raise NotCompilable("a CUDA graph's tensors are on one CUDA device")
        for line in self._program.lines:
            if next(operands(line), None) is None and not _same(line.kwargs.get("device"), device):
                raise NotCompilable(f"{line.op.name()} makes a tensor elsewhere")
        if self._numbered and self._vector is None:
            if not all(isinstance(n, (int, float)) for n in numbers):
                raise NotCompilable("a number that changes is not real")
            self._vector = torch.tensor(numbers, dtype=torch.float64).to(device)
            self._numbers = numbers
        graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream(device)
        with torch.cuda.device(device):
            try:
                # torch waits for the device first; other threads of this process may give it work meanwhile
                with torch.cuda.graph(graph, stream=_capturing(device), capture_error_mode="thread_local"):
                    self._outputs = self._trace([self._own.get(i, t) for i, t in enumerate(self._inputs)])
            finally:
                torch.cuda.set_stream(current)  # where capturing fails torch stays on the stream that has captured
        if any(t.device != device for t in self._outputs):
            raise NotCompilable("a CUDA graph's tensors are on one CUDA device")
        self._graph = graph

    def _trace(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Does the program's lines, with the device's numbers where they take some."""
        e = dict(zip(self._program.inputs, inputs, strict=True))
        for line in self._program.lines:
            keep: list[Tensor] = []

            def fill(value: Any, keep: list[Tensor] = keep) -> Any:
                if isinstance(value, Reg):
                    return e[value.index]
                if isinstance(value, Num):
                    assert self._vector is not None
                    keep.append(self._vector[value.index])
                    return keep[-1]
                return [fill(v) for v in value] if isinstance(value, list) else value

            args, kwargs = tuple(map(fill, line.args)), {k: fill(v) for k, v in line.kwargs.items()}
            if keep:
                result = call_with_tensors(line.op, args, kwargs, frozenset(map(id, keep)))
            else:
                result = line.function(*args, **kwargs)
            for register, tensor in zip(line.outs, tensors_of(result), strict=bool(line.outs)):
                e[register] = tensor
        return [e[r] for r in self._program.outputs]


@cache
def _capturing(device: torch.device) -> torch.cuda.Stream:
    """Returns the stream on which programs of a device are captured. torch's own is one of the first device that has
    captured anything, and work of another device is not captured there."""
    return torch.cuda.Stream(device)


def _has_number(line: Line) -> bool:
    values = (*line.args, *line.kwargs.values())
    return any(isinstance(v, Num) for value in values for v in (value if isinstance(value, list) else (value,)))


def _alike(one: Tensor, other: Tensor) -> bool:
    return (one.dtype, one.shape, one.stride(), one.device) == (other.dtype, other.shape, other.stride(), other.device)


def _same(device: torch.device | None, other: torch.device) -> bool:
    return device is not None and (device.type, device.index or 0) == (other.type, other.index or 0)


def _on_cuda(device: torch.device) -> bool:
    return device.type == "cuda"
