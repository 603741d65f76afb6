"""Many threads and tasks at once: exact results, each thread's order kept, a current node of their own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from equal import same

import disttensor as dt
from disttensor import testing

pytestmark = pytest.mark.usefixtures("clean")

THREADS = 8


def at_once(fn: Callable[[int], object]) -> list[object]:
    """Runs ``fn(k)`` in eight threads that start together; raises what any of them raised."""
    start = threading.Barrier(THREADS)

    def run(k: int) -> object:
        start.wait(10)
        return fn(k)

    with ThreadPoolExecutor(THREADS) as pool:
        return [f.result(30) for f in [pool.submit(run, k) for k in range(THREADS)]]


def test_results_are_exact() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        for step in range(60):
            x = (x * 0.99 + x[0]).relu() - step / 10
            if step % 10 == 0:
                x = x @ x.t() / 10
        return x

    sources = [torch.randn(8, 8) for _ in range(THREADS)]
    results = at_once(lambda k: program(sources[k].to(f"node:{k % 2}")))
    for got, source in zip(results, sources, strict=True):
        same(got, program(source))


def test_fetches_in_all_threads() -> None:
    def program(k: int) -> list[float]:
        x = torch.full((4,), float(k), device=f"node:{k % 2}")
        return [(x + i).sum().item() for i in range(50)]

    assert at_once(program) == [[4.0 * (k + i) for i in range(50)] for k in range(THREADS)]


@pytest.mark.row("M18")
@pytest.mark.fault(22)
def test_each_threads_order_is_kept() -> None:
    x = torch.zeros(THREADS, 100, device="node:1")

    def program(k: int) -> None:
        row = x[k]
        for i in range(100):
            row[i] = row[i - 1] * 2 + k if i else k
            row[i].remainder_(1009)

    at_once(program)
    expected = torch.zeros(THREADS, 100)
    for k in range(THREADS):
        for i in range(100):
            expected[k, i] = ((expected[k, i - 1] * 2 + k) if i else k) % 1009
    same(x, expected)


@pytest.mark.fault(22)
def test_writes_of_all_threads_arrive() -> None:
    x = torch.zeros(3, device="node:1")
    at_once(lambda k: [x.add_(1) for _ in range(100)])
    same(x, torch.full((3,), 100.0 * THREADS))


def test_transfers_between_nodes_in_all_threads() -> None:
    def program(k: int) -> torch.Tensor:
        x = torch.full((50,), float(k)).to(f"node:{k % 2}")
        for i in range(20):
            x = (x + 1).to(f"node:{(k + i + 1) % 2}")
        return x.cpu()

    for k, got in enumerate(at_once(program)):
        assert torch.equal(got, torch.full((50,), k + 20.0))


def test_a_lazy_view_is_made_once() -> None:
    base = torch.arange(1000.0, device="node:1")
    for _ in range(20):
        view = base[10:500].view(7, 70).t()
        results = at_once(lambda k, view=view: (view + k).sum())
        expected = torch.arange(1000.0)[10:500].view(7, 70).t()
        for k, r in enumerate(results):
            same(r, (expected + k).sum())


def test_backward_in_all_threads() -> None:
    def program(k: int, device: str) -> list[torch.Tensor]:
        g = torch.Generator().manual_seed(k)
        w = torch.randn(4, 4, generator=g).to(device).requires_grad_()
        x = torch.randn(4, 4, generator=g).to(device)
        grads = []
        for _ in range(5):
            (grad,) = torch.autograd.grad(F.gelu(x @ w).square().sum(), w)
            grads.append(grad)
        return grads

    results = at_once(lambda k: program(k, f"node:{k % 2}"))
    for k, r in enumerate(results):
        same(r, program(k, "cpu"))


def test_errors_stay_with_their_thread() -> None:
    def program(k: int) -> str:
        x = torch.ones(3, device="node:1")
        if k % 2:
            bad = x.gather(0, torch.tensor([k + 7], device="node:1"))
            with pytest.raises(RuntimeError, match=f"index {k + 7} "):
                bad.cpu()
            return "failed"
        return str((x + k).sum().item())

    assert at_once(program) == ["failed" if k % 2 else str(3.0 * (1 + k)) for k in range(THREADS)]


def test_functions_in_all_threads() -> None:
    assert at_once(lambda k: dt.run(lambda a: a * 2, k, node=k % 2)) == [2 * k for k in range(THREADS)]


def test_proxies_die_in_other_threads() -> None:
    x = torch.ones(3, device="node:1")
    dt.synchronize()
    before = testing.usage(x)
    made = at_once(lambda k: [x + i for i in range(100)])
    at_once(lambda k: made.__setitem__(k, None))
    dt.synchronize()
    assert testing.usage(x) == before


@pytest.mark.row("M18")
def test_the_current_node_is_each_threads_own() -> None:
    together = threading.Barrier(THREADS)

    def program(k: int) -> tuple[int, int, int]:
        outside = dt.session.current_node()
        with dt.node(k % 2):
            together.wait(10)
            inside = dt.factories.zeros(1).get_node()
            together.wait(10)
        return outside, inside, dt.session.current_node()

    with dt.node(1):
        assert at_once(program) == [(0, k % 2, 0) for k in range(THREADS)]
        assert dt.session.current_node() == 1


@pytest.mark.row("M18")
def test_the_current_node_is_each_tasks_own() -> None:
    async def program(k: int) -> tuple[int, int]:
        before = dt.session.current_node()
        with dt.node(k % 2):
            await asyncio.sleep(0)
            node = dt.factories.zeros(1).get_node()
            await asyncio.sleep(0)
            assert dt.session.current_node() == k % 2
        return before, node

    async def main() -> list[tuple[int, int]]:
        with dt.node(1):
            return await asyncio.gather(*(program(k) for k in range(6)))

    assert asyncio.run(main()) == [(1, k % 2) for k in range(6)]
    assert dt.session.current_node() == 0


COMPUTES = """
import os, threading
import torch
import disttensor as dt

def new(x, w):
    \"\"\"The number of threads that a product of matrices has begun.\"\"\"
    before = set(os.listdir("/proc/self/task"))
    x.mm(w)
    return len(set(os.listdir("/proc/self/task")) - before)

where, found = os.environ["WHERE"], []
torch.set_num_threads(1)
with dt.init_master_worker(nodes=1, launcher="inproc" if where == "a node that is a thread" else "local", threads=1):
    local = torch.ones(6, 1448), torch.ones(1448, 1448)
    there = [t.to("node:0") for t in local]
    dt.synchronize()
    if where == "a stream":
        with dt.stream(dt.Stream(0)):
            found.append(dt.run(new, *there, node=0))
    elif where == "a callback":
        done = threading.Event()
        dt.fetch(there[0]).add_done_callback(lambda work: (found.append(new(*local)), done.set()))
        assert done.wait(60)
    else:
        found.append(dt.run(new, *there, node=0))
print(*found)
"""


@pytest.mark.cold  # OMP_NUM_THREADS is read once
@pytest.mark.parametrize("where", ["a node", "a stream", "a node that is a thread", "a callback"])
def test_threads_compute_with_no_more_threads_than_were_asked_for(where: str, script: Callable[..., Any]) -> None:
    """A new thread has torch's number of threads only when it has asked for it: BLAS took one for each core, and its
    sums were others in the last bits."""
    done = script(COMPUTES, WHERE=where, OMP_NUM_THREADS="4")
    assert done.stdout == "0\n", done.stderr
