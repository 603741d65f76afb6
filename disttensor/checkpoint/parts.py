"""The parts of a tensor: which node has which part of the whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

from ..meshes.cut import Cuts, whole_shape
from ..proxy.proxy import where_is
from ..session.places import MeshPlace, NodePlace


class TensorChunk(NamedTuple):
    """The part of a whole tensor that one node (None: the script) has: ``sizes`` entries from ``offsets`` on."""

    place: NodePlace | None
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def chunk(self) -> ChunkStorageMetadata:
        """The part as torch's planners know it."""
        return ChunkStorageMetadata(torch.Size(self.offsets), torch.Size(self.sizes))


def parts_of(tensor: torch.Tensor, cuts: Cuts) -> list[TensorChunk]:
    """Returns the part of each rank of a tensor on a mesh, in the ranks' order; of any other tensor the only one.

    A part of a tensor whose size the ranks do not divide may be less than the rank's shard: what is behind it is
    padding. It may be nothing at all.
    """
    place = where_is(tensor)
    # a mesh's ranks have a part each; a node, or the script, has the whole
    if not isinstance(place, MeshPlace):
        return [TensorChunk(place, (0,) * tensor.dim(), tuple(tensor.shape))]
    if not cuts:
        zeros, shape = (0,) * tensor.dim(), tuple(tensor.shape)
        return [TensorChunk(member, zeros, shape) for member in place.members]
    shape = whole_shape(tensor, cuts)
    at = place.along([cut.over for cut, _ in cuts])
    return [_part(member, shape, cuts, mine) for member, mine in zip(place.members, at, strict=True)]


def _part(place: NodePlace, shape: Sequence[int], cuts: Cuts, at: Sequence[int]) -> TensorChunk:
    starts, ends = [0] * len(shape), list(shape)
    for (cut, dim), coordinate in zip(cuts, at, strict=True):
        starts[dim] += coordinate * cut.share
        ends[dim] = min(ends[dim], starts[dim] + cut.share)
    starts = [min(start, size) for start, size in zip(starts, shape, strict=True)]
    return TensorChunk(
        place, tuple(starts), tuple(max(0, end - start) for start, end in zip(starts, ends, strict=True))
    )
