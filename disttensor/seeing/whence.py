"""``dt.seeing.whence(x)``: reads where a tensor comes from, out of what the script has kept of its last commands."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from ..errors.argument_checks import seconds_of
from ..graphs.recorder import GraphRecorder
from ..proxy.meta import Handle, Lazy, Shared, lines_of
from ..proxy.proxy import DistributedTensor, innermost, local_name
from ..runtime.channel.base import MASTER
from ..runtime.master.failures import Failure, expression, short_line
from ..runtime.master.requests import Request
from ..runtime.master.route import route
from ..runtime.protocol import codec
from ..runtime.protocol import commands as c
from ..runtime.protocol.errors import DisttensorError
from ..session.current import session_of
from ..session.places import MeshPlace, Place, numbers
from ..session.session import Session
from .command_scan import CommandScan, PastCommand, by_position
from .origin import Origin, OriginCommand

#: Seconds that it waits by default for nodes to say how far they have come.
PATIENCE = 0.1


def whence(tensor: Any, *, timeout: float = PATIENCE) -> Origin:
    """Returns where a tensor on a node, or on a mesh, comes from: it prints as a sentence.

    It says what has made the tensor and what has written it last, each with the line of the script, whether it is known
    to be computed, and for one without a value why. Does not wait for the tensor. It is read from the last commands of
    each node, 2,000 at least, which the script keeps anyhow; of a tensor of 512 KiB or more the line that made it is
    known for as long as the script has it.

    Args:
        tensor: the tensor.
        timeout: seconds that it waits for its nodes to say how far they have come.

    Raises TypeError for what is not on a node, DisttensorError after the session's end.
    """
    tensor = innermost(tensor)
    if not isinstance(tensor, DistributedTensor):
        raise TypeError(f"whence is for tensors on nodes, and this is {local_name(tensor)}")
    place = tensor._place
    session = session_of(place)
    reach(session, place.ranks, seconds_of(timeout) or 0.0)
    reader = _Reader(session)
    names = [_name(place, i) for i in range(len(place.members))]
    return _joined(
        place, [reader.read(tensor, each.node, name) for name, each in zip(names, place.members, strict=True)]
    )


def _name(place: Place, index: int) -> str:
    """Returns the name of one of a place's members: its coordinates in a mesh; else its node, and another device of it
    than the default one."""
    member = place.members[index]
    if isinstance(place, MeshPlace):  # its members are known by their coordinates, which a node has none of
        return place.where(index)
    return f"node {member.node}" if member.origin is place.session.places.at(member.node) else str(member)


def reach(session: Session, ranks: Sequence[int], timeout: float) -> None:
    """Sends nodes what is queued, and has each report what it has done by now. Waits for that, ``timeout`` seconds at
    most. Raises DisttensorError after the session's end."""
    link = session.link
    if link.closed or link.is_forked:
        link.check(session.nodes[ranks[0]].outbox)
    deadline = link.clock.now() + timeout
    asked: list[Request] = []
    with link.unheard():
        link.sender.flush_all()
        for rank in ranks:
            with suppress(DisttensorError):
                asked.append(request := link.requests.new(rank, c.Unusable))
                outbox = session.nodes[rank].outbox
                outbox.add(c.Usable(request.id, ()))  # which asks for nothing: a report comes with the answer
                link.sender.flush(outbox, wait=False)
        for request in asked:
            with suppress(DisttensorError, TimeoutError):
                link.waiting.wait(request, max(0.0, deadline - link.clock.now()), explain=False)
    link.replies.drain()


