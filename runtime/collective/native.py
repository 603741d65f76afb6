"""A collective that the channel does by itself (``DataChannel.collective``), between two things that it doesn't know
of: tensors that are not plain, and trouble.

A rank in trouble takes part with anything in its tensors, or the others would wait for it. Then all agree, by an
exchange without data, whether one was in trouble: if so, all are, for nobody knows what reached whom.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..channel.payload import is_plain, plain, scratch, store
from ..protocol.errors import BrokenError
from .calls import barrier
from .exchange import Wire
from .reduction import ReduceOp


def native(
    wire: Wire,
    kind: str,
    inputs: Sequence[torch.Tensor],
    outs: Sequence[torch.Tensor],
    op: ReduceOp,
    root: int,
    number: int,
) -> None:
    """As the collective ``kind`` of ``calls``, with all its tensors in two lists. ``number``: as the channel's."""
    channel = wire.channel
    with torch.inference_mode():
        ours, theirs = [_flat(wire, x) for x in inputs], [_flat(wire, x) for x in outs]
        try:
            channel.collective(kind, wire.ranks, wire.me, ours, theirs, op.name, root, number)
        except Exception as error:
            wire.fail(error, error.rank if isinstance(error, BrokenError) else None)
        try:
            barrier(wire)
        except Exception:
            channel.regroup(wire.ranks)
            raise
    for target, out in zip(outs, theirs, strict=True):
        if target.device != out.device or target.data_ptr() != out.data_ptr():
            store(target, out)


def _flat(wire: Wire, tensor: torch.Tensor) -> torch.Tensor:
    """Its elements, flat, in its own memory if the channel can use that. Anything, if a copy fails."""
    try:
        if is_plain(tensor) or tensor.device.type not in wire.channel.capabilities.devices:
            return plain(tensor.detach()).view(-1)
        return tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)
    except Exception as error:
        wire.fail(error)
        return scratch(tensor)
