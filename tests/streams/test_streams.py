"""Streams and events, on nodes in this process and on processes: what runs side by side, and what waits for what."""

from __future__ import annotations

import asyncio
import gc
import re
import threading
import time
from collections.abc import Iterator

import pytest
import torch
from checkout import ROOT
from equal import same
from stream_kit import busy, meet, run_on, thread

import disttensor as dt
from disttensor import testing


@pytest.fixture(params=["inproc", "local"], scope="module")
def session(request: pytest.FixtureRequest) -> Iterator[None]:
    """Either kind of nodes, for all tests of the module."""
    options = {"simulate_cuda": 2} if request.param == "inproc" else {"threads": 1}
    with dt.init_master_worker(nodes=2, launcher=request.param, **options):
        for node in range(2):  # connections are made at first use
            torch.ones(1 << 20).to(f"node:{node}").cpu()
        yield


@pytest.fixture(autouse=True)
def calm(session: None) -> Iterator[None]:
    """No error is left by a test."""
    yield
    dt.synchronize()


@pytest.mark.row("M15", "T23")
def test_two_streams_run_side_by_side() -> None:
    one, two = dt.Stream(0), dt.Stream(0)
    first = thread(run_on, one, meet, "two")
    assert run_on(two, meet, "two")  # would wait for ever if either waited for the other
    first.join()


def test_a_stream_runs_beside_the_default_one() -> None:
    s = dt.Stream(0)
    first = thread(run_on, s, meet, "default")
    assert dt.run(meet, "default", node=0)
    first.join()


def test_work_goes_on_beside_a_busy_stream() -> None:
    s = dt.Stream(0)
    x = torch.arange(4.0, device="node:0")
    with busy(s):
        with dt.stream(s):
            y = x * 2
        assert (x + 1).sum().item() == 10
        assert not s.query()
        z = x.to("node:1") + 1
        same(z, torch.arange(4.0) + 1)
    same(y, torch.arange(4.0) * 2)


@pytest.mark.row("S8")
def test_an_upload_a_download_and_both_kinds_of_computation_at_once() -> None:
    """Each is done, or is under way, while the others are: what is asked is which, and not how long they take."""
    device, cpu = dt.Stream(0), dt.Stream(0, "cpu")
    results, there = torch.full((1 << 20,), 3.0, device="node:0"), torch.ones(4, device=dt.device(0, "cpu"))
    batch = torch.full((1 << 20,), 7.0)
    with busy(device) as device_goes_on, busy(cpu) as cpu_goes_on:
        earlier = dt.fetch(results)
        with dt.stream(device):
            under_way = dt.fetch(results * 2)
        with dt.stream(cpu):
            counted = there + 1
        uploaded = batch.to("node:0", non_blocking=True)
        assert earlier.result().eq(3).all()
        assert uploaded[-1].item() == 7
        assert (batch @ batch).item() == 49 << 20  # and the script's own CPU
        assert not device.query()
        assert not under_way.is_completed()
        assert not cpu.query()
        cpu_goes_on()
        assert counted.sum().item() == 8
        assert not device.query()
        device_goes_on()
        assert under_way.result().eq(6).all()


def test_using_a_tensor_waits_for_the_stream_that_makes_it() -> None:
    s, t = dt.Stream(0), dt.Stream(0)
    x = torch.arange(4.0, device="node:0")
    with busy(s) as let_go:
        with dt.stream(s):
            y = x * 2
        with dt.stream(t):
            z = y + 1
        w = y + z  # on the default stream, which goes on being dealt out
        far = w.to("node:1") * 2
        part = y[:2]
        assert not t.query()
        assert not dt.streams.default_stream(0).query()
        other = dt.Stream(0)
        with dt.stream(other):
            assert (x * 3).sum().item() == 18
        let_go()
        same(far, (torch.arange(4.0) * 4 + 1) * 2)
    same(part, torch.tensor([0.0, 2.0]))


def test_a_stream_that_was_waited_for_has_done_all() -> None:
    s = dt.Stream(0)
    x = torch.ones(4, device="node:0")
    for _ in range(100):
        with dt.stream(s):
            y = x + 1
        s.synchronize()
        assert s.query()
        with dt.stream(s):
            y.sum().item()
        assert s.query()
    for stream in (s, dt.streams.default_stream(0)):
        y = x + 1
        dt.synchronize(0)
        assert stream.query()


