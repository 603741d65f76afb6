"""Random programs, recorded and replayed three times: bit for bit what eager does three times, errors and memory too.

On nodes that are processes, each with a generator of its own: in-process nodes would draw from one in any order.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from equal import bits
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import disttensor as dt
from disttensor import testing

pytestmark = pytest.mark.usefixtures("processes")

index = st.integers(0, 7)
NAMES = (
    *("select", "slice", "transpose", "unsqueeze", "flatten", "diagonal", "t_", "unsqueeze_", "drop", "detach"),
    *("mul_", "add_other_", "fill_", "setitem", "copy_", "copy_over", "there", "there_and_back", "sent", "sent_whole"),
    *("sigmoid", "matmul", "sum", "clone", "cat", "max", "split", "sort", "number", "number_", "gather"),
    *("rand", "bernoulli_", "dropout", "normal", "seed", "checkpoint", "grad", "empty"),
)
STEPS = st.tuples(st.sampled_from(NAMES), index, index, index)
Program = list[tuple[str, int, int, int]]
Outcome = list[Any]


def step(pool: list[torch.Tensor], number: float, name: str, i: int, j: int, k: int) -> None:
    x = pool[i % len(pool)]
    y = pool[j % len(pool)]
    d = j % x.dim() if x.dim() else 0
    other = torch.device("node", 1 - x.get_node())
    match name:
        case "select":
            pool.append(x.select(d, k % max(x.shape[d], 1)) if x.dim() else x[None])
        case "slice":
            pool.append(x.narrow(d, 0, k % (x.shape[d] + 1)) if x.dim() else x.view(1))
        case "transpose":
            pool.append(x.transpose(d, k % x.dim()) if x.dim() else x.t())
        case "unsqueeze":
            pool.append(x.unsqueeze(d) if x.dim() < 5 else x)
        case "flatten":
            pool.append(x.flatten())
        case "diagonal":
            pool.append(x.diagonal() if x.dim() > 1 else x)
        case "detach":
            pool.append(x.detach())
        case "t_":
            x.t_()
        case "unsqueeze_":
            x.unsqueeze_(d) if x.dim() < 5 else x.zero_()
        case "drop":
            if len(pool) > 1:
                pool.pop(i % len(pool))
        case "mul_":
            x.mul_(1 + k / 4)
        case "add_other_":
            x.add_(y, alpha=k / 8)
        case "fill_":
            x.fill_(k)
        case "setitem":
            x[k % max(x.shape[0], 1)] = k if x.dim() else 0
        case "copy_":
            x.copy_(y.clone())
        case "copy_over":
            x.copy_(y.to(other))
        case "there":
            pool.append(x.to(other))
        case "there_and_back":
            pool.append((x.to(other) * 2).to(x.device))
        case "sent":
            pool.append(torch.arange(6.0).to(x.device))
        case "sent_whole":
            pool.append(torch.full((4, 6), k / 2).to(x.device).mul_(1.5))
        case "sigmoid":
            pool.append((x / 8).sigmoid())
        case "matmul":
            pool.append(x @ y)
        case "sum":
            pool.append(x.sum(d, keepdim=bool(k % 2)) if x.dim() else x.sum())
        case "clone":
            pool.append(x.clone())
        case "cat":
            pool.append(torch.cat([x, y, x]))
        case "max":
            pool += [x.max(d).values, x.max(d).indices.float()] if x.numel() else []
        case "split":
            pool += x.split(1 + k % 3)
        case "sort":
            pool.append(x.sort(dim=d, descending=bool(k % 2)).values)
        case "number":
            pool.append(x * number + (1 - number) ** 2)
        case "number_":
            x.add_(y, alpha=-number / 4)
        case "gather":  # out of range for some values: fails on the node
            pool.append(x.flatten()[(y.flatten()[:3] * k).long()])
        case "rand":
            pool.append(x + torch.rand_like(x))
        case "bernoulli_":
            x.bernoulli_(k / 8)
        case "dropout":
            pool.append(F.dropout(x, 0.25))
        case "normal":
            pool.append(torch.randn(2, 3, device=x.device))
        case "seed":
            torch.manual_seed(k)
        case "checkpoint":
            w = x.detach().requires_grad_()
            out = torch.utils.checkpoint.checkpoint(lambda w: F.dropout(w * 2, 0.5).sum(), w, use_reentrant=False)
            out.backward()
            pool.append(w.grad)
        case "grad":
            w = x.detach().requires_grad_()
            (w * y).sum().backward()
            pool.append(w.grad)
        case "empty":
            pool.append(torch.empty_like(x).copy_(x))


def play(program: Program, bases: list[torch.Tensor], number: float) -> list[torch.Tensor]:
    pool = [b[:] for b in bases]
    for name, i, j, k in program:
        with contextlib.suppress(RuntimeError, IndexError):  # nothing that says so has been sent
            step(pool, number, name, i, j, k)
    pool.append(bases[0][0] * number)
    return pool


def start() -> list[torch.Tensor]:
    return [
        torch.arange(24.0).reshape(4, 6).to("node:0"),
        (torch.arange(6.0) - 2).to("node:1"),
        torch.ones(4, 6).to("node:1"),
        torch.zeros(3).to("node:0"),
    ]


def seen(tensors: list[torch.Tensor]) -> Outcome:
    """Bits and geometry of each, or the type of what it failed with."""

    def one(x: torch.Tensor, work: Any) -> Any:
        try:
            return tuple(x.shape), x.stride(), x.dtype, bits(work.result())
        except Exception as e:
            return type(e)

    works = [dt.fetch(x.detach()) for x in tensors]  # all on their way at once
    return [one(x, work) for x, work in zip(tensors, works, strict=True)]


def three(run: Callable[[float], list[torch.Tensor]], bases: list[torch.Tensor]) -> Iterator[Outcome]:
    torch.manual_seed(7)
    for number in (0.5, 0.3, -2.0):
        outputs = run(number)
        yield seen(outputs)
        yield seen(bases)
        with contextlib.suppress(Exception):
            dt.synchronize()


def eager(program: Program) -> list[Outcome]:
    bases = start()
    return list(three(lambda number: play(program, bases, number), bases))


def replayed(program: Program) -> list[Outcome]:
    bases = start()
    g = dt.Graph()
    with dt.graph(g):
        outputs = play(program, bases, g.number("number", 0.5))

    def replay(number: float) -> list[torch.Tensor]:
        g.replay(number=number)
        return outputs

    return list(three(replay, bases))


def check(program: Program) -> None:
    torch.manual_seed(0)
    places = [torch.zeros(1, device=f"node:{k}") for k in range(2)]
    gc.collect()
    dt.synchronize()
    before = [testing.usage(p) for p in places]
    expected = eager(program)
    for i, (a, b) in enumerate(zip(replayed(program), expected, strict=True)):
        assert a == b, f"{'bases' if i % 2 else 'outputs'} after replay {i // 2 + 1}"
    gc.collect()
    with contextlib.suppress(Exception):
        dt.synchronize()
    assert [testing.usage(p) for p in places] == before, "something is left on a node"


ordinary = settings(
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@settings(ordinary, max_examples=6)
@given(st.lists(STEPS, max_size=25))
def test_random_graphs(program: Program) -> None:
    check(program)


def test_a_gradient_that_is_a_view() -> None:
    check([("select", 0, 0, 0), ("number", 2, 0, 0), ("grad", 1, 5, 0)])


@pytest.mark.slow
@pytest.mark.timeout(600)
@settings(ordinary, max_examples=300, derandomize=False, print_blob=True)
@given(st.lists(STEPS, max_size=40))
def test_many_random_graphs(program: Program) -> None:
    check(program)
