"""Answers of all nodes of a mesh as one: nothing is assumed to be equal, so each is looked at."""

from __future__ import annotations

import struct
from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

import torch

from ..runtime.channel.payload import of_bytes
from ..runtime.protocol import codec
from ..runtime.protocol import commands as c
from ..runtime.protocol.errors import RanksDiffer
from ..runtime.protocol.flat import as_bytes
from .places import MeshPlace

T = TypeVar("T")

#: The most different values that an error shows.
_SHOWN = 3
#: Elements of a tensor up to which it is shown as a whole.
_SHORT = 8


def agreed(place: MeshPlace, replies: Sequence[c.Reply]) -> c.Reply:
    """Returns the first of these replies, one of each member, if all say the same. Raises RanksDiffer."""
    check = _KINDS.get(type(replies[0]))
    if check is None:
        return place.one  # raises: what is asked is for one node
    encoded = list(map(codec.encode, replies))
    if encoded.count(encoded[0]) == len(encoded):  # which tells apart what ``_bits`` does
        return replies[0]
    key, said = check
    keys = [key(reply) for reply in replies]
    if len({*keys}) > 1:
        one(place, keys, [said(reply) for reply in replies])
    return replies[0]


def agreed_bytes(place: MeshPlace, tensors: Sequence[torch.Tensor]) -> None:
    """Raises RanksDiffer unless these local tensors, one of each member, have the same bytes."""

    keys = [as_bytes(tensor.contiguous()).numpy().tobytes() for tensor in tensors]
    one(place, keys, [_shown(tensor) for tensor in tensors])


def _shown(tensor: torch.Tensor) -> str:
    return str(tensor.tolist()) if tensor.numel() <= _SHORT else f"{tuple(tensor.shape)} {tensor.dtype}"


def one(place: MeshPlace, keys: Sequence[Hashable], said: Sequence[str]) -> None:
    """Raises RanksDiffer unless all ``keys``, one of each member, are equal. ``said``: what they are in words."""
    if len(set(keys)) == 1:
        return
    first: dict[Hashable, int] = {}
    for i, key in enumerate(keys):
        first.setdefault(key, i)
    shown = [f"{said[i]} at {place.where(i)}" for i in list(first.values())[:_SHOWN]]
    over = repr(next(iter(place.dims))) if len(place.dims) == 1 else repr(tuple(place.dims))
    if {*said} <= {"True", "False"}:  # which have no mean
        all_of_them = (
            f"dt.all_reduce(x, 'max', over={over}) is whether it is so on any rank, with 'min' whether it is on all"
        )
    else:
        all_of_them = f"dt.all_reduce(x, 'avg', over={over}) is the mean of all"
    raise RanksDiffer(
        f"the {len(place.ranks)} ranks of {place} have {len(first)} different values: {', '.join(shown)}"
        f"{', ...' if len(first) > _SHOWN else ''}. {all_of_them}, x.at({place.where(0)}) the value of one, "
        "x.shards() are all"
    )


def _bits(value: object) -> Hashable:
    """Returns a key that tells 1 and True, 0.0 and -0.0 apart, and has a NaN equal to one with the same bits."""
    if isinstance(value, complex):
        return struct.pack("<dd", value.real, value.imag)
    if isinstance(value, float):
        return struct.pack("<d", value)
    return type(value), value


def _geometries(reply: c.Shapes) -> Hashable:
    return reply.outs


def _elements(reply: c.Downloaded) -> str:
    dtype = codec.dtype_of_data(reply.dtype, reply.shape, reply.data)
    return _shown(of_bytes(reply.data, dtype, reply.shape))


def _storage(reply: c.StorageInfo) -> Hashable:
    """Names and addresses are each node's own."""
    return reply.bytes, reply.offset, reply.stride


#: By kind of reply: what has to be equal, and how it is told.
_KINDS: dict[type[c.Reply], tuple[Callable[..., Hashable], Callable[..., str]]] = {
    c.Answer: (lambda reply: _bits(codec.from_value(reply.value)), lambda reply: repr(codec.from_value(reply.value))),
    c.Shapes: (_geometries, lambda reply: f"shape {[None if g is None else g.shape for g in reply.outs]}"),
    c.StorageInfo: (_storage, lambda reply: f"a memory of {reply.bytes} bytes"),
    c.Digested: (lambda reply: reply.digest, lambda reply: f"bytes with hash {reply.digest.hex()[:8]}..."),
    c.Downloaded: (lambda reply: (reply.shape, reply.dtype, reply.data), _elements),
    c.Done: (lambda reply: (), lambda reply: "done"),
    c.RngState: (lambda reply: reply.state, lambda reply: "a generator's state"),
}
