"""Streams of CUDA devices: what CUDA is told, by a stand-in for it; and, where there is a GPU, what comes of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from equal import same

import disttensor as dt
from disttensor.runtime.node.streams import cuda_lane, scheduler
from disttensor.runtime.node.streams.lane import Lane
from disttensor.runtime.node.streams.lanes import Lanes

CUDA = torch.device("cuda:0")


class FakeStream:
    def __init__(self, name: str, log: list[tuple[str, ...]]) -> None:
        self.name, self._log, self.device = name, log, CUDA
        self.idle = False

    def query(self) -> bool:
        return self.idle

    def wait_stream(self, other: FakeStream) -> None:
        self._log.append((self.name, "waits for stream", other.name))

    def wait_event(self, event: FakeEvent) -> None:
        self._log.append((self.name, "waits for", event.at))


class FakeEvent:
    reached = False
    at = ""

    def __init__(self, enable_timing: bool = False) -> None:
        self.timing = enable_timing

    def record(self, stream: FakeStream) -> None:
        self.at = f"{stream.name} {len(stream._log)}"

    def query(self) -> bool:
        return self.reached

    def synchronize(self) -> None:
        self.reached = True

    def elapsed_time(self, end: FakeEvent) -> float:
        assert self.reached
        assert end.reached
        return 1.5


class OnDevice(torch.Tensor):
    """A tensor that says that it is on a GPU."""

    is_cuda = True
    device = CUDA
    used: list[str]

    def record_stream(self, stream: Any) -> None:
        self.used = [*getattr(self, "used", []), stream.name]


def on_device() -> OnDevice:
    return torch.ones(2).as_subclass(OnDevice)


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """What streams were told to wait for."""
    log: list[tuple[str, ...]] = []
    default = FakeStream("default", log)
    current = [default]
    count = iter(range(1, 100))

    @contextmanager
    def stream(s: FakeStream) -> Iterator[None]:
        current.append(s)
        yield
        current.pop()

    fake = SimpleNamespace(
        Event=FakeEvent,
        Stream=lambda device, priority: FakeStream(f"side {next(count)}", log),
        stream=stream,
        current_stream=lambda device: current[-1],
        default_stream=lambda device: default,
    )
    monkeypatch.setattr(cuda_lane, "in_use", lambda: [0])
    monkeypatch.setattr(cuda_lane, "torch", SimpleNamespace(cuda=fake, Tensor=torch.Tensor, device=torch.device))
    return log


def lane(of: type[Lane] = Lane) -> Any:
    arguments = ("a lane", lambda lane, task: None, lambda lane: None)
    return cuda_lane.CudaLane(CUDA, 0, *arguments) if of is cuda_lane.CudaLane else Lane(*arguments)


def test_streams_wait_for_what_others_make(log: list[tuple[str, ...]]) -> None:
    default, one, two = lane(), lane(cuda_lane.CudaLane), lane(cuda_lane.CudaLane)
    assert log == [("side 1", "waits for stream", "default"), ("side 2", "waits for stream", "default")]
    log.clear()
    x, y, z = on_device(), on_device(), on_device()
    with cuda_lane.on(one, iter([x]), lambda: [y, None]):  # x was there before there were streams
        assert log == [("side 1", "waits for", "default 0")]
        assert x.used == ["side 1"]
    with cuda_lane.on(one, iter([x, y, torch.ones(1), 5]), lambda: [y]):
        pass
    assert log[1:] == [("side 1", "waits for", "default 0")]
    log.clear()
    with cuda_lane.on(two, iter([y]), lambda: [z]):
        assert log == [("side 2", "waits for", "side 1 2")]
    with cuda_lane.on(default, iter([y, z]), list):
        assert [wait[:2] for wait in log[1:]] == [("default", "waits for")] * 2
    assert (y.used, z.used) == (["side 2", "default"], ["default"])
    one.join_default()
    assert log[-1] == ("default", "waits for stream", "side 1")
    cuda_lane.keep_for_default(z)
    with cuda_lane.on(default, iter([z]), list):
        pass
    assert log[-1] == ("default", "waits for stream", "side 1")


def test_events_are_done_when_the_device_has_come_to_them(log: list[tuple[str, ...]]) -> None:
    one = lane(cuda_lane.CudaLane)
    log.clear()
    mark = cuda_lane.CudaMark(CUDA, timing=True)
    assert not mark.is_completed()
    mark.reach()
    assert not mark.is_completed()
    cuda_lane.wait(one, mark)  # the device waits, and not this thread
    assert log == [("side 1", "waits for", "default 0")]
    assert not mark.is_completed()
    cuda_lane.wait(lane(), mark)
    assert mark.is_completed()


def test_an_event_of_a_stream_with_nothing_to_do_is_done_at_once(log: list[tuple[str, ...]]) -> None:
    first, second = cuda_lane.CudaMark(CUDA, timing=True), cuda_lane.CudaMark(CUDA, timing=True)
    one = lane(cuda_lane.CudaLane)
    with cuda_lane.on(one, (), list):
        one.stream.idle = True
        first.reach()
        one.stream.idle = False
        second.reach()
    assert first.is_completed()
    assert not first.event.query(), "CUDA's own is done a moment later"
    assert not second.is_completed()
    assert second.since(first) == 1.5


def test_the_default_stream_takes_over_what_others_have_made(log: list[tuple[str, ...]]) -> None:
    one, two = lane(cuda_lane.CudaLane), lane(cuda_lane.CudaLane)
    x, y = on_device(), on_device()
    with cuda_lane.on(one, (), lambda: [x]):
        pass
    log.clear()
    cuda_lane.take_over([x, y, None, torch.ones(2)])
    assert log == [("default", "waits for", "side 1 2")]
    assert x.used == ["default"]
    cuda_lane.take_over([x])
    assert len(log) == 1, "it is the default stream's by now"
    with cuda_lane.on(two, [x], list):
        assert log[1:] == [("side 2", "waits for", "default 1")], "the point to which that has come by now"


@pytest.mark.usefixtures("nodes", "settled")
def test_what_functions_return_is_signed_before_the_script_hears_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    signed: list[torch.Tensor] = []
    monkeypatch.setattr(scheduler, "sign", lambda tensors: signed.extend(t.clone() for t in tensors))
    # which the lanes have still when the test is over, and the property is gone
    yes = property(lambda lanes: True, lambda lanes, found: vars(lanes).update(cuda=found))
    monkeypatch.setattr(Lanes, "cuda", yes, raising=False)
    s = dt.Stream(node=1)
    x = torch.ones(3, device="node:1")
    with dt.stream(s):
        in_stream = dt.run(lambda x: {"twice": x * 2}, x, node=1)
        assert [t.tolist() for t in signed[-1:]] == [[2.0] * 3]
    beside = dt.submit(torch.mul, x, 3, node=1, beside=True)
    same(beside.result(), torch.full((3,), 3.0))
    assert [t.tolist() for t in signed[-1:]] == [[3.0] * 3]
    ref = dt.submit(torch.mul, x, 4, node=1, beside=True)
    same(dt.run(torch.add, ref, 1, node=1), torch.full((3,), 5.0))
    same(in_stream["twice"], torch.full((3,), 2.0))


@pytest.mark.usefixtures("nodes", "settled")
def test_the_lanes_of_a_node_with_gpus_do_what_those_of_others_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that makes a node have lanes, where it takes itself to have GPUs though its tensors are on CPUs: copies,
    streams, functions, asynchronous collectives, replays; beside tensors that have no single truth, or a false one."""
    yes = property(lambda lanes: True, lambda lanes, found: vars(lanes).update(cuda=found))
    monkeypatch.setattr(Lanes, "cuda", yes, raising=False)
    others = [x.to("node:1") for x in (torch.arange(4.0), torch.zeros(1), torch.zeros(()), torch.empty(0, 3))]
    here = torch.arange(12.0).view(3, 4)
    for size in (1, 1 << 18):  # what is there at once, and what arrives meanwhile
        big = here.repeat(size, 1)
        x = big.to("node:0")
        y = x.to("node:1").to("node:2").to("node:1")
        z = (y * 2).to("node:0")
        s = dt.Stream(node=1)
        with dt.stream(s):
            t = y + 1
        s.synchronize()
        doubled = dt.run(torch.mul, y, 2, node=1)
        works = [dt.all_reduce([x * 1, y * 1], async_op=True) for _ in range(2)]
        g = dt.Graph()
        with dt.graph(g):
            sent = y.to("node:0")[0]
        y.add_(1)
        g.replay()
        del s
        for remote, local in [(z, big * 2), (t, big + 1), (doubled, big * 2), (y, big + 1), (sent, big[0] + 1)]:
            same(remote, local)
        for work in works:
            for total in work.result():
                same(total, big * 2)
    for remote, local in zip(
        others, (torch.arange(4.0), torch.zeros(1), torch.zeros(()), torch.empty(0, 3)), strict=True
    ):
        same(remote, local)


