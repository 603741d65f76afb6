"""Recurrent layers compute with the kernels of local CPU: bit for bit, gradients as well."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from differential import on_devices
from equal import outcome, same
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

import disttensor as dt

pytestmark = pytest.mark.usefixtures("clean")


def twins(make: Callable[[], nn.Module], device: torch.device) -> tuple[nn.Module, nn.Module]:
    """A module on a node and the same one here."""
    torch.default_generator.manual_seed(3)
    local = make()
    torch.default_generator.manual_seed(3)
    return make().to(device), local


def inputs(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(4))


def gradients(run: Callable[[torch.Tensor], Any], module: nn.Module, x: torch.Tensor) -> Any:
    """What a module gives, and the gradients of its parameters and its input."""
    x = x.detach().requires_grad_()
    out = run(x)
    leaves = [t for t in torch.utils._pytree.tree_leaves(out) if isinstance(t, torch.Tensor) and t.requires_grad]
    loss = sum((t.square() * (i + 1)).sum() for i, t in enumerate(leaves))
    grads = torch.autograd.grad(loss, [x, *module.parameters()])
    return [t.detach() for t in leaves], list(grads)


LAYERS = [
    pytest.param(kind, options, id=f"{kind.__name__}-{'-'.join(options) or 'plain'}")
    for kind, options in itertools.product(
        (nn.LSTM, nn.GRU, nn.RNN),
        (
            {},
            {"num_layers": 2, "bidirectional": True},
            {"batch_first": True, "bias": False},
        ),
    )
] + [
    pytest.param(nn.LSTM, {"proj_size": 3}, id="LSTM-projections"),
    pytest.param(nn.RNN, {"nonlinearity": "relu", "num_layers": 2}, id="RNN-relu"),
]


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@on_devices
@pytest.mark.parametrize(("kind", "options"), LAYERS)
def test_layers(kind: Callable[..., nn.Module], options: dict[str, Any], name: str) -> None:
    device = dt.device(1, name)
    remote, local = twins(lambda: kind(5, 7, **options), device)
    x = inputs(4, 3, 5)
    same(gradients(remote, remote, x.to(device)), gradients(local, local, x))
    with torch.no_grad():
        same(remote(x.to(device)), local(x))
    with torch.inference_mode():
        same(remote(x.to(device)), local(x))


@on_devices
@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_cells(kind: Callable[..., nn.Module], name: str) -> None:
    device = dt.device(1, name)
    remote, local = twins(lambda: kind(5, 7), device)
    x = inputs(3, 5)
    same(gradients(remote, remote, x.to(device)), gradients(local, local, x))
    with torch.inference_mode():
        same(remote(x.to(device)), local(x))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_packed_sequences(kind: Callable[..., nn.Module]) -> None:
    def run(module: nn.Module, x: torch.Tensor) -> Any:
        packed = pack_padded_sequence(x, torch.tensor([4, 2, 3]), enforce_sorted=False)
        out, hidden = module(packed)
        return pad_packed_sequence(out)[0], hidden

    device = dt.device(1, "cpu")
    remote, local = twins(lambda: kind(5, 7, num_layers=2, bidirectional=True), device)
    x = inputs(4, 3, 5)
    same(gradients(lambda x: run(remote, x), remote, x.to(device)), gradients(lambda x: run(local, x), local, x))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_two_calls_in_one_graph(kind: Callable[..., nn.Module]) -> None:
    """Gradients of the weights are added up in the order of local torch, whichever call they are from."""
    device = dt.device(1, "cpu")
    remote, local = twins(lambda: kind(5, 7), device)
    x = inputs(4, 3, 5)
    for _ in range(2):
        got = gradients(lambda x: (remote(x), remote(x * 2)), remote, x.to(device))
        same(got, gradients(lambda x: (local(x), local(x * 2)), local, x))
        with torch.no_grad():
            for p, q in zip(remote.parameters(), local.parameters(), strict=True):
                p.mul_(0.9)
                q.mul_(0.9)


def test_dropout_between_layers_draws_what_local_cpu_draws() -> None:
    device = dt.device(1, "cpu")
    remote, local = twins(lambda: nn.LSTM(5, 7, num_layers=3, dropout=0.4), device)
    x = inputs(4, 3, 5)
    torch.manual_seed(8)
    dt.synchronize()  # nodes and master share one generator here
    got = gradients(remote, remote, x.to(device))
    dt.synchronize()
    torch.manual_seed(8)
    dt.synchronize()
    same(got, gradients(local, local, x))


def test_second_derivatives() -> None:
    results = []
    device = dt.device(1, "cpu")
    for module, where in zip(twins(lambda: nn.GRU(5, 7), device), (device, "cpu"), strict=True):
        x = inputs(4, 3, 5).to(where).requires_grad_()
        (first,) = torch.autograd.grad(module(x)[0].square().sum(), x, create_graph=True)
        results.append((first, torch.autograd.grad(first.square().sum(), list(module.parameters()))))
    same(*results)


def test_a_write_between_forward_and_backward_is_noticed() -> None:
    """As local torch does: of what the layer was given, and of what it gave."""
    layer = nn.LSTM(5, 7).to("node:1")
    x = inputs(4, 3, 5).to("node:1")
    out, _ = layer(x)
    with torch.no_grad():
        layer.weight_hh_l0.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
    out, _ = layer(x)
    with torch.no_grad():
        out.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_results_may_be_written() -> None:
    results = []
    device = dt.device(1, "cpu")
    for module, where in zip(twins(lambda: nn.GRU(5, 7, batch_first=True), device), (device, "cpu"), strict=True):
        out, hidden = module(inputs(3, 4, 5).to(where))
        out.add_(1)
        results.append((out, hidden, torch.autograd.grad(out.square().sum(), list(module.parameters()))))
    same(*results)


def test_tensors_are_told_by_their_own_device() -> None:
    """Nothing that a user gets to see carries the disguise."""
    seen = []
    layer = nn.LSTM(5, 7).to("node:1")
    x = inputs(4, 3, 5).to("node:1").requires_grad_()
    x.register_hook(lambda g: seen.append(g.device))
    out, (h, c) = layer(x)
    out.register_hook(lambda g: seen.append(g.device))
    (out.sum() + h.sum() + c.sum()).backward()
    seen += [t.device for t in (out, h, c, x.grad, *(p.grad for p in layer.parameters()))]
    assert set(seen) == {torch.device("node:1")}


def test_the_tensor_outlives_its_alias_and_is_freed() -> None:
    """A result is another's remote tensor under another name: dropped with the last of both, and not before."""
    layer = nn.GRU(5, 7).to("node:1")
    x = inputs(4, 3, 5).to("node:1")
    kept = layer(x)[0].detach()[1:]
    expected = layer(x)[0].detach().cpu()[1:]
    torch.zeros(64, device="node:1").sum().item()
    assert torch.equal(kept.cpu(), expected)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN, nn.LSTMCell, nn.GRUCell])
