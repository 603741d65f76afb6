"""Storages of remote tensors, for programs that ask for them: checkpoints, deep copies, ``set_``.

A proxy needs no storage. Only the node knows which tensors share memory, so ``x.untyped_storage()`` is a question; the
answer is an object that stands for that memory in the script, one for all tensors that share it. A checkpoint reads
from it when it is written, one storage after the other, and says "cpu" of all: it loads where there are no nodes.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from functools import wraps
from typing import Any, NoReturn
from weakref import WeakValueDictionary

import torch
from torch.storage import TypedStorage
from torch.utils.hooks import warn_if_has_hooks

from ..dispatch.call_site import here
from ..dispatch.copies import fetch, is_dense
from ..dispatch.lazy_views import materialise
from ..dispatch.op_plan import OpEntry
from ..dispatch.op_table import handler
from ..proxy.meta import contiguous, new_ref
from ..proxy.proxy import OWN, DistributedTensor, method, operand_name, proxy, set_geometry
from ..runtime.master.route import route
from ..runtime.protocol import commands as c
from ..runtime.protocol.allow_list import RESIZE_STORAGE
from ..runtime.protocol.errors import RanksDiffer

aten = torch.ops.aten


class NodeStorage(torch.UntypedStorage):
    """The memory of remote tensors. ``flat`` is all of it as one proxy of bytes (uint8).

    Methods that read bytes (``cpu``, ``tolist``, ``storage[i]``) wait for the node; the others return at once.
    """

    flat: Any
    _of: Any  #: a tensor that lies there, which may not fit
    _fits: bool  #: whether that fits whatever size the memory gets; it is of bytes then

    def __new__(cls, flat: Any, of: Any = None, **_: Any) -> NodeStorage:
        # to C++ it is a storage of the meta device, as there is no memory here
        self: NodeStorage = super().__new__(cls, flat.numel(), device="meta")  # type: ignore[call-arg]
        self.flat, self._of, self._fits = flat, flat if of is None else of, of is None
        return self

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self.flat.device  # type: ignore[no-any-return]

    def data_ptr(self) -> int:
        """Returns the address on the node. It shows which tensors share memory, and can't be read from the script.

        Waits for one round trip.
        """
        return memory_of(self.flat).address

    def cpu(self) -> torch.UntypedStorage:
        """Returns a local copy, for one to save. Waits for the node."""
        try:
            return fetch(self.flat).untyped_storage()
        except RanksDiffer as e:
            raise RanksDiffer(
                f"{e}. What is saved has one value: dt.meshes.agree_(x) has all ranks take the first one's, and "
                "agree_(model) those of a module's buffers, such as BatchNorm's statistics. Not so where each rank has "
                "a part of a whole, as of dt.nn's and dt.fully_shard's parameters and their optimizers' states: "
                "model.state_dict() and dt.training.whole_state_dict(optimizer) put the parts together"
            ) from None

    def to(self, *, device: Any, non_blocking: bool = False) -> torch.UntypedStorage:
        """Returns a copy on another device; the storage itself if it is there already."""
        device = torch.device(device)
        if device == self.device:
            return self
        if device.type == "node":
            return NodeStorage(self.flat.to(device))
        local: torch.UntypedStorage = self.cpu().to(device=device)
        return local

    def clone(self) -> NodeStorage:
        return NodeStorage(self.flat.clone())

    def copy_(self, source: Any, non_blocking: bool | None = None) -> Any:
        self.flat.copy_(source.flat if isinstance(source, NodeStorage) else _bytes(source))
        return self

    def fill_(self, value: int) -> NodeStorage:
        self.flat.fill_(value)
        return self

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return NodeStorage(self.flat[index])
        return self.flat[index].item()

    def __setitem__(self, index: Any, value: Any) -> None:
        self.flat[index] = value

    def tolist(self) -> list[int]:
        return self.flat.tolist()  # type: ignore[no-any-return]

    def resize_(self, size: int) -> NodeStorage:
        """Makes the memory smaller or larger, for all tensors that share it; what there was stays, as far as it fits.
        Does not wait.

        Tensors that do not fit any more can't be used until the memory is large enough again: RuntimeError on the node.
        Raises ValueError for a negative size, NotImplementedError while a graph is recorded.
        """
        if size < 0:
            raise ValueError(f"a storage has at least 0 bytes, not {size}")
        if size < self.nbytes() and self._fits:  # views are made before, as of what does not fit there are none
            self._of, self.flat = _flat(self._of, 0), _flat(self._of, size)
            for view in (self._of, self.flat):
                materialise(view._h)
            resize(self._of, size)
        elif size != self.nbytes():
            resize(self._of, size)
            self.flat = _flat(self._of, size)
        super().resize_(size)
        return self

    def _write_file(self, *args: Any) -> Any:
        return self.cpu()._write_file(*args)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError("a storage on a node can't be saved by itself; save a tensor, or storage.cpu()")

    def __repr__(self) -> str:
        """Returns torch's text for the meta device, as the bytes are on the node."""
        return f"...\n[torch.storage.UntypedStorage(device={self.device}) of size {len(self)}]"


