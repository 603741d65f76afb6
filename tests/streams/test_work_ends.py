"""Fetches under way when the session ends or a node is lost."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import threading
from collections.abc import Callable

import pytest
import torch
from variants import variants

import disttensor as dt
from disttensor import testing

Script = Callable[..., subprocess.CompletedProcess[str]]

#: Seconds for what takes a moment; longer is a hang.
SOON = 20


def test_those_under_way_at_the_end_come() -> None:
    with dt.init_master_worker(nodes=1, threads=1):
        works = [dt.fetch(torch.full((1 << 20,), float(i), device="node:0")) for i in range(10)]
    assert [work.result()[-1].item() for work in works] == list(range(10))


@pytest.mark.parametrize("n", [1 << 20, 3])
def test_a_lost_node_ends_the_waiting(n: int) -> None:
    async def program() -> list[object]:
        return await asyncio.gather(*works, return_exceptions=True)

    with dt.init_master_worker(nodes=2, threads=1):
        x, y = torch.ones(n, device="node:1"), torch.ones(3, device="node:0")
        dt.synchronize()
        pid = int(dt.nodes()[1]["pid"])
        os.kill(pid, signal.SIGSTOP)  # it has no chance to send them
        works = [dt.fetch(x) for _ in range(50)]
        waiting: list[BaseException | None] = []
        thread = threading.Thread(target=lambda: waiting.append(works[-1].exception()))
        thread.start()
        os.kill(pid, signal.SIGKILL)
        assert {type(e) for e in asyncio.run(program())} == {dt.NodeLost}
        thread.join(SOON)
        assert [type(e) for e in waiting] == [dt.NodeLost]
        with pytest.raises(dt.NodeLost, match="SIGKILL"):
            works[0].result()
        with pytest.raises(dt.NodeLost):
            dt.fetch(x)
        assert dt.fetch(y).result().tolist() == [1, 1, 1]
        assert testing.queued().fetches == 0


@pytest.mark.parametrize("killed", [[0], [0, 1]])
def test_lost_nodes_end_what_is_awaited_in_any_order(killed: list[int]) -> None:
    with dt.init_master_worker(nodes=2, threads=1):
        xs = [torch.ones(1 << 20, device=f"node:{k}") for k in range(2)]
        dt.synchronize()
        pids = [int(dt.nodes()[k]["pid"]) for k in range(2)]
        for k in killed:
            os.kill(pids[k], signal.SIGSTOP)  # it has no chance to send them
        works = [dt.fetch(xs[k % 2]) for k in range(6)]
        for k in killed:
            os.kill(pids[k], signal.SIGKILL)
        ended = list(dt.futures.as_completed(works))
        assert len(ended) == 6
        for k, work in enumerate(works):
            assert type(work.exception()) is (dt.NodeLost if k % 2 in killed else type(None))


def test_callbacks_at_the_end_and_after_it() -> None:
    seen = []
    with dt.init_master_worker(nodes=1, launcher="inproc"):
        work = dt.fetch(torch.ones(3, device="node:0"))
        work.add_done_callback(lambda work: seen.append("before"))
        work.wait()
        work.add_done_callback(lambda work: dt.shutdown())  # in its own thread, which it mustn't wait for
        while dt.session.is_initialized():
            threading.Event().wait(0.01)
    ended = threading.Event()
    work.add_done_callback(lambda work: (seen.append("after"), ended.set()))
    assert ended.wait(20)  # the thread of callbacks may still be at the shutdown
    assert seen == ["before", "after"]


def test_a_node_that_is_lost_while_batches_are_on_their_way() -> None:
    seen = 0
    with dt.init_master_worker(nodes=2, threads=1):
        with pytest.raises(dt.NodeLost, match="SIGKILL"):  # noqa: PT012
            for x in dt.data.prefetch((torch.ones(1 << 20) for _ in range(1000)), "node:1"):
                assert x[-1].item() == 1
                seen += 1
                if seen == 3:
                    os.kill(int(dt.nodes()[1]["pid"]), signal.SIGKILL)
        assert seen >= 3


INTERRUPTED = """
import os, random, signal, sys, threading, torch, disttensor as dt
from disttensor import testing

times = 40
dt.init_master_worker(nodes=2, threads=1, launcher=LAUNCHER)
batches = [torch.full((n,), float(i)) for i, n in enumerate((3, 100_000, 50, 300_000) * 3)]
seen = []

def loop():
    works = []
    for i, x in enumerate(dt.data.prefetch(batches, "node:1")):
        work = dt.fetch(x.to("node:0") + 1)
        work.add_done_callback(lambda work: seen.append(work.result()[0].item()))
        works.append((i, work))
        if len(works) > 3:
            i, work = works.pop(0)
            assert work.result()[-1].item() == i + 1

loop()
armed, rng = threading.Semaphore(0), random.Random(1)

def interrupt():
    for _ in range(times):
        armed.acquire()
        threading.Event().wait(rng.uniform(0, 0.02))
        os.kill(os.getpid(), signal.SIGINT)

threading.Thread(target=interrupt, daemon=True).start()
hits = 0
for i in range(times):
    try:
        armed.release()
        while True:
            loop()
    except KeyboardInterrupt:
        hits += 1
    loop()
dt.synchronize()
print(hits, "of", times, testing.queued().fetches, testing.queued().uploads)
dt.shutdown()
"""


@pytest.mark.parametrize("launcher", variants(["local", "inproc"]))
def test_interrupts_at_any_moment(script: Script, launcher: str) -> None:
    done = script(INTERRUPTED.replace("LAUNCHER", repr(launcher)))
    assert (done.returncode, done.stdout) == (0, "40 of 40 0 0\n"), done.stderr[-3000:]
    assert done.stderr == ""
