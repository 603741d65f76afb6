"""Replays that go past the refs of their recording, as those of graphs without transfers or outputs do, have the values
that others have."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from thread_nodes import thread_nodes

import disttensor as dt


def test_a_call_that_fails_leaves_the_others() -> None:
    """What comes after it is done by refs. The results are in another order than they are made in, and the graph holds
    a tensor of its own."""
    with thread_nodes(1):
        held = torch.ones(2, device="node:0")

        @dt.graphed
        def step(x: torch.Tensor, i: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
            picked = torch.index_select(x, 0, i)
            y.add_(held)
            twice = y * 2
            return [twice + held, twice, picked * 3]

        x = torch.arange(3.0, device="node:0")
        for k in (0, 1, 2, 7, 1):
            y = torch.full((2,), float(k), device="node:0")
            more, twice, picked = step(x, torch.tensor([k], device="node:0"), y)
            assert (y.tolist(), twice.tolist(), more.tolist()) == ([k + 1] * 2, [2 * k + 2] * 2, [2 * k + 3] * 2)
            if k == 7:
                with pytest.raises(IndexError):
                    picked.tolist()
            else:
                assert picked.tolist() == [3 * k]


class Opaque:
    """An engine that fails, and can't tell where."""

    static = False

    def run(self, inputs: Any, numbers: Any) -> Any:
        raise ArithmeticError("it fails")

    def halted(self, error: Exception) -> None:
        return None


def test_a_program_that_fails_anywhere_poisons_what_it_makes_and_writes() -> None:
    with thread_nodes(1) as (worker,):
        x, y = (torch.ones(2, device="node:0") for _ in range(2))

        @dt.graphed
        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return x.add_(y) * 2

        for _ in range(3):
            step(x, y)
        dt.synchronize()
        (graph,) = worker.executor.graphs._graphs.values()
        (segment,) = graph.steps
        segment.engine = Opaque()  # type: ignore[union-attr,assignment]
        made = step(x, y)
        for spoiled in (made, x):
            with pytest.raises(ArithmeticError):
                spoiled.tolist()
        assert y.tolist() == [1, 1]


class Leaving:
    """A send under way, which notes what it sends."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.sent: list[float] | None = None

    def is_completed(self) -> bool:
        return self.sent is not None

    def wait(self) -> None:
        self.sent = self.tensor.tolist()


def test_what_is_being_sent_has_left_before_it_is_written() -> None:
    with thread_nodes(1) as (worker,):
        x = torch.ones(2, device="node:0")

        @dt.graphed
        def step(x: torch.Tensor) -> torch.Tensor:
            return x.add_(1) * 2

        for _ in range(3):
            step(x)
        dt.synchronize()
        store = worker.executor.store
        tensor = cast(torch.Tensor, store.entries[x._h.ref])  # type: ignore[attr-defined]
        leaving: Any = Leaving(tensor)
        store.sending.append((tensor, leaving))
        assert step(x).tolist() == [10, 10]
        assert leaving.sent == [4, 4]
