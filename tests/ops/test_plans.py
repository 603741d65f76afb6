"""The caches of plans: bounded, exact in their keys, and gone with their session."""

from __future__ import annotations

from collections.abc import Callable
from subprocess import CompletedProcess

import pytest
import torch
from equal import same

import disttensor as dt
from disttensor.dispatch import op_plan
from disttensor.dispatch.op_table import enter, entries
from disttensor.session.caches import drop_plans

pytestmark = pytest.mark.usefixtures("clean")

VARYING: dict[str, Callable[[torch.Tensor, int], object]] = {
    "ordinary": lambda x, i: x.sum(0, keepdim=bool(i % 2)) * x[: i + 1],
    "item": lambda x, i: x[i].item(),
    "other values": lambda x, i: torch.equal(x[: i + 1], x[: i + 1]),
    "write": lambda x, i: x[: i + 1].add_(1),
    "write a slice": lambda x, i: x.__setitem__(slice(0, i + 1), 2.0),
    "reshape in place": lambda x, i: x[: i + 1].clone().unsqueeze_(0),
    "empty": lambda x, i: torch.empty(i + 1, device="node:1"),
    "asked": lambda x, i: x[: i + 1].nonzero(),
    "copy": lambda x, i: x[: i + 1].to("node:0"),
}


@pytest.mark.parametrize("name", VARYING)
def test_tables_are_bounded(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op_plan, "MAX_PLANS", 16)
    drop_plans()
    x = torch.arange(40.0, device="node:1")
    for i in range(40):
        VARYING[name](x, i)
    sizes = {entry.name: (len(entry.plans), len(entry.quick)) for entry in entries.values()}
    assert {op: n for op, n in sizes.items() if max(n) > 16} == {}
    dt.synchronize()


def test_templates_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("disttensor.runtime.master.home.GENERATION", 8)
    x = torch.arange(60.0, device="node:1") % 5
    node = x._place.home  # type: ignore[attr-defined]
    for i in range(60):
        torch.empty(i + 1, device="node:1")
        assert torch.bincount(x.to(torch.int64), minlength=i).shape == (max(i, 5),)
        assert x.sum(dtype=torch.float64).item() == 120.0
        assert len(node.templates) <= 8 + 4  # a generation may end between two definitions of one call
    torch.testing.assert_close(torch.empty(3, device="node:1").fill_(2).cpu(), torch.full((3,), 2.0))


def test_a_number_of_another_kind_has_a_plan_of_its_own() -> None:
    x = torch.arange(3)
    remote = x.to("node:1")
    for number in (1, 1.0, True, 2, 2.5):
        same(remote + number, x + number)
        same(torch.add(remote, remote, alpha=int(number)), torch.add(x, x, alpha=int(number)))
        same(torch.full((2,), number, device="node:1"), torch.full((2,), number))


SIGNS = (complex(0.0, 0.0), complex(-0.0, 0.0), complex(0.0, -0.0), complex(-0.0, -0.0), complex("nan"))


@pytest.mark.parametrize("first", SIGNS, ids=repr)
def test_complex_numbers_are_told_apart_by_their_bits(first: complex) -> None:
    x = torch.tensor([1 + 1j, -1 - 1j])
    remote = x.to("node:1")
    for number in (first, *SIGNS):
        same(torch.full((2,), number, device="node:1"), torch.full((2,), number))
        same(remote * number, x * number)
        same(remote.clone().fill_(number), x.clone().fill_(number))
        # a list of numbers with a complex one among them
        got, want = torch._foreach_mul([remote, remote], [number, 1.0]), torch._foreach_mul([x, x], [number, 1.0])
        same(got, want)


def test_a_complex_nan_makes_one_plan() -> None:
    entry = enter(torch.ops.aten.fill_.Scalar)
    x = torch.zeros(2, dtype=torch.complex64, device="node:1")
    x.fill_(complex("nan"))
    before = len(entry.plans)
    for _ in range(3):
        x.fill_(complex("nan"))  # another object each time
    assert len(entry.plans) == before


OLD_SESSION = """
import gc, weakref
import torch
import torch.nn.functional as F
import disttensor as dt
from disttensor.session import current as state

with dt.init_master_worker(nodes=1, launcher="inproc"):
    session = weakref.ref(state.session())
    q = torch.rand(1, 2, 4, 8, device="node:0")
    F.scaled_dot_product_attention(q, q, q).sum().item()
    del q
gc.collect()
print("alive" if session() is not None else "gone")
"""


def test_an_ended_session_is_let_go(script: Callable[..., CompletedProcess[str]]) -> None:
    done = script(OLD_SESSION)
    assert done.stdout == "gone\n", done.stderr
