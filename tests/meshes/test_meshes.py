"""Meshes: several nodes as one place. What users write, and what each row of docs/MESHES.md promises: real nodes."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import itertools
import math
import pickle
import re
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from equal import bits, same
from limits import HANG
from mesh_kit import connected
from torch import nn

import disttensor as dt
from disttensor import mesh, shard
from disttensor.collectives import all_reduce_, permute_ranks
from disttensor.errors import RanksDiffer
from disttensor.meshes import Mesh, from_shards, replicate

pytestmark = pytest.mark.usefixtures("settled")

NODES = 4


@pytest.fixture(scope="module", autouse=True)
def session() -> Iterator[None]:
    with connected(NODES):
        yield


def grid() -> Mesh:
    return mesh(dp=2, tp=2)


def line() -> Mesh:
    return mesh(rank=NODES, nodes=[3, 1, 0, 2])


def unlike(m: Mesh, *shape: int, **options: Any) -> tuple[Any, list[torch.Tensor]]:
    """A tensor whose ranks have different values, and these."""
    values = [torch.randn(*shape, **options) for _ in range(len(m))]
    return from_shards(m, values), values


def each(x: Any, values: list[torch.Tensor]) -> None:
    """Asserts that each rank has its value."""
    for got, value in zip(x.shards(), values, strict=True):
        same(got, value, strides=False)


# ---- a mesh is a place -----------------------------------------------------------------------------------------------


def test_names_and_sizes() -> None:
    m = grid()
    assert (m.nodes, m.names, m.shape, m.size("dp"), m.size(), len(m)) == ((0, 1, 2, 3), ("dp", "tp"), (2, 2), 2, 4, 4)
    assert repr(m) == "Mesh(dp=2, tp=2, nodes=[0, 1, 2, 3])"
    assert m == grid()
    assert hash(m) == hash(grid())
    assert m.device == grid().device
    assert m.device.type == "node"
    assert m.device.index >= NODES
    assert mesh(dp=-1).shape == (NODES,)
    assert mesh(a=2, b=-1).shape == (2, 2)
    assert mesh().names == ("all",)
    assert mesh(nodes=[2, 0]).nodes == (2, 0)


def test_views_are_one_place() -> None:
    m = mesh(rows=4)
    for view in (m.split(rows=("pp", "dp"), pp=2), m.split(rows=("outer", "inner"), inner=1), m.flatten("flat"),
                 m.rename(rows="replica")):  # fmt: skip
        assert view.device == m.device
        assert view.nodes == m.nodes
    assert m.split(rows=("pp", "dp"), pp=2).shape == (2, 2)
    x = torch.ones(3, device=m.device) + torch.ones(3, device=m.rename(rows="replica").device)
    assert x.sum().item() == 6
    y = from_shards(m, [torch.tensor(float(i)) for i in range(4)])
    assert [s.item() for s in dt.all_reduce(y, "sum", over="dp").shards()] == [1, 1, 5, 5]  # type: ignore[attr-defined]
    assert dt.all_reduce(y, "sum", over="flat").item() == 6  # type: ignore[attr-defined]


def test_a_slice_is_another_place() -> None:
    m = grid()
    assert m.slice(dp=1).nodes == (2, 3)
    assert m.slice(tp=0).nodes == (0, 2)
    assert m.slice(dp=1).names == ("tp",)
    x, values = unlike(m, 3)
    there = x.at(dp=1)
    each(there * 2, [v * 2 for v in values[2:]])
    with pytest.raises(RuntimeError, match=r"found \(3,\) torch.float32 on the mesh .* and .* on the mesh"):
        there + x


@pytest.mark.parametrize(
    "make",
    [
        lambda d: torch.zeros(2, 3, device=d),
        lambda d: torch.full((3,), 1.5, device=d),
        lambda d: torch.arange(5, device=d),
        lambda d: torch.tensor([[1, 2], [3, 4]], device=d),
        lambda d: torch.eye(3, device=d, dtype=torch.float64),
        lambda d: torch.randn(4, 2, device=d),
        lambda d: torch.randperm(7, device=d),
        lambda d: torch.empty(3, device=d).normal_(),
        lambda d: torch.ones(2, device=d).new_zeros(3),
        lambda d: torch.rand_like(torch.ones(3, device=d)),
        lambda d: torch.linspace(0, 1, 5).to(d),
        lambda d: torch.arange(100_000).to(d),
        lambda d: torch.randn(3, 5).t().to(d),
    ],
)
def test_factories(make: Callable[[Any], torch.Tensor]) -> None:
    torch.manual_seed(3)
    local = make("cpu")
    torch.manual_seed(3)
    remote = make(grid().device)
    same(remote, local)
    each(remote, [local] * NODES)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 16), nn.Dropout(0.25),
        nn.LayerNorm(16), nn.Linear(16, 10),
    )  # fmt: skip


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    return loss.detach()


@pytest.mark.parametrize("kind", ["SGD", "AdamW", "Adagrad"])
def test_each_rank_trains_as_a_local_module(kind: str) -> None:
    """On data of its own: modules, autograd, optimizers, hooks and clipping do not know that it is a mesh."""
    m = grid()
    torch.manual_seed(1)
    data = [(torch.randn(6, 1, 8, 8), torch.randint(0, 10, (6,))) for _ in range(NODES)]
    options = {"lr": 0.1, **({"momentum": 0.9} if kind == "SGD" else {})}

    def train(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        optimizer = getattr(torch.optim, kind)(model.parameters(), **options)
        seen: list[int] = []
        model[0].register_forward_hook(lambda *args: seen.append(1))  # type: ignore[index]
        torch.manual_seed(2)
        losses = [step(model, optimizer, x, y) for _ in range(4)]
        assert len(seen) == 4
        return [*losses, *model.state_dict().values()]

    x, y = (from_shards(m, list(values)) for values in zip(*data, strict=True))
    together = train(network().to(m.device), x, y)
    for rank, (x, y) in enumerate(data):
        for got, wanted in zip(together, train(network(), x, y), strict=True):
            same(got.shards()[rank], wanted, strides=False)  # type: ignore[attr-defined]


def test_lazy_modules_get_their_shapes_and_numbers_as_here() -> None:
    """From a first batch that differs: the same random numbers on each rank, then each its own statistics and steps."""
    m = grid()
    x, values = unlike(m, 3, 2, 8)

    def trained(place: Any, batch: torch.Tensor) -> list[torch.Tensor]:
        model = nn.Sequential(nn.LazyConv1d(4, 3), nn.LazyBatchNorm1d(), nn.Flatten(), nn.LazyLinear(5)).to(place)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        torch.manual_seed(3)
        for _ in range(2):
            optimizer.zero_grad()
            model(batch).square().sum().backward()
            optimizer.step()
        return list(model.state_dict().values())

    wanted = zip(*(trained("cpu", value) for value in values), strict=True)
    for got, of_ranks in zip(trained(m.device, x), wanted, strict=True):
        each(got, list(of_ranks))


def test_data_parallel_is_one_process() -> None:
    m = mesh(dp=NODES)
    torch.manual_seed(4)
    x, y = torch.randn(32, 20, dtype=torch.float64), torch.randint(0, 5, (32,))

    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 5)).double()

    local, remote = model(), model().to(m.device)
    xs, ys = shard(x, m, dp=0), shard(y, m, dp=0)
    for parameters, forward, mean in (
        (list(local.parameters()), lambda: F.cross_entropy(local(x), y), lambda g: g),
        (
            list(remote.parameters()),
            lambda: F.cross_entropy(remote(xs), ys),
            lambda g: dt.all_reduce(g, "avg", over="dp"),
        ),
    ):
        optimizer = torch.optim.AdamW(parameters, lr=0.01)
        for _ in range(5):
            optimizer.zero_grad()
            forward().backward()
            for p in parameters:
                p.grad = mean(p.grad)
            optimizer.step()
    for p, q in zip(local.parameters(), remote.parameters(), strict=True):
        torch.testing.assert_close(q.detach().cpu(), p.detach(), rtol=1e-12, atol=1e-14)


def test_autocast_checkpoint_and_transforms() -> None:
    m = grid()
    x, values = unlike(m, 4, 8)
    w = torch.randn(8, 8)
    there = w.to(m.device)
    with torch.autocast("node", dtype=torch.bfloat16):
        got = x @ there
    with torch.autocast("cpu", dtype=torch.bfloat16):
        each(got, [v @ w for v in values])
    from torch.utils.checkpoint import checkpoint

    def block(v: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.dropout((v @ weight).relu(), 0.5)

    def gradient(v: torch.Tensor, weight: torch.Tensor, through: bool) -> torch.Tensor:
        weight = weight.clone().requires_grad_()
        torch.manual_seed(9)
        out = checkpoint(block, v, weight, use_reentrant=False) if through else block(v, weight)
        out.sum().backward()
        assert weight.grad is not None
        return weight.grad

    each(gradient(x, there, True), [gradient(v, w, False) for v in values])
    jacobian = torch.func.vmap(torch.func.grad(lambda row, weight: (row @ weight).square().sum()), (0, None))
    each(jacobian(x, there), [jacobian(v, w) for v in values])


# ---- shards ----------------------------------------------------------------------------------------------------------


def test_at_is_the_same_memory() -> None:
    m = grid()
    x, values = unlike(m, 3)
    part = x.at(dp=1, tp=0)
    assert part.get_node() == 2
    version = x._version
    part.add_(1)
    assert x._version > version
    each(x, [values[0], values[1], values[2] + 1, values[3]])
    x.mul_(2)
    same(part, (values[2] + 1) * 2)
    del x
    same(part, (values[2] + 1) * 2)  # it keeps its tensor
    with pytest.raises(TypeError, match="node 0 cpu, and has no shards"):
        torch.ones(1, device="node:0").at(dp=0)  # type: ignore[attr-defined]


def test_lazy_tensors_exist_on_each_rank_when_one_is_asked_for() -> None:
    m = grid()
    x = torch.arange(6.0, device=m.device).view(2, 3).t()
    assert x.at(dp=0, tp=1).tolist() == [[0, 3], [1, 4], [2, 5]]
    e = torch.empty(3, device=m.device)
    e.at(dp=0, tp=0).fill_(1)
    assert e.at(dp=0, tp=0).tolist() == [1, 1, 1]


def test_shard_cuts_by_dims() -> None:
    m = grid()
    t = torch.arange(24.0).reshape(4, 6)
    each(shard(t, m, dp=0), [t[:2], t[:2], t[2:], t[2:]])
    each(shard(t, m, dp=0, tp=1), [t[:2, :3], t[:2, 3:], t[2:, :3], t[2:, 3:]])
    each(shard(t.to("node:1"), m, tp=-1), [t[:, :3], t[:, 3:]] * 2)
    big = torch.randn(8, 3000)
    each(shard(big, m, dp=0), [big[:4], big[:4], big[4:], big[4:]])
    each(replicate(big.to("node:3"), m), [big] * 4)
    each(m.coordinate("tp"), [torch.tensor(i) for i in (0, 1, 0, 1)])
    each(from_shards(line(), [big[i].to(f"node:{i}") for i in range(4)]), [big[i] for i in range(4)])


def test_from_shards_copies() -> None:
    parts = [torch.ones(2, device=f"node:{i}") for i in range(NODES)]
    x = from_shards(mesh(dp=NODES), parts)
    parts[1].fill_(7)
    assert x.sum().item() == 2  # type: ignore[attr-defined]


def test_gradients_of_shards_and_copies() -> None:
    """The objective is the sum of all ranks' losses."""
    m = grid()
    weights = torch.tensor([1.0, 2.0, 3.0, 4.0])
    t = torch.randn(4, 3, requires_grad=True)
    scale = from_shards(m, list(weights))
    (shard(t, m, dp=0) * scale).sum().backward()
    assert t.grad is not None
    assert torch.equal(t.grad, torch.tensor([3.0, 3.0, 7.0, 7.0])[:, None].expand(4, 3))
    r = torch.randn(3, device="node:1", requires_grad=True)
    (replicate(r, m) * scale).sum().backward()
    assert r.grad is not None
    assert r.grad.tolist() == [10.0] * 3
    x = torch.randn(3, device=m.device, requires_grad=True)
    (x.at(dp=1, tp=0) * 5).sum().backward()  # type: ignore[attr-defined]
    assert x.grad is not None
    each(x.grad, [torch.full((3,), 5.0 * (i == 2)) for i in range(4)])
    x.grad = None
    sum((s * i).sum().cpu() for i, s in enumerate(x.shards())).backward()  # type: ignore[attr-defined]
    assert x.grad is not None
    each(x.grad, [torch.full((3,), float(i)) for i in range(4)])


