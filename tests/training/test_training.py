"""Training on a real node is bit-identical, loss by loss, to local CPU with one thread."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

Optimizer = Callable[..., torch.optim.Optimizer]


def mlp() -> tuple[nn.Module, Optimizer, tuple[int, ...]]:
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 5))
    return model, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), (32, 20)


def cnn() -> tuple[nn.Module, Optimizer, tuple[int, ...]]:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 5),
    )
    return model, lambda p: torch.optim.AdamW(p, lr=1e-3), (16, 3, 12, 12)


def encoder() -> tuple[nn.Module, Optimizer, tuple[int, ...]]:
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)
    model = nn.Sequential(
        nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Flatten(), nn.Linear(32 * 6, 5)
    )
    return model, lambda p: torch.optim.Adam(p, lr=1e-3), (8, 6, 32)


def losses(make: Callable[[], tuple[nn.Module, Optimizer, tuple[int, ...]]], device: str) -> list[float]:
    torch.manual_seed(0)
    model, optimizer_of, shape = make()
    model = model.to(device)
    optimizer = optimizer_of(model.parameters())
    torch.manual_seed(1)
    data = torch.Generator().manual_seed(5)
    out = []
    for _ in range(50):
        x = torch.randn(shape, generator=data).to(device)
        y = torch.randint(0, 5, (shape[0],), generator=data).to(device)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        out.append(loss.detach())
    return [loss.item() for loss in out]


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("make", [mlp, cnn, encoder])
def test_fifty_steps_are_bit_identical(make: Callable[[], tuple[nn.Module, Optimizer, tuple[int, ...]]]) -> None:
    expected = losses(make, "cpu")
    assert losses(make, "node:1") == expected
    assert expected[-1] != expected[0]


@pytest.mark.usefixtures("processes")
def test_a_model_in_halves_trains_as_the_whole() -> None:
    def train(first: str, second: str) -> list[float]:
        torch.manual_seed(0)
        a, b = nn.Sequential(nn.Linear(8, 16), nn.Tanh()), nn.Linear(16, 3)
        a, b = a.to(first), b.to(second)
        optimizer = torch.optim.SGD([*a.parameters(), *b.parameters()], lr=0.2, momentum=0.5)
        data = torch.Generator().manual_seed(5)
        out = []
        for _ in range(20):
            x, y = torch.randn(12, 8, generator=data), torch.randint(0, 3, (12,), generator=data)
            optimizer.zero_grad()
            loss = F.cross_entropy(b(a(x.to(first)).to(second)), y.to(second))
            loss.backward()
            optimizer.step()
            out.append(loss.item())
        return out

    assert train("node:0", "node:1") == train("cpu", "cpu")
