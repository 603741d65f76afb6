"""A record as Chrome's Trace Event JSON, which Perfetto, chrome://tracing and TensorBoard open.

    process "script"            threads issue, waits, uploads, downloads
    process "node 1 (host, cpu)"  threads default stream, each other stream, send, receive, functions, and those that
                                  torch's profiler has seen there (torch_trace.py)

The slices of a thread nest: one that would overlap another is an asynchronous pair (b, e) with a mark of no length,
at which its arrow ends. All times are by the script's clock, in microseconds since the first event.
"""

from __future__ import annotations

import gzip
import json
import os
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import msgspec

from ..runtime.channel.base import MASTER
from ..runtime.master.failures import Site
from ..runtime.master.looking_in import COMMANDS, ROOM, NodeEvent
from ..runtime.protocol import codec
from ..runtime.protocol import commands as c
from .arrows import Arrow, Arrows, At, PointOf, plain_number
from .recording import LineNames, NodeRecord, ProfileRecord
from .timed_commands import IssuedCommand
from .torch_trace import TorchTrace

#: Seconds between two commands of a line from which on they are two slices.
GAP = 1e-3
#: The version of torch's format, and what it calls operators, and parts of a program that have names.
SCHEMA, COMMAND, REGION = 1, "cpu_op", "user_annotation"

#: The names of a node's threads for streams that no line has made.
_STREAMS = {"": "default stream", "default": "default stream (beside others)"}
#: The threads that come first, in order.
_ORDER = ("issue", "waits", "uploads", "downloads", "default stream", "default stream (beside others)")


@dataclass
class Slice:
    """Something that lasts, on one thread of the timeline. Times are nanoseconds since the first event."""

    process: int
    thread: str
    name: str
    began: int
    ended: int
    args: dict[str, Any] = field(default_factory=dict)
    category: str = COMMAND
    at_end: bool = False  #: whether an arrow meets it at its end

    @property
    def point(self) -> int:
        """The moment at which an arrow meets it."""
        return self.ended if self.at_end else self.began