@pytest.mark.parametrize("source", ["cpu", "node:1"])
def test_the_gradient_of_a_copy_is_the_sum_of_all_ranks(source: str) -> None:
    """Also where all ranks have the same one, and where it is asked for twice."""
    m = grid()
    t = torch.tensor([1.0, 2.0], device=source, requires_grad=True)
    (t.to(m.device) * 3).sum().backward()
    assert t.grad is not None
    assert t.grad.device == t.device
    assert t.grad.tolist() == [12.0, 12.0]
    (g,) = torch.autograd.grad((replicate(t, m) ** 3).sum(), t, create_graph=True)
    assert g.tolist() == [12.0, 48.0]
    (h,) = torch.autograd.grad(g.sum(), t)
    assert h.tolist() == [24.0, 48.0]
    with pytest.raises(NotImplementedError, match=r"write disttensor\.meshes\.replicate\(x, mesh\)"):
        torch.autograd.grad((t.to(m.device) ** 3).sum(), t, create_graph=True)
    t.grad = None
    (t.to(m.device, torch.float64) * 2).sum().backward()  # and of one that changes the dtype
    assert t.grad.tolist() == [8.0, 8.0]
    from torch.utils.flop_counter import FlopCounterMode

    t.grad = None
    with FlopCounterMode(display=False):  # and under a mode
        (t.to(m.device) * 2).sum().backward()
    assert t.grad.tolist() == [8.0, 8.0]
    t.grad = None
    t.to(m.device).cpu().sum().backward()  # there and back is the identity
    assert t.grad.tolist() == [1.0, 1.0]
    seen = []
    x = t.to(m.device)
    x.register_hook(lambda g: seen.append(g.cpu().tolist()))  # a copy that the user asks for is no gradient
    x.sum().backward()
    assert seen == [[1.0, 1.0]]


