"""What a node says of itself when it is asked beside its commands."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from limits import HANG
from node_kit import ALL, Node
from virtual_time import VirtualClock

from disttensor.runtime.channel import counted
from disttensor.runtime.channel.counted import LARGE, CountedChannel
from disttensor.runtime.node import gpu_use
from disttensor.runtime.node.description import REST, Description
from disttensor.runtime.node.memory_tally import MemoryTally
from disttensor.runtime.protocol import commands as c
from disttensor.runtime.protocol import side


@pytest.fixture
def node() -> Iterator[Node]:
    node = Node(over=lambda channel: CountedChannel(channel, "transfers"))
    node.do(*ALL, c.Call(1, 1, (2.0,)), c.Call(1, 2, (3.0,)))
    yield node
    node.channel.close()
    node.master.close()


def of(node: Node, clock: VirtualClock) -> Description:
    return Description(node.executor, node.executor.channels, clock)


def test_a_node_says_what_it_has_and_what_is_under_way(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    times = [10.0]
    monkeypatch.setattr(counted, "perf_counter", lambda: times[0])
    description = of(node, VirtualClock())
    (channel,) = node.executor.channels.data.values()
    assert isinstance(channel, CountedChannel)
    tally = channel._received[4]
    said = description.answer(7)
    assert said == side.Described(7, node.executor.done, (side.DeviceTensors("cpu", 2, 32),), (), 0, 0.0)
    tally.begin_transfer(64, times[0])
    tally.begin_transfer(36, times[0])
    times[0] += 4
    # the kit's node has one channel for both uses
    assert {*description.answer(8).moving} == {side.Moving("inproc", "transfers", 4, False, 2, 4.0, 2, 100, 4.0)}
    tally.end_transfer()
    tally.end_transfer()
    assert description.answer(9).moving == ()
    assert side.decode_answer(side.encode(said)) == said


def test_tensors_are_not_counted_all_the_time(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """A count takes the node the GIL."""
    clock, counts = VirtualClock(), list[float]()

    def held() -> dict[str, tuple[int, int]]:
        counts.append(clock.now())
        clock.sleep(0.5)
        return {"cpu": (len(counts), 0)}

    monkeypatch.setattr(node.executor.store, "usage_by_device", held)
    description = of(node, clock)
    assert [description.answer(1).held[0].tensors for _ in range(3)] == [1, 1, 1]
    clock.sleep(REST * 0.5 - 0.1)
    assert description.answer(1).held[0].tensors == 1
    clock.sleep(0.2)
    assert description.answer(1).held[0].tensors == 2


def test_memory_that_tensors_share_is_counted_once_and_by_device(node: Node) -> None:
    store = node.executor.store
    whole = torch.ones(4)
    store.entries.clear()
    store.entries.update({1: whole, 2: whole[:2], 3: torch.ones(2, device="meta")})
    assert store.usage_by_device() == {"cpu": (2, 16), "meta": (1, 8)}


def test_programs_that_are_compiled_are_told(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(node.executor.graphs), "building", (2, 41.0))
    said = of(node, VirtualClock()).answer(1)
    assert (said.building, said.building_for) == (2, 41.0)


def test_large_transfers_are_told_each_by_itself(node: Node) -> None:
    (channel,) = node.executor.channels.data.values()
    assert isinstance(channel, CountedChannel)
    description = of(node, VirtualClock())
    target = torch.empty(LARGE, dtype=torch.uint8)
    receiving = channel.irecv(target, -1, 6)
    small = channel.irecv(target[1:], -1, 5)
    it, _ = description.answer(1).large  # the kit's node has one channel for both uses
    assert (it.peer, it.sent, it.transfer, it.bytes, it.passed) == (-1, False, 6, LARGE, -1)
    node.master.isend(torch.ones_like(target), 0, 6)
    receiving.wait(HANG)
    assert description.answer(2).large == ()
    node.master.isend(target[1:], 0, 5)
    small.wait(HANG)


def test_a_peak_is_told_where_one_is_counted(node: Node) -> None:
    clock, store = VirtualClock(), node.executor.store
    assert [it.peak for it in of(node, clock).answer(1).held] == [-1]
    store.tally = MemoryTally(store)
    node.do(c.Call(1, 3, (2.0,)))
    node.do(c.Free(1, (0,)))
    (it,) = of(node, clock).answer(2).held
    assert (it.bytes, it.peak) == (32, 48)


@pytest.mark.parametrize("has_pynvml", [True, False])
def test_gpus_are_told(node: Node, monkeypatch: pytest.MonkeyPatch, has_pynvml: bool) -> None:
    def utilization(device: int) -> int:
        if not has_pynvml:
            raise ModuleNotFoundError("pynvml does not seem to be installed")
        return 97

    monkeypatch.setattr(gpu_use, "in_use", lambda: [1])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (30, 100))
    monkeypatch.setattr(torch.cuda, "utilization", utilization)
    assert of(node, VirtualClock()).answer(1).gpus == (side.GpuUse("cuda:1", 70, 100, 0.97 if has_pynvml else -1.0),)
