"""Between an asynchronous in-place collective and its ``wait()`` other views of what it writes are refused."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import disttensor as dt
from disttensor.collectives import all_reduce_

pytestmark = pytest.mark.usefixtures("nodes", "settled")

NODES = 3
REFUSED = r"this is a view of what .* is writing, since .*test_views_being_written.py:.*Call wait\(\) on its Work first"


def mesh() -> Any:
    return dt.mesh(dp=NODES)


def wholes() -> list[Any]:
    return [torch.arange(12.0, device=f"node:{k}").view(3, 4) for k in range(NODES)]


def on_mesh() -> tuple[Any, Callable[[Any], Any]]:
    whole = torch.arange(12.0).view(3, 4).to(mesh().device)
    return whole, lambda row: all_reduce_(row, over="dp", async_op=True)


def in_a_list() -> tuple[Any, Callable[[Any], Any]]:
    whole, others = wholes()[1], wholes()
    return whole, lambda row: dt.all_reduce([others[0][0], row, others[2][0]], async_op=True)


def on_a_mesh(t: Any) -> bool:
    return bool(t.device == mesh().device)


def parts(t: Any) -> list[Any]:
    return t.shards() if on_a_mesh(t) else [t]


def again(t: Any) -> Any:
    """Another collective that writes it."""
    if on_a_mesh(t):
        return all_reduce_(t, over="dp")
    return dt.all_reduce([t, torch.ones(2, device="node:2")])


FORMS = {"all_reduce_": on_mesh, "all_reduce of a list": in_a_list}
#: another view of the first row of a tensor, made before, and what uses it
USES: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "a write into the whole": (lambda whole: whole, lambda t: t.mul_(3)),
    "a read of the whole": (lambda whole: whole, lambda t: t + 1),
    "a fetch": (lambda whole: whole[0, :2], lambda t: t.cpu()),
    "an item": (lambda whole: whole[0, 1], lambda t: t.item()),
    "a view of a view": (lambda whole: whole.t()[:2], lambda t: t.t()[0].sum()),
    "a column": (lambda whole: whole[:, 1], lambda t: t.sum()),
    "the row again": (lambda whole: whole[0], lambda t: t.add_(1)),
    "a detached one's": (lambda whole: whole.detach()[0], lambda t: t.add_(1)),
    "a shard, or a copy": (lambda whole: whole, lambda t: t.at(dp=0) + 1 if on_a_mesh(t) else t.to("node:0")),
    "a second collective": (lambda whole: whole[0][:2], lambda t: again(t)),
    "an operand of many": (lambda whole: whole, lambda t: torch._foreach_add_([t], 1)),
    "a function's argument": (lambda whole: whole, lambda t: dt.run(len, t, node=1)),
}


#: the form, and whether the views were used before: what was not is not on the node yet
BEFORE = [
    ("all_reduce_", True),
    ("all_reduce of a list", False),
    pytest.param("all_reduce_", False, marks=pytest.mark.slow),
    pytest.param("all_reduce of a list", True, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("form", "seen"), BEFORE)
@pytest.mark.parametrize("use", USES)
def test_a_view_is_refused_until_the_wait(form: str, seen: bool, use: str) -> None:
    make, used = USES[use]
    whole, begin = FORMS[form]()
    expected = torch.arange(12.0).view(3, 4)
    row, other = whole[0], make(whole)
    if seen:
        (other + 0).sum(), (row + 0).sum()
    work = begin(row)
    with pytest.raises(RuntimeError, match=REFUSED):
        used(other)
    later = other[None]  # a view is made all the same, and is refused as well
    with pytest.raises(RuntimeError, match=REFUSED):
        (later + 1).sum()
    work.wait()
    expected[0] *= NODES
    here = make(expected)
    for tensor, wanted in ((other, here), (later, here[None]), (row, expected[0])):
        for part in parts(tensor):
            assert torch.equal(part.cpu(), wanted)
    other.mul_(3)
    make(expected).mul_(3)
    for part in parts(whole):
        assert torch.equal(part.cpu(), expected)


@pytest.mark.parametrize("form", FORMS)
def test_what_is_not_being_written_is_free(form: str) -> None:
    whole, begin = FORMS[form]()
    row, second, column = whole[0], whole[1], whole[1:, 1]
    (second + 1).sum()
    work = begin(row)
    second.add_(1)
    column.add_(1)
    again = row.detach()
    after = row[:2] * 2  # a view of what is written itself waits on its node
    work.wait()
    expected = torch.arange(12.0).view(3, 4)
    expected[0] *= NODES
    expected[1] += 1
    expected[1:, 1] += 1
    for tensor, wanted in ((whole, expected), (after, expected[0, :2] * 2), (again, expected[0])):
        for part in parts(tensor):
            assert torch.equal(part.cpu(), wanted)


WAITS: dict[str, Callable[[Any], Any]] = {
    "wait": lambda work: work.wait(),
    "result": lambda work: work.result(),
    "exception": lambda work: work.exception(),
    "synchronize": lambda work: dt.synchronize(),
    "as_completed": lambda work: [done.result() for done in dt.futures.as_completed([work])],
    "polling": lambda work: [None for _ in iter(work.is_completed, True)],
}


@pytest.mark.parametrize("way", WAITS)
def test_each_way_of_waiting(way: str) -> None:
    whole, begin = on_mesh()
    row = whole[0]
    work = begin(row)
    WAITS[way](work)
    assert (whole + 1).cpu()[0].tolist() == [1, 4, 7, 10]


def test_a_dropped_work_is_waited_for_by_the_next_use() -> None:
    whole, begin = on_mesh()
    row = whole[0]
    begin(row)
    whole.mul_(3)
    assert whole.cpu()[0].tolist() == [0, 9, 18, 27]


def test_two_at_once() -> None:
    whole, begin = on_mesh()
    first, second = whole[0], whole[1]
    works = [begin(first), begin(second)]
    for work in works:
        with pytest.raises(RuntimeError, match=REFUSED):
            whole.sum()
        work.wait()
    assert whole.cpu()[:2].tolist() == [[0, 3, 6, 9], [12, 15, 18, 21]]


def test_gradients_are_looked_at_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop over gradients, which parameters hold as views hold their bases, looks at all tensors once; a view of one
    of them is found all the same."""
    model = torch.nn.Sequential(*(torch.nn.Linear(3, 3) for _ in range(4))).to(mesh().device)
    model(torch.ones(2, 3, device=mesh().device)).sum().backward()
    grads: list[Any] = [p.grad for p in model.parameters()]
    used = grads[5][:1]
    (used + 1).sum()
    looks: list[int] = []
    there = gc.get_referrers
    monkeypatch.setattr(gc, "get_referrers", lambda cls: looks.append(1) or there(cls))
    works = [all_reduce_(grad, "avg", over="dp", async_op=True) for grad in grads]
    assert len(looks) == 2  # whose gradients have views, and which these are
    with pytest.raises(RuntimeError, match=REFUSED):
        used.sum()
    for work in works:
        work.wait()
    assert torch.equal(used.at(dp=0).cpu(), grads[5].at(dp=0).cpu()[:1])


