"""torch.distributed.tensor.parallel on a mesh, from one script: the bits of torchrun with gloo."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import parallel_twin as twin
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor, parallel, zeros
from torchrun_kit import torchrun

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
    return torchrun(twin.__file__, tmp_path_factory.mktemp("twin") / "found", ranks=twin.RANKS)


def grid() -> dt.meshes.Mesh:
    return dt.mesh(dp=2, tp=2)


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
    model, _, step = twin.training(place(twin.new_model()), grid().torch["tp"], plan)
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


def trained_to(folder: Path, plan: str, steps: int = 2) -> tuple[Any, Any]:
    """A model and its optimizer after some steps, of which a checkpoint is in a folder."""
    model, optimizer, step = twin.training(place(twin.new_model()), grid().torch["tp"], plan)
    for _ in range(steps):
        step(*map(place, twin.new_batch()))
    dt.checkpoint.save({"model": model, "optim": optimizer}, folder)
    return model, step


@pytest.mark.parametrize("other", twin.PLANS)
def test_a_checkpoint_goes_on_by_another_plan(other: str, tmp_path: Path) -> None:
    _, step = trained_to(tmp_path, "sequence parallel")
    model, optimizer, others = twin.training(place(twin.new_model()), grid().torch["tp"], other)
    dt.checkpoint.load({"model": model, "optim": optimizer}, tmp_path)
    for _ in range(2):
        loss, wanted = (each(*map(place, twin.new_batch())) for each in (others, step))
        torch.testing.assert_close(loss.cpu(), wanted.cpu(), rtol=1e-12, atol=1e-12)


def test_torch_alone_reads_a_checkpoint(tmp_path: Path) -> None:
    model, _ = trained_to(tmp_path, "tensor parallel")
    found = {"model": twin.new_model().state_dict()}
    with warnings.catch_warnings(action="ignore"):  # torch says that no job is initialized
        dcp.load(found, checkpoint_id=tmp_path, no_dist=True)
    for name, value in model.state_dict().items():
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        assert torch.equal(found["model"][name], whole.cpu())


@pytest.mark.slow
@pytest.mark.parametrize("plan", twin.PLANS)
def test_a_job_of_torchrun_goes_on_and_back(plan: str, tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    model, step = trained_to(folder, "tensor parallel")
    losses = [step(*map(place, twin.new_batch())) for _ in range(twin.STEPS)]
    for rank, theirs in enumerate(torchrun(twin.__file__, tmp_path / "found", folder, plan, ranks=twin.RANKS)):
        for loss, other in zip(losses, theirs, strict=True):
            torch.testing.assert_close(loss.shards()[rank].cpu(), other, rtol=1e-12, atol=1e-12)  # type: ignore[attr-defined]
    back, optimizer, _ = twin.training(place(twin.new_model()), grid().torch["tp"], plan)
    dt.checkpoint.load({"model": back, "optim": optimizer}, f"{folder}.behind")
    for (name, value), other in zip(back.state_dict().items(), model.state_dict().values(), strict=True):
        wholes = [x.full_tensor() if isinstance(x, DTensor) else x for x in (value, other)]
        torch.testing.assert_close(*(x.cpu() for x in wholes), rtol=1e-12, atol=1e-12, msg=name)


def test_values_in_a_dict_are_read_in_their_place(tmp_path: Path) -> None:
    layout: Any = (grid().torch["tp"], [Shard(0)])
    x = distribute_tensor(place(torch.arange(8.0)), *layout)
    dt.checkpoint.save({"x": x, "n": 3}, tmp_path)
    state: dict[str, Any] = {"x": zeros(8, device_mesh=layout[0], placements=[Replicate()]), "n": 0}
    before = state["x"]
    dt.checkpoint.load(state, tmp_path)
    assert state["x"] is before
    assert torch.equal(before.full_tensor().cpu(), torch.arange(8.0))
    partial = DTensor.from_local(place(torch.ones(2)), layout[0], [Partial()], run_check=False)
    with pytest.raises(TypeError, match=r"'x' is P\(sum\) along a dim of .*redistribute"):
        dt.checkpoint.save({"x": partial}, tmp_path)


def test_every_style_is_among_them() -> None:
    styles = {getattr(parallel, name) for name in parallel.__all__}
    used = {type(style) for _, style in twin.STYLES.values()}
    assert {style for style in styles if isinstance(style, type)} - used == {parallel.ParallelStyle}
