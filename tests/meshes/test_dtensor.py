"""Torch's DTensor in the script, over ``mesh.torch``: placements in one, two and three dims, gradients, random
numbers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
    ones,
    rand,
    randn,
    zeros,
)
from torch.distributed.tensor.experimental import local_map
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

import disttensor as dt
from disttensor.errors import RanksDiffer

#: The dims of meshes, by how many there are.
DIMS = {1: {"a": 2}, 2: {"dp": 2, "tp": 2}, 3: {"x": 2, "y": 2, "z": 2}}
KINDS: list[Any] = [Replicate(), Shard(0), Shard(1), Partial()]
R, S0, S1, P = KINDS


def befores(dims: int, every: int = 1) -> list[tuple[Any, ...]]:
    return list(product(KINDS, repeat=dims))[::every]


def afters(before: Sequence[Any], every: int = 1) -> list[tuple[Any, ...]]:
    """What placements can become: torch makes no sum of what is whole."""
    kinds = ([p for p in KINDS if p == each or not p.is_partial()] for each in before)
    return list(product(*kinds))[::every]


@pytest.fixture(scope="module", autouse=True)
def session() -> Iterator[None]:
    with dt.init_master_worker(nodes=8, threads=1):
        yield


@pytest.fixture
def using() -> Iterator[Callable[[int], dt.meshes.Mesh]]:
    """Makes a mesh of so many dims, whose process group is torch's for the test."""
    yield lambda dims: dt.mesh(**DIMS[dims], nodes=list(range(2**dims)))
    torch.distributed.destroy_process_group()


@pytest.fixture
def grid(using: Callable[[int], dt.meshes.Mesh]) -> dt.meshes.Mesh:
    return using(2)


def whole() -> torch.Tensor:
    return torch.arange(64.0).view(8, 8)


def part(x: torch.Tensor, placements: Sequence[Any], at: Sequence[int]) -> torch.Tensor:
    """A rank's part: of a sum to come a quarter, or the rest of it."""
    for placement, i in zip(placements, at, strict=True):
        if placement.is_shard():
            x = x.chunk(2, placement.dim)[i]
        elif placement.is_partial():
            x = x * (0.25, 0.75)[i]
    return x


def parts(x: torch.Tensor, placements: Sequence[Any]) -> list[torch.Tensor]:
    return [part(x, placements, at) for at in product(range(2), repeat=len(placements))]


def placed(m: dt.meshes.Mesh, placements: Sequence[Any], x: torch.Tensor) -> DTensor:
    return DTensor.from_local(dt.meshes.from_shards(m, parts(x, placements)), m.torch, placements, run_check=False)


def shards(x: torch.Tensor) -> list[torch.Tensor]:
    local: Any = x.to_local() if isinstance(x, DTensor) else x
    return [each.detach().cpu() for each in local.shards()]


def is_whole(x: DTensor, wanted: torch.Tensor, close: bool = False) -> None:
    """Asserts that each rank gets the tensor that it is."""
    for each in shards(x.full_tensor()):
        torch.testing.assert_close(each, wanted, rtol=1e-5 if close else 0, atol=1e-5 if close else 0)


@pytest.mark.parametrize("before", [*befores(1), *befores(2), *befores(3, every=7)], ids=str)
def test_redistribute(using: Callable[[int], dt.meshes.Mesh], before: Any) -> None:
    m = using(len(before))
    for after in afters(before, every=5 if len(before) == 3 else 1):
        found = placed(m, before, whole()).redistribute(m.torch, after)
        assert found.placements == after
        is_whole(found, whole())
        if not any(each.is_partial() for each in after):
            assert all(map(torch.equal, shards(found), parts(whole(), after))), after


@pytest.mark.parametrize("before", [*befores(1), *befores(2, every=3)], ids=str)
def test_gradients(using: Callable[[int], dt.meshes.Mesh], before: Any) -> None:
    m = using(len(before))
    weights = whole().flip(0)
    everywhere = [R] * len(before)
    # of a sum to come each rank's part has the gradient of the sum
    wanted = parts(weights, [R if each.is_partial() else each for each in before])
    for after in afters(before, every=2):
        local = dt.meshes.from_shards(m, parts(whole(), before)).requires_grad_()
        found = DTensor.from_local(local, m.torch, before, run_check=False).redistribute(m.torch, after)
        total = (found * distribute_tensor(weights.to(m.device), m.torch, everywhere)).sum()
        total.redistribute(m.torch, everywhere).backward()
        assert all(map(torch.equal, shards(local.grad), wanted)), after  # type: ignore[arg-type]