def test_autocast(kind: Callable[..., nn.Module]) -> None:
    device = dt.device(1, "cpu")
    remote, local = twins(lambda: kind(5, 7), device)
    x = inputs(4, 3, 5) if kind in (nn.LSTM, nn.GRU, nn.RNN) else inputs(3, 5)
    # for float32 torch takes oneDNN's LSTM under autocast; that one raises where the CPU has no AVX-512
    with torch.autocast("node", torch.bfloat16):
        got = outcome(lambda: gradients(lambda x: (remote(x), remote(x * 2)), remote, x.to(device)))
    with torch.autocast("cpu", torch.bfloat16):
        expected = outcome(lambda: gradients(lambda x: (local(x), local(x * 2)), local, x))
    same(got, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_in_lower_precision(kind: Callable[..., nn.Module], dtype: torch.dtype) -> None:
    """With and without autocast: the kernel is the one that this CPU's torch takes, as it has that one or has not."""
    device = dt.device(1, "cpu")
    remote, local = twins(lambda: kind(5, 7).to(dtype), device)
    x = inputs(4, 3, 5).to(dtype)
    for module, where, name in ((remote, device, "node"), (local, "cpu", "cpu")):
        y = x.to(where)
        with torch.no_grad():
            given = [outcome(lambda m=module, y=y: m(y))]
            with torch.autocast(name, dtype):
                given.append(outcome(lambda m=module, y=y: m(y)))
        given.append(outcome(lambda m=module, y=y: gradients(m, m, y)))
        if where == device:
            got = given
    same(got, given)


def test_through_checkpoint() -> None:
    results = []
    device = dt.device(1, "cpu")
    for module, where in zip(twins(lambda: nn.LSTM(5, 7), device), (device, "cpu"), strict=True):
        x = inputs(4, 3, 5).to(where).requires_grad_()
        checkpoint(lambda x, m=module: m(x)[0], x, use_reentrant=False).square().sum().backward()
        results.append((x.grad, [p.grad for p in module.parameters()]))
    same(*results)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN, nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_through_func(kind: Callable[..., nn.Module]) -> None:
    """Near to local CPU's numbers: the transforms don't let torch see another device type."""
    results = []
    for module, where in zip(twins(lambda: kind(5, 7), torch.device("node:1")), ("node:1", "cpu"), strict=True):
        x = inputs(4, 3, 5).to(where) if kind in (nn.LSTM, nn.GRU, nn.RNN) else inputs(3, 5).to(where)
        params = {k: p.detach() for k, p in module.named_parameters()}

        def loss(params: Any, module: Any = module, x: Any = x) -> Any:
            out = torch.func.functional_call(module, params, x)
            return (out if isinstance(out, torch.Tensor) else out[0]).square().sum()

        results.append([g.cpu() for g in torch.func.grad(loss)(params).values()])
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-6)


def test_operands_elsewhere_are_refused() -> None:
    layer = nn.LSTM(5, 7).to("node:1")
    x = inputs(4, 3, 5)
    with pytest.raises(RuntimeError, match=r"expected all tensors to be on the same device.*\.to\('node:1'\)"):
        layer(x.to("node:1"), (torch.zeros(1, 3, 7), torch.zeros(1, 3, 7)))
    with pytest.raises(RuntimeError, match="on the same device"):
        layer(x.to("node:0"))
    with pytest.raises(RuntimeError, match="device"):
        layer(x)
