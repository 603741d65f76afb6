"""Batches: each rank gets its own share of what a program passes to a model as a local tensor."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch.utils._pytree import tree_map

from ..meshes import Mesh, shard
from .named import place_of


def shares_of(values: Any, mesh: Mesh, over: tuple[str, ...], what: str) -> Any:
    """Returns nested values with the tensors that are local, or on one node, cut in dimension 0 for the ranks along
    ``over``; those on the mesh, and those without a dimension, stay as they are.

    Raises ValueError for a batch that does not divide, or a tensor on another mesh.
    """

    def placed(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not value.dim():
            return value
        place = place_of(value)
        if place is not None:
            if value.device != mesh.device:
                raise ValueError(f"{what}: an argument is on {place}, and the module on {mesh}")
            return value
        return share_of(
            value, mesh, over, f"{what}: {value.shape[0]} rows of an argument of shape {tuple(value.shape)}"
        )

    return tree_map(placed, values)


def share_of(batch: torch.Tensor, mesh: Mesh, over: tuple[str, ...], what: str) -> torch.Tensor:
    """Returns a tensor that is local, or on one node, cut in dimension 0 for the ranks along ``over``.

    Raises ValueError where it does not divide; ``what`` begins its text.
    """
    ranks = prod(mesh.size(dim) for dim in over)
    left = batch.shape[0] % ranks
    if left:
        along = ", ".join(f"{dim}={mesh.size(dim)}" for dim in over)
        raise ValueError(
            f"{what} do not divide among {along}, and all ranks have one shape; leave {left} rows out "
            "(drop_last=True), or put the tensor on the mesh (dt.meshes.replicate, dt.meshes.from_shards)"
        )
    return shard(batch, mesh, **dict.fromkeys(over, 0))