def test_another_mesh_of_the_same_dims() -> None:
    """Torch remembers what it has done with DTensors of an equal DeviceMesh."""
    for nodes in ([0, 1], [2, 3], [0, 1]):
        m = dt.mesh(a=2, nodes=nodes)
        for after in ([S0], [S1], [R]):
            is_whole((placed(m, [S0], whole()) + 1).redistribute(m.torch, after), whole() + 1)
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("placements", list(product([R, S0, S1], repeat=2)), ids=str)
def test_what_is_made(grid: dt.meshes.Mesh, placements: Any) -> None:
    x = whole().to(grid.device)
    for source in (0, 1, None):
        found = distribute_tensor(x, grid.torch, placements, src_data_rank=source)
        assert all(map(torch.equal, shards(found), parts(whole(), placements)))
    made = zeros(8, 8, device_mesh=grid.torch, placements=placements)
    assert made.device == grid.device
    assert [each.shape for each in shards(made)] == [each.shape for each in parts(whole(), placements)]


def test_a_source_that_is_not_the_first(grid: dt.meshes.Mesh) -> None:
    x = dt.meshes.from_shards(grid, [whole() + i for i in range(4)])
    found = distribute_tensor(x, grid.torch, [R, S1], src_data_rank=1)
    assert all(map(torch.equal, shards(found), parts(whole() + 3, [R, S1])))


def test_in_place_and_views(grid: dt.meshes.Mesh) -> None:
    x = distribute_tensor(whole().to(grid.device), grid.torch, [S0, R])
    x.add_(1).mul_(2)
    is_whole(x, (whole() + 1) * 2)
    is_whole(x.view(4, 2, 8)[:, 1].t(), ((whole() + 1) * 2).view(4, 2, 8)[:, 1].t())  # type: ignore[arg-type]


def test_functions_of_the_parts(grid: dt.meshes.Mesh) -> None:
    multiply = local_map(
        lambda a, b: a @ b, out_placements=[P, S1], in_placements=([S1, R], [S0, S1]), device_mesh=grid.torch
    )
    a, b = (distribute_tensor(whole().to(grid.device), grid.torch, each) for each in ([S1, R], [S0, S1]))
    is_whole(multiply(a, b), whole() @ whole())


# ---- modules ---------------------------------------------------------------------------------------------------------


def trained(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    out = net(x)
    out.pow(2).mean().backward()
    return out


def test_a_module(grid: dt.meshes.Mesh) -> None:
    net = nn.Linear(8, 4)
    there = distribute_module(copy.deepcopy(net).to(grid.device), grid.torch)
    wanted = net(whole())
    is_whole(there(placed(grid, [S0, R], whole())), wanted, close=True)


def test_columns_and_rows(grid: dt.meshes.Mesh) -> None:
    net = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 4), nn.LayerNorm(4))
    plan = {
        "0": ColwiseParallel(),
        "2": RowwiseParallel(output_layouts=Shard(0)),
        "3": SequenceParallel(sequence_dim=0, use_local_output=True),
    }
    there = parallelize_module(copy.deepcopy(net).to(grid.device), grid.torch["tp"], plan)
    x = whole() / 64
    wanted = net(x)
    (wanted * x[:, :4]).sum().backward()
    found = there(x.to(grid.device))
    (found * dt.shard(x[:, :4], grid, tp=0)).sum().backward()
    torch.testing.assert_close(shards(found), parts(wanted.detach(), [R, S0]))
    for mine, other in zip(there.parameters(), net.parameters(), strict=True):
        is_whole(mine.grad, other.grad, close=True)  # type: ignore[arg-type]


def test_an_embedding_of_parts(grid: dt.meshes.Mesh) -> None:
    net, index = nn.Embedding(8, 4), torch.tensor([[0, 3, 7], [4, 4, 1]])
    style = RowwiseParallel(input_layouts=Replicate())
    there = parallelize_module(copy.deepcopy(net).to(grid.device), grid.torch["tp"], style)
    wanted, found = trained(net, index), trained(there, index.to(grid.device))
    assert all(torch.equal(each, wanted) for each in shards(found))
    is_whole(there.weight.grad, net.weight.grad, close=True)  # type: ignore[arg-type]


def test_a_loss_of_parts(grid: dt.meshes.Mesh) -> None:
    local, target = (whole() / 8).requires_grad_(), torch.arange(8) % 5
    wanted = nn.functional.cross_entropy(local, target)
    wanted.backward()
    there = dt.shard(whole() / 8, grid, tp=1).requires_grad_()
    with loss_parallel():
        logits = DTensor.from_local(there, grid.torch["tp"], [S1], run_check=False)
        loss = nn.functional.cross_entropy(logits, target.to(grid.device))
        loss.backward()
    is_whole(loss, wanted.detach(), close=True)  # type: ignore[arg-type]
    torch.testing.assert_close(shards(there.grad), parts(local.grad, [R, S1]))  # type: ignore[arg-type]


# ---- random numbers --------------------------------------------------------------------------------------------------

DRAWN: dict[str, Callable[[Any, Any], DTensor]] = {
    "rand": lambda m, placements: rand(8, 8, device_mesh=m, placements=placements),
    "randn": lambda m, placements: randn(8, 8, device_mesh=m, placements=placements),
    "dropout": lambda m, placements: nn.functional.dropout(ones(8, 8, device_mesh=m, placements=placements)),
    "uniform_": lambda m, placements: zeros(8, 8, device_mesh=m, placements=placements).uniform_(),
    "rand_like": lambda m, placements: torch.rand_like(zeros(8, 8, device_mesh=m, placements=placements)),
}


