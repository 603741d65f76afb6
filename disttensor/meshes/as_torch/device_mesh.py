"""Torch's DeviceMesh over a mesh of ours: what it asks of the rank that it is on is answered for all ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

import torch
from torch.distributed import device_mesh
from torch.distributed._mesh_layout import _MeshLayout

from ...session.places import MeshPlace
from . import functional, rank_views, world
from .rank_numbers import rank_number


def of_place(place: MeshPlace, dims: Mapping[str, int]) -> device_mesh.DeviceMesh:
    """Returns torch's mesh of a place, by some dims of all of its ranks: the same each time. Raises as
    ``world.begin_world``."""
    here = world.begin_world(place)
    key = tuple(dims.items())
    if key not in here.meshes:
        here.meshes[key] = device_mesh.init_device_mesh("node", tuple(dims.values()), mesh_dim_names=tuple(dims))
    return here.meshes[key]  # type: ignore[no-any-return]


def making_groups(original: Callable[..., Any]) -> Any:
    """Returns ``DeviceMesh._init_one_process_group``, which makes one group of all lines of ranks along a dim."""

    @wraps(original)
    def init_one_process_group(sub_layout: Any, rank_map: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        here = world.found()
        if here is None:
            return original(sub_layout, rank_map, *args, **kwargs)
        layout = sub_layout.nest() if hasattr(sub_layout, "nest") else _MeshLayout([sub_layout])  # nest: of torch 2.11
        lines = layout.remap_to_tensor(rank_map).tolist()
        return here.group(tuple(sorted(map(tuple, lines)))).group_name

    return staticmethod(init_one_process_group)


def coordinates(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Returns ``DeviceMesh._compute_coordinate_on_dim``, which gives numbers of ranks."""

    @wraps(original)
    def compute_coordinate_on_dim(self: Any) -> Any:
        here = world.found()
        if here is None:
            return original(self)
        # torch remembers what a mesh's DTensors do, by what says that two meshes are one: another session's is none
        self._thread_id = here.number
        ranks = range(len(here.place.members))
        full = self._layout.remap_to_tensor(self._rank_map)
        at: dict[int, list[int]] = {}
        for line in full:
            at |= {int(line[tuple(where)]): where for where in torch.ones(line.shape, device="cpu").nonzero().tolist()}
        return tuple(rank_number(here.place, [at[rank][dim] for rank in ranks]) for dim in range(full.ndim - 1))

    return compute_coordinate_on_dim


def tables(original: Callable[..., Any]) -> Any:
    """Returns ``DeviceMesh._get_mesh_tensor_from_full_mesh``: of several lines of ranks a tensor on the mesh, which has
    each rank's."""

    @wraps(original)
    def get_mesh_tensor_from_full_mesh(full_mesh: torch.Tensor, current_rank: int | None = None) -> torch.Tensor:
        here = world.found()
        if here is None or current_rank is not None or full_mesh.size(0) == 1:
            return original(full_mesh, current_rank)  # type: ignore[no-any-return]
        return here.line(full_mesh)

    return staticmethod(get_mesh_tensor_from_full_mesh)


__all__ = ["coordinates", "functional", "making_groups", "of_place", "rank_views", "tables"]