def test_what_other_threads_are_making_is_left_alone() -> None:
    """CPython refuses to go on with a tuple that somebody has found among all objects before it was complete."""
    errors: list[BaseException] = []
    over = threading.Event()

    def make() -> None:
        try:
            while not over.is_set():
                tuple(number for number in range(40))
        except SystemError as error:
            errors.append(error)

    whole, begin = on_mesh()
    row, interval = whole[0], sys.getswitchinterval()
    thread = threading.Thread(target=make)
    sys.setswitchinterval(1e-5)
    try:
        thread.start()
        for _ in range(20):
            begin(row).wait()
    finally:
        over.set()
        thread.join()
        sys.setswitchinterval(interval)
    assert not errors


def used() -> list[int]:
    gc.collect()
    dt.synchronize()
    return [dt.testing.usage(node).tensors for node in range(NODES)]


@pytest.mark.parametrize("first", ["Work", "whole", "nothing"])
@pytest.mark.parametrize("form", FORMS)
def test_what_is_dropped_without_a_wait_is_freed(form: str, first: str) -> None:
    """Together with the views that could not be used: none of them is in a cycle."""
    before = used()
    kept: dict[str, Any] = {}
    kept["whole"], kept["begin"] = FORMS[form]()
    kept["row"], kept["other"] = kept["whole"][0], kept["whole"].view(-1)
    kept["Work"] = kept["begin"](kept["row"])
    kept.pop(first, None)
    kept.clear()
    assert used() == before
