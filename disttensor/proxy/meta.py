"""Metadata of remote tensors that the master knows without asking (shape, strides, dtype, place), and the handles that
own remote tensors."""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection
from functools import partial
from itertools import count
from math import prod
from operator import itemgetter
from typing import Any

import msgspec
import torch

from ..runtime.master.command_queue import CommandQueue
from ..runtime.master.failures import Site
from ..runtime.process.heard import heard
from ..runtime.process.signals import uninterrupted
from ..runtime.protocol import codec
from ..runtime.protocol import commands as c
from ..session import caches, holdings
from ..session.places import MeshPlace, Place

_refs = count(1)
#: Mints refs, which are never reused, in no session.
new_ref = _refs.__next__


def minted_refs() -> int:
    """Returns how many refs have been minted."""
    return int(repr(_refs)[6:-1]) - 1


#: Interned metadata; bounded: a cleared table only makes caches miss once.
MAX_METAS = 65_536
_metas: dict[object, Meta] = {}
caches.places(_metas.clear)
#: Those of contiguous tensors, by shape, dtype and place; bounded in the same way.
_contiguous: dict[object, Meta] = {}
caches.places(_contiguous.clear)
_PLAIN = (False, False)
_proxies: list[type] = []

#: The offset of a tensor that starts elsewhere in its memory on each rank of a mesh; that of a view of it is larger.
APART = 1 << 40

#: The bytes that tensors which the script has dropped may hold on a node, beyond what the same program takes with local
#: torch. A tensor of so much of it that a message of commands could exceed it is *large*: before the command that makes
#: one, the node is told of all that was dropped.
HELD = 64 << 20
_sites: list[Callable[[], Site | None]] = []
_ages = count()


#: Invariant 6: shape, dtype, strides and device of a proxy are known without a round trip.
class Meta:
    """The metadata of a remote tensor, immutable and interned: plans are cached by the identity of operands' metas."""

    __slots__ = (
        "bits", "dead", "device", "dtype", "in_order", "make", "nbytes", "offset", "place", "shape", "stand_in",
        "stride",
    )  # fmt: skip

    def __init__(
        self,
        shape: tuple[int, ...],
        stride: tuple[int, ...],
        offset: int,
        dtype: torch.dtype,
        place: Place,
        bits: tuple[bool, bool],
    ) -> None:
        self.shape = shape
        self.stride = stride
        self.offset = offset
        self.dtype = dtype
        self.place = place
        #: whether the tensor is a lazy conjugate, and whether it is a lazy negative
        self.bits = bits
        self.device = place.device
        self.dead = place.dead
        plain = stride == contiguous(shape)
        #: whether the tensor is on one node, and lies there as a local copy of it does
        # a mesh's gradients are summed where autograd has them copied to the script
        self.in_order = plain and bits == _PLAIN and not isinstance(place, MeshPlace) and self.device.type != "cpu"
        #: makes a bare proxy with this metadata; prebuilt, because it is most of an operation's cost
        self.make: Callable[[], Any] = partial(
            torch.Tensor._make_wrapper_subclass,
            _proxies[0],
            shape,
            *_described(stride, offset, plain),
            None,
            dtype,
            torch.strided,
            self.device,
        )
        #: a tensor on the meta device with this metadata, for inference
        self.stand_in = stand_in(shape, stride, offset, dtype)
        if bits != _PLAIN:
            bare = self.make
            self.make = lambda: set_bits(bare(), bits)
            set_bits(self.stand_in, bits)
        self.nbytes = prod(shape) * dtype.itemsize
        if self.nbytes >= large(place.outbox):
            self.make = partial(_make_large, self.make, place.outbox)

    @property
    def numel(self) -> int:
        return prod(self.shape)

    def __repr__(self) -> str:
        return f"<{tuple(self.shape)} {self.dtype} at {self.place}>"


def make_proxies_of(cls: type) -> None:
    """Declares the class of the proxies that a Meta makes."""
    _proxies[:] = [cls]


def sites_by(here: Callable[[], Site | None]) -> None:
    """Declares the function that returns the user's line, by which large tensors are remembered."""
    _sites[:] = [here]


def large(queue: CommandQueue) -> int:
    """Returns the bytes from which on a tensor of the place with this queue is large."""
    return HELD // queue.most


def _make_large(make: Callable[[], Any], queue: CommandQueue) -> Any:
    """Makes the proxy of a large tensor, which knows its line. What was dropped before is freed before it is made."""
    queue.free_dead()
    tensor = make()
    tensor._made = next(_ages), _sites[0]()
    return tensor


def live_proxies() -> list[Any]:
    """Returns the proxies that there are.

    Those are asked for that refer to their class, and not all objects: among them are tuples that another thread has
    half made, and CPython refuses to go on with one that is referred to meanwhile (SystemError at ``tuple(...)``).
    """
    return [each for each in gc.get_referrers(_proxies[0]) if type(each) is _proxies[0]]