class ChromeTrace:
    """The events of a record, as JSON has them."""

    def __init__(self, record: ProfileRecord, torch_traces: Sequence[TorchTrace] = ()) -> None:
        """``torch_traces``: those of the record's nodes, if torch's profiler was on there."""
        self._record, self._torch_traces = record, [it for it in torch_traces if it.rank in record.nodes]
        self._arrows = Arrows(record)
        self._lines = LineNames()
        self._first = self._first_moment()
        self._slices: list[Slice] = []
        #: the slices by what arrows name
        self._at: dict[tuple[At, int, int], Slice] = {}
        self._issue_points: dict[int, int] = {}  #: by index of its event: when a command was issued
        self._threads: dict[tuple[int, str], int] = {}
        self._pairs = count(1)

    def to_dict(self, world: int, backend: str, more: dict[str, Any]) -> dict[str, Any]:
        """Returns the file's content. ``world``: the number of nodes; ``backend``: their data channel; ``more``: what
        else its metadata is to have."""
        self._lay_script()
        for node in self._record.nodes.values():
            self._lay_node(node)
        for trace in self._torch_traces:
            self._lay_torch(trace)
        events = [*self._slice_events(), *self._arrow_events(), *self._loss_events()]
        for trace in self._torch_traces:
            events += self._torch_events(trace)
        return {
            "schemaVersion": SCHEMA,
            "displayTimeUnit": "ms",
            "baseTimeNanoseconds": self._record.wall - round((self._record.began - self._first) * 1e9),
            "distributedInfo": {"rank": 0, "world_size": world, "backend": backend},
            "disttensor": {**self._metadata(), **more},
            "traceEvents": [*self._names(), *sorted(events, key=lambda each: (each["ts"], -each.get("dur", 0)))],
        }

    def _metadata(self) -> dict[str, Any]:
        record = self._record
        nodes: dict[str, dict[str, Any]] = {
            str(rank): {
                "events": len(node.events),
                "dropped": node.dropped,
                "clock": "the script's" if node.shares_clock else "measured",
                "clock_ahead_s": node.ahead,
                "clock_within_s": node.within if node.within < float("inf") else None,
                "missing": node.missing,
            }
            for rank, node in record.nodes.items()
        }
        for trace in self._torch_traces:
            nodes[str(trace.rank)]["torch"] = {"events": len(trace.events), "missing": trace.missing}
        return {"room": ROOM, "commands": COMMANDS, "dropped": record.dropped, "nodes": nodes}

    # ---- moments -----------------------------------------------------------------------------------------------------

    def _first_moment(self) -> float:
        moments = [self._record.began]
        moments += [wait.began for wait in self._record.waits]
        moments += [move.began for move in self._record.transfers]
        moments += [part.began for part in self._record.regions]
        moments += [each.began - node.ahead for node in self._record.nodes.values() for each in node.events]
        for trace in self._torch_traces:
            moments += [self._torch_at(trace, each.begin_ns) for each in trace.events if each.ph != "M"]
        return min(moments)

    def _moment(self, at: float) -> int:
        return round((at - self._first) * 1e9)

    # ---- the script --------------------------------------------------------------------------------------------------

    def _thread(self, name: str, thread: int) -> str:
        its = self._record.threads.get(thread, f"thread {thread}")
        return f"{name} ({its})" if its else name

    def _lay_script(self) -> None:
        bounds = self._lay_regions()
        self._lay_lines(bounds)
        for index, wait in enumerate(self._record.waits):
            thread, began, ended = self._thread("waits", wait.thread), self._moment(wait.began), self._moment(wait.at)
            args: dict[str, Any] = {"line": self._lines.of(wait.site)}
            it = Slice(MASTER, thread, f"wait for node {wait.node}", began, ended, args, "wait", at_end=True)
            self._add(("wait", MASTER, index), it)
        for index, move in enumerate(self._record.transfers):
            peer = f"node {move.peer}" if move.peer >= 0 else "nodes"
            args = {"bytes": move.bytes, "channel": move.channel, "use": move.use, "transfer": str(move.transfer)}
            thread, name = ("uploads", f"to {peer}") if move.sent else ("downloads", f"from {peer}")
            began, ended = self._moment(move.began), self._moment(move.at)
            it = Slice(MASTER, thread, name, began, ended, args, "transfer", at_end=not move.sent)
            self._add(("sent" if move.sent else "received", MASTER, index), it)

    def _lay_regions(self) -> dict[int, list[float]]:
        """Lays the parts of the script that have names. Returns when they begin and end, in order, by thread."""
        bounds = defaultdict[int, list[float]](list)
        for part in self._record.regions:
            thread = self._thread("issue", part.thread)
            self._add(
                None, Slice(MASTER, thread, part.name, self._moment(part.began), self._moment(part.at), {}, REGION)
            )
            bounds[part.thread] += [part.began, part.at]
        for moments in bounds.values():
            moments.sort()
        return bounds

    def _lay_lines(self, bounds: dict[int, list[float]]) -> None:
        """Lays what lines have issued: commands of one line that follow each other are a slice, which is in no two
        parts that have names."""
        runs: dict[int, tuple[Slice, IssuedCommand]] = {}
        for index, it in enumerate(self._record.issued):
            at = self._issue_points[index] = self._moment(it.at)
            run, last = runs.get(it.thread, (None, it))
            parts = bounds.get(it.thread, [])
            beyond = bisect_left(parts, last.at) != bisect_left(parts, it.at)
            if run is None or last.site != it.site or it.at - last.at > GAP or beyond:
                name = self._lines.of(it.site) or "no line of the script"
                run = Slice(
                    MASTER, self._thread("issue", it.thread), name, at, at, {"commands": 0, "nodes": []}, "issue"
                )
                self._slices.append(run)
            runs[it.thread] = run, it
            run.args["commands"] += 1
            run.args["nodes"] = sorted({*run.args["nodes"], *it.nodes})
            run.ended = max(run.ended, at)
            self._at["issued", MASTER, index] = run

    def _add(self, key: tuple[At, int, int] | None, it: Slice) -> None:
        it.ended = max(it.began, it.ended)
        self._slices.append(it)
        if key is not None:
            self._at[key] = it

    # ---- nodes -------------------------------------------------------------------------------------------------------

    def _lay_node(self, node: NodeRecord) -> None:
        last = self._record.last.get(node.rank)
        begun: dict[tuple[str, int], NodeEvent] = {}
        replays = defaultdict[str, int](int)
        for index, event in enumerate(node.events):
            number = plain_number(event.number)
            if last is not None and number >= last:
                continue  # of what was issued after the end
            began, ended = self._moment(event.began - node.ahead), self._moment(event.at - node.ahead)
            args: dict[str, Any] = {"number": number} if number >= 0 else {}
            if event.failed:
                args["failed"] = True
            thread = _STREAMS.get(event.stream) or _stream(event.stream)
            match event.kind:
                case "begun":
                    begun[event.stream, number] = event
                case "done":
                    begun.pop((event.stream, number), None)
                    args |= self._args_of(node.rank, number, event.site)
                    self._add(("command", node.rank, index), Slice(node.rank, thread, event.what, began, ended, args))
                case "collective":
                    args |= {"bytes": event.bytes}
                    self._add(None, Slice(node.rank, thread, event.what, began, ended, args, "collective"))
                case "graph":
                    replays[event.what] += 1
                    args |= {"graph": int(event.what), "replay": replays[event.what]}
                    name = f"graph {event.what}"
                    self._add(None, Slice(node.rank, thread, name, began, ended, args, "graph"))
                case "function":
                    self._add(None, Slice(node.rank, "functions", event.what, began, ended, args, "function"))
                case "sent" | "received":
                    self._lay_transfer(node.rank, index, event, began, ended, args)
        end = self._moment(self._end_of(node.rank))
        for (stream, number), event in begun.items():
            began = self._moment(event.began - node.ahead)
            args = {"number": number, "unfinished": True} | self._args_of(node.rank, number, event.site)
            thread = _STREAMS.get(stream) or _stream(stream)
            self._add(None, Slice(node.rank, thread, event.what, began, max(began, end), args))

    def _lay_transfer(
        self, rank: int, index: int, event: NodeEvent, began: int, ended: int, args: dict[str, Any]
    ) -> None:
        peer = {MASTER: "the script"}.get(event.peer, f"node {event.peer}" if event.peer >= 0 else "the group")
        sent = event.kind == "sent"
        channel, _, use = event.what.partition(" ")
        args |= {"bytes": event.bytes, "channel": channel, "use": use, "transfer": str(event.transfer)}
        thread, name = ("send", f"to {peer}") if sent else ("receive", f"from {peer}")
        it = Slice(rank, thread, name, began, ended, args, "transfer", at_end=not sent)
        self._add(("sent" if sent else "received", rank, index), it)

    def _end_of(self, rank: int) -> float:
        """Returns when nothing more is known of a node: at its loss, else at the end of the record."""
        return next((loss.at for loss in self._record.losses if loss.node == rank), self._record.ended)

    def _args_of(self, rank: int, number: int, site: Site | None) -> dict[str, Any]:
        """Returns what is known of a command without asking its node."""
        known = self._arrows.commands.get((rank, number))
        found: dict[str, Any] = {"line": self._lines.of(site)} if site is not None else {}
        if known is None:
            return found
        match known.command:
            case c.Recv(shape=shape, dtype=dtype) | c.Upload(shape=shape, dtype=dtype):
                found |= {"shape": list(shape), "dtype": _dtype(dtype)}
            case c.Collective(kind=kind, lengths=lengths, dtype=dtype):
                found |= {"kind": kind, "elements": list(lengths), "dtype": _dtype(dtype)}
            case c.Replay(graph=graph):
                found |= {"graph": graph}
            case c.Run(what=what):
                found |= {"function": what}
        return found

    # ---- torch's profiler --------------------------------------------------------------------------------------------

    def _torch_at(self, trace: TorchTrace, ns: int) -> float:
        return trace.at(ns) - self._record.nodes[trace.rank].ahead

    def _torch_moment(self, trace: TorchTrace, ns: int) -> int:
        return self._moment(self._torch_at(trace, ns))

    def _lay_torch(self, trace: TorchTrace) -> None:
        places = trace.places()
        for event in trace.slices():
            began, ended = self._torch_moment(trace, event.begin_ns), self._torch_moment(trace, event.end_ns)
            thread, args = places[event.pid, event.tid], trace.args(event)
            self._add(None, Slice(trace.rank, thread, event.name, began, ended, args, event.cat or COMMAND))

    def _torch_events(self, trace: TorchTrace) -> Iterator[dict[str, Any]]:
        """Yields arrows, instants and counters: all events except slices."""
        places = trace.places()
        for event in trace.without_length():
            thread = places[event.pid, event.tid]
            yield {
                "ph": event.ph, "name": event.name, "cat": event.cat, "pid": pid_of(trace.rank),
                "tid": self._tid(trace.rank, thread), "ts": _us(self._torch_moment(trace, event.begin_ns)),
                **trace.more(event),
            }  # fmt: skip

    # ---- events ------------------------------------------------------------------------------------------------------

    def _tid(self, process: int, thread: str) -> int:
        return self._threads.setdefault((process, thread), len(self._threads) + 1)

    def _slice_events(self) -> Iterator[dict[str, Any]]:
        threads = defaultdict[tuple[int, str], list[Slice]](list)
        for it in self._slices:
            threads[it.process, it.thread].append(it)
        for (process, thread), slices in threads.items():
            where = {"pid": pid_of(process), "tid": self._tid(process, thread)}
            ends: list[int] = []  # of the slices in which the next one may be
            for it in sorted(slices, key=lambda each: (each.began, -each.ended)):
                while ends and ends[-1] <= it.began:
                    ends.pop()
                what = {"name": it.name, "cat": it.category, **where}
                if not ends or it.ended <= ends[-1]:
                    ends.append(it.ended)
                    yield {"ph": "X", **what, "ts": _us(it.began), "dur": _us(it.ended - it.began), "args": it.args}
                else:
                    pair = {**what, "id": next(self._pairs)}
                    yield {"ph": "b", **pair, "ts": _us(it.began), "args": it.args}
                    yield {"ph": "e", **pair, "ts": _us(it.ended)}
                    yield {"ph": "X", **what, "ts": _us(it.point), "dur": 0, "args": it.args}

    def _arrow_events(self) -> Iterator[dict[str, Any]]:
        for arrow in self._arrows.found():
            met = sorted(self._met_by(arrow), key=lambda each: each[0])
            for place, (at, it) in enumerate(met if len(met) > 1 else ()):
                phase = "s" if not place else "f" if place == len(met) - 1 else "t"
                yield {
                    "ph": phase, "id": arrow.id, "cat": f"arrow of a {arrow.of}", "name": arrow.of,
                    "pid": pid_of(it.process), "tid": self._tid(it.process, it.thread), "ts": _us(at),
                    **({"bp": "e"} if phase == "f" else {}),
                }  # fmt: skip

    def _met_by(self, arrow: Arrow) -> Iterator[tuple[int, Slice]]:
        for point in arrow.points:
            it = self._at.get((point.at, point.end, point.place))
            if it is not None:
                yield self._when(point, it), it

    def _when(self, point: PointOf, it: Slice) -> int:
        return self._issue_points[point.place] if point.at == "issued" else it.point

    def _loss_events(self) -> Iterator[dict[str, Any]]:
        for loss in self._record.losses:
            yield {
                "ph": "i", "s": "g", "name": f"node {loss.node} is lost", "cat": "loss", "pid": pid_of(loss.node),
                "tid": self._tid(loss.node, _STREAMS[""]), "ts": _us(self._moment(loss.at)), "args": {"why": loss.why},
            }  # fmt: skip

    def _names(self) -> Iterator[dict[str, Any]]:
        """Yields the names of processes and threads, which stand where they are to be seen. Comes after all else."""
        nodes = self._record.nodes
        processes = {MASTER, *nodes, *(process for process, _ in self._threads)}
        for process in sorted(processes):
            name = "script"
            if process != MASTER:
                it = nodes.get(process)
                name = f"node {process} ({it.host}, {it.device})" if it is not None else f"node {process}"
            for what, args in (("process_name", {"name": name}), ("process_sort_index", {"sort_index": process + 1})):
                yield {"ph": "M", "name": what, "pid": pid_of(process), "tid": 0, "ts": 0, "args": args}
        for place, (process, thread) in enumerate(sorted(self._threads, key=_place_of)):
            where = {"pid": pid_of(process), "tid": self._tid(process, thread), "ts": 0}
            yield {"ph": "M", "name": "thread_name", **where, "args": {"name": thread}}
            yield {"ph": "M", "name": "thread_sort_index", **where, "args": {"sort_index": place}}


