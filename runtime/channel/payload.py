"""Payloads: a tensor as bytes, its elements in row-major order, conjugation and negation carried out.

Where a tensor lies in CPU memory just so, its own memory is sent from and received into; others are staged.
"""

from __future__ import annotations

import ctypes

import torch

from ..protocol.dtypes import IDS, NAMES, QUANTIZED

_IDS = {dtype: number for dtype, number in IDS.items() if dtype not in QUANTIZED}

#: all dtypes that can travel
DTYPES: tuple[torch.dtype, ...] = tuple(_IDS)

_PACKED = {getattr(torch, "float4_e2m1fn_x2", None)}
#: dtypes of which torch makes empty tensors without a warning, and under any of its switches
_EVERYDAY = frozenset(
    (
        torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
        torch.uint8, torch.bool, torch.complex64, torch.complex128,
    )
)  # fmt: skip
_CPU = torch.device("cpu")
_empty, _move = torch.empty, ctypes.memmove
_PyBUF_WRITE = 0x200
_from_memory = ctypes.pythonapi.PyMemoryView_FromMemory
_from_memory.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int]
_from_memory.restype = ctypes.py_object


def dtype_id(tensor: torch.Tensor) -> int:
    """Returns the wire id of ``tensor``'s dtype.

    Raises TypeError for one that cannot travel (sparse, nested, quantized, sub-byte, without memory).
    """
    if tensor.layout is not torch.strided:
        raise TypeError(f"a {tensor.layout} tensor cannot travel as one; send its dense parts")
    if tensor.is_nested:
        raise TypeError("a nested tensor cannot travel as one; send what to_padded_tensor makes of it, or its parts")
    if not has_memory(tensor):
        raise TypeError(f"a {type(tensor).__name__} without memory cannot travel")
    try:
        return _IDS[tensor.dtype]
    except KeyError:
        raise TypeError(f"{tensor.dtype} cannot travel; view or convert it to a plain dtype first") from None


def has_memory(tensor: torch.Tensor) -> bool:
    """Returns whether a strided tensor has memory for its elements, or is autograd's zeros, which need none. Those on
    the meta device, of storages that were freed, and what only stands for other tensors (a FakeTensor) have none."""
    if tensor.device.type != "cpu":
        return tensor.device.type != "meta"
    return bool(tensor.data_ptr()) or not tensor.numel() or tensor._is_zerotensor()


def describe(dtype: int, numel: int) -> str:
    """Returns words for an error: ``float32 x 12`` from a wire id and a number of elements."""
    name = NAMES[dtype] if dtype < len(NAMES) else f"dtype #{dtype} (of a newer version)"
    return f"{name} x {numel}"


def is_plain(tensor: torch.Tensor) -> bool:
    """Returns whether ``tensor``'s own memory holds the bytes that travel."""
    return (
        tensor.is_contiguous()
        and tensor.device.type == "cpu"
        and not (tensor.is_conj() or tensor.is_neg() or tensor._is_zerotensor())
    )


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Returns ``tensor`` itself if it is plain, else a plain copy of its elements."""
    if is_plain(tensor):
        return tensor
    if tensor._is_zerotensor():  # autograd's zeros without memory
        return torch.zeros(tensor.shape, dtype=tensor.dtype)
    return _movable(tensor.detach()).to("cpu").resolve_conj().resolve_neg().contiguous()


def byte_view(tensor: torch.Tensor) -> memoryview:
    """Returns the memory of a plain tensor, writable. It does not keep the tensor alive: the caller has to.

    Raises TypeError for a tensor without memory.
    """
    nbytes = tensor.numel() * tensor.element_size()
    if not nbytes:
        return memoryview(bytearray())
    if not tensor.data_ptr():
        raise TypeError(f"a {type(tensor).__name__} of {nbytes} bytes has no memory")
    view: memoryview = _from_memory(tensor.data_ptr(), nbytes, _PyBUF_WRITE)
    return view


def bytes_of(tensor: torch.Tensor) -> bytes:
    """Returns a copy of a tensor's elements. Raises TypeError as ``dtype_id``."""
    everyday = tensor.dtype in _EVERYDAY and tensor.layout is torch.strided and not tensor.is_nested
    if everyday and (at := tensor.data_ptr()) and is_plain(tensor):
        return ctypes.string_at(at, tensor.nbytes)
    dtype_id(tensor)
    elements = plain(tensor)
    return ctypes.string_at(elements.data_ptr(), elements.nbytes)


def of_bytes(data: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Returns a plain tensor whose elements are these bytes, which have to be as many."""
    # Not by way of a view where that can be had without: a script that has waited runs cold, where each call of torch's
    # takes some microseconds.
    if dtype in _EVERYDAY:
        tensor = _empty(shape, dtype=dtype, device=_CPU)
    else:  # bytes: as in scratch
        tensor = of_its_own(torch.empty(len(data), dtype=torch.uint8, device=_CPU).view(dtype).view(shape))
    _move(tensor.data_ptr(), data, len(data))
    return tensor


def of_its_own(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor that is nobody's view, as one that has just been made is; ``detach_`` refuses views."""
    return tensor.data


def store(destination: torch.Tensor, plain_copy: torch.Tensor) -> None:
    """Copies ``plain_copy``, which has arrived (same dtype and number of elements), into ``destination``."""
    # Inference mode, so that a destination that is an inference tensor may be written too.
    with torch.inference_mode():
        _movable(destination.detach()).copy_(_movable(plain_copy.detach()).reshape(destination.shape))


def scratch(tensor: torch.Tensor) -> torch.Tensor:
    """Makes a plain, uninitialised CPU tensor of ``tensor``'s dtype and number of elements."""
    nbytes = tensor.numel() * tensor.element_size()
    # Through bytes: torch.empty warns of complex32.
    return torch.empty(nbytes, dtype=torch.uint8).view(tensor.dtype)


def _movable(tensor: torch.Tensor) -> torch.Tensor:
    """Returns ``tensor`` as a dtype that torch can copy: packed 4-bit floats are bytes to it."""
    return tensor.view(torch.uint8) if tensor.dtype in _PACKED else tensor
