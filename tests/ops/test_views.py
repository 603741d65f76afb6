"""Views share memory with their base, on the node as in local PyTorch, whatever is written through which of them.

So on each rank of a mesh, which has other values.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
from homes import HERE, Home, anywhere

import disttensor as dt

pytestmark = pytest.mark.usefixtures("clean")

VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "select": lambda x: x[1],
    "select_last": lambda x: x.select(-1, 2),
    "slice": lambda x: x[1:3],
    "step": lambda x: x[:, ::2],
    "element": lambda x: x[2, 3],
    "t": lambda x: x.t(),
    "transpose": lambda x: x.transpose(0, 1),
    "permute": lambda x: x.permute(1, 0),
    "view": lambda x: x.view(2, 12),
    "view_flat": lambda x: x.view(-1),
    "reshape": lambda x: x.reshape(3, 8),
    "flatten": lambda x: x.flatten(),
    "unsqueeze": lambda x: x.unsqueeze(1),
    "squeeze": lambda x: x[:1].squeeze(0),
    "narrow": lambda x: x.narrow(1, 1, 3),
    "diagonal": lambda x: x.diagonal(),
    "diagonal_offset": lambda x: x.diagonal(1),
    "unfold": lambda x: x.unfold(1, 2, 2),
    "as_strided": lambda x: x.as_strided((2, 3), (6, 2), 1),
    "split": lambda x: x.split(2)[1],
    "chunk": lambda x: x.chunk(2, 1)[0],
    "unbind": lambda x: x.unbind(1)[3],
    "movedim": lambda x: x.movedim(0, 1),
    "detach": lambda x: x.detach(),
    "data": lambda x: x.data,
    "alias": lambda x: torch.ops.aten.alias(x),
    "view_as": lambda x: x.view_as(x),
    "view_dtype": lambda x: x.view(torch.int32),
    "unflatten": lambda x: x.unflatten(1, (2, 3)),
    "chain": lambda x: x.t()[1:4].unsqueeze(0)[..., 1:3],
    "swapdims": lambda x: x.swapdims(0, 1),
    "mT": lambda x: x.mT,
    "expand_of_one": lambda x: x[0].unsqueeze(0).expand(1, 6),
    "real_of_complex": lambda x: torch.view_as_complex(x.view(4, 3, 2)).real,
    "imag_of_complex": lambda x: torch.view_as_complex(x.view(4, 3, 2)).imag,
    "view_as_real": lambda x: torch.view_as_real(torch.view_as_complex(x.view(4, 3, 2))),
}


def base() -> torch.Tensor:
    return torch.arange(24.0).reshape(4, 6)


@pytest.mark.row("M5")
@anywhere
@pytest.mark.parametrize("view", VIEWS)
def test_write_to_view_changes_base(view: str, home: Home) -> None:
    local = base()
    remote = home.send(base())
    for x in (remote, local):
        VIEWS[view](x).mul_(3)
    home.same(remote, local)


@pytest.mark.row("M5")
@anywhere
@pytest.mark.parametrize("view", VIEWS)
def test_write_to_base_changes_view(view: str, home: Home) -> None:
    local = base()
    remote = home.send(base())
    lv, rv = VIEWS[view](local), VIEWS[view](remote)
    for x in (remote, local):
        x.add_(1)
        x[0] = 7
    home.same(rv, lv)
    for x in (rv, lv):
        x.zero_()
    home.same(remote, local)
    home.same(rv, lv)


@pytest.mark.row("M13")
@pytest.mark.parametrize("view", VIEWS)
def test_a_view_outlives_its_base(view: str, home: Home) -> None:
    local, remote = base(), home.send(base())
    lv, rv = VIEWS[view](local), VIEWS[view](remote)
    del local, remote
    junk = [torch.full((4, 6), -1.0, device=home.device) for _ in range(5)]
    home.same(rv, lv)
    del junk


WRITES: dict[str, Callable[[torch.Tensor], object]] = {
    "item": lambda x: x.__setitem__(0, 5.0),
    "item_tensor": lambda x: x.__setitem__(1, x[0].clone()),
    "item_local": lambda x: x.__setitem__((0, 0), torch.tensor(3.0)),
    "slice": lambda x: x.__setitem__((slice(None), slice(1, 3)), -1),
    "mask": lambda x: x.__setitem__(x > 10, 0.5),
    "rows": lambda x: x.__setitem__(torch.tensor([1, 3]), 2.0),
    "iadd": lambda x: x.__iadd__(2),
    "iadd_row": lambda x: x[1].__iadd__(2),
    "overlap": lambda x: x[1:].copy_(x[:-1].clone()),
    "t_copy": lambda x: x.t().copy_(torch.arange(24.0, device=x.device).reshape(6, 4)),
    "transposed_add": lambda x: x.t().add_(torch.ones(6, 1, device=x.device)),
    "zip_rows": lambda x: [row.mul_(k) for k, row in enumerate(x)],
    "diagonal_fill": lambda x: x.diagonal().fill_(9),
    "unbind": lambda x: [c.add_(1) for c in x.unbind(1)],
    "masked_fill_": lambda x: x[:, 1].masked_fill_(x[:, 0] > 5, -4),
    "copy_to_all": lambda x: x.copy_(x[:, :1].clone()),
    "swap": lambda x: (lambda a: (x[0].copy_(x[1]), x[1].copy_(a)))(x[0].clone()),
    "index_put": lambda x: x.index_put_((torch.tensor([0, 0], device=x.device),), torch.ones(6, device=x.device)),
    "random_values": lambda x: x[2].clamp_(max=13),
    "set_data": lambda x: setattr(x, "data", x.data * 2),
    "data_inplace": lambda x: x.data.mul_(2),
    "detached": lambda x: x.detach()[0].zero_(),
    "out": lambda x: torch.add(x, 1, out=x),
    "out_view": lambda x: torch.mul(x[0], 2, out=x[1]),
}


@anywhere
@pytest.mark.parametrize("write", WRITES)
def test_writes_and_watchers(write: str, home: Home) -> None:
    """Views made before and after a write see it."""
    local, remote = base(), home.send(base())
    before = [(v(remote), v(local)) for v in VIEWS.values()]
    for x in (remote, local):
        WRITES[write](x)
    home.same(remote, local)
    for r, x in before:
        home.same(r, x)
    for name, v in VIEWS.items():
        home.same(v(remote), v(local), path=name)


@pytest.mark.row("M5")
@anywhere
def test_geometry_in_place(home: Home) -> None:
    """t_, unsqueeze_ and their like change the tensor's own shape; memory stays shared."""
    for change in (
        lambda x: x.t_(),
        lambda x: x.unsqueeze_(1),
        lambda x: x.unsqueeze_(0).squeeze_(0),
        lambda x: x.transpose_(0, 1),
        lambda x: x.swapdims_(0, 1),
        lambda x: x.resize_(2, 3),
        lambda x: x.resize_(24),
        lambda x: x.resize_as_(x.new_empty(3, 4)),
        lambda x: x.as_strided_((3, 2), (2, 1), 4),
        lambda x: x.set_(x.new_ones(2)),
        lambda x: x.unsqueeze_(-1),
    ):
        local, remote = base(), home.send(base())
        views = remote[1], local[1]
        results = [change(x) for x in (remote, local)]
        assert results[0] is remote
        home.same(remote, local)
        for x in (remote, local):
            x.mul_(2)
        home.same(remote, local)
        home.same(*views)
        home.same(remote.sum(), local.sum())
        home.same(remote + 1, local + 1)


