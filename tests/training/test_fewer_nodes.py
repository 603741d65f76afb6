"""Training that goes on from a checkpoint with another number of nodes at the same global batch: after a loss, or anew.

The twin trains in one process, without a break and without disttensor.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from mesh_kit import connected
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import disttensor as dt
from disttensor import testing

BATCH, EPOCHS, SAVED = 12, 2, 3

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture(scope="module", autouse=True)
def session() -> Iterator[None]:
    # the last test kills a node; what this has broken off on others, and was told late, is raised at the end
    with contextlib.suppress(dt.DisttensorError), connected(4):
        yield


def dataset() -> TensorDataset:
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(65, 6, generator=draw, dtype=torch.float64)
    return TensorDataset(x, (x.sum(1).sin() > 0).long())


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 2)).double()


def of(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=0.05)


def twin() -> list[float]:
    net = model()
    optimizer, losses = of(net), []
    sampler: Any = DistributedSampler(dataset(), 1, 0, seed=7)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for x, y in DataLoader(dataset(), BATCH, sampler=sampler, drop_last=True):
            optimizer.zero_grad()
            loss = F.cross_entropy(net(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses


class Job:
    """The training of a model on some nodes, which knows how far it is."""

    def __init__(self, nodes: list[int], form: str) -> None:
        self.mesh = dt.mesh(dp=len(nodes), nodes=nodes)
        net = model().to(self.mesh.device)
        self.net = dt.DataParallel(net, self.mesh) if form == "whole" else dt.fully_shard(net, self.mesh)
        self.optimizer = of(self.net)
        self.loader = dt.data.distribute(dataset(), self.mesh, batch_size=BATCH, shuffle=True, seed=7)

    def state(self) -> dict[str, Any]:
        net = self.net.module if isinstance(self.net, dt.DataParallel) else self.net
        return {"model": net, "optim": self.optimizer}

    def losses(self, epochs: int) -> Iterator[float]:
        for _ in range(epochs):
            for x, y in self.loader:
                self.optimizer.zero_grad()
                loss = F.cross_entropy(self.net(x), y)
                loss.backward()
                self.optimizer.step()
                yield dt.all_reduce(loss.detach(), "avg", over="dp").item()


def begun(nodes: list[int], form: str, path: Path) -> tuple[Job, Iterator[float], list[float], dict[str, Any]]:
    """A job that has trained up to its checkpoint, in the middle of an epoch, of which no byte crosses the network."""
    job = Job(nodes, form)
    going = job.losses(EPOCHS)
    losses = [next(going) for _ in range(SAVED)]
    dt.synchronize()
    dt.channels.reset_stats()
    dt.checkpoint.save(job.state(), path)
    assert dt.channels.stats() == (), "nodes write their parts themselves"
    return job, going, losses, job.loader.state_dict()


def gone_on(nodes: list[int], form: str, path: Path, position: dict[str, Any]) -> list[float]:
    job = Job(nodes, form)
    dt.synchronize()
    dt.channels.reset_stats()
    dt.checkpoint.load(job.state(), path)
    assert dt.channels.stats() == (), "nodes read their parts themselves"
    job.loader.load_state_dict(position)
    return list(job.losses(EPOCHS))


@pytest.mark.row("S1")
@pytest.mark.parametrize(("form", "first", "then"), [("whole", 3, 4), ("whole", 4, 1), ("sharded", 4, 3)])
def test_another_number_of_nodes_at_the_same_global_batch(form: str, first: int, then: int, tmp_path: Path) -> None:
    _, going, losses, position = begun(list(range(first)), form, tmp_path / "run")
    next(going)  # what the checkpoint does not have is done again
    del going
    losses += gone_on(list(range(then)), form, tmp_path / "run", position)
    assert losses == pytest.approx(twin(), rel=1e-12, abs=1e-12)


def test_after_a_loss_the_nodes_that_are_left_go_on(tmp_path: Path) -> None:
    """The last test: the module's session has one node less afterwards."""
    _, going, losses, position = begun([0, 1, 2, 3], "whole", tmp_path / "run")
    testing.kill(3)
    with pytest.raises(dt.NodeLost, match="node 3"):
        list(going)
    del going
    losses += gone_on([0, 1, 2], "whole", tmp_path / "run", position)
    assert losses == pytest.approx(twin(), rel=1e-12, abs=1e-12)
    assert len(losses) == EPOCHS * (65 // BATCH)
