"""Random graphs through the compiled engine, but for generated code: eager's numbers, within float tolerance.

The compiled form is the traced program run by eager (program_kit.Here); test_engine_build.py has the real one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from program_kit import built, steps_of, trace_on_nodes
from test_random_graphs import STEPS, Program, ordinary, play, start

import disttensor as dt

pytestmark = pytest.mark.usefixtures("processes", "traced")


@pytest.fixture(scope="module")
def traced(processes: None) -> None:
    for node in range(2):
        dt.run(trace_on_nodes, node=node)


def seen(tensors: list[torch.Tensor]) -> list[Any]:
    def one(x: torch.Tensor) -> Any:
        try:
            return x.detach().cpu()
        except Exception as e:
            return type(e)

    return [one(x) for x in tensors]


def outcomes(program: Program, replay: bool) -> Iterator[list[Any]]:
    bases = start()
    g = dt.Graph()
    outputs: list[torch.Tensor] = []
    if replay:
        with dt.graph(g, engine="inductor"):
            outputs = play(program, bases, g.number("number", 0.5))
    torch.manual_seed(7)
    for number in (0.5, 0.3, -2.0):
        if replay:
            g.replay(number=number)
        else:
            outputs = play(program, bases, number)
        yield seen([*outputs, *bases])
        with contextlib.suppress(Exception):
            dt.synchronize()


def check(program: Program) -> None:
    for ours, theirs in zip(list(outcomes(program, True)), list(outcomes(program, False)), strict=True):
        for one, other in zip(ours, theirs, strict=True):
            if not isinstance(other, torch.Tensor):
                assert one == other
                continue
            assert steps_of(one) == steps_of(other)
            torch.testing.assert_close(one, other, equal_nan=True, rtol=1e-4, atol=1e-4)


@ordinary
@given(st.lists(STEPS, max_size=25))
def test_random_graphs(program: Program) -> None:
    check(program)


def test_most_of_them_were_compiled() -> None:
    check([("mul_", 0, 0, 1), ("number", 0, 0, 0), ("dropout", 1, 0, 0), ("there", 4, 0, 0), ("t_", 2, 0, 0)])
    whys = [why for node in range(2) for why in dt.run(built, node=node)]
    assert whys.count("") > len(whys) / 2, set(whys)
