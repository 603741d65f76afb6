"""``@dt.graphed``: recorded by itself, replayed from the third call on, recorded again where it has to be."""

from __future__ import annotations

import gc
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from telling import said

import disttensor as dt
from disttensor import testing

pytestmark = pytest.mark.usefixtures("clean")


def test_each_call_gives_new_tensors_from_its_arguments() -> None:
    calls = 0

    @dt.graphed
    def step(x: torch.Tensor, scale: float, *, other: torch.Tensor) -> dict[str, torch.Tensor]:
        nonlocal calls
        calls += 1
        x.add_(1)
        return {"sum": (x * scale).to("node:1") + other, "x": x, "twice": x * 2}

    other = torch.arange(3.0, device="node:1")
    found = []
    for i in range(5):
        x = torch.full((3,), float(i), device="node:0")
        with testing.MessageLog() as log:
            out = step(x, 0.5 + i, other=other)
        if i > 2:
            assert log[0].commands == log[1].commands == ["Replay"]
        assert out["x"] is x
        found.append((out, x))
    for i, (out, x) in enumerate(found):
        assert x.tolist() == [i + 1.0] * 3
        assert out["sum"].tolist() == [(i + 1) * (0.5 + i) + k for k in range(3)]
        assert out["twice"].tolist() == [2 * (i + 1)] * 3
    assert calls == 2


def test_recordings_that_are_dropped_end_at_once() -> None:
    """Not when the collector finds them."""

    @dt.graphed
    def scaled(x: torch.Tensor, factor: float) -> torch.Tensor:
        return x * factor

    x = torch.ones(3, device="node:0")
    for k in range(4):
        assert scaled(x, k + 1.0).tolist() == [k + 1.0] * 3
    gc.disable()
    try:
        with testing.MessageLog() as log:
            scaled.clear()
            dt.synchronize()
        assert "Discard" in log[0].commands
    finally:
        gc.enable()


def test_another_shape_is_another_recording_and_their_number_is_bounded() -> None:
    @dt.graphed(limit=2)
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    with testing.MessageLog() as log:
        for _ in range(2):
            for n in (2, 3, 4, 3):
                for _ in range(3):
                    assert double(torch.ones(n, device="node:0")).tolist() == [2] * n
        dt.synchronize()
    assert log[0].commands.count("EndGraph") - log[0].commands.count("Discard") == 2


def test_the_same_tensor_twice_is_a_signature_of_its_own() -> None:
    @dt.graphed
    def add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return x + y

    for _ in range(3):
        x, y = torch.ones(1, device="node:0"), torch.ones(1, device="node:0")
        assert add(x, y).item() == 3
        assert add(x, x).item() == 6


def test_a_method_and_a_training_step() -> None:
    class Trainer:
        def __init__(self) -> None:
            self.net = torch.nn.Linear(4, 2, device="node:0")
            self.optimizer = torch.optim.Adam(self.net.parameters(), lr=1.0)

        def eager(self, x: torch.Tensor, y: torch.Tensor, rate: float) -> torch.Tensor:
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            self.optimizer.zero_grad()
            loss = F.mse_loss(self.net(x), y)
            loss.backward()
            self.optimizer.step()
            return loss

        graphed = dt.graphed(eager)

    a, b = Trainer(), Trainer()
    b.net.load_state_dict(a.net.state_dict())
    for i in range(6):
        x, y = torch.randn(8, 4).to("node:0"), torch.randn(8, 2).to("node:0")
        rate = 0.1 / (i + 1)
        assert a.eager(x, y, rate).item() == b.graphed(x, y, rate).item()
    assert torch.equal(a.net.weight.cpu(), b.net.weight.cpu())
    assert type(b.optimizer.param_groups[0]["lr"]) is float


def test_a_branch_on_a_number_records_again() -> None:
    @dt.graphed
    def step(x: torch.Tensor, k: float) -> torch.Tensor:
        return x + k if k > 0 else x * k

    for k in (1.0, 2.0, 3.0, -1.0, -2.0, 4.0):
        assert step(torch.full((1,), 5.0, device="node:0"), k).item() == (5 + k if k > 0 else 5 * k)


def test_a_float_that_no_operation_gets_is_refused() -> None:
    @dt.graphed
    def step(x: torch.Tensor, k: float) -> torch.Tensor:
        return x * math.sqrt(k)

    x = torch.ones(1, device="node:0")
    step(x, 4.0)
    with pytest.raises(dt.errors.GraphError, match="float argument 0 reached no operation"):
        step(x, 4.0)


