"""A collective over a mesh gives a new tensor, and a line that throws it away is warned of."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch

import disttensor as dt
from disttensor.collectives import all_gather, all_reduce_, all_to_all, broadcast, permute_ranks, reduce_scatter

pytestmark = pytest.mark.usefixtures("nodes", "settled")


@pytest.fixture
def x() -> Any:
    return torch.ones(3, 3).to(dt.mesh(dp=3).device)


@pytest.fixture
def heard() -> Iterator[list[warnings.WarningMessage]]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        yield found


def line(test: Callable[..., object], text: str) -> int:
    lines, start = inspect.getsourcelines(test)
    return start + next(i for i, each in enumerate(lines) if text in each)


def statement(x: Any) -> None:
    dt.all_reduce(x, "avg", over="dp")


def with_gradient(x: Any) -> None:
    dt.all_reduce((x * 2).requires_grad_(), over="dp")


def in_a_loop(x: Any) -> None:
    for each in x.unbind():
        dt.all_reduce(each, over="dp")


def comprehension(x: Any) -> None:
    [dt.all_reduce(each, over="dp") for each in x.unbind()]


def gathered(x: Any) -> None:
    all_gather(x, "dp")


def scattered(x: Any) -> None:
    reduce_scatter(x, over="dp")


def exchanged(x: Any) -> None:
    all_to_all(x, over="dp")


def permuted(x: Any) -> None:
    permute_ranks(x, "dp")


def sent(x: Any) -> None:
    broadcast(x, over="dp")


def work_dropped(x: Any) -> None:
    dt.all_reduce(x, over="dp", async_op=True)


def work_waited_for(x: Any) -> None:
    work = dt.all_reduce(x, over="dp", async_op=True)
    x.mul(2)
    work.wait()


@pytest.mark.parametrize(
    ("program", "text", "count"),
    [
        (statement, "dt.all_reduce", 1),
        (with_gradient, "dt.all_reduce", 1),
        (in_a_loop, "dt.all_reduce", 3),
        (comprehension, "dt.all_reduce", 1),
        (gathered, "all_gather(", 1),
        (scattered, "reduce_scatter(", 1),
        (exchanged, "all_to_all(", 1),
        (permuted, "permute_ranks(", 1),
        (sent, "broadcast(", 1),
        (work_dropped, "dt.all_reduce", 1),
        (work_waited_for, "dt.all_reduce", 1),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_line_that_throws_the_result_away(
    x: Any, heard: list[warnings.WarningMessage], program: Any, text: str, count: int
) -> None:
    program(x)
    dt.synchronize()
    assert len(heard) == count
    for each in heard:
        assert (each.filename, each.lineno) == (__file__, line(program, text))
        assert each.category is UserWarning
        assert "is a new tensor, which this line throws away" in str(each.message)


def named(x: Any) -> None:
    _ = dt.all_reduce(x, over="dp")


def returned(x: Any) -> Any:
    return dt.all_reduce(x, over="dp")


def returned_and_dropped(x: Any) -> None:
    returned(x)  # a model that is warmed up


def looked_at(x: Any) -> None:
    assert dt.all_gather(x, over="dp").shape == (9, 3)


def used_at_once(x: Any) -> None:
    dt.all_reduce(x, over="dp").mul_(2)


def passed_on(x: Any) -> None:
    found: list[Any] = []
    found.extend(map(partial(dt.all_reduce, over="dp"), x.unbind()))
    assert torch.stack(found).at(dp=0).cpu().sum() == 27  # type: ignore[attr-defined]


def listed(x: Any) -> None:
    sums = [dt.all_reduce(each, over="dp") for each in x.unbind()]
    assert torch.stack(sums).at(dp=0).cpu().sum() == 27  # type: ignore[attr-defined]


def written(x: Any) -> None:
    all_reduce_(x, over="dp")
    all_reduce_(x, over="dp", async_op=True).wait()  # type: ignore[union-attr]


def in_a_hook(x: Any) -> None:
    x.requires_grad_().register_hook(partial(dt.all_reduce, over="dp"))
    (x * 2).sum().backward()
    assert x.grad is not None


def work_used(x: Any) -> None:
    work = dt.all_reduce(x, over="dp", async_op=True)
    work.wait()
    assert work.result().shape == (3, 3)


def work_refused(x: Any) -> None:
    work = dt.all_reduce(x, over="dp", async_op=True)
    x.mul(2)
    del work  # nobody has waited: an error may have come between


def graph(x: Any) -> None:
    g = dt.Graph()
    with dt.graph(g):
        dt.all_reduce(x, over="dp")
    g.replay()


@pytest.mark.parametrize(
    "program",
    [
        named,
        returned,
        returned_and_dropped,
        looked_at,
        used_at_once,
        passed_on,
        listed,
        written,
        in_a_hook,
        work_used,
        work_refused,
        graph,
    ],
    ids=lambda program: program.__name__,
)
def test_what_is_not_accused(x: Any, heard: list[warnings.WarningMessage], program: Any) -> None:
    program(x)
    dt.synchronize()
    assert not heard


def test_it_is_given_once_for_each_line(x: Any) -> None:
    globals().pop("__warningregistry__", None)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("default")
        for _ in range(3):
            statement(x)
            dt.synchronize()
    assert [each.lineno for each in found] == [line(statement, "dt.all_reduce")]
    globals().pop("__warningregistry__", None)


def test_an_error_is_raised_at_the_next_collective_or_wait(x: Any) -> None:
    y = x.sum()
    for wait in (
        lambda: dt.all_reduce(x, over="dp"),
        lambda: dt.all_reduce([torch.ones(1, device=f"node:{k}") for k in range(3)]),
        lambda: y.item(),
        lambda: x.at(dp=0).cpu(),
        lambda: dt.fetch(x.at(dp=1)).result(),
        dt.synchronize,
    ):
        statement(x)
        with pytest.raises(UserWarning, match="which this line throws away"):
            wait()
        wait()
    assert x.at(dp=2).cpu().eq(1).all()


def test_the_thread_whose_line_it_is_hears_of_it(x: Any, heard: list[warnings.WarningMessage]) -> None:
    with ThreadPoolExecutor(1) as other:
        other.submit(statement, x).result()
        dt.synchronize()
        assert not heard
        other.submit(dt.synchronize).result()
    assert len(heard) == 1


def test_the_end_gives_what_is_left(script: Any) -> None:
    program = """
import warnings
import torch, disttensor as dt
dt.init_master_worker(nodes=2, launcher="inproc")
x = torch.ones(2).to(dt.mesh(dp=2).device)
if {strict}:
    warnings.simplefilter("error")
dt.all_reduce(x, over="dp")
"""
    plain = script(program.format(strict=False))
    assert plain.returncode == 0
    assert "program.py:8: UserWarning: the result of all_reduce(x, over='dp')" in plain.stderr
    strict = script(program.format(strict=True))
    assert strict.returncode == 1
    assert "a warning that came at the script's end is an error" in strict.stderr
    assert "UserWarning: the result of all_reduce(x, over='dp')" in strict.stderr
