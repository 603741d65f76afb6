"""DTensor over ``mesh.torch`` where torch looks a rank's part up: in lists, in indices, on the type of a device."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import _mesh_resources
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

import disttensor as dt
from disttensor.errors import RanksDiffer

PLACEMENTS: list[Any] = [Replicate(), Shard(0), Shard(1), Partial()]
PAIRS = [pytest.param([dp, tp], id=f"{dp}-{tp}") for dp, tp in product(PLACEMENTS, PLACEMENTS)]
RANKS = list(product(range(2), range(2)))


@pytest.fixture(scope="module", autouse=True)
def session() -> Iterator[None]:
    with dt.init_master_worker(nodes=4, launcher="inproc"):
        yield


def grid() -> dt.meshes.Mesh:
    return dt.mesh(dp=2, tp=2)


def distributed(x: torch.Tensor, placements: list[Any]) -> DTensor:
    parts = []
    for at in RANKS:
        part = x
        for placement, i in zip(placements, at, strict=True):
            if isinstance(placement, Shard):
                part = part.chunk(2, placement.dim)[i]
            elif isinstance(placement, Partial):
                part = part * i
        parts.append(part.contiguous())
    return DTensor.from_local(dt.meshes.from_shards(grid(), parts), grid().torch, placements, run_check=False)


def whole(x: DTensor) -> torch.Tensor:
    parts = [part.cpu() for part in x.full_tensor().shards()]  # type: ignore[attr-defined]
    assert all(torch.equal(part, parts[0]) for part in parts)
    return parts[0]


def numbers() -> torch.Tensor:
    return torch.randperm(32, generator=torch.Generator().manual_seed(3)).view(4, 8).float()


@pytest.mark.parametrize("dim", [None, 0, 1])
@pytest.mark.parametrize("placements", PAIRS)
def test_an_index_is_that_in_the_whole(placements: list[Any], dim: int | None) -> None:
    assert torch.equal(whole(distributed(numbers(), placements).argmax(dim)), numbers().argmax(dim))
    if dim is not None:
        found = distributed(numbers(), placements).min(dim)
        assert torch.equal(whole(found.indices), numbers().min(dim).indices)  # type: ignore[arg-type]


def test_parts_with_others_entries_between_theirs() -> None:
    x = torch.arange(128.0).view(4, 4, 8)
    flat = distributed(x, [Shard(1), Shard(0)]).view(16, 8)
    assert any(isinstance(placement, _StridedShard) for placement in flat.placements)
    assert {tuple(part.shape) for part in flat.to_local().shards()} == {(4, 8)}  # type: ignore[attr-defined]
    assert torch.equal(whole(flat), x.view(16, 8))  # type: ignore[arg-type]
    again = distributed(x.view(16, 8), [Replicate(), Replicate()]).redistribute(placements=flat.placements)
    for ours, there in zip(again.to_local().shards(), flat.to_local().shards(), strict=True):  # type: ignore[attr-defined]
        assert torch.equal(ours.cpu(), there.cpu())


def test_where_parts_start() -> None:
    shape, offset = compute_local_shape_and_global_offset((8, 4), grid().torch, [Shard(0), Shard(0)])
    assert (shape, offset[0].node.values, offset[1]) == ((2, 4), (0, 2, 4, 6), 0)  # type: ignore[attr-defined]
    with pytest.raises(RanksDiffer, match=r"parts of 1, 2 of 6 entries.*functional.pad"):
        compute_local_shape_and_global_offset((6, 4), grid().torch, [Shard(0), Shard(0)])


@pytest.mark.parametrize("placements", PAIRS)
def test_equal_is_one_value(placements: list[Any]) -> None:
    one, other = distributed(numbers(), placements), numbers()
    assert torch.equal(one, distributed(other, [Shard(1), Shard(0)]))
    other[3, 7] += 1  # on one rank only
    assert not torch.equal(one, distributed(other, [Shard(1), Shard(0)]))
    assert not torch.equal(one, distributed(other[:2], [Replicate(), Shard(1)]))


def test_shapes_are_found_whatever_place_is_current() -> None:
    x, y = torch.ones(4, 12), torch.ones(12)
    with dt.node(grid().device):
        distributed(x, [Shard(0), Replicate()]).cos()
    assert torch.equal(whole(distributed(x, [Shard(0), Replicate()]) + distributed(y, [Replicate(), Shard(0)])), x + y)


def test_a_nodes_cpu_is_no_device_of_several() -> None:
    _ = grid().torch
    assert _mesh_resources.num_devices_per_host("node") == _mesh_resources.num_devices_per_host("cpu") == 1
