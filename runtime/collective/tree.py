"""Trees of any base: rank ``v``, counted from the root, has the children ``base * v + 1`` to ``base * v + base``.
Of base 1 it is a chain, of a base of at least the group's size a star."""

from __future__ import annotations

import torch

from .exchange import Steps, Wire
from .reduction import ReduceOp


class Tree:
    """Our place in one."""

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


def reduce(wire: Wire, source: torch.Tensor, target: torch.Tensor | None, op: ReduceOp, root: int, base: int) -> Steps:
    """The root's ``target`` becomes the reduction of all ranks' ``source``, which stays unless it is the same."""
    tree = Tree(wire.size, wire.me, root, base)
    coming = [wire.take(source, child) for child in tree.children]
    total = source
    for level in range(tree.deepest, -1, -1):
        if level == tree.depth:
            for i, message in enumerate(coming):
                part = message.get()
                last = tree.parent is None and i == len(coming) - 1
                total = wire.combine(op, total, part, target if last else part)
            if tree.parent is not None:
                wire.send(total, tree.parent)
        if level:
            yield
    if tree.parent is None and target is not None:
        wire.copy(total, target)
        wire.finish(op, target)


def broadcast(wire: Wire, tensor: torch.Tensor, root: int, base: int) -> Steps:
    """``tensor`` of all ranks becomes that of the root."""
    tree = Tree(wire.size, wire.me, root, base)
    coming = None if tree.parent is None else wire.fill(tensor, tree.parent)
    for level in range(tree.deepest + 1):
        if level == tree.depth:
            if coming is not None:
                coming.get()
            for child in tree.children:
                wire.send(tensor, child)
        if level < tree.deepest:
            yield


def all_reduce(wire: Wire, source: torch.Tensor, target: torch.Tensor, op: ReduceOp, base: int) -> Steps:
    """To rank 0, and back."""
    yield from reduce(wire, source, target if wire.me == 0 else None, op, 0, base)
    yield
    yield from broadcast(wire, target, 0, base)