@pytest.mark.parametrize(
    "name", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "permute_ranks", "broadcast"]
)
@pytest.mark.parametrize("over", ["dp", "tp", "rank"])
def test_collectives_over_dims(name: str, over: str) -> None:
    m = line() if over == "rank" else grid()
    x, values = unlike(m, 4, 8, dtype=torch.float64)
    groups = {"dp": ((0, 2), (1, 3)), "tp": ((0, 1), (2, 3)), "rank": ((0, 1, 2, 3),)}[over]
    wanted = list(values)
    for group in groups:
        mine, n = [values[rank] for rank in group], len(group)
        for i, rank in enumerate(group):
            wanted[rank] = {
                "all_reduce": sum(mine) / n,
                "all_gather": torch.cat(mine, 1),
                "reduce_scatter": sum(mine).chunk(n, 1)[i],  # type: ignore[union-attr]
                "all_to_all": torch.cat([v.chunk(n, 1)[i] for v in mine], 0),
                "permute_ranks": mine[(i - 1) % n],
                "broadcast": mine[1],
            }[name]  # type: ignore[assignment]
    calls: dict[str, Callable[[Any], Any]] = {
        "all_reduce": lambda v: dt.all_reduce(v, "avg", over=over),
        "all_gather": lambda v: dt.all_gather(v, over=over, dim=1),
        "reduce_scatter": lambda v: dt.collectives.reduce_scatter(v, over=over, dim=1),
        "all_to_all": lambda v: dt.collectives.all_to_all(v, over=over, split=1, cat=0),
        "permute_ranks": lambda v: permute_ranks(v, over, by=1),
        "broadcast": lambda v: dt.broadcast(v, over=over, src=1),
    }
    call = calls[name]
    got = call(x)
    for shown, want in zip(got.shards(), wanted, strict=True):
        torch.testing.assert_close(shown.cpu(), want, rtol=1e-14, atol=1e-14)
    each(x, values)
    # its gradient is that of the sum of all ranks' results, weighted: <call(x), w> = <x, gradient(w)> as it is linear
    x = x.detach().requires_grad_()
    out = call(x)
    w, weights = unlike(m, *out.shape, dtype=torch.float64)
    (out * w).sum().backward()
    before = sum((a * b).sum() for a, b in zip(wanted, weights, strict=True))
    after = sum((a * b.cpu()).sum() for a, b in zip(values, x.grad.shards(), strict=True))
    torch.testing.assert_close(after, before, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "name", ["all_reduce", "all_reduce_", "all_gather", "reduce_scatter", "all_to_all", "permute_ranks", "broadcast"]
)
def test_asynchronous_collectives_give_a_work(name: str) -> None:
    m = grid()
    x, values = unlike(m, 4, 4)
    calls: dict[str, Callable[..., Any]] = {
        "all_reduce": dt.all_reduce,
        "all_reduce_": all_reduce_,
        "all_gather": partial(dt.all_gather, dim=1),
        "reduce_scatter": partial(dt.collectives.reduce_scatter, dim=1),
        "all_to_all": partial(dt.collectives.all_to_all, split=1),
        "permute_ranks": permute_ranks,
        "broadcast": partial(dt.broadcast, src=1),
    }
    call = calls[name]
    wanted = call(from_shards(m, values), over="dp")
    work = call(x, over="dp", async_op=True)
    beside = x.sum() if name != "all_reduce_" else torch.ones(2, device=m.device).sum()
    assert work.wait()
    assert work.is_completed()
    assert work.exception() is None
    got = work.result()
    assert work.result() is got
    assert (got is x) == (name == "all_reduce_")
    each(got, [shown.cpu() for shown in wanted.shards()])
    assert name in repr(work)
    beside.shards()[0].item()
    assert call(x, over="tp", async_op=True).result(timeout=HANG).shape == wanted.shape
    w = x.detach().requires_grad_()
    if name != "all_reduce_":
        out = call(w, over="dp", async_op=True).result()
        (g,) = torch.autograd.grad(out.sum(), w)
        v = x.detach().requires_grad_()
        (h,) = torch.autograd.grad(call(v, over="dp").sum(), v)
        each(g, [shown.cpu() for shown in h.shards()])
    with pytest.raises(dt.errors.GraphError, match="async_op"), dt.graph(dt.Graph()):
        call(x, over="dp", async_op=True)


def test_an_asynchronous_collective_fails_as_its_group_does() -> None:
    m = grid()
    index = from_shards(m, [torch.tensor([i]) for i in (0, 9, 1, 2)])
    bad = F.embedding(index, torch.ones(4, 3, device=m.device))
    work = dt.all_reduce(bad, over="tp", async_op=True)
    with pytest.raises(IndexError):
        work.result()
    assert isinstance(work.exception(), IndexError)
    spared = dt.all_reduce(bad, over="tp").at(dp=1, tp=0)  # type: ignore[attr-defined]
    assert spared.cpu().tolist() == [[2.0, 2.0, 2.0]]
    with pytest.raises(ValueError, match="all_reduce_ with async_op takes a contiguous tensor"):
        all_reduce_(torch.ones(4, 4, device=m.device)[:, ::2], over="dp", async_op=True)


@pytest.mark.parametrize("name", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "permute_ranks"])
def test_what_an_asynchronous_collective_reads_may_be_written_at_once(name: str) -> None:
    m = grid()
    call = getattr(dt.collectives, name)
    for _ in range(20):
        x = torch.ones(40, 50, device=m.device)
        work = call(x, over="dp", async_op=True)
        x.zero_()
        assert work.result().shards()[1].cpu().min().item() == (2 if "reduce" in name else 1)


def test_the_result_of_a_work_has_the_gradient_of_its_call() -> None:
    x = torch.ones(4, 4, device=grid().device, requires_grad=True)
    work = dt.all_gather(x, over="dp", async_op=True)
    with torch.no_grad(), torch.inference_mode():
        assert work.result().requires_grad
    with torch.no_grad():
        work = dt.all_gather(x, over="dp", async_op=True)
    assert not work.result().requires_grad


