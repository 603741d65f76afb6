"""Every operator that PyTorch tests itself by, on a node against local CPU.

`make slow` runs all samples in all our dtypes; `make test` the first ones of every third operator. Operands that lie
otherwise in memory (permuted, sliced, ..): `make slow` runs all operators, `make test` every fourth by a hash of its
name. The lists below can only shrink: an entry that works fails the test.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from zlib import crc32

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
#: name -> why it is right up to rounding only
CLOSE: dict[str | tuple[str, torch.dtype], str] = {
    "prod": SAFE,
    "masked.prod": SAFE,
    ("cumprod", torch.complex64): SAFE,
    ("nn.functional.linear_cross_entropy.chunked", torch.bfloat16): DEVICE,
    ("nn.functional.linear_cross_entropy.chunked_none", torch.bfloat16): DEVICE,
}
#: Lists and database are those of the torch that `make test` runs on; an older one lacks operators, and a rule.
OLDER = torch.__version__ < (2, 13)
if OLDER:
    CLOSE |= {"cumprod": SAFE, "masked.cumprod": SAFE}


UNDEFINED = "local torch gives what memory happens to hold"
FORMULA = "for tensor subclasses torch takes another formula; the numbers are the same, the strides of this are not"
#: (name, layout) -> why it fails with operands that lie so.
FAILS_LAID: dict[tuple[str, str], str] = {
    **{(name, layout): why for name, why in FAILS.items() if why is SPARSE for layout in database.LAYOUTS},
    **{("as_strided.partial_views", layout): MEMORY for layout in database.LAYOUTS if layout != "sliced"},
    **{("ormqr", layout): SUBCLASS for layout in ("permuted", "batch_of_one")},
    **{("prod", layout): SAFE for layout in ("permuted", "batch_of_one")},
    **{("masked.prod", layout): SAFE for layout in ("permuted", "channels_last")},
    **{
        (f"{name}.reduction_no_dim", layout): FORMULA
        for name in ("max", "min")
        for layout in ("permuted", "batch_of_one")
    },
    **{(name, layout): FORMULA for name in ("median", "nanmedian") for layout in ("permuted", "channels_last")},
    ("masked_select", "permuted"): FORMULA,
    ("linalg.householder_product", "permuted"): FORMULA,
    **{("as_strided", layout): MEMORY for layout in ("expanded", "batch_of_one")},
    ("as_strided_scatter", "expanded"): MEMORY,
}
if torch.__version__ >= (2, 15):
    FAILS_LAID["fmax", "permuted"] = FORMULA
#: Those whose first samples work.
LATER: dict[tuple[str, str], str] = {
    (name, "batch_of_one"): FORMULA for name in ("median", "nanmedian", "linalg.householder_product")
}
#: (name, layout) -> why there is nothing to compare.
NOTHING_LAID: dict[tuple[str, str], str] = {
    ("native_group_norm", "expanded"): UNDEFINED,
    **{(name, "expanded"): UNDEFINED for name in ("median", "nanmedian", "masked.median")},
    ("nn.functional.embedding_bag", "expanded"): UNDEFINED,
    ("_segment_reduce.offsets", "batch_of_one"): UNDEFINED,
    ("_segment_reduce.lengths", "batch_of_one"): UNDEFINED,
    **{("resize_", layout): UNDEFINED for layout in ("expanded", "batch_of_one")},
}


@pytest.fixture(autouse=True, scope="module")
def node() -> Iterator[None]:
    """A process: an in-process node shares this process's generator, which samples seed. One thread on either side."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with dt.init_master_worker(nodes=1, threads=1):
        torch.zeros(1 << 14).to(database.NODE).cpu()  # opens the connections that stay
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


def laid(every: int, fails: dict[tuple[str, str], str]) -> list[Any]:
    """Operators with a layout, those whose names' hashes are multiples of ``every``."""
    found = []
    for name in database.OPERATORS:
        if first(name) is None or crc32(name.encode()) % every:
            continue
        for layout in database.LAYOUTS:
            why = fails.get((name, layout))
            marks = [pytest.mark.xfail(reason=why)] if why else []
            if (name, layout) not in NOTHING_LAID:
                found.append(pytest.param(name, layout, marks=marks, id=f"{name}-{layout}"))
    return found


def is_close(name: str, dtype: torch.dtype) -> bool:
    exact = not (dtype.is_floating_point or dtype.is_complex)
    return (not exact and (name in CLOSE or name in database.VARIES)) or (name, dtype) in CLOSE


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
    if name not in database.VARIES:
        with pytest.raises(AssertionError):  # else it belongs on no list
            database.check(op, dtype)
    database.check(op, dtype, close=True)


@pytest.mark.parametrize(("name", "layout"), laid(4, FAILS_LAID))
def test_other_layouts(name: str, layout: str) -> None:
    check_laid(name, layout, 2)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "layout"), laid(1, FAILS_LAID | LATER))
