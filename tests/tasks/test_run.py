"""Users' functions on nodes: what goes in, what comes out, and how they fail."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import weakref
from typing import Any

import numpy
import pytest
import torch
from aftermath import aftermath
from equal import same
from telling import said

import disttensor as dt
from disttensor import testing

pytestmark = pytest.mark.usefixtures("clean")

FACTOR = 3


def scaled(x: torch.Tensor, by: float = 1.0) -> torch.Tensor:
    return x * by * FACTOR


def test_a_function() -> None:
    x = torch.randn(3)
    same(dt.run(scaled, x.to("node:1"), node=1), x * 3)
    same(dt.run(scaled, x.to("node:1"), by=2.0, node=1), x * 2.0 * 3)


def test_it_runs_on_the_node() -> None:
    def where() -> str:
        return threading.current_thread().name

    assert dt.run(where) == "node 0"
    assert dt.run(where, node=1) == "node 1"
    with dt.node(1):
        assert dt.run(where) == "node 1"


def test_tensors_arrive_as_ordinary_ones() -> None:
    def kinds(*args: Any) -> list[str]:
        return [f"{type(a).__name__} {a.device.type} {tuple(a.shape)}" for a in args]

    here, there, other = torch.ones(2), torch.ones(3, device="node:1"), torch.ones(4, device="node:0")
    assert dt.run(kinds, here, there, other, node=1) == ["Tensor cpu (2,)", "Tensor cpu (3,)", "Tensor cpu (4,)"]


def test_nodes_that_are_threads_share_switches_of_torch() -> None:
    """What was issued before a switch is computed before it is set."""
    x, at, one = torch.zeros(3, device="node:0"), torch.tensor([1]).to("node:0"), torch.ones(1).to("node:0")
    for _ in range(20):
        x.put_(at, one)
        torch.use_deterministic_algorithms(True)
        assert dt.run(torch.are_deterministic_algorithms_enabled, node=1)
        torch.use_deterministic_algorithms(False)
    assert x.tolist() == [0.0, 1.0, 0.0]


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x.to_sparse(),
        lambda x: x.to_sparse_csr(),
        lambda x: torch.quantize_per_tensor(x, 0.5, 0, torch.qint8),
        lambda x: torch.nested.nested_tensor([x, x[:1]]),
    ],
    ids=["coo", "csr", "quantized", "nested"],
)
@pytest.mark.filterwarnings("ignore:.*", "ignore::DeprecationWarning")
def test_local_tensors_of_other_layouts_arrive_as_they_are(make: Any) -> None:
    def read(x: torch.Tensor) -> tuple[str, torch.Tensor]:
        kind = f"{x.layout} {x.is_quantized} {x.is_nested} {x.device}"
        return kind, x.dequantize() if x.is_quantized else x[1] if x.is_nested else x.to_dense()

    local = make(torch.eye(3))
    kind, values = dt.run(read, local, node=1)
    assert kind == read(local)[0]
    same(values, read(local)[1])


def test_closures() -> None:
    big, small = torch.randn(100), 3

    def inner(x: torch.Tensor) -> torch.Tensor:
        return x + big.sum() * small

    same(dt.run(lambda x: inner(x), torch.ones(2), node=1), torch.ones(2) + big.sum() * 3)
    factor = torch.full((2,), 2.0, device="node:1")
    same(dt.run(lambda: factor * 2, node=1), torch.full((2,), 4.0))


def test_tensors_at_any_depth() -> None:
    a, b = torch.randn(2), torch.randn(3)

    def twist(tree: dict[str, Any], *, extra: Any) -> Any:
        return {"a": (tree["x"][0] + 1, [tree["x"][1]["y"] * 2]), "n": extra[0], "t": extra[1].sum()}

    out = dt.run(twist, {"x": [a, {"y": b.to("node:1")}]}, extra=(5, a), node=1)
    same(out, {"a": (a + 1, [b * 2]), "n": 5, "t": a.sum()})
    assert out["t"].get_node() == 1


@pytest.mark.parametrize(
    "value",
    [
        None, True, 3, -(2**63), 1.5, float("inf"), 1 - 2j, "text \u00e9", b"bytes", [], (), [1, (2, [3])],
        {"a": {1: (2,)}},
        {1, 2}, frozenset(), {"x": None, 3: [True]}, ((),),
        {(1, 2): 3},
    ],
)  # fmt: skip
def test_plain_data(value: object) -> None:
    for out in (dt.run(lambda v: v, value, node=1), dt.run(lambda: value, node=1)):
        assert out == value
        assert type(out) is type(value) or isinstance(value, frozenset)


def test_results_share_memory_with_what_they_are_views_of() -> None:
    x = torch.zeros(4, device="node:1")
    row = dt.run(lambda t: t[1:], x, node=1)
    row.add_(1)
    same(x, torch.tensor([0.0, 1, 1, 1]))
    assert row.storage_offset() == 1
    out = dt.run(lambda t: (t, t.t(), t.expand(2, 3, 3)), torch.randn(3, 3), node=1)
    assert [o.stride() for o in out] == [(3, 1), (1, 3), (0, 3, 1)]
    out[0].zero_()
    assert out[2].sum().item() == 0


def test_in_place_on_an_argument() -> None:
    x = torch.zeros(3, device="node:1")
    assert dt.run(lambda t: t.fill_(7).sum().item(), x, node=1) == 21
    same(x, torch.full((3,), 7.0))


@pytest.mark.parametrize("name", ["cpu", "cuda:0"])
def test_order_with_operations(name: str) -> None:
    x = torch.zeros(3, device=dt.device(1, name))
    x.add_(1)
    y = dt.run(lambda t: t * 10, x, node=1)
    x.add_(1)
    same(y, torch.full((3,), 10.0))
    same(x + y, torch.full((3,), 12.0))


def test_gradients_inside() -> None:
    def grad(x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        (x**2).sum().backward()
        return x.grad

    same(dt.run(grad, torch.arange(3.0), node=1), torch.arange(3.0) * 2)


def test_parameters_and_results_are_detached() -> None:
    w = torch.ones(3, device="node:1", requires_grad=True)
    assert not dt.run(lambda t: t * 2, w, node=1).requires_grad


def test_state_stays_on_the_node() -> None:
    def count() -> int:
        import builtins

        builtins._runs = getattr(builtins, "_runs", 0) + 1
        return builtins._runs

    try:
        assert [dt.run(count, node=1) for _ in range(3)] == [1, 2, 3]
    finally:
        import builtins

        del builtins._runs


def test_a_function_is_sent_once() -> None:
    weight = "x" * 50_000

    def length(n: int) -> int:
        return len(weight) + n

    assert dt.run(length, 1, node=1) == 50_001
    with testing.MessageLog() as log:
        assert dt.run(length, 2, node=1) == 50_002
    assert log[1].bytes_sent < 1000


def test_large_arguments_and_results() -> None:
    data = bytes(range(256)) * 8000
    assert dt.run(lambda b: len(b), data, node=1) == len(data)
    assert dt.run(lambda: b"x" * (3 << 20), node=1) == b"x" * (3 << 20)
    with pytest.raises(ValueError, match="64 MiB may come beside tensors"):
        dt.run(lambda: "x" * (65 << 20), node=1)
    assert dt.run(lambda: 1, node=1) == 1


# ---- failures --------------------------------------------------------------------------------------------------------


class OwnError(Exception):
    pass


def test_errors_keep_their_type() -> None:
    def fail(kind: type[Exception]) -> None:
        raise kind("boom")

    for kind in (ValueError, KeyError, ZeroDivisionError, RuntimeError, NotImplementedError, TypeError, IndexError):
        with pytest.raises(kind, match="boom") as e:
            dt.run(fail, kind, node=1)
        assert "test_run.py" in said(e.value)
        assert "failed: fail() on node 1" in said(e.value)
        assert any("in fail" in note and "traceback on node 1" in note for note in e.value.__notes__)
        assert "runtime" not in said(e.value), "none of our own lines"
    with pytest.raises(OwnError, match="boom"):  # it is an argument, and so announced
        dt.run(fail, OwnError, node=1)


def test_a_failure_is_no_news_later() -> None:
    with pytest.raises(ZeroDivisionError):
        dt.run(lambda: 1 / 0, node=1)
    dt.synchronize()


def test_a_failed_function_can_be_run_again() -> None:
    def sometimes(n: int) -> int:
        if n == 0:
            raise ValueError("zero")
        return n

    for _ in range(3):
        with pytest.raises(ValueError, match="zero"):
            dt.run(sometimes, 0, node=1)
        assert dt.run(sometimes, 4, node=1) == 4


@pytest.mark.parametrize("value", [object(), ValueError("x"), type, lambda: 1, sys, iter("x")])
def test_results_that_cannot_come_back(value: object) -> None:
    make = {"sys": lambda: sys}.get(getattr(value, "__name__", ""), lambda: value)
    with pytest.raises(TypeError, match="only tensors and plain data"):
        dt.run(make, node=1)
    assert dt.run(lambda: 1, node=1) == 1


def test_too_large_a_number() -> None:
    assert dt.run(lambda: 2**70, node=1) == 2**70


def test_a_result_that_contains_itself() -> None:
    def loop() -> list[Any]:
        a: list[Any] = []
        a.append(a)
        return a

    with pytest.raises(ValueError, match="does it contain itself"):
        dt.run(loop, node=1)
    assert dt.run(lambda: 1, node=1) == 1


@pytest.mark.fault(15)
@pytest.mark.parametrize("code", [0, 3, "text", None])
def test_sys_exit(code: object) -> None:
    with aftermath(0, 1), pytest.raises(dt.DisttensorError, match=r"sys\.exit"):
        dt.run(lambda: sys.exit(code), node=1)  # type: ignore[arg-type]
    assert dt.run(lambda: 1, node=1) == 1


@pytest.mark.fault(15)
def test_keyboard_interrupt() -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    with aftermath(0, 1), pytest.raises(dt.DisttensorError, match="KeyboardInterrupt"):
        dt.run(interrupt, node=1)
    assert dt.run(lambda: 1, node=1) == 1


def test_a_poisoned_argument() -> None:
    bad = torch.ones(3, device="node:1").gather(0, torch.tensor([7], device="node:1"))
    with pytest.raises(RuntimeError, match="aten::gather"):
        dt.run(lambda t: t.sum(), bad, node=1)
    assert dt.run(lambda: 1, node=1) == 1


def test_what_cannot_be_sent() -> None:
    with pytest.raises(Exception, match="pickle"):
        dt.run(lambda lock: 1, threading.Lock(), node=1)
    with pytest.raises(ValueError, match="node 7"):
        dt.run(scaled, 1, node=7)


def test_what_is_too_long_is_refused_at_the_line() -> None:
    with testing.limits(pickle=1 << 20):
        with pytest.raises(ValueError, match="exceed 1 MiB when pickled; pass them as tensors"):
            dt.run(len, bytes(1 << 20), node=1)
        assert dt.run(len, bytes(1 << 19), node=1) == 1 << 19


_made: list[weakref.ref[Any]] = []
_go_on = threading.Event()


def made() -> torch.Tensor:
    """A tensor, the life of whose memory can be seen."""
    memory = numpy.ones(1000)
    _made.append(weakref.ref(memory))
    return torch.from_numpy(memory)


def interrupted() -> torch.Tensor:
    os.kill(os.getpid(), signal.SIGINT)
    _go_on.wait(20)
    return made()


@pytest.mark.parametrize(
    ("function", "error"),
    [
        (interrupted, KeyboardInterrupt),
        (lambda: (made(), "x" * (65 << 20)), ValueError),
        (lambda: (made(), torch.eye(3).to_sparse()), TypeError),
        (lambda: (made(), object()), TypeError),
    ],
    ids=["interrupted", "too long", "sparse", "not plain"],
)
def test_results_that_nobody_gets_are_dropped(function: Any, error: type[BaseException]) -> None:
    with pytest.raises(error):
        dt.run(function, node=1)
    _go_on.set()
    dt.synchronize()
    assert dt.run(lambda: 1, node=1) == 1  # so that the node's stack holds nothing of the run before
    gc.collect()
    (memory,) = _made
    _made.clear()
    assert memory() is None


def test_nothing_is_left_on_the_node() -> None:
    x = torch.ones(2, device="node:1")
    dt.run(lambda t: t + 1, x, node=1)
    gc.collect()
    dt.synchronize()
    before = testing.usage(x)
    gc.disable()
    try:
        for _ in range(20):
            dt.run(lambda t, u: [t + u, t], x, torch.ones(2), node=1)
        dt.synchronize()
        assert testing.usage(x) == before
    finally:
        gc.enable()
