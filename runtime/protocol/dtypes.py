"""The numbers that stand for dtypes on the wire: in commands and on data channels."""

from __future__ import annotations

import torch

#: Append only: a dtype's number is its place. Names, because an older torch lacks some.
NAMES = (
    *("float32", "float64", "float16", "bfloat16", "uint8", "int8", "int16", "int32", "int64", "bool"),
    *("complex64", "complex128", "complex32", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"),
    *("uint16", "uint32", "uint64", "float8_e8m0fnu", "quint8", "qint8", "qint32", "quint4x2"),
    *("float4_e2m1fn_x2", "bcomplex32", "bits8", "bits16", "bits1x8", "bits2x4", "bits4x2", "quint2x4"),
)
#: The dtypes that this torch has, by number.
DTYPES: dict[int, torch.dtype] = {i: getattr(torch, name) for i, name in enumerate(NAMES) if hasattr(torch, name)}
IDS: dict[torch.dtype, int] = {dtype: i for i, dtype in DTYPES.items()}
#: Dtypes whose bytes mean nothing without a scale, which is not in the tensor's memory.
QUANTIZED = frozenset(dtype for dtype in IDS if str(dtype).startswith("torch.q"))
