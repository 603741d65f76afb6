"""Compares a node's result with local torch's: tolerances by dtype, and the texts about differences beyond them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

#: The tolerance of values, as (a share of the value, an amount), where a CPU has computed both: torch.testing's for the
#: roundings of one operation, which more or fewer threads sum in another order.
_CPU = {
    torch.float64: (1e-7, 1e-7),
    torch.float32: (1.3e-6, 1e-5),
    torch.float16: (1e-3, 1e-5),
    torch.bfloat16: (1.6e-2, 1e-5),
}
#: The tolerance where a GPU has computed one of them: TF32 has 10 bits, and a GPU's kernels sum in their own order.
_CUDA = {
    torch.float64: (1e-6, 1e-6),
    torch.float32: (2e-3, 1e-4),
    torch.float16: (1e-2, 1e-3),
    torch.bfloat16: (4e-2, 1e-2),
}
#: The tolerance for what is left of large terms that cancel, in units in the last place of the largest value of all.
_CANCELLED = {"cpu": 4.0, "cuda": 16.0}


def allowed(expected: torch.Tensor, kernels: str, size: float = 0.0, carry: torch.dtype | None = None) -> torch.Tensor:
    """Returns the tolerance of each element. ``size``: the largest term where elements are sums; ``carry``: the dtype
    in which terms have travelled."""
    dtype = carry or expected.dtype
    share, amount = (_CPU if kernels == "cpu" else _CUDA).get(dtype, (0.25, 0.0))  # floats of 8 bits have 2 that count
    magnitude = expected.double().abs()
    finite = magnitude[magnitude.isfinite()]
    largest = max(float(finite.max()) if finite.numel() else 0.0, size)
    return magnitude * share + amount + largest * _CANCELLED[kernels] * torch.finfo(dtype).eps


def values_differ(
    actual: torch.Tensor, expected: torch.Tensor, kernels: str, size: float = 0.0, carry: torch.dtype | None = None
) -> str:
    """Returns "" for two local tensors that agree, else where and how far they differ. NaN agrees with NaN."""
    actual, expected = actual.detach().resolve_conj().resolve_neg(), expected.detach().resolve_conj().resolve_neg()
    if actual.is_complex():
        actual, expected = torch.view_as_real(actual), torch.view_as_real(expected)
    same = (actual == expected) | ((actual != actual) & (expected != expected))
    if bool(same.all()):
        return ""
    apart = (actual.double() - expected.double()).abs()
    if expected.dtype.is_floating_point:
        same |= apart <= allowed(expected, kernels, size, carry)
    wrong = (~same).nonzero()
    if not len(wrong):
        return ""
    far = apart[~same]
    relative = far / expected.double().abs()[~same]
    at = tuple(wrong[0].tolist())
    return (
        f"{len(wrong)} of {same.numel()} values differ, by up to {_largest(far):.3g} ({_largest(relative):.3g} of the "
        f"value); at {list(at)} the node has {actual[at].item()!r} and local torch {expected[at].item()!r}"
    )


def _largest(x: torch.Tensor) -> float:
    return float(x.nan_to_num(nan=float("inf"), posinf=float("inf")).max())


def memory_differs(actual: torch.UntypedStorage, expected: torch.UntypedStorage, dtype: torch.dtype, on: str) -> str:
    """Returns "" for two memories that agree as elements of ``dtype``, else where and how far they differ.

    ``on``: the kind of kernels that have written the first.
    """
    if actual.nbytes() != expected.nbytes():
        return f"its memory has {actual.nbytes()} bytes, and with local torch {expected.nbytes()}"
    whole = actual.nbytes() // dtype.itemsize
    one, other = (torch.empty(0, dtype=dtype, device="cpu").set_(s, 0, (whole,), (1,)) for s in (actual, expected))
    if bool((one.view(torch.uint8) == other.view(torch.uint8)).all()):
        return ""
    return values_differ(one, other, on)


def geometry_differs(actual: torch.Tensor, expected: torch.Tensor, strides: bool = True) -> str:
    """Returns "" for two tensors of one dtype and shape, and with ``strides`` also of one layout; else the
    difference."""
    told = [
        (a.dtype, tuple(a.shape), *((a.stride(), int(a.storage_offset())) if strides else ()))
        for a in (actual, expected)
    ]
    for name, one, other in zip(("dtype is", "shape is", "strides are", "offset is"), *told, strict=False):
        if one != other:
            return f"the {name} {one}, and with local torch {other}"
    return ""


def leaves(value: Any, path: str = "the result") -> Iterator[tuple[str, Any]]:
    """Yields the parts of a result, each with its name."""
    if isinstance(value, (tuple, list)):
        for i, one in enumerate(value):
            yield from leaves(one, f"{path}[{i}]")
    else:
        yield path, value
