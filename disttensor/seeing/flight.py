"""The flight record of a job: the last messages of each node, as the script and the node have noted them.

    outbox.trail       what the script has sent to a node and heard of it \
    connection.flight  what a node has done, from outside, dead or not     --> record_of --> a file, `dtrun stack`
    page.mine.ring     the script's own transfers                         /

It is always on (runtime/process/flight.py). A file is written when a node is lost, and when a wait passes ``LONG``.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from ..dispatch.call_site import site_of_thread
from ..runtime.master.connection import Life
from ..runtime.master.failures import short_line
from ..runtime.master.node import Node
from ..runtime.master.requests import Request
from ..runtime.process import flight, page
from ..runtime.process.cells import script_name
from ..runtime.process.flight import KINDS, FlightRecord
from ..runtime.process.observing import NodeGone
from ..runtime.process.tables import columns, duration
from ..runtime.protocol import codec
from ..runtime.protocol.errors import NodeLost
from ..session.holdings import size
from ..session.session import Session
from .flight_files import FlightFolder, flight_folder

#: Seconds of a wait from which on it is recorded, and for how many none for the same node is after that.
LONG, AGAIN = 10.0, 60.0
#: Seconds between two looks for such waits.
LOOK = 1.0
#: Seconds in which nodes' records have come; and the same at the session's end.
COMES, LAST = 1.0, 0.5
#: Seconds of one wait for the launcher at the session's end.
_LISTEN = 0.05
#: The most nodes of one record, and the most records in all: a few megabytes.
NODES, RECORDS = 500, 20_000
#: The most records of each node that are shown in lines.
SHOWN = 8

_log = logging.getLogger("disttensor")


# ---- the record ------------------------------------------------------------------------------------------------------


def record_of(session: Session, why: str, ranks: Sequence[int] | None = None) -> dict[str, Any]:
    """Returns the flight record as plain values: of these nodes, or of all, those that are lost first."""
    nodes = [node for node in session.link.nodes if ranks is None or node.rank in ranks]
    nodes = sorted(nodes, key=lambda node: node.lost is None)[:NODES]
    most = RECORDS // (2 * len(nodes) + 1)
    found = [_node(session, node, most) for node in nodes]
    own = [_plain(it) for it in flight.own(page.mine.ring)[-most:]]
    return {
        "format": "disttensor flight record 1",
        "why": why,
        "written": flight.calendar(),
        "script": {
            "name": script_name(),
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "records": own,
        },
        "nodes": found,
    }


def _node(session: Session, node: Node, most: int) -> dict[str, Any]:
    """Returns what is known of a node."""
    hello, sent = node.said_hello, _sent(session, node)
    messages = [(it, site) for it, site in sent if it.kind == flight.SENT]
    lines = {it.number: short_line(site) for it, site in messages if site is not None}
    # what was packed for a node and has not left when it was lost counts as sent elsewhere, as its numbers are taken
    left = messages[-1][0].number + messages[-1][0].figure if messages else node.outbox.sent
    done = []
    for it in flight.decode(node.connection.flight)[-most:]:
        plain = _plain(it)
        if it.seconds < 0:
            with session.link.lock:
                command = node.command(it.number)
            if command is not None:
                plain |= {"what": codec.one_line(command.operator), "line": short_line(command.site)}
        elif it.kind == page.COMMANDS and (line := lines.get(it.number)):
            plain["line"] = line
        done.append(plain)
    return {
        "rank": node.rank,
        "host": "" if hello is None else hello.host,
        "pid": 0 if hello is None else hello.pid,
        "state": node.life.value,
        "lost": "" if node.lost is None else node.lost.cause,
        "commands sent": left,
        "commands done": node.outbox.done,
        "sent": [_plain(it) | ({"line": short_line(site)} if site is not None else {}) for it, site in sent[-most:]],
        "applied": done,
    }


def _sent(session: Session, node: Node) -> list[tuple[FlightRecord, Any]]:
    """Returns the script's records of a node, with times of the calendar."""
    shift = flight.calendar() - session.link.clock.now()
    return [(it._replace(at=it.at + shift), site) for it, site in node.outbox.trail.records()]