class _Reader:
    """Reads origins out of what is kept of nodes' commands, which are gone through once."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._scans: dict[int, CommandScan] = {}
        self._spoilt: dict[int, Failure] = {}
        while session.link.failures:
            known = len(self._spoilt)  # what has failed on one node is not there on those that it was sent to
            for rank in range(len(session.nodes)):
                self._spoilt.update(self._scan(rank).unsent)
            if len(self._spoilt) == known:
                break
            self._scans.clear()

    def read(self, tensor: Any, rank: int, place: str) -> Origin:
        """Returns the origin of a tensor, or of its shard, on a node."""
        meta, scan = tensor._h.meta, self._scan(rank)
        handle, lazy = _existing(tensor._h)
        ref = handle.ref
        base = scan.memory(ref)
        made, first = scan.made.get(ref), scan.made.get(base)
        changed = [event for event in (scan.written.get(base), scan.had.get(base)) if event is not None]
        last = max([event for event in changed if first is None or event[:2] > first[:2]], default=None, key=_order)
        is_view = lazy is not None or base != ref
        line = lines_of([ref]).get(ref) if made is None and ref else None
        unused = lazy if ref else handle
        if isinstance(unused, Lazy):
            told: OriginCommand | None = OriginCommand(unused.plan.specs[0], "", "", rank)
        elif made is not None:
            told = self._command(rank, made)
        else:
            told = None if line is None else OriginCommand("", short_line(line), expression(line), rank)
        failure = self._failure(scan, ref)
        return Origin(
            shape=tuple(meta.shape),
            dtype=str(meta.dtype).removeprefix("torch."),
            place=place,
            nodes=(rank,),
            bytes=meta.nbytes,
            made=told,
            memory=self._command(rank, first) if is_view and first is not None else None,
            written=None if last is None else self._command(rank, last, sure=last is not scan.had.get(base)),
            is_view=is_view,
            ready=bool(ref) and not failure and _is_ready(scan, base, last or first),
            failure=failure,
            unknown=tuple(_unknown(scan, ref, lazy, told, first)),
        )

    def _scan(self, rank: int) -> CommandScan:
        """Returns what a node's commands have done, and those that this thread records for it."""
        if rank not in self._scans:
            link, node = self._session.link, self._session.nodes[rank]
            with link.lock:
                failures = by_position(list(link.failures.values()), rank, node.connection.first)
                scan = self._scans[rank] = CommandScan(node, self._session.allow, failures, self._spoilt)
                scan.read_history()
            recorder = route.get().recorder
            if isinstance(recorder, GraphRecorder) and rank in recorder.logs:
                scan.read_recording(recorder.logs[rank].commands, recorder.logs[rank].sites)
        return self._scans[rank]

    def _command(self, rank: int, event: PastCommand, sure: bool = True) -> OriginCommand:
        source, site = None, event.site
        if event.peer != MASTER:
            left = self._scan(event.peer).sends.get(event.transfer)
            source = None if left is None else self._command(event.peer, left)
        return OriginCommand(
            event.name,
            short_line(site),
            "" if site is None else expression(site),
            rank,
            event.number,
            short_line(event.replayed),
            sure,
            source,
        )

    def _failure(self, scan: CommandScan, ref: int) -> str:
        """Returns why a tensor has no value; "" if nothing says so."""
        connection, found = scan.node.connection, scan.failure(ref)
        if connection.lost is not None:
            return f"node {scan.node.rank} is lost: {connection.lost.cause}"
        if ref < connection.gone_before and ref not in scan.made:
            return f"it was lost with an earlier worker in the place of node {scan.node.rank}"
        if found is None:
            return ""
        kind, text = found.told.kind.rpartition(".")[2], codec.one_line(found.told.message)
        return f"{kind}: {text}, in {found.told.op} on node {found.rank}, issued at {short_line(found.site)}"


def _existing(handle: Handle) -> tuple[Handle, Lazy | None]:
    """Returns the handle of a tensor that its node has, or is to have, and that of the view of it which was asked for,
    if no operation has used that yet."""
    lazy = None
    while not handle.ref:
        if isinstance(handle, Shared):
            handle = handle.owner
        elif isinstance(handle, Lazy) and (base := handle.base) is not None:
            lazy, handle = lazy or handle, base
        else:
            break
    return handle, lazy


def _order(event: PastCommand) -> tuple[int, int]:
    return event[:2]


def _is_ready(scan: CommandScan, base: int, last: PastCommand | None) -> bool:
    """Returns whether a tensor whose ``last`` command is this one is known to be computed."""
    done = scan.node.outbox.done
    if last is None:  # it is older than all that is kept, and what is forgotten is done
        return True
    if last.arrives:  # its command is done before it is there; what has read it was done after
        return last.number < scan.read.get(base, -1) < done
    return last.number < done


def _unknown(
    scan: CommandScan, ref: int, lazy: Lazy | None, made: OriginCommand | None, first: PastCommand | None
) -> Iterator[str]:
    """Yields what is not known, and why."""
    kept = f"the last {scan.node.outbox.sent - scan.first:,} commands of node {scan.node.rank}, which are kept"
    if not ref:
        yield "it is made by its first use, which has not come"
    elif made is None:
        yield f"what has made it is not known, as that is not among {kept}"
    elif first is None and (lazy is not None or not made.operator):
        yield f"more is not known, as that is not among {kept}"
    elif first is not None and first.at >= 0 and first.replayed is None:
        yield f"a graph makes it, of which no replay is among {kept}"


def _joined(place: Place, origins: list[Origin]) -> Origin:
    """Returns the origin of a mesh's tensor, given those of its shards."""
    first = origins[0]
    if len(origins) == 1:
        return first
    # the sentence says of which dims it speaks; nodes in a list have none
    dims = ", ".join(f"{name}={n}" for name, n in place.dims.items()) if isinstance(place, MeshPlace) else ""
    alike = all(each.is_like(first) for each in origins)
    failed = next((f"{each.place}: {each.failure}" for each in origins if each.failure), "")
    return replace(
        first,
        place=f"{dims}, nodes {numbers(place.ranks)}",
        nodes=place.ranks,
        bytes=sum(each.bytes for each in origins),
        ready=all(each.ready for each in origins),
        failure=failed,
        ranks=() if alike else tuple(origins),
    )
