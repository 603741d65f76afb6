"""Tensors on meshes, made from local ones, or from ones on nodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..collectives import all_gather, all_reduce
from ..dispatch.first_call import layout_of, refuse_layout
from ..proxy.proxy import DistributedTensor, operand_name, refuse_wrapper, where_is
from ..session.places import MeshPlace
from .mesh import Mesh, place_of
from .shards import at_rank, together


def replicate(tensor: torch.Tensor, mesh: Mesh) -> DistributedTensor:
    """Returns a tensor on a mesh that has these values on all ranks; ``tensor`` is local, or on one node.

    It is ``tensor.to(mesh.device)`` with a check, and can be differentiated twice: the bytes go to one of the nodes,
    and from there from node to node, and the gradient is the sum of all ranks'. Raises TypeError for a tensor that is
    on a mesh already, NotImplementedError for one that is not strided, NodeLost.
    """
    place = place_of(mesh, "replicate")
    _check(tensor, "replicate")
    return _Replicate.apply(tensor, place)  # type: ignore[no-untyped-call, no-any-return]


class _Replicate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, place: MeshPlace) -> torch.Tensor:
        ctx.device = tensor.device
        return tensor.detach().to(place.device)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        total: Any = all_reduce(grads[0], over=tuple(grads[0]._place.dims))
        return at_rank(total, 0).to(ctx.device), None


def from_shards(mesh: Mesh, tensors: Sequence[torch.Tensor]) -> DistributedTensor:
    """Returns a tensor on a mesh whose shard on each rank is a copy of one of ``tensors``, in the ranks' order.

    Args:
        tensors: local tensors, or tensors on any nodes, as many as the mesh has nodes, of one shape and dtype.

    The gradient of each is that of its shard. Returns when the tensors may be changed. Raises TypeError for what is no
    tensor, or on a mesh; ValueError for another number of them, or shapes or dtypes that differ; NodeLost.
    """
    place = place_of(mesh, "from_shards")
    tensors = list(tensors)
    if len(tensors) != len(place.members):
        raise ValueError(f"from_shards: {len(tensors)} tensors for {len(place.members)} ranks of {mesh}")
    for i, tensor in enumerate(tensors):
        _check(tensor, f"from_shards: tensor {i}")
        if tensor.shape != tensors[0].shape or tensor.dtype != tensors[0].dtype:
            raise ValueError(
                f"from_shards: tensor {i} is {operand_name(tensor)}, tensor 0 {operand_name(tensors[0])}; all ranks "
                "have one shape and dtype"
            )
    return together(place, tensors)


def shard(tensor: torch.Tensor, mesh: Mesh, **dims: int) -> DistributedTensor:
    """Returns a tensor on a mesh of which each rank has a part: ``shard(t, mesh, dp=0)`` cuts dimension 0 along dp.

    Along the other dims of the mesh all have the same part. ``tensor`` is local, or on one node; its gradient is put
    together again. Raises ValueError for an unknown dim of the mesh, a dimension that the tensor does not have, or
    sizes that do not divide; else as ``from_shards``.
    """
    place = place_of(mesh, "shard")
    _check(tensor, "shard")
    parts = [tensor] * len(place.members)
    for name, d in dims.items():
        size = mesh.size(name)
        if not -tensor.dim() <= d < tensor.dim():
            raise ValueError(f"shard: {name}={d}: a tensor of shape {tuple(tensor.shape)} has no dimension {d}")
        if tensor.shape[d] % size:
            raise ValueError(
                f"shard: dimension {d} of {tuple(tensor.shape)} has {tensor.shape[d]} entries, which {name}={size} "
                "does not divide; all ranks have one shape"
            )
        pieces: dict[int, tuple[torch.Tensor, ...]] = {}
        for group in place.axes[name]:
            for at, rank in enumerate(group):
                whole = parts[rank]
                if id(whole) not in pieces:
                    pieces[id(whole)] = whole.chunk(size, d)
                parts[rank] = pieces[id(whole)][at]
    return from_shards(mesh, parts)


def full_tensor(x: torch.Tensor, **dims: int) -> DistributedTensor:
    """Puts the parts together again that ``shard`` has cut, with the same arguments; each rank gets the whole.

        >>> mesh = dt.mesh(dp=2)
        >>> x = dt.shard(torch.arange(6).reshape(2, 3), mesh, dp=0)
        >>> dt.meshes.full_tensor(x * 10, dp=0).cpu()
        tensor([[ 0, 10, 20],
                [30, 40, 50]])

    So torch's DTensor calls it, which has a record of how it was cut. Gradients go back to the parts, as those of
    ``all_gather``: the sum of what all ranks have for each. Raises TypeError for a tensor that is not on a mesh,
    ValueError for a dim that the mesh does not have, a dimension that the tensor does not have, and without any.
    """
    place = _on_mesh(x, "full_tensor")
    if not dims:
        raise ValueError(
            "full_tensor takes the dims along which the tensor was cut, as shard does: "
            f"full_tensor(x, {next(iter(place.dims))}=0)"
        )
    whole: Any = x
    for name, d in reversed(dims.items()):  # of two that cut one dimension the last one's parts lie side by side
        if not -x.dim() <= d < x.dim():
            raise ValueError(f"full_tensor: {name}={d}: a tensor of shape {tuple(x.shape)} has no dimension {d}")
        whole = all_gather(whole, over=name, dim=d)
    return whole  # type: ignore[no-any-return]


def mean(x: torch.Tensor) -> float:
    """Waits, and returns the mean of a tensor over all ranks of its mesh, and over its entries, as a number to print.

        >>> mesh = dt.mesh(dp=2)
        >>> loss = dt.shard(torch.tensor([1.0, 2.0]), mesh, dp=0)
        >>> dt.meshes.mean(loss)
        1.5

    Has no gradient: ``dt.all_reduce(x, "avg", over="dp")`` is the mean as a tensor. Raises TypeError for a tensor that
    is not on a mesh or is complex, NodeLost.
    """
    place = _on_mesh(x, "mean")
    if x.is_complex():
        raise TypeError(f"mean is a number, and of a {x.dtype} tensor there is none; take x.real or x.abs()")
    mine = x.detach().double().mean()
    total: Any = all_reduce(mine, over=tuple(place.dims))
    return float(at_rank(total, 0).item()) / len(place.members)


def _on_mesh(x: Any, what: str) -> MeshPlace:
    place = where_is(x) if isinstance(x, torch.Tensor) else None
    # only what is on a mesh has shards
    if not isinstance(place, MeshPlace):
        refuse_wrapper(x, what)
        where = f"a {type(x).__name__}" if not isinstance(x, torch.Tensor) else f"on {place or 'the script'}"
        raise TypeError(f"{what} takes a tensor on a mesh, and this one is {where}")
    return place


def _check(tensor: Any, what: str) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{what} has to be a tensor, not {type(tensor).__name__}")
    place = where_is(tensor)
    refuse_wrapper(tensor, what)
    # a rank's shard cannot be a mesh's tensor itself
    if isinstance(place, MeshPlace):
        raise TypeError(f"{what} is on {place} already; x.at(...) is a shard of it")
    if layout_of(tensor) is not torch.strided:
        refuse_layout(what, layout_of(tensor))
