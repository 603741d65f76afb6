"""Local images of tensors on nodes: they have the node's geometry, and lie in copies of the node's memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch

from ..dispatch.asking import make_room
from ..dispatch.call_site import here
from ..dispatch.copies import fetch
from ..dispatch.dispatch import part
from ..dispatch.lazy_views import materialise
from ..proxy.meta import Handle, Lazy, Shared, contiguous, meta_of, new_ref
from ..proxy.proxy import DistributedTensor, proxy
from ..runtime.protocol import codec
from ..runtime.protocol import commands as c
from ..runtime.protocol.flat import flattened
from ..session.places import Place
from ..storage.storages import memory_of

aten = torch.ops.aten

#: The name of a memory: a node's state, or None for this process, and the node's number for it.
Name: TypeAlias = tuple[object, int]


@dataclass
class StorageImage:
    """A copy of a storage's content. Local operations may write it."""

    storage: torch.UntypedStorage
    tensor: torch.Tensor  #: a tensor in the original storage, by which it is read again
    dtype: torch.dtype


@dataclass
class Images:
    """The images of the tensors of one operation at one moment. Tensors that share memory on a node have images that
    share memory."""

    #: the tensor that the operation overwrites: one that nothing uses yet stays so, as a copy to it may be an upload
    target: torch.Tensor | None = None
    memories: dict[Name, StorageImage] = field(default_factory=dict)
    _seen: dict[int, tuple[torch.Tensor, torch.Tensor, Name]] = field(default_factory=dict)

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the image of a proxy, or of a local tensor. Waits for the node.

        Raises the error that made a proxy's tensor fail, NodeLost.
        """
        if id(tensor) not in self._seen:
            self._seen[id(tensor)] = tensor, *self._record_image(tensor)
        return self._seen[id(tensor)][1]

    def name_of(self, tensor: torch.Tensor) -> Name:
        """Returns the name of the memory that a tensor lies in."""
        self.of(tensor)
        return self._seen[id(tensor)][2]

    def owner(self, image: torch.Tensor) -> Name | None:
        """Returns the name of the memory that a local tensor lies in, if it is one of the images' memories; else
        None."""
        if not image.untyped_storage().nbytes():
            return None
        address = image.untyped_storage().data_ptr()
        return next((name for name, m in self.memories.items() if m.storage.data_ptr() == address), None)

    def _record_image(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Name]:
        if not isinstance(tensor, DistributedTensor):
            storage = tensor.untyped_storage()
            name: Name = (None, storage._cdata)
            if name not in self.memories:
                self.memories[name] = StorageImage(storage.clone(), tensor.detach(), tensor.dtype)
            geometry = (tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))
            return _in(self.memories[name].storage, *geometry, (tensor.is_conj(), tensor.is_neg())), name
        return self._fetch(tensor)  # type: ignore[arg-type]  # what is left is a proxy

    def _fetch(self, tensor: DistributedTensor) -> tuple[torch.Tensor, Name]:
        home, bits = at_home(tensor), tensor._h.meta.bits
        meta = home._h.meta
        if tensor is self.target and _is_unused(home._h):
            empty = torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device="cpu")
            name: Name = (home._h, 0)
            self.memories.setdefault(name, StorageImage(empty.untyped_storage(), home, meta.dtype))
            return _in(self.memories[name].storage, meta.dtype, meta.shape, meta.stride, 0, bits), name
        place = home._place
        told = memory_of(home)
        shape, dtype = _geometry_on_node(home)
        name = (place.home, told.name)
        if name not in self.memories:
            content = fetch(_bytes(home, told.bytes)) if told.bytes else torch.empty(0, dtype=torch.uint8, device="cpu")
            self.memories[name] = StorageImage(content.clone().untyped_storage(), home, dtype)
        return _in(self.memories[name].storage, dtype, shape, told.stride, told.offset, bits), name


def at_home(tensor: DistributedTensor) -> DistributedTensor:
    """Returns a proxy of the same tensor without a graph, at the place itself if it is seen at the twin
    (composites/as_cpu.py)."""
    h = tensor._h
    place = h.meta.place.session.places.at(h.meta.place.one.node, h.meta.place.name)
    if h.meta.place is not place:
        m = h.meta
        if not h.ref:
            materialise(h)
        h = Shared(h.ref, meta_of(m.shape, m.stride, m.offset, m.dtype, place, m.bits), h)
    return proxy(h)


def under(ref: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, place: Place) -> Any:
    """Returns a proxy of the tensor under a ref that another handle owns."""
    meta = meta_of(shape, strides, 0, dtype, place)
    return proxy(Shared(ref, meta, Handle(0, meta)))


def sum_of(tensor: DistributedTensor) -> int:
    """Returns a checksum of a tensor's elements in order, which the node computes and sends by its control
    connection."""
    flat: Any = part(aten.clone.default, (), (tensor,), {"memory_format": torch.contiguous_format})
    flat = part(aten.view.default, (), (flat, [-1]))
    for op, *args in _CHECKSUM:
        flat = part(op, (), (flat, *args))
    return int(flat)


def local_sum(tensor: torch.Tensor) -> int:
    """Returns the same checksum of a local tensor."""
    flat: Any = flattened(tensor.detach().contiguous())
    for op, *args in _CHECKSUM:
        flat = op(flat, *args)
    return int(flat)


#: The steps of the checksum, the sum of the sums of the first n bytes. Other bytes have another checksum, and so do the
#: same bytes in another order.
_CHECKSUM: tuple[tuple[Any, ...], ...] = (
    (aten.view.dtype, torch.uint8),
    (aten.cumsum.default, 0),
    (aten.sum.default,),
    (aten._local_scalar_dense.default,),
)


def _in(
    storage: torch.UntypedStorage,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    offset: int,
    bits: tuple[bool, bool],
) -> torch.Tensor:
    image = torch.empty(0, dtype=dtype, device="cpu").set_(storage, offset, shape, strides)
    torch._C._set_conj(image, bits[0])
    torch._C._set_neg(image, bits[1])
    return image


def _is_unused(h: Handle) -> bool:
    """Returns whether it is the handle of a contiguous empty tensor that does not exist on the node yet."""
    return isinstance(h, Lazy) and not h.ref and h.base is None and h.meta.stride == contiguous(h.meta.shape)


def _ref(tensor: DistributedTensor) -> int:
    return tensor._h.ref or materialise(tensor._h)


def _geometry_on_node(tensor: DistributedTensor) -> tuple[tuple[int, ...], torch.dtype]:
    """Asks the node for the shape and the dtype that it has for a tensor."""
    place, ref, out = tensor._place, _ref(tensor), new_ref()
    alias = Handle(out, tensor._h.meta)  # frees the alias at its end
    make_room(place)
    template = place.define("aten::alias", (c.Hole(True),), (), 1, here())
    call = c.Call(template, alias.ref, (out - ref,))
    g = place.session.ask(place, c.Shapes, lambda id: c.Ask(id, call), here()).outs[0]
    assert g is not None
    return g.shape, codec.dtype_of(g.dtype)


def _bytes(tensor: DistributedTensor, size: int) -> DistributedTensor:
    """Returns all of a tensor's memory as one uint8 tensor."""
    bare: Any = tensor
    for is_lazy, undo in zip(tensor._h.meta.bits, (aten._conj.default, aten._neg_view.default), strict=True):
        bare = part(undo, (), (bare,)) if is_lazy else bare
    one = part(aten.as_strided.default, (), (bare, [1], [1], 0))
    return part(aten.as_strided.default, (), (part(aten.view.dtype, (), (one, torch.uint8)), [size], [1], 0))  # type: ignore[no-any-return]