@pytest.mark.row("M15")
def test_events_order_writes_in_place() -> None:
    s = dt.Stream(0)
    x = torch.zeros(4, device="node:0")
    with busy(s) as let_go:
        with dt.stream(s):
            x.add_(1)
            written = dt.Event()
            written.record()
        assert not written.query()
        dt.streams.default_stream(0).wait_event(written)
        x.mul_(3)
        s.wait_stream(dt.streams.default_stream(0))
        with dt.stream(s):
            x.add_(0.5)
        let_go()
    s.synchronize()
    assert written.query()
    same(x, torch.full((4,), 3.5))


@pytest.mark.row("M15")
def test_events_order_a_write_and_what_reads_the_same_memory() -> None:
    """Nothing else does: what is read is there already, and a view is another tensor than what it is of."""
    s, t = dt.Stream(0), dt.Stream(0)
    x = torch.ones(4, device="node:0")
    part = x[:2]
    part.add_(1)  # from now on it is there
    with busy(s) as let_go:
        with dt.stream(s):
            twice = x * 2
            part.mul_(3)
        dt.streams.default_stream(0).wait_event(s.record_event())
        x.add_(1)
        t.wait_stream(dt.streams.default_stream(0))
        with dt.stream(t):
            part.mul_(10)
            seen = x + 0
        let_go()
    same(twice, torch.tensor([4.0, 4.0, 2.0, 2.0]))
    same(seen, torch.tensor([70.0, 70.0, 2.0, 2.0]))


@pytest.mark.row("M15")
def test_events_between_nodes_cost_no_round_trip() -> None:
    s, t = dt.Stream(0), dt.Stream(1)
    x = torch.ones(3, device="node:1")
    with busy(s) as let_go:
        with testing.MessageLog(settle=False) as log:
            event = s.record_event()
            t.wait_event(event)
        assert log.questions == []
        assert log.reports == 0
        assert (log[0].messages, log[1].messages) == (1, 1)
        with dt.stream(t):
            x.add_(1)
        assert not t.query()
        same(torch.ones(2, device="node:1") * 2, torch.full((2,), 2.0))  # the default stream does not wait
        let_go()
    t.synchronize()
    same(x, torch.full((3,), 2.0))


def test_the_default_stream_waits_for_another_node() -> None:
    s = dt.Stream(0)
    with busy(s) as let_go:
        dt.streams.default_stream(1).wait_event(s.record_event())
        x = torch.ones(3, device="node:1")
        waiting = dt.streams.default_stream(1).record_event()
        assert not waiting.query()
        assert (torch.ones(3, device="node:0") + 1).sum().item() == 6
        let_go()
        same(x + 1, torch.full((3,), 2.0))
    assert waiting.query()


def test_a_write_waits_for_what_is_still_to_be_sent() -> None:
    s, t, u = dt.Stream(0), dt.Stream(1), dt.Stream(0)
    x = torch.arange(4.0, device="node:0")
    with busy(s) as let_go:
        t.wait_event(s.record_event())  # so what is sent from node 0 to node 1 comes after that
        far = x.to("node:1")
        x.add_(1)
        waiting = dt.streams.default_stream(0).record_event()
        with dt.stream(u):
            assert torch.ones(3, device="node:0").sum().item() == 3
        assert not waiting.query()
        let_go()
        same(far, torch.arange(4.0))
    same(x, torch.arange(4.0) + 1)


@pytest.mark.row("M15")
def test_elapsed_time_is_by_the_clock_of_the_node() -> None:
    s = dt.Stream(1)
    first, second = dt.Event(enable_timing=True), dt.Event(enable_timing=True)
    with dt.stream(s):
        before = dt.run(time.perf_counter)
        first.record()
        start = dt.run(time.perf_counter)
        torch.randn(200, 200, device="node:1") @ torch.randn(200, 200, device="node:1")
        end = dt.run(time.perf_counter)
        second.record()
        after = dt.run(time.perf_counter)
    assert (end - start) * 1e3 <= first.elapsed_time(second) <= (after - before) * 1e3
    assert first.elapsed_time(second) == -second.elapsed_time(first)


