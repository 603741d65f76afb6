"""Queues of work and dictionaries when something ends: a node in the middle of its work, a function, the session."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from everywhere import await_waits

import disttensor as dt
from disttensor.tasks import Channel, Dropped, Lock, SharedDict, ShutDown, WorkQueue


@pytest.fixture
def session() -> Iterator[None]:
    with dt.init_master_worker(nodes=3, threads=1):
        yield


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as made:
        yield made


def has_one(q: WorkQueue, told: Channel) -> None:
    """Gets an item, says so, and does not get further."""
    told.put([q.get(), os.getpid()])
    q.join()  # what it has is not done


def square(q: WorkQueue) -> int:
    count = 0
    for x in q:
        q.task_done(x * x)
        count += 1
    return count


def killed_with_an_item(q: WorkQueue, told: Channel, node: int) -> Any:
    work = dt.submit(has_one, q, told, node=node)
    item, pid = told.get()
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(dt.NodeLost):
        work.result()
    return item


def square_after(q: WorkQueue, told: Channel, go: Lock) -> int:
    x = q.get()
    told.put(x)
    with go:  # who waits for a lock is told of no loss
        q.task_done(x * x)
    return 1 + square(q)


@pytest.mark.row("I21")
def test_what_a_killed_node_had_is_done_by_another(session: None, pool: ThreadPoolExecutor) -> None:
    """And nobody else is told: the answers are all there, and each once."""
    q, told, go = WorkQueue(), Channel(), Lock()
    go.acquire()
    q.put_many(range(20))
    worker = dt.submit(square_after, q, told, go, node=2)
    assert told.get() == 0
    done = [pool.submit(lambda: sorted(q.answers)), pool.submit(q.join), pool.submit(dt.run, WorkQueue.join, q, node=0)]
    await_waits(q, 4)
    assert killed_with_an_item(q, Channel(), 1) == 1
    q.close()
    go.release()
    assert worker.result() == 20
    assert [work.result() for work in done] == [[i * i for i in range(20)], None, None]


def test_an_item_that_kills_is_given_up(session: None) -> None:
    """What each node that takes it is lost with is not given to all of them."""
    q, told = WorkQueue(tries=2), Channel()
    q.put_many(["kills", 5])
    q.close()
    assert killed_with_an_item(q, told, 1) == "kills"
    assert killed_with_an_item(q, Channel(), 2) == "kills"
    assert dt.run(square, q, node=0) == 1
    got = [q.answers.get()]
    how = r"has_one\(\) on node 1 had it when its node was lost; has_one\(\) on node 2 had"
    with pytest.raises(Dropped, match=rf"item 0 was tried 2 times, and is given up: {how}"):
        got += q.answers
    assert got == [25]
    q.join()


def test_who_waits_when_the_last_worker_is_lost_is_told(session: None, pool: ThreadPoolExecutor) -> None:
    q, told = WorkQueue(), Channel()
    q.put(1)
    waiting = [pool.submit(q.join), pool.submit(q.answers.get)]
    await_waits(q, 2)
    assert killed_with_an_item(q, told, 1) == 1
    for work in waiting:
        with pytest.raises(dt.NodeLost, match="node 1"):
            work.result()
    q.close()
    assert dt.run(square, q, node=0) == 1
    assert list(q.answers) == [1]
    q.join()


@pytest.mark.parametrize("beside", [False, True])
def test_a_function_that_is_interrupted_gives_back_what_it_has(
    session: None, pool: ThreadPoolExecutor, beside: bool
) -> None:
    """That is no try; and one that waits for an item has none."""
    q, told = WorkQueue(tries=1), Channel()
    q.put("x")
    for _ in range(2):
        work = dt.submit(has_one, q, told, node=1, beside=beside)
        assert told.get()[0] == "x"
        assert q.empty()
        assert work.cancel()
        with pytest.raises(dt.errors.CancelledError):
            work.result()
        assert q.qsize() == 1
    assert q.get() == "x"
    work = dt.submit(has_one, q, told, node=1, beside=beside)
    await_waits(q, 1)
    work.cancel()
    with pytest.raises(dt.errors.CancelledError):
        work.result()
    q.put("y")
    assert q.get_nowait() == "y"


def test_a_node_that_is_lost_before_anybody_worked_is_told(session: None) -> None:
    """It may have been the one that was to do it."""
    q = WorkQueue()
    q.put(1)
    dt.run(WorkQueue.qsize, q, node=1)
    dt.kill(1)
    with pytest.raises(dt.NodeLost):
        q.join()
    with pytest.raises(TimeoutError):
        q.join(timeout=0.01)
    dt.synchronize()  # the loss was told before
    q.close()
    assert dt.run(square, q, node=0) == 1  # and who waits for answers need not be told: somebody works
    assert list(q.answers) == [1]


@pytest.mark.row("I23")
def test_a_node_is_killed_while_others_wait_for_a_key(session: None, pool: ThreadPoolExecutor) -> None:
    """Who waits is told, in the script and on another node; what the node has set is there."""
    t = SharedDict()

    def sets(t: Any) -> None:
        t["pid"] = os.getpid()
        threading.Event().wait()

    def waits(t: Any) -> list[int]:
        try:
            t.wait("never")
        except dt.NodeLost as e:
            t["told"] = e.rank
        return [t["told"]]

    work, other = dt.submit(sets, t, node=1), dt.submit(waits, t, node=2)
    waiting = pool.submit(t.wait, "never")
    pid = t.wait("pid")
    await_waits(t, 2)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(dt.NodeLost):
        waiting.result()
    with pytest.raises(dt.NodeLost):
        work.result()
    assert other.result() == [1]
    assert dict(t) == {"pid": pid, "told": 1}


def test_the_end_of_the_session_ends_waits(pool: ThreadPoolExecutor) -> None:
    with dt.init_master_worker(nodes=1, threads=1):
        q, t = WorkQueue(), SharedDict({"k": 1})
        q.put(1)
        waiting = [pool.submit(q.join), pool.submit(q.answers.get), pool.submit(t.wait, "x")]
        await_waits(q, 3)
    for work in waiting:
        with pytest.raises(dt.DisttensorError, match="the session has ended"):
            work.result()
    for ask in (lambda: q.put(2), q.get, lambda: t["k"], lambda: list(t)):
        with pytest.raises(dt.DisttensorError, match="the session has ended"):
            ask()


def test_ctrl_c_ends_a_wait_and_nothing_is_taken(session: None) -> None:
    q, t = WorkQueue(), SharedDict()

    def press() -> None:
        await_waits(q)
        os.kill(os.getpid(), signal.SIGINT)

    for wait in (q.get, lambda: t.wait("x")):
        thread = threading.Thread(target=press)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            wait()
        thread.join()
    q.put(1)
    thread = threading.Thread(target=press)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        q.join()
    thread.join()
    t["x"] = 2
    assert q.qsize() == 1
    q.close(immediate=True)
    with pytest.raises(ShutDown):
        q.get()


def find(name: str) -> int:
    return WorkQueue.named(name).qsize()


def test_names_end_with_their_session() -> None:
    """Also where nodes are threads of a process that goes on."""
    with dt.init_master_worker(nodes=1, threads=1, launcher="inproc"):
        WorkQueue(name="x").put(1)
        assert dt.run(find, "x", node=0) == 1
    none = pytest.raises(LookupError, match="no WorkQueue has the name 'x'; the script makes it, with that name")
    with dt.init_master_worker(nodes=1, threads=1, launcher="inproc"), none:
        dt.run(find, "x", node=0)
