"""Reductions: the kernels for two contributions, and the dtypes that they take, as torch.distributed does."""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from functools import cache

import torch

Kernel = Callable[..., torch.Tensor]


class ReduceOp(IntEnum):
    """The operation of a reduction: torch.distributed.ReduceOp, with its names and numbers.

        dt.all_reduce(xs, dt.collectives.ReduceOp.MAX)      # "MAX" does as well

    Tensors are reduced element by element; the result has their shape and dtype. SUM, PRODUCT, MIN and MAX take real
    numbers and booleans, SUM and AVG complex numbers, AVG floating-point numbers, BAND, BOR and BXOR integers and
    booleans: in each case the dtypes that torch's kernel takes, so not float8. Of booleans SUM and MAX mean "any",
    PRODUCT and MIN "all". Collectives raise TypeError for other dtypes.
    """

    SUM = 0
    AVG = 1  #: the sum over the number of contributors
    PRODUCT = 2
    MIN = 3
    MAX = 4
    BAND = 5
    BOR = 6
    BXOR = 7


#: The kernels. Each commutes to the last bit, so that two ranks that reduce the same pair in another order agree.
_KERNELS: dict[ReduceOp, Kernel] = {
    ReduceOp.SUM: torch.add,
    ReduceOp.AVG: torch.add,
    ReduceOp.PRODUCT: torch.mul,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.MAX: torch.maximum,
    ReduceOp.BAND: torch.bitwise_and,
    ReduceOp.BOR: torch.bitwise_or,
    ReduceOp.BXOR: torch.bitwise_xor,
}


def kernel(op: ReduceOp) -> Kernel:
    """Returns the kernel of an operation: ``f(a, b, out=)``."""
    return _KERNELS[op]


@cache
def check(op: ReduceOp, dtype: torch.dtype) -> None:
    """Raises TypeError unless tensors of ``dtype`` can be reduced by ``op``.

    As in torch.distributed, complex numbers have sums and averages only. Of integers there is no average. Of booleans,
    sum and maximum mean "any", product and minimum "all".
    """
    numbers = dtype.is_floating_point or dtype.is_complex
    fits = numbers if op is ReduceOp.AVG else op is ReduceOp.SUM or not dtype.is_complex
    fits = fits and dtype is not torch.complex32  # torch can add these, but little else
    if fits:
        try:
            one = torch.zeros(dtype.itemsize, dtype=torch.uint8).view(dtype)
            _KERNELS[op](one, one, out=one)
        except (RuntimeError, TypeError, NotImplementedError):  # bits of floats; dtypes that only store
            fits = False
    if not fits:
        raise TypeError(f"ReduceOp.{op.name} cannot reduce {dtype}")
