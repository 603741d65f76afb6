"""Locks and barriers of the script and of functions on nodes.

Names of tests are those of CPython's own (3.11's Lib/test/lock_tests.py) where they are the same cases. Left out: what
is about the threads themselves and about ``repr``, and ``test_reacquire`` and ``test_different_thread``, in which
another thread releases: here only who has a lock may.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from everywhere import FROM

import disttensor as dt
from disttensor.tasks import Barrier, Channel, Lock

pytestmark = pytest.mark.row("I24")


@pytest.fixture(scope="module", autouse=True)
def reached(either: None) -> None:
    """Each node has its connection before the tests look for leaks."""
    for node in range(2):
        assert dt.run(Lock.locked, Lock(), node=node) is False


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as made:
        yield made


def holds(lock: Lock, told: Channel, go: Channel) -> None:
    with lock:
        told.put("has it")
        go.get()
    told.put("released")


@FROM
def test_acquire_release(at: Callable[..., Any]) -> None:
    def twice(lock: Lock) -> list[object]:
        said: list[object] = [lock.locked()]
        for _ in range(2):
            said += [lock.acquire(), lock.locked(), lock.release(), lock.locked(), lock.abandoned]
        return said

    assert at(twice, Lock()) == [False, *[True, True, None, False, None] * 2]


def test_acquire_destroy() -> None:
    lock = Lock()
    lock.acquire()
    del lock
    gc.collect()


@FROM
def test_try_acquire(at: Callable[..., Any]) -> None:
    assert at(lambda lock: [lock.acquire(False), lock.acquire(blocking=False)], Lock()) == [True, False]


@pytest.mark.parametrize("at", [0, 1])
def test_try_acquire_contended(pool: ThreadPoolExecutor, at: int) -> None:
    """One has it, in the script or on a node; another one, on a node or in the script, does not get it meanwhile."""
    lock, told, go = Lock(), Channel(), Channel()

    def tries(lock: Lock) -> list[bool]:
        return [lock.acquire(False), lock.acquire(timeout=0.01), lock.acquire(timeout=0), lock.locked()]

    one = pool.submit(holds, lock, told, go) if at else pool.submit(dt.run, holds, lock, told, go, node=1)
    assert told.get() == "has it"
    assert tries(lock) == [False, False, False, True]
    assert dt.run(tries, lock, node=0) == [False, False, False, True]
    go.put(None)
    assert told.get() == "released"
    one.result()
    assert dt.run(tries, lock, node=0) == [True, False, False, True]


def test_acquire_contended(pool: ThreadPoolExecutor) -> None:
    """All who wait get it, one at a time: what each reads is what the one before has written."""
    lock, box = Lock(), Channel()
    box.put(0)

    def add(lock: Lock, box: Channel) -> int:
        for _ in range(10):
            with lock:
                box.put(box.get_nowait() + 1)  # Empty, if two were in here
        return 10

    adding = [pool.submit(dt.run, add, lock, box, node=node) for node in range(2)]
    adding += [pool.submit(add, lock, box) for _ in range(2)]
    assert sum(one.result() for one in adding) == box.get() == 40


@FROM
def test_with(at: Callable[..., Any]) -> None:
    def fails(lock: Lock) -> None:
        with lock as got:
            raise ValueError(f"{got} {lock.locked()}")

    lock = Lock()
    with pytest.raises(ValueError, match="True True"):
        at(fails, lock)
    assert not lock.locked()
    with lock:
        assert lock.abandoned is None


@FROM
def test_timeout(at: Callable[..., Any]) -> None:
    def refusals(lock: Lock, most: float) -> list[str]:
        said = []
        for args, timeout in ((False, 1), (True, -100), (True, 1e100), (True, most + 1), (True, float("nan"))):
            try:
                lock.acquire(args, timeout)
            except (ValueError, OverflowError) as e:
                said.append(type(e).__name__)
        return said

    lock, most = Lock(), threading.TIMEOUT_MAX
    assert at(refusals, lock, most) == ["ValueError", "ValueError", "OverflowError", "OverflowError", "ValueError"]
    assert lock.acquire(timeout=most)
    lock.release()


@FROM
def test_state_after_timeout(at: Callable[..., Any]) -> None:
    def state(lock: Lock) -> list[object]:
        return [lock.acquire(), lock.acquire(timeout=0.01), lock.release(), lock.locked(), lock.acquire(blocking=False)]

    assert at(state, Lock()) == [True, False, None, False, True]


@FROM
def test_who_waits_for_itself_is_told(at: Callable[..., Any]) -> None:
    def waits(lock: Lock) -> None:
        lock.acquire()
        lock.acquire()

    with pytest.raises(dt.DisttensorError, match="has it already, and would wait for itself"):
        at(waits, Lock())


@FROM
def test_a_release_by_another_is_refused(at: Callable[..., Any], pool: ThreadPoolExecutor) -> None:
    lock, told, go = Lock("ledger"), Channel(), Channel()
    with pytest.raises(RuntimeError, match="<Lock ledger>: nobody has it"):
        at(Lock.release, lock)
    one = pool.submit(dt.run, holds, lock, told, go, node=0)
    told.get()
    with pytest.raises(RuntimeError, match=r"holds\(\) on node 0 has it, and only that may release it"):
        at(Lock.release, lock)
    assert lock.locked()
    go.put(None)
    one.result()
    assert not lock.locked()


def test_a_function_that_ends_with_it_frees_it_and_the_next_one_is_told() -> None:
    def keeps(lock: Lock, fails: bool) -> None:
        assert lock.acquire()
        if fails:
            raise ValueError("in the middle")

    lock = Lock()
    for fails in (False, True):
        if fails:
            with pytest.raises(ValueError, match="in the middle"):
                dt.run(keeps, lock, fails, node=1)
        else:
            dt.run(keeps, lock, fails, node=1)
        assert not lock.locked()
        assert dt.run(lambda lock: [lock.acquire(), lock.abandoned, lock.release()], lock, node=0) == [
            *(True, "keeps() on node 1 ended with it", None)
        ]
        with lock:
            assert lock.abandoned is None  # it was released since


def test_a_thread_that_ends_with_it_frees_it() -> None:
    lock = Lock()
    thread = threading.Thread(target=lock.acquire, name="careless")
    thread.start()
    thread.join()
    assert lock.acquire(timeout=30)
    assert lock.abandoned == "the script's thread careless ended with it"


# ---- barriers --------------------------------------------------------------------------------------------------------

N = 4


def everywhere(pool: ThreadPoolExecutor, fn: Callable[..., Any], *args: Any) -> list[Any]:
    """Runs a function on both nodes, and twice in the script, side by side."""
    running: list[Future[Any]] = [pool.submit(dt.run, fn, *args, node=node) for node in range(2)]
    running += [pool.submit(fn, *args) for _ in range(2)]
    return [one.result() for one in running]


def test_barrier(pool: ThreadPoolExecutor) -> None:
    """CPython's multipass: nobody is ahead by more than the others allow."""
    barrier, before, after = Barrier(N), Channel(), Channel()

    def multipass(barrier: Barrier, before: Channel, after: Channel) -> None:
        for i in range(5):
            before.put(None)
            assert after.qsize() == i * barrier.parties
            barrier.wait()
            after.put(None)
            assert before.qsize() == (i + 1) * barrier.parties
            barrier.wait()

    everywhere(pool, multipass, barrier, before, after)
    assert (barrier.n_waiting, barrier.broken, barrier.parties) == (0, False, N)


