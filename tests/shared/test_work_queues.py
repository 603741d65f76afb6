"""Queues of work between the script and functions on nodes: with the same meaning from everywhere.

The names in brackets are those of torch-ipc's own cases (its test/test_workqueue.lua), all of which are here but
``testMetaTables``: an item has no objects of users' classes, which is refused in words. Its owner is the script, and
``q:read`` of the owner's is ``answers.get`` here; ``q:drain`` is ``join``.
"""

from __future__ import annotations

import functools
import math
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from everywhere import FROM, here, on_node

import disttensor as dt
from disttensor.tasks import Barrier, Channel, Dropped, ShutDown, WorkQueue

pytestmark = pytest.mark.row("I21")


@pytest.fixture(scope="module", autouse=True)
def reached(either: None) -> None:
    """Each node has its connection before the tests look for leaks."""
    for node in range(2):
        assert dt.run(WorkQueue.qsize, WorkQueue(), node=node) == 0


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(6) as made:
        yield made


def echo(q: WorkQueue) -> int:
    """Gives back what it gets, with what torch-ipc's changes in it; returns how many that were."""
    count = 0
    for item in q:
        if isinstance(item, torch.Tensor) and item.numel() == 1:
            item.fill_(13)
        elif isinstance(item, dict) and isinstance(item.get("f"), torch.Tensor):
            item["f"].fill_(42)
        q.task_done(item(2.0, 3.0, 6.0) if callable(item) else item)
        count += 1
    return count


TABLE = {"k0": True, "k1": 23.45, "k2": "hey", "k3": [1, 2, "yo"], "k4": {"a": 1}, "k5": {"a": {"b": 2}}}
#: [testBooleans, testNumbers, testStrings, testArrays, testTables]
PLAIN = [True, False, 42.13, "hey man what's up with that code?", [1, 2, 73.86, "hello", True, "bye"], TABLE, None]


@FROM
def test_what_is_put_comes_back_as_an_answer(at: Callable[..., Any], pool: ThreadPoolExecutor) -> None:
    """[testTensors, testTensorsTwoWay, testTensorsInTable, testMultiWrite, and those of PLAIN] One worker: in order."""
    q, numbers = WorkQueue(), torch.randn(10)
    worker = pool.submit(at, echo, q)
    q.put_many([*PLAIN, *range(13)])
    q.put_many([numbers, torch.zeros(1), {"f": torch.zeros(1)}])
    q.close()
    answers = list(q.answers)
    count = len(PLAIN) + 13
    assert answers[:count] == [*PLAIN, *range(13)]
    assert [type(x) for x in answers[: len(PLAIN)]] == [type(x) for x in PLAIN]
    assert torch.equal(answers[count], numbers)
    assert answers[count + 1].item() == 13
    assert answers[count + 2]["f"].item() == 42
    assert worker.result() == count + 3


def test_functions_of_the_script_s(pool: ThreadPoolExecutor) -> None:
    """[testFunctions, testClosures]: also those that have variables; what a node puts in may have none."""
    q, bias = WorkQueue(), 3

    def closure(a: float, b: float, c: float) -> float:
        return bias + math.sqrt(a * a + b * b + c * c)

    worker = pool.submit(on_node, echo, q)
    q.put_many([closure, functools.partial(lambda by, *abc: by * sum(abc), 2), math.hypot])
    assert [q.answers.get() for _ in range(3)] == [10.0, 22.0, 7.0]

    def puts(q: WorkQueue) -> str:
        try:
            q.put(lambda: 0)
        except TypeError as e:
            return str(e)
        return ""

    refused = WorkQueue()
    if dt.nodes()[1]["pid"] != dt.nodes()[0]["pid"]:  # where nodes are threads, they are the script
        assert "builtins.function" in dt.run(puts, refused, node=0)
        assert refused.qsize() == 0
    on_a_node = torch.ones(1, device="node:0")
    for bad in (lambda: on_a_node, functools.partial(print, threading.Lock())):
        with pytest.raises(
            TypeError, match=r"a function in an item of <WorkQueue \d+> can't be sent to whichever node"
        ):
            q.put(bad)
    q.close()
    assert worker.result() == 3


