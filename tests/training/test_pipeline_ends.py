"""What goes wrong in a pipeline: arguments, stages, nodes, Ctrl-C; and that it can be used afterwards."""

from __future__ import annotations

import itertools
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from equal import bits
from mesh_kit import connected
from torch import nn

import disttensor as dt
from disttensor.training import Pipeline

pytestmark = pytest.mark.usefixtures("settled")

NODES = 4


@pytest.fixture(scope="module", autouse=True)
def session() -> Iterator[None]:
    with connected(NODES):
        yield


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(5, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rows(x)  # type: ignore[no-any-return]


def made(places: Any = ("node:0", "node:1"), **options: Any) -> Pipeline:
    torch.manual_seed(0)
    return Pipeline([Table(), nn.Linear(4, 2)], list(places), **{"microbatches": 4, **options})


INDEX = torch.tensor([1, 2, 3, 4, 1, 2, 0, 4])
TARGET = torch.ones(8, 2)


def works(pipeline: Pipeline) -> None:
    """Asserts that a step gives what it gives a pipeline that is new."""
    pipeline.zero_grad()
    fresh = made()
    fresh.load_state_dict(pipeline.state_dict())
    loss, wanted = pipeline.step(INDEX, TARGET, F.mse_loss), fresh.step(INDEX, TARGET, F.mse_loss)
    assert bits(loss.cpu()) == bits(wanted.cpu())
    for p, other in zip(pipeline.parameters(), fresh.parameters(), strict=True):
        assert bits(p.grad.cpu()) == bits(other.grad.cpu())  # type: ignore[union-attr]


def linear(*sizes: int) -> list[nn.Module]:
    return [nn.Linear(a, b) for a, b in itertools.pairwise(sizes)]


def shared_norm() -> list[nn.Module]:
    norm = nn.BatchNorm1d(4)
    return [norm, norm]


class Named(nn.Sequential):
    pass


WRONG: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "too few places": (
        lambda: Pipeline(linear(2, 2, 2, 2), ["node:0", "node:1"], microbatches=2),
        ValueError,
        r"3 stages and 2 places; .* places=\['node:0', 'node:1'\] \* 2",
    ),
    "no stages": (lambda: Pipeline([], [], microbatches=2), ValueError, "0 stages and 0 places"),
    "one place": (lambda: Pipeline(linear(2, 2), "node:0", microbatches=2), TypeError, "a list .* not 'node:0'"),
    "no such node": (
        lambda: Pipeline(linear(2, 2), ["node:9"], microbatches=2),
        RuntimeError,
        "'node:9' does not exist",
    ),
    "a module": (lambda: Pipeline(nn.Linear(2, 2), ["node:0"], microbatches=2), TypeError, "not Linear"),
    "no module": (lambda: Pipeline([print], ["node:0"], microbatches=2), TypeError, "stage 0 has to be a module"),
    "no microbatches": (lambda: made(microbatches=0), ValueError, "positive integer, not 0"),
    "True": (lambda: made(microbatches=True), ValueError, "positive integer, not True"),
    "a schedule": (lambda: made(schedule="1F1B"), ValueError, "schedule '1F1B' is unknown .*'1f1b'"),
    "a node and a mesh": (
        lambda: made(["node:0", dt.mesh(dp=2, nodes=[1, 2])]),
        ValueError,
        r"stage 0 is on node 0 cpu and stage 1 on the mesh \(dp=2\)",
    ),
    "meshes that differ": (
        lambda: made([dt.mesh(dp=2, nodes=[0, 1]), dt.mesh(tp=2, nodes=[2, 3])]),
        ValueError,
        "with the same dims",
    ),
    "a mesh without dp": (
        lambda: made([dt.mesh(tp=2, nodes=[0, 1]), dt.mesh(tp=2, nodes=[2, 3])]),
        ValueError,
        "has no dim 'dp'; it has tp=2",
    ),
    "a shared buffer": (
        lambda: Pipeline(shared_norm(), ["node:0", "node:1"], microbatches=2),
        ValueError,
        "stage 1 shares a module with an earlier stage, and that has a buffer, 'running_mean'",
    ),
    "few rows": (
        lambda: made().step(INDEX[:3], TARGET[:3], F.mse_loss),
        ValueError,
        "3 rows of x are too few for microbatches=4",
    ),
    "few rows of an evaluation": (lambda: made()(INDEX[:3]), ValueError, "3 rows of x"),
    "rows that differ": (
        lambda: made().step((INDEX, INDEX[:5]), TARGET, F.mse_loss),
        ValueError,
        r"tensors of x have one number of rows .* not \(8,\), \(5,\)",
    ),
    "targets that differ": (
        lambda: made().step(INDEX, TARGET[:7], F.mse_loss),
        ValueError,
        "x has 8 rows, and target 7",
    ),
    "rows of ranks": (
        lambda: made([dt.mesh(pp=2, dp=2).slice(pp=k) for k in range(2)]).step(INDEX[:7], TARGET[:7], F.mse_loss),
        ValueError,
        r"7 rows of x do not divide among dp=2.*leave 1 rows out",
    ),
    "few rows of ranks": (
        lambda: made([dt.mesh(pp=2, dp=2).slice(pp=k) for k in range(2)]).step(INDEX[:6], TARGET[:6], F.mse_loss),
        ValueError,
        "3 rows of x on each rank are too few",
    ),
    "on another mesh": (
        lambda: made([dt.mesh(pp=2, dp=2).slice(pp=k) for k in range(2)]).step(
            dt.shard(INDEX, dt.mesh(dp=4), dp=0), TARGET, F.mse_loss
        ),
        ValueError,
        "x is on the mesh .* and its stage on the mesh",
    ),
    "a gradient": (
        lambda: Pipeline(linear(2, 2), ["node:0"], microbatches=2).step(
            torch.ones(4, 2, requires_grad=True), torch.ones(4, 2), F.mse_loss
        ),
        ValueError,
        r"x requires a gradient.*x\.detach\(\)",
    ),
    "a loss that is no mean": (
        lambda: made().step(INDEX, TARGET, lambda out, y: (out - y).square()),
        ValueError,
        r"shape \(2, 2\), and has to return the mean",
    ),
    "a loss that is no tensor": (lambda: made().step(INDEX, TARGET, lambda *_: 1.0), TypeError, "returned float"),
    "an output without rows": (
        lambda: Pipeline([nn.Linear(2, 2), Total()], ["node:0", "node:1"], microbatches=2)(torch.ones(4, 2)),
        TypeError,
        "a tensor without a dimension for each micro-batch",
    ),
}


