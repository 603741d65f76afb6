"""``dt.tasks.Executor`` against what CPython's own tests of executors ask (3.11's Lib/test/test_concurrent_futures.py).

The names of tests are those of CPython's, where they are the same cases. Left out: what is about worker threads and
processes themselves (how many are started, their initializers, their garbage, broken pools, ``mp_context``).
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import threading
import weakref
from collections.abc import Iterator
from concurrent import futures
from typing import Any

import pytest
import torch
from began import Began, tell
from doors import Door, until
from limits import HANG

import disttensor as dt


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    with dt.init_master_worker(nodes=2, threads=1):
        for node in range(2):  # connections are made at first use: have them before the tests look for leaks
            torch.ones(1).to(f"node:{node}").cpu()
        yield


@pytest.fixture
def executor() -> Iterator[dt.tasks.Executor]:
    with dt.tasks.Executor() as made:
        yield made


def mul(x: int, y: int = 2) -> int:
    return x * y


def capture(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
    return args, kwargs


def fail(x: int) -> int:
    return 1 // x


def loop(port: int) -> None:
    tell(port)
    while True:
        pass


@pytest.mark.row("I27")
def test_submit(executor: dt.tasks.Executor) -> None:
    future = executor.submit(pow, 2, 8)
    assert isinstance(future, futures.Future)
    assert future.result() == 256
    assert future.done()


def test_submit_keyword(executor: dt.tasks.Executor) -> None:
    assert executor.submit(mul, 2, y=8).result() == 16
    names = dict.fromkeys(["self", "fn", "node", "nodes", "beside"], 1)
    assert executor.submit(capture, 1, **names).result() == ((1,), names)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        executor.submit(fn=capture)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="3 can't be called"):
        executor.submit(3)  # type: ignore[arg-type]


@pytest.mark.row("I27")
@pytest.mark.parametrize("chunksize", [1, 3, 100])
def test_map(executor: dt.tasks.Executor, chunksize: int) -> None:
    assert list(executor.map(pow, range(10), range(10), chunksize=chunksize)) == list(map(pow, range(10), range(10)))


def test_map_exception(executor: dt.tasks.Executor) -> None:
    results = executor.map(divmod, [1, 1, 1, 1], [2, 3, 0, 5])
    assert next(results) == (0, 1)
    assert next(results) == (0, 1)
    with pytest.raises(ZeroDivisionError):
        next(results)
    with pytest.raises(ValueError, match="chunksize must be >= 1"):
        executor.map(pow, [1], [1], chunksize=0)


def test_map_timeout(executor: dt.tasks.Executor) -> None:
    with Door() as door:
        results = executor.map(until, [door.port], timeout=0.01)
        with pytest.raises(futures.TimeoutError):
            next(results)
        door.open()


def test_no_stale_references(executor: dt.tasks.Executor) -> None:
    class Mine:
        def nothing(self) -> None: ...

    mine = Mine()
    gone = threading.Event()
    weakref.finalize(mine, gone.set)
    executor.submit(mine.nothing).result()
    del mine
    gc.collect()
    assert gone.wait(HANG)


def test_max_workers_negative() -> None:
    for number in (0, -1):
        with pytest.raises(ValueError, match="per_node"):
            dt.tasks.Executor(per_node=number)


def test_run_after_shutdown() -> None:
    executor = dt.tasks.Executor()
    executor.shutdown()
    executor.shutdown()
    with pytest.raises(RuntimeError, match="cannot schedule new futures after shutdown"):
        executor.submit(pow, 2, 5)


@pytest.mark.parametrize("wait", [True, False])
def test_cancel_futures(wait: bool) -> None:
    with Door() as door:
        executor = dt.tasks.Executor([1])
        running = executor.submit(until, door.port)
        others = [executor.submit(fail, 0) for _ in range(5)]
        while not running.running():
            pass
        opening = threading.Thread(target=door.open)
        opening.start()
        executor.shutdown(wait=wait, cancel_futures=True)
        assert running.result() == "!"
        done = futures.wait([running, *others], timeout=HANG).done
        assert len(done) == 6
        # the first of them may have begun when the one before had ended
        assert all(other.cancelled() for other in others[1:])
        opening.join()
        executor.shutdown()


def test_hang_issue12364() -> None:
    executor = dt.tasks.Executor()
    fs = [executor.submit(mul, k) for k in range(50)]
    executor.shutdown()
    assert [f.result() for f in fs] == [2 * k for k in range(50)]


def test_interpreter_shutdown_and_dropped_executors() -> None:
    future = dt.tasks.Executor().submit(mul, 3)  # the executor is dropped at once
    gc.collect()
    assert future.result(HANG) == 6


@pytest.mark.row("I27")
def test_a_future_waits_runs_and_is_cancelled() -> None:
    with dt.tasks.Executor([1]) as executor, Door() as door:
        running, pending = executor.submit(until, door.port), executor.submit(fail, 0)
        while not running.running():
            pass
        assert not pending.running()
        assert not running.cancel()
        assert pending.cancel()
        with pytest.raises(futures.CancelledError):
            pending.result()
        door.open()
        assert running.result() == "!"
        assert not running.cancelled()


def test_first_completed_first_exception_all_completed_and_timeout() -> None:
    with dt.tasks.Executor() as executor, Door() as door:
        late, early = executor.submit(until, door.port), executor.submit(mul, 21)
        done, left = futures.wait([late, early], return_when=futures.FIRST_COMPLETED)
        assert (done, left) == ({early}, {late})
        failed = executor.submit(fail, 0)
        done, left = futures.wait([late, failed], return_when=futures.FIRST_EXCEPTION)
        assert (done, left) == ({failed}, {late})
        done, left = futures.wait([late, failed], timeout=0.01)
        assert left == {late}
        with pytest.raises(futures.TimeoutError):
            list(futures.as_completed([late, failed], timeout=0))
        door.open()
        assert futures.wait([late, early, failed]).not_done == set()
        assert len(list(futures.as_completed(itertools.repeat(early, 3)))) == 1  # test_duplicate_futures
        error = failed.exception()
        assert isinstance(error, ZeroDivisionError)
        assert any("test_pool.py" in note and "issued" in note for note in error.__notes__)


def test_what_cannot_be_sent_is_the_futures_error(executor: dt.tasks.Executor) -> None:
    with pytest.raises(TypeError, match="can't be sent"):
        executor.submit(mul, threading.Lock()).result()  # type: ignore[arg-type]
    assert executor.submit(mul, 4).result() == 8


def test_asyncio_takes_it(executor: dt.tasks.Executor) -> None:
    async def main() -> list[int]:
        loop = asyncio.get_running_loop()
        return await asyncio.gather(*[loop.run_in_executor(executor, mul, k) for k in range(4)])

    assert asyncio.run(main()) == [0, 2, 4, 6]


def test_several_at_once_on_a_node() -> None:
    with dt.tasks.Executor([0], per_node=2) as executor, Door() as door:
        first, second = executor.submit(until, door.port), executor.submit(mul, 1)
        assert second.result() == 2
        door.open()
        assert first.result() == "!"


def test_the_loss_of_a_node_and_the_end_of_the_session() -> None:
    pids = [node["pid"] for node in dt.nodes()]
    begun = threading.Event()
    with dt.tasks.Executor() as once, dt.tasks.Executor([1, 0], retries=1) as again:
        with Began(begun.set, times=1) as port:
            lost = once.submit(loop, port)  # on node 0
            assert begun.wait(HANG)
        os.kill(pids[0], 9)
        with pytest.raises(dt.NodeLost) as raised:
            lost.result()
        assert any("retries=1" in note for note in raised.value.__notes__)
        assert once.submit(os.getpid).result() == pids[1]
        assert [again.submit(mul, k).result() for k in range(3)] == [0, 2, 4]
    with Began(lambda: None) as port:
        executor = dt.tasks.Executor()
        running, pending = executor.submit(loop, port), executor.submit(mul, 1)
    os.kill(pids[1], 9)
    for future in (running, pending, executor.submit(mul, 1)):
        with pytest.raises(dt.NodeLost):
            future.result()
    executor.shutdown()
