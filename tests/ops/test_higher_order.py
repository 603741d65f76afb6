"""Operators that call functions (``torch.cond``, ``while_loop``, ``scan``, ``map``), on a node as locally."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from equal import same, send
from torch._higher_order_ops.map import map as map_over
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from variants import variants

import disttensor as dt

higher = torch.ops.higher_order


@pytest.fixture(scope="module")
def mesh() -> Iterator[Any]:
    with dt.init_master_worker(nodes=2, launcher="inproc"):
        yield dt.mesh(dp=2)


def _gradient(run: Callable[..., Any]) -> Callable[..., Any]:
    def both(x: torch.Tensor, w: torch.Tensor) -> Any:
        result = run(x, w)
        return result, torch.autograd.grad(result.sum(), w)

    return both


def _cond(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return higher.cond(x.sum() > 3, lambda a, b: (a * b,), lambda a, b: (a.cos() + b,), (x, w))[0]


#: What torch calls in a traced program, and what users call, which traces first.
PROGRAMS: dict[str, Callable[..., Any]] = {
    "cond": _gradient(_cond),
    "cond, the other": _gradient(lambda x, w: _cond(-x, w)),
    "cond, a number": lambda x, w: higher.cond(x.numel() > 3, lambda a: a.sin(), lambda a: a.cos(), (x,)),
    "while_loop": lambda x, w: higher.while_loop(
        lambda i, a: i < 3, lambda i, a: (i + 1, a * 2), (torch.zeros_like(x[0], dtype=torch.int64), x), ()
    ),
    "scan": lambda x, w: higher.scan(lambda c, a: [c + a, c * a], [x[0]], [x], ()),
    "map": lambda x, w: higher.map_impl(lambda a, b: (a * b.sum(),), (x,), (w,)),
}
TRACED: dict[str, Callable[..., Any]] = {
    "cond": _gradient(lambda x, w: torch.cond(x.sum() > 3, lambda a, b: a * b, lambda a, b: a.cos() + b, (x, w))),
    "while_loop": lambda x, w: while_loop(
        lambda i, a: i < 3, lambda i, a: (i + 1, a * 2), (torch.zeros_like(x[0], dtype=torch.int64), x)
    ),
    "scan": _gradient(lambda x, w: scan(lambda c, a: (c * a, c + a), w[0], x + 1)[1]),
    "map": _gradient(lambda x, w: map_over(lambda a, b: a * b, x, w)),
}


def _compare(run: Callable[..., Any]) -> None:
    operands = torch.arange(4.0), torch.full((4,), 2.0, requires_grad=True)
    there = tuple(send(t, "node:0").detach().requires_grad_(t.requires_grad) for t in operands)
    same(run(*there), run(*operands))


@pytest.mark.usefixtures("mesh")
@pytest.mark.parametrize("name", PROGRAMS)
def test_as_local(name: str) -> None:
    _compare(PROGRAMS[name])


@pytest.mark.usefixtures("mesh")
@pytest.mark.filterwarnings("ignore")  # of dynamo
@pytest.mark.parametrize("name", variants(TRACED))
def test_as_users_call_it(name: str) -> None:
    _compare(TRACED[name])


@pytest.mark.usefixtures("mesh")
@pytest.mark.filterwarnings("ignore")  # of torch.export
def test_an_exported_module() -> None:
    class Branches(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> Any:
            return torch.cond(x.sum() > 3, lambda a: self.layer(a).relu(), lambda a: a.cos(), (x,))

    local = torch.export.export(Branches(), (torch.arange(4.0),)).module()
    x = torch.arange(4.0)
    expected = [local(x), local(-x)]
    remote = local.to("node:0")
    same([remote(x.to("node:0")), remote(-x.to("node:0"))], expected)


def test_ranks_take_one_branch(mesh: Any) -> None:
    same(_cond(torch.arange(4.0).to(mesh.device), torch.ones(4).to(mesh.device)).shards()[1], torch.arange(4.0))
    differ = dt.meshes.from_shards(mesh, [torch.ones(4).to("node:0"), torch.zeros(4).to("node:1")])
    with pytest.raises(dt.errors.RanksDiffer):
        _cond(differ, torch.ones(4).to(mesh.device))
