"""Functional transforms and forward mode above proxies, against local PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as fw
from differential import batch, leaves, net
from equal import same, send

pytestmark = [
    pytest.mark.usefixtures("clean"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated"),  # torch's own forward-mode AD uses it
]


def both(program: Callable[..., Any]) -> None:
    """The same on a node and here."""
    x, w = leaves()
    local = program(x.detach(), w.detach())
    remote = program(x.detach().to("node:1"), w.detach().to("node:1"))
    same(remote, local)


def test_functional_grad() -> None:
    both(lambda x, w: torch.func.grad(lambda a: (a * w).sin().sum())(x))
    both(lambda x, w: torch.func.grad_and_value(lambda a: (a @ w.t()).square().sum())(x))
    both(lambda x, w: torch.func.grad(torch.func.grad(lambda a: a**3))(x[0, 0]))


def test_vmap() -> None:
    both(lambda x, w: torch.func.vmap(lambda a, b: (a * b).sum())(x, w))
    both(lambda x, w: torch.func.vmap(lambda a: a @ w, in_dims=1, out_dims=1)(x))
    both(lambda x, w: torch.func.vmap(torch.func.grad(lambda a, b: (a * b).exp().sum()))(x, w))


def test_jacobians() -> None:
    both(lambda x, w: torch.func.jacrev(lambda a: (a * w).sin().sum(1))(x))
    both(lambda x, w: torch.func.jvp(lambda a: a.exp() * 2, (x,), (w,)))
    both(lambda x, w: torch.func.vjp(lambda a: a.tanh(), x)[1](w))
    both(lambda x, w: torch.func.jacfwd(lambda a: a.sin())(x[0]))
    both(lambda x, w: torch.func.hessian(lambda a: (a**3).sum())(x[0]))


@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node")  # of local tensors as well
def test_linearize_and_functionalize() -> None:
    both(lambda x, w: torch.func.linearize(lambda a: a.sin() * w, x)[1](w))
    both(lambda x, w: torch.func.linearize(lambda a, b: (a @ b.t()).tanh(), x, w)[1](w, x))
    both(lambda x, w: torch.func.functionalize(lambda a: a.clone().add_(w).t().mul_(2))(x))


def test_forward_mode() -> None:
    def program(x: torch.Tensor, w: torch.Tensor) -> Any:
        with fw.dual_level():
            dual = fw.make_dual(x, w)
            out = fw.unpack_dual((dual * dual).sin())
            return [out.primal, out.tangent]

    both(program)


def test_functional_call() -> None:
    results = []
    for where in ("node:1", "cpu"):
        model, (x, _) = net().to(where).eval(), send(batch(), where)
        weights = {k: v.detach() * 0.5 for k, v in model.named_parameters()}
        buffers = dict(model.named_buffers())
        results.append(torch.func.functional_call(model, (weights, buffers), (x,)).detach())
    same(*results)


def test_per_sample_gradients() -> None:
    results = []
    for where in ("node:1", "cpu"):
        layer = torch.nn.Linear(5, 2)
        with torch.no_grad():
            layer.weight.copy_(torch.linspace(-1, 1, 10).reshape(2, 5)), layer.bias.zero_()
        layer.to(where)
        weights = {k: v.detach() for k, v in layer.named_parameters()}

        def loss(p: Any, x: torch.Tensor, layer: torch.nn.Module = layer) -> torch.Tensor:
            return torch.func.functional_call(layer, p, (x[None],)).square().sum()

        x = leaves()[0].detach().to(where)
        results.append(torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(weights, x))
    same(*results)
