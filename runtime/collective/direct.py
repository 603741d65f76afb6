"""Direct algorithms: every rank talks to every other. One round per phase.

Reductions happen in the order of ranks, so that a sum has the bits of ``x[0] + x[1] + x[2] + ...``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .exchange import Exchange, Incoming, Steps
from .reduction import ReduceOp

Pieces = Sequence[torch.Tensor]
#: Parts of pieces; None: the piece has no part in this slab.
Parts = Sequence[torch.Tensor | None]


def _others(exchange: Exchange) -> list[tuple[int, int]]:
    """Returns (to, from) pairs, so that at each moment every rank sends to another one."""
    return [((exchange.me + d) % exchange.size, (exchange.me - d) % exchange.size) for d in range(1, exchange.size)]


def _reduce(
    exchange: Exchange, mine: torch.Tensor, coming: dict[int, Incoming], target: torch.Tensor, op: ReduceOp
) -> None:
    """Reduces in the order of ranks, into memory that arrived until the last one, for ``target`` may be ``mine``."""
    total, spare = mine, None
    for i in range(exchange.size):
        part = mine if i == exchange.me else coming[i].get()
        if i != exchange.me and spare is None:
            spare = part
        if i:
            part = exchange.combine(op, total, part, target if i == exchange.size - 1 else spare)
        total = part
    if exchange.size == 1:
        exchange.copy(total, target)


def reduce_scatter(exchange: Exchange, source: Pieces, target: torch.Tensor, op: ReduceOp) -> Steps:
    """Reduces all ranks' ``source[me]`` into ``target``; ``source`` stays, except where it is ``target``."""
    mine, coming = source[exchange.me], {}
    for to, other in _others(exchange):
        coming[other] = exchange.recv(mine, other)
        exchange.send(source[to], to)
    yield
    _reduce(exchange, mine, coming, target, op)
    exchange.finish(op, target)


def all_gather(exchange: Exchange, pieces: Parts) -> Steps:
    """Makes ``pieces[i]`` of all ranks that of rank i. They may be of different lengths."""
    yield from all_to_all(exchange, [pieces[exchange.me]] * exchange.size, pieces)


def all_reduce(exchange: Exchange, source: Pieces, target: Pieces, op: ReduceOp) -> Steps:
    yield from reduce_scatter(exchange, source, target[exchange.me], op)
    yield from all_gather(exchange, target)


def all_reduce_whole(exchange: Exchange, source: torch.Tensor, target: torch.Tensor, op: ReduceOp) -> Steps:
    """Reduces in one round: every rank sends everything to every other. For small tensors."""
    coming = {}
    for to, other in _others(exchange):
        coming[other] = exchange.recv(source, other)
        exchange.send(source, to)
    yield
    for message in coming.values():
        message.get()
    exchange.wait_for_sends()  # that the others' contributions have arrived does not say that this rank's has
    _reduce(exchange, exchange.rounded(source), coming, target, op)
    exchange.finish(op, target)


def all_to_all(exchange: Exchange, sources: Parts, targets: Parts) -> Steps:
    """Sends ``sources[i]`` to rank i, and receives ``targets[i]`` from there; not from this rank itself."""
    coming = []
    for to, other in _others(exchange):
        if (target := targets[other]) is not None:
            coming.append(exchange.recv_into(target, other))
        if (source := sources[to]) is not None:
            exchange.send(source, to)
    yield
    for message in coming:
        message.get()


def gather(exchange: Exchange, source: torch.Tensor | None, targets: Parts, root: int) -> Steps:
    """Makes the root's ``targets[i]`` rank i's ``source``; the root does not copy its own."""
    coming = []
    if exchange.me == root:
        coming = [exchange.recv_into(target, i) for i, target in enumerate(targets) if i != root and target is not None]
    elif source is not None:
        exchange.send(source, root)
    yield
    for message in coming:
        message.get()


def scatter(exchange: Exchange, sources: Parts, target: torch.Tensor | None, root: int) -> Steps:
    """Makes rank i's ``target`` the root's ``sources[i]``; the root does not copy its own."""
    coming = []
    if exchange.me != root and target is not None:
        coming = [exchange.recv_into(target, root)]
    for i, source in enumerate(sources):
        if exchange.me == root and i != root and source is not None:
            exchange.send(source, i)
    yield
    for message in coming:
        message.get()
