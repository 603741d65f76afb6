"""Batches: each rank gets its own share of what a program passes to a model as a local tensor."""

from __future__ import annotations

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
        ranks = 1
        for dim in over:
            ranks *= mesh.size(dim)
        if value.shape[0] % ranks:
            where = ", ".join(f"{dim}={mesh.size(dim)}" for dim in over)
            raise ValueError(
                f"{what}: {value.shape[0]} rows of an argument of shape {tuple(value.shape)} do not divide among "
                f"{where}, and all ranks have one shape; leave {value.shape[0] % ranks} rows out (drop_last=True), or "
                "put the tensor on the mesh (dt.replicate, dt.meshes.from_shards)"
            )
        return shard(value, mesh, **dict.fromkeys(over, 0))

    return tree_map(placed, values)
