"""``dt.seeing.status()``: reads what the script and the nodes are at."""

from __future__ import annotations

import math
import os
import resource
import socket
import threading
from collections.abc import Iterator, Sequence

from ..dispatch.call_site import site_of_thread
from ..errors.argument_checks import seconds_of
from ..meshes.mesh import Mesh
from ..runtime.channel.base import MASTER
from ..runtime.channel.counted import GROUP, CountedChannel
from ..runtime.host.launcher import Sight
from ..runtime.host.sights import hindered, hindrance
from ..runtime.master.connection import Life
from ..runtime.master.doing import activities
from ..runtime.master.failures import expression, short_line
from ..runtime.master.node import Node
from ..runtime.process import undertakings
from ..runtime.process.cells import script_name
from ..runtime.process.page import COLLECTIVE, IDLE, NOBODY, RECEIVE, STREAMS
from ..runtime.protocol import codec, side
from ..runtime.protocol.traits import without_stream
from ..session import current
from ..session.places import MeshPlace
from ..session.session import Session
from ..tasks.actors import Actors
from ..tasks.held import SessionObjects
from .slow_watch import SlowNodes
from .status import (
    OLD,
    ActorStatus,
    CompileStatus,
    CopyStatus,
    GpuStatus,
    JobStatus,
    LineStatus,
    MeshStatus,
    NodeStatus,
    QueueStatus,
    ScriptStatus,
    ScriptWait,
    TransferStatus,
    UndertakingStatus,
)
from .summary import says

#: The most lines of the script, and the most queues, that one status has.
MOST = 10
#: The most large transfers.
COPIES = 20
#: A transfer of so many bytes has a row of its own.
LARGE = 16 << 20
#: Seconds after which a smaller one has, too.
LONG = 0.5
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
        rows = tuple(read_node(session, node) for node in nodes)
        transfers = tuple(_transfers(session, nodes))
        copies = tuple(_copies(session, nodes))
        compiles = tuple(_compiles(nodes))
    meshes = tuple(_meshes(session, rows)) if mesh is None else ()
    return JobStatus(
        _script(session),
        rows,
        meshes,
        transfers,
        compiles,
        queues_of(session),
        tuple(_actors(session)),
        tuple(_lines(session)),
        copies,
        tuple(it for it in session.part(SlowNodes).rows if it.node in ranks),
        () if mesh is None else tuple(mesh._place.where(i) for i in range(len(nodes))),
    )


# ---- the script ------------------------------------------------------------------------------------------------------


def _script(session: Session) -> ScriptStatus:
    transfers = session.transfers
    return ScriptStatus(
        script_name(),
        socket.gethostname(),
        os.getpid(),
        waits_of(session),
        sum(_issued(node) for node in session.nodes),
        _rss(),
        sum(list(transfers.staged.values())),
        len(transfers.arriving),
        tuple(_undertakings(session)),
    )


def _undertakings(session: Session) -> Iterator[UndertakingStatus]:
    now = session.link.clock.now()
    for it in undertakings.mine.under_way():
        seconds = max(0.0, now - it.began)
        if it.is_wait and seconds < OLD:
            continue
        line = it.line or short_line(site_of_thread(it.thread) if it.holds else None)
        yield UndertakingStatus(f"waiting for {it.words()}" if it.is_wait else it.words(), seconds, line)


def waits_of(session: Session) -> tuple[ScriptWait, ...]:
    """Returns the waits of the script's threads for nodes, the longest first."""
    return tuple(sorted(_waits(session), key=lambda wait: -wait.seconds))


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


def read_node(session: Session, node: Node) -> NodeStatus:
    """Returns the row of a node, as of what is known now. The caller holds the link's lock."""
    at, now = node.connection, session.link.clock.now()
    hello, seen, described = node.said_hello, at.seen, at.described
    state, what, line, seconds, waits_for, note = _doing(node, seen, now)
    done = max(node.outbox.done, described.done if described is not None else 0)
    held = None if described is None else described.held
    peaks = [each.peak for each in held or () if each.peak >= 0]
    gpus = () if described is None else described.gpus
    behind = 0 if node.life is Life.LOST else max(0, _issued(node) - done)
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
        behind=behind,
        tensors=None if held is None else sum(each.tensors for each in held),
        bytes=None if held is None else sum(each.bytes for each in held),
        rss=None if seen is None else seen.rss,
        cpu=None if at.cpu is None else _finite(at.cpu),
        age=None if seen is None else now - at.seen_at,
        said=None if described is None else now - at.described_at,
        oldest=node.outbox.oldest(done, now) if behind else 0.0,
        peak=sum(peaks) if peaks else None,
        peak_rss=(seen.peak or None) if seen is not None else None,
        last_line="" if seen is None else codec.one_line(seen.last_line),
        gpus=tuple(
            GpuStatus(codec.one_line(it.device), it.used, it.total, it.busy if 0 <= it.busy <= 1 else None)
            for it in gpus
        ),
    )


def _finite(figure: float) -> float:
    """Returns a figure of a node or an agent, as they may say anything; 0 for one that is not a finite number."""
    return figure if math.isfinite(figure) else 0.0


