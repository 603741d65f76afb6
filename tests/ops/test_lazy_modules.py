"""Lazy modules (``nn.LazyLinear``), whose parameters get their shapes from the first batch: on a node as local."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
from equal import same

import disttensor as dt

pytestmark = pytest.mark.usefixtures("clean")

NODE = dt.DistributedTensor


def net(**where: Any) -> nn.Sequential:
    return nn.Sequential(nn.LazyConv1d(4, 3, **where), nn.LazyBatchNorm1d(**where), nn.Flatten(), nn.LazyLinear(5))


def made_there(where: Any) -> nn.Module:
    return net(device=where).to(where)


def made_by_default(where: Any) -> nn.Module:
    with torch.device(where):
        return net()


def copied(where: Any) -> nn.Module:  # torch copies no uninitialized buffers
    return copy.deepcopy(nn.Sequential(nn.LazyConv1d(4, 3), nn.Flatten(), nn.LazyLinear(5)).to(where))


def loaded(where: Any) -> nn.Module:
    """With the values of one that has them, and those of one that has none."""
    full, empty = net().to(where), net()
    full(batch(where))
    model = net().to(where)
    model.load_state_dict(empty.state_dict())
    model.load_state_dict(full.state_dict())
    return model


WAYS: dict[str, Callable[[Any], nn.Module]] = {
    "to": lambda where: net().to(where),
    "double": lambda where: net().to(where).double().float(),
    "by way of another node": lambda where: net().to("cpu" if where == "cpu" else dt.device(0, "cpu")).to(where),
    "there and back": lambda where: net().to(where).to("cpu").to(where),
    "device=": made_there,
    "default device": made_by_default,
    "deepcopy": copied,
    "load_state_dict": loaded,
}


def batch(where: Any) -> torch.Tensor:
    return torch.linspace(-1, 1, 48).sin().reshape(3, 2, 8).to(where)


def trained(model: nn.Module, parameters: list[nn.Parameter], where: Any) -> Any:
    """All that a model has after two steps, and that its parameters are still ``parameters``."""
    for _ in range(2):
        loss = model(batch(where)).square().sum()
        optimizer = torch.optim.Adam(parameters)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    now = list(model.parameters())
    kept = [a is b for a, b in zip(parameters, now, strict=True)]
    return model.state_dict(), [p.grad for p in now], kept, [type(m).__name__ for m in model]  # type: ignore[attr-defined]


@pytest.mark.parametrize("way", WAYS)
def test_as_local(way: str) -> None:
    results = []
    for where in (dt.device(1, "cpu"), "cpu"):
        torch.default_generator.manual_seed(3)
        model = WAYS[way](where)
        results.append(trained(model, list(model.parameters()), where))
        dt.synchronize()
    same(*results)


def test_parameters_stay_themselves() -> None:
    model = net()
    parameters, optimizer = list(model.parameters()), torch.optim.SGD(model.parameters(), lr=0.1)
    model.to("node:1")
    model(batch("node:1")).sum().backward()
    before = [p.detach().clone() for p in parameters]
    optimizer.step()
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    assert all(type(p) is NODE and p.get_node() == 1 for p in parameters)
    assert all(torch.equal(p, b.add(p.grad, alpha=-0.1)) for p, b in zip(parameters, before, strict=True))


@pytest.mark.parametrize("where", ["node:1", "cpu"])
def test_until_then(where: str) -> None:
    model = net().to(where)
    for tensor, kind in ((model[0].weight, nn.UninitializedParameter), (model[1].running_mean, nn.UninitializedBuffer)):
        assert isinstance(tensor, kind)
        assert nn.parameter.is_lazy(tensor)
        assert isinstance(tensor, NODE) == (where != "cpu")
        assert tensor.device == torch.device(where)
        assert tensor.requires_grad == isinstance(tensor, nn.Parameter)
        assert repr(tensor) == f"<{kind.__name__}>"
        with pytest.raises(ValueError, match=f"Attempted to use an uninitialized parameter in .*{kind.__name__}"):
            _ = tensor + 1
        with pytest.raises(RuntimeError, match="Can't access the shape of an uninitialized parameter"):
            _ = tensor.shape
    assert model.half()[0].weight.dtype == torch.float16


def test_on_the_current_node() -> None:
    with dt.node(1):
        model = net().to("node").to("node")
        assert {t.device for t in model.state_dict().values()} == {torch.device("node:1")}
        assert isinstance(model(batch("node")), NODE)
    local = net().to("cpu")  # with what torch's Tensor.to is from here on
    assert type(local(batch("cpu"))) is torch.Tensor


def test_saved_before_the_first_batch() -> None:
    file = io.BytesIO()
    torch.save(net().to("node:1").state_dict(), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert type(loaded["0.weight"]) is nn.UninitializedParameter
    assert type(loaded["1.running_mean"]) is nn.UninitializedBuffer


REFUSED: list[Callable[[nn.Module, nn.Module], Any]] = [
    lambda empty, full: sum(p.numel() for p in empty.parameters()),
    lambda empty, full: full.load_state_dict(empty.state_dict()),
]


@pytest.mark.parametrize("program", REFUSED, ids=["numel", "load_state_dict"])
def test_refused_as_local(program: Callable[[nn.Module, nn.Module], Any]) -> None:
    texts = []
    for where in ("node:1", "cpu"):
        full = net().to(where)
        full(batch(where))
        with pytest.raises((ValueError, RuntimeError)) as caught:
            program(net().to(where), full)
        texts.append(str(caught.value))
    assert texts[0] == texts[1]
