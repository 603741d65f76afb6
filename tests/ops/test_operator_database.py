"""Every operator that PyTorch tests itself by, on a node against local CPU.

`make slow` runs all samples in all our dtypes; `make test` the first ones of every third operator. The lists below can
only shrink: an entry that works fails the test.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import operator_database as database
import pytest
import torch

import disttensor as dt

pytestmark = pytest.mark.filterwarnings("ignore")

SPARSE = "it has or makes a sparse tensor; those on nodes are strided"
MEMORY = "the sample reads memory beside its input, which isn't sent with it"
SUBCLASS = "for tensor subclasses torch takes another formula"

#: name -> why it fails; or (name, dtype) for those that fail in one dtype only
FAILS: dict[str | tuple[str, torch.dtype], str] = {
    "sparse.sampled_addmm": SPARSE,
    "sparse.mm.reduce": SPARSE,
    "to_sparse": SPARSE,
    "as_strided.partial_views": MEMORY,
    "ormqr": SUBCLASS,
}

SAFE = "for tensor subclasses torch takes the gradient that is safe beside zeros"
DEVICE = "its gradients are accumulated in a precision chosen by the device's type"
ALIGNED = "LAPACK's bits depend on where in memory the operands lie, on local CPU too"
#: name -> why it is right up to rounding only
CLOSE: dict[str | tuple[str, torch.dtype], str] = {
    "prod": SAFE,
    "masked.prod": SAFE,
    ("cumprod", torch.complex64): SAFE,
    ("nn.functional.linear_cross_entropy.chunked", torch.bfloat16): DEVICE,
    ("nn.functional.linear_cross_entropy.chunked_none", torch.bfloat16): DEVICE,
}
#: name -> why it may or may not be right to the bit
VARIES = {"linalg.lstsq": ALIGNED, "linalg.lstsq.grad_oriented": ALIGNED, "linalg.pinv.singular": ALIGNED}


@pytest.fixture(autouse=True, scope="module")
def node() -> Iterator[None]:
    """A process: an in-process node shares this process's generator, which samples seed. One thread on either side."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with dt.init_master_worker(nodes=1, threads=1):
        torch.zeros(1).to(database.NODE).cpu()  # opens the connections that stay
        yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def nothing_left_over(node: None) -> Iterator[None]:
    """A failure that nobody asked about belongs to the test that caused it."""
    yield
    dt.synchronize()


def cases() -> list[Any]:
    """All operators in all dtypes."""
    found = []
    for name, op in database.OPERATORS.items():
        for dtype in database.dtypes(op):
            why = FAILS.get(name) or FAILS.get((name, dtype))
            marks = [pytest.mark.xfail(reason=why)] if why else []
            found.append(pytest.param(name, dtype, marks=marks, id=f"{name}-{str(dtype)[6:]}"))
    return found


def spread() -> list[Any]:
    """Every third operator of those that work, in its first dtype."""
    return [case for case in cases() if not case.marks and case.values[1] is first(case.values[0])][::3]


def first(name: str) -> torch.dtype | None:
    return next(iter(database.dtypes(database.OPERATORS[name])), None)


def is_close(name: str, dtype: torch.dtype) -> bool:
    exact = not (dtype.is_floating_point or dtype.is_complex)
    return (not exact and (name in CLOSE or name in VARIES)) or (name, dtype) in CLOSE


@pytest.mark.parametrize(("name", "dtype"), spread())
def test_first_samples(name: str, dtype: torch.dtype) -> None:
    op = database.OPERATORS[name]
    assert database.check(op, dtype, 2, is_close(name, dtype))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype"), cases())
def test_all_samples(name: str, dtype: torch.dtype) -> None:
    op = database.OPERATORS[name]
    if not is_close(name, dtype):
        assert database.check(op, dtype)
        return
    if name not in VARIES:
        with pytest.raises(AssertionError):  # else it belongs on no list
            database.check(op, dtype)
    database.check(op, dtype, close=True)


def test_the_lists_name_operators() -> None:
    for key in (*FAILS, *CLOSE, *VARIES):
        name = key if isinstance(key, str) else key[0]
        assert name in database.OPERATORS
    share = 1 - len({k if isinstance(k, str) else k[0] for k in FAILS}) / len(database.OPERATORS)
    assert share >= 0.98
