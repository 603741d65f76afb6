"""Tree algorithms. In a tree of base ``b`` rank ``v`` has the children ``b * v + 1`` to ``b * v + b``.

Ranks are counted from the root. A tree of base 1 is a chain, of a base of at least the group's size a star.
"""

from __future__ import annotations

import torch

from .exchange import Exchange, Steps
from .reduction import ReduceOp


class Tree:
    """This rank's place in a tree."""

    def __init__(self, size: int, me: int, root: int, base: int) -> None:
        place = (me - root) % size
        self.parent = None if me == root else ((place - 1) // base + root) % size
        children = range(base * place + 1, min(base * place + base + 1, size))
        self.children = [(child + root) % size for child in children]
        self.depth, self.deepest = _depth(place, base), _depth(size - 1, base)


def _depth(place: int, base: int) -> int:
    depth = 0
    while place:
        place, depth = (place - 1) // base, depth + 1
    return depth


def reduce(
    exchange: Exchange, source: torch.Tensor, target: torch.Tensor | None, op: ReduceOp, root: int, base: int
) -> Steps:
    """Reduces all ranks' ``source`` into the root's ``target``; ``source`` stays unless it is the same."""
    tree = Tree(exchange.size, exchange.me, root, base)
    coming = [exchange.recv(source, child) for child in tree.children]
    total = source
    for level in range(tree.deepest, -1, -1):
        if level == tree.depth:
            for i, message in enumerate(coming):
                part = message.get()
                last = tree.parent is None and i == len(coming) - 1
                total = exchange.combine(op, total, part, target if last else part)
            if tree.parent is not None:
                exchange.send(total, tree.parent)
        if level:
            yield
    if tree.parent is None and target is not None:
        exchange.copy(total, target)
        exchange.finish(op, target)


def broadcast(exchange: Exchange, tensor: torch.Tensor, root: int, base: int) -> Steps:
    """Sends the root's ``tensor`` into that of all ranks."""
    tree = Tree(exchange.size, exchange.me, root, base)
    coming = None if tree.parent is None else exchange.recv_into(tensor, tree.parent)
    for level in range(tree.deepest + 1):
        if level == tree.depth:
            if coming is not None:
                coming.get()
            for child in tree.children:
                exchange.send(tensor, child)
        if level < tree.deepest:
            yield


def all_reduce(exchange: Exchange, source: torch.Tensor, target: torch.Tensor, op: ReduceOp, base: int) -> Steps:
    """Reduces to rank 0, and sends the result back."""
    yield from reduce(exchange, source, target if exchange.me == 0 else None, op, 0, base)
    yield
    yield from broadcast(exchange, target, 0, base)
