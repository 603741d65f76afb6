"""``dt.seeing.status()``: reads what the script and the nodes are at."""

from __future__ import annotations

import math
import os
import resource
import socket
import sys
import threading
from collections.abc import Iterator, Sequence

from ..dispatch.call_site import site_of_thread
from ..errors.argument_checks import seconds_of
from ..meshes.mesh import Mesh
from ..runtime.channel.base import MASTER
from ..runtime.channel.counted import GROUP, CountedChannel
from ..runtime.host.launcher import Sight
from ..runtime.master.connection import Life
from ..runtime.master.doing import activities, hindrance
from ..runtime.master.failures import expression, short_line
from ..runtime.master.node import Node
from ..runtime.process.page import COLLECTIVE, IDLE, NOBODY, RECEIVE, STREAMS
from ..runtime.protocol import codec, side
from ..session import current
from ..session.places import MeshPlace
from ..session.session import Session
from ..tasks.actors import Actors
from ..tasks.held import SessionObjects
from .status import (
    OLD,
    ActorStatus,
    CompileStatus,
    JobStatus,
    LineStatus,
    MeshStatus,
    NodeStatus,
    QueueStatus,
    ScriptStatus,
    ScriptWait,
    TransferStatus,
)
from .summary import says

#: The most lines of the script, and the most queues, that one status has.
MOST = 10
#: Seconds that a status waits for nodes by default.
PATIENCE = 0.5


def status(mesh: Mesh | None = None, *, timeout: float = PATIENCE) -> JobStatus:
    """Returns what the script and each node are at: it prints as tables, in a notebook too.

    A node is seen from outside, so one that is stopped, in C code or far behind has its row as well; how old a row is
    stands in it. The nodes of a mesh are one row.

    Args:
        mesh: a mesh of whose nodes each is to have a row, and no other ones.
        timeout: seconds that it waits for nodes. One that has not answered by then has the row of its last report.

    Raises DisttensorError without a session.
    """
    session = current.session()
    ranks = range(len(session.nodes)) if mesh is None else mesh.nodes
    nodes = [session.nodes[rank] for rank in ranks]
    session.link.roll_call.refresh(nodes, seconds_of(timeout) or 0.0)
    with session.link.lock:
        rows = tuple(_node(session, node) for node in nodes)
        transfers = tuple(_transfers(session, nodes))
        compiles = tuple(_compiles(nodes))
    meshes = tuple(_meshes(session, rows)) if mesh is None else ()
    return JobStatus(
        _script(session),
        rows,
        meshes,
        transfers,
        compiles,
        tuple(_queues(session)),
        tuple(_actors(session)),
        tuple(_lines(session)),
        () if mesh is None else tuple(mesh._place.where(i) for i in range(len(nodes))),
    )


# ---- the script ------------------------------------------------------------------------------------------------------


def _script(session: Session) -> ScriptStatus:
    transfers = session.transfers
    return ScriptStatus(
        os.path.basename(sys.argv[0]) or "python",
        socket.gethostname(),
        os.getpid(),
        tuple(sorted(_waits(session), key=lambda wait: -wait.seconds)),
        sum(_issued(node) for node in session.nodes),
        _rss(),
        sum(list(transfers.staged.values())),
        len(transfers.arriving),
    )


def _waits(session: Session) -> Iterator[ScriptWait]:
    now = session.link.clock.now()
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for request, (thread, began) in list(session.link.waiting.under_way.items()):
        site = site_of_thread(thread)
        code = "" if site is None else expression(site)
        yield ScriptWait(names.get(thread, ""), request.node, now - began, short_line(site), code)


def _rss() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize()


def _lines(session: Session) -> Iterator[LineStatus]:
    for site, count, seconds in session.waits.costliest(MOST):
        yield LineStatus(short_line(site), expression(site), count, seconds)


# ---- nodes -----------------------------------------------------------------------------------------------------------


def _issued(node: Node) -> int:
    """Returns the number of the next command that is issued to a node alone."""
    outbox = node.outbox
    return outbox.sent + outbox.waiting + len(outbox.queue) // 2


def _node(session: Session, node: Node) -> NodeStatus:
    at, now = node.connection, session.link.clock.now()
    hello, seen, described = node.said_hello, at.seen, at.described
    state, what, line, seconds, waits_for, note = _doing(node, seen)
    done = max(node.outbox.done, described.done if described is not None else 0)
    held = None if described is None else described.held
    return NodeStatus(
        rank=node.rank,
        host="" if hello is None else hello.host,
        pid=0 if hello is None else hello.pid,
        devices=node.devices,
        state=state,
        what=what,
        line=line,
        seconds=seconds,
        waits_for=waits_for,
        note=note,
        behind=0 if node.life is Life.LOST else max(0, _issued(node) - done),
        tensors=None if held is None else sum(each.tensors for each in held),
        bytes=None if held is None else sum(each.bytes for each in held),
        rss=None if seen is None else seen.rss,
        cpu=None if at.cpu is None else _finite(at.cpu),
        age=None if seen is None else now - at.seen_at,
        said=None if described is None else now - at.described_at,
    )


def _finite(figure: float) -> float:
    """Returns a figure of a node or an agent, as they may say anything; 0 for one that is not a finite number."""
    return figure if math.isfinite(figure) else 0.0