def resize(tensor: Any, size: int) -> None:
    """Makes the memory of a tensor smaller or larger, in bytes, for all tensors that share it. Does not wait.

    Raises NotImplementedError while a graph is recorded.
    """
    place, site = tensor._place, here()
    if route.get().recorder is not None:
        raise NotImplementedError(
            "storage.resize_ can't be recorded: a graph keeps the memory of what it computes. Torch's FSDP2 frees "
            "whole parameters by it; dt.fully_shard(model, mesh) can be recorded"
        )
    template, out = place.define(RESIZE_STORAGE, (c.Hole(True), c.Hole(False)), (), 0, site), new_ref()
    box = place.outbox
    box.commands += (c.Call(template, out, (out - (tensor._h.ref or materialise(tensor._h)), size)), site)
    if len(box.commands) >= box.limit:
        place.session.flush(box)


#: The one NodeStorage of each memory, by (node's state, the storage's name there). Its memory is alive on the node.
_known: WeakValueDictionary[object, NodeStorage] = WeakValueDictionary()


def memory_of(tensor: DistributedTensor) -> c.StorageInfo:
    """Asks the node for a tensor's storage, and for the tensor's offset and strides in it, which a kernel may have
    chosen unlike those of the proxy. One round trip."""
    place = tensor._place
    ref = tensor._h.ref or materialise(tensor._h)
    return place.session.ask(place, c.StorageInfo, lambda id: c.Storage(id, ref), here())


@method("data_ptr")
def address(tensor: DistributedTensor) -> int:
    """``x.data_ptr()``: returns the address on the node, which is of use only to see which tensors share memory.

    Waits for one round trip. Raises the error that made the tensor fail, NodeLost.
    """
    if not tensor.numel():
        return 0
    _ = tensor._place.one  # one of a mesh has an address on each of its nodes: raises
    found = memory_of(tensor)
    return found.address + found.offset * tensor.itemsize


@method("untyped_storage")
def storage_of(tensor: DistributedTensor) -> NodeStorage:
    """``x.untyped_storage()``: returns the NodeStorage of the tensor's memory, one object for all tensors that share
    it.

    Waits for one round trip. Raises the error that made the tensor fail, NodeLost.
    """
    return _node_storage_of(tensor)[0]


def _node_storage_of(tensor: DistributedTensor) -> tuple[NodeStorage, int, tuple[int, ...]]:
    """Returns a tensor's NodeStorage, and the offset and strides of the tensor in it."""
    found = memory_of(tensor)
    key = (tensor._place.home, found.name)
    known = _known.get(key)
    if known is None:
        if _outgrown(tensor, found):
            nothing: Any = torch.empty(0, dtype=torch.uint8, device=tensor.device)
            flat = _flat(tensor, found.bytes) if found.bytes else nothing
            known = _known[key] = NodeStorage(flat, _bare(tensor.detach()))
        else:
            known = _known[key] = NodeStorage(_flat(tensor, found.bytes))
    return known, found.offset, found.stride


def _outgrown(tensor: Any, found: c.StorageInfo) -> bool:
    """Returns whether a tensor does not fit into its memory, which has been made smaller."""
    last = found.offset + sum((n - 1) * stride for n, stride in zip(tensor.shape, found.stride, strict=True))
    return bool(tensor.numel()) and (last + 1) * tensor.itemsize > found.bytes


