"""PyTorch's own database of operators on a mesh of three nodes whose ranks have different values: each rank has what
there is here for its values.

`make slow` runs all samples of all operators in all our dtypes; `make test` the first ones of every fourth operator by
a hash of its name.
"""

from __future__ import annotations

from collections.abc import Iterator
from zlib import crc32

import operator_database as database
import pytest
import torch
from test_operator_database import cases, first, is_close

import disttensor as dt

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def mesh() -> Iterator[dt.meshes.Mesh]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with dt.init_master_worker(nodes=3, threads=1):
        made = dt.mesh(dp=3)
        torch.zeros(1 << 14).to(made.device).cpu()
        yield made
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def nothing_left_over(mesh: dt.meshes.Mesh) -> Iterator[None]:
    """A failure that nobody asked about belongs to the test that caused it."""
    yield
    dt.synchronize()


def spread() -> list[str]:
    """Every fourth operator of those that work on one node."""
    works = {case.values[0] for case in cases() if not case.marks and case.values[1] is first(case.values[0])}
    return [name for name in database.OPERATORS if name in works and crc32(name.encode()) % 4 == 0]


@pytest.mark.parametrize("name", spread())
def test_first_samples(name: str, mesh: dt.meshes.Mesh) -> None:
    op, dtype = database.OPERATORS[name], first(name)
    assert dtype is not None
    assert database.check_on_mesh(mesh, op, dtype, 2, is_close(name, dtype))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype"), cases())
def test_all_samples(name: str, dtype: torch.dtype, mesh: dt.meshes.Mesh) -> None:
    op = database.OPERATORS[name]
    assert database.check_on_mesh(mesh, op, dtype, None, is_close(name, dtype))
