"""Arithmetic of proxies with numpy's arrays of no dimension: ``x + np.array(1.0)``, which torch leaves to numpy.

Numpy would compute it in the script, so a proxy takes it over: with the array as a number, and in the dtype that numpy
gives.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

#: A tensor's methods for each ufunc: as its first operand, and as its second.
_METHODS: dict[Any, tuple[str, str]] = {
    np.add: ("__add__", "__radd__"),
    np.subtract: ("__sub__", "__rsub__"),
    np.multiply: ("__mul__", "__rmul__"),
    np.true_divide: ("__truediv__", "__rtruediv__"),
    np.floor_divide: ("__floordiv__", "__rfloordiv__"),
    np.remainder: ("__mod__", "__rmod__"),
    np.power: ("__pow__", "__rpow__"),
    np.bitwise_and: ("__and__", "__rand__"),
    np.bitwise_or: ("__or__", "__ror__"),
    np.bitwise_xor: ("__xor__", "__rxor__"),
    np.left_shift: ("__lshift__", "__rlshift__"),
    np.right_shift: ("__rshift__", "__rrshift__"),
    np.less: ("__lt__", "__gt__"),
    np.less_equal: ("__le__", "__ge__"),
    np.greater: ("__gt__", "__lt__"),
    np.greater_equal: ("__ge__", "__le__"),
    np.equal: ("__eq__", "__eq__"),
    np.not_equal: ("__ne__", "__ne__"),
}


def computed(tensor: torch.Tensor, ufunc: Any, method: str, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Returns the result of a ufunc on a proxy and a number; NotImplemented for all other operands and ufuncs."""
    if ufunc not in _METHODS or method != "__call__" or kwargs:
        return NotImplemented
    second = inputs[1] is tensor
    other = inputs[0] if second else inputs[1]
    if isinstance(other, np.ndarray) and not other.ndim:
        if second and ufunc is np.true_divide:  # as torch computes it, with its roundings
            tensor, ufunc = tensor.reciprocal(), np.multiply
        tensor = tensor.to(_dtype(ufunc, tensor.dtype, other.dtype))
        other = other.item() if tensor.dtype == torch.bool else +other.item()
    elif not isinstance(other, np.generic):  # torch itself makes numbers of np.generic
        return NotImplemented
    return getattr(tensor, _METHODS[ufunc][second])(other)


def _dtype(ufunc: Any, a: torch.dtype, b: np.dtype[Any]) -> torch.dtype:
    """Returns the dtype in which numpy computes. Raises TypeError for a dtype that numpy has not."""
    found = np.result_type(torch.empty(0, dtype=a).numpy().dtype, b)
    if ufunc is np.true_divide and found.kind in "biu":
        found = np.dtype(np.float64)
    return torch.from_numpy(np.empty(0, found)).dtype
