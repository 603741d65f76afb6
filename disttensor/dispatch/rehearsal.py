"""Does a call once while a graph is recorded, beside the recording, for its results' geometry.

Nothing runs while a graph is recorded, so a node can't be asked what a call makes of its operands. It is asked what the
same call makes of others that lie alike, of zeros or ones, which are gone when it has answered.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from ..proxy.meta import Meta, quietly
from ..proxy.proxy import DistributedTensor
from ..runtime.master.route import Route, route
from ..runtime.protocol.errors import NodeLost
from .meta_inference import unwarned
from .op_plan import OpEntry
from .trial import end_of_memory, start_of_memory

#: The bytes, at most, of the memory in which the operands of a rehearsal lie.
_LARGE = 1 << 28


def rehearsed(entry: OpEntry, args: Any, kwargs: Any) -> Any:
    """Returns the metas of a call's results, as its node has said; None where it can't be asked, as zeros would do harm
    (`trial.can_be_tried`), numbers would be drawn, the operands are large, or the node refuses them."""
    done = _done(entry, args, kwargs)
    return None if done is None else tree_map(lambda v: v._h.meta if isinstance(v, DistributedTensor) else v, done[0])


def rehearsed_writes(entry: OpEntry, args: Any, kwargs: Any) -> dict[int | str, Any] | None:
    """Returns tensors that lie as those that a call writes do afterwards, by their arguments; None as ``rehearsed``."""
    done = _done(entry, args, kwargs)
    if done is None:
        return None
    _, args, kwargs = done
    return {
        where: args[where] if isinstance(where, int) else kwargs[where]
        for where in entry.writes
        if (where < len(args) if isinstance(where, int) else where in kwargs)
    }


def _done(entry: OpEntry, args: Any, kwargs: Any) -> tuple[Any, Any, Any] | None:
    """Does the call with other operands; returns its results, and these."""
    metas = [t._h.meta for t in tree_leaves((args, kwargs)) if isinstance(t, DistributedTensor)]
    size = sum(end_of_memory(meta) * meta.dtype.itemsize for meta in metas)
    if not metas or not entry.tried or entry.draws or size > _LARGE:
        return None
    token = route.set(Route(route.get().streams))
    try:
        for value in (0, 1):  # a division by zero is refused, and so may an index of one be
            try:
                with torch.no_grad():
                    filled = _filled(args, value), _filled(kwargs, value)
                    return unwarned(partial(entry.op, *filled[0], **filled[1])), *filled
            except NodeLost:  # no refusal: nobody else would tell the script
                raise
            except Exception:
                continue
    finally:
        route.reset(token)
    return None


def _filled(tree: Any, value: int) -> Any:
    """Returns ``tree`` with new tensors in place of proxies, all of one number."""
    return tree_map(lambda v: _like(v, value) if isinstance(v, DistributedTensor) else v, tree)


def _like(tensor: DistributedTensor, value: int) -> torch.Tensor:
    meta: Meta = tensor._h.meta
    memory = quietly("full", (end_of_memory(meta),), value, dtype=meta.dtype, device=str(tensor.device))
    laid = memory.as_strided(meta.shape, meta.stride, start_of_memory(meta))
    laid = laid.conj() if meta.bits[0] else laid
    return torch._neg_view(laid) if meta.bits[1] else laid
