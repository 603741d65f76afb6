"""Nodes that are killed, and whose places other processes take: ``dt.nodes()[k].replace()``. All else goes on."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed
from aftermath import children, probe

import disttensor as dt

#: The node that is killed.
NODE = 1


@pytest.fixture
def session() -> Iterator[None]:
    """The session ends without an error: what was raised is not raised again."""
    with dt.init_master_worker(nodes=3, spares=1, threads=1):
        yield


def kill() -> None:
    """Kills the node, by a signal of which the script knows nothing, and waits until it does."""
    os.kill(dt.nodes()[NODE].pid, signal.SIGKILL)
    with pytest.raises(dt.NodeLost, match="killed by SIGKILL"):
        dt.synchronize(NODE)


class Counter:
    def __init__(self, count: int) -> None:
        self.count = count

    def add(self, more: int) -> int:
        self.count += more
        return self.count


def total(x: torch.Tensor) -> torch.Tensor:
    torch.distributed.all_reduce(x)
    return x


class Things:
    """What a script has made once, and uses before and after the loss."""

    def __init__(self) -> None:
        self.mesh = dt.mesh(dp=3)
        self.line = dt.mesh(dp=3, tp=1).slice(tp=0)
        self.stream = dt.Stream(node=NODE)
        self.table = dt.tasks.share({"a": 5})
        self.channel: Any = dt.tasks.Channel()
        self.count, self.counter = 0, dt.actor(Counter, 0, node=2)

        def step(x: torch.Tensor) -> torch.Tensor:
            return dt.all_reduce(x * 2 + 1, over="dp")

        self.step = dt.graphed(step)

    def check(self) -> None:
        """Uses them all, with what is made now."""
        device, on_it = self.mesh.device, torch.arange(4.0, device=f"node:{NODE}")
        assert (on_it * 2)[1:].tolist() == [2.0, 4.0, 6.0]
        for size in (8, 50_000):
            ones = torch.ones(size)
            around = ones.to("node:0").to(f"node:{NODE}").to("node:2").to(f"node:{NODE}").to("node:0")
            assert torch.equal(around.cpu(), ones)
            parts = [torch.full((size,), float(node + 1), device=f"node:{node}") for node in range(3)]
            dt.all_reduce(parts)
            assert all(torch.equal(part.cpu(), 6 * ones) for part in parts)
            whole = ones.to(device) * 2
            assert torch.equal(dt.all_reduce(whole, over="dp").at(dp=NODE).cpu(), 6 * ones)
        for _ in range(2):
            assert self.step(torch.ones(3).to(device)).at(dp=NODE).tolist() == [9.0] * 3
        assert (torch.ones(2).to(self.line.device) * 3).at(dp=NODE).tolist() == [3.0, 3.0]
        with dt.stream(self.stream):
            beside = on_it * 5
        self.stream.synchronize()
        assert beside.sum().item() == 30
        channel, counter = self.channel, self.counter

        def use(table: dict[str, int], counter: Any) -> int:
            channel.put(table["a"])
            found: int = counter.add(1).result()
            return found

        self.count += 1
        assert dt.run(use, self.table, counter, node=NODE) == self.count
        assert channel.get() == 5
        assert dt.submit(Counter.add, Counter(1), 2, node=NODE).result() == 3
        assert sorted(dt.map(abs, [-1, -2, -3, -4])) == [1, 2, 3, 4]
        assert dt.actor(Counter, 3, node=NODE).add(4).result() == 7
        both = dt.run(total, torch.ones(2).to(device), node=self.mesh, distributed=True)
        assert [float(each.sum()) for each in both] == [6.0] * 3


def idle(things: Things) -> list[Callable[[], object]]:
    return []


def behind_a_function(things: Things) -> list[Callable[[], object]]:
    """A function that never returns, and behind it operations, copies both ways, a collective and a replay."""
    channel: Any = dt.tasks.Channel()
    begun: Any = dt.tasks.Channel()
    stuck = dt.submit(lambda: (begun.put(1), channel.get()), node=NODE)
    begun.get()
    x = torch.zeros(4, device=f"node:{NODE}")
    for _ in range(50):
        x += 1
    there, back = torch.ones(4, device="node:0").to(f"node:{NODE}"), x.to("node:2")
    parts = [torch.ones(50_000, device=f"node:{node}") for node in range(3)]
    dt.all_reduce(parts)
    replayed = things.step(torch.ones(3).to(things.mesh.device))
    return [stuck.result, x.cpu, there.cpu, back.cpu, parts[0].cpu, parts[2].cpu, lambda: replayed.at(dp=0).cpu()]


@pytest.mark.parametrize("under_way", [idle, behind_a_function])
def test_it_is_the_same_node(session: None, under_way: Callable[[Things], list[Callable[[], object]]]) -> None:
    """Twice: the second process that comes takes the place of the first one that was killed."""
    things = Things()
    things.check()
    held, alone = torch.arange(3.0, device=f"node:{NODE}"), torch.arange(3.0, device="node:2")
    view, everywhere = held[1:], torch.ones(3).to(things.mesh.device)
    lost = dt.actor(Counter, 1, node=NODE)
    assert lost.add(1).result() == 2
    waits = under_way(things)
    pids = [dt.nodes()[NODE].pid]
    for _ in range(2):
        kill()
        for wait in waits[::2]:
            with pytest.raises(dt.NodeLost):
                wait()
        node = dt.nodes()[NODE]
        assert not node.alive
        node.replace()
        for wait in waits[1::2]:
            with pytest.raises(dt.NodeLost):
                wait()
        assert node.alive
        assert dt.nodes()[NODE] == node
        assert dt.run(os.getpid, node=NODE) == node.pid
        for use in (held.cpu, (view + 1).cpu, lambda: everywhere.at(dp=NODE).cpu(), lost.add(1).result):
            with pytest.raises(dt.NodeLost) as error:
                use()
            assert error.value.rank == NODE
            assert error.value.pid in (pids[:1] if use == held.cpu else pids)
        waits = []
        pids.append(node.pid)
        things.check()
        assert alone.tolist() == [0.0, 1.0, 2.0]
        assert everywhere.at(dp=0).tolist() == everywhere.at(dp=2).tolist() == [1.0] * 3
        dt.synchronize()
    assert len({*pids}) == 3
    probe(NODE)


def test_places() -> None:
    """Nothing runs in a spare one, which is taken before that of a process that has ended."""
    with dt.init_master_worker(nodes=2, spares=1, threads=1, env={"CUDA_VISIBLE_DEVICES": "a,b,c"}):
        assert len(children(dt.run(os.getppid, node=0))) == 2
        places = []
        for _ in range(3):
            places.append(dt.run(os.getenv, "CUDA_VISIBLE_DEVICES", node=[0, NODE]))
            kill()
            dt.nodes()[NODE].replace()
        assert places == [["a", "b"], ["a", "c"], ["a", "b"]]
        assert len(children(dt.run(os.getppid, node=0))) == 2


def test_one_that_is_there_is_not_replaced(session: None) -> None:
    node = dt.nodes()[NODE]
    with pytest.raises(dt.DisttensorError, match=rf"node {NODE} is not lost: it is there; dt.kill\({NODE}\) ends it"):
        node.replace()
    with pytest.raises(dt.errors.GraphError, match="replace"), dt.graph(dt.Graph()):
        node.replace()


def test_threads_are_not_replaced() -> None:
    with dt.init_master_worker(nodes=2, launcher="inproc"):
        dt.kill(NODE)
        with pytest.raises(
            dt.DisttensorError, match=f"node {NODE} can't be replaced: launcher='inproc' can't start a node later"
        ):
            dt.nodes()[NODE].replace()


@pytest.mark.parametrize("channel", ["tcp", "shm", "gloo"])
def test_collectives_by_a_channel_that_was_opened_before(session: None, channel: str) -> None:
    dt.channels.select("*", channel)

    def step(size: int) -> None:
        parts = [torch.full((size,), float(node + 1), device=f"node:{node}") for node in range(3)]
        dt.all_reduce(parts)
        for part in parts:
            assert torch.equal(part.cpu(), torch.full((size,), 6.0))

    for _ in range(2):
        step(8)
        step(50_000)
        kill()
        dt.nodes()[NODE].replace()
    step(8)
    step(50_000)
