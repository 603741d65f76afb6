"""The collectives. Every rank of a group calls the same one, each with its own ``Exchange`` over the same base id.

Tensors may have any strides and be on any device; those that are not plain CPU memory are staged. Sources stay as they
are unless they are a target too. Each call ends with ``Exchange.close``: it raises PoisonedError, BrokenError or the
error of this rank, after this rank has done its part for the others; targets have arbitrary contents then. Mistakes
that all ranks make (dtypes, lengths) raise before any message.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch

from ..channel.payload import is_plain, plain, scratch, store
from ..protocol.flat import flattened
from . import direct, halving, hierarchical, ring, tree
from .algorithm_table import Way, choose
from .cut import cut, cut_apart, pieces_of, slabs
from .exchange import Exchange, pipeline
from .reduction import ReduceOp, check
from .shared_pages import SLOT, SharedPages


def all_reduce(
    exchange: Exchange,
    source: torch.Tensor,
    target: torch.Tensor,
    op: ReduceOp = ReduceOp.SUM,
    way: Way | None = None,
    hosts: Sequence[object] | None = None,
) -> None:
    """Reduces all ranks' ``source`` into ``target`` of every rank; all get the same bits.

    Args:
        exchange: this rank's end of the collective.
        source: this rank's contribution.
        target: gets the result; of the shape of ``source``.
        op: the operation.
        way: the algorithm; None chooses one by the table.
        hosts: ``hosts[i]`` names the host of rank i; with them the algorithm is hierarchical where that helps.
    """
    check(op, source.dtype)
    with _flat(exchange, [target]) as (out,), torch.inference_mode():
        ours = _plain(exchange, source)
        if (pages := _pages(exchange, way, ours)) is not None:
            pages.all_reduce(exchange, ours, out, op)
        elif hosts is not None and (who := hierarchical.Hosts(hosts, exchange.me)).helps:
            outer = way or choose("all_reduce", _nbytes(ours), len(who.members))
            hierarchical.all_reduce(exchange, ours, out, op, who, outer.chunk, partial(_all_reduce, outer))
        else:
            _all_reduce(way or choose("all_reduce", _nbytes(ours), exchange.size), exchange, ours, out, op)


_WHOLE = {"all": direct.all_reduce_whole, "doubling": halving.all_reduce_whole, "halving": halving.all_reduce}


def _all_reduce(way: Way, exchange: Exchange, source: torch.Tensor, target: torch.Tensor, op: ReduceOp) -> None:
    if way.algorithm in ("ring", "direct"):
        in_pieces = ring.all_reduce if way.algorithm == "ring" else direct.all_reduce
        given, wanted = pieces_of(source, exchange.size), pieces_of(target, exchange.size)
        count = slabs(given, way.chunk)
        pipeline(in_pieces(exchange, cut(given, k, count), cut(wanted, k, count), op) for k in range(count))
        return
    count = slabs([source], way.chunk)
    for_slab = _WHOLE.get(way.algorithm) or partial(tree.all_reduce, base=way.base)
    slab = (cut([source, target], k, count) for k in range(count))
    pipeline(for_slab(exchange, ours, theirs, op) for ours, theirs in slab)


def reduce(
    exchange: Exchange,
    source: torch.Tensor,
    target: torch.Tensor | None,
    root: int,
    op: ReduceOp = ReduceOp.SUM,
    way: Way | None = None,
) -> None:
    """Reduces all ranks' ``source`` into the root's ``target``. The others' ``target`` is not used."""
    check(op, source.dtype)
    with (
        _flat(exchange, [target] if target is not None and exchange.me == root else []) as outs,
        torch.inference_mode(),
    ):
        ours = _plain(exchange, source)
        if (pages := _pages(exchange, way, ours)) is not None:
            pages.reduce(exchange, ours, next(iter(outs), None), op)
            return
        way = way or choose("reduce", _nbytes(ours), exchange.size)
        if way.algorithm == "tree":
            count = slabs([ours], way.chunk)
            pipeline(
                tree.reduce(
                    exchange, cut([ours], k, count)[0], next(iter(cut(outs, k, count)), None), op, root, way.base
                )
                for k in range(count)
            )
            return
        pieces = pieces_of(ours, exchange.size)
        theirs = pieces_of(outs[0], exchange.size) if outs else []
        mine = theirs[root] if outs else scratch(pieces[exchange.me])
        count = slabs(pieces, way.chunk)
        pipeline(
            _reduce_to(exchange, cut(pieces, k, count), cut([mine], k, count)[0], cut(theirs, k, count), root, op)
            for k in range(count)
        )


