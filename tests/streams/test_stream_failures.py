"""Failures on streams: what is poisoned, who is told; and what waits beside a busy stream."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from equal import same
from stream_kit import busy, run_on, thread
from telling import said

import disttensor as dt
from disttensor import testing

INDEX = [5]


pytestmark = pytest.mark.usefixtures("calm")


def out_of_range(x: torch.Tensor) -> torch.Tensor:
    return x.gather(0, torch.tensor(INDEX).to(x.device))


def line_of(function: Callable[..., object], offset: int = 1) -> str:
    return f"{function.__code__.co_filename}:{function.__code__.co_firstlineno + offset}"


def test_a_failure_on_a_stream_names_the_line_and_poisons_what_depends_on_it() -> None:
    s, t = dt.Stream(0), dt.Stream(0)
    x = torch.arange(4.0, device="node:0")
    with busy(s) as let_go:
        with dt.stream(s):
            bad = out_of_range(x)
            worse = bad + 1
        with dt.stream(t):
            far = (worse * 2).to("node:1")
        later = bad.sum()
        let_go()
    for victim in (bad, worse, far, later):
        with pytest.raises(RuntimeError, match="out of bounds") as caught:
            victim.cpu()
        assert line_of(out_of_range) in said(caught.value)
        assert "aten::gather on node 0" in said(caught.value)
    with dt.stream(s), pytest.raises(RuntimeError, match="out of bounds"):
        bad.sum().item()
    with dt.stream(t), pytest.raises(RuntimeError, match="out of bounds"):
        dt.run(len, bad)
    same(x + 1, torch.arange(4.0) + 1)


def test_what_nobody_asks_about_is_raised_when_a_stream_is_waited_for() -> None:
    s = dt.Stream(1)
    x = torch.arange(4.0, device="node:1")
    with dt.stream(s):
        out_of_range(x)
    with pytest.raises(RuntimeError, match="out of bounds"):
        s.synchronize()
    s.synchronize()
    with dt.stream(s):
        out_of_range(x)
    with pytest.raises(RuntimeError, match="out of bounds"):
        dt.synchronize(1)


def lack_a_thread() -> None:
    """Has the next thread of a stream not start in this process, as where the system has no more of them."""
    start = threading.Thread.start

    def lacking(thread: threading.Thread) -> None:
        if thread.name.startswith("disttensor-lane-"):
            threading.Thread.start = start  # type: ignore[method-assign]
            raise RuntimeError("can't start new thread")
        start(thread)

    threading.Thread.start = lacking  # type: ignore[method-assign]


def test_a_thread_that_the_system_lacks_fails_its_command() -> None:
    """All that came later on the stream, and each end of the node's work, was waited for without an end."""
    x, s = torch.arange(4.0, device="node:1"), dt.Stream(1)
    dt.run(lack_a_thread, node=1)
    with dt.stream(s):
        doubled = x * 2
    with pytest.raises(RuntimeError, match="can't start new thread") as caught:
        doubled.cpu()
    assert "aten::mul.Tensor on node 1" in said(caught.value)
    with dt.stream(s):
        same(x * 3, torch.arange(4.0) * 3)
    s.synchronize()


def test_a_failed_write_poisons_all_that_shares_the_memory() -> None:
    """What was made of it before, what is queued on another stream behind an event, what is a view of it."""
    s, t = dt.Stream(0), dt.Stream(0)
    x = torch.zeros(6, device="node:0")
    view = x[2:]
    before = x + 1
    same(view * 1, torch.zeros(4))  # the view exists
    with busy(s) as let_go:
        with dt.stream(s):
            x.index_fill_(0, torch.tensor([9]).to("node:0"), 1)
            written = s.record_event()
        t.wait_event(written)
        with dt.stream(t):
            row = view[:2]
            queued = row * 2  # captured while nothing had failed yet
            copied = view.clone()
        let_go()
    for victim in (queued, copied, view, x, row):
        with pytest.raises((RuntimeError, IndexError), match="out of"):
            victim.cpu()
    same(before, torch.ones(6))
    y = torch.zeros(6, device="node:0")
    with dt.stream(s):
        y.add_(1)
    s.synchronize()
    same(y, torch.ones(6))


def test_a_failing_function_on_a_stream() -> None:
    s = dt.Stream(0)

    def fail() -> None:
        raise KeyError("gone")

    with dt.stream(s), pytest.raises(KeyError, match="gone"):
        dt.run(fail)
    assert run_on(s, len, "abc") == 3


def test_a_function_gets_tensors_that_are_freed_meanwhile() -> None:
    s = dt.Stream(0)
    x = torch.arange(4.0, device="node:0")
    got: list[object] = []
    with busy(s) as let_go:
        runner = thread(lambda: got.append(run_on(s, lambda t: t.sum().item(), x * 2)))
        let_go()
        runner.join()
    assert got == [12.0]


def test_a_full_window_opens_as_a_stream_goes_on() -> None:
    s = dt.Stream(0)
    x, n = torch.zeros(1, device="node:0"), int(testing.limit("window")) + 2000

    def issue() -> None:
        with dt.stream(s):
            for _ in range(n):
                x.add_(1)

    with busy(s) as let_go:
        issuing = thread(issue)
        let_go()
        issuing.join()
    s.synchronize()
    assert x.item() == n


def test_synchronize_of_one_thread_stops_no_other() -> None:
    s = dt.Stream(0)
    with busy(s) as let_go:
        event = s.record_event()
        waiting = [thread(dt.synchronize), thread(dt.synchronize, 0), thread(s.synchronize), thread(event.synchronize)]
        assert (torch.ones(3, device="node:0") + 1).sum().item() == 6
        let_go()
        for waiter in waiting:
            waiter.join()


@pytest.fixture
def soon_by_itself() -> Iterator[None]:
    """A node's receiving thread does the default stream's work again soon after that of others."""
    with testing.limits(lately=3):
        yield


@pytest.mark.usefixtures("soon_by_itself")
def test_the_default_stream_goes_between_its_thread_and_the_receiving_one() -> None:
    s = dt.Stream(0)
    x = torch.zeros(4, device="node:0")
    local = torch.zeros(4)
    for i in range(60):
        if i % 7 == 0:
            with dt.stream(s):
                y = torch.full((4,), float(i), device="node:0")
            x.add_(y)
            local.add_(i)
        x.mul_(0.5).add_(i)
        local.mul_(0.5).add_(i)
    same(x, local)


def test_of_two_failures_the_first_is_passed_on_though_it_was_a_replays() -> None:
    """Failures in a replay have numbers far above those of later commands."""
    table, index = torch.ones(3, 2).to("node:1"), torch.tensor([2]).to("node:1")
    later = torch.tensor([9]).to("node:1")
    F = torch.nn.functional
    F.embedding(index, table)
    g = dt.Graph()
    with dt.graph(g):
        first = F.embedding(index, table)
    index.fill_(7)
    stream = dt.Stream(node=1)
    g.replay()
    second = F.embedding(later, table)
    with dt.stream(stream):
        both = second + first
        with pytest.raises(IndexError, match="recorded"):
            both.sum().item()
    with pytest.raises(IndexError):  # the other one
        dt.synchronize()