def _flat(tensor: Any, size: int) -> DistributedTensor:
    """Returns all ``size`` bytes of a tensor's memory as one uint8 tensor."""
    tensor = _bare(tensor.detach())
    if tensor.dtype is torch.uint8:
        tensor = tensor.as_strided((size,), (1,), 0)
    elif not size:
        tensor = tensor.as_strided((0,), (1,), 0).view(torch.uint8)
    else:  # the bytes behind the last whole element belong to the memory, too
        tensor = tensor.as_strided((1,), (1,), 0).view(torch.uint8).as_strided((size,), (1,), 0)
    return proxy(tensor._h)  # to autograd a view of nothing


def _bare(tensor: Any) -> Any:
    """Returns the tensor of which this one is a lazy conjugate or negative: the same operation twice gives neither."""
    return _with_bits_of(tensor, tensor)


def _with_bits_of(like: torch.Tensor, bare: Any) -> Any:
    """Returns the lazy conjugate or negative of ``bare`` if ``like`` is one."""
    bare = bare.conj() if like.is_conj() else bare
    return torch._neg_view(bare) if like.is_neg() else bare


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def _part(flat: Any, like: torch.Tensor, offset: int, strides: tuple[int, ...]) -> DistributedTensor:
    """Returns the part of ``flat`` that corresponds to ``like`` in its own memory, which has the same size."""
    view = flat.view(like.dtype).as_strided(like.shape, strides, offset)
    return proxy(view._h)


@method("__deepcopy__")
def _deepcopy(tensor: DistributedTensor, memo: dict[int, Any]) -> torch.Tensor:
    """``x.__deepcopy__``: copies a tensor as torch's own does, also with regard to gradients and attributes."""
    if id(tensor) in memo:
        return memo[id(tensor)]  # type: ignore[no-any-return]
    if isinstance(tensor, torch.nn.Parameter):  # torch's own copies neither gradient nor attributes
        values = tensor.data.clone(memory_format=torch.preserve_format)
        memo[id(tensor)] = parameter = torch.nn.Parameter(values, tensor.requires_grad)
        return parameter
    if not tensor.is_leaf:
        raise RuntimeError("only tensors created explicitly by the user (graph leaves) support deepcopy")
    memo[id(tensor)] = copied = twin(tensor, memo).requires_grad_(tensor.requires_grad)
    if tensor.grad is not None:
        copied.grad = copy.deepcopy(tensor.grad, memo)
    copied.__dict__.update(copy.deepcopy({k: v for k, v in tensor.__dict__.items() if k not in ("_h", "_made")}, memo))
    return copied


def twin(tensor: Any, memo: dict[Any, Any]) -> DistributedTensor:
    """Returns a copy for ``copy.deepcopy``: copies of tensors that share memory share memory."""
    if tensor.is_conj() or tensor.is_neg():  # torch resolves these
        return proxy(tensor.detach().resolve_conj().resolve_neg()._h)
    storage, offset, strides = _node_storage_of(tensor)
    copies = memo.setdefault("disttensor", {})
    if id(storage) in copies:
        return _part(copies[id(storage)][1], tensor, offset, strides)
    with torch.no_grad():
        if tensor.numel() * tensor.itemsize == storage.nbytes() and is_dense(tensor):
            whole = proxy(tensor.detach().clone(memory_format=torch.preserve_format)._h)
            copies[id(storage)] = storage, _flat(whole, storage.nbytes())
            return whole
        copies[id(storage)] = storage, storage.flat.clone()
    return _part(copies[id(storage)][1], tensor, offset, strides)


# ---- pickling --------------------------------------------------------------------------------------------------------


@method("__reduce_ex__")
def reduced(tensor: DistributedTensor, protocol: Any) -> tuple[Any, ...]:
    """``x.__reduce_ex__``: pickles by value, as the local tensor with the same values, memory and attributes.

    A loaded tensor is local, on any machine (``map_location="node:1"`` sends it to a node).
    """
    hooks: OrderedDict[Any, Any] = OrderedDict()  # torch doesn't save them either
    attributes = {k: v for k, v in tensor.__dict__.items() if k not in OWN}
    if isinstance(tensor, torch.nn.Parameter):
        args = (tensor.data, tensor.requires_grad, hooks)
        if attributes:
            return torch._utils._rebuild_parameter_with_state, (*args, attributes)
        return torch._utils._rebuild_parameter, args
    warn_if_has_hooks(tensor)
    storage, offset, strides = _node_storage_of(tensor)
    geometry = (offset, tuple(tensor.shape), strides, tensor.requires_grad, hooks)
    if tensor.dtype in torch.storage._new_dtypes():
        # torch saves an untyped one, and knows it by its very type; so this says that it's one
        typed = TypedStorage(wrap_storage=storage, dtype=torch.uint8, _internal=True)
        typed._pickle_storage_type = lambda: "UntypedStorage"  # type: ignore[method-assign]
        whole: tuple[Any, ...] = (torch._utils._rebuild_tensor_v3, (typed, *geometry, tensor.dtype))
    else:
        typed = TypedStorage(wrap_storage=storage, dtype=tensor.dtype, _internal=True)
        whole = (torch._utils._rebuild_tensor_v2, (typed, *geometry))
    bits = torch._utils.get_tensor_metadata(tensor)
    if bits:
        whole = whole[0], (*whole[1], bits)
    if not attributes:
        return whole
    return torch._tensor._rebuild_from_type_v2, (whole[0], torch.Tensor, whole[1], attributes)


