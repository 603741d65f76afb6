"""What differential tests run on a node and here: programs of operators; leaves, a network and a batch for gradients.

A line of a list of programs is a program: statements between ";", and last the expression whose value is compared. The
names in it are the operands below; `dev` is the device under test. To test another operator, add a line to a list.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping
from types import MappingProxyType

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from equal import same, send

import disttensor as dt

inf, nan = math.inf, math.nan

# ---- operators -------------------------------------------------------------------------------------------------------


@functools.cache
def operands() -> dict[str, torch.Tensor]:
    """All operands."""
    g = torch.Generator().manual_seed(1)

    def randn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(*shape, generator=g, dtype=dtype)

    def randint(low: int, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=g, dtype=dtype)

    half = randn(4, 4)
    return {
        "x": randn(4, 5),
        "y": randn(4, 5),
        "p": randn(4, 5).abs() + 0.1,  # positive
        "u": torch.rand(4, 5, generator=g) * 1.8 - 0.9,  # inside (-1, 1)
        "v": randn(5),
        "w": randn(5, 6),
        "b": randn(2, 4, 5),  # batches
        "c": randn(2, 5, 3),
        "m": randn(4, 4),
        "spd": half @ half.T + 4 * torch.eye(4),
        "d": randn(4, 5, dtype=torch.float64),
        "h": randn(4, 5).bfloat16(),
        "f": randn(4, 5).half(),
        "z": randn(4, 5, dtype=torch.complex64),
        "zm": randn(4, 4, dtype=torch.complex128),
        "i": randint(-9, 9, 4, 5),
        "j": randint(1, 9, 4, 5, dtype=torch.int32),
        "k": randint(0, 255, 4, 5, dtype=torch.uint8),
        "s": randn(()),  # 0-dim
        "n": torch.tensor(3),
        "t": randint(0, 2, 4, 5).bool(),
        "o": randint(0, 2, 4, 5).bool(),
        "rows": torch.tensor([2, 0, 3]),
        "cols": torch.tensor([1, 4, 1]),
        "at": randint(0, 4, 4, 5),  # for gather, scatter
        "odd": torch.tensor([0.0, -0.0, inf, -inf, nan, 1.0, -1.5]),
        "flat": randint(0, 5, 12).float(),
        "big": randn(3, 40),
        "img": randn(2, 3, 8, 8),
        "seq": randn(2, 3, 10),
        "vol": randn(1, 2, 4, 4, 4),
        "k1": randn(4, 3, 3),
        "k2": randn(4, 3, 3, 3),
        "k3": randn(3, 2, 2, 2, 2),
        "tk2": randn(3, 4, 3, 3),
        "bias": randn(4),
        "three": randn(3),
        "var": randn(3).abs() + 0.5,
        "tokens": randint(0, 7, 3, 4),
        "table": randn(7, 5),
        "logits": randn(6, 5),
        "label": randint(0, 5, 6),
        "q": randn(2, 2, 6, 8),
        "kk": randn(2, 2, 6, 8),
        "vv": randn(2, 2, 6, 8),
        "empty": torch.empty(0, 3),
    }


def inputs(program: str) -> dict[str, torch.Tensor]:
    """Fresh ones of the operands that a program names."""
    names = set(re.findall(r"\w+", program))
    return {k: v.clone() for k, v in operands().items() if k in names or (k == "big" and "mha" in names)}


def lines(*blocks: str) -> list[str]:
    return [line for block in blocks for line in block.strip().splitlines()]


def cases(*blocks: str, bugs: Mapping[str, pytest.MarkDecorator] = MappingProxyType({})) -> list[object]:
    """The programs of some lists, each once. ``bugs``: marks of those that begin so and fail yet."""
    return [
        pytest.param(program, marks=[mark for start, mark in bugs.items() if program.startswith(start)])
        for program in dict.fromkeys(lines(*blocks))
    ]


def evaluate(program: str, device: torch.device, values: dict[str, torch.Tensor]) -> object:
    """The value of the last expression, with ``values`` as names."""
    g = torch.Generator().manual_seed(7)

    def weights(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g).to(device)

    def cell(gates: int) -> tuple[torch.Tensor, ...]:
        return weights(gates, 5), weights(gates, 2), weights(gates), weights(gates)

    def mha() -> tuple[object, ...]:
        source = values["big"][:, :24].reshape(3, 2, 12)
        return (
            *(source, source, source, 12, 3, weights(36, 12), weights(36), None, None, False, 0.0),
            *(weights(12, 12), weights(12)),
        )

    names = {
        "torch": torch,
        "np": np,
        "F": F,
        "inf": inf,
        "nan": nan,
        "dev": device,
        "cell": cell,
        "mha": mha,
        **values,
    }
    *statements, expression = program.split("; ")
    for statement in statements:
        exec(statement, names)
    return eval(expression, names)


#: Where `as_local` is tried: a node's CPU, and a simulated CUDA device.
on_devices = pytest.mark.parametrize("name", ["cpu", "cuda:1"])


def as_local(program: str, name: str) -> None:
    """Asserts that a program gives on node 1 what it gives here, and leaves its operands the same."""
    device = dt.device(1, name)
    remote, theirs = send(inputs(program), device), inputs(program)
    expected = evaluate(program, torch.device("cpu"), theirs)
    got = evaluate(program, device, remote)
    same(got, expected)
    for key, value in theirs.items():
        same(remote[key], value, path=key)


# ---- gradients -------------------------------------------------------------------------------------------------------


def leaves() -> tuple[torch.Tensor, torch.Tensor]:
    """Two leaves, the same ones each time."""
    g = torch.Generator().manual_seed(2)
    return torch.randn(4, 5, generator=g).requires_grad_(), torch.randn(4, 5, generator=g).requires_grad_()


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(1, 4, 3, padding=1)
        self.norm = torch.nn.BatchNorm2d(4)
        self.layers = torch.nn.Sequential(torch.nn.Linear(64, 16), torch.nn.GELU(), torch.nn.LayerNorm(16))
        self.head = torch.nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(F.relu(self.norm(self.conv(x))), 2)
        return self.head(self.layers(x.flatten(1)))


class Tied(torch.nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(7, 4)
        self.out = torch.nn.Linear(4, 7, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, i: torch.Tensor) -> torch.Tensor:
        return self.out(self.embed(i))


def net() -> Net:
    torch.default_generator.manual_seed(5)
    return Net()


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(6)
    return torch.randn(6, 1, 8, 8, generator=g), torch.randint(0, 5, (6,), generator=g)
