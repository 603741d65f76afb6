"""Optimizers, schedulers and clipping on proxies, against local PyTorch; on a mesh each rank has other values."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from differential import leaves
from homes import HERE, Home

import disttensor as dt
from disttensor import testing

pytestmark = pytest.mark.usefixtures("clean")

NOT_ON_A_MESH = {"test_optimizers[LBFGS]": "it asks how large the loss is, and does what that says"}

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "Adam": lambda p: torch.optim.Adam(p, lr=1e-2),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True, weight_decay=0.1),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "capturable off": lambda p: torch.optim.AdamW(p, lr=1e-2, maximize=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.5, centered=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "Adadelta": lambda p: torch.optim.Adadelta(p),
    "Adamax": lambda p: torch.optim.Adamax(p),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=1e-3),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=1e-3),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=1e-3),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=1e-2),
    "foreach Adam": lambda p: torch.optim.Adam(p, lr=1e-2, foreach=True),
    "foreach SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "LBFGS": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3),
}


def train(where: Home, make: Callable[[Any], torch.optim.Optimizer], steps: int = 10) -> Any:
    g = torch.Generator().manual_seed(4)
    model = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=g) / 2)
    x, y = where.send([torch.randn(16, 5, generator=g), torch.randn(16, 2, generator=g)])
    where.differ(model.to(where.device))
    opt = make(model.parameters())
    losses = []

    def closure() -> torch.Tensor:
        opt.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        return loss

    for _ in range(steps):
        losses.append(opt.step(closure).detach())
    return losses, [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(name: str, home: Home) -> None:
    expected = train(HERE, OPTIMIZERS[name])
    home.same(train(home, OPTIMIZERS[name]), expected)


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW"])
def test_optimizers_on_simulated_cuda(name: str) -> None:
    there = Home(torch.device("node:1"), (1,))
    got, expected = train(there, OPTIMIZERS[name]), train(HERE, OPTIMIZERS[name])
    for r, x in zip(got[1], expected[1], strict=True):
        torch.testing.assert_close(r.cpu(), x, rtol=1e-5, atol=1e-6)


def test_schedulers_and_clipping(home: Home) -> None:
    results = []
    for where in (home, HERE):
        x, w = where.send(leaves())
        x, w = torch.nn.Parameter(x.detach()), torch.nn.Parameter(w.detach())
        opt = torch.optim.SGD([x, w], lr=0.1)
        schedule = torch.optim.lr_scheduler.OneCycleLR(opt, 0.5, total_steps=10)
        norms = []
        for _ in range(8):
            opt.zero_grad(set_to_none=False)
            (x * w).square().sum().backward()
            norms.append(torch.nn.utils.clip_grad_norm_([x, w], 0.7))
            torch.nn.utils.clip_grad_value_([x, w], 0.5)
            opt.step()
            schedule.step()
        results.append((norms, x.detach(), w.detach(), torch.nn.utils.get_total_norm([x.grad, w.grad])))
    home.same(*results)


def test_parameter_groups_and_optimizer_state(home: Home) -> None:
    results = []
    for where in (home, HERE):
        x, w = (torch.nn.Parameter(t.detach()) for t in where.send(leaves()))
        opt = torch.optim.Adam([{"params": [x], "lr": 0.1}, {"params": [w], "weight_decay": 0.1}])
        for _ in range(3):
            (x * w).sum().backward()
            opt.step()
        saved = copy.deepcopy(opt.state_dict())
        (x * w).sum().backward()
        opt.step()
        twin = torch.optim.Adam([{"params": [x], "lr": 0.1}, {"params": [w], "weight_decay": 0.1}])
        twin.load_state_dict(saved)
        (x * w).sum().backward()
        twin.step()
        results.append((x.detach(), w.detach()))
    home.same(*results)


def _step_of(
    where: Home, make: Callable[[Any], torch.optim.Optimizer], n: int, dtype: torch.dtype
) -> Callable[[], Any]:
    g = torch.Generator().manual_seed(7)
    parameters = [torch.nn.Parameter(where.send(torch.randn(3 + i, 4, generator=g).to(dtype))) for i in range(n)]
    opt = make(parameters)

    def step() -> list[torch.Tensor]:
        for p in parameters:
            p.grad = where.send(torch.randn(p.shape, generator=g).to(dtype))
        opt.step()
        return [p.detach() for p in parameters]

    return step


@pytest.mark.parametrize("name", sorted(set(OPTIMIZERS) - {"LBFGS"}))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_all_parameters_at_once_have_the_same_bits(name: str, dtype: torch.dtype, home: Home) -> None:
    """Where torch goes over all parameters at once by itself, the result is what one after another gives."""
    steps = [_step_of(where, OPTIMIZERS[name], 4, dtype) for where in (home, HERE)]
    for _ in range(4):
        got, expected = (step() for step in steps)
        for r, x in zip(got, expected, strict=True):
            assert torch.equal(home.seen(r).cpu(), x)


@pytest.mark.parametrize("name", ["SGD", "momentum", "Adam", "AdamW", "RMSprop", "Adagrad", "Adadelta", "Adamax"])
def test_commands_do_not_grow_with_the_parameters(name: str) -> None:
    def calls(n: int) -> int:
        parameters = [torch.nn.Parameter(torch.randn(3, 4).to(dt.device(1, "cpu"))) for _ in range(n)]
        opt = OPTIMIZERS[name](parameters)
        for p in parameters:
            p.grad = torch.ones_like(p)
        for _ in range(2):
            opt.step()
        with testing.MessageLog() as log:
            opt.step()
        return len(log[1].commands)

    # frees of intermediate results ride along, some to a message
    assert calls(24) <= calls(3) + 3


def test_local_optimizers_choose_as_before() -> None:
    import torch.optim.adam as module

    local, remote = (torch.nn.Parameter(torch.randn(2).to(where)) for where in ("cpu", dt.device(1, "cpu")))
    assert module._default_to_fused_or_foreach([local], False) == (False, False)
    assert module._default_to_fused_or_foreach([remote], False) == (False, True)
    assert module._default_to_fused_or_foreach([remote], True) == (False, False)  # differentiable
    assert module._default_to_fused_or_foreach([remote, local], False) == (False, False)


def test_on_cuda_all_choose_as_local_cuda() -> None:
    import torch.optim.nadam as module

    remote = torch.nn.Parameter(torch.randn(2).to(dt.device(1, "cpu")))
    assert module._default_to_fused_or_foreach([remote], False) == (False, False)
    with testing.as_cuda(remote):
        assert module._default_to_fused_or_foreach([remote], False) == (False, True)
