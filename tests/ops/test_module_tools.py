"""``torch.nn.utils``, parametrizations, hooks on modules and graphs, averaging: on a node as on the local CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
from differential import leaves
from equal import same, send
from torch.nn.modules import module as hooks
from torch.nn.utils import parametrizations, parametrize, prune

import disttensor as dt

pytestmark = [
    pytest.mark.usefixtures("clean"),
    pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated"),
]


def mlp() -> nn.Sequential:
    torch.default_generator.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))


def batch(where: Any) -> torch.Tensor:
    return leaves()[0].detach().to(where).requires_grad_()


def both(program: Callable[[Any], Any]) -> None:
    same(program(dt.device(1, "cpu")), program("cpu"))


def ran(model: nn.Module, where: Any) -> Any:
    """Outputs, and gradients of everything."""
    x = batch(where)
    y = model(x)
    y.square().sum().backward()
    return [y, x.grad, {name: p.grad for name, p in model.named_parameters()}]


REWRITES: dict[str, Callable[[nn.Sequential], Any]] = {
    "weight_norm": lambda m: parametrizations.weight_norm(m[0]),
    "old weight_norm": lambda m: nn.utils.weight_norm(m[0]),
    "spectral_norm": lambda m: parametrizations.spectral_norm(m[0]),
    "old spectral_norm": lambda m: nn.utils.spectral_norm(m[0]),
    "orthogonal": lambda m: parametrizations.orthogonal(m[0]),
    "prune": lambda m: prune.l1_unstructured(m[0], "weight", amount=0.3),
    "structured": lambda m: prune.ln_structured(m[2], "weight", amount=0.3, n=2, dim=0),
    "global": lambda m: prune.global_unstructured(
        [(m[0], "weight"), (m[2], "weight")], pruning_method=prune.L1Unstructured, amount=0.2
    ),
}


@pytest.mark.parametrize("name", REWRITES)
def test_rewritten_weights(name: str) -> None:
    def made_here(where: Any) -> Any:
        model = mlp()
        REWRITES[name](model)
        return ran(model.to(where), where)

    both(made_here)
    if "spectral" in name:  # draws where the weight is: see test_ops_creation
        return

    def made_there(where: Any) -> Any:
        model = mlp().to(where)
        REWRITES[name](model)
        return ran(model, where)

    both(made_there)


class Symmetric(nn.Module):
    def forward(self, w: torch.Tensor) -> torch.Tensor:
        return w.triu() + w.triu(1).mT

    def right_inverse(self, w: torch.Tensor) -> torch.Tensor:
        return w.triu()


def test_own_parametrization() -> None:
    def program(where: Any) -> Any:
        torch.default_generator.manual_seed(1)
        layer = nn.Linear(5, 5)
        layer.to(where)
        parametrize.register_parametrization(layer, "weight", Symmetric())
        with parametrize.cached():
            y = layer(layer(batch(where)))
        y.sum().backward()
        layer.weight = torch.eye(5, device=where) * 2
        original = layer.parametrizations.weight.original
        out = [y, original.grad, original.detach(), layer.weight]
        parametrize.remove_parametrizations(layer, "weight")
        return [*out, layer.weight]

    both(program)


def test_other_tools() -> None:
    def program(where: Any) -> Any:
        torch.default_generator.manual_seed(1)
        conv, norm = nn.Conv2d(1, 2, 3).eval(), nn.BatchNorm2d(2).eval()
        conv.to(where), norm.to(where)
        image = torch.linspace(0, 1, 25).reshape(1, 1, 5, 5).to(where)
        fused = nn.utils.fuse_conv_bn_eval(conv, norm)(image)
        model = mlp().to(where)
        ran(model, where)
        norms = [nn.utils.clip_grad_norm_(model.parameters(), 0.5, norm_type=n) for n in (2.0, float("inf"))]
        nn.utils.clip_grad_value_(model.parameters(), 0.1, foreach=True)
        return [fused, norms, [p.grad for p in model.parameters()]]

    both(program)
    assert nn.utils.skip_init(nn.Linear, 3, 4, device="node:1").weight.shape == (4, 3)


def test_averaging() -> None:
    def program(where: Any) -> Any:
        model = mlp().to(where)
        tools = torch.optim.swa_utils
        means = [tools.AveragedModel(model), tools.AveragedModel(model, multi_avg_fn=tools.get_ema_multi_avg_fn(0.9))]
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, patience=0)
        for _ in range(4):
            opt.zero_grad()
            loss = model(batch(where)).square().mean()
            loss.backward()
            opt.step()
            schedule.step(loss.detach())
            for mean in means:
                mean.update_parameters(model)
        tools.update_bn([batch(where).detach()], means[0])
        return [[p.detach() for p in mean.parameters()] for mean in means], schedule.get_last_lr()

    both(program)


def test_hooks_of_all_modules() -> None:
    def program(where: Any) -> Any:
        log: list[Any] = []
        handles = [
            hooks.register_module_forward_pre_hook(lambda m, a: log.append(a[0].detach())),
            hooks.register_module_forward_hook(lambda m, a, o: log.append(o.detach())),
            hooks.register_module_full_backward_pre_hook(lambda m, g: log.append(g[0])),
            hooks.register_module_full_backward_hook(lambda m, gi, go: log.append(gi[0])),
        ]
        try:
            return [ran(mlp().to(where), where), log]
        finally:
            for handle in handles:
                handle.remove()

    both(program)


def test_hooks_that_change_what_passes() -> None:
    def program(where: Any) -> Any:
        model = mlp()
        model.register_forward_pre_hook(lambda m, a, k: ((a[0] * 2,), k), with_kwargs=True)
        model.register_forward_hook(lambda m, a, k, o: o + 1, with_kwargs=True, always_call=True)
        model[0].register_full_backward_hook(lambda m, gi, go: (gi[0] * 2,))
        model[2].register_full_backward_pre_hook(lambda m, go: (go[0] * 3,))
        removed = model[0].weight.register_hook(lambda g: g * 7)
        model.to(where)
        removed.remove()
        model[2].weight.register_hook(lambda g: g * 5)
        return ran(model, where)

    both(program)


def test_hooks_of_the_graph() -> None:
    def program(where: Any) -> Any:
        x, w = send(leaves(), where)
        log: list[Any] = []
        graph = torch.autograd.graph
        y = x.sin() * w
        edge = graph.get_gradient_edge(y)
        first = torch.autograd.grad(edge, x, grad_outputs=torch.ones_like(y))
        graph.register_multi_grad_hook((x, w), lambda grads: log.append(list(grads)))
        graph.register_multi_grad_hook((x, w), log.append, mode="any")
        y = (x * w).exp()
        y.grad_fn.register_prehook(lambda g: (g[0] * 2,))
        y.grad_fn.next_functions[0][0].register_hook(lambda gi, go: log.append(gi[0]))
        graph.get_gradient_edge(x).node.register_hook(lambda gi, go: log.append(go[0]))
        y.sum().backward()
        with graph.allow_mutation_on_saved_tensors():
            z = x.clone()
            total = (z**2).sum()
            z.zero_()
            total.backward()
        return [log, first, x.grad, w.grad, y.grad_fn.name()]

    both(program)
