"""``dt.meshes.agree_``: one value for all ranks, where BatchNorm's statistics, or other tensors, differ."""

from __future__ import annotations

import copy
import io
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import disttensor as dt
from disttensor import mesh
from disttensor.errors import RanksDiffer
from disttensor.meshes import Mesh, agree_, from_shards

pytestmark = pytest.mark.usefixtures("settled")

NODES = 4


@pytest.fixture(scope="module", autouse=True)
def session() -> Iterator[None]:
    with dt.init_master_worker(nodes=NODES, launcher="inproc"):
        yield


def network() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 3, 1), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 2))


def trained(m: Mesh) -> tuple[nn.Module, list[nn.Module]]:
    """A model on a mesh that has seen other data on each rank; and the local models that have seen these data."""
    rows, made = torch.randn(3, NODES * 5, 2, 4, 4), network()
    locals_, remote = [copy.deepcopy(made) for _ in range(NODES)], copy.deepcopy(made).to(m.device)
    for batch in rows:
        remote(from_shards(m, batch.chunk(NODES)))
        for model, part in zip(locals_, batch.chunk(NODES), strict=True):
            model(part)
    return remote, locals_


def loaded(model: nn.Module) -> nn.Module:
    """The model that a checkpoint gives, on this machine."""
    stream = io.BytesIO()
    torch.save(model.state_dict(), stream)
    stream.seek(0)
    local = network()
    local.load_state_dict(torch.load(stream))
    return local


@pytest.mark.parametrize("dims", [{"dp": 4}, {"dp": 2, "tp": 2}])
def test_the_first_ranks_statistics(dims: dict[str, int]) -> None:
    model, (first, *_) = trained(mesh(**dims))
    parameters = [p.detach().cpu() for p in model.parameters()]
    assert agree_(model) is model
    local = loaded(model)
    for name, value in first.state_dict().items():
        assert torch.equal(local.state_dict()[name], value), name
    for p, before in zip(model.parameters(), parameters, strict=True):
        assert torch.equal(p.detach().cpu(), before)
    x = torch.randn(6, 2, 4, 4)
    assert torch.equal(local.eval()(x), first.eval()(x))
    torch.testing.assert_close(model.eval()(x.to(model[1].weight.device)).cpu(), first(x))  # type: ignore[index]


@pytest.mark.parametrize("dims", [{"dp": 4}, {"dp": 2, "tp": 2}])
def test_the_mean_of_all_ranks_statistics(dims: dict[str, int]) -> None:
    model, locals_ = trained(mesh(**dims))
    model[1].num_batches_tracked.at(**dict.fromkeys(dims, 1)).add_(5)  # type: ignore[index,union-attr]
    agree_(model, "avg")
    norm: Any = loaded(model)[1]
    for name in ("running_mean", "running_var"):
        wanted = torch.stack([getattr(each[1], name) for each in locals_]).mean(0)  # type: ignore[index]
        torch.testing.assert_close(getattr(norm, name), wanted)
    assert norm.num_batches_tracked.item() == 3  # an integer: the first rank's


def test_along_one_dim() -> None:
    m = mesh(dp=2, tp=2)
    x = from_shards(m, [torch.tensor(float(i)) for i in (1, 2, 5, 8)])
    assert [one.item() for one in agree_(x.clone(), over="tp").shards()] == [1, 1, 5, 5]  # type: ignore[attr-defined]
    assert [one.item() for one in agree_(x.clone(), over="dp").shards()] == [1, 2, 1, 2]  # type: ignore[attr-defined]
    m.flatten("flat")
    assert agree_(x.clone(), "avg", over="flat").item() == 4
    assert agree_(x.clone(), "avg", over=m.names).item() == 4
    assert [one.item() for one in agree_(x, "avg", over="dp").shards()] == [3, 5, 3, 5]  # type: ignore[attr-defined]


@pytest.mark.parametrize("how", ["first", "avg"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.complex64, torch.int64,
                                   torch.uint8, torch.bool])  # fmt: skip
def test_of_any_dtype(dtype: torch.dtype, how: str) -> None:
    values = [torch.tensor([[float(i == 0), 4.0 * i]]).to(dtype) for i in range(NODES)]
    found = agree_(from_shards(mesh(dp=NODES), values), how).cpu()
    if how == "avg" and (dtype.is_floating_point or dtype.is_complex):
        assert torch.equal(found, torch.tensor([[0.25, 6.0]]).to(dtype))
    else:
        assert torch.equal(found, values[0])


def test_several_tensors_and_parts_of_them() -> None:
    m = mesh(dp=NODES)
    x = from_shards(m, [torch.full((3, 2), float(i)) for i in range(NODES)])
    p = nn.Parameter(from_shards(m, [torch.full((2,), float(i)) for i in range(NODES)]))
    local = torch.ones(2)
    agree_({"x": x.t()[:, 1], "p": p, "local": local}.values())
    assert [one.tolist() for one in x.shards()] == [  # type: ignore[attr-defined]
        [[i, i], [0, 0], [i, i]] for i in range(NODES)
    ]
    assert p.tolist() == [0, 0]
    assert p.requires_grad
    assert local.tolist() == [1, 1]
    assert agree_([]) == []
    plain = nn.Linear(2, 2)
    assert agree_(plain) is plain  # it has no buffers


def test_the_remedy_is_in_the_message() -> None:
    model, _ = trained(mesh(dp=NODES))
    for what in (model.state_dict(), model[1].running_var):  # type: ignore[index]
        with pytest.raises(RanksDiffer) as raised:
            torch.save(what, io.BytesIO())
        text = str(raised.value)
        assert "dt.all_reduce(x, 'avg', over='dp') is the mean of all" in text
        assert "What is saved has one value: dt.meshes.agree_(x)" in text
    remedy = re.search(r"agree_\(model\)", str(raised.value))
    assert remedy is not None
    assert eval(f"dt.meshes.{remedy[0]}", {"dt": dt, "model": model}) is model
    torch.save(model.state_dict(), io.BytesIO())


@pytest.mark.parametrize(
    ("what", "options", "error", "message"),
    [
        (lambda m: torch.ones(2), {}, TypeError, "this is on cpu; model.to"),
        (lambda m: nn.BatchNorm1d(2).to("node:1"), {}, TypeError, "this is on node:1"),
        (lambda m: {"x": torch.ones(2, device=m.device)}, {}, TypeError, r"of a state dict its values\(\)\), not str"),
        (lambda m: 5, {}, TypeError, "takes a module or tensors .* not int"),
        (lambda m: torch.ones(2, device=m.device), {"how": "mean"}, ValueError, "how is 'first' or 'avg', not 'mean'"),
        (lambda m: torch.ones(2, device=m.device), {"over": "pp"}, ValueError, "has no dim 'pp'; it has dp=4"),
    ],
)
def test_mistakes(what: Any, options: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        agree_(what(mesh(dp=NODES)), **options)
