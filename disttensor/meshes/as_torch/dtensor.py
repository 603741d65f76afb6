"""Torch's DTensor over a mesh: what its helpers do for one rank, done for all ranks at once.

Torch's helpers take numbers of ranks as they are, except those here: these look a number up in a list, compare it, or
keep a random number generator for a rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any

import torch

from ...proxy.proxy import DistributedTensor
from ...runtime.protocol.errors import RanksDiffer
from ...session.node_context import choose_place, restore_place
from ...session.places import MeshPlace
from ..mesh import varying
from . import world
from .process_group import IssuedWork, MeshGroup
from .rank_numbers import numbers_of, rank_number
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


def strided_sizes(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns ``_StridedShard.local_shard_size_and_offset``, which looks a rank's entries up in a list: those of each
    rank. It refuses parts of several sizes."""

    @wraps(original)
    def local_shard_size_and_offset(
        self: Any, curr_local_size: int, num_chunks: int, rank: Any, *mode: Any, **how: Any
    ) -> Any:
        numbers = numbers_of(rank)
        if numbers is None:
            return original(self, curr_local_size, num_chunks, rank, *mode, **how)
        each = {number: original(self, curr_local_size, num_chunks, number, *mode, **how) for number in numbers}
        sizes, offsets = zip(*[each[number] for number in numbers], strict=True)
        place = rank.node.place
        size = _one_size(place, curr_local_size, sizes)
        if isinstance(offsets[0], list):
            return size, [rank_number(place, entry) for entry in zip(*offsets, strict=True)]
        return size, offsets[0] if offsets[0] is None else rank_number(place, offsets)

    return local_shard_size_and_offset


def shapes_and_offsets(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns ``_compute_local_shape_and_global_offset``, which makes lists of where a rank's entries are, and looks
    there: in those of each rank. It refuses parts of several sizes."""

    @wraps(original)
    def compute_local_shape_and_global_offset(
        global_shape: Any, mesh_shape: Any, my_coordinate: Any, placements: Any, skip_offset: bool = False
    ) -> Any:
        at = my_coordinate if callable(my_coordinate) else my_coordinate.__getitem__
        coordinates = [at(dim) for dim in range(len(mesh_shape))]
        node = next((each.node for each in coordinates if numbers_of(each) is not None), None)
        # where parts are in order, their sizes are computed with numbers of ranks as they are
        if node is None or (
            skip_offset and all(placement.is_shard() or not _cut(placement) for placement in placements)
        ):
            return original(global_shape, mesh_shape, my_coordinate, placements, skip_offset)
        columns = [numbers_of(each) or (each,) * len(node.values) for each in coordinates]
        ranks = list(zip(*columns, strict=True))
        each = {at: original(global_shape, mesh_shape, list(at), placements, skip_offset) for at in ranks}
        shapes, offsets = zip(*[each[at] for at in ranks], strict=True)
        sizes = zip(global_shape, zip(*shapes, strict=True), strict=True)
        shape = tuple(_one_size(node.place, size, parts) for size, parts in sizes)
        return shape, tuple(rank_number(node.place, starts) for starts in zip(*offsets, strict=True))

    return compute_local_shape_and_global_offset


def _cut(placement: Any) -> bool:
    """Returns whether ranks have parts, in order or not."""
    return not (placement.is_replicate() or placement.is_partial())


def _one_size(place: MeshPlace, size: int, sizes: Sequence[int]) -> int:
    """Returns the size of all ranks' parts. Raises RanksDiffer where there are several."""
    if len(set(sizes)) > 1:
        raise RanksDiffer(uneven(place, size, sizes))
    return sizes[0]


def offsets_as_tensors(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns ``compute_local_shape_and_global_offset`` for functions that add where a rank's part starts to indices in
    that: as tensors on the mesh."""

    @wraps(original)
    def compute_local_shape_and_global_offset(*args: Any, **kwargs: Any) -> Any:
        shape, offsets = original(*args, **kwargs)
        numbers = [(offset, numbers_of(offset)) for offset in offsets]
        return shape, tuple(offset if of is None else table(offset.node.place, of) for offset, of in numbers)

    return compute_local_shape_and_global_offset


def picking(original: Callable[..., Any]) -> Any:
    """Returns ``_StridedShard._select_shard``, which looks a rank's part up in a list."""

    @wraps(original)
    def select_shard(shards: Any, shard_index: Any) -> Any:
        if numbers_of(shard_index) is None:
            return original(shards, shard_index)
        return torch.stack(list(shards)).select(0, shard_index).clone()

    return staticmethod(select_shard)


def picking_parts(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns ``_StridedShard._select_split_tensor``, which cuts a tensor and looks a rank's part up: it refuses parts
    of several sizes."""

    @wraps(original)
    def select_split_tensor(
        self: Any, tensor: Any, num_chunks: int, index: Any, *, contiguous: bool = True, clone: bool = True, **how: Any
    ) -> Any:
        if numbers_of(index) is None:
            return original(self, tensor, num_chunks, index, contiguous=contiguous, clone=clone, **how)
        parts, _ = self._split_tensor(tensor, num_chunks, **how, contiguous=False)
        _one_size(index.node.place, tensor.shape[self.dim], [part.shape[self.dim] for part in parts])
        return torch.stack(list(parts)).select(0, index).clone()

    return select_split_tensor


def devices_per_host(original: Callable[..., int]) -> Any:
    """Returns ``_mesh_resources.num_devices_per_host``, by which DTensor says what a collective costs: of CPUs one, as
    torch says of its own."""

    @wraps(original)
    def num_devices_per_host(device_type: str) -> int:
        here = world.found()
        if device_type != "node" or here is None or here.place.name != "cpu":
            return original(device_type)
        return 1

    return staticmethod(num_devices_per_host)


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


def on_one_device(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns ``ShardingPropagator._propagate_tensor_meta_non_cached``, which runs operators on fake tensors on the
    type of the mesh's device. Torch remembers by that where a fake tensor is: it is node 0, whatever is current."""

    @wraps(original)
    def propagate(*args: Any, **kwargs: Any) -> Any:
        tokens = choose_place(0)
        try:
            return original(*args, **kwargs)
        finally:
            restore_place(tokens)

    return propagate


def comparing(original: dict[Any, Any]) -> dict[Any, Any]:
    """Returns DTensor's table of what handles an operator itself, with ``equal``: torch would have a rank compare its
    parts, and make a tensor of that on the device of its type, which is not a mesh."""
    return {**original, torch.ops.aten.equal.default: _equal}


def _equal(op: Any, args: Any, kwargs: Any) -> bool:
    one, other = args
    return one.shape == other.shape and not (one != other).sum().full_tensor().item()


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
        cut = [i for i, placement in enumerate(spec.placements) if _cut(placement)]
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
