"""``dt.seeing.whence``: the command and the line that a tensor comes from, without a wait for the tensor."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from limits import HANG

import disttensor as dt
from disttensor.seeing import Origin, OriginCommand

HERE = os.path.basename(__file__)


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    with dt.init_master_worker(nodes=2, threads=1, launcher="inproc"):
        yield


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """What a test has failed on purpose is nobody's at the session's end."""
    yield
    with contextlib.suppress(IndexError):
        dt.synchronize()


def here(after: int = 0) -> str:
    """The line that calls this, or one after it."""
    return f"{HERE}:{sys._getframe(1).f_lineno + after}"


def whence(x: Any) -> Origin:
    """The origin of a tensor that its nodes will have computed."""
    return dt.seeing.whence(x, timeout=HANG)


def told(command: OriginCommand | None) -> tuple[str, str] | None:
    return None if command is None else (command.operator, command.line)


def test_what_has_made_and_written_a_tensor() -> None:
    x = torch.ones(2, 3, device="node:1")
    y, made = x * 2, here()
    it = whence(y)
    assert (it.shape, it.dtype, it.place, it.nodes, it.bytes) == ((2, 3), "float32", "node 1", (1,), 24)
    assert (told(it.made), it.written, it.is_view, it.ready, it.failure) == (
        ("aten::mul.Tensor", made), None, False, True, "",
    )  # fmt: skip
    assert it.made is not None
    assert it.made.code == "x * 2"
    y.add_(1)
    written = here(-1)
    it = whence(y)
    assert (told(it.made), told(it.written)) == (("aten::mul.Tensor", made), ("aten::add_.Tensor", written))
    assert repr(it) == (
        f"float32 (2, 3) on node 1: made by aten::mul.Tensor at {made}, last written by aten::add_.Tensor at {written}"
        "; 24 bytes; ready"
    )
    assert json.loads(json.dumps(it.to_dict()))["written"]["line"] == written


def test_a_view_and_a_write_through_it() -> None:
    x = torch.zeros(2, 3, device="node:0")
    y, made = x + 1, here()
    view = y[0]
    it = whence(view)
    assert (it.is_view, it.made, told(it.memory)) == (
        True, OriginCommand("aten::select.int", "", "", 0), ("aten::add.Tensor", made),
    )  # fmt: skip
    assert f"a view by aten::select.int, not used yet of what aten::add.Tensor at {made} has made" in repr(it)
    view.t().mul_(3)
    written = here(-1)
    assert told(whence(view).made) == ("aten::select.int", written)
    for tensor in (y, view, y.t()):  # all lie in one memory
        assert told(whence(tensor).written) == ("aten::mul_.Tensor", written)


def test_an_optimizer_that_writes_parameters_by_lists() -> None:
    model = torch.nn.Linear(3, 2).to("node:1")
    made = here(-1)
    optimizer = torch.optim.Adam(model.parameters(), foreach=True)
    model(torch.ones(1, 3, device="node:1")).sum().backward()
    backward = here(-1)
    optimizer.step()
    stepped = here(-1)
    it = whence(model.weight)
    assert told(it.made) == ("an upload", made)
    assert it.written is not None
    assert it.written.operator.startswith("aten::_foreach_addcdiv_")
    assert (it.written.line, it.ready) == (stepped, True)
    gradient = whence(model.weight.grad).made
    assert gradient is not None
    assert (gradient.line, gradient.operator) == (backward, "aten::mm")


def test_what_comes_from_the_script_another_node_a_function_or_a_collective() -> None:
    x, sent = torch.ones(3).to("node:0"), here()
    assert told(whence(x).made) == ("an upload", sent)
    y, made = x * 2, here()
    z, copied = y.to("node:1"), here()
    it = whence(z).made
    assert told(it) == ("a copy from node 0", copied)
    assert it is not None
    assert told(it.source) == ("aten::mul.Tensor", made)
    assert not whence(z).ready  # what no command has used may be on its way
    z + 1
    assert whence(z).ready
    result, ran = dt.run(plus, y, node=0), here()
    assert told(whence(result).made) == ("plus()", ran)
    it = whence(y).written
    assert it == OriginCommand("plus()", ran, "dt.run(plus, y, node=0)", 0, it.number if it else 0, sure=False)
    assert "perhaps written by plus()" in repr(whence(y))
    xs = [torch.ones(3, device=f"node:{k}") for k in range(2)]
    dt.all_reduce(xs)
    assert told(whence(xs[1]).written) == ("all_reduce", here(-1))


def plus(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def test_a_mesh_whose_ranks_come_from_the_same_and_from_other_lines() -> None:
    mesh = dt.mesh(dp=2)
    x = torch.ones(3, device=mesh.device)
    y, made = x * 2, here()
    it = whence(y)
    assert (it.place, it.nodes, it.bytes, it.ready, it.ranks) == ("dp=2, nodes 0 and 1", (0, 1), 24, True, ())
    assert told(it.made) == ("aten::mul.Tensor", made)
    y.at(dp=1).add_(1)  # type: ignore[attr-defined]
    written = here(-1)
    it = whence(y)
    assert [(each.place, told(each.written)) for each in it.ranks] == [
        ("dp=0", None), ("dp=1", ("aten::add_.Tensor", written)),
    ]  # fmt: skip
    assert told(whence(y.at(dp=1)).written) == ("aten::add_.Tensor", written)  # type: ignore[attr-defined]


def test_a_graph() -> None:
    w = torch.ones(3, device="node:0")
    (w * 3).sum()
    graph = dt.Graph()
    with dt.graph(graph):
        y, made = w * 3, here()
        total, summed = y.sum(), here()
        w.mul_(2)
        written = here(-1)
        assert (told(whence(y).made), whence(y).ready) == (("aten::mul.Tensor", made), False)
    assert not whence(total).ready
    assert "a graph makes it, of which no replay" in whence(total).unknown[0]
    graph.replay()
    replayed = here(-1)
    it = whence(total)
    assert it.made is not None
    assert (told(it.made), it.made.replayed, it.ready) == (("aten::sum", summed), replayed, True)
    it = whence(w)
    assert it.written is not None
    assert (told(it.written), it.written.replayed) == (("aten::mul_.Tensor", written), replayed)


def test_poison_names_what_has_failed() -> None:
    x, index = torch.ones(3, device="node:0"), torch.tensor([7]).to("node:0")
    bad, failed = x.index_select(0, index), here()
    after = bad * 2
    there = after.to("node:1") + 1
    changed = torch.zeros(1, device="node:1")
    changed.add_(there)
    well = x * 2
    for tensor in (bad, after, there, changed, changed[0]):
        it = whence(tensor)
        assert not it.ready
        assert it.failure.startswith("IndexError: index out of range")
        assert it.failure.endswith(f"in aten::index_select on node 0, issued at {failed}")
    assert told(whence(after).made) == ("aten::mul.Tensor", here(-10))
    assert (whence(well).ready, whence(well).failure) == (True, "")


def test_it_does_not_wait_for_the_tensor() -> None:
    gate = dt.tasks.Channel(name="gate")
    x = torch.ones(3, device="node:1")
    dt.synchronize()
    work = dt.submit(gate_passed, gate, node=1)
    y = x * 2
    it = dt.seeing.whence(y, timeout=0)
    assert (told(it.made), it.ready) == (("aten::mul.Tensor", here(-2)), False)
    assert dt.seeing.whence(x, timeout=0).ready
    gate.put(True)
    work.result()
    assert whence(y).ready


def gate_passed(gate: Any) -> None:
    gate.get()


def test_what_is_not_known() -> None:
    small, large = torch.zeros(3, device="node:0"), torch.ones(1 << 18, device="node:0")
    made = here(-1)
    for _ in range(4000):  # the last 2,000 are kept
        small + 1
    it = whence(small)
    assert (it.made, it.written, it.ready) == (None, None, True)
    assert it.unknown[0].startswith("what has made it is not known, as that is not among the last ")
    it = whence(large)
    assert it.made is not None
    assert (it.made.line, it.made.operator) == (made, "")
    assert "more is not known" in it.unknown[0]
    empty = whence(torch.empty(3, device="node:0"))
    assert (empty.made, empty.ready) == (OriginCommand("aten::empty.memory_format", "", "", 0), False)
    with pytest.raises(TypeError, match="whence is for tensors on nodes, and this is a local tensor"):
        whence(torch.ones(3))


def test_a_stream() -> None:
    stream = dt.Stream(node=0)
    x = torch.ones(3, device="node:0")
    with dt.stream(stream):
        y, made = x * 2, here()
    stream.synchronize()
    assert (told(whence(y).made), whence(y).ready) == (("aten::mul.Tensor", made), True)
