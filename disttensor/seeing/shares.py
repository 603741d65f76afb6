"""Finds what each node was at, in shares of a profile's time, and the lines of the script that cost nodes most.

busy                    in a command, and not waiting in it
waiting for nodes       a receive from a node was under way, and no command; or a command went on at the receive's end
idle                    none of these, while the script waited for some node
waiting for the script  none of these, while it did not
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from ..runtime.master.failures import Site, expression
from ..runtime.process import tables
from .recording import LineNames, NodeRecord, ProfileRecord

#: The most lines of a table.
MOST = 10

#: Spans of time, in order, which do not meet.
Spans = list[tuple[float, float]]


class NodeShares(NamedTuple):
    """The seconds of a node's in a profile, all of which are one of these."""

    rank: int
    host: str
    busy: float
    script: float  #: waiting for the script
    nodes: float  #: waiting for nodes
    idle: float
    missing: str  #: why nothing is known of it; "" where something is


class NodeSpans(NamedTuple):
    """When a node was at each of these, in a profile."""

    busy: Spans
    script: Spans  #: waiting for the script
    nodes: Spans  #: waiting for nodes
    idle: Spans


class LineTime(NamedTuple):
    """The time that nodes have spent with the commands of a line."""

    line: str
    code: str
    commands: int
    seconds: float  #: of all nodes, without those in which they were held by what had to arrive


def joined(spans: Iterable[tuple[float, float]]) -> Spans:
    """Returns spans of time in order, those that meet as one."""
    found: Spans = []
    for began, ended in sorted(spans):
        if found and began <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], ended)
        elif ended > began:
            found.append((began, ended))
    return found


def both(one: Spans, other: Spans) -> Spans:
    """Returns when both are."""
    found: Spans = []
    at = 0
    for began, ended in one:
        while at < len(other) and other[at][1] <= began:
            at += 1
        for first, last in _until(other, at, ended):
            found.append((max(began, first), min(ended, last)))
    return found


def only(one: Spans, other: Spans) -> Spans:
    """Returns when the first is, and the other is not."""
    found: Spans = []
    at = 0
    for began, ended in one:
        while at < len(other) and other[at][1] <= began:
            at += 1
        for first, last in _until(other, at, ended):
            if first > began:
                found.append((began, first))
            began = last
        if ended > began:
            found.append((began, ended))
    return found


def _until(spans: Spans, at: int, ended: float) -> Iterator[tuple[float, float]]:
    """Yields the spans from place ``at`` on that have begun by then. (A slice would copy all the others, each time.)"""
    while at < len(spans) and spans[at][0] < ended:
        yield spans[at]
        at += 1


def seconds(spans: Spans) -> float:
    """Returns how long they are together."""
    return sum(ended - began for began, ended in spans)


def shares_of(record: ProfileRecord) -> list[NodeShares]:
    """Returns what each node was at."""
    waits = script_waits(record)
    return [_shares(node, spans_of(record, node, waits)) for _, node in sorted(record.nodes.items())]


def script_waits(record: ProfileRecord) -> Spans:
    """Returns when the script waited for some node."""
    return joined((wait.began, wait.at) for wait in record.waits)


def _shares(node: NodeRecord, spans: NodeSpans) -> NodeShares:
    busy, script, nodes, idle = map(seconds, spans)
    return NodeShares(node.rank, node.host, busy, script, nodes, idle, node.missing)


def spans_of(record: ProfileRecord, node: NodeRecord, waits: Spans) -> NodeSpans:
    """Returns when a node was at what; nothing where it has not said so. ``waits``: when the script waited."""
    if node.missing:
        return NodeSpans([], [], [], [])
    lost = [loss.at for loss in record.losses if loss.node == node.rank]
    whole = [(record.began, min([record.ended, *lost]))]
    commands, receives = [], []
    for event in node.events:
        span = event.began - node.ahead, event.at - node.ahead
        if event.kind == "done":
            commands.append(span)
        elif event.kind == "received" and event.peer >= 0:
            receives.append(span)
    in_commands, receiving = joined(commands), joined(receives)
    held = _held_spans(commands, receives)
    nodes = both(joined([*only(receiving, in_commands), *held]), whole)
    busy = only(both(in_commands, whole), nodes)
    rest = only(only(whole, nodes), busy)
    idle = both(rest, waits)
    return NodeSpans(busy, only(rest, idle), nodes, idle)


def _held_spans(commands: Sequence[tuple[float, float]], receives: Sequence[tuple[float, float]]) -> Spans:
    """Returns when commands were held by receives that ended in them: up to that end."""
    ends = sorted(ended for _, ended in receives)
    return joined((began, _held_until(ends, began, ended)) for began, ended in commands)


def _held_until(ends: Sequence[float], began: float, ended: float) -> float:
    """Returns until when a command was held. ``ends``: those of receives from nodes, in order."""
    last = bisect_right(ends, ended) - 1
    return max(began, ends[last]) if last >= 0 else began


def lines_of(record: ProfileRecord, most: int = MOST) -> list[LineTime]:
    """Returns the lines whose commands nodes have spent most time with, ``most`` at most, the costliest first."""
    sites, names = dict[str, Site](), LineNames()
    counts, sums = defaultdict[str, int](int), defaultdict[str, float](float)
    for node in record.nodes.values():
        ends = sorted(event.at for event in node.events if event.kind == "received" and event.peer >= 0)
        for event in node.events:
            if event.kind == "done" and event.site is not None:
                line = names.of(event.site)
                sites.setdefault(line, event.site)
                counts[line] += 1
                sums[line] += event.at - _held_until(ends, event.began, event.at)
    costliest = sorted(sums, key=lambda line: -sums[line])[:most]
    return [LineTime(line, expression(sites[line]), counts[line], sums[line]) for line in costliest]


def table(record: ProfileRecord) -> str:
    """Returns both as tables."""
    whole = record.ended - record.began
    rows: list[tuple[str, ...]] = [("node", "host", "busy", "waiting for the script", "waiting for nodes", "idle")]
    for it in shares_of(record):
        if it.missing:
            rows.append((f"{it.rank}", it.host, f"not known: {it.missing}", "", "", ""))
        else:
            figures = (it.busy, it.script, it.nodes, it.idle)
            rows.append((f"{it.rank}", it.host, *(f"{each:.3f} s {_percent(each, whole)}" for each in figures)))
    lines = [("line", "code", "commands", "node time")]
    lines += [(it.line, it.code, f"{it.commands:,}", f"{it.seconds:.3f} s") for it in lines_of(record)]
    nodes, costliest = tables.columns(rows), tables.columns(lines)
    return f"{whole:.3f} s in all\n\n{nodes}\n\nlines of the script by the time of nodes\n{costliest}"


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:3.0f}%" if whole > 0 else "  0%"