def test_a_collective_waits_for_what_was_to_write_a_view_of_its_tensor() -> None:
    """The write fails on one rank, on the node's own lane, after the collective has been queued on another."""
    m = grid()
    flat = torch.zeros(4, device=m.device)
    view = flat.split([2, 2])[0]
    view.add_(0)
    busy = torch.ones(600, 600, device="node:0")
    other = torch.ones(10, device=m.device)
    for _ in range(5):
        flat = torch.zeros(4, device=m.device)
        view = flat.split([2, 2])[0]
        view.add_(0)
        bad = F.embedding(from_shards(m, [torch.tensor(i) for i in (0, 9, 0, 0)]), torch.ones(4, 2, device=m.device))
        for _ in range(4):
            busy @ busy
        all_reduce_(other, over="dp", async_op=True)  # begins the lanes
        all_reduce_(other, over="tp")  # what comes next on node 1 waits for node 0
        view.copy_(bad)
        all_reduce_(flat, over=("dp", "tp"), async_op=True)
        for part in flat.shards():
            with pytest.raises(IndexError):
                part.cpu()


WAYS: dict[str, Callable[[Any], Any]] = {
    "all_reduce": lambda x: dt.all_reduce(x, "avg", over="dp"),
    "all_gather": lambda x: dt.all_gather(x, over="tp", dim=1),
    "reduce_scatter": lambda x: dt.collectives.reduce_scatter(x, "avg", over="tp", dim=1),
    "all_to_all": lambda x: dt.collectives.all_to_all(x, over="dp", split=1, cat=0),
    "permute_ranks": lambda x: permute_ranks(x, over="dp", by=1),
    "broadcast": lambda x: dt.broadcast(x, over="tp", src=1),
    "at": lambda x: x.at(dp=1, tp=0),
    "at a slice": lambda x: x.at(dp=1),
    "a copy": lambda x: (x.at(dp=1) * 2).to(grid().device),
}


@pytest.mark.parametrize("name", WAYS)
def test_gradients_are_those_of_finite_differences(name: str) -> None:
    m = grid()
    mesh(tp=2, nodes=[2, 3])
    inputs = [torch.randn(1, 2, dtype=torch.float64, requires_grad=True) for _ in range(NODES)]

    def function(*parts: torch.Tensor) -> tuple[torch.Tensor, ...]:
        out = WAYS[name](from_shards(m, parts))
        shards = out.shards() if name != "at" else [out]
        return tuple(((shard * (i + 1)) ** 2).cpu() for i, shard in enumerate(shards))

    assert torch.autograd.gradcheck(function, inputs)
    if name not in ("a copy",):  # whose second derivative is refused
        assert torch.autograd.gradgradcheck(function, inputs)


@pytest.mark.parametrize("name", [name for name in WAYS if "at" not in name.split() and name != "a copy"])
def test_collectives_in_transforms_of_torch_func(name: str) -> None:
    x, _ = unlike(grid(), 2, 2, dtype=torch.float64)

    def function(v: Any) -> Any:
        return (WAYS[name](v**2) ** 2).sum()

    v = x.detach().requires_grad_()
    (wanted,) = torch.autograd.grad(function(v), v)
    each(torch.func.grad(function)(x), [shard.cpu() for shard in wanted.shards()])
    with pytest.raises(TypeError, match="takes a tensor on a mesh, and this is one on the script"):
        torch.func.grad(function)(torch.ones(2, 2))


def test_a_copy_to_another_mesh_goes_by_names() -> None:
    m = grid()
    x, values = unlike(m, 3)
    turned = mesh(tp=2, dp=2, nodes=[3, 2, 1, 0])
    each(x.to(turned.device), [values[i] for i in (0, 2, 1, 3)])
    assert x.to(turned.device).device == turned.device
    row = mesh(tp=2, nodes=[0, 1])
    y, (one, other) = unlike(row, 2, 2)
    each(y.to(m.device), [one, other, one, other])
    each(y.t().to(m.device), [one.t(), other.t(), one.t(), other.t()])
    each(y.double().to(m.device).float(), [one, other, one, other])
    pair = m.split(dp=("outer", "inner"), outer=1)
    away = mesh(outer=1, inner=2, tp=2, nodes=[1, 0, 3, 2])
    assert pair.device == m.device
    each(x.to(away.device), values)
    each(x.to(mesh(other=4, nodes=range(4)).device), values)  # the same nodes, by no name of the first
    for target, there in (
        (mesh(tp=2, nodes=[2, 3]), "(tp=2) of nodes 2 and 3"),
        (mesh(dp=4, nodes=[1, 0, 2, 3]), "(dp=4) of nodes 1, 0, 2 and 3"),
        (mesh(dp=2, xx=2, nodes=[0, 2, 1, 3]), "(dp=2, xx=2) of nodes 0, 2, 1 and 3"),
    ):
        with pytest.raises(RuntimeError) as raised:
            x.to(target.device)
        assert all(text in str(raised.value) for text in ("(dp=2, tp=2)", there, "x.at(...)"))


def test_the_gradient_of_a_copy_to_another_mesh_goes_back_to_where_it_came_from() -> None:
    m, row = grid(), mesh(tp=2, nodes=[3, 1])
    x, _ = unlike(row, 3)
    weights, w = unlike(m, 3)
    x.requires_grad_()
    (x.to(m.device) * weights).sum().backward()
    each(x.grad, [w[0] + w[2], w[1] + w[3]])
    x.grad = None
    (x.to(mesh(tp=2, nodes=[1, 3]).device) * 2).sum().backward()
    each(x.grad, [torch.full((3,), 2.0)] * 2)
    x.grad = None
    x.to(m.device, torch.float64).sum().backward()
    each(x.grad, [torch.full((3,), 2.0)] * 2)


def test_all_reduce_in_place() -> None:
    m = grid()
    x, values = unlike(m, 3)
    assert all_reduce_(x, "sum", over=("dp", "tp")) is x
    for shown in x.shards():
        torch.testing.assert_close(shown.cpu(), sum(values))
    assert len({bits(shown.cpu()) for shown in x.shards()}) == 1
    y, values = unlike(m, 4, 4)
    all_reduce_(y[:, ::2], "max", over="dp")
    highest = torch.maximum(values[0], values[2])
    assert torch.equal(y.at(dp=0, tp=0).cpu()[:, ::2], highest[:, ::2])
    assert torch.equal(y.at(dp=0, tp=0).cpu()[:, 1::2], values[0][:, 1::2])


def test_the_gradient_of_a_local_number_is_the_sum_of_all_ranks() -> None:
    m = grid()
    scale = torch.tensor(3.0, requires_grad=True)
    (torch.ones(3, device=m.device) * scale).sum().backward()
    assert scale.grad is not None
    assert scale.grad.item() == 12


