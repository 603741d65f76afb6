"""Programs with dropout that go on from a checkpoint in another session: to the bit as without a break."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from mesh_kit import connected
from torch import nn

import disttensor as dt
from disttensor.checkpoint import load, save
from disttensor.meshes import Generators, Mesh

STEPS = 2


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.4), nn.Linear(8, 3), nn.Dropout(0.1))


class Cut(nn.Module):
    """Features that are cut along tp, with draws of their own there, and draws that are the same."""

    def __init__(self, m: Mesh) -> None:
        super().__init__()
        self.first = dt.nn.ColumnParallelLinear(6, 8, gather_output=False, mesh=m)
        self.last = dt.nn.RowParallelLinear(8, 3, input_is_parallel=True, mesh=m)

    def forward(self, x: Any) -> Any:
        with dt.meshes.varying("tp"):
            hidden = F.dropout(self.first(x), 0.4)
        return F.dropout(self.last(hidden), 0.2)


def modules() -> dict[str, tuple[Callable[[], nn.Module], list[Any]]]:
    """What makes each model, and the places from which it draws."""
    dp, tp = dt.mesh(dp=2, nodes=[0, 1]), dt.mesh(tp=2, nodes=[0, 1])
    behind = dt.mesh(dp=2, nodes=[2, 3])
    return {
        "DataParallel": (lambda: dt.DataParallel(network().to(dp.device), dp), [dp]),
        "fully_shard": (lambda: dt.fully_shard(network().to(dp.device), dp), [dp]),
        "tensor parallel": (lambda: Cut(tp), [tp]),
        "Pipeline": (lambda: dt.training.Pipeline([network()[:3], network()[3:]], [dp, behind], microbatches=2),  # type: ignore[index]
                     [dp, behind]),
        "Pipeline of nodes": (lambda: dt.training.Pipeline([network()[:3], network()[3:]], [2, 3], microbatches=2),  # type: ignore[index]
                              [2, dt.device(3)]),
    }  # fmt: skip


NAMES = ("DataParallel", "fully_shard", "tensor parallel", "Pipeline", "Pipeline of nodes")


def steps(name: str, model: Any, optimizer: Any, count: int) -> list[list[torch.Tensor]]:
    """The parameters of each rank after each step."""
    x, y = torch.linspace(-1, 1, 48).view(8, 6), torch.linspace(0, 1, 24).view(8, 3)
    seen = []
    for _ in range(count):
        optimizer.zero_grad()
        if name.startswith("Pipeline"):
            model.step(x, y, F.mse_loss)
        else:
            tp, dp = dt.mesh(tp=2, nodes=[0, 1]), dt.mesh(dp=2, nodes=[0, 1])
            model(x.to(tp.device) if name == "tensor parallel" else dt.shard(x, dp, dp=0)).square().mean().backward()
        optimizer.step()
        seen.append([part.cpu() for p in model.parameters() for part in shards(p.detach())])
    return seen


def shards(x: Any) -> list[Any]:
    return list(x.shards()) if x.device.index > 63 else [x]


def state_of(name: str) -> dict[str, Any]:
    make, places = modules()[name]
    model = make()
    return {
        "model": model,
        "optim": torch.optim.AdamW(model.parameters(), lr=0.05),
        **{f"generators{i}": Generators(place) for i, place in enumerate(places)},
    }


def test_another_session_goes_on_to_the_bit(tmp_path: Path) -> None:
    expected = {}
    torch.manual_seed(3)
    with connected(4):
        for name in NAMES:
            state = state_of(name)
            steps(name, state["model"], state["optim"], STEPS)
            save(state, tmp_path / name)
            expected[name] = steps(name, state["model"], state["optim"], STEPS)
    torch.manual_seed(4)
    with connected(4):
        for name in reversed(NAMES):
            state = state_of(name)
            steps(name, state["model"], state["optim"], 1)  # other draws, which are forgotten
            load(state, tmp_path / name)
            got = steps(name, state["model"], state["optim"], STEPS)
            for a, b in zip(got, expected[name], strict=True):
                for x, y in zip(a, b, strict=True):
                    assert torch.equal(x, y), name


def draw(m: Mesh, *dims: str) -> list[torch.Tensor]:
    with dt.meshes.varying(*dims):
        return [x.cpu() for x in torch.rand(4, device=m.device).shards()]  # type: ignore[attr-defined]


def test_all_generators_of_a_mesh() -> None:
    """What has drawn, in whatever order, and what begins later only."""
    ways: list[tuple[str, ...]] = [(), ("dp",), ("dp", "tp"), ("tp",)]
    torch.manual_seed(0)
    with connected(4):
        m = dt.mesh(dp=2, tp=2)
        for way in ways[:3]:
            draw(m, *way)
        with dt.meshes.varying("dp"):
            kept = Generators(m).state_dict()
        assert [along for along, _ in kept["states"][2]] == [[], ["dp"], ["dp", "tp"]]
        expected = [[draw(m, *way) for way in ways] for _ in range(2)]
        with dt.meshes.varying("tp"):
            Generators(m.device).load_state_dict(kept)
        again = [[draw(m, *way) for way in ways] for _ in range(2)]
    torch.manual_seed(1)
    with connected(4):
        m = dt.mesh(dp=2, tp=2)
        for way in reversed(ways):
            draw(m, *way)
        Generators(m).load_state_dict(kept)
        torch.rand(2, device="node:1")
        elsewhere = [[draw(m, *way) for way in ways] for _ in range(2)]
        for found in (again, elsewhere):
            for a, b in zip(itertools.chain(*found), itertools.chain(*expected), strict=True):
                assert all(map(torch.equal, a, b))
        with pytest.raises(ValueError, match=r"generators of dp=2, tp=2, and this is the mesh \(dp=4\)"):
            Generators(dt.mesh(dp=4)).load_state_dict(kept)
        with pytest.raises(ValueError, match="generators of dp=2, tp=2, and this is node 1"):
            Generators(1).load_state_dict(kept)
        seed, dims, _ = kept["states"]
        with pytest.raises(ValueError, match="has 5056 bytes, and this one 3"):
            Generators(m).load_state_dict({"states": [seed, dims, [[[], [b"abc"] * 4]]]})
        g = dt.Graph()
        with pytest.raises(dt.errors.GraphError), dt.graph(g):
            Generators(m).state_dict()
