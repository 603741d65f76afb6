"""A tensor that goes to a node, to a mesh, or comes back stays the object that it was, with all that belongs to it."""

from __future__ import annotations

import copy
import weakref
from typing import Any

import pytest
import torch
from equal import same
from homes import HERE, RANKS, Home

import disttensor as dt

pytestmark = pytest.mark.usefixtures("clean")

THERE_AND_BACK = [("cpu", "node:1"), ("node:1", "cpu"), ("cpu", "mesh"), ("mesh", "cpu")]
MOVES = [*THERE_AND_BACK, ("node:0", "node:1"), ("node:1", "node:1"), ("node:0", "mesh"), ("mesh", "mesh")]
moves = pytest.mark.parametrize(("start", "end"), MOVES, indirect=True)


def place(name: str) -> str:
    return str(dt.mesh(rank=RANKS, device="cpu").device) if name == "mesh" else name


@pytest.fixture
def start(request: pytest.FixtureRequest, nodes: object) -> str:
    return place(request.param)


@pytest.fixture
def end(request: pytest.FixtureRequest, nodes: object) -> str:
    return place(request.param)


def weight(device: str) -> torch.nn.Parameter:
    p = torch.nn.Parameter(torch.arange(6.0).view(2, 3).to(device))
    p.grad = torch.ones(2, 3).to(device)
    p.note = "mine"  # type: ignore[attr-defined]
    return p


def check(p: torch.Tensor, device: str, values: torch.Tensor) -> None:
    assert p.device == torch.device(device)
    assert isinstance(p, torch.nn.Parameter)
    assert isinstance(p, dt.DistributedTensor) == (device != "cpu")
    assert p.is_leaf
    if device == "cpu":
        assert type(p) is torch.nn.Parameter
        assert torch.equal(p, values)
    else:
        same(p.detach(), values)


@moves
def test_data(start: str, end: str) -> None:
    p = weight(start)
    reference, grad = weakref.ref(p), p.grad
    p.data = (p.data + 1).to(end)
    check(p, end, torch.arange(6.0).view(2, 3) + 1)
    assert reference() is p
    assert p.note == "mine"
    if p.grad is not None and p.grad.device != p.device:  # from node to node it stays behind, as on CUDA
        p.grad.data = p.grad.data.to(end)
    assert p.grad is grad
    assert p.grad.device == p.device
    (p * 2).sum().backward()
    assert p.grad.cpu().tolist() == [[3.0] * 3] * 2


@moves
def test_data_of_a_plain_tensor(start: str, end: str) -> None:
    x = torch.zeros(3).to(start)
    other = torch.arange(2).to(end)
    x.data = other
    assert x.device == other.device
    other += 1
    assert x.tolist() == [1, 2]
    assert (x * 2).tolist() == [2, 4]
    assert type(x) is type(other)


@moves
def test_hooks_go_with_it(start: str, end: str) -> None:
    layer = torch.nn.Linear(3, 2).to(start)
    called: list[str] = []
    hook = layer.weight.register_hook(lambda g: called.append("gradient"))
    layer.weight.register_post_accumulate_grad_hook(lambda p: called.append("accumulated"))
    layer.to(end)
    layer(torch.ones(1, 3).to(end)).sum().backward()
    assert called == ["gradient", "accumulated"]
    hook.remove()
    layer(torch.ones(1, 3).to(end)).sum().backward()
    assert called[2:] == ["accumulated"]


@moves
def test_modules_move_whoever_looks_at_their_weights(start: str, end: str) -> None:
    layer = torch.nn.Linear(3, 2).to(start)
    layer.register_buffer("table", torch.ones(2).to(start))
    layer.weight.note = "mine"
    layer.weight.grad = torch.ones_like(layer.weight)
    before = layer.weight, layer.bias, layer.weight.grad
    table, values = layer.table, layer.weight.detach().cpu()
    watching = weakref.ref(layer.weight)
    loss = layer(torch.ones(1, 3).to(start)).sum()  # a graph that is alive
    layer.to(end)
    assert (layer.weight, layer.bias, layer.weight.grad)[:2] == before[:2]
    assert layer.weight.grad is before[2]
    assert watching() is layer.weight
    assert layer.weight.note == "mine"
    check(layer.weight, end, values)
    assert layer.weight.grad.device == layer.weight.device
    assert table.device == torch.device(start)  # what held the buffer holds it still
    assert layer.table.device == torch.device(end)
    assert loss.device == torch.device(start)


@pytest.mark.parametrize(("start", "end"), THERE_AND_BACK, indirect=True)
def test_a_move_between_forward_and_backward_is_told(start: str, end: str) -> None:
    layer = torch.nn.Linear(3, 2).to(start)
    loss = layer(torch.ones(1, 3).to(start)).sum()
    layer.to(end)
    with pytest.raises(RuntimeError, match="another device since the forward"):
        loss.backward()
    layer(torch.ones(1, 3).to(end)).sum().backward()
    assert layer.bias.grad.tolist() == [1.0, 1.0]


@moves
@pytest.mark.parametrize("made", ["outside", "inside"])
def test_modules_move_in_inference_mode(start: str, end: str, made: str) -> None:
    x = torch.ones(1, 3)
    with torch.inference_mode(made == "inside"):
        net = torch.nn.Linear(3, 2).to(start)
    before = copy.deepcopy(net).to("cpu")
    with torch.inference_mode():
        net.to(end)
        assert torch.equal(net(x.to(end)).cpu(), before(x))
    assert {p.device for p in net.parameters()} == {torch.device(end)}