def lines_of(refs: Collection[int]) -> dict[int, Site]:
    """Returns the lines that made those of these remote tensors which are large, and of which there are proxies."""
    found: dict[int, tuple[int, Site]] = {}
    for tensor in live_proxies():
        attributes = tensor.__dict__
        handle, made = attributes.get("_h"), attributes.get("_made")
        while isinstance(handle, Shared) or (isinstance(handle, Lazy) and not handle.ref):
            handle = handle.owner if isinstance(handle, Shared) else handle.base
        if handle is not None and handle.ref in refs and made is not None and made[1] is not None:
            found[handle.ref] = min(made, found.get(handle.ref, made), key=itemgetter(0))
    return {ref: site for ref, (_, site) in found.items()}


def _described(stride: tuple[int, ...], offset: int, plain: bool) -> tuple[Any, Any]:
    """Returns strides and offset as torch parses them fastest: None for torch's own defaults."""
    if offset:
        return stride, offset
    return (None if plain else stride), None


def stand_in(shape: tuple[int, ...], stride: tuple[int, ...], offset: int, dtype: torch.dtype) -> torch.Tensor:
    """Returns a tensor on the meta device with this geometry."""
    if not offset:
        return quietly("empty_strided", shape, stride, dtype=dtype, device="meta")
    extent = offset + 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True) if n)
    return quietly("empty", (extent,), dtype=dtype, device="meta").as_strided(shape, stride, offset)


def quietly(factory: str, *args: Any, dtype: torch.dtype, device: str) -> torch.Tensor:
    """Makes a tensor of our own, of whose dtype nobody is warned: torch does so where a user makes one."""
    if dtype is not torch.complex32:
        made: torch.Tensor = getattr(torch, factory)(*args, dtype=dtype, device=device)
        return made
    made = heard(partial(getattr(torch.ops.aten, factory), *args, dtype=dtype, device=device))[0]
    return made


def set_bits(tensor: torch.Tensor, bits: tuple[bool, bool]) -> torch.Tensor:
    """Sets whether ``tensor`` is a lazy conjugate and whether it is a lazy negative, and returns it."""
    torch._C._set_conj(tensor, bits[0])
    torch._C._set_neg(tensor, bits[1])
    return tensor


def meta_of(
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    offset: int,
    dtype: torch.dtype,
    place: Place,
    bits: tuple[bool, bool] = _PLAIN,
) -> Meta:
    """Returns the one Meta with these values."""
    key = (shape, stride, offset, dtype, place, bits)
    meta = _metas.get(key)
    if meta is None:
        if len(_metas) >= MAX_METAS:
            _metas.clear()
        meta = _metas.setdefault(key, Meta(*key))
        caches.keep(_metas, key, meta, place)
    return meta


def meta_of_contiguous(shape: tuple[int, ...], dtype: torch.dtype, place: Place) -> Meta:
    """Returns the Meta of a contiguous tensor."""
    key = (shape, dtype, place)
    meta = _contiguous.get(key)
    if meta is None:
        if len(_contiguous) >= MAX_METAS:
            _contiguous.clear()
        meta = meta_of(tuple(shape), contiguous(tuple(shape)), 0, dtype, place)
        caches.keep(_contiguous, key, meta, place)
    return meta


def contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the strides of a contiguous tensor of this shape."""
    stride = []
    step = 1
    for n in reversed(shape):
        stride.append(step)
        step *= max(n, 1)
    return tuple(reversed(stride))


def meta_like(tensor: torch.Tensor, place: Place) -> Meta:
    """Returns the Meta of a tensor with ``tensor``'s geometry at ``place``."""
    bits = (tensor.is_conj(), tensor.is_neg())
    return meta_of(tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()), tensor.dtype, place, bits)


def meta_told(geometry: c.Geometry, place: Place) -> Meta:
    """Returns the Meta of a tensor at ``place`` with a geometry that a node has reported."""
    g, bits = geometry, (bool(geometry.bits & 1), bool(geometry.bits & 2))
    return meta_of(g.shape, g.stride, g.offset, codec.dtype_of(g.dtype), place, bits)


#: Invariant 7: a handle's geometry never changes.
class Handle(msgspec.Struct, gc=False, eq=False):
    """The owner of one remote tensor: when the last proxy that shares it dies, the node is told to drop the ref.

    A handle's geometry never changes: an operation that changes a tensor's geometry in place gives the proxy a new
    handle. Proxies may share a handle (``detach``). It is a Struct because a Struct is made in half the time of a
    class's object; it is in no reference cycle, so the collector need not know it.
    """

    ref: int  #: the tensor's ref; 0 while the tensor doesn't exist on the node yet (Lazy)
    meta: Meta

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.ref or 'not made yet'} {self.meta!r}>"

    #: Invariant 8: finalizers take no lock and do no I/O.
    @uninterrupted
    def __del__(self) -> None:
        # no lock and no I/O: the collector can run this anywhere
        if self.ref:
            self.meta.dead.append(self.ref)


class Lazy(Handle, gc=False, eq=False):
    """The handle of a view or an empty tensor that costs no command until an operation uses it."""

    base: Handle | None
    plan: Any
    values: tuple[c.Plain, ...]


class Shared(Handle, gc=False, eq=False):
    """A handle of another handle's remote tensor, with another Meta. It keeps that handle alive, and owns nothing."""

    owner: Handle

    def __del__(self) -> None:
        pass


class Busy(Shared, gc=False, eq=False):
    """The handle of a tensor that can't be used for now: it has no ref until ``writing.check()`` returns, which raises
    until then."""

    writing: Any


holdings.lines_by(lines_of)