#: State, what, line, seconds, the node that it waits for, and a note.
_Doing = tuple[str, str, str, float, int | None, str]
_STATES = {Life.AWAITED: "starting", Life.UNEXPLAINED: "disconnected", Life.LOST: "lost"}


def _doing(node: Node, seen: Sight | None) -> _Doing:
    """Returns what a node is at."""
    if node.life is not Life.THERE:
        note = node.lost.cause if node.lost is not None else ""
        return _STATES[node.life], "", "", 0.0, None, note
    if seen is None:
        if node.outbox.idle:
            return "idle", "", "", 0.0, None, ""
        return "unseen", "", short_line(node.outbox.running()), 0.0, None, ""
    work, *others = activities(node, seen)
    what = "" if work.sent is None else codec.one_line(work.sent.operator)
    line = "" if work.sent is None else short_line(work.sent.site)
    seconds = _finite(work.seconds)
    waits_for = seen.peer if not work.beside and work.kind in (COLLECTIVE, RECEIVE) and seen.peer != NOBODY else None
    state, note = "running", ""
    if not work.beside and work.kind == IDLE:
        state = "idle"
    elif not work.beside and work.kind == STREAMS:
        what = "its streams"
    elif waits_for is not None or work.kind == RECEIVE:
        state = "waiting"
    match hindrance(seen):
        case "paused":
            state, note = "paused", "its host hears nothing of this one"
        case "stopped":
            state, note = "stopped", f"`kill -CONT {node.hello.pid}` has it go on"
        case "deaf":
            note = f"no other thread of it has run for {seen.deaf:.0f} s, as this one holds the GIL"
        case "device" if seconds >= OLD:  # for a moment anything may be
            note = "it is in the kernel, for a device"
    if others:
        note = "; ".join(filter(None, (note, f"and {len(others)} functions beside")))
    return state, what, line, seconds, waits_for, note


# ---- meshes ----------------------------------------------------------------------------------------------------------


def _meshes(session: Session, rows: Sequence[NodeStatus]) -> Iterator[MeshStatus]:
    """Yields the largest meshes: a node that is in one has no row of its own, and no further mesh needs one for it."""
    covered: set[int] = set()
    for place in sorted(session.places.meshes, key=lambda place: -len(place.ranks)):
        if not covered.issuperset(place.ranks):
            covered.update(place.ranks)
            yield _mesh(place, [rows[rank] for rank in place.ranks])


def _mesh(place: MeshPlace, rows: Sequence[NodeStatus]) -> MeshStatus:
    ages = [row.age for row in rows]
    return MeshStatus(
        ", ".join(f"{name}={n}" for name, n in place.dims.items()),
        place.ranks,
        says([place.where(i) for i in range(len(rows))], rows),
        max(row.behind for row in rows),
        _sum([row.tensors for row in rows]),
        _sum([row.bytes for row in rows]),
        _sum([row.rss for row in rows]),
        None if all(row.cpu is None for row in rows) else sum(row.cpu or 0.0 for row in rows),
        None if None in ages else max(age for age in ages if age is not None),
    )


def _sum(figures: Sequence[int | None]) -> int | None:
    known = [figure for figure in figures if figure is not None]
    return sum(known) if known else None


# ---- what is under way -----------------------------------------------------------------------------------------------


def _transfers(session: Session, nodes: Sequence[Node]) -> Iterator[TransferStatus]:
    """Yields the transfers under way, each as its sender counts it where that has said so."""
    found: dict[tuple[str, str, str, str], tuple[bool, TransferStatus]] = {}
    own = (
        side.Moving(channel.name, channel.use, peer, sent, *tally)
        for channel in list(session.router.data.values())
        if isinstance(channel, CountedChannel)
        for peer, sent, tally in channel.under_way()
    )
    rows = [(MASTER, each) for each in own]
    for node in nodes:
        if node.life is Life.THERE and node.connection.described is not None:
            rows += [(node.rank, each) for each in node.connection.described.moving]
    for rank, it in rows:
        here, there = _process(rank), _process(it.peer)
        source, target = (here, there) if it.sent else (there, here)
        channel, use = codec.one_line(it.channel), codec.one_line(it.use)
        key = source, target, channel, use
        rate = it.bytes / it.seconds if math.isfinite(it.seconds) and it.seconds > 1e-9 else 0.0
        if key not in found or (it.sent and not found[key][0]):
            status = TransferStatus(*key, it.under_way, _finite(it.since), it.begun, it.bytes, rate)
            found[key] = it.sent, status
    yield from (status for _, status in found.values())


def _process(rank: int) -> str:
    return {MASTER: "script", GROUP: "group"}.get(rank) or f"node {rank}"


def _compiles(nodes: Sequence[Node]) -> Iterator[CompileStatus]:
    for node in nodes:
        described = node.connection.described
        if node.life is Life.THERE and described is not None and described.building > 0:
            yield CompileStatus(node.rank, described.building, _finite(described.building_for))


def _queues(session: Session) -> Iterator[QueueStatus]:
    held = session.part(SessionObjects)
    names = held.names()
    for number, kind, figures in held.objects.figures()[:MOST]:
        yield QueueStatus(kind, names.get(number, ""), *figures)


def _actors(session: Session) -> Iterator[ActorStatus]:
    living = sorted(session.part(Actors).living, key=lambda each: each.ref)
    for each in living:
        yield ActorStatus(each.kind.__qualname__, each.node, each.calls())
