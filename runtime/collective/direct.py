"""Direct algorithms: every rank talks to every other. One round per phase, and reductions happen in the order of ranks,
so that a sum has the bits of ``x[0] + x[1] + x[2] + ...``."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .exchange import Incoming, Steps, Wire
from .reduction import ReduceOp

Pieces = Sequence[torch.Tensor]
#: None: there is nothing of it in this slab.
Parts = Sequence[torch.Tensor | None]


def _others(wire: Wire) -> list[tuple[int, int]]:
    """(to, from), so that at each moment everybody sends to another one."""
    return [((wire.me + d) % wire.size, (wire.me - d) % wire.size) for d in range(1, wire.size)]


def _reduce(wire: Wire, mine: torch.Tensor, coming: dict[int, Incoming], target: torch.Tensor, op: ReduceOp) -> None:
    """In the order of ranks, into memory that arrived until the last one, for ``target`` may be ``mine``."""
    total, spare = mine, None
    for i in range(wire.size):
        part = mine if i == wire.me else coming[i].get()
        if i != wire.me and spare is None:
            spare = part
        if i:
            part = wire.combine(op, total, part, target if i == wire.size - 1 else spare)
        total = part
    if wire.size == 1:
        wire.copy(total, target)


def reduce_scatter(wire: Wire, source: Pieces, target: torch.Tensor, op: ReduceOp) -> Steps:
    """``target`` becomes the reduction of all ranks' ``source[me]``; ``source`` stays, but for what is ``target``."""
    mine, coming = source[wire.me], {}
    for to, other in _others(wire):
        coming[other] = wire.take(mine, other)
        wire.send(source[to], to)
    yield
    _reduce(wire, mine, coming, target, op)
    wire.finish(op, target)


def all_gather(wire: Wire, pieces: Parts) -> Steps:
    """``pieces[i]`` of all ranks becomes what it is on rank i. They may be of different lengths."""
    yield from exchange(wire, [pieces[wire.me]] * wire.size, pieces)


def all_reduce(wire: Wire, source: Pieces, target: Pieces, op: ReduceOp) -> Steps:
    yield from reduce_scatter(wire, source, target[wire.me], op)
    yield from all_gather(wire, target)


def all_reduce_whole(wire: Wire, source: torch.Tensor, target: torch.Tensor, op: ReduceOp) -> Steps:
    """One round: everybody sends everything to everybody. For what is small."""
    coming = {}
    for to, other in _others(wire):
        coming[other] = wire.take(source, other)
        wire.send(source, to)
    yield
    for message in coming.values():
        message.get()
    wire.settle()  # that the others' contributions are here does not say that ours is there
    _reduce(wire, wire.rounded(source), coming, target, op)
    wire.finish(op, target)


def exchange(wire: Wire, sources: Parts, targets: Parts) -> Steps:
    """``sources[i]`` goes to rank i, ``targets[i]`` comes from there; but for our own."""
    coming = []
    for to, other in _others(wire):
        if (target := targets[other]) is not None:
            coming.append(wire.fill(target, other))
        if (source := sources[to]) is not None:
            wire.send(source, to)
    yield
    for message in coming:
        message.get()


def gather(wire: Wire, source: torch.Tensor | None, targets: Parts, root: int) -> Steps:
    """The root's ``targets[i]`` becomes rank i's ``source``, but for its own."""
    coming = []
    if wire.me == root:
        coming = [wire.fill(target, i) for i, target in enumerate(targets) if i != root and target is not None]
    elif source is not None:
        wire.send(source, root)
    yield
    for message in coming:
        message.get()


def scatter(wire: Wire, sources: Parts, target: torch.Tensor | None, root: int) -> Steps:
    """Rank i's ``target`` becomes the root's ``sources[i]``, but for its own."""
    coming = []
    if wire.me != root and target is not None:
        coming = [wire.fill(target, root)]
    for i, source in enumerate(sources):
        if wire.me == root and i != root and source is not None:
            wire.send(source, i)
    yield
    for message in coming:
        message.get()
