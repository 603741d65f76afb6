"""Locks and barriers as the script holds them: order, and nodes that are taken over."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from disttensor.runtime.protocol import shared_objects as s
from disttensor.runtime.shared.callers import back
from disttensor.runtime.shared.locks import BarrierState, LockState
from disttensor.runtime.shared.objects import SCRIPT, Objects


def made(kind: Callable[..., object], shared: bool = True) -> tuple[Objects, tuple[int]]:
    objects = Objects()
    number = objects.make(kind)  # type: ignore[arg-type]
    if shared:
        objects.share(number)
    return objects, (number,)


class Party:
    """One who asks, and notes the answers."""

    def __init__(self, objects: Objects, rank: int) -> None:
        self.objects, self.rank = objects, rank
        self.said: list[tuple[int, int, int, str]] = []

    def ask(self, *requests: s.Asking) -> list[tuple[int, int]]:
        for request in requests:
            self.objects.ask(self.rank, request, lambda x: self.said.append((x.call, x.said, x.count, x.why)))
        return [said[:2] for said in self.said]


@pytest.mark.row("I24")
def test_the_order_is_that_of_requests() -> None:
    objects, of = made(LockState)
    parties = [Party(objects, rank) for rank in (SCRIPT, 0, 1)]
    order: list[tuple[int, int]] = []
    for call in range(9):
        one = parties[call % 3]
        objects.ask(one.rank, s.Acquire(call, of, call, "f()"), lambda x, rank=one.rank: order.append((rank, x.call)))
    for call in range(9):
        assert len(order) == call + 1
        parties[call % 3].ask(s.Release(100 + call, of, call))
    assert order == [(parties[call % 3].rank, call) for call in range(9)]


def test_a_node_can_neither_free_nor_take_what_is_anothers() -> None:
    objects, of = made(LockState)
    good, bad = Party(objects, 0), Party(objects, 1)
    assert good.ask(s.Acquire(1, of, 7, "f()")) == [(1, s.OK)]
    said = bad.ask(
        s.Release(1, of, 7), s.Release(2, of, 7, ended=True), s.Release(3, of, 7, back=True), s.Acquire(4, of, 7, "f()")
    )
    assert said == [(1, s.REFUSED), (2, s.OK), (3, s.OK)]
    assert "f() on node 0 has it" in bad.said[0][3]
    objects.withdraw(1, 4)
    assert bad.said[-1][:2] == (4, s.EMPTY)
    assert good.ask(s.Release(2, of, 7))[-1] == (2, s.OK)
    assert bad.ask(s.Arrive(5, of, "f()"))[-1] == (5, s.REFUSED)  # a lock is no barrier


def test_one_that_was_not_given_it() -> None:
    for kind, request in (
        (LockState, s.Acquire(1, (0,), 1, "f()")),
        (partial(BarrierState, parties=1, acts=False), s.Arrive(1, (0,), "f()")),
    ):
        objects, _ = made(kind, shared=False)
        assert Party(objects, 0).ask(request) == [(1, s.REFUSED)]


def test_words_of_a_node_do_nothing_to_a_terminal() -> None:
    objects, of = made(LockState)
    bad, good = Party(objects, 1), Party(objects, 0)
    bad.ask(s.Acquire(1, of, 1, "\x1b[2J\nnode 0"))
    good.ask(s.Release(1, of, 1))
    assert good.said[0][3] == "?[2J?node 0 on node 1 has it, and only that may release it"


def test_what_was_told_and_not_used_is_told_again() -> None:
    """An acquire that is interrupted while it gets the lock does not swallow that it was abandoned."""
    objects, of = made(LockState)
    dead, one, two = Party(objects, 0), Party(objects, 1), Party(objects, 2)
    dead.ask(s.Acquire(1, of, 1, "f()"))
    one.ask(s.Acquire(1, of, 1, "g()"))
    objects.lost(0, "killed")
    why = "f() on node 0 had it, and that node is gone"
    assert one.said == [(1, s.OK, 0, why)]
    undo = back(s.Acquire(1, of, 1, "g()"), s.ObjectAnswer(1, s.OK), 2)
    assert undo is not None
    one.ask(undo)
    two.ask(s.Acquire(1, of, 1, "h()"), s.Release(2, of, 1), s.Acquire(3, of, 1, "h()"))
    assert [said[3] for said in two.said] == [why, "", ""]


def arrive(call: int, of: tuple[int]) -> s.Arrive:
    return s.Arrive(call, of, "f()")


def test_those_who_come_while_the_action_is_done_are_the_next() -> None:
    objects, of = made(partial(BarrierState, parties=2, acts=True))
    one, two = Party(objects, 0), Party(objects, 1)
    one.ask(arrive(1, of))
    assert two.ask(arrive(1, of)) == [(1, s.ACT)]
    one.ask(arrive(2, of), arrive(3, of))
    assert one.said == []
    two.ask(s.Passed(2, of))
    assert one.said == [(1, s.OK, 0, ""), (3, s.ACT, 1, "")]
    one.ask(s.Passed(4, of))
    assert [said[:3] for said in one.said[2:]] == [(4, s.OK, 1), (2, s.OK, 0)]


@pytest.mark.parametrize("how", ["gone", "abort", "interrupted", "withdrawn"])
def test_the_one_that_acts_ends(how: str) -> None:
    objects, of = made(partial(BarrierState, parties=3, acts=True))
    one, two, three = (Party(objects, rank) for rank in range(3))
    one.ask(arrive(1, of))
    two.ask(arrive(1, of))
    three.ask(arrive(1, of))
    one.ask(s.Passed(2, of), s.Abort(3, of, "f()", "lies", acting=1))  # not its part
    assert one.said[0][:2] == (2, s.BROKEN)
    assert two.said == []
    if how == "gone":
        objects.lost(2, "killed")
    elif how == "abort":
        three.ask(s.Abort(2, of, "f()", "raised"))
    elif how == "interrupted":
        undo = back(arrive(1, of), s.ObjectAnswer(1, s.ACT), 2)
        assert undo is not None
        three.ask(undo)
    else:
        objects.withdraw(1, 1)
    assert two.said[0][:2] == one.said[-1][:2] == (1, s.BROKEN)
    assert "node 2" in two.said[0][3] or how == "withdrawn"
    assert three.ask(s.Passed(9, of))[-1] == (9, s.BROKEN)


def test_a_barrier_that_no_function_has_outlives_nodes() -> None:
    objects, of = made(partial(BarrierState, parties=2, acts=False), shared=False)
    script = Party(objects, SCRIPT)
    script.ask(arrive(1, of))
    objects.lost(0, "killed")
    assert script.ask(arrive(2, of)) == [(2, s.OK), (1, s.OK)]


def test_a_lost_node_breaks_a_barrier_that_functions_have() -> None:
    """It may be one that has not come yet."""
    objects, of = made(partial(BarrierState, parties=2, acts=False))
    script = Party(objects, SCRIPT)
    script.ask(arrive(1, of))
    objects.lost(0, "killed")
    assert script.said == [(1, s.BROKEN, 0, "node 0 was lost: killed")]
    script.ask(arrive(2, of), s.Reset(3, of), arrive(4, of), arrive(5, of))
    assert [said[:2] for said in script.said[1:]] == [(2, s.BROKEN), (3, s.OK), (5, s.OK), (4, s.OK)]
