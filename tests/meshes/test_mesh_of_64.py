"""64 real nodes on one machine as one place: they train to one process's losses, one is killed, and nothing is left."""

from __future__ import annotations

import io
import os
import signal

import pytest
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import disttensor as dt

NODES = 64


def fit(mesh: dt.meshes.Mesh | None) -> tuple[list[float], nn.Module]:
    digits = load_digits()
    x, y = torch.tensor(digits.data[:1536], dtype=torch.float64) / 16, torch.tensor(digits.target[:1536])
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)).double()
    model.to(mesh.device if mesh else "cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    losses = []
    for images, labels in zip(x.split(512), y.split(512), strict=True):
        if mesh:
            images, labels = dt.shard(images, mesh, dp=0), dt.shard(labels, mesh, dp=0)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        for p in model.parameters() if mesh else ():
            dt.collectives.all_reduce_(p.grad, "avg", over="dp")
        optimizer.step()
        losses.append((dt.all_reduce(loss.detach(), "avg", over="dp") if mesh else loss).item())
    return losses, model


def for_ever(x: torch.Tensor) -> None:
    while True:
        (x + 1).sum().item()


@pytest.mark.slow
def test_sixty_four_nodes() -> None:
    with dt.init_master_worker(nodes=NODES, threads=1):
        mesh = dt.mesh(dp=NODES)
        there, model = fit(mesh)
        here, local = fit(None)
        assert there == pytest.approx(here, rel=1e-12)
        stream = io.BytesIO()
        torch.save(model.state_dict(), stream)
        stream.seek(0)
        for name, value in torch.load(stream).items():
            torch.testing.assert_close(value, local.state_dict()[name], rtol=1e-11, atol=1e-13)
        ranks = mesh.coordinate("dp")
        assert dt.all_reduce(ranks, "sum", over="dp").item() == NODES * (NODES - 1) // 2
        os.kill(int(dt.nodes()[37]["pid"]), signal.SIGKILL)
        with pytest.raises(dt.NodeLost, match="node 37") as raised:
            for_ever(ranks)
        assert "it was dp=37 of the mesh (dp=64)" in "".join(raised.value.__notes__)
        assert ranks.at(dp=36).item() == 36  # type: ignore[attr-defined]
        others = dt.mesh(rest=NODES - 1, nodes=[k for k in range(NODES) if k != 37])
        assert dt.all_reduce(torch.ones(3, device=others.device), over="rest").tolist() == [NODES - 1] * 3