def test_second_derivatives_through_shards_and_broadcasts() -> None:
    m = grid()
    for way in (lambda v: v.at(dp=1, tp=0).cpu(), lambda v: dt.broadcast(v, over="dp", src=1).at(dp=0, tp=0).cpu()):
        x = torch.tensor([1.0, 2.0], device=m.device, requires_grad=True)
        (g,) = torch.autograd.grad((way(x) ** 3).sum(), x, create_graph=True)
        each(g.detach(), [torch.tensor([3.0, 12.0]) * (rank == 2) for rank in range(4)])
        (h,) = torch.autograd.grad(g.at(dp=1, tp=0).sum(), x)  # type: ignore[attr-defined]
        each(h, [torch.tensor([6.0, 12.0]) * (rank == 2) for rank in range(4)])


def test_a_shard_that_autograd_follows_is_not_written() -> None:
    m = grid()
    w = torch.ones(3, device=m.device, requires_grad=True)
    for x in (w, w * 1):
        with pytest.raises(RuntimeError, match="a shard of a tensor that requires a gradient can't be written"):
            x.at(dp=0, tp=0).mul_(5)  # type: ignore[attr-defined]
        with pytest.raises(RuntimeError, match="can't be written"):
            x.at(dp=0, tp=0).copy_(torch.zeros(3))  # type: ignore[attr-defined]
    with torch.no_grad():
        w.at(dp=0, tp=0).mul_(5)  # type: ignore[attr-defined]
    assert w.detach().at(dp=0, tp=0).tolist() == [5, 5, 5]  # type: ignore[attr-defined]


def test_a_program_that_alternates_is_sent_and_held_at_the_window() -> None:
    m = grid()
    y = x = torch.ones(3, device=m.device)
    for _ in range(6000):
        y = x + 1
        y.at(dp=0, tp=0) * 2  # type: ignore[attr-defined]
        assert dt.testing.queued(0).in_flight < 11_000
    assert y.sum().item() == 6


def test_parts_of_empty_tensors() -> None:
    m = mesh(dp=NODES)
    x = torch.zeros(0, 8, device=m.device)
    assert dt.collectives.reduce_scatter(x, over="dp", dim=1).shape == (0, 2)
    assert dt.collectives.all_to_all(x, over="dp", split=1, cat=0).shape == (0, 2)
    assert dt.all_gather(x, over="dp", dim=1).shape == (0, 32)


def test_what_one_rank_made_for_a_question_that_failed_is_freed() -> None:
    m = grid()
    index = from_shards(m, [torch.tensor([i]) for i in (0, 9, 1, 2)])
    picked = F.embedding(index, torch.ones(4, 3, device=m.device))
    with pytest.raises(IndexError):
        picked.nonzero()
    gc.collect()
    before = dt.testing.usage(0).tensors
    for _ in range(5):
        with pytest.raises(IndexError):
            picked.nonzero()
    gc.collect()
    assert dt.testing.usage(0).tensors <= before


# ---- one value -------------------------------------------------------------------------------------------------------


def test_the_remedy_is_in_the_message() -> None:
    m = grid()
    loss = m.coordinate("dp") + 0.5
    with pytest.raises(RanksDiffer) as raised:
        loss.item()
    text = str(raised.value)
    assert "0.5 at dp=0, tp=0, 1.5 at dp=1, tp=0" in text
    remedy = re.search(r"dt\.all_reduce\(x, 'avg', over=.*?\)\)?", text)
    assert remedy is not None
    assert eval(remedy[0], {"dt": dt, "x": loss}).item() == 1.0
    shown = re.search(r"x\.at\(.*?\)", text)
    assert shown is not None
    assert eval(shown[0], {"x": loss}).item() == 0.5


@pytest.mark.parametrize("size", [1, 10, 100_000])
def test_one_element_that_differs_is_seen(size: int) -> None:
    m = grid()
    x = torch.zeros(size, device=m.device)
    assert torch.equal(x.cpu(), torch.zeros(size))
    x.at(dp=1, tp=1)[-1] = 1e-30  # type: ignore[attr-defined]
    for ask in (x.cpu, x.tolist, lambda: torch.save(x, io.BytesIO()), lambda: x.numpy(force=True)):
        with pytest.raises(RanksDiffer):
            ask()


def test_nans_are_compared_by_their_bits() -> None:
    m = grid()
    x = torch.full((3,), math.nan, device=m.device)
    assert math.isnan(x.sum().item())
    assert x.cpu().isnan().all()
    x.at(dp=0, tp=1).neg_()  # type: ignore[attr-defined]
    with pytest.raises(RanksDiffer):
        x.cpu()
    zero = torch.zeros((), device=m.device)
    zero.at(dp=0, tp=1).neg_()  # type: ignore[attr-defined]
    with pytest.raises(RanksDiffer, match=r"0\.0 at dp=0, tp=0, -0\.0 at dp=0, tp=1"):
        zero.item()


#: Methods of tensors, and what Python's own functions call.
METHODS = sorted(
    name
    for name in dir(torch.Tensor)
    if callable(getattr(torch.Tensor, name)) and not name.endswith("_") and not name.startswith("_")
)
METHODS += ["__bool__", "__float__", "__int__", "__complex__", "__index__", "__len__", "__format__", "__contains__"]
VALUES = {
    "float": [torch.tensor(float(i)) for i in (1, 2, 0, 3)],
    "int": [torch.tensor(i) for i in (1, 2, 0, 3)],
    "bool": [torch.tensor(bool(i)) for i in (1, 0, 1, 1)],
    "vector": [torch.tensor([float(i), i % 2]) for i in (1, 2, 0, 3)],
}


@pytest.mark.parametrize("kind", VALUES)
@pytest.mark.filterwarnings("ignore")
def test_no_method_gives_the_value_of_one_rank(kind: str) -> None:
    """By walking the surface: what gives different Python values on the ranks' own tensors gives none on the mesh."""
    m, values = grid(), VALUES[kind]
    x, looked = from_shards(m, values), []
    for name in METHODS:
        args = ("",) if name == "__format__" else (1.0,) if name == "__contains__" else ()
        try:
            found = [plain(getattr(value.clone(), name)(*args)) for value in values]
        except Exception:
            continue
        if len(set(found)) > 1:
            looked.append(name)
            with contextlib.suppress(dt.DisttensorError, TypeError):
                raise AssertionError(f"{name} gave {plain(getattr(x.clone(), name)(*args))}, of {found}")
    assert {"item", "tolist", "__bool__"} - ({"item", "__bool__"} if kind == "vector" else set()) <= set(looked)


def plain(value: Any) -> str:
    """A result as text, of tensors only their form: their values stay where they are."""
    if isinstance(value, torch.Tensor):
        return f"{tuple(value.shape)} {value.dtype}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(plain, value))}]"
    if isinstance(value, torch.UntypedStorage):
        return f"{len(value)} bytes"
    if hasattr(value, "__next__"):
        return plain(list(value))
    if isinstance(value, str):  # a text that is formatted says whose values it has, as printing does
        return value if "\n" not in value and not value.startswith("tensor(") else ""
    return "" if "0x" in repr(value) or (isinstance(value, (int, float)) and abs(value) > 1e9) else repr(value)


