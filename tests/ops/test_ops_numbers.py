"""Dtypes that meet, and Python numbers as arguments, against local PyTorch."""

from __future__ import annotations

import pytest
import torch
from differential import as_local, inf, nan, on_places
from equal import same, send

from disttensor import testing

pytestmark = pytest.mark.usefixtures("clean")

CAST = """
x + h
x + f
h * f
k + i
k + j
t + h
i + z
x == i
torch.cat([x, d])
torch.cat([h, x, d])
torch.where(t, h, x)
h.float() @ w
h.sum(dtype=torch.float32)
i.to(torch.uint8)
x.to(torch.uint8) if False else p.to(torch.uint8)
odd.to(torch.bool)
x.to(torch.float8_e4m3fn).float()
i.to(torch.complex128)
x.half().to(torch.bfloat16)
n + 1.5
n / 2
n * True
torch.tensor(1, device=dev) + torch.tensor(1.0, device=dev)
x + torch.tensor(2)
x + torch.tensor(2.0, dtype=torch.float64)
i + torch.tensor(2.5)
h + torch.tensor(2.5)
torch.tensor(3.0) * x
torch.tensor(3) - x
x.mul(torch.tensor(True))
x.mul_(torch.tensor(0.5)); x
torch.where(t, x, torch.tensor(0.0))
torch.where(t, torch.tensor(1.0), torch.tensor(-0.0))
torch.maximum(x, torch.tensor(0.0))
x.masked_fill(t, torch.tensor(9.0))
x / torch.tensor(0.0)
x * torch.tensor(nan)
x * torch.tensor(-0.0)
x.lerp(y, torch.tensor(0.3))
torch.clamp(x, torch.tensor(0.1), torch.tensor(0.4))
x ** torch.tensor(2)
x < torch.tensor(0.3)
z * torch.tensor(1 + 1j)
i == torch.tensor(3)
torch.add(2.0, x)
torch.add(2, i, alpha=3)
torch.sub(2.0, x)
torch.subtract(2, i)
torch.mul(2.0, x)
torch.mul(True, i)
torch.multiply(2.5, i)
torch.div(1.0, x)
torch.div(7, i.abs() + 1, rounding_mode="floor")
torch.divide(1, i.abs() + 1)
torch.true_divide(1.0, h)
torch.add(2.0, z)
torch.mul(2j, x)
"""


@on_places(CAST)
def test_as_local(program: str, name: str) -> None:
    as_local(program, name)


# ---- numbers as arguments --------------------------------------------------------------------------------------------


def test_numbers_that_python_calls_equal_are_told_apart() -> None:
    """A plan cached for one of 1, 1.0, True (or 0.0, -0.0, NaN) is not used for another."""
    values = [1, 1.0, True, 1 + 0j, 2 - 3j, 0, 0.0, -0.0, False, nan, nan, inf, -inf, 2**40, -1]
    programs = [
        lambda x, i, n: x + n,
        lambda x, i, n: i * n,
        lambda x, i, n: torch.full((2,), n, device=x.device),
        lambda x, i, n: torch.where(x > 0, x, n),
        lambda x, i, n: torch.tensor(n, device=x.device),
        lambda x, i, n: x == n,
    ]
    x, i = torch.randn(3), torch.tensor([0, 1, 2])
    rx, ri = send((x, i), "node:1")
    for order in (values, values[::-1]):
        for program in programs:
            for n in order:
                same(program(rx, ri, n), program(x, i, n), path=repr(n))


def test_a_number_that_changes_makes_no_new_plans() -> None:
    x = torch.ones(3, device="node:1")
    x * 0.5
    before = testing.plans()["aten::mul.Tensor"]
    for step in range(100):
        x = x * (1 + step / 7)
    assert testing.plans()["aten::mul.Tensor"] == before


def test_unsupported_arguments_are_named() -> None:
    x = torch.ones(3, device="node:1")
    with pytest.raises(TypeError):
        x + object()
    with pytest.raises(TypeError):
        torch.add(x, "a")
    with pytest.raises((OverflowError, RuntimeError)):
        torch.full((2,), 2**70, device="node:1")
