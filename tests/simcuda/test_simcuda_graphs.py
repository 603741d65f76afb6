"""CUDA graphs on simulated devices: torch's own, and those by which a node replays (``engine="cudagraph"``)."""

from __future__ import annotations

import pytest
from simcuda_kit import run, run_session

pytestmark = [pytest.mark.simcuda, pytest.mark.cold]

BEGIN = """
import torch
from torch import cuda

def same(found, wanted):
    torch.testing.assert_close(found.cpu(), wanted.cpu())

def refused(work):
    current = cuda.current_stream()
    try:
        with cuda.graph(cuda.CUDAGraph()):
            torch.zeros(1, device="cuda")  # torch warns of a graph of nothing
            work()
    except RuntimeError as error:
        return str(error)
    finally:
        cuda.set_stream(current)
    raise AssertionError("captured")
"""


@pytest.mark.slow
def test_a_capture_records_and_a_replay_computes():
    """Nothing runs while it is captured: what is made there is not there yet, what is written is as it was."""
    run(
        BEGIN
        + """
x, kept, out = torch.arange(1000.0, device="cuda"), torch.zeros(1000, device="cuda"), torch.zeros(1000).pin_memory()
graph = cuda.CUDAGraph()
with cuda.graph(graph):
    y = x * 2 + 1
    kept += y
    out.copy_(y, non_blocking=True)
assert y.isnan().all().item() and not kept.any().item() and not out.any()
for k in range(4):
    x.fill_(k)
    graph.replay()
    same(y, torch.full((1000,), 2.0 * k + 1))
    cuda.synchronize()
    same(out, torch.full((1000,), 2.0 * k + 1))
same(kept, torch.full((1000,), 16.0))

for work, why in [
    (cuda.synchronize, "captur"),
    (lambda: cuda.current_stream().synchronize(), "captur"),
    (lambda: x.sum().item(), "captur"),
    (lambda: x.cpu(), "captur"),
    (lambda: torch.ones(3).cuda(), "captur"),
    (lambda: cuda.current_stream().wait_event(before), "captur"),
    (lambda: unjoined(), "unjoined"),
]:
    side, before = cuda.Stream(), cuda.current_stream().record_event()

    def unjoined():
        side.wait_stream(cuda.current_stream())
        with cuda.stream(side):
            x + 1

    assert why in refused(work), why
    same(x + 1, torch.full((1000,), 4.0))  # it goes on
    graph.replay()
    same(y, torch.full((1000,), 7.0))
""",
        kernels=True,
    )


@pytest.mark.slow
def test_the_order_with_other_streams():
    """A replay is work of the stream that is current: it waits, and is waited for, as that does."""
    run(
        BEGIN
        + """
x, w = torch.zeros(1000, device="cuda"), torch.ones(1000, device="cuda")
graph, fork = cuda.CUDAGraph(), cuda.Stream()
with cuda.graph(graph):
    a = x * 2
    fork.wait_stream(cuda.current_stream())
    with cuda.stream(fork):
        b = a + w
    c = a * 3
    cuda.current_stream().wait_stream(fork)
    y = b + c
one, two = cuda.Stream(), cuda.Stream()
early = 0
for k in range(8):
    one.wait_stream(cuda.current_stream())
    with cuda.stream(one):
        cuda._sleep(20_000_000)
        x.fill_(k)
        graph.replay()
        done = one.record_event()
    with cuda.stream(two):
        early += not torch.equal((y + 0).cpu(), torch.full((1000,), 8.0 * k + 1))
        two.wait_event(done)
        z = y + 0
    cuda.current_stream().wait_stream(two)
    same(z, torch.full((1000,), 8.0 * k + 1))
assert early == 8, early  # without the wait
""",
        kernels=True,
    )