def test_wait_return(pool: ThreadPoolExecutor) -> None:
    assert sorted(everywhere(pool, Barrier.wait, Barrier(N))) == [*range(N)]


def test_wait_returns_the_order_in_which_they_came(pool: ThreadPoolExecutor) -> None:
    barrier, waiting = Barrier(3), []
    for node in range(2):
        waiting.append(pool.submit(dt.run, Barrier.wait, barrier, node=node))
        while barrier.n_waiting <= node:
            pass
    assert barrier.wait() == 2
    assert [one.result() for one in waiting] == [0, 1]


def test_action(pool: ThreadPoolExecutor) -> None:
    done = Channel()
    barrier = Barrier(N, lambda: done.put(1))

    def passes(barrier: Barrier, done: Channel) -> list[int]:
        seen = []
        for _ in range(3):
            barrier.wait()
            seen.append(done.qsize())
            barrier.wait()
        return seen

    assert everywhere(pool, passes, barrier, done) == [[1, 3, 5]] * N
    assert done.qsize() == 6


@FROM
def test_an_action_that_fails_breaks_it(at: Callable[..., Any], pool: ThreadPoolExecutor) -> None:
    def fails() -> None:
        raise LookupError("no such thing")

    barrier = Barrier(2, fails)
    waiting = pool.submit(dt.run, Barrier.wait, barrier, node=0)
    while barrier.n_waiting < 1:
        pass
    with pytest.raises(LookupError, match="no such thing"):
        at(Barrier.wait, barrier)
    with pytest.raises(RuntimeError, match="LookupError"):
        waiting.result()
    assert barrier.broken


