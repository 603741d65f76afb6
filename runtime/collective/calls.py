"""The collectives. Every rank of a group calls the same one, each with its own ``Wire`` over the same base id.

Tensors may have any strides and be on any device; what is not plain CPU memory is staged. Sources stay as they are
unless they are a target too. Each call ends with ``Wire.end``: it raises PoisonedError, BrokenError or what failed
here, after this rank has done its part for the others; targets hold anything then. Mistakes that all ranks make
(dtypes, lengths) raise before any message.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch

from ..channel.payload import is_plain, plain, scratch, store
from . import direct, halving, hierarchical, ring, tree
from .algorithm_table import Way, choose
from .cut import cut, cut_apart, pieces_of, slabs
from .exchange import Wire, pipeline
from .reduction import ReduceOp, check
from .shared_pages import SLOT, Board


def all_reduce(
    wire: Wire,
    source: torch.Tensor,
    target: torch.Tensor,
    op: ReduceOp = ReduceOp.SUM,
    way: Way | None = None,
    hosts: Sequence[object] | None = None,
) -> None:
    """``target`` of every rank becomes the reduction of all ranks' ``source``; all get the same bits.

    ``hosts[i]`` names the host of rank i: with them it is hierarchical where that helps.
    """
    check(op, source.dtype)
    with _flat(wire, [target]) as (out,), torch.inference_mode():
        ours = _plain(wire, source)
        if (board := _board(wire, way, ours)) is not None:
            board.all_reduce(wire, ours, out, op)
        elif hosts is not None and (who := hierarchical.Hosts(hosts, wire.me)).helps:
            outer = way or choose("all_reduce", _nbytes(ours), len(who.members))
            hierarchical.all_reduce(wire, ours, out, op, who, outer.chunk, partial(_all_reduce, outer))
        else:
            _all_reduce(way or choose("all_reduce", _nbytes(ours), wire.size), wire, ours, out, op)


_WHOLE = {"all": direct.all_reduce_whole, "doubling": halving.all_reduce_whole, "halving": halving.all_reduce}


def _all_reduce(way: Way, wire: Wire, source: torch.Tensor, target: torch.Tensor, op: ReduceOp) -> None:
    if way.algorithm in ("ring", "direct"):
        in_pieces = ring.all_reduce if way.algorithm == "ring" else direct.all_reduce
        given, wanted = pieces_of(source, wire.size), pieces_of(target, wire.size)
        count = slabs(given, way.chunk)
        pipeline(in_pieces(wire, cut(given, k, count), cut(wanted, k, count), op) for k in range(count))
        return
    count = slabs([source], way.chunk)
    for_slab = _WHOLE.get(way.algorithm) or partial(tree.all_reduce, base=way.base)
    slab = (cut([source, target], k, count) for k in range(count))
    pipeline(for_slab(wire, ours, theirs, op) for ours, theirs in slab)


def reduce(
    wire: Wire,
    source: torch.Tensor,
    target: torch.Tensor | None,
    root: int,
    op: ReduceOp = ReduceOp.SUM,
    way: Way | None = None,
) -> None:
    """The root's ``target`` becomes the reduction of all ranks' ``source``. The others' is not used."""
    check(op, source.dtype)
    with _flat(wire, [target] if target is not None and wire.me == root else []) as outs, torch.inference_mode():
        ours = _plain(wire, source)
        if (board := _board(wire, way, ours)) is not None:
            board.reduce(wire, ours, next(iter(outs), None), op)
            return
        way = way or choose("reduce", _nbytes(ours), wire.size)
        if way.algorithm == "tree":
            count = slabs([ours], way.chunk)
            pipeline(
                tree.reduce(wire, cut([ours], k, count)[0], next(iter(cut(outs, k, count)), None), op, root, way.base)
                for k in range(count)
            )
            return
        pieces = pieces_of(ours, wire.size)
        theirs = pieces_of(outs[0], wire.size) if outs else []
        mine = theirs[root] if outs else scratch(pieces[wire.me])
        count = slabs(pieces, way.chunk)
        pipeline(
            _reduce_to(wire, cut(pieces, k, count), cut([mine], k, count)[0], cut(theirs, k, count), root, op)
            for k in range(count)
        )


