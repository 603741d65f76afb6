"""Operations that CUDA has a kernel for and a CPU has none, on CPU nodes: libraries take the path for CUDA for any
device that isn't "cpu".

They are computed in a wider dtype and rounded, as CUDA computes them. A CUDA node uses torch's own kernels.
"""

from __future__ import annotations

from functools import reduce
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from ...dispatch.dispatch import part
from ...dispatch.op_plan import OpEntry
from ...dispatch.op_table import fallback
from ...proxy.proxy import DistributedTensor

aten = torch.ops.aten

_HALF = frozenset({torch.float16, torch.bfloat16})
_COMPLEX_HALF = frozenset({torch.complex32})
_FLOAT8 = frozenset({torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz})
_INTEGERS = frozenset({torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})
_BOOL = frozenset({torch.bool})

#: narrow dtype -> for each dtype of an operand or result, the one to compute in
_WIDER: dict[torch.dtype, dict[torch.dtype, torch.dtype]] = {
    torch.float16: {torch.float16: torch.float32, torch.complex32: torch.complex64},
    torch.bfloat16: {torch.bfloat16: torch.float32},
    torch.complex32: {torch.complex32: torch.complex64, torch.float16: torch.float32},
    torch.bool: {torch.bool: torch.uint8},
    **{dtype: {dtype: torch.float32} for dtype in _FLOAT8},
    **{dtype: {dtype: torch.float64} for dtype in _INTEGERS},
}

#: operator, with any overload -> the dtypes that CUDA has a kernel for, and the CPU none
NARROW: dict[str, frozenset[torch.dtype]] = {
    "histc": _INTEGERS,
    **dict.fromkeys(
        (
            "avg_pool3d",
            "avg_pool3d_backward",
            "_upsample_bilinear2d_aa",
            "_upsample_bilinear2d_aa_backward",
            "multi_margin_loss",
            "multi_margin_loss_backward",
            "multilabel_margin_loss_forward",
            "multilabel_margin_loss_backward",
        ),
        _HALF,
    ),
    "rrelu_with_noise": frozenset({torch.float16}),
    "_fft_r2c": frozenset({torch.float16}),
    "scatter": _FLOAT8,
    "abs": _BOOL,
    "trace": _BOOL | _COMPLEX_HALF,
    **dict.fromkeys(
        (
            *("acos", "acosh", "asin", "asinh", "atan", "atanh", "cos", "cosh", "sin", "sinh", "tan", "tanh"),
            *("div", "exp", "log", "logaddexp", "pow", "rsqrt", "sqrt", "lerp", "angle", "sigmoid", "sum", "prod"),
            *("tanh_backward", "sigmoid_backward", "cumprod", "flip", "_fft_c2c", "_fft_c2r"),
        ),
        _COMPLEX_HALF,
    ),
}


def _computes_as_cpu(tensors: list[Any]) -> bool:
    return any(type(t) is DistributedTensor and t._place.kernels == "cpu" for t in tensors)


@fallback(*NARROW)
def widened(entry: OpEntry, args: Any, kwargs: Any) -> Any:
    """Runs an operation in the wider dtype if it is one of `NARROW` and its node computes as a CPU; else returns
    NotImplemented."""
    tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
    types = {t.dtype for t in tensors}
    types = {dtype for dtype in types if dtype.is_floating_point or dtype.is_complex} or types  # without indices
    narrow = reduce(torch.promote_types, types)
    if narrow not in NARROW[entry.op.overloadpacket.__name__.removesuffix("_")] or not _computes_as_cpu(tensors):
        return NotImplemented
    wider = _WIDER[narrow]
    rounded = {wide: dtype for dtype, wide in wider.items()}
    if kwargs.get("dtype") not in (None, narrow):
        rounded = {}  # the caller says what the result is

    def widen(value: Any) -> Any:
        if isinstance(value, torch.dtype):
            return wider.get(value, value)
        return _cast(value, wider) if isinstance(value, torch.Tensor) else value

    wide_args, wide_kwargs = tree_map(widen, (args, kwargs))
    result = part(entry.op, (), wide_args, wide_kwargs)
    written = [(args[w], wide_args[w]) if isinstance(w, int) else (kwargs[w], wide_kwargs[w]) for w in entry.writes]
    for target, wide in written:
        part(aten.copy_.default, (), (target, wide))
    if entry.returned:
        targets = [args[w] if isinstance(w, int) else kwargs[w] for w in entry.returned]
        return targets[0] if len(targets) == 1 else tuple(targets)
    return tree_map(lambda value: _cast(value, rounded) if isinstance(value, torch.Tensor) else value, result)


def _cast(x: torch.Tensor, to: dict[torch.dtype, torch.dtype]) -> Any:
    dtype = to.get(x.dtype)
    return x if dtype is None else part(aten._to_copy.default, (), (x,), {"dtype": dtype})


@fallback("nansum")
def nansum(entry: OpEntry, args: Any, kwargs: Any) -> Any:
    """Sums complex numbers without those that are NaN in either part; returns NotImplemented for other dtypes."""
    x, *dims = args
    if not x.dtype.is_complex or not _computes_as_cpu([x]):
        return NotImplemented
    gone = part(aten.isnan.default, (), (x,))
    kept = part(aten.masked_fill.Scalar, (), (x, gone, 0))
    total = aten.sum.IntList_out if entry.mutable else aten.sum.dim_IntList
    return part(total, (), (kept, *(dims or [None])), kwargs)