def broken_or(barrier: Barrier, what: str) -> int:
    """CPython's: who is in the middle fails, or resets the barrier, when all others wait. 1 where it was broken."""
    import threading

    try:
        if barrier.wait() == barrier.parties // 2:
            while barrier.n_waiting < barrier.parties - 1:
                pass
            getattr(barrier, what)()
            return 0
        barrier.wait()
    except threading.BrokenBarrierError:
        return 1
    return 2


def test_abort(pool: ThreadPoolExecutor) -> None:
    barrier = Barrier(N)
    assert sorted(everywhere(pool, broken_or, barrier, "abort")) == [0, *[1] * (N - 1)]
    assert barrier.broken
    with pytest.raises(threading.BrokenBarrierError, match=r"has called abort\(\)"):
        barrier.wait()


def test_reset(pool: ThreadPoolExecutor) -> None:
    barrier = Barrier(N)

    def then(barrier: Barrier) -> int:
        found = broken_or(barrier, "reset")
        barrier.wait()
        return found

    assert sorted(everywhere(pool, then, barrier)) == [0, *[1] * (N - 1)]
    assert not barrier.broken


def test_abort_and_reset(pool: ThreadPoolExecutor) -> None:
    barrier, other = Barrier(N), Barrier(N)

    def then(barrier: Barrier, other: Barrier) -> int:
        found = broken_or(barrier, "abort")
        if other.wait() == N // 2:
            barrier.reset()
        other.wait()
        barrier.wait()
        return found

    assert sorted(everywhere(pool, then, barrier, other)) == [0, *[1] * (N - 1)]


@FROM
def test_barrier_timeout(at: Callable[..., Any], pool: ThreadPoolExecutor) -> None:
    """One whose time is over breaks it for the others, by name; ``timeout=`` of the barrier is the default."""
    barrier = Barrier(3)
    waiting = pool.submit(dt.run, Barrier.wait, barrier, node=0)
    while barrier.n_waiting < 1:
        pass
    with pytest.raises(RuntimeError, match="stopped waiting"):
        at(Barrier.wait, barrier, 0.01)
    with pytest.raises(threading.BrokenBarrierError, match=r"stopped waiting: its time limit"):
        barrier.wait()
    with pytest.raises(RuntimeError, match="broken"):
        waiting.result()
    with pytest.raises(RuntimeError, match="broken"):
        at(Barrier.wait, Barrier(2, timeout=0.01))


@FROM
def test_single_thread(at: Callable[..., Any]) -> None:
    assert at(lambda barrier: [barrier.wait(), barrier.wait(), barrier.wait(0)], Barrier(1)) == [0, 0, 0]


@pytest.mark.parametrize("came", [False, True])
def test_a_function_that_fails_breaks_the_barrier_that_it_has(pool: ThreadPoolExecutor, came: bool) -> None:
    def fails(barrier: Barrier, came: bool) -> None:
        if came:
            barrier.wait()
        raise ValueError("before it comes")

    barrier = Barrier(2)
    failing = pool.submit(dt.run, fails, barrier, came, node=1)
    if came:
        barrier.wait()
    with pytest.raises(threading.BrokenBarrierError, match=r"fails\(\) on node 1 has raised ValueError"):
        barrier.wait()
    with pytest.raises(ValueError, match="before it comes"):
        failing.result()


def test_refusals() -> None:
    with pytest.raises(ValueError, match="must be > 0"):
        Barrier(0)
    with pytest.raises(TypeError, match="a number of parties"):
        Barrier(1.5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="takes a function"):
        Barrier(1, 3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="not negative"):
        Barrier(1).wait(-1)
    for make in (Lock, lambda: Barrier(2), Channel):
        with pytest.raises(dt.DisttensorError, match="is made by the script"):
            dt.run(make, node=0)
