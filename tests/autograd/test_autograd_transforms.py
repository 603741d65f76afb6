"""Functional transforms and forward mode above proxies, against local PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as fw
from differential import batch, leaves, net
from homes import HERE, Home

pytestmark = [
    pytest.mark.usefixtures("clean"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated"),  # torch's own forward-mode AD uses it
]


Both = Callable[[Callable[..., Any]], None]


@pytest.fixture
def both(home: Home) -> Both:
    """The same on a node, or on a mesh, and here."""

    def compare(program: Callable[..., Any]) -> None:
        x, w = leaves()
        local = program(x.detach(), w.detach())
        home.same(program(*home.send((x.detach(), w.detach()))), local)

    return compare


def test_functional_grad(both: Both) -> None:
    both(lambda x, w: torch.func.grad(lambda a: (a * w).sin().sum())(x))
    both(lambda x, w: torch.func.grad_and_value(lambda a: (a @ w.t()).square().sum())(x))
    both(lambda x, w: torch.func.grad(torch.func.grad(lambda a: a**3))(x[0, 0]))


def test_vmap(both: Both) -> None:
    both(lambda x, w: torch.func.vmap(lambda a, b: (a * b).sum())(x, w))
    both(lambda x, w: torch.func.vmap(lambda a: a @ w, in_dims=1, out_dims=1)(x))
    both(lambda x, w: torch.func.vmap(torch.func.grad(lambda a, b: (a * b).exp().sum()))(x, w))


def test_jacobians(both: Both) -> None:
    both(lambda x, w: torch.func.jacrev(lambda a: (a * w).sin().sum(1))(x))
    both(lambda x, w: torch.func.jvp(lambda a: a.exp() * 2, (x,), (w,)))
    both(lambda x, w: torch.func.vjp(lambda a: a.tanh(), x)[1](w))
    both(lambda x, w: torch.func.jacfwd(lambda a: a.sin())(x[0]))
    both(lambda x, w: torch.func.hessian(lambda a: (a**3).sum())(x[0]))


@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node")  # of local tensors as well
def test_linearize_and_functionalize(both: Both) -> None:
    both(lambda x, w: torch.func.linearize(lambda a: a.sin() * w, x)[1](w))
    both(lambda x, w: torch.func.linearize(lambda a, b: (a @ b.t()).tanh(), x, w)[1](w, x))
    both(lambda x, w: torch.func.functionalize(lambda a: a.clone().add_(w).t().mul_(2))(x))


def test_forward_mode(both: Both) -> None:
    def program(x: torch.Tensor, w: torch.Tensor) -> Any:
        with fw.dual_level():
            dual = fw.make_dual(x, w)
            out = fw.unpack_dual((dual * dual).sin())
            return [out.primal, out.tangent]

    both(program)


def test_functional_call(home: Home) -> None:
    results = []
    for where in (home, HERE):
        model, (x, _) = where.differ(net().to(where.device).eval()), where.send(batch())
        weights = {k: v.detach() * 0.5 for k, v in model.named_parameters()}
        buffers = dict(model.named_buffers())
        results.append(torch.func.functional_call(model, (weights, buffers), (x,)).detach())
    home.same(*results)


def test_per_sample_gradients(home: Home) -> None:
    results = []
    for where in (home, HERE):
        layer = torch.nn.Linear(5, 2)
        with torch.no_grad():
            layer.weight.copy_(torch.linspace(-1, 1, 10).reshape(2, 5)), layer.bias.zero_()
        where.differ(layer.to(where.device))
        weights = {k: v.detach() for k, v in layer.named_parameters()}

        def loss(p: Any, x: torch.Tensor, layer: torch.nn.Module = layer) -> torch.Tensor:
            return torch.func.functional_call(layer, p, (x[None],)).square().sum()

        x = where.send(leaves()[0].detach())
        results.append(torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(weights, x))
    home.same(*results)