def test_a_result_cannot_move_in_place() -> None:
    y = torch.ones(3, requires_grad=True) * 2
    with pytest.raises(RuntimeError, match="result"):
        y.data = torch.ones(3, device="node:1")
    y = torch.ones(3, requires_grad=True, device="node:1") * 2
    with pytest.raises(RuntimeError, match="result"):
        y.data = torch.ones(3)


@moves
def test_data_in_an_optimizer(start: str, end: str) -> None:
    """What people write to move an optimizer's state."""
    p = torch.nn.Parameter(torch.ones(4).to(start))
    twin = torch.nn.Parameter(torch.ones(4))
    results = []
    for q, opt in ((p, torch.optim.Adam([p], 0.1)), (twin, torch.optim.Adam([twin], 0.1))):
        (q**2).sum().backward()
        opt.step()
        if q is p:
            q.data = q.data.to(end)
            q._grad.data = q._grad.data.to(end)
            for value in opt.state[q].values():
                if isinstance(value, torch.Tensor) and value.dim():
                    value.data = value.data.to(end)
        opt.zero_grad()
        (q**2).sum().backward()
        opt.step()
        results.append(q.detach().cpu())
    assert torch.equal(*results)


def test_local_data_is_torchs_own() -> None:
    x, y = torch.ones(3, requires_grad=True), torch.zeros(2)
    x.data = y
    y += 1
    assert x.data.tolist() == [1, 1]
    assert not x.data.requires_grad
    with pytest.raises(TypeError):
        x.data = 3  # type: ignore[assignment]
    with pytest.raises(RuntimeError, match="incompatible tensor type"):
        x.data = torch.eye(2).to_sparse()
    with pytest.raises((TypeError, RuntimeError)):
        del x.data
    z = torch.ones(1, device="node:1")
    with pytest.raises((TypeError, AttributeError)):
        z.data = 3  # type: ignore[assignment]


# ---- copies ----------------------------------------------------------------------------------------------------------


def shared(device: torch.device | str) -> list[Any]:
    x = torch.arange(24.0).view(4, 6).to(device)
    p = torch.nn.Parameter(x[1])
    y = x[1].detach().requires_grad_()
    p.grad = y.grad = x[2].clone()
    p.note = y.note = [x.t()]  # type: ignore[attr-defined]
    return [x, x[1:3, ::2], x.detach(), y, y, p, p, x.t(), x.view(torch.int32), x[:0], torch.empty(0).to(device)]


def test_deepcopy_keeps_what_shares_memory(home: Home) -> None:
    remote, local = copy.deepcopy(home.differ(shared(home.device))), copy.deepcopy(shared("cpu"))
    home.same(remote, local)
    assert remote[3] is remote[4]
    assert remote[5] is remote[6]
    assert not hasattr(local[5], "note")
    assert not hasattr(remote[5], "note")
    assert local[5].grad is remote[5].grad is None
    for copied in (remote, local):
        with torch.no_grad():
            copied[1].mul_(-1)
            copied[3].grad.zero_()
            copied[3].note[0][0] = 77
    home.same(remote, local)
    home.same([remote[3].grad, remote[3].note], [local[3].grad, local[3].note])
    originals = home.differ(shared(home.device))
    copy.deepcopy(originals)[0].zero_()
    home.same(originals, shared("cpu"))


def test_deepcopy_of_conjugates_and_negatives(home: Home) -> None:
    copies = []
    for where in (home, HERE):
        x = where.send(torch.arange(6.0).view(2, 3) * (1 + 2j))
        copies.append(copy.deepcopy([x, x.conj(), x.t().conj(), x.conj().imag, x.conj()[1:]]))
        copies[-1][1].mul_(2)
    home.same(*copies)
    assert [x.is_conj() for x in copies[0]] == [x.is_conj() for x in copies[1]]


def test_deepcopy_of_a_part_has_all_memory_as_locally(home: Home) -> None:
    sizes = []
    for where in (home, HERE):
        part = copy.deepcopy(where.send(torch.arange(24.0))[3:5])
        sizes.append((part.untyped_storage().nbytes(), part.storage_offset(), where.seen(part).tolist()))
    assert sizes[0] == sizes[1] == (96, 3, [3.0, 4.0])


def test_a_copy_of_a_copy_trains(home: Home) -> None:
    model = home.differ(torch.nn.RNN(3, 2).to(home.device))
    twin = copy.deepcopy(copy.copy(model))
    out = twin(torch.ones(1, 1, 3, device=home.device))[0].sum()
    out.backward()
    torch.optim.SGD(twin.parameters(), 0.1).step()
    assert all(p.grad is None for p in model.parameters())
    assert not all(
        torch.equal(home.seen(p), home.seen(q)) for p, q in zip(model.parameters(), twin.parameters(), strict=True)
    )


def test_copy_shares(home: Home) -> None:
    for where in (home, HERE):
        x = where.send(torch.zeros(3, requires_grad=True))
        y = copy.copy(x)
        assert y.requires_grad
        with torch.no_grad():
            y += 1
        assert where.seen(x).tolist() == [1, 1, 1]


def test_a_failed_tensor_is_not_copied(home: Home) -> None:
    bad = home.send(torch.ones(3)).gather(0, torch.tensor([7], device=home.device))
    with pytest.raises(RuntimeError, match="aten::gather"):
        copy.deepcopy(bad)
    with pytest.raises(RuntimeError, match="aten::gather"):
        bad.untyped_storage()
    assert dt.factories.ones(1).item() == 1
