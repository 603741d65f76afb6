"""The placements of torch's DTensor over a mesh, in our words: how each rank's tensor is a part of the whole."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from ..cut import Cut, Cuts
from ..mesh import Mesh
from .process_group import MeshGroup


def cuts_of_dtensor(x: DTensor, what: str) -> Cuts:
    """Returns how the tensor of each rank is a part of a DTensor over a mesh; ``what`` names it in errors.

    Raises TypeError for a Partial, which is not reduced yet, and for a cut along a dim without a name.
    """
    mesh, shape = x.device_mesh, list(x.shape)
    sharding = [(i, placement) for i, placement in enumerate(x.placements) if not placement.is_replicate()]
    for i, placement in sharding:
        if _dim(placement) is None:
            raise TypeError(
                f"{what} is {placement} along a dim of {mesh}; x.redistribute(...) makes it whole, or parts"
            )
        # fully_shard of what is cut along tp already: that comes first, though its dim comes later
        behind = [mesh.size(j) for j, other in sharding if j > i and _dim(other) == _dim(placement)]
        if isinstance(placement, _StridedShard) and placement.split_factor != prod(behind):
            raise TypeError(f"{what} is {placement}, which is not a part in one piece")
    cuts = []
    for i, placement in sorted(sharding, key=lambda each: isinstance(each[1], _StridedShard)):
        dim: Any = _dim(placement)
        cut = _cut(mesh.get_group(i), shape[dim], what)
        shape[dim] = cut.share
        cuts.append((cut, dim))
    return tuple(cuts)


def _dim(placement: Any) -> int | None:
    """Returns the dimension that a placement cuts; None for one that cuts none."""
    return placement.dim if isinstance(placement, (Shard, _StridedShard)) else None


def _cut(group: Any, size: int, what: str) -> Cut:
    if not isinstance(group, MeshGroup) or len(group.over) != 1:
        raise TypeError(f"{what} is cut along {group!r}, and not along one dim with a name")
    (over,) = group.over
    return Cut(Mesh(group.place, {**group.place.dims, over: group.size()}), over, size, what)


def is_dtensor(value: Any) -> bool:
    """Returns whether a value is a DTensor over a mesh."""
    return isinstance(value, DTensor) and value.device.type == "node"


def local_of(x: DTensor) -> torch.Tensor:
    """Returns the tensor on the mesh that has each rank's part, in the same memory."""
    local: torch.Tensor = x.detach().to_local()  # type: ignore[attr-defined]
    return local
