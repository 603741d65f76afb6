"""Training steps of torch's modules in a graph, with what else stands in such steps: the bits of eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import disttensor as dt

#: Processes: in-process nodes share a generator with the script, which checkpoints set.
pytestmark = pytest.mark.usefixtures("processes")


class Recurrent(nn.Module):
    def __init__(self, kind: type) -> None:
        super().__init__()
        self.inner = kind(6, 5, num_layers=2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)[0][:, -1]  # type: ignore[no-any-return]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 8, padding_idx=0)
        self.inner = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = (x.abs() * 4).long().clamp(0, 8)
        mask = nn.Transformer.generate_square_subsequent_mask(4, device=x.device)
        return self.inner(self.embed(tokens[..., 0]), src_mask=mask).flatten(1)[:, :5]  # type: ignore[no-any-return]


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Flatten(), nn.Linear(24, 24), nn.Dropout(0.5), nn.Linear(24, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)  # type: ignore[no-any-return]


MODULES: dict[str, Callable[[], nn.Module]] = {
    "convolution": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 4)),
        nn.Conv2d(1, 3, 2, padding=1),
        nn.BatchNorm2d(3),
        nn.GELU(),
        nn.MaxPool2d(2),
        nn.AdaptiveAvgPool2d((1, 5)),
        nn.Flatten(1),
        nn.Linear(15, 5),
    ),
    "lstm": lambda: Recurrent(nn.LSTM),
    "gru": lambda: Recurrent(nn.GRU),
    "attention": Attention,
    "checkpointed": Checkpointed,
    "norms": lambda: nn.Sequential(
        nn.LayerNorm(6), nn.Flatten(), nn.Linear(24, 10), nn.GroupNorm(2, 10), nn.Linear(10, 5)
    ),
}


def train(make: Callable[[], nn.Module], replayed: bool, extra: str) -> Any:
    torch.manual_seed(0)
    model = make()
    x, y = torch.randn(7, 4, 6), torch.randint(0, 5, (7,))
    model, x, y = model.to("node:1"), x.to("node:1"), y.to("node:1")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    torch.manual_seed(1)

    def step() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=extra != "kept gradients")
        with torch.autocast("node", dtype=torch.bfloat16, enabled=extra == "autocast"):
            out = model(x)
        loss = F.cross_entropy(out.float(), y, label_smoothing=0.1)
        loss.backward()
        if extra == "clipped":
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        return loss.detach()

    losses = [step().item()]
    g = dt.Graph()
    if replayed:
        with dt.graph(g):
            loss = step()
    for _ in range(4):
        if replayed:
            g.replay()
        else:
            loss = step()
        losses.append(loss.item())
    grads = [None if p.grad is None else p.grad.tolist() for p in model.parameters()]
    return losses, {k: v.tolist() for k, v in model.state_dict().items()}, grads


@pytest.mark.parametrize("name", MODULES)
def test_modules(name: str) -> None:
    assert train(MODULES[name], True, "") == train(MODULES[name], False, "")


@pytest.mark.parametrize("extra", ["autocast", "clipped", "kept gradients"])
def test_what_else_stands_in_a_step(extra: str) -> None:
    assert train(Attention, True, extra) == train(Attention, False, extra)


def test_streams_in_a_recording_are_flattened() -> None:
    x = torch.zeros(4, device="node:0")
    stream, done = dt.Stream(node=0), dt.Event()

    def step() -> torch.Tensor:
        stream.wait_stream(dt.streams.current_stream(0))
        with dt.stream(stream):
            y = x + 1
            done.record()
        done.wait()
        x.add_(y)
        return x * 2

    step()
    g = dt.Graph()
    with dt.graph(g):
        out = step()
    value = 1.0
    for _ in range(3):
        value += value + 1
        g.replay()
        with dt.stream(stream):
            seen = out + 0
        assert seen.tolist() == [2 * value] * 4


def test_gradients_that_a_backward_outside_accumulates() -> None:
    found = []
    for replayed in (False, True):
        w = torch.ones(3, device="node:0", requires_grad=True)

        def forward(w: torch.Tensor = w) -> torch.Tensor:
            return (w * w).sum()

        forward().backward()
        g = dt.Graph()
        if replayed:
            with dt.graph(g):
                forward().backward()
        for _ in range(3):
            if replayed:
                g.replay()
            else:
                forward().backward()
            assert w.grad is not None
            w.grad.add_(1)
        found.append(w.grad.tolist())
    assert found[0] == found[1]
