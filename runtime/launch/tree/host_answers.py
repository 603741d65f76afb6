"""The answers of an agent to `dtrun ps`, `status`, `stack`, `logs` and `kill` on its host (host_window.py).

It knows its nodes from outside, and nothing of the script but its name and its place: which operator a number stands
for, which line has issued it and what is behind, only the script knows. So an answer says where that is.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Collection
from typing import Any, assert_never

import msgspec

from ...host.job_sockets import (
    JobAnswer,
    JobRequest,
    JobSummary,
    Killed,
    OutputAnswer,
    OutputLine,
    ProcessStack,
    Refusal,
    StackAnswer,
    StatusAnswer,
)
from ...host.launcher import Sight
from ...host.sights import WAITS, hindered, in_order, threads_of
from ...process.page import COLLECTIVE, COMMANDS, FUNCTION, IDLE, NOBODY, RECEIVE, STREAMS, WORDS
from ...process.tables import columns, duration, size
from ...protocol.bundle import ScriptPlace
from .control import Kill
from .host_window import HostNode, HostWindow

#: Seconds in which the fork server looks at nodes; with their stacks.
SIGHTS, STACKS = 1.0, 3.0
#: What a node is at, after "running" or "waiting for node 1 in".
_WHAT = {COMMANDS: "operations", FUNCTION: "a function", COLLECTIVE: "a collective", STREAMS: "its streams"}
_HEAD = ("node", "state", "cpu", "rss", "peak")


class HostAnswers:
    """The answers for the nodes of one session on this host."""

    def __init__(self, window: HostWindow, script: ScriptPlace) -> None:
        self._window, self._script, self._began = window, script, time.monotonic()
        self._host = socket.gethostname()

    def __call__(self, request: JobRequest) -> JobAnswer:
        nodes = self._window.call(lambda: dict(sorted(self._window.nodes.items())))
        if wrong := [rank for rank in request.nodes if rank >= 0 and rank not in nodes]:
            here = ", ".join(map(str, nodes))
            return Refusal(f"node {wrong[0]} is not on this host, which has {here}; {self._there()}")
        match request.what:
            case "summary":
                return self._summary(nodes)
            case "status":
                return self._status(nodes)
            case "stack":
                return self._stack([nodes[rank] for rank in request.nodes or nodes if rank >= 0])
            case "output":
                return self._output(request.nodes or tuple(nodes), request.after)
            case "kill":
                return self._kill(request.nodes)
            case "trace" | "traced":
                return Refusal(self._there("trace"))
            case unknown:
                assert_never(unknown)

    def _there(self, command: str = "status") -> str:
        """Returns where there is more than here."""
        it = self._script
        return f"its script, {it.name}, runs on {it.host}: `dtrun {command} {it.pid}` there {_MORE[command]}"

    def _summary(self, nodes: dict[int, HostNode]) -> JobSummary:
        it = self._script
        state = f"its script runs on {it.host}, pid {it.pid}"
        seconds = time.monotonic() - self._began
        return JobSummary(os.getpid(), it.name, len(nodes), _lost(nodes), (self._host,), seconds, state)

    # ---- status ------------------------------------------------------------------------------------------------------

    def _status(self, nodes: dict[int, HostNode]) -> StatusAnswer:
        self._window.sights(nodes, False, SIGHTS)
        rows = [self._row(node) for node in nodes.values()]
        it = self._script
        script = {
            "name": it.name, "host": it.host, "pid": it.pid, "waits": [], "commands": None, "rss": None,
            "uploads": None, "fetches": None, "undertakings": [],
        }  # fmt: skip
        found = {"script": script, "nodes": rows, **{name: [] for name in _TABLES}}
        return StatusAnswer(
            msgspec.Raw(msgspec.json.encode(found)), self._text(rows), _lost(nodes), time.monotonic() - self._began
        )

    def _row(self, node: HostNode) -> dict[str, Any]:
        """Returns a node as ``seeing.NodeStatus`` has it, with None for what only the script knows."""
        sight, now = node.sight, time.monotonic()
        state, what, seconds, waits_for, note = _doing(node)
        return {
            "rank": node.rank, "host": self._host, "pid": node.pid, "devices": [], "state": state, "what": what,
            "line": "", "seconds": seconds, "waits_for": waits_for, "note": note, "behind": None, "tensors": None,
            "bytes": None, "rss": sight and sight.rss, "cpu": node.cpu, "age": sight and now - node.seen_at,
            "said": None, "oldest": None, "peak": None, "peak_rss": (sight and sight.peak) or None,
            "last_line": sight.last_line if sight else "", "gpus": [],
        }  # fmt: skip

    def _text(self, rows: list[dict[str, Any]]) -> str:
        cells = [_HEAD, *(
            (f"{it['rank']}", _phrase(it), "-" if it["cpu"] is None else f"{100 * it['cpu']:.0f}%", _size(it["rss"]),
             _size(it["peak_rss"])) for it in rows
        )]  # fmt: skip
        parts = [self._there(), columns(cells, [str.ljust, str.ljust, str.rjust, str.rjust, str.rjust])]
        if said := [(f"{it['rank']}", it["last_line"]) for it in rows if it["last_line"]]:
            parts.append(f"last lines of output\n{columns([('node', 'line'), *said])}")
        return "\n\n".join(parts)

    # ---- stacks, output, the end -------------------------------------------------------------------------------------

    def _stack(self, nodes: Collection[HostNode]) -> StackAnswer:
        found = self._window.sights([node.rank for node in nodes], True, STACKS)
        processes = []
        for node in nodes:
            title = f"node {node.rank} on {self._host}, pid {node.pid}: {_phrase(self._row(node))}"
            sight = found.get(node.rank)
            if sight is not None:
                text = _stacks(sight)
            else:
                text = "" if node.ended is not None else f"its fork server has not seen it within {STACKS:g} s"
            processes.append(ProcessStack(node.rank, self._host, node.pid, True, title, text))
        return StackAnswer(tuple(processes))

    def _output(self, ranks: Collection[int], after: int) -> OutputAnswer:
        lines, more = self._window.call(lambda: self._window.kept.after(after, ranks))
        return OutputAnswer(tuple(OutputLine(*line) for line in lines), more)

    def _kill(self, ranks: tuple[int, ...]) -> JobAnswer:
        if not ranks:
            return Refusal(self._there("kill"))
        if ended := self._window.call(lambda: [rank for rank in ranks if self._window.running(rank) is None]):
            return Refusal(f"node {ended[0]} has ended already")
        self._window.call(lambda: [self._window.send_order(Kill(rank, signal.SIGKILL)) for rank in ranks])
        which = ", ".join(map(str, ranks))
        print(f"disttensor: `dtrun kill` on {self._host} has killed node {which}", file=sys.stderr, flush=True)
        return Killed(ranks)


#: What a command does on the script's host that it can't do here.
_MORE = {"status": "has more", "trace": "records the job", "kill": "ends the job, and here -n a node"}
#: Parts of a status that only the script has.
_TABLES = ("meshes", "transfers", "compiles", "queues", "actors", "lines", "copies", "slow", "coordinates")


def _lost(nodes: dict[int, HostNode]) -> int:
    return sum(node.ended is not None for node in nodes.values())


def _doing(node: HostNode) -> tuple[str, str, float, int | None, str]:
    """Returns the state of a node, what it is at, for how long, the node that it waits for, and a note."""
    sight = node.sight
    if node.ended is not None:
        return "lost", "", 0.0, None, node.ended
    if sight is None:
        return ("unseen" if node.pid else "starting"), "", 0.0, None, ""
    kind, seconds, beside = sight.kind, sight.seconds, len(sight.beside)
    if beside and kind in WAITS:  # as the script has it (runtime/master/doing.py)
        kind, seconds, beside = FUNCTION, sight.beside[0].seconds, beside - 1
    waits_for = sight.peer if kind in (COLLECTIVE, RECEIVE) and sight.peer != NOBODY else None
    state = "idle" if kind == IDLE else "waiting" if waits_for is not None or kind == RECEIVE else "running"
    state, note = hindered(sight, node.pid, state, seconds)
    if beside:
        note = "; ".join(filter(None, (note, f"and {beside} functions beside")))
    return state, _WHAT.get(kind, ""), seconds, waits_for, note


def _phrase(row: dict[str, Any]) -> str:
    """Returns what a node is at, in words."""
    text, what, peer = row["state"], row["what"], row["waits_for"]
    if peer is not None:
        text += f" for node {peer}" if peer >= 0 else " for the script"
    if what:
        text += f" {what}" if row["state"] == "running" else f" in {what}"
    if row["seconds"] >= 1:
        text += f" {duration(row['seconds'])}"
    return f"{text}: {row['note']}" if row["note"] else text


def _stacks(sight: Sight) -> str:
    beside = {each.thread: each.seconds for each in sight.beside}
    found = []
    for it in threads_of(sight.stack):
        if it.thread in beside:
            found.append((it, f" {WORDS[FUNCTION]}, for {beside[it.thread]:.1f} s", True))
        elif it.takes_commands:
            works = sight.kind not in WAITS
            found.append((it, f" {WORDS[sight.kind]}" + (f", for {sight.seconds:.1f} s" if works else ""), works))
        else:
            found.append((it, "", False))
    return in_order(found)


def _size(count: int | None) -> str:
    return "-" if count is None else size(count)
