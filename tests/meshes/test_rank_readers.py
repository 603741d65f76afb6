"""Functions of torch's tensor, parallel and fsdp packages that read a rank, over ``mesh.torch``: on each rank what it
has under torchrun, or an error. Never what rank 0 has, on all."""

from __future__ import annotations

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
    empty,
    full,
    ones,
    zeros,
)
from torch.distributed.tensor.parallel import (
    SequenceParallel,
    parallelize_module,
)

import disttensor as dt
from disttensor.errors import DisttensorError

#: What counts as an error: a refusal of ours, or one of torch's own checks.
ERRORS = (DisttensorError, TypeError, AssertionError)
RANKS = list(product(range(2), range(2)))
PLACEMENTS: list[Any] = [Replicate(), Shard(0), Shard(1)]
PAIRS = [pytest.param([dp, tp], id=f"{dp}-{tp}") for dp in PLACEMENTS for tp in PLACEMENTS]


@pytest.fixture(scope="module", autouse=True)
def session() -> Iterator[None]:
    with dt.init_master_worker(nodes=4, launcher="inproc"), dt.node(grid().device):
        yield


def grid() -> dt.meshes.Mesh:
    return dt.mesh(dp=2, tp=2)


def whole() -> torch.Tensor:
    return torch.arange(32.0).view(8, 4)


def cut(x: torch.Tensor, placements: Sequence[Any], at: tuple[int, int]) -> torch.Tensor:
    """A rank's part."""
    for placement, i in zip(placements, at, strict=True):
        if isinstance(placement, Shard):
            x = x.chunk(2, placement.dim)[i]
    return x


def parts(placements: Sequence[Any]) -> list[torch.Tensor]:
    return [cut(whole(), placements, at) for at in RANKS]


def distributed(placements: Sequence[Any]) -> DTensor:
    local = dt.meshes.from_shards(grid(), parts(placements))
    return DTensor.from_local(local, grid().torch, placements, run_check=False)


def right_or_refused(call: Callable[[], Any], wanted: list[torch.Tensor]) -> bool:
    """Whether the call has a result, which is then each rank's."""
    try:
        found = call()
    except ERRORS:
        return False
    local = found.to_local() if isinstance(found, DTensor) else found
    shards = [x.cpu() for x in local.shards()]
    assert [x.shape for x in shards] == [x.shape for x in wanted]
    assert all(map(torch.equal, shards, wanted))
    return True


@pytest.mark.parametrize("placements", PAIRS)
def test_what_is_made_of_a_tensor(placements: list[Any]) -> None:
    m = grid().torch
    x = whole().to(grid().device)
    assert right_or_refused(lambda: distributed(placements).full_tensor(), [whole()] * 4)
    assert right_or_refused(lambda: distributed(placements) * 2, [2 * part for part in parts(placements)])
    assert right_or_refused(lambda: distribute_tensor(x, m, placements), parts(placements))
    assert right_or_refused(lambda: distribute_tensor(x, m, placements, src_data_rank=None), parts(placements))
    for make, value in ((zeros, 0.0), (ones, 1.0), (lambda *size, **kw: full(size, 3.0, **kw), 3.0)):
        wanted = [torch.full_like(part, value) for part in parts(placements)]
        assert right_or_refused(lambda make=make: make(8, 4, device_mesh=m, placements=placements), wanted)  # type: ignore[misc]
    assert empty(8, 4, device_mesh=m, placements=placements).to_local().shape == parts(placements)[0].shape


@pytest.mark.parametrize("reduced", [Replicate(), Shard(0), Shard(1)], ids=str)
def test_a_partial_sum(reduced: Any) -> None:
    m = grid().torch
    local = dt.meshes.from_shards(grid(), [whole() * (i + 1) for i in range(4)])
    x = DTensor.from_local(local, m, [Partial(), Replicate()], run_check=False)
    wanted = [cut(whole() * (4 if tp == 0 else 6), [reduced, Replicate()], (dp, tp)) for dp, tp in RANKS]
    assert right_or_refused(lambda: x.redistribute(m, [reduced, Replicate()]), wanted)


REFUSED: dict[str, Callable[[Any], Any]] = {
    "a partial's item": lambda m: distributed([Shard(0), Shard(1)]).sum().item(),
}


def there() -> nn.Module:
    return nn.Linear(4, 4).to(grid().device)


@pytest.mark.parametrize("call", REFUSED.values(), ids=REFUSED)
def test_what_is_refused_as_yet(call: Callable[[Any], Any]) -> None:
    with pytest.raises(ERRORS):
        call(grid().torch)


def test_what_has_the_same_on_all_ranks() -> None:
    m = grid().torch
    weight = distribute_module(there(), m).weight
    assert right_or_refused(lambda: weight, [weight.to_local().shards()[0].cpu()] * 4)  # type: ignore[union-attr, operator]
    norm = parallelize_module(nn.LayerNorm(4).to(grid().device), m["tp"], SequenceParallel())
    assert right_or_refused(lambda: norm.weight, [torch.ones(4)] * 4)