@pytest.mark.slow
def test_pools():
    """A graph's memory is its own as long as it is there, whatever its tensors are; then it comes back."""
    run(
        BEGIN
        + """
M = 1 << 20
x = torch.ones(M, device="cuda")
graph = cuda.CUDAGraph()
with cuda.graph(graph):
    kept = x * 2
    passing = kept + 1
    y = passing * passing
    del passing
others = [torch.zeros(M, device="cuda") for _ in range(8)]  # takes nothing of it
graph.replay()
same(y, torch.full((M,), 9.0))
assert not any(other.any().item() for other in others)
del kept, others

second = cuda.CUDAGraph()  # in the same pool: y is alive, and stays
with cuda.graph(second, pool=graph.pool()):
    z = y - 4
graph.replay()
second.replay()
same(z, torch.full((M,), 5.0))
same(y, torch.full((M,), 9.0))

cuda.synchronize()
cuda.empty_cache()
held = cuda.memory_reserved()
for one in (graph, second):
    one.reset()
del y, z
cuda.empty_cache()
assert cuda.memory_reserved() < held - 12 * M, (cuda.memory_reserved(), held)
same(x, torch.ones(M))
""",
        kernels=True,
    )


@pytest.mark.slow
def test_random_numbers():
    """A replay draws what the same calls would draw, from where the generator is then, and moves that on."""
    run(
        BEGIN
        + """
x, graph = torch.empty(50, device="cuda"), cuda.CUDAGraph()
with cuda.graph(graph):
    x.normal_()
    y = torch.rand(50, device="cuda")
def replayed():
    graph.replay()
    return [x + 0, y + 0]
def eager():
    return [torch.empty(50, device="cuda").normal_(), torch.rand(50, device="cuda")]
for seed in (5, 6):
    both = []
    for work in (replayed, eager):
        cuda.manual_seed(seed)
        both.append([*work(), *work(), torch.rand(50, device="cuda")])
    for found, wanted in zip(*both, strict=True):
        same(found, wanted)
    assert not torch.equal(both[0][1].cpu(), both[0][3].cpu()), "each replay draws anew"
""",
        kernels=True,
    )


ENGINE = (
    BEGIN
    + """
import logging
from program_kit import SENTINELS, copies, interpret, record
from disttensor.runtime.node.graphs.engines.cuda import WARM_UPS, CudaGraph
from disttensor.runtime.node.graphs.interpreter import Interpreter

logging.disable()
"""
)


def test_programs_of_two_devices_and_one_that_cannot_be_captured():
    """torch captures on a stream of the device that has captured first, where nothing of another one is captured, and
    stays on it when a capture fails. Memory that other streams have used has to come back after a failure, too."""
    run(
        ENGINE
        + """
for device in ("cuda:0", "cuda:1", "cuda:0"):
    x, w = torch.ones(16, 16, device=device), torch.zeros(16, 16, device=device)
    program, inputs = record(lambda: [(x @ x).relu() + w, w.add_(SENTINELS[0])], 1)
    engine = CudaGraph(program, Interpreter(program))
    ours, theirs = copies(inputs), copies(inputs)
    for k in range(WARM_UPS + 4):
        wanted = interpret(program, theirs, (k / 8,))
        for found, other in zip([*engine.run(ours, (k / 8,)), *ours], [*wanted, *theirs]):
            same(found, other)
    assert engine.used == "cudagraph", engine.why
    assert cuda.current_device() == 0 and cuda.current_stream(device) == cuda.default_stream(device)

x, m = torch.arange(8.0, device="cuda"), torch.tensor([True, False] * 4, device="cuda")
program, inputs = record(lambda: [x.masked_select(m) + 1])
engine = CudaGraph(program, Interpreter(program))
for k in range(WARM_UPS + 3):
    x.fill_(k)
    same(engine.run(inputs, ())[0], torch.full((4,), k + 1.0))
    assert cuda.current_stream() == cuda.default_stream()
assert engine.used == "interpreter" and "captur" in engine.why, engine.why

side, held = cuda.Stream(), cuda.memory_stats()["active_bytes.all.current"]
passing = torch.ones(1 << 20, device="cuda")
side.wait_stream(cuda.current_stream())
with cuda.stream(side):
    passing.mul_(2)
passing.record_stream(side)
del passing
cuda.synchronize()
torch.ones(1, device="cuda")
assert cuda.memory_stats()["active_bytes.all.current"] - held < 1 << 20
""",
        kernels=True,
        devices=2,
    )


