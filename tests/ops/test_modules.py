"""Modules on nodes: moving, tied weights, state dicts, and what they compute."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from differential import Tied, net
from equal import same, send

import disttensor as dt

pytestmark = pytest.mark.usefixtures("clean")


def steps(model: torch.nn.Module, opt: torch.optim.Optimizer, where: Any) -> list[torch.Tensor]:
    i = torch.tensor([[0, 1, 2], [3, 4, 6]]).to(where)
    losses = []
    for _ in range(4):
        opt.zero_grad()
        loss = F.cross_entropy(model(i).flatten(0, 1), i.flatten())
        loss.backward()
        opt.step()
        losses.append(loss.detach())
    return losses


@pytest.mark.parametrize("way", ["to", "node to node", "dtype", "there and back"])
def test_moving_keeps_ties_and_optimizers(way: str) -> None:
    torch.default_generator.manual_seed(1)
    local = Tied()
    remote = copy.deepcopy(local)
    opts = [torch.optim.SGD(m.parameters(), lr=0.5, momentum=0.9) for m in (remote, local)]
    where = dt.device(1, "cpu")
    parameter = remote.embed.weight
    if way == "node to node":
        remote.to(dt.device(0, "cpu"))
    remote.to(where)
    if way == "dtype":
        remote.double(), local.double()
    if way == "there and back":
        same(steps(remote, opts[0], where), steps(local, opts[1], "cpu"))
        remote.to("cpu")
        opts[0].load_state_dict(opts[0].state_dict())  # its momentum follows then, as on CUDA
        where = "cpu"
    assert remote.out.weight is remote.embed.weight
    assert remote.embed.weight is parameter
    assert len(list(remote.parameters())) == 1
    got, expected = steps(remote, opts[0], where), steps(local, opts[1], "cpu")
    if way == "there and back":
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
        assert type(remote.out.weight.data) is torch.Tensor
    else:
        assert remote.out.weight.get_node() == 1
        same(got, expected)
        same(remote.out.weight, local.out.weight)


def test_module_to_moves_everything() -> None:
    model = net().to("node:1")
    assert {t.get_node() for t in model.state_dict().values()} == {1}
    assert all(isinstance(p, torch.nn.Parameter) and p.is_leaf and p.requires_grad for p in model.parameters())
    model.to("node:0")
    assert {t.get_node() for t in model.state_dict().values()} == {0}
    model.half()
    assert {p.dtype for p in model.parameters()} == {torch.float16}
    model.float().cpu()
    assert all(type(t) is torch.Tensor for t in model.state_dict().values())


def test_gradients_move_with_their_module() -> None:
    model = torch.nn.Linear(3, 2)
    model(torch.ones(1, 3)).sum().backward()
    expected = model.weight.grad.clone()
    model.to("node:1")
    assert model.weight.grad.get_node() == 1
    same(model.weight.grad, expected)


def test_state_dict() -> None:
    model, twin = net().to("node:1"), net()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1)
    twin.load_state_dict(model.state_dict())  # remote into local
    for key, value in model.state_dict().items():
        same(value, twin.state_dict()[key])
    other = net().to("node:0")
    other.load_state_dict(twin.state_dict())  # local into remote
    same(dict(other.state_dict()), dict(twin.state_dict()))
    other.load_state_dict({k: v.to("node:0") for k, v in model.state_dict().items()}, assign=True)
    same(dict(other.state_dict()), dict(twin.state_dict()))


def test_deepcopy_of_a_module() -> None:
    model = Tied().to("node:1")
    twin = copy.deepcopy(model)
    assert twin.out.weight is twin.embed.weight
    assert twin.out.weight is not model.out.weight
    with torch.no_grad():
        twin.out.weight.zero_()
    assert model.out.weight.abs().sum().item() > 0
    assert twin.out.weight.get_node() == 1


def test_modules_made_on_a_node() -> None:
    layer = torch.nn.Linear(3, 4, device="node:1")
    assert layer.weight.get_node() == 1
    assert layer(torch.ones(2, 3, device="node:1")).shape == (2, 4)
    empty = torch.nn.Linear(3, 4, device="meta").to_empty(device="node:1")
    assert empty.weight.get_node() == 1


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
def test_modules(name: str) -> None:
    torch.default_generator.manual_seed(3)
    local, args = MODULES[name]()
    remote = copy.deepcopy(local).to("node:1")
    outs = []
    for model, inputs in ((remote, send(args, "node:1")), (local, args)):
        out = model(*inputs)
        first = out[0] if isinstance(out, tuple) else out
        first.square().sum().backward()
        outs.append([first, *(p.grad for p in model.parameters())])
    if name in CLOSE:
        for got, expected in zip(*outs, strict=True):
            torch.testing.assert_close(got.cpu(), expected)
    else:
        same(*outs)
