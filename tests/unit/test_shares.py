"""The shares of a node's time in a profile: made of events as they may come, without processes."""

from __future__ import annotations

from types import CodeType

import pytest

from disttensor.runtime.master.looking_in import NodeEvent
from disttensor.seeing.recording import Loss, NodeRecord, ProfileRecord, Waited
from disttensor.seeing.shares import both, joined, lines_of, only, seconds, shares_of, table

WHOLE = (0.0, 10.0)


def event(kind: str, began: float, at: float, peer: int = 0, what: str = "aten::mm") -> NodeEvent:
    return NodeEvent(1, kind, at, began, "", 0, what, -1, peer, 0, False, None)


def record(
    *events: NodeEvent, waits: tuple[tuple[float, float], ...] = (), lost: float = 0.0, ahead: float = 0.0
) -> ProfileRecord:
    node = NodeRecord(1, "a", events=[*events], ahead=ahead, missing="")
    waited = [Waited(at, began, 0, 1, None, 1) for began, at in waits]
    losses = [Loss(lost, 1, "it was killed")] if lost else []
    return ProfileRecord(*WHOLE, 0, [], [], waited, [], losses, [], {1: node}, {}, {})


def done(began: float, at: float) -> NodeEvent:
    return event("done", began, at)


def came(began: float, at: float, peer: int = 0) -> NodeEvent:
    return event("received", began, at, peer)


#: (events, waits of the script) -> busy, waiting for the script, waiting for nodes, idle
CASES = {
    "nothing": (record(), (0, 10, 0, 0)),
    "commands, one in another": (record(done(1, 4), done(2, 3), done(5, 6)), (4, 6, 0, 0)),
    "the script waits meanwhile": (record(done(1, 4), waits=((3, 6), (8, 12))), (3, 3, 0, 4)),
    "a receive beside nothing": (record(done(1, 2), came(3, 7)), (1, 5, 4, 0)),
    "a receive beside a command, which does not need it": (record(done(1, 5), came(2, 7)), (4, 4, 2, 0)),
    "a command that needs it": (record(done(1, 8), came(0, 6)), (2, 2, 6, 0)),
    "a receive from the script": (record(done(1, 2), came(3, 7, peer=-1)), (1, 9, 0, 0)),
    "before and after": (record(done(-2, 1), done(9, 12)), (2, 8, 0, 0)),
    "a clock that is ahead": (record(done(3, 6), ahead=4.0), (2, 8, 0, 0)),
    "a loss": (record(done(1, 2), lost=4.0), (1, 3, 0, 0)),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_shares(name: str) -> None:
    it, expected = CASES[name]
    (found,) = shares_of(it)
    assert (found.busy, found.script, found.nodes, found.idle) == expected


def test_spans() -> None:
    assert joined([(3, 4), (1, 2), (2, 3), (6, 9), (7, 8), (5, 5)]) == [(1, 4), (6, 9)]
    assert both([(0, 4), (6, 9)], [(1, 2), (3, 7), (8, 20)]) == [(1, 2), (3, 4), (6, 7), (8, 9)]
    assert only([(0, 4), (6, 9)], [(1, 2), (3, 7), (8, 20)]) == [(0, 1), (2, 3), (7, 8)]
    assert seconds([(0, 1), (2, 4)]) == 3


def test_lines() -> None:
    """The costliest is first; a command that has waited for what came counts from then on."""

    def at(name: str) -> tuple[CodeType, int]:
        return compile("f()", name, "exec"), 2

    one, other = at("one.py"), at("other.py")
    events = [
        done(0, 9)._replace(site=one),
        came(0, 8),
        done(9, 10)._replace(site=one),
        done(10, 13)._replace(site=other),
    ]
    assert [(it.line, it.commands, it.seconds) for it in lines_of(record(*events))] == [
        ("other.py:1", 1, 3), ("one.py:1", 2, 2),
    ]  # fmt: skip


def test_a_table() -> None:
    it = record(done(1, 4), waits=((3, 6),))
    assert table(it).splitlines()[:4] == [
        "10.000 s in all",
        "",
        "node  host  busy          waiting for the script  waiting for nodes  idle",
        "1     a     3.000 s  30%  5.000 s  50%            0.000 s   0%       2.000 s  20%",
    ]
    it.nodes[1].missing = "it was killed"
    assert "not known: it was killed" in table(it)
