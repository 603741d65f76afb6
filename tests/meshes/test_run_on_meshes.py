"""``dt.run(fn, node=mesh, distributed=True)``: ranks of a mesh, with torch's DeviceMesh of it, and how they fail."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from began import Began, tell
from equal import same
from mesh_kit import connected
from telling import said
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import disttensor as dt
from disttensor import mesh, shard
from disttensor.meshes import Mesh, from_shards
from disttensor.tasks import Each, device_mesh

pytestmark = pytest.mark.usefixtures("settled")

NODES = 4


@pytest.fixture(scope="module", autouse=True)
def session() -> Iterator[None]:
    with connected(NODES):
        # what is made at first use: have it before the tests look for leaks
        dt.run(place, node=grid(), distributed=True)
        yield


def grid() -> Mesh:
    return mesh(dp=2, tp=2)


def mixed() -> Mesh:
    """The same nodes in another order."""
    return mesh(pp=2, dp=2, nodes=[3, 1, 0, 2])


def place() -> tuple[int, int, dict[str, int]]:
    """The process, and its rank, and coordinates."""
    ours = device_mesh()
    return os.getpid(), dist.get_rank(), {name: ours.get_local_rank(name) for name in ours.mesh_dim_names}


def plus_one(x: torch.Tensor) -> None:
    x.add_(1)


def pids(m: Mesh) -> list[int]:
    return [dt.nodes()[node]["pid"] for node in m.nodes]


# ---- ranks, arguments and results ------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [grid, mixed, lambda: mixed().flatten("all"), lambda: mesh(a=2, b=1, c=2)])
def test_ranks_are_in_the_meshs_order(make: Callable[[], Mesh]) -> None:
    m = make()
    at = [dict(zip(m.names, at, strict=True)) for at in itertools.product(*map(range, m.shape))]
    assert dt.run(place, node=m, distributed=True) == list(zip(pids(m), range(NODES), at, strict=True))
    assert dt.run(os.getpid, node=m) == pids(m)


def test_a_mesh_of_some_nodes() -> None:
    part = grid().slice(tp=1)
    assert dt.run(place, node=part, distributed=True) == [(pids(part)[i], i, {"dp": i}) for i in range(2)]
    one = mesh(only=1, nodes=[2])
    assert dt.run(place, node=one, distributed=True) == [(pids(one)[0], 0, {"only": 0})]


def test_node_runs_without_a_process_group() -> None:
    dt.run(dist.get_rank, node=[1, 0], distributed=True)
    dt.run(dist.get_rank, node=[3, 2], distributed=True)
    assert dt.run(dist.get_world_size, node=grid()) == [2] * NODES  # those of the calls before
    with pytest.raises(dt.DisttensorError, match="device_mesh"):
        dt.run(place, node=grid())


def test_each_node_gets_its_own_part() -> None:
    m = mixed()
    values = list(torch.randn(NODES, 3))
    x = from_shards(m, values)
    for where in ({"node": m, "distributed": True}, {"node": m}):
        assert dt.run(lambda t: t.tolist(), x, **where) == [value.tolist() for value in values]
        assert dt.run(lambda d: d["x"][0].tolist(), {"x": [x]}, **where) == [value.tolist() for value in values]
    view, part = m.flatten("all"), m.slice(dp=1)
    assert dt.run(lambda t: t.tolist(), x, node=view, distributed=True) == [value.tolist() for value in values]
    assert dt.run(lambda t: t.tolist(), x, node=part, distributed=True) == [values[i].tolist() for i in (1, 3)]
    assert dt.run(lambda t: t.tolist(), x, node=list(reversed(m.nodes)), distributed=True) == [
        v.tolist() for v in reversed(values)
    ]
    dt.run(plus_one, x, node=m, distributed=True)  # the same memory
    for got, value in zip(x.shards(), values, strict=True):  # type: ignore[attr-defined]
        same(got, value + 1, strides=False)


def test_nodes_that_have_no_part_get_none() -> None:
    m = grid()
    x = torch.arange(3.0).to(m.slice(dp=1).device)
    with pytest.raises(RuntimeError, match=r"on the mesh \(tp=2\) .* to node 0 cpu: .* x.at\(tp=0\)\.to\('node:0'\)"):
        dt.run(lambda t: t.sum().item(), x, node=m, distributed=True)
    assert dt.run(lambda t: t.sum().item(), x.at(tp=0), node=m, distributed=True) == [3.0] * NODES  # type: ignore[attr-defined]


def test_each_is_a_value_per_node_in_the_meshs_order() -> None:
    m = mixed()
    for where in ({"node": m, "distributed": True}, {"node": m}):
        assert dt.run(lambda k, by: k * by, Each([2, 3, 4, 5]), by=Each("abcd"), **where) == [
            "aa",
            "bbb",
            "cccc",
            "ddddd",
        ]
    with pytest.raises(
        ValueError, match=r"Each has 3 values for the 4 nodes of Mesh\(pp=2, dp=2, nodes=\[3, 1, 0, 2\]"
    ):
        dt.run(lambda k: k, Each([1, 2, 3]), node=m, distributed=True)


def test_results_are_the_shards_of_a_tensor() -> None:
    m = mixed()
    values = torch.randn(NODES, 2, 3)
    found = dt.run(lambda t: t.sum(1), from_shards(m, list(values)), node=m, distributed=True)
    assert [one.get_node() for one in found] == list(m.nodes)
    whole = from_shards(m, found)
    assert whole.device == m.device
    total = dt.all_reduce(whole, "sum", over="dp")
    wanted = values.sum(2).reshape(2, 2, 2).sum(1)
    for i, got in enumerate(total.shards()):  # type: ignore[attr-defined]
        torch.testing.assert_close(got.cpu(), wanted[i // 2])


def test_what_was_issued_before_has_been_done() -> None:
    m = grid()
    x = torch.zeros(2, device=m.device)
    for _ in range(3):
        x.add_(1)
        x.at(dp=1, tp=0).mul_(2)  # type: ignore[attr-defined]
        dt.run(plus_one, x, node=m, distributed=True)
    assert [one[0].item() for one in x.shards()] == [6, 6, 21, 6]  # type: ignore[attr-defined]


# ---- the device mesh -------------------------------------------------------------------------------------------------


VIEWS: list[tuple[Callable[[], Mesh], str]] = [
    (grid, "dp"), (grid, "tp"), (mixed, "pp"), (mixed, "dp"),
    (lambda: grid().flatten("all"), "all"), (lambda: grid().rename(dp="replica"), "replica"),
    (lambda: mesh(wide=4).split(wide=("outer", "inner"), outer=2), "inner"),
    (lambda: mesh(a=2, one=1, b=2), "one"), (lambda: mesh(a=2, one=1, b=2), "b"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "dim"), VIEWS)
def test_a_sum_over_a_dim_is_the_local_one(make: Callable[[], Mesh], dim: str) -> None:
    def total(x: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(x, group=device_mesh()[dim].get_group())
        return x

    m = make()
    values = torch.randn(NODES, 5)
    found = dt.run(total, from_shards(m, list(values)), node=m, distributed=True)
    over = values.reshape(*m.shape, 5)
    wanted = over.sum(m.names.index(dim), keepdim=True).expand_as(over).reshape(NODES, 5)
    for got, value in zip(found, wanted, strict=True):
        torch.testing.assert_close(got.cpu(), value)


def test_it_is_what_torch_would_make() -> None:
    def compare() -> list[Any]:
        ours = device_mesh()
        theirs = dist.init_device_mesh("cpu", ours.shape, mesh_dim_names=ours.mesh_dim_names)
        return [
            [m.mesh.tolist(), m.get_coordinate(), m.device_type, m.size(), m.ndim,
             [(dist.get_process_group_ranks(m.get_group(n)), m[n].mesh.tolist()) for n in m.mesh_dim_names]]
            for m in (ours, theirs)
        ]  # fmt: skip

    for m in (grid(), mesh(a=2, one=1, b=2), mesh(all=4)):
        for ours, theirs in dt.run(compare, node=m, distributed=True):
            assert ours == theirs


def test_it_stays_for_the_next_call() -> None:
    def made(dim: str) -> tuple[int, int]:
        return id(device_mesh()), id(device_mesh().get_group(dim))

    m = grid()
    first = dt.run(made, "dp", node=m, distributed=True)
    assert dt.run(made, "dp", node=grid(), distributed=True) == first
    renamed = dt.run(made, "replica", node=m.rename(dp="replica"), distributed=True)
    assert [group for _, group in renamed] == [group for _, group in first]  # no connections of its own
    assert dt.run(lambda: dist.get_world_size(), node=range(NODES), distributed=True) == [NODES] * NODES
    assert dt.run(made, "dp", node=m, distributed=True) == first
    dt.run(lambda: None, node=[1, 2], distributed=True)  # another process group
    assert dt.run(place, node=m, distributed=True) == dt.run(place, node=m, distributed=True)


def test_ranks_that_do_not_use_it_keep_nobody_waiting() -> None:
    def some(x: torch.Tensor) -> float:
        if dist.get_rank() < 2:
            dist.all_reduce(x, group=device_mesh().get_group("here"))
        return x.item()

    m = grid().rename(dp="there", tp="here")
    dt.run(lambda: None, node=[0, 1], distributed=True)  # a process group without groups of dims
    assert dt.run(some, torch.ones(1), node=m, distributed=True) == [2, 2, 1, 1]


def test_groups_that_a_function_makes_on_some_ranks() -> None:
    """torch counts them, and names groups by the count, which would be another one on each rank."""

    def uneven() -> None:
        for _ in range(dist.get_rank()):
            dist.new_group([dist.get_rank()])

    dt.run(lambda: None, node=[0], distributed=True)  # ends a process group that has groups of dims
    dt.run(uneven, node=range(NODES), distributed=True)
    assert dt.run(place, node=grid(), distributed=True)[2][2] == {"dp": 1, "tp": 0}
    assert dt.run(uneven, node=grid(), distributed=True) == [None] * NODES


@pytest.mark.parametrize("who", [-1, 0, 3])
def test_a_function_may_destroy_a_group_of_a_dim(who: int) -> None:
    def leave() -> None:
        dist.barrier()
        if who in (-1, dist.get_rank()):
            dist.destroy_process_group(device_mesh().get_group("tp"))

    def total(x: torch.Tensor) -> float:
        dist.all_reduce(x, group=device_mesh().get_group("tp"))
        return x.item()

    for _ in range(2):
        dt.run(leave, node=grid(), distributed=True)
        assert dt.run(total, torch.ones(1), node=grid(), distributed=True) == [2] * NODES


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 2))


def steps(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()


def by_ddp(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    model = network()
    steps(DistributedDataParallel(model, process_group=device_mesh().get_group("dp")), x, y)
    return [p.detach() for p in model.parameters()]


def by_fsdp(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    from torch.distributed.fsdp import fully_shard

    model = network()
    fully_shard(model, mesh=device_mesh()["dp"])
    steps(model, x, y)
    return [p.detach().full_tensor() for p in model.parameters()]


def by_hsdp(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    """Replicated along dp, and sharded along tp."""
    from torch.distributed.fsdp import fully_shard

    model = network()
    fully_shard(model, mesh=device_mesh())
    steps(model, x, y)
    return [p.detach().full_tensor() for p in model.parameters()]


def by_tensor_parallel(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model, ours = network(), device_mesh()
    parallelize_module(model, ours["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    for p in model.parameters():
        p.register_hook(lambda grad: grad)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        for p in model.parameters():
            local = p.grad.to_local()
            dist.all_reduce(local, group=ours.get_group("dp"))
            local /= ours["dp"].size()
        optimizer.step()
    return [p.detach().full_tensor() for p in model.parameters()]


@pytest.mark.row("G17")
@pytest.mark.parametrize("train", [by_ddp, by_fsdp, by_hsdp, by_tensor_parallel])
def test_training_on_the_dims_is_local_training(train: Callable[..., Any]) -> None:
    m = grid()
    x, y = torch.randn(12, 5), torch.randn(12, 2)
    found = dt.run(train, shard(x, m, dp=0), shard(y, m, dp=0), node=m, distributed=True)
    model = network()
    steps(model, x, y)
    for rank in found:
        for got, wanted in zip(rank, model.parameters(), strict=True):
            torch.testing.assert_close(got.cpu(), wanted.detach())


def test_batch_norm_on_a_mesh_is_that_of_ddp() -> None:
    """Each rank has statistics of its own data, and what is saved are the first one's."""

    def normed() -> nn.Module:
        torch.manual_seed(5)
        return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))

    def by_torch(x: torch.Tensor, y: torch.Tensor) -> Any:
        model = normed()
        steps(DistributedDataParallel(model, process_group=device_mesh().get_group("dp")), x, y)
        return dict(model.state_dict())

    m = mesh(dp=4)
    x, y = shard(torch.randn(24, 5), m, dp=0), shard(torch.randn(24, 2), m, dp=0)
    theirs = dt.run(by_torch, x, y, node=m, distributed=True)[0]
    model = normed().to(m.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        for p in model.parameters():
            dt.collectives.all_reduce_(p.grad, "avg", over="dp")
        optimizer.step()
    for name, value in dt.meshes.agree_(model).state_dict().items():
        torch.testing.assert_close(value.cpu(), theirs[name].cpu())


def test_dtensors() -> None:
    def product(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor

        left = distribute_tensor(a, device_mesh(), [Shard(0), Shard(1)])
        right = distribute_tensor(b, device_mesh(), [Replicate(), Shard(0)])
        return left.to_local(), (left @ right).full_tensor()

    m, a, b = grid(), torch.randn(4, 6), torch.randn(6, 3)
    found = dt.run(product, a, b, node=m, distributed=True)
    for (got, whole), part in zip(found, shard(a, m, dp=0, tp=1).shards(), strict=True):  # type: ignore[attr-defined]
        same(got, part.cpu(), strides=False)
        torch.testing.assert_close(whole.cpu(), a @ b)


# ---- mistakes and failures -------------------------------------------------------------------------------------------


def test_it_is_for_functions_on_a_mesh() -> None:
    def ask() -> Any:
        return device_mesh() and None

    remedy = r"mesh = dt.mesh\(dp=2, tp=2\); dt.run\(function, node=mesh, distributed=True\)"
    for outside in (device_mesh, lambda: dt.run(ask, node=0), lambda: dt.run(ask, node=range(NODES), distributed=True)):
        dt.run(ask, node=grid(), distributed=True)
        with pytest.raises(dt.DisttensorError, match=remedy):
            outside()


@pytest.mark.parametrize(
    ("where", "message"),
    [
        (lambda: {"node": grid().device}, r"that is the mesh \(dp=2, tp=2\) of nodes .*; node=mesh runs"),
        (
            lambda: {"node": grid().device, "distributed": True},
            r"run\(distributed=True\) takes node=mesh, or a list of",
        ),
        (lambda: {"node": 3, "distributed": True}, r"takes node=mesh, or a list of .*; on node=3 alone"),
        (lambda: {"distributed": True}, r"takes node=mesh, or a list of .*; on the current node alone"),
        (lambda: {"node": grid(), "distributed": "gloo"}, r"distributed is True or False, not 'gloo'"),
        (lambda: {"node": grid(), "nodes": grid()}, r"node= or nodes="),
    ],
)
def test_mistakes(where: Callable[[], Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        dt.run(dist.get_rank, **where())


def test_a_mesh_that_is_closed() -> None:
    m = mesh(closing=2, nodes=[2, 1])
    m.close()
    for where in ({"node": m, "distributed": True}, {"node": m}):
        with pytest.raises(dt.DisttensorError) as raised:
            dt.run(os.getpid, **where)
        assert str(raised.value) == (
            "run: the mesh (closing=2) of nodes [2, 1] is closed; dt.mesh(closing=2, nodes=[2, 1]) makes another"
        )
    assert dt.run(os.getpid, node=mesh(closing=2, nodes=[2, 1])) == pids(m)


def mistaken(who: int, over: str, size: int) -> None:
    """Raises on one rank, for which the others wait, some of them in a group that it is not in."""
    x = torch.ones(size)
    dist.all_reduce(x)
    if dist.get_rank() == who:
        raise ValueError(f"a mistake of rank {who}")
    dist.all_reduce(x, group=device_mesh().get_group(over))
    dist.all_reduce(x)


@pytest.mark.parametrize("size", [1, 1 << 20])
@pytest.mark.parametrize("over", ["pp", "dp"])
@pytest.mark.parametrize("who", [0, 3])
def test_a_mistake_is_named_by_its_coordinates_and_ends_the_others_waiting(who: int, over: str, size: int) -> None:
    m = mixed()
    with pytest.raises(ValueError, match=f"a mistake of rank {who}") as raised:
        dt.run(mistaken, who, over, size, node=m, distributed=True)
    at = f"pp={who // 2}, dp={who % 2}"
    assert f"  node {m.nodes[who]} is {at} of {m}" in raised.value.__notes__
    assert f"failed: mistaken() on node {m.nodes[who]}" in said(raised.value)
    assert "and 3 other nodes broke off, as ranks wait for each other" in raised.value.__notes__
    assert dt.run(place, node=m, distributed=True)[who][2] == {"pp": who // 2, "dp": who % 2}


def test_coordinates_are_in_the_dims_that_were_given() -> None:
    def wrong() -> None:
        raise ValueError("mine")

    view = grid().rename(dp="replica")
    with pytest.raises(ValueError, match="mine") as raised:
        dt.run(wrong, node=view)
    assert f"  node 0 is replica=0, tp=0 of {view}" in raised.value.__notes__
    assert f"node 3 is replica=1, tp=1 of {view}" in said(raised.value)  # of the others, too


@pytest.mark.parametrize("known", [False, True])
def test_a_rank_that_cannot_make_its_groups(known: bool) -> None:
    """The function begins nowhere, and nobody waits for that rank."""

    def broken() -> None:
        dist.new_group, dist.kept = refuse, dist.new_group  # type: ignore[attr-defined]

    def refuse(*args: Any, **options: Any) -> None:
        raise ValueError("no groups today")

    def mended() -> None:
        dist.new_group = dist.kept  # type: ignore[attr-defined]

    m = mesh(two=2, one=1, nodes=[2, 1])
    dt.run(lambda: None, node=[1], distributed=True)  # ends a process group that has groups of dims
    dt.run(lambda: None, node=m.nodes if known else [1], distributed=True)
    dt.run(broken, node=1)
    try:
        with pytest.raises(ValueError, match="no groups today") as raised:
            dt.run(place, node=m, distributed=True)
    finally:
        dt.run(mended, node=1)
    assert f"  node 1 is two=1, one=0 of {m}" in raised.value.__notes__
    assert dt.run(place, node=m, distributed=True)[1][2] == {"two": 1, "one": 0}


def test_an_argument_that_has_failed_on_one_rank() -> None:
    m = grid()
    rows = torch.arange(12.0, device=m.device).view(4, 3)
    picked = F.embedding(from_shards(m, [torch.tensor([i]) for i in (0, 9, 1, 2)]), rows)

    def total(x: torch.Tensor) -> float:
        dist.all_reduce(x, group=device_mesh().get_group("dp"))
        return x.sum().item()

    for before in ([1, 2], m.nodes):  # the process group is new, or the groups of the dims
        dt.run(lambda: None, node=[3], distributed=True)
        dt.run(lambda: None, node=before, distributed=True)
        with pytest.raises(IndexError) as raised:
            dt.run(total, picked, node=m, distributed=True)
        assert f"  node 1 is dp=0, tp=1 of {m}" in raised.value.__notes__
    assert dt.run(total, rows, node=m, distributed=True) == [132] * NODES
    del rows, picked


def test_nobody_makes_groups_with_a_rank_that_does_not_come() -> None:
    """Who connects to one that does not come may wait for a minute."""

    def watched() -> None:
        dist.asked, dist.kept = [], (dist.new_group, dist.barrier)  # type: ignore[attr-defined]
        dist.new_group = lambda *args, **options: dist.asked.append(1)  # type: ignore[attr-defined]

    def absent() -> None:
        dist.barrier = refuse

    def refuse() -> None:
        raise ValueError("not here")

    def asked() -> int:
        dist.new_group, dist.barrier = dist.kept  # type: ignore[attr-defined]
        return len(dist.asked)  # type: ignore[attr-defined]

    m = grid()
    dt.run(lambda: None, node=[3], distributed=True)  # ends a process group that has groups of dims
    dt.run(lambda: None, node=m.nodes, distributed=True)
    dt.run(watched, node=m)
    dt.run(absent, node=1)
    try:
        with pytest.raises(ValueError, match="not here"):
            dt.run(place, node=m, distributed=True)
    finally:
        found = dt.run(asked, node=m)
    assert found == [0] * NODES
    assert dt.run(place, node=m, distributed=True)[1][2] == {"dp": 0, "tp": 1}


def test_ctrl_c() -> None:
    def loop(port: int) -> None:
        dist.all_reduce(torch.ones(1), group=device_mesh().get_group("dp"))
        tell(port)
        while True:
            pass

    m = grid()
    with Began(lambda: os.kill(os.getpid(), signal.SIGINT), times=NODES) as port, pytest.raises(KeyboardInterrupt):
        dt.run(loop, port, node=m, distributed=True)
    assert [one[0] for one in dt.run(place, node=m, distributed=True)] == pids(m)