class Total(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sum()


@pytest.mark.parametrize("case", WRONG)
def test_mistakes_are_sentences(case: str) -> None:
    call, kind, text = WRONG[case]
    with pytest.raises(kind, match=text):
        call()


def test_a_name_that_would_hide_a_method() -> None:
    model = nn.Sequential()
    model.add_module("step", nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"called 'step' would hide Pipeline\.step"):
        Pipeline(model, ["node:0"], microbatches=1)


def notes(error: BaseException) -> str:
    return "\n".join(error.__notes__)


def test_an_error_of_the_script_names_stage_and_microbatch() -> None:
    pipeline = made()
    with pytest.raises(RuntimeError, match="indices") as raised:
        pipeline.step(INDEX.float(), TARGET, F.mse_loss)
    assert "in the forward pass of stage 0, micro-batch 0 of 4, on node 0 cpu" in notes(raised.value)
    with pytest.raises(RuntimeError, match="must match") as raised:
        pipeline.step(INDEX, torch.ones(8, 3), broken)
    assert "in the forward pass of stage 1, micro-batch 0 of 4, on node 1 cpu" in notes(raised.value)
    works(pipeline)


def broken(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (out - y).square().mean()


@pytest.mark.parametrize("mesh", [False, True])
def test_an_error_of_a_node_names_stage_and_microbatch_and_the_users_line(mesh: bool) -> None:
    places = [dt.mesh(pp=2, dp=2).slice(pp=k) for k in range(2)] if mesh else ["node:0", "node:1"]
    pipeline = made(places, microbatches=4 if mesh else 8)
    index = INDEX.clone()
    index[6] = 7  # the third micro-batch of the second rank, or the seventh
    loss = pipeline.step(index, TARGET, F.mse_loss)
    with pytest.raises(IndexError, match="index out of range") as raised:
        loss.item()
    told = notes(raised.value)
    line = next(n for n, text in enumerate(Path(__file__).read_text().splitlines(), 1) if "self.rows(x)" in text)
    assert f"test_pipeline_ends.py:{line} in Table.forward" in told
    assert f"in the forward pass of stage 0, micro-batch {2 if mesh else 6} of {4 if mesh else 8}" in told
    assert "on node 1" in told if mesh else "on node 0" in told
    if not mesh:
        works(made())


class Spoilt(torch.autograd.Function):
    """Fails on the node in the backward pass of the third micro-batch."""

    calls = 0

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        Spoilt.calls += 1
        ctx.bad = Spoilt.calls == 3
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> torch.Tensor:
        rows = torch.full((1,), 99 if ctx.bad else 0, device=grads[0].device)
        return grads[0] + grads[0].index_select(0, rows) * 0


class Spoiling(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Spoilt.apply(super().forward(x))  # type: ignore[no-any-return, no-untyped-call]


def test_an_error_of_a_backward_pass_is_named_too() -> None:
    torch.manual_seed(0)
    Spoilt.calls = 0
    pipeline = Pipeline(
        [nn.Linear(3, 3), Spoiling(3, 3), nn.Linear(3, 3)], ["node:0", "node:1", "node:2"], microbatches=4
    )
    x = torch.randn(8, 3)
    loss = pipeline.step(x, x, F.mse_loss)
    assert loss.item() > 0  # the loss was made before
    first, second, _ = pipeline.children()
    with pytest.raises(IndexError) as raised:
        first.weight.grad.cpu()  # type: ignore[union-attr, operator]
    assert "in the backward pass of stage 1, micro-batch 2 of 4" in notes(raised.value)
    assert "on node 1" in notes(raised.value)
    assert re.search(r"test_pipeline_ends\.py:\d+ in Spoilt\.backward", notes(raised.value))
    with pytest.raises(IndexError):
        second.weight.grad.cpu()  # type: ignore[union-attr, operator]


def test_what_is_issued_beside_a_pipeline_is_not_taken_for_its() -> None:
    pipeline = made()
    pipeline.step(INDEX, TARGET, F.mse_loss)
    bad = F.embedding(torch.tensor([9], device="node:0"), torch.ones(3, 2, device="node:0"))
    with pytest.raises(IndexError) as raised:
        bad.cpu()
    assert "micro-batch" not in notes(raised.value)


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("kind", [KeyboardInterrupt, RuntimeError])
def test_after_an_interruption_it_can_be_used(stage: int, kind: type[BaseException]) -> None:
    pipeline = made()
    calls = 0

    def interrupt(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            if kind is KeyboardInterrupt:
                signal.raise_signal(signal.SIGINT)
            raise RuntimeError("enough")

    hook = list(pipeline.children())[stage].register_forward_hook(interrupt)
    with pytest.raises(kind):
        pipeline.step(INDEX, TARGET, F.mse_loss)
    hook.remove()
    before = [dt.testing.usage(k).tensors for k in range(2)]
    works(pipeline)
    pipeline.zero_grad()
    for k in range(2):  # nothing of the interrupted step was kept
        assert dt.testing.usage(k).tensors <= before[k]


def test_without_a_gradient_to_compute_it_is_torchs_error() -> None:
    pipeline = made().requires_grad_(False)
    with pytest.raises(RuntimeError, match="does not require grad"):
        pipeline.step(INDEX, TARGET, F.mse_loss)


def test_a_measurement_that_fails_is_the_blocks_error() -> None:
    pipeline = made()
    with pytest.raises(ZeroDivisionError), pipeline.measure() as shares:
        raise ZeroDivisionError
    assert not shares.rows
