"""What a file of Chrome's Trace Event JSON has to be: as Perfetto documents what it reads, and torch writes it."""

from __future__ import annotations

import gzip
import json
import math
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

#: The keys that an event of each phase needs, beside ``ph``.
KEYS: dict[str, tuple[str, ...]] = {
    "X": ("name", "cat", "pid", "tid", "ts", "dur"),
    "b": ("name", "cat", "pid", "tid", "ts", "id"),
    "e": ("name", "cat", "pid", "tid", "ts", "id"),
    "s": ("name", "cat", "pid", "tid", "ts", "id"),
    "t": ("name", "cat", "pid", "tid", "ts", "id"),
    "f": ("name", "cat", "pid", "tid", "ts", "id", "bp"),
    "i": ("name", "cat", "pid", "tid", "ts", "s"),
    "C": ("name", "pid", "ts", "args"),
    "M": ("name", "pid", "args"),
}
#: Slices: (began, ended), in nanoseconds.
Slices = list[tuple[int, int]]


class Broken(Exception):
    """A file that is not such a trace, and why."""


def ns(us: float) -> int:
    """Whole nanoseconds."""
    return round(us * 1000)


def check_trace(trace: dict[str, Any]) -> None:
    """Raises Broken."""
    _check_head(trace)
    slices = defaultdict[tuple[int, int], Slices](list)
    for event in trace["traceEvents"]:
        _check_event(event)
        if event["ph"] == "X":
            slices[event["pid"], event["tid"]].append((ns(event["ts"]), ns(event["ts"]) + ns(event["dur"])))
    for thread, each in slices.items():
        _check_nesting(thread, each)
    _check_names(trace["traceEvents"])
    _check_flows(trace["traceEvents"], slices)
    _check_pairs(trace["traceEvents"])


def _check_head(trace: dict[str, Any]) -> None:
    if not isinstance(trace.get("traceEvents"), list):
        raise Broken("there are no traceEvents")
    if trace.get("displayTimeUnit") not in ("ms", "ns"):
        raise Broken("displayTimeUnit is ms or ns")
    if type(trace.get("baseTimeNanoseconds")) is not int:
        raise Broken("baseTimeNanoseconds is a whole number")
    if missing := {"rank", "world_size", "backend"} - {*trace.get("distributedInfo", ())}:
        raise Broken(f"distributedInfo lacks {sorted(missing)}")


def _check_event(event: dict[str, Any]) -> None:
    phase = event.get("ph")
    if phase not in KEYS:
        raise Broken(f"there is no phase {phase!r}")
    if missing := [key for key in KEYS[phase] if key not in event]:
        raise Broken(f"an event of phase {phase} lacks {missing[0]}: {event}")
    for key in ("ts", "dur"):
        value = event.get(key, 0)
        if type(value) not in (int, float) or not math.isfinite(value) or value < 0:
            raise Broken(f"{key} is {value!r}: {event}")
    for key in ("pid", "tid"):
        if type(event.get(key, 0)) is not int:
            raise Broken(f"{key} is not a whole number: {event}")
    if phase == "f" and event["bp"] != "e":
        raise Broken(f"an arrow that ends at the next slice: {event}")


def _check_nesting(thread: tuple[int, int], slices: Slices) -> None:
    ends: list[int] = []
    for began, ended in sorted(slices, key=lambda each: (each[0], -each[1])):
        while ends and ends[-1] <= began:
            ends.pop()
        if ends and ended > ends[-1]:
            raise Broken(f"slices of thread {thread} overlap at {began}")
        ends.append(ended)


def _check_names(events: Sequence[dict[str, Any]]) -> None:
    threads = {(each["pid"], each["tid"]) for each in events if each["ph"] == "M" and each["name"] == "thread_name"}
    processes = {each["pid"] for each in events if each["ph"] == "M" and each["name"] == "process_name"}
    for each in events:
        if each["ph"] == "X" and ((each["pid"], each["tid"]) not in threads or each["pid"] not in processes):
            raise Broken(f"its thread or process has no name: {each}")


def _check_flows(events: Sequence[dict[str, Any]], slices: dict[tuple[int, int], Slices]) -> None:
    flows = defaultdict[tuple[str, int, str], list[dict[str, Any]]](list)
    for event in events:
        if event["ph"] in "stf":
            flows[event["cat"], event["id"], event["name"]].append(event)
            at = ns(event["ts"])
            if not any(began <= at <= ended for began, ended in slices.get((event["pid"], event["tid"]), ())):
                raise Broken(f"an arrow meets no slice: {event}")
    for key, points in flows.items():
        phases = "".join(each["ph"] for each in points)
        if phases != f"s{'t' * (len(points) - 2)}f":
            raise Broken(f"arrow {key} has the points {phases}")
        times = [each["ts"] for each in points]
        if times != sorted(times):
            raise Broken(f"arrow {key} goes back in time")


def _check_pairs(events: Sequence[dict[str, Any]]) -> None:
    begun: dict[tuple[str, int], float] = {}
    for event in events:
        if event["ph"] in "be":
            key = event["cat"], event["id"]
            if event["ph"] == "b":
                if key in begun:
                    raise Broken(f"{key} begins twice")
                begun[key] = event["ts"]
            elif key not in begun:
                raise Broken(f"{key} ends and has not begun")
            elif event["ts"] < begun.pop(key):
                raise Broken(f"{key} ends before its begin")
    if begun:
        raise Broken(f"{next(iter(begun))} begins and does not end")


# ---- files -----------------------------------------------------------------------------------------------------------


def read(path: Path) -> dict[str, Any]:
    """The file, which is checked."""
    data = path.read_bytes()
    trace: dict[str, Any] = json.loads(gzip.decompress(data) if path.name.endswith(".gz") else data)
    check_trace(trace)
    return trace


def tracks(trace: dict[str, Any]) -> dict[str, set[str]]:
    """The threads of each process that have slices, by name."""
    named = [each for each in trace["traceEvents"] if each["ph"] == "M"]
    processes = {each["pid"]: each["args"]["name"] for each in named if each["name"] == "process_name"}
    found = {name: set[str]() for name in processes.values()}
    for each in named:
        if each["name"] == "thread_name":
            found[processes[each["pid"]]].add(each["args"]["name"])
    return found


def slices(trace: dict[str, Any], **wanted: Any) -> list[dict[str, Any]]:
    """The slices of which this is true."""
    return [each for each in trace["traceEvents"] if each["ph"] == "X" and wanted.items() <= each.items()]