def _reduce_to(
    wire: Wire, source: direct.Pieces, mine: torch.Tensor, targets: direct.Pieces, root: int, op: ReduceOp
) -> Iterator[None]:
    yield from direct.reduce_scatter(wire, source, mine, op)
    yield from direct.gather(wire, mine, targets, root)


def broadcast(
    wire: Wire, tensor: torch.Tensor, root: int, way: Way | None = None, hosts: Sequence[object] | None = None
) -> None:
    """``tensor`` of every rank becomes that of the root."""
    with _flat(wire, [tensor], reads=wire.me == root) as (flat,), torch.inference_mode():
        if (board := _board(wire, way, flat)) is not None:
            board.broadcast(wire, flat, root)
            return
        way = way or choose("broadcast", _nbytes(flat), wire.size)
        if hosts is not None and (who := hierarchical.Hosts(hosts, wire.me)).helps:
            hierarchical.broadcast(wire, flat, root, who, way.chunk)
            return
        count = slabs([flat], way.chunk)
        pipeline(tree.broadcast(wire, cut([flat], k, count)[0], root, way.base) for k in range(count))


def all_gather(wire: Wire, source: torch.Tensor, targets: Sequence[torch.Tensor], way: Way | None = None) -> None:
    """``targets[i]`` of every rank becomes rank i's ``source``. They may differ in length."""
    with _flat(wire, targets) as outs, torch.inference_mode():
        wire.copy(_plain(wire, source), outs[wire.me])
        if (board := _board(wire, way, *outs)) is not None:
            board.all_gather(wire, outs[wire.me], outs)
            return
        way = way or choose("all_gather", sum(map(_nbytes, outs)), wire.size)
        steps = ring.all_gather if way.algorithm == "ring" else direct.all_gather
        pipeline(steps(wire, cut_apart(outs, k, way.chunk)) for k in range(slabs(outs, way.chunk)))


def gather(wire: Wire, source: torch.Tensor, targets: Sequence[torch.Tensor] | None, root: int) -> None:
    """The root's ``targets[i]`` becomes rank i's ``source``; they may differ in length. The others' are not used."""
    with _flat(wire, targets if targets is not None and wire.me == root else []) as outs, torch.inference_mode():
        ours, chunk = _plain(wire, source), choose("gather", 0, wire.size).chunk
        if outs:
            wire.copy(ours, outs[root])
        pipeline(
            direct.gather(wire, cut_apart([ours], k, chunk)[0], cut_apart(outs, k, chunk), root)
            for k in range(slabs([ours, *outs], chunk))
        )


def scatter(wire: Wire, sources: Sequence[torch.Tensor] | None, target: torch.Tensor, root: int) -> None:
    """Rank i's ``target`` becomes the root's ``sources[i]``; they may differ in length. The others' are not used."""
    with _flat(wire, [target]) as (out,), torch.inference_mode():
        ours = [_plain(wire, source) for source in sources or ()] if wire.me == root else []
        chunk = choose("scatter", 0, wire.size).chunk
        pipeline(
            direct.scatter(wire, cut_apart(ours, k, chunk), cut_apart([out], k, chunk)[0], root)
            for k in range(slabs([out, *ours], chunk))
        )
        if ours:
            wire.settle()  # ``target`` may be one of the sources
            wire.copy(ours[root], out)