@anywhere
def test_resize_to_more_elements(home: Home) -> None:
    remote, local = home.send(base()), base()
    for x in (remote, local):
        x.resize_(5, 6)
        x[4].fill_(1)
        x.add_(1)
    home.same(remote, local)


@pytest.mark.row("M5")
@anywhere
def test_set_shares_from_then_on(home: Home) -> None:
    results = []
    for where in (home, HERE):
        x, y = where.send([torch.zeros(2, 3), torch.ones(4)])
        x.set_(y)
        x.add_(1)
        y[0] = 9
        results.append((x, y))
    home.same(*results)


@anywhere
def test_data_assignment(home: Home) -> None:
    results = []
    for where in (home, HERE):
        x, y = where.send([torch.zeros(2, 3, requires_grad=True), torch.ones(4)])
        old = x.detach()
        x.data = y
        with torch.no_grad():
            x.add_(2)
        results.append((x, y, old))
    home.same(*results)


def test_data_assignment_moves_the_tensor(home: Home) -> None:
    x = torch.zeros(3, device="node:0")
    x.data = home.send(torch.ones(3))
    assert x.device == home.device
    home.same(x + x, torch.full((3,), 2.0))


@anywhere
def test_detach_shares(home: Home) -> None:
    x = home.send(torch.ones(3, requires_grad=True))
    d = x.detach()
    assert not d.requires_grad
    d.mul_(5)
    home.same(x, torch.full((3,), 5.0, requires_grad=True))


def test_version_counters(home: Home) -> None:
    x = home.send(torch.ones(3))
    view = x[1:]
    before = x._version
    view.add_(1)
    assert x._version == view._version == before + 1
    y = home.send(torch.ones(3, requires_grad=True))
    z = y * 2
    w = z**2
    z.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        w.sum().backward()


@pytest.mark.row("M5")
def test_is_view_and_base(home: Home) -> None:
    x = home.send(torch.ones(3, 4))
    v = x[1][2:]
    assert v._is_view()
    assert v._base is x
    assert not x._is_view()
    assert v.storage_offset() == 6


@anywhere
def test_iteration_and_unpacking(home: Home) -> None:
    remote, local = home.send(base()), base()
    for r, x in zip(remote, local, strict=True):
        home.same(r, x)
    a, b, c, d = remote
    home.same([a, b, c, d], list(local))
    assert len(remote) == 4
    assert home.seen(remote[0, 0] == 0).item()


@anywhere
def test_write_to_an_expanded_view_is_refused_as_locally(home: Home) -> None:
    for where in (home, HERE):
        x = where.send(torch.ones(3)).expand(2, 3)
        try:
            with pytest.raises(RuntimeError, match="more than one element of the written-to tensor refers to a single"):
                x.add_(1)
        finally:
            with contextlib.suppress(RuntimeError):
                dt.synchronize()


def test_write_to_an_expanded_view_is_refused_where_it_is_recorded(nodes: object) -> None:
    """A node would refuse it too, at each replay."""
    with pytest.raises(RuntimeError, match="more than one element of the written-to tensor"), dt.graph(dt.Graph()):
        torch.ones(3, device="node:1").expand(2, 3).add_(1)


def test_a_long_chain_of_views_that_nothing_used(home: Home) -> None:
    local = x = torch.arange(3000.0)
    remote = y = home.send(x)
    for _ in range(2500):
        x, y = x[1:], y[1:]
    y += 1
    x += 1
    home.same(y, x)
    home.same(remote, local)
