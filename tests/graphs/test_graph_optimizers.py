"""Each of torch's optimizers in a graph: eager's bits, step for step, or a clear error while it is recorded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import disttensor as dt

pytestmark = pytest.mark.usefixtures("clean")

FOLLOWED: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {"lr": 0.1}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.1, "maximize": True}),
    ("Adam", {"lr": 0.01}),
    ("Adam", {"lr": 0.01, "amsgrad": True, "weight_decay": 0.1}),
    ("Adam", {"lr": 0.01, "capturable": True}),
    ("AdamW", {"lr": 0.01, "maximize": True}),
    ("Adamax", {"lr": 0.01}),
    ("Adagrad", {"lr": 0.1, "lr_decay": 0.1}),
    ("Adadelta", {"lr": 0.5}),
    ("RMSprop", {"lr": 0.01, "centered": True, "momentum": 0.5}),
    ("RMSprop", {"lr": 0.01}),
    ("Rprop", {"lr": 0.01}),
    ("RAdam", {"lr": 0.01}),
    ("RAdam", {"lr": 0.01, "decoupled_weight_decay": True, "weight_decay": 0.1}),
    ("Muon", {"lr": 0.01}),
]
REFUSED = ["NAdam", "ASGD", "Adafactor", "LBFGS"]


def start(name: str, options: dict[str, Any]) -> Any:
    """Parameters, an optimizer, and a step that gives the loss."""
    data = torch.Generator().manual_seed(0)
    w1 = torch.randn(4, 6, generator=data).to("node:1").requires_grad_()
    w2 = torch.randn(6, 2, generator=data).to("node:1").requires_grad_()
    x, y = torch.randn(5, 4, generator=data).to("node:1"), torch.randn(5, 2, generator=data).to("node:1")
    optimizer: Any = getattr(torch.optim, name)([w1, w2], **options)

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        value = F.mse_loss(torch.tanh(x @ w1) @ w2, y)
        value.backward()
        return value

    def step() -> torch.Tensor:
        if name == "LBFGS":
            return optimizer.step(loss)  # type: ignore[no-any-return]
        value = loss()
        optimizer.step()
        return value.detach()

    return (w1, w2), optimizer, step


def state_of(optimizer: Any) -> list[dict[str, Any]]:
    return [
        {k: v.tolist() if isinstance(v, torch.Tensor) else v for k, v in kept.items()}
        for kept in optimizer.state.values()
    ]


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize(("name", "options"), FOLLOWED, ids=lambda v: v if isinstance(v, str) else "-".join(v))
def test_followed(name: str, options: dict[str, Any], foreach: bool) -> None:
    options = options if name == "Muon" else {**options, "foreach": foreach}
    found = []
    for replayed in (False, True):
        weights, optimizer, step = start(name, options)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
        g = dt.Graph()
        losses = []
        for i in range(10):
            if replayed and i == 6:
                with dt.graph(g):
                    loss = step()
            if replayed and i >= 6:
                g.replay()
            else:
                loss = step()
            losses.append(loss.item())
            schedule.step()
        found.append((losses, [w.tolist() for w in weights], state_of(optimizer)))
    assert found[0] == found[1]


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    _, optimizer, step = start(name, {})
    for _ in range(2):
        step()
    before = state_of(optimizer) if name != "LBFGS" else None
    groups = [dict(group) for group in optimizer.param_groups]
    with pytest.raises(dt.errors.GraphError), dt.graph(dt.Graph()):
        step()
    if before is not None:
        assert state_of(optimizer) == before
    assert [dict(group) for group in optimizer.param_groups] == groups
    assert all(type(v) in (float, int, bool, tuple, list, type(None)) for group in groups for v in group.values())


def test_a_state_that_the_recording_would_make_is_refused() -> None:
    _, _, step = start("Adam", {"lr": 0.1})
    with pytest.raises(dt.errors.GraphError, match="take a step before"), dt.graph(dt.Graph()):
        step()


def test_two_steps_in_one_recording() -> None:
    found = []
    for replayed in (False, True):
        weights, optimizer, step = start("Adam", {"lr": 0.1})
        step()
        if replayed:
            g = dt.Graph()
            with dt.graph(g):
                step()
                step()
        for _ in range(3):
            if replayed:
                g.replay()
            else:
                step()
                step()
        found.append(([w.tolist() for w in weights], state_of(optimizer)))
    assert found[0] == found[1]


def test_a_rate_in_a_tensor_of_the_masters_is_refused() -> None:
    _, optimizer, step = start("Adam", {"lr": 0.1})
    step()
    optimizer.param_groups[0]["lr"] = torch.tensor(0.1)
    with pytest.raises(dt.errors.GraphError, match="give a float"), dt.graph(dt.Graph()):
        step()
