"""A function over many items: the iterator gives what the function returns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import assert_type

import disttensor as dt


def square(k: int) -> int:
    return k * k


def named(k: int, name: str) -> str:
    return name * k


def items() -> Iterator[int]:
    yield from range(3)


def main() -> None:
    assert_type(list(dt.map(square, [1, 2, 3])), list[int])
    assert_type(list(dt.map(square, items(), nodes=[0, 1], per_node=2, ordered=False)), list[int])
    assert_type(list(dt.map(named, [1, 2], ["a", "b"], retries=1)), list[str])
    assert_type(list(dt.map(lambda k: k > 1, range(3))), list[bool])
    assert_type(sum(dt.map(square, range(4))), int)
