"""Ring algorithms: each rank sends to the next and receives from the one before.

So each link carries each byte once per pass. A rank needs two connections, however large the group is.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .exchange import Exchange, Steps
from .reduction import ReduceOp

Pieces = Sequence[torch.Tensor]
#: Parts of pieces; None: the piece has no part in this slab.
Parts = Sequence[torch.Tensor | None]


def reduce_scatter(exchange: Exchange, source: Pieces, target: torch.Tensor, op: ReduceOp) -> Steps:
    """Reduces all ranks' ``source[me]`` into ``target``; ``source`` stays as it is, except where it is ``target``.

    A piece goes once around: from its owner's neighbour to its owner, growing on its way.
    """
    size, me = exchange.size, exchange.me
    part = source[(me - 1) % size]
    for step in range(size - 1):
        mine = source[(me - step - 2) % size]
        coming = exchange.recv(mine, (me - 1) % size)
        exchange.send(part, (me + 1) % size)
        yield
        part = coming.get()
        last = step == size - 2
        part = exchange.combine(op, part, mine, target if last else part)
    if size == 1:
        exchange.copy(part, target)
    exchange.finish(op, target)


def all_gather(exchange: Exchange, pieces: Parts) -> Steps:
    """Makes ``pieces[i]`` of all ranks that of rank i. They may be of different lengths."""
    size, me = exchange.size, exchange.me
    for step in range(size - 1):
        empty, full = pieces[(me - step - 1) % size], pieces[(me - step) % size]
        coming = None if empty is None else exchange.recv_into(empty, (me - 1) % size)
        if full is not None:
            exchange.send(full, (me + 1) % size)
        yield
        if coming is not None:
            coming.get()


def all_reduce(exchange: Exchange, source: Pieces, target: Pieces, op: ReduceOp) -> Steps:
    yield from reduce_scatter(exchange, source, target[exchange.me], op)
    yield from all_gather(exchange, target)
