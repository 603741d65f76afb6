"""Native collectives: the channel does them by itself (``DataChannel.collective``).

This module adds what a channel does not know of: tensors that are not plain, and trouble. A rank in trouble takes part
with arbitrary contents in its tensors, or the others would wait for it. Then all agree, by an exchange without data,
whether one was in trouble: if so, all are, for nobody knows what reached whom.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..channel.payload import is_plain, plain, scratch, store
from ..protocol.errors import BrokenError
from ..protocol.flat import flattened
from .calls import barrier
from .exchange import Exchange
from .reduction import ReduceOp


def native(
    exchange: Exchange,
    kind: str,
    inputs: Sequence[torch.Tensor],
    outs: Sequence[torch.Tensor],
    op: ReduceOp,
    root: int,
    number: int,
) -> None:
    """Does the collective ``kind`` of ``calls`` by the channel, with all its tensors in two lists.

    ``number`` is the channel's id of the collective.
    """
    channel = exchange.channel
    if kind == "broadcast" and inputs and outs:  # over dims of a mesh a tensor is both: the root's is read only
        inputs, outs = (inputs, ()) if exchange.me == root else ((), outs)
    with torch.inference_mode():
        ours, theirs = [_flat(exchange, x) for x in inputs], [_flat(exchange, x) for x in outs]
        try:
            channel.collective(kind, exchange.ranks, exchange.me, ours, theirs, op.name, root, number)
        except Exception as error:
            exchange.fail(error, error.rank if isinstance(error, BrokenError) else None)
        try:
            barrier(exchange)
        except Exception:
            channel.regroup(exchange.ranks)
            raise
    for target, out in zip(outs, theirs, strict=True):
        if target.device != out.device or target.data_ptr() != out.data_ptr():
            store(target, out)


def _flat(exchange: Exchange, tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor's elements, flat, in its own memory if the channel can use that.

    Arbitrary contents, and trouble, if a copy fails.
    """
    try:
        if is_plain(tensor) or tensor.device.type not in exchange.channel.capabilities.devices:
            return flattened(plain(tensor.detach()))
        return flattened(tensor.detach().resolve_conj().resolve_neg().contiguous())
    except Exception as error:
        exchange.fail(error)
        return scratch(tensor)