@FROM
def test_join_waits_until_all_is_done(at: Callable[..., Any], pool: ThreadPoolExecutor) -> None:
    """[testDrain]: the answers are there then."""
    q = WorkQueue()
    q.put_many(range(1, 14))
    assert q.unfinished_tasks == 13
    with pytest.raises(TimeoutError, match=r"not all was done within 0\.01 s"):
        q.join(timeout=0.01)
    joined = pool.submit(at, WorkQueue.join, q)
    worker = pool.submit(on_node, echo, q) if at is here else pool.submit(dt.run, echo, q, node=0)
    joined.result()
    assert [q.answers.get_nowait() for _ in range(13)] == list(range(1, 14))
    with pytest.raises(queue.Empty):
        q.answers.get_nowait()
    assert q.unfinished_tasks == 0
    q.close()
    assert worker.result() == 13


@FROM
def test_room(at: Callable[..., Any], pool: ThreadPoolExecutor) -> None:
    """[testDualStalls]: who puts waits for who works, and both go on; what is leased takes no room."""
    q = WorkQueue(maxsize=2)
    q.put_many("ab")
    assert q.full()
    with pytest.raises(queue.Full):
        q.put_nowait("c")
    with pytest.raises(queue.Full):
        q.put("c", timeout=0.01)
    feeding = pool.submit(at, WorkQueue.put_many, q, list(range(100)))
    worker = pool.submit(dt.run, echo, q, node=0)
    feeding.result()
    q.join()
    assert q.empty()
    q.close()
    assert worker.result() == 102
    assert list(q.answers) == ["a", "b", *range(100)]


def test_a_queue_and_a_barrier_as_arguments(pool: ThreadPoolExecutor) -> None:
    """[testAnon]: what is done after the queue was closed reaches nobody, and disturbs nobody."""

    def work(q: WorkQueue, barrier: Barrier) -> str:
        q.task_done(q.get() + 1)
        q.get()
        barrier.wait()
        try:
            q.task_done(True)
        except ShutDown:
            return "closed"
        return ""

    q, barrier = WorkQueue(), Barrier(2)
    worker = pool.submit(on_node, work, q, barrier)
    q.put(0)
    assert q.answers.get() == 1
    q.put(False)
    q.close()
    q.answers.close()
    barrier.wait()
    assert worker.result() == "closed"
    q.join()


def test_it_is_found_by_its_name() -> None:
    """[testCheckCreator]: the script makes it; others find it, the last one of that name, and never make one."""

    def find(kind: Any, name: str) -> Any:
        try:
            return kind.named(name).put("found")
        except LookupError as e:
            return str(e)

    first, q, channel = WorkQueue(name="jobs"), WorkQueue(name="jobs"), Channel(name="jobs")
    assert WorkQueue.named("jobs") is q
    for node in range(2):
        dt.run(find, WorkQueue, "jobs", node=node)
        dt.run(find, Channel, "jobs", node=node)
    assert (first.qsize(), q.qsize(), channel.qsize()) == (0, 2, 2)
    late = WorkQueue(name="made later")
    dt.run(find, WorkQueue, "made later", node=1)
    assert late.get() == "found"
    late.task_done()
    for lost in (on_node(find, WorkQueue, "nobody's"), find(WorkQueue, "nobody's")):
        assert lost == "no WorkQueue has the name \"nobody's\"; there are 'jobs', 'made later'"
    with pytest.raises(TypeError, match=r"WorkQueue\(name=3\) takes a text"):
        WorkQueue(name=3)  # type: ignore[arg-type]


def test_every_item_is_one_worker_s(pool: ThreadPoolExecutor) -> None:
    q = WorkQueue()
    workers = [pool.submit(dt.run, echo, q, node=node) for node in range(2)] + [pool.submit(echo, q)]
    feeding = [pool.submit(q.put_many, range(100 * i, 100 * i + 100)) for i in range(3)]
    for fed in feeding:
        fed.result()
    q.close()
    assert sorted(q.answers) == list(range(300))
    assert sum(worker.result() for worker in workers) == 300


def leaves(q: WorkQueue, how: str) -> Any:
    item = q.get()
    if how == "raises":
        raise ValueError(item)
    if how == "is interrupted":
        raise KeyboardInterrupt
    return item  # without task_done


def ended(at: Callable[..., Any], *args: Any) -> None:
    """Runs a function, and lets it end as it likes."""
    thread = threading.Thread(target=lambda: at(leaves, *args))
    hook, threading.excepthook = threading.excepthook, lambda _: None
    thread.start()
    thread.join()
    threading.excepthook = hook


