"""The answers to programs of this user that ask the script how it is: `dtrun ps`, `status`, `stack` and their like.

They come at a socket of this host (runtime/host/job_window.py), in a thread of the script's of their own.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from typing import Any, assert_never

import msgspec

from ..runtime.host.job_sockets import (
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
    TraceAnswer,
    TraceBegun,
)
from ..runtime.master.node import Node
from ..session.session import Session
from .asked_trace import LONGEST, AskedTrace
from .flight import await_records, lines_of, recall, record_of
from .reading import status
from .stacks import node_stacks, script_stack
from .status import JobStatus, NodeStatus, ScriptStatus, of, phrase

#: Seconds that an answer waits for nodes to describe themselves; for what the launcher keeps of their output; and for
#: their flight records.
NODES, OUTPUT, RECORDS = 0.3, 3.0, 1.0
#: The rank by which the script is meant.
SCRIPT = -1


class JobAnswers:
    """The answers of one session."""

    def __init__(self, session: Session, began: float) -> None:
        """``began``: when the session did, by time.monotonic."""
        self._session, self._began = session, began
        self._trace: AskedTrace | None = None
        self._traces = 0

    def __call__(self, request: JobRequest) -> JobAnswer:
        count = len(self._session.nodes)
        if wrong := [rank for rank in request.nodes if not SCRIPT <= rank < count]:
            return Refusal(f"node {wrong[0]} does not exist: there are 0 to {count - 1}")
        match request.what:
            case "summary":
                return self._summary()
            case "status":
                return self._status()
            case "stack":
                return self._stack(request)
            case "output":
                return self._output(request)
            case "kill":
                return self._kill(request)
            case "trace":
                return self._begin_trace(request.seconds, request.page)
            case "traced":
                return self._end_trace(request.after)
            case unknown:
                assert_never(unknown)

    @property
    def _seconds(self) -> float:
        return time.monotonic() - self._began

    def _summary(self) -> JobSummary:
        it = status(timeout=0)
        hosts = tuple(dict.fromkeys(node.host for node in it.nodes if node.host))
        return JobSummary(
            it.script.pid, it.script.name, len(it.nodes), _lost(it), hosts, self._seconds, _state(it.script)
        )

    def _status(self) -> StatusAnswer:
        it = status(timeout=NODES)
        return StatusAnswer(msgspec.Raw(msgspec.json.encode(it.to_dict())), repr(it), _lost(it), self._seconds)

    def _stack(self, request: JobRequest) -> StackAnswer:
        session = self._session
        ranks = request.nodes or (SCRIPT, *range(len(session.nodes)))
        nodes = [session.nodes[rank] for rank in ranks if rank != SCRIPT]
        texts = node_stacks(session, nodes) if nodes else {}
        record = self._record(nodes) if nodes else {"nodes": []}
        lines = {it["rank"]: lines_of(it, time.time()) for it in record["nodes"]}
        it, here = status(timeout=0), socket.gethostname()
        rows = {row.rank: row for row in it.nodes}
        found = []
        for rank in ranks:
            if rank == SCRIPT:
                title = f"the script, {it.script.name}, pid {it.script.pid}: {_state(it.script)}"
                found.append(ProcessStack(rank, here, it.script.pid, True, title, script_stack()))
            else:
                row = rows[rank]
                it_is_here, last = row.host == here, lines.get(rank, "")
                found.append(ProcessStack(rank, row.host, row.pid, it_is_here, _title(row), texts[rank], last))
        whole = msgspec.json.encode(record) if request.record else b"null"
        return StackAnswer(tuple(found), msgspec.Raw(whole))

    def _record(self, nodes: Sequence[Node]) -> dict[str, Any]:
        """Returns the flight record of nodes, as of now."""
        asked = recall(self._session, nodes)
        await_records(self._session, nodes, asked, RECORDS)
        return record_of(self._session, "`dtrun stack` asks for it", [node.rank for node in nodes])

    def _output(self, request: JobRequest) -> JobAnswer:
        launcher = self._session.launcher
        if launcher is None:
            return Refusal("its nodes are threads of the script, and print where that prints")
        ranks = [rank for rank in request.nodes or range(len(self._session.nodes)) if rank != SCRIPT]
        read = launcher.read_output(ranks, request.after, OUTPUT)
        if read is None:
            return Refusal("its launcher keeps nothing of what nodes print")
        return OutputAnswer(tuple(OutputLine(*line) for line in read.lines), read.more)

    def _kill(self, request: JobRequest) -> JobAnswer:
        if self._session.launcher is None:
            return Refusal("its nodes are threads of the script: `dtrun kill` without -n ends the job")
        for rank in request.nodes:
            self._session.link.losses.kill(rank, "killed by `dtrun kill`")
        return Killed(request.nodes)

    def _begin_trace(self, seconds: float, page: bool) -> JobAnswer:
        if not 0 < seconds <= LONGEST:
            return Refusal(f"a timeline takes up to {LONGEST:g} s, not {seconds:g}")
        trace = AskedTrace(seconds, page)
        trace.begin()
        self._trace, self._traces = trace, self._traces + 1
        return TraceBegun(self._traces)

    def _end_trace(self, number: int) -> JobAnswer:
        trace = self._trace
        if trace is None or number != self._traces:
            return Refusal("another `dtrun trace` has begun since")
        trace.stop()
        if trace.failed:
            return Refusal(trace.failed)
        if trace.data:
            self._trace = None
        return TraceAnswer(bool(trace.data), trace.data)


def _lost(it: JobStatus) -> int:
    return sum(node.state == "lost" for node in it.nodes)


def _state(it: ScriptStatus) -> str:
    """Returns what the script is at: what the thread that has waited longest waits for."""
    if not it.waits:
        return "runs"
    wait = it.waits[0]
    line = f" at {wait.line}" if wait.line else ""
    return f"waits {wait.seconds:.1f} s for {of(wait.node)}{line}"


def _title(row: NodeStatus) -> str:
    where = f" on {row.host}, pid {row.pid}" if row.pid else ""
    line = f" {row.line}" if row.line else ""
    return f"node {row.rank}{where}: {phrase(row)}{line}"
