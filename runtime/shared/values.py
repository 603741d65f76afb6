"""Items as bytes: plain data and tensors, which are copied."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from ..protocol import values
from ..protocol.dtypes import DTYPES, IDS, QUANTIZED
from ..protocol.errors import ProtocolError
from ..protocol.shared_objects import MAX_ITEM, MAX_TENSORS, Flat, Item


def pack(value: Any, refers: Callable[[Any], list[Any] | None] | None = None) -> Item:
    """Makes an item of a value. A tensor on a node is fetched; ``refers`` as for ``values.encode``.

    Raises TypeError for other than plain data and tensors, ValueError for what is too large, and what fetching raises.
    """
    tensors: list[torch.Tensor] = []
    classes: set[type] = set()
    data = values.encode(value, tensors, "an item has", beside=False, classes=classes, refers=refers)
    if classes:
        raise TypeError(
            f"an item has a {values.name_of(min(classes, key=values.name_of))}, and is made of tensors and plain data; "
            "put what it is made of, such as dataclasses.asdict(x)"
        )
    if len(tensors) > MAX_TENSORS:
        raise ValueError(f"an item has {len(tensors)} tensors, and may have {MAX_TENSORS}; torch.cat makes them one")
    size = len(data) + sum(x.numel() * x.element_size() + 64 for x in tensors)
    if size > MAX_ITEM:
        raise ValueError(
            f"an item has {size} bytes, and may have {MAX_ITEM >> 20} MiB; send it in parts, or use x.to('node:k')"
        )
    return Item(data, tuple(_flat(x) for x in tensors))


def unpack(item: Item, referred: Callable[[list[Any]], Any] | None = None) -> Any:
    """Makes the value of an item, with tensors in this process's memory; ``referred`` as for ``values.decode``. Raises
    ProtocolError."""
    try:
        return values.decode(item.data, [_tensor(flat) for flat in item.tensors], referred=referred)
    except values.Unannounced as e:
        raise ProtocolError(str(e)) from None


def _flat(x: torch.Tensor) -> Flat:
    if x.layout is not torch.strided or x.dtype not in IDS or x.dtype in QUANTIZED:
        raise TypeError(f"a tensor of an item has the layout {x.layout} and the dtype {x.dtype}; make it a plain one")
    here = x.detach().cpu().resolve_conj().resolve_neg().contiguous()
    if here.numel() == 0:
        return Flat(IDS[x.dtype], tuple(x.shape), b"")
    return Flat(IDS[x.dtype], tuple(x.shape), here.reshape(-1).view(torch.uint8).numpy().tobytes())


def _tensor(flat: Flat) -> torch.Tensor:
    dtype = DTYPES.get(flat.dtype)
    if dtype is None or dtype in QUANTIZED:
        raise ProtocolError(f"a tensor of an item has the dtype number {flat.dtype}")
    if math.prod(flat.shape) * dtype.itemsize != len(flat.data):
        raise ProtocolError(f"a tensor of {dtype} and shape {flat.shape!s:.200} does not have {len(flat.data)} bytes")
    if not flat.data:
        try:
            return torch.empty(flat.shape, dtype=dtype, device="cpu")
        except RuntimeError as e:  # sizes whose product is no 64-bit number, beside one that is 0
            raise ProtocolError(f"a tensor of an item can't be made: {e}") from None
    if dtype is torch.bool and flat.data.strip(b"\0\1"):
        raise ProtocolError("a bool of an item is neither 0 nor 1")
    return torch.frombuffer(bytearray(flat.data), dtype=torch.uint8).view(dtype).reshape(flat.shape)
