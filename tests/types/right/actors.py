"""Actors: a handle knows its class, and ``handle[Class.method]`` what the method takes and returns."""

from __future__ import annotations

from typing import Any, assert_type

import torch

import disttensor as dt
from disttensor.tasks import Actor


class Counter:
    def __init__(self, start: int, *, step: int = 1) -> None:
        self.count, self.step = start, step

    def add(self, times: int = 1) -> int:
        self.count += self.step * times
        return self.count

    def tell(self, to: str) -> str:
        return f"{to}: {self.count}"


class Net:
    def __init__(self, width: int) -> None:
        self.weight = torch.ones(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x


def use(counter: Actor[Counter]) -> int:
    return counter[Counter.add](2).result()


def main() -> None:
    counter = dt.actor(Counter, 10, step=2)
    assert_type(counter, Actor[Counter])
    assert_type(counter.ready.result(), None)
    assert_type(counter[Counter.add]().result(), int)
    assert_type(counter[Counter.add](times=3).result(), int)
    assert_type(counter[Counter.tell]("you").result(), str)
    assert_type(use(counter), int)
    untyped: Any = counter.add(1).result()  # by its name a method is not known to a checker, and may be called
    assert untyped > 0
    assert_type(counter.node, int)
    assert_type(counter.close().wait(), bool)
    with dt.actor(Net, 3, node=1) as net:
        assert_type(net[Net.forward](torch.ones(3)).result(), torch.Tensor)
    for other in (dt.actor(Counter, 1, step=3, node=0), dt.actor(Counter, start=1, node="node:1")):
        assert_type(other, Actor[Counter])
        other.close()
