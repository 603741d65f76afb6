"""Tensor bytes on their way: master to node, node to master, node to node, all through the session's data channel."""

from __future__ import annotations

import torch

from ..proxy.meta import Handle, Lazy, contiguous, meta_of, new_ref
from ..proxy.proxy import DistributedTensor, proxy
from ..runtime.protocol import codec
from ..runtime.protocol import commands as c
from ..session.current import session_of
from ..session.places import Place, one_session
from .call_site import here
from .first_call import layout_of, make_room, refuse_layout
from .lazy_views import materialise


def upload(tensor: torch.Tensor, place: Place, non_blocking: bool = False) -> DistributedTensor:
    """A copy of a local tensor at ``place``. Returns when the tensor may be changed again; if ``non_blocking``, at
    once. Raises NotImplementedError for one that is not strided."""
    if layout_of(tensor) is not torch.strided:
        refuse_layout("a copy to a node", layout_of(tensor))
    meta = meta_of(tuple(tensor.shape), contiguous(tuple(tensor.shape)), 0, tensor.dtype, place)
    handle = Handle(new_ref(), meta)
    session_of(place).transfers.upload(tensor.detach(), place, handle.ref, here(), non_blocking)
    return proxy(handle)


def fill(target: DistributedTensor, tensor: torch.Tensor, non_blocking: bool = False) -> bool:
    """Uploads ``tensor`` as an empty one that nothing has used yet; False where that is not what ``target`` is."""
    handle = target._h
    if not isinstance(handle, Lazy) or handle.ref or handle.base is not None:
        return False
    meta = handle.meta
    if meta.shape != tuple(tensor.shape) or meta.dtype != tensor.dtype or meta.stride != contiguous(meta.shape):
        return False
    with meta.place.state.lock:
        if handle.ref:
            return False
        ref = new_ref()
        session_of(meta.place).transfers.upload(tensor.detach(), meta.place, ref, here(), non_blocking)
        handle.ref = ref
    return True


def fetch(tensor: DistributedTensor) -> torch.Tensor:
    """A local copy, contiguous. Waits for the node; raises what made the tensor fail, or NodeLost."""
    place = tensor._place
    transfers = session_of(place).transfers
    transfers.may_begin(place)
    return transfers.download(tensor, place, tensor._h.ref or materialise(tensor._h), here())


def move(tensor: DistributedTensor, place: Place) -> DistributedTensor:
    """A copy at another place; between two nodes the bytes go directly. Returns at once.

    Raises NodeLost, DisttensorError if one of the two belongs to a session that was shut down.
    """
    source = tensor._place
    one_session(source, place)
    if source.node == place.node:
        return _within(tensor, place)
    meta = meta_of(tuple(tensor.shape), contiguous(tuple(tensor.shape)), 0, tensor.dtype, place)
    ref = tensor._h.ref or materialise(tensor._h)
    handle = Handle(new_ref(), meta)
    session = session_of(place)
    transfer, channel = session.transfers.new(), 0
    if session.board.rules:
        device = "cuda" if source.is_cuda() and place.is_cuda() else "cpu"
        channel = session.board.choose("send", device, tensor.numel() * meta.dtype.itemsize)
    session.link.pair(
        (source.node, c.Send(transfer, ref, place.node, channel)),
        (
            place.node,
            c.Recv(transfer, handle.ref, source.node, meta.shape, codec.dtype_id(meta.dtype), place.name, channel),
        ),
        here(),
    )
    return proxy(handle)


def _within(tensor: DistributedTensor, place: Place) -> DistributedTensor:
    """To another device of the same node: the node copies by itself."""
    site = here()
    meta = meta_of(tuple(tensor.shape), tensor.stride(), 0, tensor.dtype, place)
    if not is_dense(tensor):
        meta = meta_of(tuple(tensor.shape), contiguous(tuple(tensor.shape)), 0, tensor.dtype, place)
    ref = tensor._h.ref or materialise(tensor._h)
    handle = Handle(new_ref(), meta)
    make_room(place)
    # an explicit copy, for two simulated devices are one memory
    empty = place.state.define(
        "aten::empty_strided",
        (codec.to_spec(meta.shape), codec.to_spec(meta.stride)),
        (("dtype", codec.to_spec(meta.dtype)), ("device", c.Device(place.name))),
        1,
        site,
    )
    copy = place.state.define("aten::copy_", (c.Hole(True), c.Hole(True)), (), 0, site)
    commands = place.outbox.commands
    commands += (c.Call(empty, handle.ref, ()), site, c.Call(copy, handle.ref, (0, handle.ref - ref)), site)
    if len(commands) >= place.outbox.limit:
        place.session.flush(place.outbox)
    return proxy(handle)


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether its elements fill their memory without gaps, each in a place of its own."""
    return bool(torch._prims_common.is_non_overlapping_and_dense_or_false(tensor))


def copy_strides(source: torch.Tensor, format: torch.memory_format | None = None) -> tuple[int, ...]:
    """Those that torch gives a copy of ``source``."""
    if format in (None, torch.preserve_format) and is_dense(source):
        return source.stride()  # those of dimensions of one element too, which the meta device would choose itself
    # a tensor without elements costs nothing on the CPU either, and the meta device would forget its strides
    stand = torch.empty_strided(source.shape, source.stride(), device="meta" if source.numel() else "cpu")
    return torch.empty_like(stand, memory_format=format or torch.preserve_format).stride()