def test_printing_never_raises() -> None:
    m = grid()
    assert repr(torch.ones(2, device=m.device)) == "tensor([1., 1.], device=mesh(dp=2, tp=2))"
    text = repr(m.coordinate("dp"))
    assert text.splitlines()[1:] == [
        "dp=0, tp=0: tensor(0, device='node:0')",
        "dp=0, tp=1: tensor(0, device='node:1')",
        "dp=1, tp=0: tensor(1, device='node:2')",
        "...",
    ]
    assert "Linear(in_features=2" in repr(nn.Linear(2, 2).to(m.device))
    assert len(repr(torch.randn(1000, 1000, device=m.device))) < 3000


def test_saved_and_copied() -> None:
    m = grid()
    model = network().to(m.device)
    stream = io.BytesIO()
    torch.save(model.state_dict(), stream)
    stream.seek(0)
    for name, value in torch.load(stream).items():
        assert torch.equal(value, network().state_dict()[name])
    twin = copy.deepcopy(model)
    assert {p.device for p in twin.parameters()} == {m.device}
    each(twin[0].weight, [network()[0].weight] * NODES)
    x, _ = unlike(m, 5, 1, 8, 8)
    model(x)  # BatchNorm's statistics differ by rank now
    with pytest.raises(RanksDiffer, match="at dp=0, tp=0"):
        torch.save(model.state_dict(), io.BytesIO())


# ---- random numbers --------------------------------------------------------------------------------------------------