#: State, what, line, seconds, the node that it waits for, and a note.
_Doing = tuple[str, str, str, float, int | None, str]
_STATES = {Life.AWAITED: "starting", Life.UNEXPLAINED: "disconnected", Life.LOST: "lost"}


def _doing(node: Node, seen: Sight | None, now: float) -> _Doing:
    """Returns what a node is at."""
    if node.life is not Life.THERE:
        note = node.lost.cause if node.lost is not None else ""
        return _STATES[node.life], "", "", 0.0, None, note
    if (stop := node.connection.breakpoint) is not None and (seen is None or not hindrance(seen)):
        functions = [it.sent for it in activities(node, seen)] if seen is not None else []
        # what the node has said of its threads may be older than the debugger's word
        functions += [sent for sent in node.last_commands() if not sent.done]
        issued = (it for it in functions if it is not None and codec.one_line(it.operator) == stop.what)
        line = next((short_line(sent.site) for sent in issued), "")
        return "at a breakpoint", stop.what, line, max(0.0, now - stop.at), None, stop.position
    if seen is None:
        if node.outbox.idle:
            return "idle", "", "", 0.0, None, ""
        return "unseen", "", short_line(node.outbox.running()), 0.0, None, ""
    work, *others = activities(node, seen)
    what = "" if work.sent is None else codec.one_line(work.sent.operator)
    line = "" if work.sent is None else short_line(work.sent.site)
    seconds = _finite(work.seconds)
    waits_for = seen.peer if not work.beside and work.kind in (COLLECTIVE, RECEIVE) and seen.peer != NOBODY else None
    state = "running"
    if not work.beside and work.kind == IDLE:
        state = "idle"
    elif not work.beside and work.kind == STREAMS:
        what = "its streams"
    elif waits_for is not None or work.kind == RECEIVE:
        state = "waiting"
    state, note = hindered(seen, node.hello.pid, state, seconds)
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
        max(row.oldest for row in rows),
        _sum([row.peak for row in rows]),
        _sum([row.peak_rss for row in rows]),
        tuple(gpu for row in rows for gpu in row.gpus),
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


def _copies(session: Session, nodes: Sequence[Node]) -> Iterator[CopyStatus]:
    """Yields the large transfers under way, each as the end says that knows how far it has come."""
    own = (
        side.LargeMoving(channel.name, channel.use, *each)
        for channel in list(session.router.data.values())
        if isinstance(channel, CountedChannel)
        for each in channel.large()
    )
    rows = [(MASTER, each) for each in own]
    for node in nodes:
        if node.life is Life.THERE and node.connection.described is not None:
            rows += [(node.rank, each) for each in node.connection.described.large]
    found: dict[tuple[int, int, int], side.LargeMoving] = {}
    for rank, it in rows:
        if _finite(it.seconds) < LONG and it.bytes < LARGE:
            continue
        key = (rank, it.peer, it.transfer) if it.sent else (it.peer, rank, it.transfer)
        if key not in found or it.passed > found[key].passed:
            found[key] = it
    oldest = sorted(found.items(), key=lambda each: -_finite(each[1].seconds))
    for (source, target, transfer), it in oldest[:COPIES]:
        passing = _finite(it.passing)
        done = min(it.passed, it.bytes) if it.passed >= 0 else None
        rate = done / passing if done and passing > 1e-9 else None
        left = (it.bytes - (done or 0)) / rate if rate else None
        line = next(filter(None, (_line_of_transfer(session, each, transfer) for each in (source, target))), "")
        yield CopyStatus(
            _process(source), _process(target), codec.one_line(it.channel), codec.one_line(it.use), it.bytes, done,
            _finite(it.seconds), rate, left, line,
        )  # fmt: skip


def _line_of_transfer(session: Session, rank: int, transfer: int) -> str:
    """Returns the line that has issued a transfer to a node, while its command is kept; "" for none."""
    if not 0 <= rank < len(session.nodes):
        return ""
    for _, commands in session.nodes[rank].outbox.last_messages():
        for command, site in commands:
            if getattr(without_stream(command), "transfer", None) == transfer:
                return short_line(site)
    return ""


def _process(rank: int) -> str:
    return {MASTER: "script", GROUP: "group"}.get(rank) or f"node {rank}"


def _compiles(nodes: Sequence[Node]) -> Iterator[CompileStatus]:
    for node in nodes:
        described = node.connection.described
        if node.life is Life.THERE and described is not None and described.building > 0:
            yield CompileStatus(node.rank, described.building, _finite(described.building_for))


def queues_of(session: Session) -> tuple[QueueStatus, ...]:
    """Returns the objects that tasks share."""
    held = session.part(SessionObjects)
    names = held.names()
    return tuple(
        QueueStatus(kind, names.get(number, ""), *figures) for number, kind, figures in held.objects.figures()[:MOST]
    )


def _actors(session: Session) -> Iterator[ActorStatus]:
    living = sorted(session.part(Actors).living, key=lambda each: each.ref)
    for each in living:
        yield ActorStatus(each.kind.__qualname__, each.node, each.calls())
