"""Programs that train, the same with what trains on meshes and with what torch has for it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 7), nn.Tanh(), nn.Linear(7, 3))


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


class Unused(nn.Module):
    """A layer that only every fourth forward pass uses, with no_sync too, and one that none does."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.some, self.never, self.last = (nn.Linear(6, 6) for _ in range(4))
        self.steps = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        x = self.first(x).tanh()
        if self.steps % 4 == 0:
            x = self.some(x).tanh()
        return self.last(x)[:, :3]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.out = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.two.weight = self.one.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.two(self.one(x).tanh()).tanh())


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.02)


def step(model: Any, optimizer: Any, x: Any, y: Any) -> None:
    optimizer.zero_grad()
    F.mse_loss(model(x), y).backward()
    optimizer.step()


def stepwise(one: Callable[..., None]) -> Callable[..., None]:
    def fit(model: Any, optimizer: Any, x: Any, y: Any) -> None:
        for i in range(len(x)):
            one(model, optimizer, x[i], y[i])

    return fit


def zeroed_in_place(model: Any, optimizer: Any, x: Any, y: Any) -> None:
    optimizer.zero_grad(set_to_none=False)
    F.mse_loss(model(x), y).backward()
    optimizer.step()


def clipped(model: Any, optimizer: Any, x: Any, y: Any) -> None:
    optimizer.zero_grad()
    F.mse_loss(model(x), y).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()


def never_cleared(model: Any, optimizer: Any, x: Any, y: Any) -> None:
    F.mse_loss(model(x), y).backward()
    optimizer.step()


def scaled(model: Any, optimizer: Any, x: Any, y: Any) -> None:
    """With a scale so large that the first steps are left out."""
    scaler = torch.amp.GradScaler(x.device.type, init_scale=2.0**127, growth_interval=3)
    for i in range(len(x)):
        optimizer.zero_grad()
        scaler.scale(F.mse_loss(model(x[i]), y[i])).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()


def unsynchronized(model: Any, optimizer: Any, x: Any, y: Any) -> None:
    """Two backward passes that add, then one that reduces."""
    for i in range(len(x)):
        with model.no_sync() if i % 3 < 2 else contextlib.nullcontext():
            F.mse_loss(model(x[i]), y[i]).backward()
        if i % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()


def evaluated(model: Any, optimizer: Any, x: Any, y: Any) -> None:
    """The statistics in the end are those that an evaluation has left."""
    stepwise(step)(model, optimizer, x, y)
    model.eval()
    with torch.no_grad():
        model(x[0])


def train(make: Callable[[], nn.Module], wrap: Any, optimizer: Any, fit: Any, x: Any, y: Any) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = wrap(make().to(y.dtype))
    fit(model, optimizer(model), x, y)
    return [value.detach() for value in model.state_dict().values()]
