"""Functions on several nodes: the result is a list, and ``Each`` gives each node a value of its own."""

from __future__ import annotations

from typing import assert_type

import disttensor as dt
from disttensor.tasks import Each


def f(a: int, b: str = "x") -> float:
    return float(a + len(b))


def square(k: int) -> int:
    return k * k


def main() -> None:
    assert_type(dt.run(f, 1, node=[0, 1]), list[float])
    assert_type(dt.run(f, Each([1, 2]), "s", node=range(2)), list[float])
    assert_type(dt.run(f, 1, Each(["a", "b"]), node=dt.mesh(dp=2)), list[float])
    assert_type(dt.run(square, Each([2, 3]), node=dt.collectives.new_group([0, 1])), list[int])
    assert_type(dt.run(f, a=1, node=[0, 1]), list[float])
    squares = dt.submit(square, Each([2, 3]), node=[0, 1])
    assert_type(squares, dt.tasks.Submitted[list[int]])
    assert_type(squares.result(), list[int])