def _reduce_to(
    exchange: Exchange, source: direct.Pieces, mine: torch.Tensor, targets: direct.Pieces, root: int, op: ReduceOp
) -> Iterator[None]:
    yield from direct.reduce_scatter(exchange, source, mine, op)
    yield from direct.gather(exchange, mine, targets, root)


def broadcast(
    exchange: Exchange, tensor: torch.Tensor, root: int, way: Way | None = None, hosts: Sequence[object] | None = None
) -> None:
    """Sends the root's ``tensor`` into that of every rank."""
    with _flat(exchange, [tensor], reads=exchange.me == root) as (flat,), torch.inference_mode():
        if (pages := _pages(exchange, way, flat)) is not None:
            pages.broadcast(exchange, flat, root)
            return
        way = way or choose("broadcast", _nbytes(flat), exchange.size)
        if hosts is not None and (who := hierarchical.Hosts(hosts, exchange.me)).helps:
            hierarchical.broadcast(exchange, flat, root, who, way.chunk)
            return
        count = slabs([flat], way.chunk)
        pipeline(tree.broadcast(exchange, cut([flat], k, count)[0], root, way.base) for k in range(count))


def all_gather(
    exchange: Exchange, source: torch.Tensor, targets: Sequence[torch.Tensor], way: Way | None = None
) -> None:
    """Makes ``targets[i]`` of every rank that rank's ``source``: that of rank i. They may differ in length."""
    with _flat(exchange, targets) as outs, torch.inference_mode():
        exchange.copy(_plain(exchange, source), outs[exchange.me])
        if (pages := _pages(exchange, way, *outs)) is not None:
            pages.all_gather(exchange, outs[exchange.me], outs)
            return
        way = way or choose("all_gather", sum(map(_nbytes, outs)), exchange.size)
        steps = ring.all_gather if way.algorithm == "ring" else direct.all_gather
        pipeline(steps(exchange, cut_apart(outs, k, way.chunk)) for k in range(slabs(outs, way.chunk)))


def gather(exchange: Exchange, source: torch.Tensor, targets: Sequence[torch.Tensor] | None, root: int) -> None:
    """Makes the root's ``targets[i]`` rank i's ``source``; they may differ in length. The others' are not used."""
    with (
        _flat(exchange, targets if targets is not None and exchange.me == root else []) as outs,
        torch.inference_mode(),
    ):
        ours, chunk = _plain(exchange, source), choose("gather", 0, exchange.size).chunk
        if outs:
            exchange.copy(ours, outs[root])
        pipeline(
            direct.gather(exchange, cut_apart([ours], k, chunk)[0], cut_apart(outs, k, chunk), root)
            for k in range(slabs([ours, *outs], chunk))
        )


def scatter(exchange: Exchange, sources: Sequence[torch.Tensor] | None, target: torch.Tensor, root: int) -> None:
    """Makes rank i's ``target`` the root's ``sources[i]``; they may differ in length. The others' are not used."""
    with _flat(exchange, [target]) as (out,), torch.inference_mode():
        ours = [_plain(exchange, source) for source in sources or ()] if exchange.me == root else []
        chunk = choose("scatter", 0, exchange.size).chunk
        pipeline(
            direct.scatter(exchange, cut_apart(ours, k, chunk), cut_apart([out], k, chunk)[0], root)
            for k in range(slabs([out, *ours], chunk))
        )
        if ours:
            exchange.wait_for_sends()  # ``target`` may be one of the sources
            exchange.copy(ours[root], out)