def _plain(it: FlightRecord) -> dict[str, Any]:
    """Returns a record as plain values, of those that its kind has."""
    found: dict[str, Any] = {"at": round(it.at, 6), "kind": KINDS[it.kind]}
    match it.kind:
        case flight.SENT | page.COMMANDS if it.seconds >= 0:
            found |= {"first": it.number, "last": it.number + it.figure - 1, "bytes": it.bytes}
        case flight.REPORTED:
            found |= {"done": it.number, "bytes": it.bytes}
        case flight.LOST:
            found |= {"done": it.number}
        case flight.WAITED:
            found |= {"request": it.number}
        case flight.SENDING | page.RECEIVE if it.seconds >= 0:
            found |= {"transfer": it.number, "peer": it.peer, "bytes": it.bytes}
        case page.COLLECTIVE if it.seconds >= 0:
            found |= {"first": it.number, "nodes": it.figure, "bytes": it.bytes}
        case _:
            found |= {"first": it.number}
    if it.seconds < 0:
        found |= {"under way": True}
        if it.peer != page.NOBODY:
            found |= {"waits for": it.peer}
    elif it.kind not in (flight.SENT, flight.REPORTED, flight.LOST):
        found["seconds"] = round(it.seconds, 6)
    return found


# ---- nodes' parts ----------------------------------------------------------------------------------------------------


def recall(session: Session, nodes: Sequence[Node]) -> float:
    """Asks for the records of nodes, from outside, whatever these are at; returns when."""
    asked = session.link.clock.now()
    for node in _awaited(session, nodes):
        session.link.losses.recall(node)
    return asked


def _awaited(session: Session, nodes: Sequence[Node]) -> Iterator[Node]:
    """Yields the nodes whose records come: those that are there, and those whose ends the launcher has not told."""
    if session.link.losses.sees:
        for node in nodes[:NODES]:
            if node.life is Life.THERE or not node.connection.ended:
                yield node


def have_come(session: Session, nodes: Sequence[Node], asked: float) -> bool:
    """Returns whether all records have come that were asked for at a time."""
    return all(node.connection.flight_at >= asked for node in _awaited(session, nodes))


def await_records(session: Session, nodes: Sequence[Node], asked: float, timeout: float) -> None:
    """Waits until they have, ``timeout`` seconds at most."""
    clock, losses = session.link.clock, session.link.losses
    until = clock.now() + timeout
    while not have_come(session, nodes, asked) and clock.now() < until:
        if not losses.ask_launcher(_LISTEN):
            clock.sleep(_LISTEN)


# ---- in lines --------------------------------------------------------------------------------------------------------


def lines_of(node: Mapping[str, Any], now: float) -> str:
    """Returns the last records of a node, of ``record_of``, as a table: the newest last."""
    both = [(it, "script") for it in node["sent"]] + [(it, f"node {node['rank']}") for it in node["applied"]]
    both.sort(key=lambda each: each[0]["at"])
    rows: list[tuple[str, ...]] = [("ago", "who", "what", "commands", "bytes", "took", "line")]
    rows += [_row(it, who, now) for it, who in both[-SHOWN:]]
    return columns(rows, [str.rjust, *[str.ljust] * 2, *[str.rjust] * 3, str.ljust]) if len(rows) > 1 else ""


def _row(it: Mapping[str, Any], who: str, now: float) -> tuple[str, ...]:
    first, last = it.get("first"), it.get("last")
    numbers = "" if first is None else f"{first}" if last in (None, first) else f"{first}-{last}"
    if "done" in it:
        numbers = f"{it['done']} done"
    what = it["kind"] + (f" {it['what']}" if it.get("what") else "")
    if it.get("peer") is not None:
        what += f" {'to' if it['kind'] == 'send' else 'from'} {it['peer']}"
    took = "under way" if it.get("under way") else duration(it["seconds"]) if "seconds" in it else ""
    nbytes = size(it["bytes"]) if "bytes" in it else ""
    return duration(max(0.0, now - it["at"])), who, what, numbers, nbytes, took, it.get("line", "")


