"""The Work of an asynchronous collective: its nodes answer one request, and whoever waits, polls or has a callback is
told of the end, of an error, and of the loss of a node."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from limits import HANG
from thread_nodes import thread_nodes

import disttensor as dt

N = 3


@pytest.fixture(autouse=True)
def session() -> Iterator[None]:
    with thread_nodes(N):
        yield


@pytest.fixture(params=["list", "mesh"])
def reduce(request: pytest.FixtureRequest) -> Callable[[Any], Any]:
    """Begins to reduce what ``make(k)`` gives for each node k."""
    if request.param == "list":
        return lambda make: dt.all_reduce([make(k).to(f"node:{k}") for k in range(N)], async_op=True)
    mesh = dt.mesh(dp=N)

    def begin(make: Callable[[int], torch.Tensor]) -> Any:
        return dt.collectives.all_reduce_(
            dt.meshes.from_shards(mesh, [make(k) for k in range(N)]), over="dp", async_op=True
        )

    return begin


def ones(k: int) -> torch.Tensor:
    return torch.ones(4)


class Gate:
    """A pipe: a node reads it, and so does nothing else, until it is opened and closed."""

    def __init__(self, path: Path, node: int) -> None:
        os.mkfifo(path)
        self.path = path
        self.read = dt.submit(path.read_bytes, node=node)

    def __enter__(self) -> None:
        self._file = open(self.path, "w")  # returns when the node reads

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self.read.wait()


def test_nothing_is_sent_to_the_script_for_its_end(reduce: Callable[[Any], Any]) -> None:
    for work in [reduce(ones) for _ in range(3)]:
        assert work.wait(HANG)
    assert not [row for row in dt.channels.stats() if row.at == "master" and row.received.calls]


def test_it_is_one_request(reduce: Callable[[Any], Any], tmp_path: Path) -> None:
    with Gate(tmp_path / "gate", 1):
        under_way = dt.testing.queued().questions
        work = reduce(ones)
        assert dt.testing.queued().questions == under_way + 1
        assert not work.is_completed()
    work.wait()
    assert dt.testing.queued().questions == 0


def test_who_polls_sees_the_end(reduce: Callable[[Any], Any]) -> None:
    """Nobody else takes in what the nodes say."""
    work = reduce(ones)
    while not work.is_completed():
        pass
    assert work.wait(0)


def test_a_callback_is_called_though_nobody_waits(reduce: Callable[[Any], Any], tmp_path: Path) -> None:
    called = threading.Event()
    with Gate(tmp_path / "gate", 1):
        work = reduce(ones)
        work.add_done_callback(lambda work: called.set())
        assert not called.is_set()
    assert called.wait(HANG)
    assert work.is_completed()


def test_as_completed_gives_each_as_it_ends(reduce: Callable[[Any], Any], tmp_path: Path) -> None:
    first = dt.all_reduce([torch.ones(2, device=f"node:{k}") for k in (0, 2)], async_op=True)
    with Gate(tmp_path / "gate", 1):
        second = reduce(ones)
        ended = dt.futures.as_completed([second, first], HANG)
        assert next(ended) is first
    assert list(ended) == [second]


def test_threads_wait_for_one(reduce: Callable[[Any], Any], tmp_path: Path) -> None:
    waited: list[bool] = []
    with Gate(tmp_path / "gate", 1):
        work = reduce(ones)
        threads = [threading.Thread(target=lambda: waited.append(work.wait(HANG))) for _ in range(4)]
        for thread in threads:
            thread.start()
    for thread in threads:
        thread.join()
    assert waited == [True] * 4


def bad(k: int) -> torch.Tensor:
    """Of node 1 it has failed."""
    return F.embedding(torch.tensor([9 if k == 1 else 0], device=f"node:{k}"), torch.ones(3, 2, device=f"node:{k}"))


@pytest.mark.parametrize("how", ["wait", "result", "exception", "await", "callback"])
def test_an_error_of_one_node_is_everybodys(how: str) -> None:
    work = dt.all_reduce([bad(k) for k in range(N)], async_op=True)

    async def awaited() -> None:
        await work

    if how in ("wait", "result"):
        with pytest.raises(IndexError):
            getattr(work, how)(HANG)
    elif how == "await":
        with pytest.raises(IndexError):
            asyncio.run(awaited())
    elif how == "callback":
        errors: list[Exception | None] = []
        called = threading.Event()
        work.add_done_callback(lambda work: (errors.append(work.exception()), called.set()))
        assert called.wait(HANG)
        assert isinstance(errors[0], IndexError)
    assert isinstance(work.exception(), IndexError)
    assert work.is_completed()


def test_a_result_is_one_object(reduce: Callable[[Any], Any]) -> None:
    work = reduce(ones)
    assert work.result() is work.result()


def test_what_could_not_be_issued_leaves_no_request(tmp_path: Path) -> None:
    """The views of what a collective is writing can't be used: here the next one asks for one."""
    xs = [torch.ones(4, device=f"node:{k}") for k in range(N)]
    views = [x[:2] for x in xs]
    with Gate(tmp_path / "gate", 1):
        work = dt.all_reduce(xs, async_op=True)
        under_way = dt.testing.queued().questions
        with pytest.raises(RuntimeError, match="view of what all_reduce"):
            dt.all_reduce(views, async_op=True)
        assert dt.testing.queued().questions == under_way
    work.wait()


@pytest.mark.parametrize("how", ["wait", "await", "callback"])
def test_the_loss_of_a_node(reduce: Callable[[Any], Any], how: str, tmp_path: Path) -> None:
    with suppress(dt.NodeLost), Gate(tmp_path / "gate", 2):
        work = reduce(ones)
        dt.testing.cut(2)
    lost = pytest.raises(dt.DisttensorError, match=r"(node|rank) 2 ")  # or the end of its data connection
    if how == "wait":
        with lost:
            work.wait(HANG)
    elif how == "await":

        async def awaited() -> None:
            await work

        with lost:
            asyncio.run(awaited())
    else:
        called = threading.Event()
        work.add_done_callback(lambda work: called.set())
        assert called.wait(HANG)
    with lost:
        raise work.exception(HANG)
    others = dt.all_reduce([torch.ones(2, device=f"node:{k}") for k in (0, 1)], async_op=True)
    assert others.result(HANG)[1].tolist() == [2, 2]
    with suppress(dt.DisttensorError):
        dt.shutdown()
