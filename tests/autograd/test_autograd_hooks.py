"""Hooks, checkpoints and functions of the user's own in backward passes above proxies."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from differential import leaves
from homes import HERE, Home
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.usefixtures("clean")
NOT_ON_A_MESH = {"test_save_on_cpu": "what is saved here has one value"}


def test_hooks_see_and_change_gradients(home: Home) -> None:
    results = []
    for where in (home, HERE):
        log: list[Any] = []
        x, w = where.send(leaves())
        layer = torch.nn.Linear(5, 5).to(where.device)
        with torch.no_grad():
            layer.weight.fill_(0.5), layer.bias.fill_(0.1)
        layer.register_forward_pre_hook(lambda m, a, log=log: log.append(("pre", a[0].detach())))
        layer.register_forward_hook(lambda m, a, o, log=log: log.append(("post", o.detach())))
        layer.register_full_backward_pre_hook(lambda m, g, log=log: log.append(("bpre", g[0])))
        layer.register_full_backward_hook(lambda m, gi, go, log=log: log.append(("bw", gi[0], go[0])))
        x.register_hook(lambda g: g * 3)
        w.register_post_accumulate_grad_hook(lambda p, log=log: log.append(("acc", p.grad.clone())))
        y = layer(x * w)
        y.retain_grad()
        y.register_hook(lambda g, log=log: log.append(("y", g)))
        y.grad_fn.register_hook(lambda gi, go, log=log: log.append(("fn", go[0])))
        y.grad_fn.register_prehook(lambda go, log=log: log.append(("prefn", go[0])))
        y.square().sum().backward()
        results.append((log, x.grad, w.grad, y.grad, layer.weight.grad))
    home.same(*results)


def test_saved_tensor_hooks(home: Home) -> None:
    results = []
    for where in (home, HERE):
        x, w = where.send(leaves())
        packed = []

        def pack(t: torch.Tensor, packed: list[int] = packed) -> tuple[str, torch.Tensor]:
            packed.append(t.numel())
            return ("packed", t * 2)

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda p: p[1] / 2):
            y = (x * w).exp()
        y.sum().backward()
        results.append((packed, x.grad))
    home.same(*results)


def test_save_on_cpu(home: Home) -> None:
    results = []
    for where in (home, HERE):
        x, w = where.send(leaves())
        with torch.autograd.graph.save_on_cpu():
            y = (x @ w.t()).relu()
        y.sum().backward()
        results.append(x.grad)
    home.same(*results)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint(reentrant: bool, home: Home) -> None:
    results = []
    for where in (home, HERE):
        x, w = where.send(leaves())
        y = checkpoint(lambda a, b: (a @ b.t()).relu().square(), x, w, use_reentrant=reentrant)
        y.sum().backward()
        results.append((x.grad, w.grad))
    home.same(*results)


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return grad * x


def test_custom_function(home: Home) -> None:
    results = []
    for x, w in (home.send(leaves()), leaves()):
        (Double.apply(x) * w).sum().backward()
        results.append(x.grad)
    home.same(*results)
