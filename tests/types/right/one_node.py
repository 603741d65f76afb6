"""Functions on one node: the result is what the function returns, and the arguments are its own."""

from __future__ import annotations

import os
from functools import partial
from typing import assert_type

import torch

import disttensor as dt


def f(a: int, b: str = "x", *, k: float = 1.0) -> float:
    return a + len(b) + k


def center(t: torch.Tensor) -> tuple[torch.Tensor, int]:
    return t - t.mean(), t.shape[0]


class Scale:
    def __init__(self, by: int) -> None:
        self.by = by

    def times(self, x: int) -> int:
        return self.by * x


def main() -> None:
    assert_type(dt.run(f, 1), float)
    assert_type(dt.run(f, 1, k=2.0), float)
    assert_type(dt.run(f, 1, "y", k=2.0), float)
    assert_type(dt.run(f, 1, node=1), float)
    assert_type(dt.run(f, 1, "y", node="node:1"), float)
    assert_type(dt.run(f, 1, "y", k=2.0, node=dt.device(1)), float)
    assert_type(dt.run(f, a=1, node=None), float)
    assert_type(dt.run(f, 1, returns=()), float)
    assert_type(dt.run(center, torch.arange(4.0), node=1), tuple[torch.Tensor, int])
    assert_type(dt.run(Scale(3).times, 2, node=1), int)
    assert_type(dt.run(partial(f, b="z"), 1, node=1), float)
    assert_type(dt.run(lambda: [1, 2], node=1), list[int])
    assert_type(dt.run(os.getpid, node=0), int)
    assert_type(dt.run(str.upper, "abc", node=0), str)
    with dt.node(1):
        assert_type(dt.run(f, 1, k=2.0), float)
