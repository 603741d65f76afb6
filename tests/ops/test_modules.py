"""Modules on nodes: moving, tied weights, state dicts, what they compute. On a mesh each rank has other values."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from differential import Tied, net
from equal import same
from homes import Home

import disttensor as dt

pytestmark = pytest.mark.usefixtures("clean")

#: Why they are about one node.
NOT_ON_A_MESH = {
    "test_there_and_back_keeps_ties_and_optimizers": "ranks that have trained differently are not one module here",
    "test_module_to_moves_on": "what goes from a mesh to one node has to say whose values, by x.at(...)",
    "test_state_dict_into_a_local_module": "ranks that differ have no one state",
}

TOKENS = torch.tensor([[0, 1, 2], [3, 4, 6]])


def steps(model: torch.nn.Module, opt: torch.optim.Optimizer, i: torch.Tensor) -> list[torch.Tensor]:
    losses = []
    for _ in range(4):
        opt.zero_grad()
        loss = F.cross_entropy(model(i).flatten(0, 1), i.flatten())
        loss.backward()
        opt.step()
        losses.append(loss.detach())
    return losses


def twins() -> tuple[list[Tied], list[torch.optim.Optimizer]]:
    """Two that are alike, and their optimizers."""
    torch.default_generator.manual_seed(1)
    first = Tied()
    models = [first, copy.deepcopy(first)]
    return models, [torch.optim.SGD(m.parameters(), lr=0.5, momentum=0.9) for m in models]


@pytest.mark.parametrize("way", ["to", "by way of a node", "dtype"])
def test_moving_keeps_ties_and_optimizers(way: str, home: Home) -> None:
    (remote, local), opts = twins()
    parameter = remote.embed.weight
    if way == "by way of a node":
        remote.to(dt.device(0, "cpu"))
    home.differ(remote.to(home.device))
    if way == "dtype":
        remote.double(), local.double()
    assert remote.out.weight is remote.embed.weight
    assert remote.embed.weight is parameter
    assert len(list(remote.parameters())) == 1
    home.same(steps(remote, opts[0], home.send(TOKENS)), steps(local, opts[1], TOKENS))
    assert remote.out.weight.device == home.device
    home.same(remote.out.weight, local.out.weight)


def test_there_and_back_keeps_ties_and_optimizers(home: Home) -> None:
    (model, local), opts = twins()
    parameter = model.embed.weight
    home.differ(model.to(home.device))
    home.same(steps(model, opts[0], home.send(TOKENS)), steps(local, opts[1], TOKENS))
    model.to("cpu")
    opts[0].load_state_dict(opts[0].state_dict())  # its momentum follows then, as on CUDA
    assert model.out.weight is model.embed.weight is parameter
    for got, expected in zip(steps(model, opts[0], TOKENS), steps(local, opts[1], TOKENS), strict=True):
        assert torch.equal(got, expected)
    assert type(model.out.weight.data) is torch.Tensor


def test_module_to_moves_everything(home: Home) -> None:
    model = home.differ(net().to(home.device))
    assert {t.device for t in model.state_dict().values()} == {home.device}
    assert all(isinstance(p, torch.nn.Parameter) and p.is_leaf and p.requires_grad for p in model.parameters())
    model.half()
    assert {p.dtype for p in model.parameters()} == {torch.float16}
    assert {t.device for t in model.state_dict().values()} == {home.device}
    home.same(dict(model.state_dict()), dict(net().half().state_dict()))


def test_module_to_moves_on(home: Home) -> None:
    model = home.differ(net().to(home.device))
    model.to("node:0")
    assert {t.get_node() for t in model.state_dict().values()} == {0}
    model.cpu()
    assert all(type(t) is torch.Tensor for t in model.state_dict().values())


def test_gradients_move_with_their_module(home: Home) -> None:
    model = torch.nn.Linear(3, 2)
    model(torch.ones(1, 3)).sum().backward()
    expected = model.weight.grad.clone()
    model.to(home.device)
    assert model.weight.grad.device == home.device
    home.same(model.weight.grad, expected)


def test_state_dict(home: Home) -> None:
    model, twin = home.differ(net().to(home.device)), net()
    with torch.no_grad():
        for p in (*model.parameters(), *twin.parameters()):
            p.add_(1)
    for assign in (False, True):
        other = net().to(home.device)
        other.load_state_dict(model.state_dict(), assign=assign)
        home.same(dict(other.state_dict()), dict(twin.state_dict()))
    other.load_state_dict(net().state_dict())  # local into remote
    home.same(dict(other.state_dict()), dict(net().state_dict()))
    other = net().to("node:0")
    other.load_state_dict({k: home.send(v) for k, v in twin.state_dict().items()}, assign=True)
    home.same(dict(other.state_dict()), dict(twin.state_dict()))


def test_state_dict_into_a_local_module(home: Home) -> None:
    model, twin = home.differ(net().to(home.device)), net()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1)
    twin.load_state_dict(model.state_dict())
    for key, value in model.state_dict().items():
        same(value, twin.state_dict()[key])


def test_deepcopy_of_a_module(home: Home) -> None:
    model = home.differ(Tied().to(home.device))
    twin = copy.deepcopy(model)
    assert twin.out.weight is twin.embed.weight
    assert twin.out.weight is not model.out.weight
    home.same(twin.out.weight, home.seen(model.out.weight).cpu())
    with torch.no_grad():
        twin.out.weight.zero_()
    assert home.seen(model.out.weight).abs().sum().item() > 0
    assert twin.out.weight.device == home.device


def test_modules_made_there(home: Home) -> None:
    layer = torch.nn.Linear(3, 4, device=home.device)
    assert layer.weight.device == home.device
    assert layer(torch.ones(2, 3, device=home.device)).shape == (2, 4)
    empty = torch.nn.Linear(3, 4, device="meta").to_empty(device=home.device)
    assert empty.weight.device == home.device


MODULES: dict[str, Callable[[], tuple[torch.nn.Module, tuple[torch.Tensor, ...]]]] = {
    "LSTM": lambda: (torch.nn.LSTM(5, 4, 2, batch_first=True), (torch.randn(2, 3, 5),)),
    "GRU": lambda: (torch.nn.GRU(5, 4, bidirectional=True), (torch.randn(3, 2, 5),)),
    "RNN": lambda: (torch.nn.RNN(5, 4), (torch.randn(3, 2, 5),)),
    "transformer": lambda: (
        torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True),
        (torch.randn(2, 5, 8),),
    ),
    "attention": lambda: (torch.nn.MultiheadAttention(8, 2), (torch.randn(3, 2, 8),) * 3),
    "Embedding": lambda: (torch.nn.EmbeddingBag(9, 4), (torch.randint(0, 9, (3, 4)),)),
    "GroupNorm": lambda: (torch.nn.GroupNorm(2, 4), (torch.randn(2, 4, 3),)),
    "ConvTranspose": lambda: (torch.nn.ConvTranspose2d(2, 3, 3, stride=2), (torch.randn(1, 2, 4, 4),)),
    "Bilinear": lambda: (torch.nn.Bilinear(3, 4, 2), (torch.randn(2, 3), torch.randn(2, 4))),
    "InstanceNorm": lambda: (torch.nn.InstanceNorm2d(3, affine=True), (torch.randn(2, 3, 4, 4),)),
    "PReLU": lambda: (torch.nn.PReLU(3), (torch.randn(2, 3),)),
}


#: Torch computes these in another order of sums on devices that are not the CPU.
CLOSE = {"LSTM", "GRU", "RNN"}


@pytest.mark.parametrize("name", MODULES)
def test_modules(name: str, home: Home) -> None:
    torch.default_generator.manual_seed(3)
    local, args = MODULES[name]()
    remote = home.differ(copy.deepcopy(local).to(home.device))
    outs = []
    for model, inputs in ((remote, home.send(args)), (local, args)):
        out = model(*inputs)
        first = out[0] if isinstance(out, tuple) else out
        first.square().sum().backward()
        outs.append([first, *(p.grad for p in model.parameters())])
    if name in CLOSE:
        for got, expected in zip(*outs, strict=True):
            torch.testing.assert_close(home.seen(got).cpu(), expected)
    else:
        home.same(*outs)
