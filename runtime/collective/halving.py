"""Recursive algorithms: log2(n) rounds with partners that are 1, 2, 4, ... ranks away.

Ranks beyond a power of two fold: each gives its data to a partner first, and is given the result at the end.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from .exchange import Steps, Wire
from .reduction import ReduceOp


def _folded(wire: Wire) -> tuple[int, int]:
    """How many ranks fold, and our number among those that go on (-1: we fold). Of the first ``2 * folds`` ranks the
    odd ones fold into the even ones."""
    folds = wire.size - (1 << wire.size.bit_length() - 1)
    if wire.me >= 2 * folds:
        return folds, wire.me - folds
    return folds, -1 if wire.me % 2 else wire.me // 2


def _rank(number: int, folds: int) -> int:
    return number + folds if number >= folds else 2 * number


def _masks(wire: Wire) -> Iterator[int]:
    mask = 1
    while 2 * mask <= wire.size:
        yield mask
        mask *= 2


def all_reduce(wire: Wire, source: torch.Tensor, target: torch.Tensor, op: ReduceOp) -> Steps:
    """Halving, then doubling: in each round half of what a rank is still busy with. Moves as much as a ring."""
    folds, number = _folded(wire)
    if number < 0:
        coming = wire.fill(target, wire.me - 1)
        wire.send(source, wire.me - 1)
    elif folds and wire.me < 2 * folds:
        first = wire.take(source, wire.me + 1)
        yield
        source = wire.combine(op, source, first.get(), target)
    if not (number >= 0 and wire.me < 2 * folds):
        yield
    low, high = 0, source.numel()
    steps: list[tuple[int, slice, int, int]] = []  #: partner, what it goes on with, what of both of us there was
    for mask in _masks(wire):
        if number < 0:
            yield
            continue
        partner, middle = _rank(number ^ mask, folds), (low + high) // 2
        kept, given = slice(low, middle), slice(middle, high)
        if number & mask:
            kept, given = given, kept
        steps.append((partner, given, low, high))
        half = wire.take(source[kept], partner)
        wire.send(source[given], partner)
        yield
        part = half.get()
        wire.combine(op, source[kept], part, target[kept])
        source = target
        low, high = kept.start, kept.stop
    if number >= 0:
        if not steps:
            wire.copy(source, target)
        wire.finish(op, target[low:high])
    for _ in _masks(wire):
        if number < 0:
            yield
            continue
        partner, given, low_before, high_before = steps.pop()
        half = wire.fill(target[given], partner)
        wire.send(target[low:high], partner)
        yield
        half.get()
        low, high = low_before, high_before
    if number < 0:
        coming.get()
    elif folds and wire.me < 2 * folds:
        wire.send(target, wire.me + 1)


def all_reduce_whole(wire: Wire, source: torch.Tensor, target: torch.Tensor, op: ReduceOp) -> Steps:
    """Doubling only: in each round everything that a rank has. Fewest rounds, for what is small."""
    folds, number = _folded(wire)
    total = source
    if number < 0:
        coming = wire.fill(target, wire.me - 1)
        wire.send(source, wire.me - 1)
    elif folds and wire.me < 2 * folds:
        first = wire.take(source, wire.me + 1)
        yield
        part = first.get()
        total = wire.combine(op, source, part, part)
    if not (number >= 0 and wire.me < 2 * folds):
        yield
    for mask in _masks(wire):
        if number < 0:
            yield
            continue
        partner = _rank(number ^ mask, folds)
        whole = wire.take(source, partner)
        wire.send(total, partner)
        yield
        part, total = whole.get(), wire.rounded(total)
        a, b = (part, total) if number & mask else (total, part)
        total = wire.combine(op, a, b, part)
    if number < 0:
        coming.get()
        return
    wire.settle()  # ``target`` may be ``source``, which was sent
    wire.copy(total, target)
    wire.finish(op, target)
    if folds and wire.me < 2 * folds:
        wire.send(target, wire.me + 1)
