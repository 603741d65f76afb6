"""``dt.tasks.Executor`` against what CPython's own tests of executors ask (Lib/test/test_concurrent_futures, to 3.15).

The names of tests are those of CPython's, where they are the same cases. Those of the interpreter's end and of forks
are in test_executor_ends.py. What is left out, and why:

| CPython's | |
|---|---|
| test_future.py; of test_as_completed.py two tests | are about plain futures, whose class is Python's own here |
| test_init.py | there are no initializers: ``dt.run(fn, node=[0, 1])`` first |
| test_default_workers, test_idle_*_reuse*, test_max_workers_too_large | no workers are started: the nodes are there |
| test_thread_names_* | there is no prefix; the one thread has one name |
| test_max_tasks_per_child*, test_shutdown_gh_132969_* | a node does not end after a number of calls |
| test_*_during_result_pickle*, test_*_result_unpickle* | results are not pickled, and nothing of a node is unpickled |
| test_gh105829_*, test_python_finalization_error | the wakeup pipe, and threads that are started late: there are none |
| of test_map_exception (3.15) what comes after the error | up to 3.14 an error ends the iterator, and so it does here |
| test_interpreter_pool.py, ``mp_context`` | interpreters and start methods |
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import operator
import os
import sys
import threading
import weakref
from collections.abc import Iterator
from concurrent import futures
from dataclasses import dataclass
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
            torch.ones(1 << 14).to(f"node:{node}").cpu()
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


def throw(kind: type[BaseException], text: str) -> None:
    raise kind(text)


def timeout_on_one(x: int) -> int:
    if x == 1:
        raise TimeoutError("of the function's own")
    return x


def note(text: str) -> None:
    sys.__dict__.setdefault("noted", []).append(text)


def noted() -> Any:
    return sys.__dict__.pop("noted", [])


@dataclass
class Stats:
    x: int


def typed(x: int) -> Stats:
    return Stats(x)


def untyped(x):  # type: ignore[no-untyped-def]
    return Stats(x)


class Held:
    """An argument that is looked for on the nodes."""


def count_held() -> int:
    gc.collect()
    return sum(type(found).__name__ == "Held" for found in gc.get_objects())


class At:
    """Calls a function where it is unpickled."""

    def __init__(self, call: Any, args: Any) -> None:
        self._then = call, args

    def __reduce__(self) -> Any:
        return self._then


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
    names = dict.fromkeys(["self", "fn", "node", "nodes", "distributed", "beside"], 1)
    assert executor.submit(capture, 1, **names).result() == ((1,), names)  # type: ignore[arg-type]
    names = dict.fromkeys(["returns", "raises"], 1)  # not the function's in dt.submit
    assert executor.submit(capture, 1, **names).result() == ((1,), names)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        executor.submit(fn=capture)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="3 can't be called"):
        executor.submit(3)  # type: ignore[arg-type]


@pytest.mark.row("I27")
@pytest.mark.parametrize("chunksize", [1, 3, 100])
def test_map(executor: dt.tasks.Executor, chunksize: int) -> None:
    assert list(executor.map(pow, range(10), range(10), chunksize=chunksize)) == list(map(pow, range(10), range(10)))


@pytest.mark.row("I27")
def test_map_exception(executor: dt.tasks.Executor) -> None:
    results = executor.map(divmod, [1, 1, 1, 1], [2, 3, 0, 5])
    assert next(results) == (0, 1)
    assert next(results) == (0, 1)
    with pytest.raises(ZeroDivisionError):
        next(results)
    with pytest.raises(StopIteration):
        next(results)
    for chunksize in (0, -1):
        with pytest.raises(ValueError, match="chunksize must be >= 1"):
            executor.map(pow, [1], [1], chunksize=chunksize)


def test_map_timeout(executor: dt.tasks.Executor) -> None:
    with Door() as door:
        results = executor.map(until, [door.port], timeout=0.01)
        with pytest.raises(futures.TimeoutError):
            next(results)
        door.open()


def test_map_timeout_from_callable(executor: dt.tasks.Executor) -> None:
    for timeout in (None, HANG):
        results = executor.map(timeout_on_one, [0, 1], timeout=timeout)
        assert next(results) == 0
        with pytest.raises(TimeoutError, match="of the function's own"):
            next(results)


@pytest.mark.parametrize("chunksize", [1, 3])
def test_map_close(executor: dt.tasks.Executor, chunksize: int) -> None:
    results = executor.map(divmod, [5, 5, 5, 5], [2, 0, 3, 5], chunksize=chunksize)
    if chunksize == 1:
        assert next(results) == (2, 1)
    results.close()  # type: ignore[attr-defined]
    assert list(results) == []


@pytest.mark.parametrize(
    ("buffersize", "error", "match"),
    [
        ("foo", TypeError, "buffersize must be an integer or None"),
        (2.0, TypeError, "buffersize must be an integer or None"),
        (0, ValueError, "buffersize must be None or > 0"),
        (-1, ValueError, "buffersize must be None or > 0"),
    ],
)
def test_map_buffersize_validation(
    executor: dt.tasks.Executor, buffersize: Any, error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        executor.map(str, range(4), buffersize=buffersize)


@pytest.mark.parametrize("buffersize", [1, 2, 4, 8])
def test_map_buffersize(executor: dt.tasks.Executor, buffersize: int) -> None:
    ints = range(4)
    assert list(executor.map(str, ints, buffersize=buffersize)) == ["0", "1", "2", "3"]
    assert list(executor.map(operator.add, ints, ints, buffersize=buffersize, chunksize=3)) == [0, 2, 4, 6]
    results = executor.map(operator.add, itertools.count(), itertools.count(), buffersize=buffersize)
    assert [next(results) for _ in range(3)] == [0, 2, 4]
    results.close()  # type: ignore[attr-defined]
    assert next(executor.map(str, [], buffersize=buffersize), None) is None
    assert next(executor.map(str, buffersize=buffersize), None) is None


def test_map_buffersize_when_buffer_is_full() -> None:
    ints = iter(range(4))
    with dt.tasks.Executor() as executor:
        executor.map(str, ints, buffersize=2)
    assert next(ints) == 2


def test_map_submits_without_iteration() -> None:
    with dt.tasks.Executor() as executor, Began(lambda: None, times=4) as port:  # which waits for all of them
        executor.map(tell, [port] * 4)


def test_shutdown_race_issue12456() -> None:
    executor = dt.tasks.Executor()
    executor.map(str, [2] * 3)
    executor.shutdown()


def test_executor_map_current_future_cancel() -> None:
    with dt.tasks.Executor([1]) as executor, Door() as door:
        first = executor.submit(until, door.port)
        results = executor.map(note, ["second", "third"], timeout=0)
        with pytest.raises(TimeoutError):
            next(results)
        door.open()
        assert first.result() == "!"
    assert dt.run(noted, node=1) == []


def test_saturation() -> None:
    with dt.tasks.Executor() as executor, Door() as door:
        waiting = [executor.submit(until, door.port) for _ in range(10)]
        while sum(future.running() for future in waiting) < 2:
            pass
        assert executor.submit(mul, 1).cancel()
        for _ in range(10):
            assert sum(future.running() for future in waiting) <= 2
            door.open()
        assert [future.result() for future in waiting] == ["!"] * 10


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


def test_free_reference() -> None:
    with dt.tasks.Executor() as executor:
        for made in executor.map(torch.ones, [1, 2]):
            gone = weakref.ref(made)
            del made
            gc.collect()
            assert gone() is None


def test_ressources_gced_in_workers(executor: dt.tasks.Executor) -> None:
    executor.submit(id, Held()).result()
    assert sum(dt.run(count_held, node=[0, 1])) == 0


class Mine(Exception):
    """One that is announced nowhere."""


class Falsey(Exception):
    def __bool__(self) -> bool:
        return False


class Empty(Exception):
    def __len__(self) -> int:
        return 0


def test_swallows_falsey_exceptions() -> None:
    for kind in (Falsey, Empty):
        with pytest.raises(kind, match="mine"):
            dt.submit(throw, kind, "mine", node=0, raises=kind).result()
        with pytest.raises(kind, match="mine"):
            list(dt.map(throw, [kind], ["mine"], raises=kind))
        if sys.version_info >= (3, 14):  # those of older Pythons lose such an exception
            with dt.tasks.Executor(raises=kind) as executor, pytest.raises(kind, match="mine"):
                executor.submit(throw, kind, "mine").result()


def test_classes_of_the_users_come_back_where_the_executor_names_them() -> None:
    with dt.tasks.Executor(returns=Stats) as executor:
        assert executor.submit(untyped, 3).result() == Stats(3)
        assert list(executor.map(untyped, [1, 2, 3], chunksize=2)) == [Stats(1), Stats(2), Stats(3)]
    with dt.tasks.Executor() as executor:
        assert list(executor.map(typed, [1, 2, 3], chunksize=2)) == [Stats(1), Stats(2), Stats(3)]  # as of dt.submit
        with pytest.raises(TypeError, match=r"come back if the Executor has named the class: returns="):
            executor.submit(untyped, 3).result()
        with pytest.raises(dt.errors.RemoteError) as raised:
            executor.submit(lambda: throw(Mine, "mine")).result()
        assert any("raises=[...] in the Executor" in note for note in raised.value.__notes__)
    with pytest.raises(TypeError, match=r"returns=.*names no dataclass"):
        dt.tasks.Executor(returns=int)


@pytest.mark.parametrize("end", ["with", "del", "no wait"])
def test_threads_terminate_context_manager_del_shutdown_and_no_wait(end: str) -> None:
    before = set(threading.enumerate())
    executor = dt.tasks.Executor()
    (thread,) = set(threading.enumerate()) - before
    results = executor.map(abs, range(-5, 5))
    if end == "with":
        with executor:
            pass
        assert not thread.is_alive()
    elif end == "no wait":
        executor.shutdown(wait=False)
    else:
        results = iter([*results])  # which hold the executor
        del executor
        gc.collect()
    thread.join(HANG)
    assert not thread.is_alive()
    assert list(results) == [abs(k) for k in range(-5, 5)]


def test_hang_gh94440() -> None:
    executor = dt.tasks.Executor([0])
    executor.submit(int).result()
    executor.submit(int).cancel()
    executor.shutdown(wait=True)


def test_max_workers_negative() -> None:
    for number in (0, -1):
        with pytest.raises(ValueError, match="per_node"):
            dt.tasks.Executor(per_node=number)


@pytest.mark.row("I27")
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

        def open_when_cancelled() -> None:
            while not others[-1].cancelled():
                pass
            door.open()

        opening = threading.Thread(target=open_when_cancelled)
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
        assert any("return 1 // x" in note for note in error.__notes__)  # test_traceback


def ended(state: str) -> futures.Future[Any]:
    future: futures.Future[Any] = futures.Future()
    if state == "cancelled":
        future.cancel()
        future.set_running_or_notify_cancel()
    elif state == "failed":
        future.set_exception(OSError())
    else:
        future.set_result(42)
    return future


def test_waits_for_futures_some_of_which_have_ended() -> None:
    cancelled, failed, good = map(ended, ["cancelled", "failed", "good"])
    pending: futures.Future[Any] = futures.Future()
    pending.cancel()  # of which nobody has been told
    with dt.tasks.Executor() as executor, Door() as door:
        late = executor.submit(until, door.port)
        # test_first_completed_some_already_completed, test_first_exception_one_already_failed
        assert futures.wait([cancelled, good, late], return_when=futures.FIRST_COMPLETED) == ({cancelled, good}, {late})
        assert futures.wait([failed, late], return_when=futures.FIRST_EXCEPTION) == ({failed}, {late})
        # test_first_exception_some_already_complete
        broken = executor.submit(divmod, 21, 0)
        done, left = futures.wait([good, pending, cancelled, broken, late], return_when=futures.FIRST_EXCEPTION)
        assert (done, left) == ({good, cancelled, broken}, {pending, late})
        # test_future_times_out
        for timeout in (0, 0.01):
            coming = futures.as_completed([cancelled, failed, good, late], timeout)
            assert {next(coming) for _ in range(3)} == {cancelled, failed, good}
            with pytest.raises(futures.TimeoutError):
                next(coming)
        door.open()
        assert futures.wait([late, late]) == ({late}, set())  # test_20369
        every = {cancelled, failed, good, broken, executor.submit(mul, 21)}
        assert set(futures.as_completed(every)) == every  # test_no_timeout
        assert futures.wait(every, return_when=futures.ALL_COMPLETED) == (every, set())  # test_all_completed


def test_pending_calls_race(executor: dt.tasks.Executor) -> None:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        every = {executor.submit(int) for _ in range(100)}
        assert futures.wait(every) == (every, set())
    finally:
        sys.setswitchinterval(before)


def test_callbacks_that_raise_stop_nothing(executor: dt.tasks.Executor, caplog: pytest.LogCaptureFixture) -> None:
    """test_done_callback_raises, and what the threads of Python's pools end by."""
    with Door() as door:
        for error in (ValueError, SystemExit):
            first, second = executor.submit(until, door.port), executor.submit(mul, 2)
            first.add_done_callback(lambda _, error=error: throw(error, "of a callback"))
            door.open()
            assert (first.result(HANG), second.result(HANG), executor.submit(mul, 3).result(HANG)) == ("!", 4, 6)
    said = [record.exc_info[0] for record in caplog.records if record.exc_info]
    assert said == [ValueError, SystemExit]


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        ((id, threading.Lock()), TypeError, "can't be sent"),  # test_error_at_task_pickle
        ((id, At(throw, (RuntimeError, "unpickled"))), RuntimeError, "unpickled"),  # test_error_at_task_unpickle
        ((id, At(sys.exit, (3,))), dt.DisttensorError, r"SystemExit|sys\.exit"),  # test_exit_at_task_unpickle
        ((sys.exit, 3), dt.DisttensorError, r"called sys\.exit\(3\); the node goes on"),  # test_exit_during_func_exec
        ((throw, RuntimeError, "mine"), RuntimeError, "mine"),  # test_error_during_func_exec_on_worker
        ((object,), TypeError, "object"),  # test_error_during_result_pickle_on_worker
    ],
)
@pytest.mark.parametrize("wait", [True, False])
def test_deadlock(call: tuple[Any, ...], error: type[Exception], match: str, wait: bool) -> None:
    """CPython's test_deadlock.py and test_shutdown_deadlock_pickle: what fails ends its future, and nothing else."""
    executor = dt.tasks.Executor([0])
    future = executor.submit(*call)
    after = executor.submit(mul, 4)
    executor.shutdown(wait)
    with pytest.raises(error, match=match):
        future.result(HANG)
    assert after.result(HANG) == 8


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