def test_replicas_stay_equal_whatever_else_draws() -> None:
    m = grid()
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 1)).to(m.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    half = m.slice(dp=0)
    for i in range(200):
        x = torch.randn(4, 8, device=m.device)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        match i % 4:
            case 0:
                torch.rand(3, device="node:2")
            case 1:
                dt.run(torch.randn, 5, node=1)
            case 2:
                F.dropout(torch.ones(4, device=half.device))
    for p in model.parameters():
        assert len({bits(s.detach().cpu()) for s in p.shards()}) == 1  # type: ignore[attr-defined]


def test_draws_in_between_change_nothing() -> None:
    m = grid()

    def numbers(between: Callable[[], object]) -> list[torch.Tensor]:
        torch.manual_seed(11)
        drawn = []
        for _ in range(4):
            drawn.append(torch.randn(3, device=m.device).cpu())
            between()
        return drawn

    alone = numbers(lambda: None)
    torch.manual_seed(11)
    for got in alone:
        assert torch.equal(got, torch.randn(3))  # as here, after the same seed
    for between in (
        lambda: torch.rand(2, device="node:1"),
        lambda: torch.rand(2, device=m.slice(tp=1).device),
        lambda: dt.run(torch.randn, 2, node=[0, 3]),
        lambda: torch.get_rng_state(),
        lambda: torch.node.get_rng_state("node:1"),  # type: ignore[attr-defined]
    ):
        assert all(map(torch.equal, numbers(between), alone))


def test_a_node_draws_as_if_there_were_no_mesh() -> None:
    m = grid()
    torch.manual_seed(12)
    first = torch.rand(3, device="node:1").cpu()
    torch.rand(5, device=m.device)
    second = torch.rand(3, device="node:1").cpu()
    torch.manual_seed(12)
    assert torch.equal(torch.rand(3), first)
    assert torch.equal(torch.rand(3), second)


def test_what_varies_begins_anew_with_each_seed() -> None:
    """Whichever generator was in use when all were seeded, and wherever others rested."""
    m = grid()

    def varying() -> list[bytes]:
        with dt.meshes.varying("dp", "tp"):
            return [bits(shard.cpu()) for shard in torch.rand(3, device=m.device).shards()]

    torch.manual_seed(3)
    first = varying()
    assert len(set(first)) == NODES
    between: list[Callable[[], object]] = [
        lambda: None,
        lambda: torch.rand(1, device=m.device),
        lambda: torch.rand(1, device="node:2"),
        lambda: varying(),
    ]
    for before, after in itertools.product(between, between[:-1]):
        before()
        torch.manual_seed(3)
        after()
        assert varying() == first
    torch.manual_seed(3)
    varied = dt.meshes.varying("dp", "tp")
    with pytest.raises(NotImplementedError, match="on a stream"), dt.stream(dt.Stream(0)), varied:
        torch.rand(1, device=m.device)
    assert varying() == first


def test_a_recorded_seed_seeds_nothing() -> None:
    m = grid()
    torch.rand(1, device="node:0")
    torch.rand(1, device=m.device)
    torch.rand(1, device="node:0")
    torch.manual_seed(11)
    wanted = [bits(shard.cpu()) for shard in torch.rand(3, device=m.device).shards()]  # type: ignore[attr-defined]
    torch.rand(1, device="node:0")
    torch.manual_seed(11)
    with dt.graph(dt.Graph()):
        torch.manual_seed(5)
        with dt.meshes.varying("dp"):
            torch.rand(1, device=m.device)
    assert [bits(shard.cpu()) for shard in torch.rand(3, device=m.device).shards()] == wanted  # type: ignore[attr-defined]


def test_a_mesh_stays_itself_in_copies_and_is_not_pickled() -> None:
    m = grid()
    module = nn.Linear(2, 2).to(m.device)
    module.mesh = m
    copied = copy.deepcopy(module)
    assert copied.mesh is m
    assert copy.copy(m) is m
    with pytest.raises(TypeError, match=r"keep mesh.nodes, mesh.names and mesh.shape"):
        pickle.dumps(m)


def test_numbers_that_vary_along_a_dim() -> None:
    """Along no other one, and beside those that are the same on all: neither changes the other."""
    m = grid()

    def draw(*along: str) -> list[torch.Tensor]:
        with dt.meshes.varying(*along):
            return [s.cpu() for s in torch.rand(5, device=m.device).shards()]  # type: ignore[attr-defined]

    torch.manual_seed(20)
    alone = [draw() for _ in range(3)]
    torch.manual_seed(20)
    mixed = [draw(), draw("dp"), draw(), draw("tp"), draw("dp", "tp"), draw("dp"), draw()]
    for got, wanted in zip([mixed[0], mixed[2], mixed[6]], alone, strict=True):
        assert all(map(torch.equal, got, wanted))
    for shards, groups in ((mixed[1], [{0, 1}, {2, 3}]), (mixed[5], [{0, 1}, {2, 3}]), (mixed[3], [{0, 2}, {1, 3}]),
                           (mixed[4], [{0}, {1}, {2}, {3}]), (mixed[0], [{0, 1, 2, 3}])):  # fmt: skip
        for a, b in itertools.combinations(range(4), 2):
            together = any({a, b} <= group for group in groups)
            assert torch.equal(shards[a], shards[b]) == together
    assert not torch.equal(mixed[1][0], mixed[5][0])
    torch.manual_seed(20)
    again = [draw(), draw("dp")]
    assert all(map(torch.equal, again[1], mixed[1]))
    with pytest.raises(ValueError, match=r"varying: .* has no dim 'pp'"):
        draw("pp")
    with pytest.raises(TypeError, match="varying takes names of dims, not 3"):
        draw(3)  # type: ignore[arg-type]
    x = torch.ones(4, 6, device=m.device, requires_grad=True)
    from torch.utils.checkpoint import checkpoint

    with dt.meshes.varying("dp", "tp"):
        y = checkpoint(lambda v: F.dropout(v, 0.5), x, use_reentrant=False)
    y.sum().backward()  # computes the block again, out of the block
    assert x.grad is not None
    for grad, kept in zip(x.grad.shards(), y.detach().shards(), strict=True):  # type: ignore[attr-defined]
        assert torch.equal(grad.cpu(), kept.cpu())


def test_threads_that_draw_at_once() -> None:
    m, over = grid(), threading.Event()

    def draw() -> None:
        while not over.is_set():
            torch.rand(2, device="node:0")

    thread = threading.Thread(target=draw)
    thread.start()
    try:
        for _ in range(300):
            x = torch.rand(2, device=m.device)
            x.cpu()  # the same on all
    finally:
        over.set()
        thread.join()


def test_layers_that_draw_inside_of_torchs_composites() -> None:
    m = grid()

    def run(device: Any) -> torch.Tensor:
        torch.manual_seed(31)
        layer = nn.LSTM(3, 4, num_layers=2, dropout=0.5)
        x = torch.randn(5, 2, 3)
        torch.manual_seed(32)
        layer, x = layer.to(device), x.to(device)
        first, _ = layer(x)
        torch.rand(2, device="node:0")
        torch.rand(2, device=m.device) if device == "cpu" else None
        second, _ = layer(x)
        return torch.cat([first.detach(), second.detach()])

    alone = run("node:0")
    torch.rand(1, device=m.device)
    assert torch.equal(run("node:0").cpu(), alone.cpu())
    run(m.device).cpu()  # the same on all


def test_a_closed_mesh_draws_the_same_on_all() -> None:
    made = mesh(closed=NODES)
    x = torch.ones(3, device=made.device)
    torch.rand_like(x)
    made.close()
    torch.rand(2, device="node:1")
    torch.rand_like(x).cpu()
    torch.manual_seed(40)
    first = torch.rand(2, device="node:1").cpu()
    torch.manual_seed(40)
    assert torch.equal(torch.rand(2), first)


def test_draws_on_a_stream_beside_a_mesh_are_refused() -> None:
    grid()
    with pytest.raises(NotImplementedError, match="on a stream of its own"), dt.stream(dt.Stream(node=0)):
        torch.rand(2, device="node:0")


def test_states_of_a_mesh() -> None:
    m = grid()
    state = torch.node.get_rng_state(m.device)  # type: ignore[attr-defined]
    first = torch.rand(3, device=m.device).cpu()
    torch.rand(3, device="node:0")
    torch.node.set_rng_state(state, m.device)  # type: ignore[attr-defined]
    assert torch.equal(torch.rand(3, device=m.device).cpu(), first)
    g = torch.Generator(device=m.device).manual_seed(3)
    again = torch.Generator().manual_seed(3)
    for _ in range(2):
        assert torch.equal(torch.rand(3, device=m.device, generator=g).cpu(), torch.rand(3, generator=again))


# ---- functions, errors, bad input ------------------------------------------------------------------------------------


def test_a_function_gets_its_nodes_shard() -> None:
    m = line()
    x = from_shards(m, [torch.tensor(float(i)) for i in range(NODES)])
    assert dt.run(lambda v: v.item(), x, node=list(m.nodes)) == [0, 1, 2, 3]
    dt.run(lambda v: v.add_(10) and None, x, node=0)
    assert [s.item() for s in x.shards()] == [0, 1, 12, 3]  # type: ignore[attr-defined]


def test_an_error_on_some_ranks_is_theirs() -> None:
    m = grid()
    index = from_shards(m, [torch.tensor([i]) for i in (0, 9, 1, 9)])
    rows = torch.arange(12.0, device=m.device).view(4, 3)
    picked = F.embedding(index, rows)  # by this line
    for ask in (lambda: picked.sum().item(), picked.cpu):
        with pytest.raises(IndexError, match="index out of range") as raised:
            ask()
        notes = "\n".join(raised.value.__notes__)
        assert "aten::embedding on node 1" in notes
        assert "on node 1 (dp=0, tp=1), node 3 (dp=1, tp=1): 2 of 4 ranks" in notes
        assert "test_meshes.py" in notes
    assert picked.at(dp=1, tp=0).tolist() == [[3, 4, 5]]  # type: ignore[attr-defined]
    assert dt.all_reduce(picked, "sum", over="dp").at(dp=0, tp=0).tolist() == [[3, 5, 7]]  # type: ignore[attr-defined]
    with pytest.raises(IndexError):
        dt.all_reduce(picked, "sum", over="dp").at(dp=0, tp=1).cpu()  # type: ignore[attr-defined]


def test_shapes_that_depend_on_the_data() -> None:
    m = grid()
    equal = torch.tensor([1.0, 0.0, 2.0], device=m.device).nonzero()
    assert equal.tolist() == [[0], [2]]
    gc.collect()
    before = [dt.testing.usage(node).tensors for node in range(NODES)]
    with pytest.raises(RanksDiffer, match=r"aten::nonzero: .* at dp=0, tp=0.*dt\.run\(function, node=mesh, dist"):
        from_shards(m, [torch.tensor([1.0, i % 2]) for i in range(4)]).nonzero()  # type: ignore[attr-defined]
    gc.collect()
    assert [dt.testing.usage(node).tensors for node in range(NODES)] == before  # what each has made is gone


MISTAKES: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "sizes": (lambda: mesh(dp=3), ValueError, r"dp=3 are 3 ranks, and there are 4 nodes in the session"),
    "sizes of some": (lambda: mesh(dp=3, nodes=[0, 1]), ValueError, r"dp=3 are 3 ranks, and there are 2 nodes;"),
    "two are left": (lambda: mesh(a=-1, b=-1), ValueError, r"only one size can be -1, not those of \['a', 'b'\]"),
    "does not divide": (lambda: mesh(a=3, b=-1), ValueError, "3 ranks of the other dims do not divide 4 nodes"),
    "no size": (lambda: mesh(dp=2.0), ValueError, r"the size of a dim is a positive integer, or -1, and dp=2\.0"),  # type: ignore[arg-type]
    "twice": (lambda: mesh(nodes=[1, 1]), ValueError, "node 1 is named twice"),
    "no nodes": (lambda: mesh(nodes=[]), ValueError, "there is no node in nodes="),
    "no such node": (lambda: mesh(nodes=[0, 9]), ValueError, "node 9 does not exist"),
    "no such device": (lambda: mesh(device="cuda:0"), RuntimeError, "node 0 has no device cuda:0; it has cpu"),
    "no such dim": (lambda: grid().size("pp"), ValueError, r"has no dim 'pp'; it has dp, tp"),
    "a dim out of range": (lambda: grid().slice(dp=2), ValueError, r"dp=2 is not in Mesh.*: it has 0 to 1"),
    "all dims": (lambda: grid().slice(dp=0, tp=0), ValueError, "is one node of"),
    "split": (lambda: grid().split(dp=("a", "b"), a=3), ValueError, "a=3 does not divide dp=2"),
    "split without a size": (lambda: grid().split(dp=("a", "b")), ValueError, "give the size of one of 'a' and 'b'"),
    "a name that is taken": (lambda: mesh(dp=4).split(dp=("pp", "dp"), pp=2), ValueError,
                             r"'dp' is another dim of the mesh \(dp=4\).*; call this one otherwise"),
    "two meshes": (lambda: torch.ones(1, device=grid().device) + torch.ones(1, device=mesh(dp=4).device), RuntimeError,
                   r"on the mesh \(dp=2, tp=2\) .* and .* on the mesh \(dp=4\)"),
    "rename": (lambda: grid().rename(dp="tp"), ValueError, "two dims of .* would have one name"),
    "at": (lambda: torch.ones(1, device=grid().device).at(pp=0), ValueError, "has no dim 'pp'"),  # type: ignore[attr-defined]
    "at out of range": (lambda: torch.ones(1, device=grid().device).at(dp=7), ValueError, "dp=7 is not in"),  # type: ignore[attr-defined]
    "shard": (lambda: shard(torch.ones(3), grid(), dp=0), ValueError, r"has 3 entries, which dp=2 does not divide"),
    "shard's dimension": (lambda: shard(torch.ones(4), grid(), dp=1), ValueError, r"dp=1: .* has no dimension 1"),
    "shard's dim": (lambda: shard(torch.ones(4), grid(), pp=0), ValueError, "has no dim 'pp'"),
    "shards": (lambda: from_shards(grid(), [torch.ones(1)]), ValueError, "1 tensors for 4 ranks"),
    "unlike shards": (lambda: from_shards(grid(), [torch.ones(1)] * 3 + [torch.ones(2)]), ValueError,
                      r"tensor 3 is \(2,\)"),
    "no tensor": (lambda: replicate(3, grid()), TypeError, "replicate has to be a tensor, not int"),  # type: ignore[arg-type]
    "no mesh": (lambda: replicate(torch.ones(1), "node:1"), TypeError, "takes a mesh, or a tensor on one"),  # type: ignore[arg-type]
    "there already": (lambda: replicate(torch.ones(1, device=grid().device), grid()), TypeError, "already"),
    "no over": (lambda: dt.all_reduce(torch.ones(1, device=grid().device)), TypeError,
                r"takes over=, a dim of the mesh or several: dp=2, tp=2"),
    "over a node": (lambda: dt.all_reduce(torch.ones(1, device="node:0"), over="dp"), TypeError,
                    "takes a tensor on a mesh, and this is one on node 0 cpu"),
    "over no dim": (lambda: dt.all_reduce(torch.ones(1, device=grid().device), over="pp"), ValueError, "no dim 'pp'"),
    "no op": (lambda: dt.all_reduce(torch.ones(1, device=grid().device), "mean", over="dp"), TypeError,
              "'mean' is not a reduction"),
    "a node's tensor beside it": (lambda: torch.ones(1, device=grid().device) + torch.ones(1, device="node:1"),
                                  RuntimeError, r"on the mesh \(dp=2, tp=2\) of nodes 0, 1, 2 and 3 cpu and"),
    "the node of it": (lambda: torch.ones(1, device=grid().device).get_node(), dt.DisttensorError,  # type: ignore[attr-defined]
                       r"x\.at\(dp=0, tp=0\) is a tensor's shard on one of them"),
    "a fetch": (lambda: dt.fetch(torch.ones(1, device=grid().device)), dt.DisttensorError, r"x\.at\(dp=0, tp=0\)"),
    "a stream": (lambda: dt.Stream(grid().device), dt.DisttensorError, "this is for one node"),
    "to one node": (lambda: torch.ones(1, device=grid().device).to("node:1"), RuntimeError,
                    r"x\.at\(dp=0, tp=0\)\.to\('node:1'\) copies one of them"),
    "a shape": (lambda: torch.ones(2, device=grid().device) @ torch.ones(3, device=grid().device), RuntimeError,
                "size"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes(name: str) -> None:
    make, kind, text = MISTAKES[name]
    with pytest.raises(kind, match=text):
        make()


def test_a_closed_mesh_gives_its_slot_back() -> None:
    made = mesh(z=2, nodes=[3, 0])
    x = torch.ones(2, device=made.device)
    slot = made.device.index
    made.close()
    assert (x + 1).sum().item() == 4
    with pytest.raises(
        RuntimeError, match=rf"device 'node:{slot}' is closed: it was the mesh \(z=2\) of nodes 3 and 0 cpu"
    ):
        torch.ones(2, device=f"node:{slot}")
    assert mesh(z=2, nodes=[0, 3]).device.index != slot  # as long as there are others
    again = mesh(z=2, nodes=[3, 0])
    assert again == made
    assert (torch.ones(2, device=again.device) + x).sum().item() == 4


def test_closing_a_mesh_closes_that_one_only() -> None:
    """Not one of the same nodes that other code has made, nor what is there; its own views are closed with it."""
    first, second = mesh(once=2, nodes=[1, 2]), mesh(once=2, nodes=[1, 2])
    whole = mesh(outer=2, inner=2)
    part, kept = whole.slice(outer=0), whole.slice(outer=0).device
    assert (first.device, repr(first)) == (second.device, repr(second))
    linear = torch.nn.Linear(4, 2).to(first.device)
    view = second.rename(once="twice")
    second.close()
    second.close()
    view.close()
    assert repr(second) == "Mesh(once=2, nodes=[1, 2], closed)"
    assert repr(view) == "Mesh(twice=2, nodes=[1, 2], closed)"
    assert repr(first) == "Mesh(once=2, nodes=[1, 2])"
    x = torch.ones(3, 4, device=first.device)
    assert linear(x).shape == (3, 2)
    assert dt.run(len, x, node=first) == [3, 3]
    part.close()
    assert torch.ones(2, device=kept).sum().item() == 2  # the other slice's
    first.close()
    assert (x + 1).sum().item() == 24
    for make in (lambda: torch.ones(3, device=first.device), lambda: torch.ones(3).to(second.device)):
        with pytest.raises(RuntimeError, match=r"whose close\(\) .* dt.mesh\(once=2, nodes=\[1, 2\]\) has new"):
            make()
    again = mesh(once=2, nodes=[1, 2])
    assert torch.ones(3, device=first.device).sum().item() == 3
    again.close()
