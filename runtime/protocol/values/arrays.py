"""Arrays and scalars of numpy as bytes with a description: dtype, shape and order."""

from __future__ import annotations

import math
import re
from typing import Any, TypeAlias

import numpy as np

#: The dtype's name, the shape, and whether the last dim is the one that is furthest apart in memory.
Described: TypeAlias = tuple[str, tuple[int, ...], bool]

_DTYPE = re.compile(
    r"(?P<name>[<>|]([biufcSUV]\d{1,9}|[mM]8(\[\d{0,9}(Y|M|W|D|h|m|s|ms|us|ns|ps|fs|as)\])?))(?P<digits>/\d{1,3})?",
    re.ASCII,
)
_MOST = 1 << 62


def refused(dtype: np.dtype[Any]) -> str:
    """Returns why arrays of a dtype can't cross, and what to write instead; "" where they can."""
    if dtype.hasobject:
        return "whose elements are Python objects; for x return x.tolist()"
    if dtype.names is not None:
        return "of a structured dtype; return {name: x[name] for name in x.dtype.names}"
    if not _DTYPE.fullmatch(dtype.str):
        return "of a dtype that is not numpy's own; return an array of one that is"
    return ""


def name_of(dtype: np.dtype[Any]) -> str:
    """Returns the name of a dtype. A long double's has the number of its digits: CPUs differ in that."""
    return dtype.str + (f"/{np.finfo(dtype).nmant}" if dtype.char in "gG" else "")


def dtype_named(name: Any) -> np.dtype[Any]:
    """Returns the dtype of a name. Raises ValueError, TypeError."""
    found = _DTYPE.fullmatch(name)
    if found is None:
        raise ValueError(f"{name!r:.100} is no dtype")
    dtype = np.dtype(found["name"])
    if name_of(dtype) != name:
        raise ValueError(f"{name!r} is a dtype of another machine; this one has {name_of(dtype)!r}")
    return dtype


def plain(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Returns an array whose bytes are its dtype's, as the other end wants them: another one for bytes that were looked
    at as bools, of which those that are not 0 are true. Raises ValueError for text that is none."""
    if not _is_filled(array.dtype, array):
        if array.dtype.kind == "b":
            return np.asarray(array.view(np.uint8) != 0)
        raise ValueError("an array of text with numbers that are no characters of Unicode's")
    return array


def describe(array: np.ndarray[Any, Any]) -> Described:
    """Returns an array's description."""
    return name_of(array.dtype), array.shape, array.flags.f_contiguous and not array.flags.c_contiguous


def bytes_of(array: np.ndarray[Any, Any]) -> bytes:
    """Returns an array's elements one after the other, in the order of its description."""
    return array.tobytes("F" if describe(array)[2] else "C")


def flat(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Returns the same bytes as an array of them, which is a copy."""
    return np.frombuffer(bytearray(bytes_of(array)), np.uint8) if array.nbytes < 1 << 16 else _flat(array)


def _flat(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    copied = array.copy("F" if describe(array)[2] else "C")
    return copied.reshape(-1, order="A").view(np.uint8)


def array_of(described: Any, data: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Returns the array of a description and its bytes, without a copy. Raises ValueError, TypeError."""
    name, shape, backwards = described
    dtype = dtype_named(name)
    if not isinstance(shape, list) or not all(isinstance(n, int) and 0 <= n < _MOST for n in shape):
        raise ValueError(f"{shape!r:.100} is no shape")
    if math.prod(shape) * dtype.itemsize != data.nbytes:
        raise ValueError(f"an array of {name} and shape {shape!s:.200} does not have {data.nbytes} bytes")
    if not _is_filled(dtype, data):
        raise ValueError("a bool is 0 or 1" if dtype.kind == "b" else "text is made of Unicode's characters")
    return np.ndarray(tuple(shape), dtype, data, order="F" if backwards is True else "C")


def _is_filled(dtype: np.dtype[Any], data: np.ndarray[Any, Any]) -> bool:
    """Returns whether bytes, or an array that has them, are bools or text, where that is what they are to be."""
    if not data.size or dtype.kind not in "bU" or not dtype.itemsize:
        return True
    if dtype.kind == "b":
        return int(data.view(np.uint8).max()) <= 1
    plain = np.ascontiguousarray(data)
    return int(plain.reshape(-1).view(dtype.str[0] + "u4").max()) <= 0x10FFFF