def test_all_other_layouts(name: str, layout: str) -> None:
    check_laid(name, layout, 10)


def check_laid(name: str, layout: str, count: int) -> None:
    dtype = first(name)
    assert dtype is not None
    done = database.check(database.OPERATORS[name], dtype, count, is_close(name, dtype), layout)
    if not done and (name, layout) in FAILS_LAID:
        pytest.xfail("no sample can lie so")


def recorded(every: int) -> list[Any]:
    """Operators that work and whose names' hashes are multiples of ``every``."""
    names = [n for n in database.OPERATORS if first(n) is not None and FAILS.get(n) not in (SPARSE, MEMORY)]
    return [n for n in names if not crc32(n.encode()) % every]


@pytest.mark.parametrize("layout", ["permuted", "batch_of_one"])
@pytest.mark.parametrize("name", recorded(12))
def test_first_calls_in_graphs(name: str, layout: str) -> None:
    dtype = first(name)
    assert dtype is not None
    database.check_recorded(database.OPERATORS[name], dtype, 2, layout)


@pytest.mark.slow
@pytest.mark.parametrize("layout", list(database.LAYOUTS))
@pytest.mark.parametrize("name", recorded(1))
def test_all_first_calls_in_graphs(name: str, layout: str) -> None:
    test_first_calls_in_graphs(name, layout)


#: What they refuse depends on the data, in some of torch's tests of errors.
LATE = frozenset({"gather", "scatter", "scatter_add", "multinomial"})


def refusing(every: int) -> list[str]:
    """Operators with tests of errors, those whose names' hashes are multiples of ``every``."""
    return [n for n, op in database.OPERATORS.items() if op.error_inputs_func and not crc32(n.encode()) % every]


@pytest.mark.parametrize("name", refusing(2))
def test_mistakes_are_refused_at_their_line(name: str) -> None:
    database.check_mistakes(database.OPERATORS[name], name in LATE)


@pytest.mark.slow
@pytest.mark.parametrize("name", refusing(1))
def test_all_mistakes_are_refused_at_their_line(name: str) -> None:
    database.check_mistakes(database.OPERATORS[name], name in LATE)


BESIDE = "beyond its bounds local torch reads what lies beside its operands, or gives what memory holds"
#: name -> why its values are not compared at the bounds, and beyond them
UNBOUND: dict[str, str] = dict.fromkeys(
    (
        *("native_batch_norm", "_native_batch_norm_legit", "_batch_norm_with_update", "nn.functional.pad.circular"),
        *("nn.functional.multi_margin_loss", "nn.functional.multilabel_margin_loss", "resize_"),
        *("grid_sampler_2d", "grid_sampler_3d"),
    ),
    BESIDE,
)


def bounded(every: int, count: int) -> list[Any]:
    """Operators that work and whose names' hashes are multiples of ``every``, and so many samples."""
    names = [n for n in database.OPERATORS if first(n) is not None and FAILS.get(n) not in (SPARSE, MEMORY)]
    names.remove("as_strided")  # a view beyond what the script knows of the memory is told of when it is used
    return [pytest.param(n, count, id=n) for n in names if not crc32(n.encode()) % every]


@pytest.mark.parametrize(("name", "count"), bounded(8, 1))
def test_bounds(name: str, count: int) -> None:
    dtype = first(name)
    assert dtype is not None
    database.check_boundaries(database.OPERATORS[name], dtype, count, is_close(name, dtype), name not in UNBOUND)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "count"), bounded(1, 4))
def test_all_bounds(name: str, count: int) -> None:
    test_bounds(name, count)


def into_given(every: int, count: int) -> list[Any]:
    """Operators with an ``out=``, those whose names' hashes are multiples of ``every``, and so many samples."""
    names = [name for name, op in database.OPERATORS.items() if op.supports_out and first(name) is not None]
    return [pytest.param(name, count, id=name) for name in names if not crc32(name.encode()) % every]


@pytest.mark.parametrize(("name", "count"), into_given(6, 1))
def test_results_are_written_into_what_is_given(name: str, count: int) -> None:
    dtype = first(name)
    assert dtype is not None
    database.check_given(database.OPERATORS[name], dtype, count)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "count"), into_given(1, 3))
def test_all_results_are_written_into_what_is_given(name: str, count: int) -> None:
    test_results_are_written_into_what_is_given(name, count)


def test_the_lists_name_operators() -> None:
    for name, layout in (*FAILS_LAID, *LATER, *NOTHING_LAID):
        assert OLDER or name in database.OPERATORS
        assert layout in database.LAYOUTS
    for key in (*FAILS, *CLOSE, *database.VARIES):
        name = key if isinstance(key, str) else key[0]
        assert OLDER or name in database.OPERATORS
    share = 1 - len({k if isinstance(k, str) else k[0] for k in FAILS}) / len(database.OPERATORS)
    assert share >= 0.98
