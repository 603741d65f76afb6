"""Factories of tensors on the current node, with torch's names and arguments.

    with dt.node(1):
        x = factories.zeros(3)

``torch.zeros(3, device="node:1")`` does the same for any node. The types of PyTorch 0.x are
here and at the first level: ``dt.FloatTensor(20, 20)``.
"""

from .proxy.factories import LEGACY as _LEGACY
from .proxy.factories import (
    arange,
    empty,
    eye,
    from_numpy,
    full,
    linspace,
    logspace,
    ones,
    rand,
    randint,
    randn,
    randperm,
    tensor,
    zeros,
)

BFloat16Tensor = _LEGACY["BFloat16Tensor"]
BoolTensor = _LEGACY["BoolTensor"]
ByteTensor = _LEGACY["ByteTensor"]
CharTensor = _LEGACY["CharTensor"]
ComplexDoubleTensor = _LEGACY["ComplexDoubleTensor"]
ComplexFloatTensor = _LEGACY["ComplexFloatTensor"]
DoubleTensor = _LEGACY["DoubleTensor"]
FloatTensor = _LEGACY["FloatTensor"]
HalfTensor = _LEGACY["HalfTensor"]
IntTensor = _LEGACY["IntTensor"]
LongTensor = _LEGACY["LongTensor"]
ShortTensor = _LEGACY["ShortTensor"]

__all__ = [
    "BFloat16Tensor",
    "BoolTensor",
    "ByteTensor",
    "CharTensor",
    "ComplexDoubleTensor",
    "ComplexFloatTensor",
    "DoubleTensor",
    "FloatTensor",
    "HalfTensor",
    "IntTensor",
    "LongTensor",
    "ShortTensor",
    "arange",
    "empty",
    "eye",
    "from_numpy",
    "full",
    "linspace",
    "logspace",
    "ones",
    "rand",
    "randint",
    "randn",
    "randperm",
    "tensor",
    "zeros",
]
