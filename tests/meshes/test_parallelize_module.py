"""torch.distributed.tensor.parallel on a mesh, from one script: the bits of torchrun with gloo."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import parallel_twin as twin
import pytest
import torch
from limits import HANG
from torch.distributed.tensor import DTensor, Shard, distribute_tensor, parallel

import disttensor as dt
from disttensor import testing
from disttensor.errors import GraphError


@pytest.fixture(scope="module", autouse=True)
def session() -> Iterator[None]:
    # a norm's gradient is summed by each thread, so that its last bit is another one with more
    with dt.init_master_worker(nodes=twin.RANKS, threads=1):
        yield


@pytest.fixture(scope="module")
def under_torchrun(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The tensors of each rank of torchrun's, by name."""
    path = tmp_path_factory.mktemp("twin") / "found"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(twin.RANKS)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*torchrun, twin.__file__, path], capture_output=True, text=True, env=environment, timeout=HANG, check=False
    )
    assert done.returncode == 0, done.stderr
    return [torch.load(f"{path}.{rank}") for rank in range(twin.RANKS)]


def grid() -> dt.meshes.Mesh:
    return dt.mesh(tp=twin.RANKS)


def place(x: Any) -> Any:
    return x.to(grid().device)


def assert_same(found: Any, wanted: torch.Tensor, rank: int) -> None:
    assert torch.equal(found.shards()[rank].cpu(), wanted)


@pytest.mark.parametrize("plan", twin.PLANS)
def test_a_llama(plan: str, under_torchrun: list[dict[str, Any]]) -> None:
    losses, weights = twin.trained(place(twin.new_model()), grid().torch["tp"], plan, place)
    for rank, theirs in enumerate(under_torchrun):
        wanted_losses, wanted = theirs[plan]
        for loss, other in zip(losses, wanted_losses, strict=True):
            assert_same(loss, other, rank)
        assert weights.keys() == wanted.keys()
        for name, other in wanted.items():
            assert_same(weights[name], other, rank)


@pytest.mark.parametrize("name", twin.STYLES)
def test_a_style(name: str, under_torchrun: list[dict[str, Any]]) -> None:
    found = twin.styled(name, grid().torch["tp"], place)
    for rank, theirs in enumerate(under_torchrun):
        for x, other in zip(found, theirs[name], strict=True):
            assert_same(x, other, rank)


@pytest.mark.parametrize("plan", twin.PLANS)
def test_a_recorded_step_is_one_command(plan: str, under_torchrun: list[dict[str, Any]]) -> None:
    model, step = twin.training(place(twin.new_model()), grid().torch["tp"], plan)
    x, y = map(place, twin.new_batch())
    replayed = dt.graphed(step)
    losses = [replayed(x, y) for _ in range(2)]
    with testing.MessageLog() as log:
        losses.append(replayed(x, y))
    assert [log[rank].commands for rank in range(twin.RANKS)] == [["Replay"]] * twin.RANKS
    for rank, theirs in enumerate(under_torchrun):
        wanted_losses, wanted = theirs[plan]
        for loss, other in zip(losses, wanted_losses, strict=True):
            assert_same(loss, other, rank)
        for name, parameter in model.named_parameters():
            assert_same(twin.own(parameter), wanted[name], rank)


def test_a_recorded_function_takes_and_gives_dtensors() -> None:
    layout: Any = (grid().torch["tp"], [Shard(0)])
    x = distribute_tensor(place(torch.arange(8.0)), *layout)
    replayed = dt.graphed(lambda x, by: {"y": x.sin() * by, "local": DTensor.from_local(x.to_local(), *layout)})
    found = [replayed(x * k, 2.0 * k) for k in range(1, 5)]  # each result stays as it was given
    for k, each in enumerate(found, 1):
        assert torch.equal(each["y"].full_tensor().cpu(), (torch.arange(8.0) * k).sin() * 2.0 * k)
        assert torch.equal(each["local"].full_tensor().cpu(), torch.arange(8.0) * k)
    of_parts = dt.graphed(lambda x: DTensor.from_local(x, *layout) * 1)
    made = [of_parts(x.to_local() * k) for k in range(1, 5)]
    assert [each.full_tensor().sum().item() for each in made] == [28.0, 56.0, 84.0, 112.0]
    with pytest.raises(GraphError, match=r"require a gradient.*or give x.detach\(\)"):
        replayed(x.requires_grad_() * 2, 1.0)


def test_every_style_is_among_them() -> None:
    styles = {getattr(parallel, name) for name in parallel.__all__}
    used = {type(style) for _, style in twin.STYLES.values()}
    assert {style for style in styles if isinstance(style, type)} - used == {parallel.ParallelStyle}
