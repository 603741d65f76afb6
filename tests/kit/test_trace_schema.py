"""The checker of traces refuses what Perfetto could not read, or would draw wrongly."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
from trace_schema import Broken, check_trace

Trace = dict[str, Any]
AT = {"cat": "c", "pid": 1, "tid": 1}
FLOW = {"name": "arrow", "id": 7, "cat": "c", "tid": 1}
GOOD: Trace = {
    "displayTimeUnit": "ms",
    "baseTimeNanoseconds": 0,
    "distributedInfo": {"rank": 0, "world_size": 1, "backend": "tcp"},
    "traceEvents": [
        {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "script"}},
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": 1, "args": {"name": "issue"}},
        {"ph": "X", "name": "outer", **AT, "ts": 1.0, "dur": 9.0},
        {"ph": "X", "name": "inner", **AT, "ts": 1.0, "dur": 2.5},
        {"ph": "X", "name": "mark", **AT, "ts": 10.0, "dur": 0},
        {"ph": "b", "name": "pair", **AT, "id": 3, "ts": 2.0},
        {"ph": "e", "name": "pair", **AT, "id": 3, "ts": 2.0},
        {"ph": "s", **FLOW, "pid": 1, "ts": 1.0},
        {"ph": "t", **FLOW, "pid": 1, "ts": 3.0},
        {"ph": "f", **FLOW, "pid": 1, "ts": 10.0, "bp": "e"},
    ],
}  # fmt: skip
OUTER, INNER, BEGIN, END, START, STEP, FINISH = 2, 3, 5, 6, 7, 8, 9


def without(event: int, key: str) -> Callable[[Trace], object]:
    return lambda trace: trace["traceEvents"][event].pop(key)


def having(event: int, **changes: Any) -> Callable[[Trace], object]:
    return lambda trace: trace["traceEvents"][event].update(changes)


def lacking(event: int) -> Callable[[Trace], object]:
    return lambda trace: trace["traceEvents"].pop(event)


BROKEN: dict[str, tuple[Callable[[Trace], object], str]] = {
    "a slice without a length": (without(OUTER, "dur"), "lacks dur"),
    "a slice of less than nothing": (having(INNER, dur=-1), "dur is -1"),
    "a time that is none": (having(INNER, ts=float("nan")), "ts is nan"),
    "an unknown phase": (having(INNER, ph="Q"), "no phase 'Q'"),
    "slices that overlap": (having(INNER, ts=2.0, dur=9.0), "overlap at 2000"),
    "an arrow that begins nowhere": (lacking(START), "has the points tf"),
    "an arrow that does not end": (lacking(FINISH), "has the points st"),
    "an arrow that meets nothing": (having(STEP, ts=11.0), "meets no slice"),
    "an arrow that goes back": (having(START, ts=4.0), "goes back in time"),
    "an arrow that ends at what comes next": (without(FINISH, "bp"), "lacks bp"),
    "a pair without an end": (lacking(END), "does not end"),
    "a pair without a begin": (lacking(BEGIN), "has not begun"),
    "a pair that ends before its begin": (having(END, ts=1.0), "before its begin"),
    "a thread without a name": (lacking(1), "has no name"),
    "a file of no job": (lambda trace: trace["distributedInfo"].pop("world_size"), "lacks .*world_size"),
    "a file without a time": (lambda trace: trace.pop("baseTimeNanoseconds"), "baseTimeNanoseconds"),
}


def test_a_good_file_is_taken() -> None:
    check_trace(GOOD)


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_refused(name: str) -> None:
    breaks, why = BROKEN[name]
    trace = copy.deepcopy(GOOD)
    breaks(trace)
    with pytest.raises(Broken, match=why):
        check_trace(trace)
