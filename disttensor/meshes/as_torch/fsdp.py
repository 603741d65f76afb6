"""Torch's FSDP2 (``torch.distributed.fsdp.fully_shard``) over a mesh: where it asks for one rank's part, its device and
its streams, the answer is that of all ranks.

Its parameters are DTensors on the mesh. It gathers whole ones into memory that it gives back after use, by
``storage.resize_``; here that is one command, and no question to the nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch.distributed.fsdp import CPUOffloadPolicy

from ...dispatch.op_plan import OpEntry
from ...dispatch.op_table import handler
from ...proxy.proxy import DistributedTensor
from ...runtime.protocol.errors import RanksDiffer
from ...storage.storages import resize
from . import world
from .process_group import MeshGroup
from .rank_numbers import numbers_of
from .rank_views import uneven

_ops = torch.ops.fsdp

# ---- one part of each rank -------------------------------------------------------------------------------------------


class RankParts(list[torch.Tensor]):
    """The parts of a tensor on a mesh. At a number of ranks it has each rank's own part."""

    def __init__(self, parts: Sequence[torch.Tensor], whole: torch.Tensor, dim: int) -> None:
        super().__init__(parts)
        self._whole, self._dim = whole, dim

    def __getitem__(self, index: Any) -> Any:
        numbers = numbers_of(index)
        if numbers is None:
            return super().__getitem__(index)
        size = self._whole.shape[self._dim]
        if size % len(self):
            lengths = [part.shape[self._dim] if part.numel() else 0 for part in self]
            raise RanksDiffer(f"fully_shard: {uneven(index.node.place, size, lengths)}")
        length = size // len(self)
        # what has no values yet has the same shape for all
        return self._whole.narrow(self._dim, 0 if self._whole.is_meta else index * length, length)


def chunking(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns ``_chunk_with_empty``, from whose list a rank takes its part."""

    @wraps(original)
    def chunk_with_empty(tensor: Any, num_chunks: int, dim: int) -> Any:
        parts = original(tensor, num_chunks, dim)
        return RankParts(parts, tensor, dim) if type(tensor) is DistributedTensor or tensor.is_meta else parts

    return chunk_with_empty


# ---- memory ----------------------------------------------------------------------------------------------------------


def allocating(original: Callable[[Any], None]) -> Callable[[Any], None]:
    """Returns ``alloc_storage``, which asks for the size that the memory has."""

    @wraps(original)
    def alloc_storage(tensor: Any) -> None:
        if type(tensor) is DistributedTensor:
            resize(tensor, tensor.numel() * tensor.itemsize)
        else:
            original(tensor)

    return alloc_storage


def freeing(original: Callable[[Any], None]) -> Callable[[Any], None]:
    """Returns ``free_storage``, which asks so, too."""

    @wraps(original)
    def free_storage(tensor: Any) -> None:
        if type(tensor) is DistributedTensor:
            resize(tensor, 0)
        else:
            original(tensor)

    return free_storage


def unkept(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns what makes a ``ReduceScatterState``, or an ``AllReduceState``, by which memory is kept until another
    stream has read it: on a mesh what comes next comes after that."""

    @wraps(original)
    def state(kept: Any, event: Any) -> Any:
        return original(None if type(kept) is DistributedTensor else kept, event)

    return state


# ---- operators -------------------------------------------------------------------------------------------------------


@handler(_ops.all_gather_copy_in.default)
def _all_gather_copy_in(entry: OpEntry, args: Any, kwargs: Any) -> Any:
    """Writes what each rank has to where its part is in what will be gathered; returns that part, and the whole."""
    inputs, output, sizes, numel, rank = args
    part = output.narrow(0, numel * rank, numel)
    torch._foreach_copy_(part.split(sizes), inputs)
    return part, output


@handler(_ops.split_with_sizes_copy.default)
def _split_with_sizes_copy(entry: OpEntry, args: Any, kwargs: Any) -> None:
    whole, sizes, dim = (*args, kwargs.get("dim", 0))[:3]
    torch._foreach_copy_(kwargs["out"], whole.split_with_sizes(sizes, dim))


@handler(_ops.chunk_cat.default)
def _chunk_cat(entry: OpEntry, args: Any, kwargs: Any) -> None:
    torch._chunk_cat(*args, **kwargs)


# ---- device and streams ----------------------------------------------------------------------------------------------


def device_of(original: Callable[[Any], torch.device]) -> Callable[[Any], torch.device]:
    """Returns ``_get_device_from_mesh``: of a mesh of nodes the device is not that of one node."""

    @wraps(original)
    def get_device_from_mesh(mesh: Any) -> torch.device:
        here = world.found()
        return original(mesh) if here is None or mesh.device_type != "node" else here.place.device

    return get_device_from_mesh


class InOrder:
    """A stream, and an event, of a mesh: each of its nodes does all in the order of the script, so nothing has to be
    waited for."""

    def wait(self, *args: Any) -> None:
        """Returns at once."""

    wait_stream = wait_event = synchronize = record = wait

    def record_event(self, event: Any = None) -> InOrder:
        return self

    def query(self) -> bool:
        return True


class InOrderDevice:
    """The device module of a mesh for FSDP2."""

    def Stream(self, **options: Any) -> InOrder:
        return _in_order

    def Event(self, **options: Any) -> InOrder:
        return _in_order

    def current_stream(self, device: Any = None) -> InOrder:
        return _in_order

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        yield


_in_order, _in_order_device = InOrder(), InOrderDevice()


def device_module(original: Callable[[str], Any]) -> Callable[[str], Any]:
    """Returns ``_get_device_handle``, as FSDP2 asks it for streams."""

    @wraps(original)
    def get_device_handle(device_type: str = "cuda") -> Any:
        return _in_order_device if device_type == "node" and world.found() is not None else original(device_type)

    return get_device_handle


# ---- groups of parameters --------------------------------------------------------------------------------------------


def grouping(original: Callable[..., None]) -> Callable[..., None]:
    """Returns ``FSDPParamGroup.__init__``. It refuses to offload to the script, and has what is gathered freed as soon
    as it is copied, and not when another stream has gone on."""

    @wraps(original)
    def init(self: Any, params: Any, modules: Any, mesh_info: Any, *args: Any, **kwargs: Any) -> None:
        group = getattr(mesh_info, "shard_process_group", None)
        if isinstance(group, MeshGroup) and any(isinstance(v, CPUOffloadPolicy) for v in (*args, *kwargs.values())):
            raise NotImplementedError(
                f"fully_shard: CPUOffloadPolicy would have the parameters of {group.place} in the memory of the "
                "script, which has none of the ranks' parts; they stay on their nodes without it"
            )
        original(self, params, modules, mesh_info, *args, **kwargs)
        if isinstance(group, MeshGroup):
            self.unshard_async_op = True

    return init