def test_a_result_that_is_held_elsewhere_too() -> None:
    held: dict[str, torch.Tensor] = {}

    @dt.graphed
    def step(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        y = x * 2
        held.update(same=y, part=y[1:])
        return y, y.view(2, 1), y + 1

    found = []
    for i in range(5):
        found.append(step(torch.full((2,), float(i), device="node:0")))
        assert held["same"].tolist() == [2.0 * i] * 2
        assert held["part"].tolist() == [2.0 * i]
    for i, (y, view, more) in enumerate(found):
        assert y.tolist() == [2.0 * i] * 2
        assert view.tolist() == [[2.0 * i]] * 2
        assert more.tolist() == [2.0 * i + 1] * 2


def test_a_local_tensor_is_refused() -> None:
    step = dt.graphed(lambda x: x.to("node:0") * 2)
    with pytest.raises(dt.errors.GraphError, match="send it to a node"):
        step(torch.ones(2))


def test_modes_are_part_of_the_signature() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Dropout(1.0)).to("node:0")

    @dt.graphed
    def forward(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x).detach() + torch.zeros(3, device="node")

    x = torch.ones(2, 3, device="node:0")
    for _ in range(3):
        model.train()
        assert forward(model, x).abs().sum().item() == 0
        model.eval()
        assert forward(model, x).dtype == torch.float32
        assert forward(model, x).abs().sum().item() > 0
        with torch.autocast("node", dtype=torch.bfloat16):
            assert torch.equal(forward(model, x).cpu(), forward(model, x).cpu().bfloat16().float())
        with torch.no_grad():
            assert forward(model, x).abs().sum().item() > 0
    with pytest.raises(RuntimeError, match="same device"), dt.node(1):
        forward(model, x)


def test_parameters_are_known_by_identity_and_what_has_a_history_is_refused() -> None:
    @dt.graphed
    def step(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        w.grad = None
        (w * x).sum().backward()
        return w.detach() * 2

    one, two = (torch.full((2,), n, device="node:0", requires_grad=True) for n in (1.0, 2.0))
    for i in range(4):
        x = torch.full((2,), float(i), device="node:0")
        assert step(one, x).tolist() == [2, 2]
        assert step(two, x).tolist() == [4, 4]
        assert one.grad is not None
        assert one.grad.tolist() == [i, i]
    with pytest.raises(dt.errors.GraphError, match=r"x\.detach\(\)"):
        step(one * 2, x)


def test_an_argument_that_is_poisoned_or_not_made_yet_fails_as_in_eager() -> None:
    step: Any = dt.graphed(lambda x, y: (x + y, y * 2))
    y = torch.ones(2, device="node:0")
    for _ in range(3):
        step(y, y * 3)
    table = torch.ones(3, 2, device="node:0")
    bad = table[torch.full((1,), 9, device="node:0")][0]
    sums, good = step(bad, y)
    assert good.tolist() == [2, 2]
    with pytest.raises(IndexError):
        sums.cpu()
    g = dt.Graph()
    with dt.graph(g):
        later = y + 1
    sums, good = step(later, y)
    assert good.tolist() == [2, 2]
    with pytest.raises(dt.DisttensorError, match="not been replayed"):
        sums.cpu()
    g.replay()
    assert step(later, y)[0].tolist() == [3, 3]


def test_verifying_accepts_what_is_equal_and_leaves_the_eager_state() -> None:
    noise = torch.zeros(100, device="node:0")
    calls = []

    @dt.graphed(verify=True)
    def step(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        noise.view(10, 10).add_(torch.rand(10, 10, device="node:0"))
        return x + F.dropout(x, 0.5)

    expected = torch.zeros(100)
    torch.manual_seed(3)
    dt.synchronize()
    for _ in range(4):
        expected.view(10, 10).add_(torch.rand(10, 10))
        torch.empty(50).bernoulli_(0.5)
    torch.manual_seed(3)
    dt.synchronize()
    for _ in range(4):
        step(torch.ones(50, device="node:0"))
    assert torch.equal(noise.cpu(), expected)
    assert len(calls) == 3


def test_verifying_says_what_differs() -> None:
    count = [0]
    total = torch.zeros(3, device="node:0")

    @dt.graphed(verify=True)
    def step(x: torch.Tensor) -> torch.Tensor:
        count[0] += 1  # a replay doesn't see this
        total.add_(count[0])
        return x + count[0]

    x = torch.ones(3, device="node:0")
    step(x)
    with pytest.raises(dt.errors.GraphError) as caught:
        step(x)
    text = said(caught.value)
    assert "result 0: 3 of 3 elements of (3,) differ; at [0] the replay has 3.0 and eager 4.0" in text
    assert "what aten::add_.Tensor writes at " in text
    assert "test_graphed.py" in text


def test_within_a_larger_recording_it_is_part_of_it() -> None:
    double: Any = dt.graphed(lambda x: x * 2)
    x = torch.ones(2, device="node:0")
    for _ in range(3):
        double(x)
    g = dt.Graph()
    with dt.graph(g):
        y = double(x) + 1
    x.fill_(4)
    g.replay()
    assert y.tolist() == [9, 9]


def test_a_number_first() -> None:
    @dt.graphed
    def step(x: torch.Tensor, a: float) -> torch.Tensor:
        return torch.div(1.0, x) + torch.mul(a, x)

    x = torch.tensor([1.0, 2.0, 4.0])
    there = x.to("node:1")
    for a in (1.0, 2.5, 3.0, 4.0):
        assert step(there, a).tolist() == (1.0 / x + a * x).tolist()
