"""Recursive algorithms: log2(n) rounds with partners that are 1, 2, 4, ... ranks away.

Ranks beyond a power of two fold: each gives its data to a partner first, and is given the result at the end.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from .exchange import Exchange, Steps
from .reduction import ReduceOp


def _folded(exchange: Exchange) -> tuple[int, int]:
    """Returns the number of ranks that fold, and this rank's number among those that go on (-1: it folds).

    Of the first ``2 * folds`` ranks the odd ones fold into the even ones.
    """
    folds = exchange.size - (1 << exchange.size.bit_length() - 1)
    if exchange.me >= 2 * folds:
        return folds, exchange.me - folds
    return folds, -1 if exchange.me % 2 else exchange.me // 2


def _rank(number: int, folds: int) -> int:
    return number + folds if number >= folds else 2 * number


def _masks(exchange: Exchange) -> Iterator[int]:
    mask = 1
    while 2 * mask <= exchange.size:
        yield mask
        mask *= 2


def all_reduce(exchange: Exchange, source: torch.Tensor, target: torch.Tensor, op: ReduceOp) -> Steps:
    """Reduces by halving, then doubling: in each round half of the data that a rank still works on.

    Moves as much as a ring.
    """
    folds, number = _folded(exchange)
    if number < 0:
        coming = exchange.recv_into(target, exchange.me - 1)
        exchange.send(source, exchange.me - 1)
    elif folds and exchange.me < 2 * folds:
        first = exchange.recv(source, exchange.me + 1)
        yield
        source = exchange.combine(op, source, first.get(), target)
    if not (number >= 0 and exchange.me < 2 * folds):
        yield
    low, high = 0, source.numel()
    #: partner, the slice that it goes on with, and the range that both had before
    steps: list[tuple[int, slice, int, int]] = []
    for mask in _masks(exchange):
        if number < 0:
            yield
            continue
        partner, middle = _rank(number ^ mask, folds), (low + high) // 2
        kept, given = slice(low, middle), slice(middle, high)
        if number & mask:
            kept, given = given, kept
        steps.append((partner, given, low, high))
        half = exchange.recv(source[kept], partner)
        exchange.send(source[given], partner)
        yield
        part = half.get()
        exchange.combine(op, source[kept], part, target[kept])
        source = target
        low, high = kept.start, kept.stop
    if number >= 0:
        if not steps:
            exchange.copy(source, target)
        exchange.finish(op, target[low:high])
    for _ in _masks(exchange):
        if number < 0:
            yield
            continue
        partner, given, low_before, high_before = steps.pop()
        half = exchange.recv_into(target[given], partner)
        exchange.send(target[low:high], partner)
        yield
        half.get()
        low, high = low_before, high_before
    if number < 0:
        coming.get()
    elif folds and exchange.me < 2 * folds:
        exchange.send(target, exchange.me + 1)


def all_reduce_whole(exchange: Exchange, source: torch.Tensor, target: torch.Tensor, op: ReduceOp) -> Steps:
    """Reduces by doubling only: in each round all data of a rank. Fewest rounds, for small tensors."""
    folds, number = _folded(exchange)
    total = source
    if number < 0:
        coming = exchange.recv_into(target, exchange.me - 1)
        exchange.send(source, exchange.me - 1)
    elif folds and exchange.me < 2 * folds:
        first = exchange.recv(source, exchange.me + 1)
        yield
        part = first.get()
        total = exchange.combine(op, source, part, part)
    if not (number >= 0 and exchange.me < 2 * folds):
        yield
    for mask in _masks(exchange):
        if number < 0:
            yield
            continue
        partner = _rank(number ^ mask, folds)
        whole = exchange.recv(source, partner)
        exchange.send(total, partner)
        yield
        part, total = whole.get(), exchange.rounded(total)
        a, b = (part, total) if number & mask else (total, part)
        total = exchange.combine(op, a, b, part)
    if number < 0:
        coming.get()
        return
    exchange.wait_for_sends()  # ``target`` may be ``source``, which was sent
    exchange.copy(total, target)
    exchange.finish(op, target)
    if folds and exchange.me < 2 * folds:
        exchange.send(target, exchange.me + 1)