@pytest.fixture
def node() -> Iterator[None]:
    with dt.init_master_worker(nodes=1):
        yield


@pytest.mark.gpu
@pytest.mark.usefixtures("node")
def test_on_a_gpu() -> None:
    s, t = dt.Stream(0, "cuda:0"), dt.Stream(0, "cuda:0", priority=-1)
    local = torch.arange(1 << 20).remainder(1024).float()  # twenty times that is exact
    x = local.to("node:0")
    start, end = dt.Event(enable_timing=True), dt.Event(enable_timing=True)
    for n in range(50):
        with dt.stream(s):
            y = torch.full((1 << 20,), float(n), device="node:0")
            start.record()
            for _ in range(20):
                y = y + x
            end.record()
        with dt.stream(t):
            z = y * 2
        w = z - y
        del y, z
        assert torch.equal(w.cpu(), local * 20 + n)
    end.synchronize()
    assert start.query()
    assert 0 < start.elapsed_time(end) < 10_000
    with dt.stream(s):
        x.add_(1)
        written = s.record_event()
    t.wait_event(written)
    with dt.stream(t):
        x.mul_(2)
    t.synchronize()
    assert t.query()
    same(x[:3].cpu().to("node:0"), torch.tensor([2.0, 4.0, 6.0]))


@pytest.mark.gpu
@pytest.mark.usefixtures("node")
def test_elapsed_time_agrees_with_cuda() -> None:
    def measured() -> tuple[float, float]:
        import time

        a = torch.randn(4096, 4096, device="cuda")
        torch.cuda.synchronize()
        before = time.perf_counter()
        for _ in range(20):
            a = a @ a * 1e-3
        torch.cuda.synchronize()
        return (time.perf_counter() - before) * 1e3

    s = dt.Stream(0, "cuda:0")
    start, end = dt.Event(enable_timing=True), dt.Event(enable_timing=True)
    with dt.stream(s):
        dt.run(measured)
        start.record()
        inside = dt.run(measured)
        end.record()
    assert start.elapsed_time(end) >= inside * 0.5