def test_what_elapsed_time_refuses() -> None:
    s = dt.Stream(0)
    timed, plain, far = dt.Event(enable_timing=True), dt.Event(), dt.Event(enable_timing=True)
    with pytest.raises(RuntimeError, match="must be recorded"):
        timed.elapsed_time(timed)
    far.record(dt.streams.default_stream(1))
    timed.record(s)
    with pytest.raises(RuntimeError, match="enable_timing=True"):
        timed.elapsed_time(plain)
    with pytest.raises(ValueError, match="nodes 0 and 1"):
        timed.elapsed_time(far)
    with busy(s), pytest.raises(RuntimeError, match="must be completed"):
        timed.elapsed_time(s.record_event(dt.Event(enable_timing=True)))


def test_an_event_counts_what_is_on_its_way_to_the_node() -> None:
    x = torch.ones(1 << 20)
    y = x.to("node:0")
    event = dt.streams.default_stream(0).record_event()
    event.synchronize()
    assert event.query()
    same(y, x)


def test_events_can_be_recorded_again_and_need_not_be_at_all() -> None:
    event = dt.Event()
    assert event.query()
    event.synchronize()
    event.wait(dt.streams.default_stream(1))
    s = dt.Stream(0)
    with busy(s) as let_go:
        event.record(dt.streams.default_stream(0))
        event.synchronize()
        event.record(s)
        assert not event.query()
        let_go()
        event.synchronize()
    assert event.query()


@pytest.mark.row("M15")
@pytest.mark.parametrize("what", ["a stream", "an event", "all streams"])
def test_to_synchronize_is_to_wait(what: str) -> None:
    """While the stream is busy it does not return, however long that is; then its work is done."""
    s, returned = dt.Stream(0), threading.Event()
    x = torch.zeros(4, device="node:0")
    with busy(s) as let_go:
        with dt.stream(s):
            x.add_(1)
        event = s.record_event()
        wait = {"a stream": s.synchronize, "an event": event.synchronize, "all streams": dt.synchronize}[what]
        waiting = thread(lambda: (wait(), returned.set()))
        early = returned.wait(0.2)
        let_go()
        waiting.join()
    assert not early
    assert returned.is_set()
    assert event.query()
    same(x, torch.ones(4))


@pytest.mark.row("M14")
def test_what_is_said_to_wait_waits() -> None:
    """While the node is busy none of it returns, and an operation does."""
    [sentence] = re.findall(r"(?m)^\| wait \| (.*?)\. ", (ROOT / "docs" / "REFERENCE.md").read_text())
    lines = re.findall(r"`([^`]+)`", sentence)
    assert lines == ["x.item()", "x.cpu()", "print(x)", "dt.synchronize()"]
    x, returned = torch.ones((), device="node:0"), []
    with busy(dt.streams.default_stream(0)) as let_go:
        x = (x + 1).relu_()
        waiting = [thread(lambda line=line: (eval(line, {"dt": dt, "x": x}), returned.append(line))) for line in lines]
        waiting[0].join(0.2)
        early = list(returned)
        let_go()
        for each in waiting:
            each.join()
    assert early == []
    assert sorted(returned) == sorted(lines)


def test_values_and_questions_in_a_stream() -> None:
    s = dt.Stream(1)
    x = torch.tensor([3.0, 0.0, 2.0])
    with dt.stream(s):
        y = x.to("node:1")
        assert y.sum().item() == 5
        same(y.nonzero(), x.nonzero())
        same(y[y > 1], x[x > 1])
        same(dt.run(lambda t: t * 2, y), x * 2)
        same(y.max(0), x.max(0))
        a, b = y.sort()
    same(a + b, sum(x.sort()))


def test_random_numbers_on_a_stream() -> None:
    s = dt.Stream(0)
    with dt.stream(s):
        torch.node.manual_seed(7)  # type: ignore[attr-defined]  # of node 0: in one process they share a generator
        x = torch.randn(5, device="node:0")
        rng = torch.node.get_rng_state("node:0")  # type: ignore[attr-defined]
        y = torch.rand(5, device="node:0")
        torch.node.set_rng_state(rng, "node:0")  # type: ignore[attr-defined]
        z = torch.rand(5, device="node:0")
        same(y, z.cpu())
    torch.default_generator.manual_seed(7)
    same(x, torch.randn(5))


