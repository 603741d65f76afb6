"""DataParallel's random numbers against DDP's: ranks of DDP that begin where the mesh's varying generators do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from equal import same
from mesh_kit import connected
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import disttensor as dt
from disttensor import mesh, shard
from disttensor.session.places import derived
from disttensor.tasks import Each, device_mesh


@pytest.fixture(scope="module", autouse=True)
def session() -> Iterator[None]:
    with connected(2):
        # what is made at first use: before the test looks for leaks
        dt.run(dist.barrier, node=mesh(dp=2), distributed=True)
        yield


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.4), nn.Linear(16, 3), nn.Dropout(0.1))


def fit(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    for i in range(len(x)):
        optimizer.zero_grad()
        F.mse_loss(model(x[i]), y[i]).backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def test_on_two_ranks_dropout_has_ddps_bits() -> None:
    def by_ddp(x: torch.Tensor, y: torch.Tensor, seed: int) -> list[torch.Tensor]:
        model = DistributedDataParallel(network(), process_group=device_mesh().get_group("dp"))
        torch.manual_seed(seed)
        return fit(model, x, y)

    m = mesh(dp=2)
    x, y = torch.randn(20, 12, 6), torch.randn(20, 12, 3)
    xs, ys = shard(x, m, dp=1), shard(y, m, dp=1)
    model: Any = dt.DataParallel(network().to(m.device), m, bucket_mb=1e-4)
    torch.manual_seed(7)  # a mesh's generators that vary begin anew, with seeds of their own
    place = xs._place  # type: ignore[attr-defined]
    seeds = [derived(place.seed, ("dp",), at) for at in range(2)]
    ours = fit(model, xs, ys)
    theirs = dt.run(by_ddp, xs, ys, Each(seeds), node=m, distributed=True)
    for i, value in enumerate(ours):
        for rank, got in enumerate(value.shards()):  # type: ignore[attr-defined]
            same(got, theirs[rank][i].cpu(), strides=False)
