"""Fetches that are waited for later, on in-process nodes and on real ones; uploads that nobody waits for."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from equal import bits
from test_flow import DTYPES, LAYOUTS, Busy

import disttensor as dt
from disttensor import testing

#: Seconds for what takes a moment; longer is a hang.
SOON = 20
#: Commands in flight to a node, and bytes of copies under way, at most.
WINDOW, STAGE = int(testing.limit("window")), int(testing.limit("staged"))


pytestmark = pytest.mark.usefixtures("calm")


def failing(node: int = 1) -> torch.Tensor:
    table, index = torch.ones(3, 2).to(f"node:{node}"), torch.tensor([7]).to(f"node:{node}")
    return torch.nn.functional.embedding(index, table)


# ---- what it gives ---------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
def test_as_cpu(dtype: torch.dtype) -> None:
    source = torch.randint(0, 2 if dtype == torch.bool else 100, (6, 8)).to(dtype).to("node:1")
    works = {name: dt.fetch(layout(source)) for name, layout in LAYOUTS.items()}
    for name, work in works.items():
        expected = LAYOUTS[name](source).cpu()
        assert work.result().stride() == expected.stride(), name
        assert work.result().dtype == dtype
        assert bits(work.result()) == bits(expected), name


def test_conjugates_and_what_needs_a_gradient() -> None:
    x = torch.randn(3, 2, dtype=torch.complex64, device="node:0", requires_grad=True)
    fetched = dt.fetch(x.t().conj()).result()
    assert torch.equal(fetched, x.detach().cpu().t().conj())
    assert not fetched.requires_grad
    assert dt.fetch(x).result() is not None
    work = dt.fetch(x)
    assert work.result() is work.result()


def test_a_local_tensor_is_refused() -> None:
    with pytest.raises(TypeError, match="fetch takes a tensor on a node, not a Tensor"):
        dt.fetch(torch.ones(3))


@pytest.mark.parametrize("n", [3, 1 << 20])
def test_it_holds_what_the_tensor_held_then(n: int) -> None:
    x = torch.zeros(n, device="node:0")
    works = []
    for _ in range(20):
        works.append(dt.fetch(x))
        x += 1
    assert [work.result().unique().tolist() for work in works] == [[i] for i in range(20)]


def test_it_says_what_it_is() -> None:
    work = dt.fetch(torch.ones(2, 3, device="node:1"))
    work.wait()
    assert repr(work) == "<Work done: (2, 3) torch.float32 from node 1>"


# ---- waiting ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("timeout", [0.01, timedelta(milliseconds=10)], ids=["seconds", "timedelta"])
def test_a_time_limit_ends_the_waiting_and_not_the_work(timeout: float | timedelta, tmp_path: Path) -> None:
    x = torch.ones(3, device="node:1")
    with Busy(1, tmp_path) as busy:
        work = dt.fetch(x)
        for wait in (work.wait, work.result, work.exception):
            with pytest.raises(TimeoutError, match="node 1"):
                wait(timeout)
        assert not work.is_completed()
        busy.release()
        assert work.wait(SOON)
    assert work.exception() is None
    assert work.result().tolist() == [1, 1, 1]


def test_a_signal_ends_the_waiting_and_not_the_work(tmp_path: Path) -> None:
    class Interrupted(Exception):
        pass

    def handler(number: int, frame: object) -> None:
        raise Interrupted

    x, before = torch.ones(3, device="node:1"), signal.signal(signal.SIGUSR1, handler)
    killer = threading.Thread(target=os.kill, args=(os.getpid(), signal.SIGUSR1))

    def interrupt() -> None:
        if threading.current_thread() is threading.main_thread():
            killer.start()

    try:
        with Busy(1, tmp_path) as busy:
            work = dt.fetch(x)
            with testing.at("wait", interrupt), pytest.raises(Interrupted):
                work.wait()
            assert busy.running
            assert not work.is_completed()
        assert work.result().tolist() == [1, 1, 1]
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_more_than_a_window_of_them() -> None:
    """Nothing waits for the script to look at what has come."""
    x = [torch.zeros(1, device=f"node:{node}") for node in range(2)]
    works = [dt.fetch(x[i % 2] + i) for i in range(WINDOW)]
    assert [work.result().item() for work in works] == list(range(WINDOW))


def test_many_large_ones() -> None:
    x = torch.zeros(40_000, device="node:0")
    works = [dt.fetch(x + i) for i in range(1000)]
    for i, work in reversed(list(enumerate(works))):
        assert work.result()[-1].item() == i


@pytest.mark.parametrize("n", [3, 1 << 22])
def test_threads_wait_for_one(n: int) -> None:
    work = dt.fetch(torch.ones(n, device="node:0"))
    seen = []
    threads = [threading.Thread(target=lambda: seen.append(work.result())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SOON)
    assert len(seen) == 8
    assert all(value is work.result() for value in seen)


def test_after_synchronize_all_have_come() -> None:
    works = [dt.fetch(torch.ones(1 << 22, device=f"node:{i % 2}")) for i in range(6)]
    dt.synchronize()
    assert [work.is_completed() for work in works] == [True] * 6


# ---- failures --------------------------------------------------------------------------------------------------------


def test_a_failure_is_the_original_one_with_its_line() -> None:
    work = dt.fetch(failing() * 2)
    with pytest.raises(IndexError, match=r"aten::embedding on node 1 [^$]*test_work.py:\d+ in failing"):
        work.wait()
    with pytest.raises(IndexError, match="out of range"):
        work.result()
    assert type(work.exception()) is IndexError
    dt.synchronize()  # it was said


def test_a_failure_that_nobody_asked_for_is_said_later() -> None:
    dt.fetch(failing())
    with pytest.raises(IndexError):
        dt.synchronize()


def test_awaiting_a_failure() -> None:
    async def program() -> None:
        with pytest.raises(IndexError, match="out of range"):
            await dt.fetch(failing())
        work = dt.fetch(failing())
        assert type(await asyncio.to_thread(work.exception)) is IndexError
        with pytest.raises(IndexError, match="out of range"):
            await work

    asyncio.run(program())


# ---- asyncio ---------------------------------------------------------------------------------------------------------


def test_awaiting_does_not_block_the_loop(tmp_path: Path) -> None:
    x = torch.ones(3, device="node:1")

    async def program() -> torch.Tensor:
        waiting = asyncio.ensure_future(dt.fetch(x))
        await asyncio.sleep(0)  # it waits now
        busy.release()  # which this task would not come to if the loop were blocked
        return await waiting

    with Busy(1, tmp_path) as busy:
        assert asyncio.run(program()).tolist() == [1, 1, 1]


def test_cancelling_ends_the_waiting_and_not_the_work(tmp_path: Path) -> None:
    x = torch.ones(3, device="node:1")

    async def program() -> None:
        work = dt.fetch(x)
        waiting = asyncio.ensure_future(work)
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        busy.release()
        assert (await work).tolist() == [1, 1, 1]

    with Busy(1, tmp_path) as busy:
        asyncio.run(program())


def test_a_loop_that_has_closed_meanwhile(tmp_path: Path) -> None:
    x, works = torch.ones(3, device="node:1"), list[dt.futures.Work]()

    async def program() -> None:
        works.append(dt.fetch(x))
        asyncio.ensure_future(works[0])  # noqa: RUF006 - dropped on purpose
        await asyncio.sleep(0)

    with Busy(1, tmp_path):
        asyncio.run(program())
    assert works[0].result().tolist() == [1, 1, 1]


# ---- callbacks -------------------------------------------------------------------------------------------------------


def test_callbacks_may_use_tensors_and_wait() -> None:
    x, seen, done = torch.ones(3, device="node:1"), [], threading.Event()

    def second(work: dt.futures.Work) -> None:
        seen.append((work.result().tolist(), threading.current_thread().name))
        done.set()

    def first(work: dt.futures.Work) -> None:
        seen.append((x + work.result().to("node:1")).sum().item())
        dt.fetch(x + 1).add_done_callback(second)

    work = dt.fetch(x)
    work.wait()
    work.add_done_callback(first)
    assert done.wait(SOON)
    assert seen == [6, ([2, 2, 2], "disttensor-callbacks")]


def test_a_callback_that_fails_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    done = threading.Event()
    work = dt.fetch(torch.ones(3, device="node:1"))
    work.add_done_callback(lambda work: 1 // 0)
    work.add_done_callback(lambda work: done.set())
    assert done.wait(SOON)
    assert "a done callback failed" in caplog.text


def test_a_callback_of_what_failed() -> None:
    seen, done = list[object](), threading.Event()

    def look(work: dt.futures.Work) -> None:
        seen.append(work.exception())
        done.set()

    dt.fetch(failing()).add_done_callback(look)
    assert done.wait(SOON)
    assert type(seen[0]) is IndexError


# ---- dropping --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("callback", [False, True])
def test_what_is_dropped_is_freed_when_it_has_come(callback: bool, tmp_path: Path) -> None:
    x, done = torch.ones((1 << 20) + callback, device="node:1"), threading.Event()

    def alive() -> int:
        """Local tensors of its shape."""
        gc.collect()
        return sum(type(t) is torch.Tensor and t.shape == x.shape for t in gc.get_objects())

    dt.synchronize()
    before = alive()  # the node's own, where it is in this process
    with Busy(1, tmp_path):
        work = dt.fetch(x)
        if callback:
            work.add_done_callback(lambda work: done.set())
        del work
        gc.collect()
        assert testing.queued(1).fetches == 1
    dt.synchronize()
    assert not callback or done.wait(SOON)
    dt.fetch(x[:1]).wait()  # the channel's thread holds the last one until the next
    dt.fetch(x[:1]).wait()
    assert alive() == before
    assert testing.queued().fetches == 0


# ---- uploads ---------------------------------------------------------------------------------------------------------

WAYS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "to": lambda x: x.to("node:1", non_blocking=True),
    "dist_send": lambda x: x.dist_send("node:1", non_blocking=True),
    "dist_send of a module": lambda x: _holding(x).dist_send("node:1", non_blocking=True).x,
    "to another dtype": lambda x: x.to("node:1", torch.float64, non_blocking=True),
    "copy_": lambda x: torch.empty(x.shape, device="node:1").copy_(x, non_blocking=True),
    "copy_ into a view": lambda x: torch.zeros(2, x.numel(), device="node:1")[1].copy_(x, non_blocking=True),
}


def _holding(x: torch.Tensor) -> torch.nn.Module:
    module = torch.nn.Module()
    module.register_buffer("x", x)
    return module


@pytest.mark.row("S5")
@pytest.mark.parametrize("way", WAYS)
def test_a_large_upload_returns_at_once(way: str, tmp_path: Path) -> None:
    local = torch.arange(STAGE // 4 + 1, dtype=torch.float32)
    with Busy(1, tmp_path) as busy:
        remote = WAYS[way](local)  # the node takes it only once it is released
        assert busy.running
    fetched = remote.cpu()
    assert torch.equal(fetched, local.to(fetched.dtype))


def test_uploads_whose_source_is_dropped() -> None:
    kept = [torch.full((1 << 18,), float(i)).to("node:0", non_blocking=True) for i in range(50)]
    assert [x.amin().item() for x in kept] == list(range(50))


def test_a_copy_to_the_script_waits_even_so(tmp_path: Path) -> None:
    x, target = torch.zeros(1 << 22, device="node:1"), torch.zeros(1 << 22)
    for i in range(5):
        x += 1
        assert x.to("cpu", non_blocking=True)[-1].item() == i + 1
        assert target.copy_(x, non_blocking=True)[-1].item() == i + 1


def test_modules_and_other_places() -> None:
    local = torch.nn.Linear(3, 2)
    expected = [p.detach().clone() for p in local.parameters()]
    module = local.to("node:1", non_blocking=True)
    assert all(torch.equal(p.cpu(), e) for p, e in zip(module.parameters(), expected, strict=True))
    x = torch.ones(3, device="node:0").to("node:1", non_blocking=True)
    assert x.to(torch.device("node", 0), non_blocking=True).sum().item() == 3