def _place_of(track: tuple[int, str]) -> tuple[int, int, str]:
    """Returns what threads are shown by, in order."""
    process, thread = track
    return process, _ORDER.index(thread) if thread in _ORDER else len(_ORDER), thread


def pid_of(process: int) -> int:
    """Returns the number that a process has in the file: 1 is the script, 2 node 0. Real ones of two hosts may be the
    same."""
    return process + 2


def _stream(name: str) -> str:
    if name.startswith("to-"):
        return "sends to the script" if name == f"to-{MASTER}" else f"sends to node {name[3:]}"
    return f"stream {name}" if name.isdecimal() else name


def _dtype(number: int) -> str:
    return str(codec.dtype_of(number)).removeprefix("torch.")


def _us(ns: int) -> float:
    return ns / 1000


def encode(content: dict[str, Any], path: str) -> bytes:
    """Returns the bytes of a file of this name: with ``.gz`` at its end they are compressed."""
    head = json.dumps({key: value for key, value in content.items() if key != "traceEvents"})
    # The head has blanks: HTA looks for `"rank": 0` in the text.
    data = head[:-1].encode() + b', "traceEvents": ' + msgspec.json.encode(content["traceEvents"]) + b"}"
    return gzip.compress(data, 6) if path.endswith(".gz") else data


def write(data: bytes, path: str, begins: bool = False) -> None:
    """Writes a file whole: it takes the place of an older one when all is there. ``begins``: tries whether it can."""
    part = f"{path}.part"
    with open(part, "wb") as file:
        file.write(data)
    if begins:
        os.unlink(part)
    else:
        os.replace(part, path)
