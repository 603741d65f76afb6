"""Shards of tensors on meshes: a tensor is put together from them, and taken apart, with gradients."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from ..dispatch import copies, seen_at
from ..proxy.meta import Handle, meta_of_contiguous, new_ref
from ..proxy.proxy import DistributedTensor, method, proxy
from ..session.places import MeshPlace, Place

# ---- to a mesh -------------------------------------------------------------------------------------------------------


def together(place: MeshPlace, tensors: Sequence[torch.Tensor]) -> DistributedTensor:
    """Returns a tensor on a mesh whose shards are copies of ``tensors``, which are of one shape and dtype."""
    return _Together.apply(place, *tensors)  # type: ignore[no-untyped-call, no-any-return]


class _Together(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, place: MeshPlace, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.devices = [tensor.device for tensor in tensors]
        shape = tuple(tensors[0].shape)
        handle = Handle(new_ref(), meta_of_contiguous(shape, tensors[0].dtype, place))
        for tensor, member in zip(tensors, place.members, strict=True):
            copies.put(tensor.detach(), member, handle.ref)
        return proxy(handle)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        needed = ctx.needs_input_grad[1:]
        return None, *(
            at_rank(grads[0], i).to(device) if need else None
            for i, (device, need) in enumerate(zip(ctx.devices, needed, strict=True))
        )


# ---- from a mesh -----------------------------------------------------------------------------------------------------


@method("at")
def at(tensor: DistributedTensor, **coordinates: int) -> DistributedTensor:
    """``x.at(dp=3, tp=0)``: returns the shard of a mesh's tensor on one of its nodes, an ordinary tensor there.

    With coordinates of some dims only it is the tensor on that slice of the mesh. Nothing is copied or sent: it is the
    same memory, and its gradient is a tensor that is zero on the other ranks. Raises TypeError for a tensor that is on
    one node, ValueError for an unknown dim or a coordinate out of range.
    """
    place = tensor._place
    # only a mesh has ranks with shards
    if not isinstance(place, MeshPlace):
        raise TypeError(f"at: this tensor is on {place}, and has no shards")
    ranks = set(range(len(place.members)))
    for name, wanted in coordinates.items():
        groups = place.groups(name, "at")
        if not 0 <= wanted < len(groups[0]):
            raise ValueError(f"at: {name}={wanted} is not in {place}: it has 0 to {len(groups[0]) - 1}")
        ranks &= {group[wanted] for group in groups}
    if not ranks:
        raise ValueError(f"at: no rank of {place} has the coordinates {coordinates}")
    if len(ranks) == 1:
        return at_rank(tensor, ranks.pop())
    if len(ranks) == len(place.members):
        return tensor
    left = {name: size for name, size in place.dims.items() if name not in coordinates}
    if prod(left.values()) != len(ranks):  # by names of another view
        left = {"all": len(ranks)}
    return _seen(tensor, place.session.places.mesh([place.members[rank] for rank in sorted(ranks)], left))


@method("shards")
def shards(tensor: DistributedTensor) -> list[DistributedTensor]:
    """``x.shards()``: returns the shards of a mesh's tensor, in the order of the ranks, as ``x.at`` does.

    Raises TypeError for a tensor that is on one node.
    """
    # only a mesh has ranks with shards
    if not isinstance(tensor._place, MeshPlace):
        raise TypeError(f"shards: this tensor is on {tensor._place}, and has no shards")
    return [at_rank(tensor, rank) for rank in range(len(tensor._place.members))]


def at_rank(tensor: Any, rank: int) -> DistributedTensor:
    """Returns the shard of a mesh's tensor on one of its ranks."""
    return _seen(tensor, tensor._place.members[rank])


def _seen(tensor: Any, place: Place) -> DistributedTensor:
    if tensor.requires_grad and torch.is_grad_enabled():
        return _At.apply(tensor, place)  # type: ignore[no-untyped-call, no-any-return]
    return seen_at.alias(tensor, place)  # type: ignore[no-any-return]


class _At(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Any, place: Place) -> torch.Tensor:
        ctx.device = tensor.device
        return seen_at.alias(tensor, place)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _Whole.apply(grads[0], ctx.device), None  # type: ignore[no-untyped-call]


class _Whole(torch.autograd.Function):
    """The tensor on a mesh that is a shard on its ranks, and zero on the others."""

    @staticmethod
    def forward(ctx: Any, shard: Any, device: torch.device) -> torch.Tensor:
        ctx.place = shard._place
        whole = torch.zeros(shard.shape, dtype=shard.dtype, device=device)
        seen_at.alias(whole, shard._place).copy_(shard)
        return whole

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _At.apply(grads[0], ctx.place), None  # type: ignore[no-untyped-call]
