"""``dt.submit``: functions on nodes for which nobody waits, and their Works."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from began import Began, tell
from doors import Door, until
from limits import HANG

import disttensor as dt


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    with dt.init_master_worker(nodes=3, threads=1):
        # connections and the callbacks' thread are made at first use: have them before the tests look for leaks
        dt.run(torch.distributed.get_rank, node=[2, 0], distributed=True)
        called = threading.Event()
        for node in range(3):
            there = torch.ones(1 << 14).to(f"node:{node}")  # smaller ones come without a channel
            for other in range(3):
                there.to(f"node:{other}").cpu()
            dt.fetch(there).add_done_callback(lambda work: called.set())
        assert called.wait(HANG)
        yield


def loop(port: int) -> None:
    tell(port)
    while True:
        pass


def add(a: Any, b: Any) -> Any:
    return a + b


def double(t: torch.Tensor) -> tuple[torch.Tensor, int]:
    return t * 2, t.numel()


def place(port: int) -> int | None:
    until(port)
    return dt.tasks.here().node


def fail(text: str) -> None:
    raise ValueError(text)


@pytest.mark.row("I26")
def test_nobody_waits_and_the_result_is_what_run_returns() -> None:
    with Door() as door:
        work = dt.submit(until, door.port, node=1)  # ends only after the next line
        assert not work.is_completed()
        with pytest.raises(TimeoutError, match=r"until\(\) on node 1 has not ended within 0.01 s; it goes on"):
            work.result(0.01)
        door.open()
        assert work.result() == "!"
    assert work.is_completed()
    assert work.wait()
    assert work.exception() is None
    assert not work.cancel()
    assert not work.cancelled()
    x = torch.arange(4.0)
    made, count = dt.submit(double, x, node=1).result()
    assert isinstance(made, dt.DistributedTensor)
    assert torch.equal((made + 1).cpu(), x * 2 + 1)
    assert count == 4


@pytest.mark.row("I26")
def test_it_is_done_when_it_has_ended_though_nobody_waits() -> None:
    """A loop that asks and does not wait comes to an end, for a result and for an error."""
    with Door() as door:
        works = [dt.submit(until, door.port, node=1), dt.submit(fail, "no", node=2)]
        assert not works[0].is_completed()
        door.open()
        deadline = time.monotonic() + HANG
        while not all(work.is_completed() for work in works):
            assert time.monotonic() < deadline
    assert works[0].result(0) == "!"
    with pytest.raises(ValueError, match="no"):
        works[1].result(0)


def test_each_kind_of_place() -> None:
    assert dt.submit(add, dt.tasks.Each([1, 2]), 3, node=[0, 2]).result() == [4, 5]
    assert dt.submit(torch.distributed.get_rank, node=[2, 0], distributed=True).result() == [0, 1]
    with Door() as door:
        first = dt.submit(until, door.port, node=0)
        others = [dt.submit(os.getpid, node="any").result() for _ in range(2)]  # neither waits behind the first
        door.open()
        assert first.result() == "!"
    assert dt.run(os.getpid, node=0) not in others
    with Door() as door:  # without a node each goes to the one for which the fewest functions wait
        works = [dt.submit(place, door.port) for _ in range(6)]
        for _ in works:
            door.open()
        assert sorted(work.result() for work in works) == [0, 0, 1, 1, 2, 2]
    with dt.node(2):
        assert dt.submit(os.getpid).result() == dt.run(os.getpid, node=2)


def test_a_work_is_an_argument_of_another() -> None:
    x = torch.ones(3, device="node:1")
    with Door() as door:  # nothing waits here for the result of a function of the same node
        first = dt.submit(until, door.port, node=1)
        second = dt.submit(add, first, first, node=1)
        door.open()
        assert second.result() == "!!"
    made = dt.submit(double, x, node=1)
    shown = dt.submit(lambda pair: (pair[0].tolist(), pair[1]), made, node=1)
    assert shown.result() == ([2.0] * 3, 3)
    assert dt.submit(add, made, (1,), node=0).result()[1:] == (3, 1)  # of another node
    assert dt.submit(add, dt.fetch(x), x, node=1).result().tolist() == [2.0] * 3
    failed = dt.submit(fail, "first", node=1)
    for node in (0, 1):
        with pytest.raises(ValueError, match="first"):
            dt.submit(add, failed, 1, node=node).result()


def test_beside_runs_beside_its_node_and_in_order_with_its_arguments() -> None:
    x = torch.zeros(1000, device="node:0")
    with Door() as door:
        work = dt.submit(until, door.port, node=0, beside=True)
        assert (x + 1).sum().item() == 1000  # the node's default stream goes on
        assert dt.submit(add, 1, 2, node=0, beside=True).result() == 3  # and so does another stream
        door.open()
        assert work.result() == "!"
    for step in range(20):
        x.fill_(step)
        found = dt.submit(torch.clone, x, node=0, beside=True)
        assert (found.result() + 1).sum().item() == 1000 * (step + 1)


def fill_after(port: int, x: torch.Tensor) -> None:
    until(port)
    x.fill_(7)


def test_beside_waits_for_the_stream_that_makes_its_arguments() -> None:
    x = torch.zeros(10, device="node:0")
    with Door() as door, dt.stream(dt.Stream(node=0)):
        filled = dt.submit(fill_after, door.port, x, node=0)
        copied = dt.submit(torch.clone, x, node=0, beside=True)
        assert dt.submit(add, 1, 2, node=0, beside=True).result() == 3  # what comes after it does not wait
        door.open()
        assert copied.result().tolist() == [7] * 10
        filled.result()


@pytest.mark.parametrize("beside", [False, True])
def test_cancel_interrupts_and_poisons_and_the_node_is_usable(beside: bool) -> None:
    begun = threading.Event()
    with Began(begun.set) as port:
        work = dt.submit(loop, port, node=1, beside=beside)
        assert begun.wait(HANG)
    later = dt.submit(add, work, 1, node=1)
    assert work.cancel()
    work.cancel()
    for each in (work, later):
        with pytest.raises(dt.errors.CancelledError, match=r"loop\(\) was cancelled"):
            each.result()
        assert each.cancelled()
    assert dt.run(add, 1, 2, node=1) == 3
    dt.synchronize()  # who has cancelled it knows


def test_what_is_cancelled_in_time_does_not_begin() -> None:
    begun = threading.Event()
    with Began(begun.set) as port:
        first, second = dt.submit(loop, port, node=1), dt.submit(fail, "it has begun", node=1)
        assert begun.wait(HANG)
    assert second.cancel()  # the node is told of this one first
    assert first.cancel()
    with pytest.raises(dt.errors.CancelledError, match="before it began"):
        second.result()
    assert first.cancelled() or first.exception() is not None


@pytest.mark.row("I26")
def test_errors_are_told_where_asked_for_else_at_synchronize() -> None:
    work = dt.submit(fail, "asked", node=1)
    error = work.exception()
    assert isinstance(error, ValueError)
    assert any("issued: " in note and "test_submit.py" in note for note in error.__notes__)
    with pytest.raises(ValueError, match="asked"):
        work.result()
    dt.synchronize()
    dt.submit(fail, "dropped", node=1)
    with pytest.raises(ValueError, match="dropped"):
        dt.synchronize()
    before = torch.node.memory_allocated("node:1")  # type: ignore[attr-defined]
    dt.submit(torch.ones, 1000, node=1)
    dt.synchronize()
    assert torch.node.memory_allocated("node:1") == before  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda: dt.submit(3), TypeError, "submit takes a function and its arguments, and 3 can't be called"),
        (lambda: dt.submit(add, 1, 2, besides=True), TypeError, r"no argument 'besides'.*beside="),
        (lambda: dt.submit(add, 1, threading.Lock(), node=1), TypeError, "can't be sent to node 1"),
        (lambda: dt.submit(add, b"x" * (65 << 20), 1), ValueError, "exceed 64 MiB when pickled"),
        (lambda: dt.submit(add, 1, 2, node=0, nodes=[1]), TypeError, "node= or nodes=, not both"),
        (lambda: dt.submit(add, 1, dt.tasks.Each([1]), node=[0, 1]), ValueError, "1 values for the 2 nodes"),
        (lambda: dt.submit(add, 1, 2, node=7), ValueError, "7"),
    ],
)
def test_what_cannot_be_submitted_is_said_at_once(call: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        call()
    assert dt.submit(add, 1, 2, node=1).result() == 3


def test_a_recording_refuses_it() -> None:
    with dt.graph(dt.Graph()), pytest.raises(dt.errors.GraphError, match="a function has to wait"):
        dt.submit(add, 1, 2, node=1)


def test_callbacks_and_await_come_though_nobody_waits() -> None:
    seen, done = list[int](), threading.Event()

    def note(work: Any) -> None:
        seen.append(work.result())
        done.set()

    with Door() as door:
        work = dt.submit(until, door.port, node=1)
        work.add_done_callback(lambda work: note(dt.submit(len, work, node=1)))
        door.open()
        assert done.wait(HANG)
    assert seen == [1]

    async def both() -> list[Any]:
        return await asyncio.gather(*[dt.submit(add, 1, k, node=k) for k in (0, 1)])

    assert asyncio.run(both()) == [1, 2]


def test_as_completed_mixes_with_fetches() -> None:
    x = torch.ones(2, device="node:0")
    with Door() as door:
        late, early = dt.submit(until, door.port, node=1), dt.submit(add, 1, 2, node=2)
        fetched = dt.fetch(x)
        order = dt.futures.as_completed([late, early, fetched])
        assert {next(order), next(order)} == {early, fetched}
        door.open()
        assert next(order) is late


def test_a_node_that_is_killed_ends_the_waiting() -> None:
    begun = threading.Event()
    with Began(begun.set) as port:
        work = dt.submit(loop, port, node=2)
        behind, both = dt.submit(add, work, 1, node=2), dt.submit(add, 1, 1, node=[0, 2])
        assert begun.wait(HANG)
    os.kill(dt.nodes()[2]["pid"], 9)
    for each in (work, behind, both):
        with pytest.raises(dt.NodeLost, match="node 2"):
            each.result()
        assert each.is_completed()
        assert not each.cancel()
    with pytest.raises(dt.NodeLost):
        dt.submit(add, 1, 2, node=2)
    assert dt.submit(os.getpid, node="any").result() in [node["pid"] for node in dt.nodes()[:2]]
