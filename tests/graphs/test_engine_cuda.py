"""CUDA graphs as an engine: against a stand-in for torch's on the CPU, and against the device where there is one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from program_kit import SENTINELS, copies, interpret, record
from torch import Tensor
from torch.nn import functional as F

from disttensor.runtime.node.graphs.engines import cuda
from disttensor.runtime.node.graphs.engines.cuda import CAPTURES, WARM_UPS, CudaGraph
from disttensor.runtime.node.graphs.interpreter import Interpreter
from disttensor.runtime.node.store import memory

A, B, C = SENTINELS


class Captured:
    """Stands for torch.cuda.CUDAGraph: does the program again, to the memory that was captured."""

    def __init__(self, engine: CudaGraph) -> None:
        self.engine = engine
        self.inputs: list[Tensor] = []
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1
        for output, result in zip(self.engine._outputs, self.engine._trace(self.inputs), strict=True):
            if memory(output) != memory(result):
                output.copy_(result)


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[CudaGraph], list[Captured]]:
    """Has an engine take the CPU for a CUDA device. Gives what it captures from then on."""

    def install(engine: CudaGraph) -> list[Captured]:
        captured: list[Captured] = []

        def make() -> Captured:
            captured.append(Captured(engine))
            return captured[-1]

        @contextlib.contextmanager
        def capturing(graph: Captured, stream: Any, capture_error_mode: str) -> Iterator[None]:
            assert capture_error_mode == "thread_local"
            graph.inputs = [engine._own.get(i, t) for i, t in enumerate(engine._inputs)]
            before, state = copies(graph.inputs), torch.get_rng_state()
            yield  # nothing runs while a CUDA graph is captured: it is undone
            torch.set_rng_state(state)
            for tensor, old in zip(graph.inputs, before, strict=True):
                tensor.copy_(old)

        monkeypatch.setattr(cuda, "_on_cuda", lambda device: True)
        monkeypatch.setattr(torch.cuda, "CUDAGraph", make)
        monkeypatch.setattr(torch.cuda, "graph", capturing)
        monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
        monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: None)
        monkeypatch.setattr(cuda, "_capturing", lambda device: None)
        return captured

    return install


def step(x: Tensor, w: Tensor) -> list[Tensor]:
    torch._foreach_mul_([w], A)
    w.add_(x @ x.t(), alpha=-B)
    y = F.dropout(x, 0.5) + torch.rand(4, 4, device=x.device)
    return [y, y.t(), w[0], w.sum() / C]


def same(one: Sequence[Tensor], other: Sequence[Tensor]) -> None:
    for a, b in zip(one, other, strict=True):
        torch.testing.assert_close(a, b)


def alternate(engine: CudaGraph, program: Any, inputs: list[Tensor], runs: int) -> None:
    """Runs of the engine and of the interpreter with the same random numbers."""
    ours, theirs = copies(inputs), copies(inputs)
    for i in range(runs):
        numbers = (0.5 + i / 8, 1.0 / (1 + i), 2)
        torch.manual_seed(i)
        expected = interpret(program, theirs, numbers)
        torch.manual_seed(i)
        same([*engine.run(ours, numbers), *ours], [*expected, *theirs])


Install = Callable[[CudaGraph], list[Captured]]


def test_replays_do_what_the_interpreter_does(on_cpu: Install) -> None:
    x, w = torch.randn(4, 4), torch.randn(4, 4)
    program, inputs = record(lambda: step(x, w), 3)
    engine = CudaGraph(program, Interpreter(program))
    captured = on_cpu(engine)
    with torch.no_grad():
        alternate(engine, program, inputs, WARM_UPS + 4)
    assert engine.used == "cudagraph", engine.why
    assert [c.replays for c in captured] == [4]


def test_an_input_that_changes_gets_a_buffer(on_cpu: Install) -> None:
    x, w = torch.randn(4, 4), torch.randn(4, 4)
    program, inputs = record(lambda: [x.t() @ w, w.add_(x)])
    engine = CudaGraph(program, Interpreter(program))
    captured = on_cpu(engine)
    for i in range(WARM_UPS + 5):
        at = [t is x for t in inputs].index(True)
        inputs[at] = torch.full((4, 4), float(i))
        theirs = copies(inputs)
        expected = interpret(program, theirs)
        same([*engine.run(inputs, ()), *inputs], [*expected, *theirs])
        x = inputs[at]
    assert engine.used == "cudagraph", engine.why
    assert len(captured) == 2


@pytest.mark.parametrize(
    ("function", "change", "why"),
    [
        (lambda x: [x.add_(1)], lambda x: x.clone(), "is written"),
        (lambda x: [x.t(), x + 1], lambda x: x.clone(), "an output shares"),
        (lambda x: [x + 1], lambda x: x[:2], "geometry"),
        (lambda x: [x + torch.ones(4, device="meta").shape[0]], lambda x: x, "makes a tensor elsewhere"),
        (lambda x: [x + 1], lambda x: x.double(), "geometry"),
    ],
)
def test_what_no_graph_can_do_stays(
    on_cpu: Install,
    caplog: pytest.LogCaptureFixture,
    function: Callable[[Tensor], list[Tensor]],
    change: Callable[[Tensor], Tensor],
    why: str,
) -> None:
    x = torch.randn(4, 4)
    program, inputs = record(lambda: function(x))
    engine = CudaGraph(program, Interpreter(program))
    on_cpu(engine)
    for i in range(WARM_UPS + 4):
        if i > WARM_UPS:
            inputs = [change(t) for t in inputs]
        expected = interpret(program, copies(inputs))
        same(engine.run(inputs, ()), expected)
    assert engine.used == "interpreter"
    assert why in engine.why
    assert len(caplog.records) == 1


def test_a_program_on_the_cpu_stays(caplog: pytest.LogCaptureFixture) -> None:
    x = torch.ones(3)
    program, inputs = record(lambda: [x + 1])
    engine = CudaGraph(program, Interpreter(program))
    for _ in range(WARM_UPS + 2):
        assert engine.run(inputs, ())[0].tolist() == [2, 2, 2]
    assert "one CUDA device" in engine.why
    assert len(caplog.records) == 1
    assert CAPTURES > 1


@pytest.mark.gpu
def test_on_a_device() -> None:
    x, w = torch.randn(4, 4, device="cuda:0"), torch.randn(4, 4, device="cuda:0")
    program, inputs = record(lambda: step(x, w), 3)
    engine = CudaGraph(program, Interpreter(program))
    with torch.no_grad():
        alternate(engine, program, inputs, WARM_UPS + 4)
    assert engine.used == "cudagraph", engine.why


@pytest.mark.gpu
def test_a_training_step_on_a_device() -> None:
    """A step of a small net: forward, backward and SGD with momentum, as an interpreter and as a CUDA graph. It is
    recorded on the CPU, as torch refuses a backward pass on a script's own GPU (docs/DIFFERENT.md)."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Dropout(0.2), torch.nn.Linear(16, 4))
    x, y, gpu = torch.randn(32, 8), torch.randint(4, (32,)), torch.device("cuda:0")
    optimizer = torch.optim.SGD(net.parameters(), lr=A, momentum=0.9)

    def train() -> list[Tensor]:
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        return [loss.detach() + 0]

    train()
    program, inputs = record(train, 1)
    lines = [
        replace(line, kwargs=line.kwargs | {"device": gpu} if "device" in line.kwargs else line.kwargs)
        for line in program.lines
    ]
    program = replace(program, lines=tuple(lines))
    engine = CudaGraph(program, Interpreter(program))
    ours, theirs = ([t.to(gpu) for t in copies(inputs)] for _ in range(2))
    with torch.no_grad():
        for i in range(10):
            torch.manual_seed(i)
            expected = interpret(program, theirs, (0.1,))
            torch.manual_seed(i)
            same([*engine.run(ours, (0.1,)), *ours], [*expected, *theirs])
    assert engine.used == "cudagraph", engine.why