def reduce_scatter(
    wire: Wire,
    sources: Sequence[torch.Tensor],
    target: torch.Tensor,
    op: ReduceOp = ReduceOp.SUM,
    way: Way | None = None,
) -> None:
    """Rank i's ``target`` becomes the reduction of all ranks' ``sources[i]``; these may differ in length."""
    check(op, target.dtype)
    with _flat(wire, [target]) as (out,), torch.inference_mode():
        ours = [_plain(wire, source) for source in sources]
        way = way or choose("reduce_scatter", sum(map(_nbytes, ours)), wire.size)
        steps = ring.reduce_scatter if way.algorithm == "ring" else direct.reduce_scatter
        count = slabs(ours, way.chunk)
        pipeline(steps(wire, cut(ours, k, count), cut([out], k, count)[0], op) for k in range(count))


def all_to_all(wire: Wire, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
    """``targets[i]`` becomes rank i's ``sources[me]``; they may differ in length."""
    with _flat(wire, targets) as outs, torch.inference_mode():
        used = {out.untyped_storage().data_ptr() for out in outs}
        ours = [_plain(wire, source) for source in sources]
        ours = [s.clone() if s.untyped_storage().data_ptr() in used else s for s in ours]
        chunk = choose("all_to_all", 0, wire.size).chunk
        wire.copy(ours[wire.me], outs[wire.me])
        pipeline(
            direct.exchange(wire, cut_apart(ours, k, chunk), cut_apart(outs, k, chunk))
            for k in range(slabs([*ours, *outs], chunk))
        )


def sendreceive(wire: Wire, source: torch.Tensor, target: torch.Tensor, to: int, origin: int) -> None:
    """``source`` goes to rank ``to``, ``target`` comes from rank ``origin``: a shift, if all pass as many on. Both may
    be one tensor."""
    with _flat(wire, [target]) as (out,), torch.inference_mode():
        ours, chunk = _plain(wire, source), choose("sendreceive", 0, wire.size).chunk
        if ours.untyped_storage().data_ptr() == out.untyped_storage().data_ptr():
            ours = ours.clone()
        if to == wire.me:
            wire.copy(ours, out)
        pipeline(
            _shift(wire, cut_apart([ours], k, chunk)[0], cut_apart([out], k, chunk)[0], to, origin)
            for k in range(slabs([ours, out], chunk))
        )


def _shift(
    wire: Wire, source: torch.Tensor | None, target: torch.Tensor | None, to: int, origin: int
) -> Iterator[None]:
    coming = wire.fill(target, origin) if target is not None and origin != wire.me else None
    if source is not None and to != wire.me:
        wire.send(source, to)
    yield
    if coming is not None:
        coming.get()


def barrier(wire: Wire) -> None:
    """Returns when every rank has called it."""
    nothing = torch.empty(0, dtype=torch.uint8)
    all_reduce(wire, nothing, nothing, ReduceOp.BOR)


def _board(wire: Wire, way: Way | None, *tensors: torch.Tensor) -> Board | None:
    """What small tensors go by, where nobody has named another way. All ranks answer alike."""
    if wire.boards is None or way is not None or any(_nbytes(tensor) > SLOT for tensor in tensors):
        return None
    board: Board | None = wire.boards.of(wire)
    return board


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _plain(wire: Wire, tensor: torch.Tensor) -> torch.Tensor:
    """Its elements, flat, in CPU memory: its own where they lie so. Anything, if that fails: the others are told."""
    try:
        return plain(tensor.detach()).view(-1)
    except Exception as error:
        wire.fail(error)
        return scratch(tensor)


@contextmanager
def _flat(wire: Wire, targets: Sequence[torch.Tensor], reads: bool = False) -> Iterator[list[torch.Tensor]]:
    """The memory of ``targets`` to write to, flat, or what stands for it until the wire's end. ``reads``: with what is
    in it."""
    outs = [t.detach().view(-1) if is_plain(t) else _plain(wire, t) if reads else scratch(t) for t in targets]
    yield outs
    wire.end()
    for target, out in zip(targets, outs, strict=True):
        if not is_plain(target):
            store(target, out)