STEP = """
from torch.nn import functional as F

torch.manual_seed(3)
x, y, w = torch.randn(32, 16), torch.randn(32, 4), torch.randn(16, 4)
home = dt.device(0, "cuda:0")

def step(x, y, w, lr):
    loss = F.mse_loss((x @ w).tanh(), y)
    (gradient,) = torch.autograd.grad(loss, w)
    with torch.no_grad():
        w.sub_(gradient * lr)
    return loss.detach()

def same(found, wanted):
    torch.testing.assert_close(found.detach().cpu(), wanted.detach(), rtol=1e-4, atol=1e-5)
"""


@pytest.mark.slow
def test_a_step_on_a_node():
    """A number changes, inputs are written, another stream reads the output, and memory comes and goes."""
    run_session(
        STEP
        + """
here, there = w.clone().requires_grad_(), w.to(home).requires_grad_()
a, b = x.to(home), y.to(home)
step(x, y, here, 0.1), step(a, b, there, 0.1)
graph = dt.Graph()
with dt.graph(graph, engine="cudagraph"):
    lr = graph.number("lr", 0.1)
    loss = step(a, b, there, lr)
side = dt.Stream(0, "cuda:0")
passing, read = [], []
for k in range(8):
    a.copy_(x + k / 8)
    graph.replay(lr=0.1 / (k + 1))
    wanted = step(x + k / 8, y, here, 0.1 / (k + 1))
    done = dt.Event()
    done.record()
    with dt.stream(side):
        side.wait_event(done)
        twice = loss * 2
        read.append(side.record_event())
    passing.append(torch.randn(1 << 16, device=home))
    if k % 3 == 2:
        passing.clear()
    read[-1].wait()
    same(loss, wanted)
    same(twice, wanted * 2)
same(there, here)
assert graph.engines() == {0: [("cudagraph", "")]}, graph.engines()
passing.clear()
torch.node.empty_cache(home)
held = torch.node.memory_reserved(home)
del graph, loss, lr
torch.node.empty_cache(home)
assert torch.node.memory_reserved(home) < held, "the graph's pool is free"
same(step(a, b, there, 0.1), step(x + 7 / 8, y, here, 0.1))
""",
        nodes=1,
    )


@pytest.mark.slow
def test_graphed_functions_and_graphs_on_a_node():
    """Inputs that are other tensors each time; a graph whose input is what another one makes; one that draws; and one
    that can't be captured, as it takes something to the CPU."""
    run_session(
        STEP
        + """
@dt.graphed(engine="cudagraph")
def forward(x, factor):
    return (x * factor).softmax(1)

w0, w1 = w.to(home), (w + 1).to(home)
first, second = dt.Graph(), dt.Graph()
with dt.graph(first, engine="cudagraph"):
    u = w0.cumsum(0)
with dt.graph(second, engine="cudagraph"):
    v = u @ w1.t()
for k in range(9):
    same(forward((x + k).to(home), 1.0 + k), ((x + k) * (1.0 + k)).softmax(1))
    w0.copy_(w * k)
    first.replay()
    second.replay()
    same(v, (w * k).cumsum(0) @ (w + 1).t())
third, fourth = dt.Graph(), dt.Graph()
with dt.graph(third, engine="cudagraph"):
    dropped = F.dropout(w0, 0.5)
torch.manual_seed(7)
drawn = []
for k in range(6):
    third.replay()
    drawn.append(dropped.cpu())
torch.manual_seed(7)
for found in drawn:
    same(found, F.dropout(w0, 0.5).cpu())
for graph in (first, second, third):
    assert graph.engines() == {0: [("cudagraph", "")]}, graph.engines()

with dt.graph(fourth, engine="cudagraph"):
    low = (w0 * 2).to(dt.device(0, "cpu")) + 1
for k in range(6):
    w0.copy_(w * k)
    fourth.replay()
    same(low, w * k * 2 + 1)
(((used, why),),) = fourth.engines().values()
assert used == "interpreter" and "makes a tensor elsewhere" in why, (used, why)
""",
        nodes=1,
    )
