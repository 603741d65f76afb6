"""Programs without a session: what a function calls, recorded locally, and a plain interpreter of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from disttensor.runtime.node.graphs.engines import fitness, listing, tracing
from disttensor.runtime.node.graphs.engines.builder import Build, Builder
from disttensor.runtime.node.graphs.engines.registry import ENGINES
from disttensor.runtime.node.graphs.engines.switching import SwitchingEngine
from disttensor.runtime.node.graphs.interpreter import Interpreter
from disttensor.runtime.node.graphs.program import Line, Num, Program, Reg
from disttensor.runtime.node.store import memory
from disttensor.runtime.node.template import tensors_of

aten = torch.ops.aten

#: The number k of a program, while it is recorded: a float that stands for nothing else.
SENTINELS = (0.123456789012345, 0.234567890123456, 0.345678901234567)


class Recorder(TorchDispatchMode):
    """Records every call below autograd; a tensor that no call has made is an input."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[Line] = []
        self.inputs: list[tuple[int, Tensor]] = []
        self._known: dict[object, int] = {}
        self._alive: list[object] = []  # so that no memory is another one's under the same name

    def register(self, tensor: Tensor) -> int:
        known = self._known.get(_name(tensor))
        if known is None:
            known = self._new(tensor)
            self.inputs.append((known, tensor))
        return known

    def _new(self, tensor: Tensor) -> int:
        self._alive += [tensor, tensor.untyped_storage()]
        register = len(self._alive) // 2 - 1
        self._known[_name(tensor)] = register
        return register

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if op.namespace == "profiler" or op in (aten.detach.default, aten._local_scalar_dense.default):
            return op(*args, **kwargs)
        held = tuple(self._hold(a) for a in args), {k: self._hold(v) for k, v in kwargs.items()}
        result = op(*args, **kwargs)
        writes = any(a.alias_info is not None and a.alias_info.is_write for a in op._schema.arguments)
        outs = () if writes else tuple(self._new(t) for t in tensors_of(result))
        self.lines.append(Line(op, *held, outs, isinstance(result, Tensor)))
        return result

    def _hold(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return Reg(self.register(value))
        if isinstance(value, (list, tuple)):
            return [self._hold(v) for v in value]
        for k, sentinel in enumerate(SENTINELS):
            if type(value) is float and abs(value) == sentinel:
                return Num(k)
        return value


def _name(tensor: Tensor) -> object:
    return (memory(tensor), tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype)


def record(function: Callable[[], Sequence[Tensor]], numbers: int = 0) -> tuple[Program, list[Tensor]]:
    """What ``function`` does, and the tensors that it uses without making them, with what it found in them."""
    recorder = Recorder()
    with recorder:
        results = function()
    outputs = tuple(recorder.register(t) for t in results)
    return Program(tuple(recorder.lines), tuple(r for r, _ in recorder.inputs), outputs, numbers), [
        t for _, t in recorder.inputs
    ]


def interpret(program: Program, inputs: Sequence[Tensor], numbers: Sequence[float] = ()) -> list[Tensor]:
    """Line by line, as eager does it."""
    e = dict(zip(program.inputs, inputs, strict=True))

    def fill(value: Any) -> Any:
        if isinstance(value, Reg):
            return e[value.index]
        if isinstance(value, Num):
            return numbers[value.index]
        return [fill(v) for v in value] if isinstance(value, list) else value

    with torch.no_grad():
        for line in program.lines:
            result = line.function(*map(fill, line.args), **{k: fill(v) for k, v in line.kwargs.items()})
            for register, tensor in zip(line.outs, tensors_of(result), strict=bool(line.outs)):
                e[register] = tensor
    return [e[r] for r in program.outputs]


def copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies of the same geometry, that share memory where the originals do."""
    memories = {}
    for t in tensors:
        memories.setdefault(memory(t), t.untyped_storage().clone())
    return [
        torch.empty(0, dtype=t.dtype, device=t.device).set_(
            memories[memory(t)], t.storage_offset(), t.shape, t.stride()
        )
        for t in tensors
    ]


def steps_of(x: Tensor) -> list[int]:
    """Strides, but for dimensions of one element: fake tensors are not always right about those."""
    return [s for n, s in zip(x.shape, x.stride(), strict=True) if n != 1]


class Here(Builder):
    """Builds at once, and in this process: the library is the traced program itself, run by eager."""

    def build(self, text: str) -> Build:
        build = Build(text, "", 1)
        try:
            program, given = listing.parse(text)
            with FakeTensorMode():
                plan = fitness.Analysis(program, given).plan
            module = tracing.Traced(program, given, plan)
            with torch.random.fork_rng():  # examples of draws are drawn
                tracing.check(module, tracing.examples(given, plan, program))
            build.plan = json.loads(json.dumps(plan.plain()))
            build.library = lambda: lambda arguments: list(module(*arguments))  # type: ignore[method-assign]
        except listing.NotCompilable as e:
            build.why = str(e)
        build.done.set()
        BUILT.append(build.why)
        return build


#: Why each program that this process has built stays with the interpreter; "" if it does not.
BUILT: list[str] = []


def built() -> list[str]:
    return BUILT


def trace_on_nodes() -> None:
    """For dt.run: makes "inductor" the traced form on this node, which needs no C++ compiler, and no time."""
    ENGINES["inductor"] = lambda program, builder: SwitchingEngine(program, Interpreter(program), "auto", Here())


# ---- random programs -------------------------------------------------------------------------------------------------

KINDS = 24

#: What to do, and indices of the tensors to do it with.
STEPS = st.tuples(st.integers(0, KINDS - 1), st.integers(0, 7), st.integers(0, 7))


def start() -> list[Tensor]:
    """Tensors to begin with, some of which share memory."""
    base = torch.randn(4, 4)
    return [base, base.t(), base[1:3], torch.randn(4, 4), torch.arange(4.0)]


def play(steps: Sequence[tuple[int, int, int]], outside: Sequence[Tensor]) -> list[Tensor]:
    """A program of these steps, with three numbers; gives what some of them made."""
    pool = list(outside)
    a, b, c = SENTINELS
    for kind, i, j in steps:
        x, y = pool[i % len(pool)], pool[j % len(pool)]
        square = torch.zeros(4, 4) + x.sum().tanh()
        match kind:
            case 0:
                pool.append(x.t() if x.dim() == 2 else x)
            case 1:
                pool.append(x[0] if x.dim() else x)
            case 2:
                pool.append(x[1::2] if x.dim() else x)
            case 3:
                x.mul_(a)
            case 4:
                x.add_(y.sum().tanh(), alpha=0.5)
            case 5:
                pool.append(torch.sin(x))
            case 6:
                pool.append(square @ (square + 1))
            case 7:
                x.uniform_(0, 1)
            case 8:
                pool.append(F.dropout(x, 0.5))
            case 9:
                pool.append(x.reshape(-1))
            case 10:
                pool.append(x.clone())
            case 11:
                x.clamp_(-b, 1)
            case 12:
                pool.append(torch.rand_like(x) + torch.randn(()))
            case 13:
                pool.append(x.unsqueeze(0).transpose(0, -1))
            case 14:
                x.copy_(y.sum().tanh().expand(x.shape))
            case 15:
                pool.append(torch.where(x > 0, x, x * c))
            case 16:
                if x.dim():
                    x[torch.arange(min(2, x.shape[0]))] = y.sum().tanh()
            case 17:
                if x.dim():
                    x[:1].mul_(2)
            case 18:
                pool.append(torch.add(square @ square, square + 1, alpha=0.5))
            case 19:
                pool.append(torch.cat([x.flatten()[:3], y.flatten()[:4]]))
            case 20:
                pool.append(x.cumsum(0) if x.dim() else x)
            case 21:
                pool.append(x.clone().unsqueeze(0).transpose(0, -1))
            case 22:
                pool.append(x.sort(0)[0] if x.dim() else x * 1)
            case _:
                pool.append((x * 1)[..., :2] if x.dim() else x + 0)
    return [t for k, t in enumerate(pool[len(outside) :]) if k % 3] + pool[-2:]
