"""A long graph is run in pieces: the same values, errors and lifetimes as in one, and no piece is long."""

from __future__ import annotations

import weakref
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from program_kit import SENTINELS, STEPS, copies, interpret, play, record, start

import disttensor as dt
from disttensor.runtime.node.graphs import interpreter
from disttensor.runtime.node.graphs.interpreter import PIECE, Interpreter
from disttensor.runtime.node.graphs.program import Line, Program, Reg

aten = torch.ops.aten


def chain(length: int) -> Program:
    """x + 1, one line after the other; the last value is kept, and the one in the middle."""
    lines = tuple(Line(aten.add.Tensor, (Reg(i), 1), {}, (i + 1,), True) for i in range(length))
    return Program(lines, (0,), (length // 2, length), 0)


@pytest.mark.parametrize("most", [1, 2, 5])
@settings(max_examples=10, deadline=None, database=None, derandomize=True)
@given(steps=st.lists(STEPS, min_size=2, max_size=12))
def test_the_same_values_whatever_the_pieces(most: int, steps: list[tuple[int, int, int]]) -> None:
    torch.manual_seed(0)
    program, inputs = record(partial(play, steps, start()), len(SENTINELS))
    ours, theirs = copies(inputs), copies(inputs)
    engine = Interpreter(program, most)
    for numbers in ((0.1, 0.2, 0.3), (0.4, 0.5, 0.6)):
        torch.manual_seed(3)
        expected = interpret(program, theirs, numbers)
        torch.manual_seed(3)
        for mine, other in zip([*engine.run(ours, numbers), *ours], [*expected, *theirs], strict=True):
            torch.testing.assert_close(mine, other, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("most", [1, 3, 4, 100])
def test_the_line_that_fails_is_known_and_what_was_alive(most: int) -> None:
    base = chain(10)
    for at in range(10):
        bad = Line(aten.mm.default, (Reg(at), Reg(at)), {}, (at + 1,), True)
        program = Program((*base.lines[:at], bad, *base.lines[at + 1 :]), base.inputs, base.outputs, 0)
        engine = Interpreter(program, most)
        with pytest.raises(RuntimeError) as raised:
            engine.run([torch.zeros(3)], ())
        line, alive = engine.halted(raised.value) or (-1, {})
        assert line == at
        assert {r: t.tolist() for r, t in alive.items()} == {r: [float(r)] * 3 for r in {at, *({5} if at > 5 else ())}}
    assert engine.halted(RuntimeError("of something else")) is None


def test_what_a_piece_is_given_dies_where_it_is_used_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """At each line of a chain no more lives than its operand, its result, and the input, which is the caller's."""
    born: list[weakref.ref[torch.Tensor]] = []
    most_alive = 0

    def add(x: torch.Tensor, one: int) -> torch.Tensor:
        nonlocal most_alive
        most_alive = max(most_alive, sum(each() is not None for each in born))
        made = x + one
        born.append(weakref.ref(made))
        return made

    monkeypatch.setattr(Line, "function", property(lambda line: add))
    program = Program(chain(20).lines, (0,), (20,), 0)
    assert Interpreter(program, 3).run([torch.zeros(1)], ())[0].tolist() == [20.0]
    assert most_alive == 1


def test_no_piece_is_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """While one is compiled, no other thread of the node runs."""
    lengths: list[int] = []
    made = interpreter.function

    def function(name: str, text: str, names: dict[str, object]) -> object:
        lengths.append(text.count("\n"))
        return made(name, text, names)

    monkeypatch.setattr(interpreter, "function", function)
    length = 6007
    middle, last = Interpreter(chain(length)).run([torch.zeros(1)], ())
    assert (middle.item(), last.item()) == (length // 2, length)
    assert len(lengths) == 4
    assert max(lengths) < 2010


def test_a_long_graph_of_a_session() -> None:
    """Recorded and replayed on a node, with an error in a later piece that is told with its line, as ever."""
    with dt.init_master_worker(nodes=1, launcher="inproc"):
        x, index = torch.zeros(2, device="node:0"), torch.tensor([0], device="node:0")
        graph = dt.Graph()
        with dt.graph(graph):
            y = x
            for _ in range(PIECE + 100):
                y = y + 1
            z = torch.nn.functional.embedding(index, y[None])  # its index is out of range later
            for _ in range(PIECE):
                z = z + 1
        graph.replay()
        assert z.tolist() == [[2.0 * PIECE + 100] * 2]
        x.add_(1)
        graph.replay()
        assert z.tolist() == [[2.0 * PIECE + 101] * 2]
        index.add_(7)
        graph.replay()
        assert y.tolist() == [PIECE + 101.0] * 2
        with pytest.raises(IndexError) as raised:
            z.cpu()
        assert any("recorded: " in note and "test_pieces.py" in note for note in raised.value.__notes__)
