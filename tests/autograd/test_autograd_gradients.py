"""Gradients above proxies, bit for bit those of local PyTorch."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from differential import batch, leaves, net
from equal import same
from homes import HERE, Home

import disttensor as dt

pytestmark = pytest.mark.usefixtures("clean")

FUNCTIONS: dict[str, Callable[..., torch.Tensor]] = {
    "arithmetic": lambda x, w: (x * w + x / (w.abs() + 1) - 2 * x),
    "matmul": lambda x, w: x @ w.t(),
    "bmm": lambda x, w: torch.bmm(x[None], w.t()[None]),
    "linear": lambda x, w: F.linear(x, w, w[:, 0]),
    "broadcast": lambda x, w: x * w[0] + w[:1] + w.sum(1, keepdim=True)[:4],
    "softmax": lambda x, w: F.log_softmax(x * w, 1),
    "relu": lambda x, w: F.relu(x) * F.gelu(w) + F.silu(x),
    "norm": lambda x, w: F.layer_norm(x, (5,), w[0], w[1]),
    "index": lambda x, w: x[1:3, ::2] * w[0, 0],
    "gather": lambda x, w: x[torch.tensor([0, 2, 2])] + w[:3],
    "mask": lambda x, w: x[x > 0] * 2,
    "cat": lambda x, w: torch.cat([x, w], 1).cumsum(1),
    "views": lambda x, w: x.t().reshape(-1).view(2, 10).unsqueeze(0).expand(3, 2, 10) * w[0, 0],
    "in place": lambda x, w: x.clone().mul_(2).add_(w),
    "write into": lambda x, w: torch.index_put(x.clone(), (torch.tensor([1], device=x.device),), w[:1]),
    "setitem": lambda x, w: _setitem(x, w),
    "where": lambda x, w: torch.where(x > w, x, w),
    "max": lambda x, w: x.max(1)[0] + w.min(0)[0][:4],
    "reductions": lambda x, w: x.std() + w.var(0).sum() + x.logsumexp(1).mean() + x.norm() + w.prod(),
    "trigonometry": lambda x, w: torch.sin(x) * torch.exp(w) + torch.tanh(x) * torch.sigmoid(w),
    "dtype": lambda x, w: x.double() * w.double() + x.bfloat16().float(),
    "sort": lambda x, w: x.sort(1)[0] * w,
    "topk": lambda x, w: x.topk(2, 1)[0] + w[:, :2],
    "unbind": lambda x, w: sum(x.unbind(0)) * w,
    "split": lambda x, w: x.split(2)[1] * w[:2],
    "stack": lambda x, w: torch.stack([x, w, x]),
    "einsum": lambda x, w: torch.einsum("ij,kj->ik", x, w),
    "pad": lambda x, w: F.pad(x, (1, 1)) ** 2 + F.pad(w, (1, 1)),
    "attention": lambda x, w: F.scaled_dot_product_attention(x[None], w[None], x[None]),
    "cholesky": lambda x, w: torch.linalg.cholesky(x @ x.t() + 9 * torch.eye(4, device=x.device)) + w[0, 0],
    "solve": lambda x, w: torch.linalg.solve(x @ x.t() + 9 * torch.eye(4, device=x.device), w),
    "svd": lambda x, w: torch.linalg.svd(x)[1] + w[:, 0],
    "fft": lambda x, w: torch.fft.rfft(x).abs() + w[:, :3],
    "complex": lambda x, w: (torch.complex(x, w) * (1 + 2j)).conj().abs(),
    "embedding": lambda x, w: F.embedding(torch.tensor([[0, 1], [3, 3]], device=x.device), x) + w[0],
    "cross entropy": lambda x, w: F.cross_entropy(x * w, torch.tensor([0, 1, 2, 4], device=x.device)),
    "conv": lambda x, w: F.conv1d(x[None], w[None, :, :3]),
    "pool": lambda x, w: F.avg_pool1d(x, 2) + F.max_pool1d(w, 2),
    "batch norm": lambda x, w: F.batch_norm(x, None, None, w[0], w[1], training=True),
    "interpolate": lambda x, w: F.interpolate(x[None], scale_factor=2) + F.interpolate(w[None], scale_factor=2),
    "clamp": lambda x, w: x.clamp(-0.5, 0.5) + w.clamp(min=0),
    "lerp": lambda x, w: torch.lerp(x, w, 0.3) + torch.addcmul(x, x, w, value=0.5),
    "detach": lambda x, w: x * w.detach() + x.detach() * w,
    "diagonal": lambda x, w: x.diagonal() * w.tril()[:, 0],
    "repeat": lambda x, w: x.repeat(2, 1) + w.repeat_interleave(2, 0),
}  # fmt: skip


def _setitem(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = x * 2
    y[1] = w[0]
    y[:, 2] *= 3
    y[y > 1] = 0.5
    return y


@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients(name: str, home: Home) -> None:
    local = leaves()
    remote = home.send(leaves())
    for x, w in (local, remote):
        y = FUNCTIONS[name](x, w)
        (y * torch.linspace(-1, 2, y.numel(), dtype=y.dtype).reshape(y.shape).to(y.device)).sum().backward()
    for r, x in zip(remote, local, strict=True):
        home.same(r.grad, x.grad)


@pytest.mark.parametrize("name", ["arithmetic", "matmul", "relu", "softmax", "norm", "trigonometry", "index", "einsum"])
def test_double_backward(name: str, home: Home) -> None:
    results = []
    for x, w in (home.send(leaves()), leaves()):
        y = FUNCTIONS[name](x, w).square().sum()
        gx, gw = torch.autograd.grad(y, (x, w), create_graph=True)
        gx.square().sum().add(gw.sin().sum()).backward()
        results.append((gx, gw, x.grad, w.grad))
    home.same(*results)


class _Addmm(torch.nn.Module):
    """A linear layer, by the two operations that torch's own is."""

    def __init__(self, of: torch.nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = of.weight, of.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.addmm(self.bias, x, self.weight.t())


@pytest.mark.parametrize("layer", [lambda linear: linear, _Addmm], ids=["linear", "addmm"])
def test_second_order_through_functional_call(layer: Callable[[torch.nn.Linear], torch.nn.Module], home: Home) -> None:
    """A step of MAML. By addmm it has torch's bits; a linear layer, whose weight is used three times, adds the same
    terms in another order (docs/DIFFERENT.md): as exactly, and to the same numbers except for their last bits."""
    generator = torch.Generator().manual_seed(0)
    numbers = [torch.randn(*shape, generator=generator) for shape in ((8, 4), (8,), (1, 8), (1,), (10, 4), (10, 1))]
    results = []
    for where in (home, HERE):
        model = torch.nn.Sequential(layer(torch.nn.Linear(4, 8)), torch.nn.Tanh(), layer(torch.nn.Linear(8, 1)))
        with torch.no_grad():
            for p, value in zip(model.parameters(), numbers, strict=False):
                p.copy_(value)
        model = where.differ(model.to(where.device))
        x, y = where.send(tuple(numbers[4:]))
        parameters = dict(model.named_parameters())
        loss = F.mse_loss(torch.func.functional_call(model, parameters, (x,)), y)
        gradients = torch.autograd.grad(loss, list(parameters.values()), create_graph=True)
        fast = {name: p - 0.1 * g for (name, p), g in zip(parameters.items(), gradients, strict=True)}
        F.mse_loss(torch.func.functional_call(model, fast, (x.sin(),)), y).backward()
        results.append((loss, *gradients, *(p.grad for p in model.parameters())))
    if layer is _Addmm:
        home.same(*results)
    else:
        home.same(results[0][:5], results[1][:5])
        for remote, local in zip(home.seen(results[0]), results[1], strict=True):
            torch.testing.assert_close(remote.detach().cpu(), local.detach(), rtol=1e-6, atol=2e-7)


def test_a_network(home: Home) -> None:
    results = []
    for where in (home, HERE):
        model, (x, y) = where.differ(net().to(where.device)), where.send(batch())
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        results.append((loss, {k: p.grad for k, p in model.named_parameters()}, dict(model.named_buffers())))
    home.same(*results)


def test_gradients_through_moves() -> None:
    """Nodes, devices of a node and the master, one after the other."""
    x, w = leaves()
    rx, rw = leaves()
    (((x * 2) + w).relu() * 3).square().sum().backward()
    y = (rx.to("node:0") * 2).to("node:1") + rw.to("node:1")
    y = y.to(dt.device(1, "cpu")).relu().to("node:0").cpu() * 3
    y.to("node:1").square().sum().backward()
    for r, a in ((rx, x), (rw, w)):
        assert type(r.grad) is torch.Tensor
        assert torch.equal(r.grad, a.grad)


def test_gradients_of_leaves_on_many_nodes() -> None:
    results = []
    for a, b in (("node:0", "node:1"), ("cpu", "cpu")):
        first = torch.nn.Linear(5, 6)
        second = torch.nn.Linear(6, 2)
        with torch.no_grad():
            for p in (*first.parameters(), *second.parameters()):
                p.copy_(torch.linspace(-1, 1, p.numel()).reshape(p.shape))
        first.to(a), second.to(b)
        loss = second(first(torch.ones(3, 5).to(a)).relu().to(b)).square().mean()
        loss.backward()
        results.append([p.grad for p in (*first.parameters(), *second.parameters())])
    assert [g.get_node() for g in results[0]] == [0, 0, 1, 1]
    same(*results)


def test_accumulation(home: Home) -> None:
    results = []
    for x, w in (home.send(leaves()), leaves()):
        for _ in range(3):
            (x * w).sum().backward()
        results.append(x.grad)
    home.same(*results)


def test_retain_graph_and_unused() -> None:
    x = torch.ones(3, device="node:1", requires_grad=True)
    z = torch.ones(3, device="node:1", requires_grad=True)
    y = (x * x).sum()
    y.backward(retain_graph=True)
    y.backward()
    same(x.grad, torch.full((3,), 4.0))
    with pytest.raises(RuntimeError, match="second time"):
        y.backward()
    assert torch.autograd.grad((x * 2).sum(), (x, z), allow_unused=True)[1] is None
    with pytest.raises(RuntimeError, match="not have been used"):
        torch.autograd.grad((x * 2).sum(), (x, z))


def test_backward_in_another_thread(home: Home) -> None:
    results: list[Any] = []

    def run() -> None:
        x, w = home.send(leaves())
        (x @ w.t()).square().sum().backward()
        results.append((x.grad, w.grad))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(30)
    x, w = leaves()
    (x @ w.t()).square().sum().backward()
    home.same(results[0], (x.grad, w.grad))


def test_local_backward_is_as_before() -> None:
    assert torch.autograd.is_multithreading_enabled()
    x = torch.ones(3, requires_grad=True)
    (x * 2).sum().backward()
    assert torch.autograd.is_multithreading_enabled()
    assert x.grad.tolist() == [2, 2, 2]


def test_no_grad_and_modes() -> None:
    x = torch.ones(3, device="node:1", requires_grad=True)
    with torch.no_grad():
        assert not (x * 2).requires_grad
        x.add_(1)
    assert (x * 2).requires_grad
    with torch.inference_mode():
        y = x * 2
    assert y.is_inference()
    same(y, torch.full((3,), 4.0))
    with torch.set_grad_enabled(False):
        assert not (x + x).requires_grad
    with pytest.raises(RuntimeError, match="leaf"):
        x.add_(1)
