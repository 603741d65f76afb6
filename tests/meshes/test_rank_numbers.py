"""Numbers that each rank of a mesh has its own of, behind ``torch.SymInt``: computed with, never rank 0's silently."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import disttensor as dt
from disttensor.errors import DisttensorError, RanksDiffer


@pytest.fixture(scope="module", autouse=True)
def session() -> Iterator[None]:
    with dt.init_master_worker(nodes=4, launcher="inproc"):
        yield


@pytest.fixture
def s() -> Iterator[Any]:
    """The coordinate along dp, as torch's DeviceMesh gives it: 0, 0, 1, 1."""
    m = dt.mesh(dp=2, tp=2)
    yield m.torch.get_local_rank("dp")
    torch.distributed.destroy_process_group()


def numbers_of(s: Any) -> tuple[Any, ...]:
    """Each rank's."""
    return tuple(s.node.values)


#: What gives numbers of ranks again: of each rank what its own int gives.
COMPUTED: list[Callable[[Any], Any]] = [
    lambda s: s + 3, lambda s: 3 + s, lambda s: s - 1, lambda s: 5 - s, lambda s: s * 4, lambda s: 4 * s + s,
    lambda s: (s + 5) // 2, lambda s: 7 // (s + 1), lambda s: (s + 4) % 5, lambda s: 5 % (s + 1), lambda s: -s,
    lambda s: abs(s - 1), lambda s: s / 2, lambda s: s**2, lambda s: 2**s, lambda s: s == 0, lambda s: s != 0,
    lambda s: s < 1, lambda s: s <= 0, lambda s: s > 0, lambda s: s >= 1, lambda s: s << 2, lambda s: s ^ 1,
    lambda s: s * 1.5, lambda s: math.ceil(s), lambda s: round(s), lambda s: sum([s, s, 1]),
    lambda s: (s == 0) & (s < 5), lambda s: (s == 0) | (s > 5),
    lambda s: torch.sym_max(s, 0), lambda s: torch.sym_min(s, 1), lambda s: torch.sym_not(s == 0),
    lambda s: torch.sym_sum([s, s, 1]), lambda s: torch.sym_ite(s == 0, 5, 7 * s), lambda s: copy.deepcopy(s),
]  # fmt: skip


@pytest.mark.parametrize("compute", COMPUTED, ids=map(str, range(len(COMPUTED))))
def test_arithmetic_is_each_ranks(s: Any, compute: Callable[[Any], Any]) -> None:
    of_ints = [compute(int(r)) for r in (0, 0, 1, 1)]
    assert numbers_of(compute(s)) == tuple(of_ints)
    assert [type(n) for n in numbers_of(compute(s))] == [type(n) for n in of_ints]


@pytest.mark.parametrize(
    ("compute", "wanted"),
    [
        (lambda s: s // 4, 0), (lambda s: s - s, 0), (lambda s: s * 0 + 7, 7), (lambda s: s < 2, True),
        (lambda s: s != s, False),
        (lambda s: torch.sym_ite(s == 0, 7, 7), 7), (lambda s: torch.sym_max(s, 1), 1),
        (lambda s: s | 1, 1), (lambda s: s % 1, 0),
    ],
)  # fmt: skip
def test_where_all_agree_it_is_a_plain_number(s: Any, compute: Callable[[Any], Any], wanted: Any) -> None:
    assert type(compute(s)) is type(wanted)
    assert compute(s) == wanted


#: What needs one number. Each would be rank 0's, or nonsense, if the number were an int or LocalIntNode's.
ASKED: dict[str, Callable[[Any], Any]] = {
    "bool": bool, "not": lambda s: not s, "if": lambda s: 1 if s == 0 else 2, "and": lambda s: s == 0 and 1,
    "int": int, "float": float, "in a tuple": lambda s: s in (0,), "a list's item": lambda s: [1, 2][s],
    "range": range, "sorted": lambda s: sorted([s, 0]), "max": lambda s: max(0, s), "a string's %": lambda s: "%d" % s,  # noqa: UP031
    "times a list": lambda s: [1] * s, "bit_length": lambda s: s.bit_length(), "tensor": torch.tensor,
    "full": lambda s: torch.full((2,), s), "arange": lambda s: torch.arange(s, 5), "randperm": torch.randperm,
    "seed": torch.manual_seed, "local narrow": lambda s: torch.ones(8).narrow(0, s, 2),
    "local slice": lambda s: torch.ones(8)[s:], "local sum": lambda s: torch.ones(8) + s,
    "local product": lambda s: s * torch.ones(8), "local comparison": lambda s: torch.ones(8) == s,
    "fill_": lambda s: torch.ones(8).fill_(s), "an item's value": lambda s: torch.ones(8).__setitem__(0, s),
    "chunk": lambda s: torch.ones(8).chunk(s + 1), "there sum": lambda s: there() + s,
    "there full": lambda s: there().new_full((2,), s),
}  # fmt: skip


def there() -> torch.Tensor:
    return torch.ones(8, device=dt.mesh(dp=2, tp=2).device)


@pytest.mark.parametrize("ask", ASKED.values(), ids=ASKED)
def test_what_needs_one_number_is_told_what_to_write(s: Any, ask: Callable[[Any], Any]) -> None:
    with pytest.raises(RanksDiffer, match=r"another one on each rank of the mesh .*mesh.coordinate\('dp'\)"):
        ask(s)


def test_where_torch_has_an_error_of_its_own(s: Any) -> None:
    for ask in (hash, lambda s: {s: 1}, lambda s: s in {0}, lambda s: torch.ones(8)[s], lambda s: torch.zeros(s)):
        with pytest.raises((TypeError, IndexError, RuntimeError)):
            ask(s)
    with pytest.raises(TypeError, match="can't be pickled"):
        pickle.dumps(s)


def test_it_prints(s: Any) -> None:
    assert f"{s}" == "<0 at dp=0, tp=0; 1 at dp=1, tp=0>"
    assert str(torch.distributed.get_rank()) == "<0 at dp=0, tp=0; 1 at dp=0, tp=1; 2 at dp=1, tp=0; ...>"


def test_of_one_value_it_is_an_int() -> None:
    found = dt.mesh(dp=4, one=1).torch.get_local_rank("one")
    torch.distributed.destroy_process_group()
    assert (type(found), found) == (int, 0)


def test_of_two_meshes_it_is_refused(s: Any) -> None:
    torch.distributed.destroy_process_group()
    other = dt.mesh(a=4).torch.get_local_rank("a")
    with pytest.raises(DisttensorError, match="ranks of two meshes"):
        s + other
