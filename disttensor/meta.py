"""What the master knows of a remote tensor without asking: shape, strides, dtype, place; and the handle that owns it."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING

import torch

from .runtime import command as c

if TYPE_CHECKING:
    from .placement import Place
    from .runtime.failure import Site

#: Mints refs. Never reused, in no session.
new_ref = count(1).__next__

#: Interned metadata; bounded: a cleared table only makes caches miss once.
MAX_METAS = 65_536
_metas: dict[object, Meta] = {}


class Meta:
    """Immutable and interned: plans are cached by the identity of their operands' metas."""

    __slots__ = ("dead", "device", "dtype", "offset", "place", "shape", "stand_in", "stride")

    def __init__(
        self, shape: tuple[int, ...], stride: tuple[int, ...], offset: int, dtype: torch.dtype, place: Place
    ) -> None:
        self.shape = shape
        self.stride = stride
        self.offset = offset
        self.dtype = dtype
        self.place = place
        self.device = place.device
        self.dead = place.dead
        #: a tensor on the meta device with this metadata, for inference
        self.stand_in = torch.empty_strided(shape, stride, dtype=dtype, device="meta")

    def __repr__(self) -> str:
        return f"<{tuple(self.shape)} {self.dtype} at {self.place}>"


def meta_of(
    shape: tuple[int, ...], stride: tuple[int, ...], offset: int, dtype: torch.dtype, place: Place
) -> Meta:
    """The one Meta with these values."""
    key = (shape, stride, offset, dtype, place)
    meta = _metas.get(key)
    if meta is None:
        if len(_metas) >= MAX_METAS:
            _metas.clear()
        meta = _metas.setdefault(key, Meta(shape, stride, offset, dtype, place))
    return meta


def meta_like(tensor: torch.Tensor, place: Place) -> Meta:
    """The Meta of a tensor with ``tensor``'s geometry at ``place``."""
    return meta_of(tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), tensor.dtype, place)


def forget_all() -> None:
    """Drops interned metas (they hold on to their session)."""
    _metas.clear()


class Handle:
    """Owns one remote tensor: when the last proxy that shares it dies, the node is told to drop the ref.

    A handle's geometry never changes: an operation that changes a tensor's geometry in place gives the proxy a new
    handle. Proxies may share one (``detach``).
    """

    __slots__ = ("__weakref__", "meta", "ref")

    def __init__(self, ref: int, meta: Meta) -> None:
        self.ref = ref  #: 0 while the tensor doesn't exist on the node yet (Lazy)
        self.meta = meta

    def __del__(self) -> None:
        # no lock and no I/O: the collector can run this anywhere
        if self.ref:
            self.meta.dead.append(self.ref)


class Lazy(Handle):
    """A view or an empty tensor that costs no command until something uses it."""

    __slots__ = ("base", "plan", "site", "values")

    def __init__(self, meta: Meta, base: Handle | None, plan: object, values: tuple[c.Plain, ...], site: Site | None) -> None:
        self.ref = 0
        self.meta = meta
        self.base = base
        self.plan = plan
        self.values = values
        self.site = site


def release_finalizer_code() -> object:
    """The code object in which an interrupt would be swallowed."""
    return Handle.__del__.__code__
