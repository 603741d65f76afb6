"""``torch.utils.checkpoint`` on real nodes: recomputation draws what the forward pass drew."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn as nn
from equal import same
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

from disttensor import testing

pytestmark = pytest.mark.usefixtures("processes")


def network(where: str) -> nn.Sequential:
    torch.default_generator.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Tanh(), nn.Linear(8, 6), nn.Dropout(0.3))
    return model.to(where)


def _selective(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        saved = op == torch.ops.aten.addmm.default
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    return checkpoint(model, x, use_reentrant=False, context_fn=contexts)  # type: ignore[no-any-return]


WAYS = {
    "plain": lambda model, x: checkpoint(model, x, use_reentrant=False),
    "reentrant": lambda model, x: checkpoint(model, x, use_reentrant=True),
    "sequential": lambda model, x: checkpoint_sequential(model, 2, x, use_reentrant=False),
    "nested": lambda model, x: checkpoint(
        lambda a: checkpoint(model, a * 2, use_reentrant=False) * 3, x, use_reentrant=False
    ),
    "selective": _selective,
    "without": lambda model, x: model(x),
}


@pytest.mark.parametrize("way", WAYS)
def test_dropout_is_drawn_again(way: str) -> None:
    results = []
    for where in ("node:1", "cpu"):
        model = network(where)
        x = torch.linspace(-1, 1, 24).reshape(4, 6).to(where).requires_grad_()
        torch.manual_seed(7)
        y = WAYS[way](model, x)
        between = torch.rand(3, device=where)
        y.square().sum().backward()
        # the recomputation leaves the generator where it was
        results.append((y, x.grad, [p.grad for p in model.parameters()], between, torch.rand(3, device=where)))
    same(*results)


def test_autocast_and_kept_generators() -> None:
    results = []
    for where, kind in (("node:1", "node"), ("cpu", "cpu")):
        model = network(where)
        x = torch.linspace(-1, 1, 24).reshape(4, 6).to(where).requires_grad_()
        torch.manual_seed(7)
        with torch.autocast(kind, dtype=torch.bfloat16):
            y = checkpoint(model, x, use_reentrant=False)
        y.float().sum().backward()
        results.append((y, x.grad, model[0].weight.grad))
    same(*results)


def test_two_nodes() -> None:
    """Each argument's node has its generator saved and set."""
    first, second = network("node:0"), network("node:1")

    def both(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return first(a).to("node:1") + second(b)

    gradients = []
    for run in (both, lambda a, b: checkpoint(both, a, b, use_reentrant=False)):
        a = torch.ones(2, 6, device="node:0", requires_grad=True)
        b = torch.ones(2, 6, device="node:1", requires_grad=True)
        torch.manual_seed(3)
        y = run(a, b)
        torch.rand(5, device="node:0"), torch.rand(7, device="node:1")
        y.square().sum().backward()
        gradients.append((a.grad.cpu(), b.grad.cpu()))
    for got, expected in zip(*gradients, strict=True):
        assert torch.equal(got, expected)


def test_no_round_trip() -> None:
    model = network("node:1")
    x = torch.ones(2, 6, device="node:1", requires_grad=True)

    def step() -> None:
        checkpoint(model, x, use_reentrant=False).sum().backward()

    step()  # plans are made
    with testing.MessageLog() as log:
        step()
    assert log.questions == []


def test_a_failing_recomputation() -> None:
    calls = []

    def f(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        if len(calls) > 1:
            raise ValueError("not again")
        return x.sin()

    x = torch.ones(3, device="node:1", requires_grad=True)
    y = checkpoint(f, x, use_reentrant=False)
    with pytest.raises(ValueError, match="not again"):
        y.sum().backward()
    same((x * 2).detach(), torch.full((3,), 2.0))