def reduce_scatter(
    exchange: Exchange,
    sources: Sequence[torch.Tensor],
    target: torch.Tensor,
    op: ReduceOp = ReduceOp.SUM,
    way: Way | None = None,
) -> None:
    """Reduces all ranks' ``sources[i]`` into rank i's ``target``; these may differ in length."""
    check(op, target.dtype)
    with _flat(exchange, [target]) as (out,), torch.inference_mode():
        ours = [_plain(exchange, source) for source in sources]
        way = way or choose("reduce_scatter", sum(map(_nbytes, ours)), exchange.size)
        steps = ring.reduce_scatter if way.algorithm == "ring" else direct.reduce_scatter
        count = slabs(ours, way.chunk)
        pipeline(steps(exchange, cut(ours, k, count), cut([out], k, count)[0], op) for k in range(count))


def all_to_all(exchange: Exchange, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
    """Makes ``targets[i]`` rank i's ``sources[me]``; they may differ in length."""
    with _flat(exchange, targets) as outs, torch.inference_mode():
        used = {out.untyped_storage().data_ptr() for out in outs}
        ours = [_plain(exchange, source) for source in sources]
        ours = [s.clone() if s.untyped_storage().data_ptr() in used else s for s in ours]
        chunk = choose("all_to_all", 0, exchange.size).chunk
        exchange.copy(ours[exchange.me], outs[exchange.me])
        pipeline(
            direct.all_to_all(exchange, cut_apart(ours, k, chunk), cut_apart(outs, k, chunk))
            for k in range(slabs([*ours, *outs], chunk))
        )


def sendreceive(exchange: Exchange, source: torch.Tensor, target: torch.Tensor, to: int, origin: int) -> None:
    """Sends ``source`` to rank ``to``, and receives ``target`` from rank ``origin``: a shift, if all pass as many on.

    Both may be one tensor.
    """
    with _flat(exchange, [target]) as (out,), torch.inference_mode():
        ours, chunk = _plain(exchange, source), choose("sendreceive", 0, exchange.size).chunk
        if ours.untyped_storage().data_ptr() == out.untyped_storage().data_ptr():
            ours = ours.clone()
        if to == exchange.me:
            exchange.copy(ours, out)
        pipeline(
            _shift(exchange, cut_apart([ours], k, chunk)[0], cut_apart([out], k, chunk)[0], to, origin)
            for k in range(slabs([ours, out], chunk))
        )


def _shift(
    exchange: Exchange, source: torch.Tensor | None, target: torch.Tensor | None, to: int, origin: int
) -> Iterator[None]:
    coming = exchange.recv_into(target, origin) if target is not None and origin != exchange.me else None
    if source is not None and to != exchange.me:
        exchange.send(source, to)
    yield
    if coming is not None:
        coming.get()


def barrier(exchange: Exchange) -> None:
    """Returns when every rank has called it."""
    nothing = torch.empty(0, dtype=torch.uint8)
    all_reduce(exchange, nothing, nothing, ReduceOp.BOR)


def _pages(exchange: Exchange, way: Way | None, *tensors: torch.Tensor) -> SharedPages | None:
    """Returns the shared pages for small tensors, where nobody has named an algorithm. All ranks answer alike."""
    if exchange.shared_pages is None or way is not None or any(_nbytes(tensor) > SLOT for tensor in tensors):
        return None
    pages: SharedPages | None = exchange.shared_pages.of(exchange)
    return pages


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _plain(exchange: Exchange, tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor's elements, flat, in CPU memory: its own where they lie so.

    Arbitrary contents, if that fails: the others are told.
    """
    try:
        return flattened(plain(tensor.detach()))
    except Exception as error:
        exchange.fail(error)
        return scratch(tensor)


@contextmanager
def _flat(exchange: Exchange, targets: Sequence[torch.Tensor], reads: bool = False) -> Iterator[list[torch.Tensor]]:
    """Yields the memory of ``targets`` to write to, flat, or temporary memory that is copied at the exchange's end.

    ``reads``: they are read only, and the temporary memory has their contents.
    """
    outs = [flattened(t.detach()) if is_plain(t) else _plain(exchange, t) if reads else scratch(t) for t in targets]
    yield outs
    exchange.close()
    for target, out in zip(targets, outs, strict=True):
        if not reads and not is_plain(target):
            store(target, out)