def test_which_stream_is_current() -> None:
    s, t, far = dt.Stream(0), dt.Stream(0, "cpu"), dt.Stream(1, priority=-1)
    assert dt.streams.current_stream() == dt.streams.default_stream() == dt.streams.default_stream(0)
    seen: list[object] = []
    with dt.stream(s), dt.stream(far):
        assert dt.session.current_node() == 1
        assert (dt.streams.current_stream(), dt.streams.current_stream(0)) == (far, s)
        with dt.stream(None), dt.stream(t):
            assert (dt.streams.current_stream(), dt.streams.current_stream(1)) == (t, far)
            with dt.stream(dt.streams.default_stream(0)):
                assert dt.streams.current_stream() == dt.streams.default_stream()
        assert dt.streams.current_stream(0) is s
        thread(lambda: seen.append(dt.streams.current_stream(0))).join()
    assert seen == [dt.streams.default_stream(0)]
    assert dt.session.current_node() == 0
    assert torch.node.Stream is dt.Stream  # type: ignore[attr-defined]
    assert torch.node.current_stream("node:1") == dt.streams.default_stream(1)  # type: ignore[attr-defined]
    assert far.priority == -1
    assert len({s, t, far, dt.streams.default_stream(0), dt.streams.default_stream(0)}) == 4
    with pytest.raises(ValueError, match="node 9"):
        dt.Stream(9)
    with pytest.raises(RuntimeError, match="no device cuda:7"):
        dt.Stream(0, "cuda:7")


def test_nothing_is_left_of_streams_and_what_they_made() -> None:
    x = torch.ones(10, device="node:0")
    gc.collect()
    dt.synchronize()
    before = testing.usage(x)
    for _ in range(3):
        s = dt.Stream(0)
        with busy(s):
            with dt.stream(s):
                y = x + 1
                del y
                z = (x * 2)[2:]
            del z
            x.sum().item()  # by then node 0 has been told of what is dead, which the stream has not made yet
        del s
    gc.collect()
    dt.synchronize()
    assert testing.usage(x) == before


def test_synchronize_waits_for_all_streams() -> None:
    s, t = dt.Stream(0), dt.Stream(1)
    with busy(s) as let_go:
        with dt.stream(s):
            x = torch.ones(3, device="node:0") + 1
        y = x.to("node:1")
        event = s.record_event()
        let_go()
        dt.synchronize(0)
        assert event.query()
    dt.synchronize()
    assert t.query()
    same(y, torch.full((3,), 2.0))


def test_streams_inside_of_a_graph_and_beside_its_replays() -> None:
    """A graph's commands are replayed in the order of issue; a replay comes after what any stream was given before."""
    s, t = dt.Stream(0), dt.Stream(1)
    x = torch.zeros(4, device="node:0")
    g = dt.Graph()
    with dt.graph(g):
        with dt.stream(s):
            y = x + 1
        event = s.record_event()
        t.wait_event(event)
        with dt.stream(t):
            z = y.to("node:1") * 2
        with pytest.raises(dt.errors.GraphError):
            event.synchronize()
    with dt.stream(s), pytest.raises(RuntimeError, match="has not been replayed yet"):
        y.sum().item()
    for n in range(3):
        with dt.stream(s):
            x.fill_(n)
            g.replay()
        with dt.stream(t):
            same(z + 0, torch.full((4,), 2.0 * n + 2))


def test_a_task_has_a_current_stream_of_its_own() -> None:
    s, t = dt.Stream(0), dt.Stream(0)

    async def work(stream: dt.Stream, steps: int) -> float:
        x = torch.zeros(1, device="node:0")
        with dt.stream(stream):
            for _ in range(steps):
                assert dt.streams.current_stream(0) == stream
                x.add_(1)
                await asyncio.sleep(0)
            return x.item()

    async def both() -> list[float]:
        return await asyncio.gather(work(s, 20), work(t, 30))

    assert asyncio.run(both()) == [20, 30]
    assert dt.streams.current_stream(0) == dt.streams.default_stream(0)


def test_code_for_cuda_streams_runs() -> None:
    """As it is written for ``torch.cuda``, with the device module in its place."""
    cuda = torch.node  # type: ignore[attr-defined]
    side = cuda.Stream()
    batch = torch.arange(4.0, device="node:0")
    side.wait_stream(cuda.current_stream())
    with cuda.stream(side):
        moved = batch.to("node:0", non_blocking=True) * 2
    cuda.current_stream().wait_stream(side)
    moved.record_stream(cuda.current_stream())
    start, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
    start.record()
    loss = moved.sum()
    end.record()
    cuda.synchronize()
    assert (loss.item(), start.elapsed_time(end) >= 0) == (12, True)
