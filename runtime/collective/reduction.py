"""What a reduction does with two contributions, and which dtypes it takes: those that torch.distributed gives it."""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from functools import cache

import torch

Kernel = Callable[..., torch.Tensor]


class ReduceOp(IntEnum):
    """As torch.distributed.ReduceOp, with its numbers."""

    SUM = 0
    AVG = 1  #: the sum over the number of contributors
    PRODUCT = 2
    MIN = 3
    MAX = 4
    BAND = 5
    BOR = 6
    BXOR = 7


#: Each commutes to the last bit, so that two ranks that reduce the same pair in another order agree.
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
    """``f(a, b, out=)``."""
    return _KERNELS[op]


@cache
def check(op: ReduceOp, dtype: torch.dtype) -> None:
    """Raises TypeError unless tensors of ``dtype`` can be reduced so.

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
