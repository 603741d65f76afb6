"""Torch's DTensor over a mesh: what its helpers do for one rank, done for all ranks at once.

They take numbers of ranks as they are, but for these: some look a number up in a list, compare it, or have a random
number generator of a rank.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any

import torch

from ...proxy.proxy import DistributedTensor
from ...runtime.protocol.errors import RanksDiffer
from ...session.node_context import choose_place, restore_place
from ..mesh import varying
from . import world
from .process_group import IssuedWork, MeshGroup
from .rank_numbers import numbers_of
from .rank_views import table, uneven


def sizes_of_parts(original: Callable[..., Any]) -> Any:
    """Returns ``Shard.local_shard_size_and_offset``, which refuses parts of several sizes."""

    @wraps(original)
    def local_shard_size_and_offset(curr_local_size: int, num_chunks: int, rank: Any) -> Any:
        numbers = numbers_of(rank)
        if numbers is not None and curr_local_size % num_chunks:
            lengths = [original(curr_local_size, num_chunks, number)[0] for number in numbers]
            raise RanksDiffer(uneven(rank.node.place, curr_local_size, lengths))
        return original(curr_local_size, num_chunks, rank)

    return staticmethod(local_shard_size_and_offset)


def without_padding(original: Callable[..., Any]) -> Any:
    """Returns ``Shard._maybe_unpad_tensor_with_sizes``, which cuts off what each part was padded by: it refuses parts
    of several sizes."""

    @wraps(original)
    def maybe_unpad_tensor_with_sizes(dim: int, tensor: Any, pads: Any, rank: Any, make_contiguous: bool) -> Any:
        if numbers_of(rank) is None:
            return original(dim, tensor, pads, rank, make_contiguous)
        if any(pads):
            lengths = [tensor.shape[dim] - pad for pad in pads]
            raise RanksDiffer(uneven(rank.node.place, sum(lengths), lengths))
        return tensor

    return staticmethod(maybe_unpad_tensor_with_sizes)


def scattering(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns ``mesh_scatter``, in which one rank gives each rank along a dim its part: in one command for all."""

    @wraps(original)
    def mesh_scatter(
        output: Any, scatter_list: Any, mesh: Any, mesh_dim: int = 0, async_op: bool = False, *, group_src: int = 0
    ) -> Any:
        group = mesh.get_group(mesh_dim)
        if not isinstance(group, MeshGroup) or output.is_meta:
            return original(output, scatter_list, mesh, mesh_dim, async_op, group_src=group_src)
        group.scatter_parts(output, scatter_list, group_src)
        return IssuedWork([output]) if async_op else None

    return mesh_scatter


def masking(original: Callable[..., Any]) -> Any:
    """Returns ``_MaskPartial._mask_tensor``: which indices are not of a rank's part of an embedding, and all of them
    within its part."""

    @wraps(original)
    def mask_tensor(tensor: Any, local_offset_on_dim: Any, local_shard_size: int) -> Any:
        numbers = numbers_of(local_offset_on_dim)
        if numbers is None:
            return original(tensor, local_offset_on_dim, local_shard_size)
        within = (tensor - table(tensor._place.origin, numbers)).to(tensor.dtype)
        mask = (within < 0) | (within >= local_shard_size)
        return mask, within.masked_fill(mask, 0)

    return staticmethod(mask_tensor)


def unwrapped(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns ``_maybe_wrap_tensor``, which has a tensor waited for at its first use: one on a mesh needs none."""

    @wraps(original)
    def maybe_wrap_tensor(self: torch.Tensor) -> Any:
        return self if type(self) is DistributedTensor else original(self)

    return maybe_wrap_tensor


# ---- for the script --------------------------------------------------------------------------------------------------


def printing(original: Callable[..., str]) -> Callable[..., str]:
    """Returns ``DTensor.__repr__``, which shows what the ranks have."""

    @wraps(original)
    def show(self: Any) -> str:
        local = self._local_tensor
        if type(local) is not DistributedTensor:
            return original(self)
        return f"DTensor(local_tensor={local!r}, device_mesh={self._spec.mesh}, placements={self._spec.placements})"

    return show


def reading(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns ``DTensor.item``, of which torch gives a rank its own part where the sum of them is to come."""

    @wraps(original)
    def item(self: Any) -> Any:
        try:
            return original(self)
        except RanksDiffer:
            if not any(placement.is_partial() for placement in self.placements):
                raise
            raise RanksDiffer(
                f"this DTensor is {', '.join(map(str, self.placements))} over {self.device_mesh}: what the ranks have "
                "is not reduced yet; x.full_tensor().item() is its value"
            ) from None

    return item


# ---- random numbers --------------------------------------------------------------------------------------------------


def tracking(original: Callable[..., None]) -> Callable[..., None]:
    """Returns ``OffsetBasedRNGTracker.__init__``, which finds the generator of a rank's device: those of a mesh are the
    nodes' own."""

    @wraps(original)
    def init(self: Any, device_mesh: Any, run_state_sync: bool = True) -> None:
        if device_mesh.device_type != "node":
            original(self, device_mesh, run_state_sync)
            return
        self._device, self._device_handle = torch.device("node"), getattr(torch, "node")  # noqa: B009
        self._use_distribute_region = True

    return init


def drawing(original: Callable[..., Any]) -> Callable[..., AbstractContextManager[None]]:
    """Returns ``OffsetBasedRNGTracker._distribute_region``, in which ranks with the same part draw the same numbers,
    and others other ones."""

    @wraps(original)
    def distribute_region(self: Any, spec: Any, generator: Any = None) -> AbstractContextManager[None]:
        mesh = spec.mesh
        if mesh.device_type != "node":
            return original(self, spec, generator)  # type: ignore[no-any-return]
        cut = [i for i, each in enumerate(spec.placements) if not (each.is_replicate() or each.is_partial())]
        return varying(*_dims(mesh, cut))

    return distribute_region


def _dims(mesh: Any, axes: list[int]) -> list[str]:
    """Returns the names of dims of ours along which torch's go."""
    found: list[str] = []
    for axis in axes:
        group = mesh.get_group(axis)
        if group.size() == 1:
            continue
        if not group.over:
            raise NotImplementedError(
                f"random numbers of a DTensor that is cut along {mesh.mesh_dim_names[axis]!r}, several dims of "
                f"{group.place} in one: dt.mesh(...) with that dim has it by name"
            )
        found += group.over
    return found


# ---- where they are made ---------------------------------------------------------------------------------------------


def made_on_the_mesh(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that makes a DTensor, whose local tensors are on the mesh: torch knows the type of its device
    only, which would be a node."""

    @wraps(original)
    def make(*args: Any, **kwargs: Any) -> Any:
        here = world.found()
        if here is None:
            return original(*args, **kwargs)
        tokens = choose_place(here.place)
        try:
            return original(*args, **kwargs)
        finally:
            restore_place(tokens)

    return make
