"""Ends that meet a busy stream: of a session, a node, a wait, of tensors. Nothing hangs, and nothing is left behind."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import threading
from collections.abc import Callable

import pytest
import torch
from equal import same
from stream_kit import busy, held, hold, release, run_on, thread
from variants import variants

import disttensor as dt
from disttensor.session import current


def held_up(stream: dt.Stream, name: str) -> None:
    with contextlib.suppress(dt.DisttensorError):
        run_on(stream, hold, name)


@pytest.mark.parametrize("launcher", ["inproc", "local"])
def test_the_end_of_a_session_with_a_busy_stream(launcher: str) -> None:
    """An exception ends the block; what is queued is not done any more, and no thread stays."""
    name = f"end-{launcher}"
    threads: list[threading.Thread] = []

    def end() -> None:
        with dt.init_master_worker(nodes=2, launcher=launcher):
            s, t = dt.Stream(0), dt.Stream(1)
            x = torch.ones(3, device="node:0")
            threads.append(thread(held_up, s, name))
            assert dt.run(held, name, node=0)
            with dt.stream(s):
                y = x + 1
            t.wait_stream(s)
            with dt.stream(t):
                y.to("node:1").mul_(2)
            if launcher == "inproc":  # a thread of this process ends with what it is at
                threads.append(thread(release, name))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        end()
    for ending in threads:
        ending.join()


def test_a_node_with_a_busy_stream_is_lost() -> None:
    def wait(stream: dt.Stream) -> None:
        with pytest.raises(dt.NodeLost):
            stream.synchronize()
        waited.append(True)

    waited: list[bool] = []
    with dt.init_master_worker(nodes=2, threads=1):
        s, t, u = dt.Stream(0), dt.Stream(1), dt.Stream(1)
        kept = torch.ones(2, device="node:1")
        holder = thread(held_up, s, "lost")
        assert dt.run(held, "lost", node=0)
        waiting = thread(wait, s)
        t.wait_stream(s)
        with dt.stream(t):
            x = kept * 2
        os.kill(int(dt.nodes()[0]["pid"]), signal.SIGKILL)
        waiting.join()
        holder.join()
        assert waited == [True]
        with dt.stream(u):
            same(kept * 3, torch.full((2,), 3.0))
        with pytest.raises(dt.NodeLost):
            dt.Stream(0)
        with pytest.raises(dt.NodeLost):
            s.query()
        same(x, torch.full((2,), 2.0))  # what was waited for will not come, and the stream goes on
        t.synchronize()  # by the loss, which was told before


@pytest.mark.parametrize("launcher", ["inproc", "local"])
def test_a_stream_that_is_dropped_at_work_is_waited_for(launcher: str) -> None:
    with dt.init_master_worker(nodes=1, launcher=launcher):
        x, other, session = torch.ones(3, device="node:0"), dt.Stream(0), current.session()
        with busy(other) as let_go:
            dropped = dt.Stream(0)
            dropped.wait_event(other.record_event())
            with dt.stream(dropped):
                y = x + 1
            del dropped
            with pytest.raises(TimeoutError):
                session.synchronize(timeout=0.2)
            let_go()
        session.synchronize(timeout=20)
        same(y, torch.full((3,), 2.0))


def test_a_stream_does_not_outlive_its_session() -> None:
    with dt.init_master_worker(nodes=1, launcher="inproc"):
        s, event = dt.Stream(), dt.Event()
        event.record(s)
    with dt.init_master_worker(nodes=1, launcher="inproc"):
        with pytest.raises(dt.DisttensorError, match="shut down"), dt.stream(s):
            pass
        for use in (s.synchronize, s.query, event.wait, event.synchronize):
            with pytest.raises(dt.DisttensorError, match="shut down"):
                use()
        assert dt.streams.current_stream() == dt.streams.default_stream()
        with dt.stream(dt.Stream()):
            assert torch.ones(3, device="node:0").sum().item() == 3


def test_every_operation_waits_if_launches_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTTENSOR_LAUNCH_BLOCKING", "1")
    with dt.init_master_worker(nodes=2, launcher="inproc"):
        s = dt.Stream(1)
        x = torch.arange(3, device="node:1")
        with dt.stream(s):
            with pytest.raises(RuntimeError, match="out of bounds"):
                x.gather(0, x + 2)
            same((x * 2).to("node:0"), torch.arange(3) * 2)
        assert s.query()


WAITS = ("s.synchronize()", "y.cpu()", "s.record_event().synchronize()", "dt.synchronize(0)", "y.sum().item()")


@pytest.mark.parametrize("wait", variants(WAITS))
def test_ctrl_c_ends_the_wait_for_a_stream(script: Callable[..., subprocess.CompletedProcess[str]], wait: str) -> None:
    done = script(
        f"""
import os, signal, threading
import torch, disttensor as dt
from stream_kit import hold, held, release, run_on, thread

with dt.init_master_worker(nodes=1, threads=1):
    s, t = dt.Stream(), dt.Stream()
    with dt.stream(s):
        x = torch.ones(2, device="node:0")
    holder = thread(run_on, s, hold, "c")
    run_on(t, held, "c")
    with dt.stream(s):
        y = x + 1
    waits = threading.Event()
    killer = thread(lambda: (waits.wait(), run_on(t, len, "abc"), os.kill(os.getpid(), signal.SIGINT)))
    try:
        waits.set()
        {wait}
    except KeyboardInterrupt:
        print("interrupted")
    run_on(t, release, "c")
    holder.join()
    print(y.tolist())
"""
    )
    assert done.stdout == "interrupted\n[2.0, 2.0]\n", done.stdout + done.stderr
    assert done.returncode == 0


def test_what_is_dropped_before_it_is_made_goes_as_soon_as_it_is_used() -> None:
    """Not with the next command, of which there may be none for a while: a training step's tensors stayed till then."""
    size = 54321
    with dt.init_master_worker(nodes=1, launcher="inproc"):
        s = dt.Stream(0)
        with busy(s) as let_go:
            with dt.stream(s):
                y = torch.ones(size, device="node:0")
                for _ in range(5):
                    y = y + 1
                work = dt.fetch(y.sum())
                del y
            let_go()  # the last command; the drops come with it
            assert work.result().item() == 6 * size
            kept = [x for x in gc.get_objects() if type(x) is torch.Tensor and x.numel() == size and not x.is_meta]
            assert not kept
