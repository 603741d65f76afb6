"""Copies of tensors: master to node, node to master, node to node, all through the session's data channel."""

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
    """Returns a copy of a local tensor at ``place``, when the tensor may be changed again; if ``non_blocking``, at
    once.

    Raises NotImplementedError for a tensor that is not strided, NodeLost.
    """
    if layout_of(tensor) is not torch.strided:
        refuse_layout("a copy to a node", layout_of(tensor))
    meta = meta_of(tuple(tensor.shape), contiguous(tuple(tensor.shape)), 0, tensor.dtype, place)
    handle = Handle(new_ref(), meta)
    session_of(place).transfers.upload(tensor.detach(), place, handle.ref, here(), non_blocking)
    return proxy(handle)


def fill(target: DistributedTensor, tensor: torch.Tensor, non_blocking: bool = False) -> bool:
    """Uploads ``tensor`` in place of ``target`` if that is an empty tensor which nothing has used yet, of the same
    shape and dtype and contiguous. Returns whether it did."""
    handle = target._h
    if not isinstance(handle, Lazy) or handle.ref or handle.base is not None:
        return False
    meta = handle.meta
    if meta.shape != tuple(tensor.shape) or meta.dtype != tensor.dtype or meta.stride != contiguous(meta.shape):
        return False
    with meta.place.home.lock:
        if handle.ref:
            return False
        ref = new_ref()
        session_of(meta.place).transfers.upload(tensor.detach(), meta.place, ref, here(), non_blocking)
        handle.ref = ref
    return True


def fetch(tensor: DistributedTensor) -> torch.Tensor:
    """Returns a local, contiguous copy. Waits for the node; raises the error that made the tensor fail, or NodeLost."""
    place = tensor._place
    transfers = session_of(place).transfers
    transfers.may_begin(place)
    return transfers.download(tensor, place, tensor._h.ref or materialise(tensor._h), here())


def move(tensor: DistributedTensor, place: Place) -> DistributedTensor:
    """Returns a copy at another place, at once; between two nodes the bytes go directly.

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
    if session.router.rules:
        device = "cuda" if source.is_cuda() and place.is_cuda() else "cpu"
        channel = session.router.choose("send", device, tensor.numel() * meta.dtype.itemsize)
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
    """Returns a copy on another device of the same node, which the node makes by itself."""
    site = here()
    meta = meta_of(tuple(tensor.shape), tensor.stride(), 0, tensor.dtype, place)
    if not is_dense(tensor):
        meta = meta_of(tuple(tensor.shape), contiguous(tuple(tensor.shape)), 0, tensor.dtype, place)
    ref = tensor._h.ref or materialise(tensor._h)
    handle = Handle(new_ref(), meta)
    make_room(place)
    # an explicit copy, for two simulated devices are one memory
    empty = place.define(
        "aten::empty_strided",
        (codec.to_spec(meta.shape), codec.to_spec(meta.stride)),
        (("dtype", codec.to_spec(meta.dtype)), ("device", c.Device(place.name))),
        1,
        site,
    )
    copy = place.define("aten::copy_", (c.Hole(True), c.Hole(True)), (), 0, site)
    commands = place.outbox.commands
    commands += (c.Call(empty, handle.ref, ()), site, c.Call(copy, handle.ref, (0, handle.ref - ref)), site)
    if len(commands) >= place.outbox.limit:
        place.session.flush(place.outbox)
    return proxy(handle)


def is_dense(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor's elements fill their memory without gaps, each in a place of its own."""
    return bool(torch._prims_common.is_non_overlapping_and_dense_or_false(tensor))


def copy_strides(source: torch.Tensor, format: torch.memory_format | None = None) -> tuple[int, ...]:
    """Returns the strides that torch gives a copy of ``source``."""
    if format in (None, torch.preserve_format) and is_dense(source):
        return source.stride()  # the meta device would choose other strides for dimensions of one element
    # a tensor without elements costs nothing on the CPU either, and the meta device would forget its strides
    stand = torch.empty_strided(source.shape, source.stride(), device="meta" if source.numel() else "cpu")
    return torch.empty_like(stand, memory_format=format or torch.preserve_format).stride()