@pytest.mark.parametrize("draw", DRAWN.values(), ids=DRAWN)
@pytest.mark.parametrize("placements", [[R, R], [S0, R], [R, S1], [S0, S1], [S0, S0]], ids=str)
def test_ranks_with_the_same_part_draw_the_same(grid: dt.meshes.Mesh, draw: Any, placements: Any) -> None:
    torch.manual_seed(3)
    found = shards(draw(grid.torch, placements))
    held = [part(torch.arange(64).view(8, 8), placements, at).flatten()[0].item() for at in product(range(2), repeat=2)]
    for (mine, x), (other, y) in product(zip(held, found, strict=True), repeat=2):
        assert torch.equal(x, y) == (mine == other)
    again = shards(draw(grid.torch, placements))
    assert not torch.equal(again[0], found[0])
    torch.manual_seed(3)
    assert all(map(torch.equal, shards(draw(grid.torch, placements)), found))


def test_along_dims_in_one(grid: dt.meshes.Mesh) -> None:
    found = shards(rand(8, 8, device_mesh=grid.flatten("all").torch, placements=[S0]))
    assert len({tuple(each.flatten().tolist()) for each in found}) == 4


# ---- what is shown, and what is refused ------------------------------------------------------------------------------


def test_it_prints(grid: dt.meshes.Mesh) -> None:
    total = placed(grid, [S0, S1], whole()).sum()
    assert "dp=0, tp=1: tensor(" in repr(total)
    assert repr(total).endswith("placements=(Partial(sum), Partial(sum)))")


def test_the_item_of_a_sum_to_come(grid: dt.meshes.Mesh) -> None:
    total = placed(grid, [S0, R], whole()).sum()
    with pytest.raises(RanksDiffer, match=r"is P\(sum\), R over .* x.full_tensor\(\).item\(\) is its value"):
        total.item()
    assert total.full_tensor().item() == whole().sum()
    assert placed(grid, [R, R], whole()).sum().item() == whole().sum()


UNEVEN: dict[str, Callable[[dt.meshes.Mesh], Any]] = {
    "distribute_tensor": lambda m: distribute_tensor(odd(m), m.torch, [S0, R]),
    "of each rank's own": lambda m: distribute_tensor(odd(m), m.torch, [S0, R], src_data_rank=None),
    "cut twice": lambda m: distribute_tensor(odd(m)[:6], m.torch, [S0, S0]),
    "whole to parts": lambda m: distribute_tensor(odd(m), m.torch, [R, R]).redistribute(m.torch, [S0, R]),
    "a sum to parts": lambda m: DTensor.from_local(odd(m), m.torch, [P, R], run_check=False).redistribute(
        m.torch, [S0, R]
    ),
    "parts to other parts": lambda m: distribute_tensor(odd(m), m.torch, [S1, R]).redistribute(m.torch, [S0, R]),
    "a factory": lambda m: zeros(7, 8, device_mesh=m.torch, placements=[S0, R]),
    "fewer than ranks": lambda m: zeros(1, 8, device_mesh=m.torch, placements=[S0, R]),
}


def odd(m: dt.meshes.Mesh) -> torch.Tensor:
    return whole()[:7].to(m.device)


@pytest.mark.parametrize("make", UNEVEN.values(), ids=UNEVEN)
def test_parts_of_several_sizes_are_refused(grid: dt.meshes.Mesh, make: Callable[[dt.meshes.Mesh], Any]) -> None:
    with pytest.raises(RanksDiffer, match=r"would have parts of .* torch.nn.functional.pad\(x, ...\)"):
        make(grid)


OURS: dict[str, Callable[[Any, dt.meshes.Mesh], Any]] = {
    "dist_send": lambda x, m: x.dist_send(0),
    "replicate": lambda x, m: dt.meshes.replicate(x, m),
    "shard": lambda x, m: dt.shard(x, m, dp=0),
    "from_shards": lambda x, m: dt.meshes.from_shards(m, [x] * len(m)),
    "all_reduce": lambda x, m: dt.all_reduce(x, over="dp"),
    "mean": lambda x, m: dt.meshes.mean(x),
}


@pytest.mark.parametrize("call", OURS.values(), ids=OURS)
def test_functions_of_ours_say_how_they_take_one(
    grid: dt.meshes.Mesh, call: Callable[[Any, dt.meshes.Mesh], Any]
) -> None:
    x = distribute_tensor(torch.arange(8.0).view(4, 2).to(grid.device), grid.torch, [Shard(0), Replicate()])
    with pytest.raises(TypeError, match=r"does not take a DTensor: .*x.full_tensor\(\) is the whole.*x.to_local\(\)"):
        call(x, grid)