# ---- files -----------------------------------------------------------------------------------------------------------


class FlightRecorder:
    """The writer of a session's flight record, which begins by itself."""

    def __init__(self, session: Session, folder: FlightFolder) -> None:
        self._session, self._folder = session, folder
        self._link, self._clock = session.link, session.link.clock
        self._looked = 0.0
        #: the file that is to be written: its path, why, and the time until which it waits for nodes' records
        self._due: tuple[str, str, float] | None = None
        self._asked = 0.0  #: when nodes were asked for their records
        self._recorded: dict[int, float] = {}  #: by node: when a wait for it was recorded last
        self._told: list[tuple[Request, float]] = []  #: the waits that are recorded, by their begins
        self._failed = False

    def note_loss(self, event: NodeGone) -> None:
        """Plans to write a file soon. The caller holds the link's lock."""
        if self._due is None or "-wait." in self._due[0]:  # a loss replaces the file of a wait for that node
            self._begin_file("lost", f"node {event.node} is lost: {getattr(event.error, 'cause', '')}")
        if self._due is not None and isinstance(event.error, NodeLost):
            event.error.record = self._due[0]

    def look(self) -> None:
        """Writes what is due, and looks for waits that take long. To be called again and again; raises nothing."""
        now = self._clock.now()
        due = self._due
        if due is not None and (now >= due[2] or have_come(self._session, self._link.nodes, self._asked)):
            self._write(due)
        elif due is None and now - self._looked >= LOOK:
            self._looked = now
            self._look_at_waits(now)

    def end(self) -> None:
        """Writes what is due, at the session's end."""
        self._link.seam.lost.remove(self.note_loss)
        if (due := self._due) is not None and not self._link.is_forked:
            await_records(self._session, self._link.nodes, self._asked, LAST)
            self._write(due)

    def _begin_file(self, kind: str, why: str) -> None:
        """Asks all nodes for their records, of which a file is to be written."""
        self._asked = recall(self._session, self._link.nodes)
        self._due = self._folder.name(kind), why, self._asked + COMES

    def _look_at_waits(self, now: float) -> None:
        under_way = list(self._link.waiting.under_way.items())
        waits = [(request, thread, began) for request, (thread, began) in under_way]
        self._told = [each for each in self._told if each in [(request, began) for request, _, began in waits]]
        for request, thread, began in waits:
            before = self._recorded.get(request.node)
            if now - began < LONG or (request, began) in self._told or (before is not None and now - before < AGAIN):
                continue
            self._told.append((request, began))
            self._recorded[request.node] = now
            line = short_line(site_of_thread(thread))
            at = f" at {line}" if line else ""
            with self._link.lock:
                if self._due is None:
                    self._begin_file("wait", f"the script has waited {now - began:.0f} s for node {request.node}{at}")

    def _write(self, due: tuple[str, str, float]) -> None:
        path, why, _ = due
        with self._link.lock:
            if self._due is not due:  # another thread writes it, or a loss has come in its place
                return
            self._due = None
        try:
            self._folder.write(path, msgspec.json.encode(record_of(self._session, why)) + b"\n")
        except Exception as e:  # the job does not need it
            if not self._failed:
                self._failed = True
                _log.warning("the flight record %s can't be written: %s (DISTTENSOR_FLIGHT=0 writes none)", path, e)
        else:
            self._session.flight = path
            _log.info("%s; flight record: %s", why, path)


def record_flights(session: Session, environment: Mapping[str, str]) -> None:
    """Writes the flight record of a session by itself, at losses and long waits, from now until its end."""
    folder = flight_folder(environment)
    if folder is None:
        return
    recorder = FlightRecorder(session, folder)
    session.link.idle.looks.append(recorder.look)
    session.link.seam.lost.add(recorder.note_loss)
    session.ends.callback(recorder.end)
