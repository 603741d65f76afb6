"""Collectives in which a rank's share is not one tensor, but several, or a piece of a tensor that takes all shares.

Several tensors of a rank are one to the other ranks. A rank reduces its own first, takes part with one tensor
(``between``: the collective as it is for one each), and copies its result to its others. A rank in trouble goes through
``between`` all the same, which raises at its end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import torch

from ..channel.payload import plain, scratch, store
from ..protocol.flat import flattened
from .exchange import Exchange
from .reduction import ReduceOp

Tensors = Sequence[torch.Tensor]
#: The collective, called with this rank's inputs and outs.
Between = Callable[[list[torch.Tensor], list[torch.Tensor]], None]


def reduced(exchange: Exchange, op: ReduceOp, inputs: Tensors, outs: Tensors, count: int, between: Between) -> None:
    """Does a reduction to some of the ranks (the others have no ``outs``) that ``count`` tensors contribute to."""
    exchange.contributors = count
    with torch.inference_mode():
        try:
            total, *others = map(plain, inputs)
        except Exception as error:
            exchange.fail(error)
            total, others = scratch(inputs[0]), []
        for other in others:
            total = exchange.combine(op, total, other)
    between([total], list(outs[:1]))
    _spread(outs[:1], outs[1:])


def broadcast(inputs: Tensors, outs: Tensors, between: Between) -> None:
    """Does a broadcast: the root has one input, and its other tensors are outs."""
    between(list(inputs), list(outs[: 0 if inputs else 1]))
    _spread(inputs or outs[:1], outs if inputs else outs[1:])


def gathered(exchange: Exchange, inputs: Tensors, outs: Tensors, counts: Sequence[int], between: Between) -> None:
    """Does an all_gather: rank i has ``counts[i]`` inputs.

    ``outs``: for each of this rank's a list of all, rank by rank.
    """
    lists = [outs[i : i + sum(counts)] for i in range(0, len(outs), sum(counts))]
    lengths = [out.numel() for out in lists[0]]
    room, ours = _room(lengths, outs[0].dtype), _room(list(map(torch.numel, inputs)), outs[0].dtype)
    try:
        for part, tensor in zip(ours.split(list(map(torch.numel, inputs))), inputs, strict=True):
            store(part, plain(tensor))
    except Exception as error:
        exchange.fail(error)
    ends = list(accumulate(counts))
    between([ours], list(room.split([sum(lengths[end - n : end]) for n, end in zip(counts, ends, strict=True)])))
    for row in lists:
        for out, part in zip(row, room.split(lengths), strict=True):
            store(out, part)


def gathered_into(inputs: Tensors, out: torch.Tensor, lengths: Sequence[int], between: Between) -> None:
    """Does an all_gather into one tensor: rank i's tensor of ``lengths[i]`` elements is a piece of ``out``."""
    room = flattened(out) if out.is_contiguous() else scratch(out)
    between(list(inputs), list(room.split(list(lengths))))
    if not out.is_contiguous():
        store(out, room)


def _room(lengths: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(sum(lengths) * dtype.itemsize, dtype=torch.uint8).view(dtype)


def _spread(source: Tensors, outs: Tensors) -> None:
    for out in outs:
        store(out, plain(source[0]))
