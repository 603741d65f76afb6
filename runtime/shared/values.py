"""Items as bytes: plain data and tensors, which are copied."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..protocol import values
from ..protocol.dtypes import DTYPES, IDS, QUANTIZED
from ..protocol.errors import ProtocolError
from ..protocol.flat import as_bytes
from ..protocol.shared_objects import MAX_ITEM, MAX_SIZE, MAX_TENSOR_DIMS, MAX_TENSORS, Flat, Item


def pack(
    value: Any, refers: Callable[[Any], list[Any] | None] | None = None, what: str = "an item", verb: str = "put"
) -> Item:
    """Makes an item of a value. A tensor on a node is fetched; ``refers`` as for ``values.encode``; ``what``, ``verb``:
    as for ``encode_plain``.

    Raises TypeError for other than plain data and tensors, ValueError for what is too large, and what fetching raises.
    """
    tensors: list[torch.Tensor] = []
    data = encode_plain(value, tensors, what, verb, beside=False, refers=refers)
    if len(tensors) > MAX_TENSORS:
        raise ValueError(f"{what} has {len(tensors)} tensors, and may have {MAX_TENSORS}; torch.cat makes them one")
    size = len(data) + sum(x.numel() * x.element_size() + 64 for x in tensors)
    if size > MAX_ITEM:
        raise ValueError(
            f"{what} has {size} bytes, and may have {MAX_ITEM >> 20} MiB; send it in parts, or use x.to('node:k')"
        )
    here = [fetched(x, what) for x in tensors]
    return Item(data, tuple(Flat(IDS[x.dtype], tuple(x.shape), bytes(bytes_of(x))) for x in here))


def unpack(item: Item, referred: Callable[[list[Any]], Any] | None = None) -> Any:
    """Makes the value of an item, with tensors in this process's memory; ``referred`` as for ``values.decode``. Raises
    ProtocolError."""
    return decode_plain(item.data, [_tensor(flat) for flat in item.tensors], referred)


def _tensor(flat: Flat) -> torch.Tensor:
    size = nbytes_of(flat.dtype, flat.shape, "an item")
    if size != len(flat.data):
        raise ProtocolError(f"a tensor of shape {flat.shape!s:.200} has {size} bytes, and {len(flat.data)} came")
    made = empty(flat.dtype, flat.shape, "an item")
    bytes_of(made)[:] = flat.data
    check_filled(made, "an item")
    return made


# ---- plain data and tensors that are copied: items here, and messages in endpoints/frames.py -------------------------


def encode_plain(
    value: Any,
    tensors: list[torch.Tensor],
    what: str,
    verb: str,
    beside: bool = True,
    refers: Callable[[Any], list[Any] | None] | None = None,
) -> bytes:
    """Encodes a value as ``values.encode`` does; ``what`` it is, in words.

    Raises TypeError for an object of a user's class, which says to ``verb`` what that is made of.
    """
    classes: set[type] = set()
    data = values.encode(value, tensors, f"{what} has", beside=beside, classes=classes, refers=refers)
    if classes:
        raise TypeError(
            f"{what} has a {values.name_of(min(classes, key=values.name_of))}, and is made of tensors and plain data; "
            f"{verb} what it is made of, such as dataclasses.asdict(x)"
        )
    return data


def decode_plain(data: bytes, tensors: list[torch.Tensor], referred: Callable[[list[Any]], Any] | None = None) -> Any:
    """Decodes what ``encode_plain`` has encoded. Raises ProtocolError."""
    try:
        return values.decode(data, tensors, referred=referred)
    except values.Unannounced as e:
        raise ProtocolError(str(e)) from None


def fetched(x: torch.Tensor, what: str) -> torch.Tensor:
    """Returns a tensor here, contiguous, as the other end takes it. Raises TypeError for a sparse or quantized one,
    ValueError for a shape that can't cross, and what fetching raises."""
    if x.layout is not torch.strided or x.dtype not in IDS or x.dtype in QUANTIZED:
        raise TypeError(f"a tensor of {what} has the layout {x.layout} and the dtype {x.dtype}; make it a plain one")
    if len(x.shape) > MAX_TENSOR_DIMS:
        raise ValueError(
            f"a tensor of {what} has {len(x.shape)} dimensions, and may have {MAX_TENSOR_DIMS}; send x.reshape(...)"
        )
    if max(x.shape, default=0) >= MAX_SIZE:
        raise ValueError(f"a tensor of {what} has the shape {tuple(x.shape)}, and sizes may be less than {MAX_SIZE}")
    here = x.detach().cpu().resolve_conj().resolve_neg().contiguous()
    if here.dtype is torch.bool and not _is_filled(here):  # bytes that were looked at as bools: not 0 is true
        return here.view(torch.uint8) != 0
    return here


def bytes_of(x: torch.Tensor) -> memoryview:
    """Returns the memory of a contiguous tensor as bytes."""
    return memoryview(as_bytes(x).numpy()).cast("B") if x.numel() else memoryview(bytearray())  # type: ignore[arg-type]


def nbytes_of(dtype: int, shape: Sequence[int], what: str) -> int:
    """Returns the bytes of a tensor that somebody describes. Raises ProtocolError for a dtype that none has."""
    known = DTYPES.get(dtype)
    if known is None or known in QUANTIZED:
        raise ProtocolError(f"a tensor of {what} has the dtype number {dtype}")
    return math.prod(shape) * known.itemsize


def empty(dtype: int, shape: Sequence[int], what: str) -> torch.Tensor:
    """Makes a tensor that is to be filled, of a size that was checked. Raises ProtocolError."""
    try:
        return torch.empty(shape, dtype=DTYPES[dtype], device="cpu")
    except RuntimeError as e:  # no memory; or sizes whose product is no 64-bit number, beside one that is 0
        raise ProtocolError(f"a tensor of {what} can't be made: {e}") from None


def check_filled(x: torch.Tensor, what: str) -> None:
    """Raises ProtocolError for bytes that are none of the dtype's."""
    if x.dtype is torch.bool and not _is_filled(x):
        raise ProtocolError(f"a bool of {what} is neither 0 nor 1")


def _is_filled(x: torch.Tensor) -> bool:
    """Returns whether all bytes of bools are 0 or 1."""
    return not x.numel() or int(x.view(torch.uint8).max()) <= 1