@FROM
@pytest.mark.parametrize("how", ["raises", "returns"])
def test_an_item_that_was_not_done_is_the_next_one_again(at: Callable[..., Any], how: str) -> None:
    """And after so many tries it is given up: who waits is told once, with the item; nothing is lost in silence."""
    q = WorkQueue(tries=2)
    q.put_many(["poison", "good"])
    ended(at, q, how)
    assert q.qsize() == 2
    assert q.get() == "poison"
    with pytest.raises(queue.Empty):
        q.answers.get_nowait()
    q.task_done("done the second time")
    ended(at, q, how)
    ended(at, q, how)
    assert q.unfinished_tasks == 0
    q.close()
    assert q.answers.get() == "done the second time"
    # of a thread nobody knows how it ended
    what = "raised ValueError" if how == "raises" and at is on_node else r"ended without task_done\(\)"
    with pytest.raises(Dropped, match=rf"item 1 was tried 2 times, and is given up: .* {what}; .* {what}$") as given_up:
        q.answers.get()
    assert given_up.value.item == "good"
    with pytest.raises(ShutDown):
        q.answers.get()
    q.join()


def test_who_joins_is_told_of_what_was_given_up() -> None:
    q = WorkQueue(tries=1)
    q.put([torch.arange(3)])
    ended(on_node, q, "raises")
    with pytest.raises(Dropped, match=r"tried 1 times.*leaves\(\) on node 1 raised ValueError") as given_up:
        q.join()
    assert torch.equal(given_up.value.item[0], torch.arange(3))
    q.join()
    assert q.empty()


def test_the_oldest_lease_is_done_first() -> None:
    q = WorkQueue()
    q.put_many("abc")
    assert [q.get(), q.get()] == ["a", "b"]
    q.task_done()
    ended(on_node, q, "raises")  # c
    assert q.get() == "c"
    q.task_done("b is done")
    q.task_done("c is done")
    assert [q.answers.get(), q.answers.get()] == ["b is done", "c is done"]
    assert q.unfinished_tasks == 0


@FROM
def test_its_ends(at: Callable[..., Any]) -> None:
    def ends(q: Any) -> list[str]:
        said = []
        for ask in (
            q.task_done,
            lambda: q.get_nowait(),
            lambda: q.get(timeout=0.01),
            lambda: q.get(timeout=-1),
            lambda: q.put(object()),
            lambda: [q.close(), q.close(), q.put(1)],
            lambda: q.get(),
            q.join,
        ):
            try:
                ask()
            except Exception as e:
                said.append(f"{type(e).__name__}: {e}"[:70])
            else:
                said.append("")
        return said

    q = WorkQueue(name="ends")
    assert [text.partition(":")[0] for text in at(ends, q)] == [
        "ValueError", "Empty", "Empty", "ValueError", "TypeError", "ShutDown", "ShutDown", "",
    ]  # fmt: skip
    assert q.closed
    with pytest.raises(ShutDown):
        q.answers.get()


def test_a_close_at_once_drops_what_nobody_has() -> None:
    q = WorkQueue()
    q.put_many("abc")
    assert q.get() == "a"
    q.close(immediate=True)
    assert q.unfinished_tasks == 1
    assert not q.answers.closed
    q.task_done("the last")
    assert list(q.answers) == ["the last"]


def test_a_result_that_is_none_leaves_the_item_leased() -> None:
    q = WorkQueue()
    q.put(1)
    q.get()
    for bad in (object(), torch.ones(1).to_sparse()):
        with pytest.raises(TypeError):
            q.task_done(bad)
    assert q.unfinished_tasks == 1
    q.task_done(None)
    assert q.answers.get() is None


@pytest.mark.parametrize(
    ("made", "error", "match"),
    [
        (lambda: WorkQueue(maxsize="x"), TypeError, r"WorkQueue\(maxsize='x'\) takes a number"),  # type: ignore[arg-type]
        (lambda: WorkQueue(tries=True), TypeError, r"WorkQueue\(tries=True\) takes a number"),
        (lambda: WorkQueue(tries=0), ValueError, "an item is tried once at least"),
        (lambda: on_node(WorkQueue), dt.DisttensorError, "a WorkQueue is made by the script"),
    ],
)
def test_refusals(made: Callable[[], Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        made()


def test_a_queue_through_a_queue(pool: ThreadPoolExecutor) -> None:
    """A question comes with where its answer goes: the queue is the same one for whoever gets it."""
    outer, inner = WorkQueue(), WorkQueue(maxsize=7, tries=2, name="inner")

    def work(outer: WorkQueue) -> list[Any]:
        inner = outer.get()["q"]
        inner.put("from a node")
        outer.task_done([inner])
        return [inner.maxsize, inner.tries, inner.name]

    outer.put({"q": inner})
    assert on_node(work, outer) == [7, 2, "inner"]
    (back,) = outer.answers.get()
    assert back.get() == "from a node"
    back.task_done("done")
    assert inner.answers.get() == "done"
