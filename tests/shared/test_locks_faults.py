"""Locks and barriers when something ends in the middle: a node, a function that is cancelled, the session."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

import disttensor as dt
from disttensor.tasks import Barrier, Channel, Lock


@pytest.fixture
def session() -> Iterator[None]:
    with dt.init_master_worker(nodes=2, threads=1):
        yield


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as made:
        yield made


def holds_for_ever(lock: Lock, told: Channel) -> None:
    lock.acquire()
    told.put(os.getpid())
    signal.pause()


def waits(lock: Lock, told: Channel) -> object:
    told.put("waits")
    with lock:
        return lock.abandoned


@pytest.mark.row("I24")
def test_a_node_is_killed_with_the_lock(session: None, pool: ThreadPoolExecutor) -> None:
    """Who waits gets it, on another node and in the script, in order, and knows whose it was."""
    lock, told = Lock(), Channel()
    killed = pool.submit(dt.run, holds_for_ever, lock, told, node=1)
    pid = told.get()
    other = pool.submit(dt.run, waits, lock, told, node=0)
    assert told.get() == "waits"
    os.kill(pid, signal.SIGKILL)
    assert other.result() == "holds_for_ever() on node 1 had it, and that node is gone"
    with pytest.raises(dt.NodeLost):
        killed.result()
    assert lock.acquire(timeout=30)
    assert lock.abandoned is None  # the one before has released it
    lock.release()


def test_a_node_is_killed_that_waits_for_a_lock(session: None, pool: ThreadPoolExecutor) -> None:
    """Nobody gives it to the dead."""
    lock, told = Lock(), Channel()
    lock.acquire()

    def tells(lock: Lock, told: Channel) -> None:
        told.put(os.getpid())
        lock.acquire()

    killed = pool.submit(dt.run, tells, lock, told, node=1)
    pid = told.get()
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(dt.NodeLost):
        killed.result()
    lock.release()
    assert dt.run(waits, lock, told, node=0) is None


@pytest.mark.row("I24")
@pytest.mark.parametrize("came", [True, False])
def test_a_node_is_killed_for_which_a_barrier_waits(session: None, pool: ThreadPoolExecutor, came: bool) -> None:
    barrier, told = Barrier(3 + came), Channel()

    def arrives(barrier: Barrier, told: Channel, came: bool) -> int:
        told.put(os.getpid())
        if not came:
            signal.pause()
        return barrier.wait()

    killed = pool.submit(dt.run, arrives, barrier, told, came, node=1)
    pid = told.get()
    other = pool.submit(dt.run, arrives, barrier, told, True, node=0)
    told.get()
    while barrier.n_waiting < 1 + came:
        pass
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(threading.BrokenBarrierError, match="node 1"):
        barrier.wait()
    with pytest.raises(RuntimeError, match=r"broken.*node 1"):
        other.result()
    with pytest.raises(dt.NodeLost):
        killed.result()
    assert barrier.broken
    barrier.reset()  # it goes on with others
    others = [pool.submit(dt.run, arrives, barrier, told, True, node=0)]
    others += [pool.submit(arrives, barrier, told, True) for _ in range(1 + came)]
    assert sorted([barrier.wait(), *(one.result() for one in others)]) == [*range(3 + came)]


def test_a_function_that_waits_is_cancelled(session: None, pool: ThreadPoolExecutor) -> None:
    """It takes no lock with it; a barrier is broken, by name."""
    lock, barrier, told = Lock(), Barrier(2), Channel()
    lock.acquire()
    one = pool.submit(dt.run, waits, lock, told, node=1)
    told.get()
    assert dt.tasks.interrupt(1) == 1
    with pytest.raises(dt.errors.CancelledError):
        one.result()
    lock.release()
    assert dt.run(waits, lock, told, node=0) is None
    one = pool.submit(dt.run, Barrier.wait, barrier, node=1)
    while barrier.n_waiting < 1:
        pass
    assert dt.tasks.interrupt(1) == 1
    with pytest.raises(dt.errors.CancelledError):
        one.result()
    with pytest.raises(threading.BrokenBarrierError, match=r"Barrier.wait\(\) on node 1"):
        barrier.wait()


def test_a_function_is_cancelled_with_the_lock(session: None, pool: ThreadPoolExecutor) -> None:
    lock, told = Lock(), Channel()
    one = pool.submit(dt.run, holds_for_ever, lock, told, node=1)
    told.get()
    assert dt.tasks.interrupt(1) == 1
    with pytest.raises(dt.errors.CancelledError):
        one.result()
    assert lock.acquire(blocking=False)
    assert lock.abandoned == "holds_for_ever() on node 1 ended with it"


def test_ctrl_c_ends_waits_of_the_script(session: None) -> None:
    lock, barrier, told = Lock(), Barrier(2), Channel()
    main = threading.get_ident()

    def strike() -> None:
        while barrier.n_waiting < 1:
            pass
        signal.pthread_kill(main, signal.SIGINT)

    striking = threading.Thread(target=strike)
    striking.start()
    with pytest.raises(KeyboardInterrupt):
        barrier.wait()
    striking.join()
    assert barrier.broken
    assert dt.run(waits, lock, told, node=0) is None


def test_the_end_of_the_session(pool: ThreadPoolExecutor) -> None:
    with dt.init_master_worker(nodes=1, threads=1):
        lock, barrier = Lock(), Barrier(2)
        lock.acquire()
        waiting = [pool.submit(lock.acquire), pool.submit(barrier.wait)]
        while barrier.n_waiting < 1:
            pass
    for one in waiting:
        with pytest.raises(dt.DisttensorError, match="the session has ended"):
            one.result()
    with pytest.raises(dt.DisttensorError, match="the session has ended"):
        lock.release()
    for make in (Lock, lambda: Barrier(2)):
        with pytest.raises(dt.DisttensorError, match="no session"):
            make()
