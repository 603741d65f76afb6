"""Ring algorithms: each rank sends to the next and receives from the one before, so each link carries each byte once
per pass. A rank needs two connections, however large the group is."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .exchange import Steps, Wire
from .reduction import ReduceOp

Pieces = Sequence[torch.Tensor]
#: None: there is nothing of it in this slab.
Parts = Sequence[torch.Tensor | None]


def reduce_scatter(wire: Wire, source: Pieces, target: torch.Tensor, op: ReduceOp) -> Steps:
    """``target`` becomes the reduction of all ranks' ``source[me]``; ``source`` stays as it is, but for what of it is
    ``target``. A piece goes once around: from its owner's neighbour to its owner, growing on its way."""
    size, me = wire.size, wire.me
    part = source[(me - 1) % size]
    for step in range(size - 1):
        mine = source[(me - step - 2) % size]
        coming = wire.take(mine, (me - 1) % size)
        wire.send(part, (me + 1) % size)
        yield
        part = coming.get()
        last = step == size - 2
        part = wire.combine(op, part, mine, target if last else part)
    if size == 1:
        wire.copy(part, target)
    wire.finish(op, target)


def all_gather(wire: Wire, pieces: Parts) -> Steps:
    """``pieces[i]`` of all ranks becomes what it is on rank i. They may be of different lengths."""
    size, me = wire.size, wire.me
    for step in range(size - 1):
        empty, full = pieces[(me - step - 1) % size], pieces[(me - step) % size]
        coming = None if empty is None else wire.fill(empty, (me - 1) % size)
        if full is not None:
            wire.send(full, (me + 1) % size)
        yield
        if coming is not None:
            coming.get()


def all_reduce(wire: Wire, source: Pieces, target: Pieces, op: ReduceOp) -> Steps:
    yield from reduce_scatter(wire, source, target[wire.me], op)
    yield from all_gather(wire, target)