def _tag(storage: Any) -> str | None:
    return "cpu" if storage.device.type == "node" else None


def _restore(storage: torch.UntypedStorage, location: str) -> torch.UntypedStorage | None:
    """Returns a loaded storage's copy on a node, for ``map_location="node:1"`` in all its forms; None for other
    locations."""
    if not location.startswith("node"):
        return None
    # not storage.to(), for which torch makes the device the current one
    return NodeStorage(_bytes(storage).to(location))


def set_bits_of_loaded(original: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    @wraps(original)
    def set_tensor_metadata(tensor: Any, metadata: Any) -> None:
        """Makes a tensor that is being loaded a lazy conjugate or negative."""
        original(tensor, metadata)
        if isinstance(tensor, DistributedTensor):
            tensor._h = _with_bits_of(tensor, proxy(tensor._h))._h

    return set_tensor_metadata


#: For torch.load: the location that a saved storage names, and the function that restores one to a location.
LOADING = (_tag, _restore)


def new_storage(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a ``torch.UntypedStorage.__new__`` that makes storages on nodes, too: ``device="node:1"``."""

    def new(cls: Any, *args: Any, device: Any = None, **kwargs: Any) -> Any:
        if device is None:
            return original(cls, *args, **kwargs)
        if torch.device(device).type != "node":
            return original(cls, *args, device=device, **kwargs)
        # torch would look for an allocator, find none, and end the process
        size = args[0] if args else 0
        make: Any = torch.empty if isinstance(size, int) else torch.tensor
        return NodeStorage(make(size, dtype=torch.uint8, device=device))

    return new


# ---- set_ ------------------------------------------------------------------------------------------------------------


@handler(torch.ops.inductor.resize_storage_bytes_.default)
def _resize_storage(entry: OpEntry, args: Any, kwargs: Any) -> None:
    tensor, size = args
    tensor.untyped_storage().resize_(size)


@handler(aten.set_.source_Tensor)
def _set(entry: OpEntry, args: Any, kwargs: Any) -> Any:
    """Does ``x.set_(y)``: from now on x is y's remote tensor."""
    target, source = args
    _one_place(target, source)
    set_geometry(target, _with_bits_of(target, _bare(source.detach()))._h)  # torch, too, leaves the target its bits
    return target


@handler(aten.set_.source_Storage, aten.set_.source_Storage_storage_offset)
def _set_storage(entry: OpEntry, args: Any, kwargs: Any) -> Any:
    target, storage = args[:2]
    if not isinstance(storage, NodeStorage):
        raise RuntimeError(f"set_: the storage of a tensor on {target._place} can't be on {storage.device}")
    _one_place(target, storage.flat)
    source = storage.flat.view(target.dtype)
    if len(args) > 2:
        offset, size = args[2], tuple(args[3])
        source = source.as_strided(size, args[4] if len(args) > 4 else contiguous(size), offset)
    set_geometry(target, _with_bits_of(target, source)._h)
    return target


@handler(aten.set_.default)
def _set_nothing(entry: OpEntry, args: Any, kwargs: Any) -> Any:
    target = args[0]
    nothing: Any = torch.empty(0, dtype=target.dtype, device=target.device)
    set_geometry(target, _with_bits_of(target, nothing)._h)
    return target


def _one_place(target: Any, source: Any) -> None:
    both = isinstance(target, DistributedTensor) and isinstance(source, DistributedTensor)
    if not both or source._place is not target._place:
        raise RuntimeError(f"set_: can't set {operand_name(target)} to {operand_name(source)}: they are on two places")
