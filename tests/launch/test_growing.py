"""Sessions that take in nodes later. The agents are there from the start, so that no test waits for them."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest
import torch

import disttensor as dt
from disttensor.session import current


@pytest.fixture
def session() -> Iterator[None]:
    """One node with two simulated CUDA devices, and room for two more."""
    with dt.init_master_worker(launcher="nearby", hosts="a:3", nodes=(1, 3), threads=1, simulate_cuda=2):
        yield


@pytest.mark.row("I13")
def test_new_nodes_are_as_the_others(session: None) -> None:
    before = torch.arange(3.0, device="node:0")
    cpu = dt.device(0, "cpu")  # takes a slot, which must not be a later node's
    assert dt.session.node_count() == 1
    with pytest.raises(ValueError, match="node 1 does not exist"):
        dt.device(1)
    with pytest.raises(RuntimeError, match="'node:1' does not exist"):
        torch.ones(1, device="node:1")
    assert dt.wait_for_nodes() == 3
    assert dt.session.node_count() == torch.node.device_count() == len(dt.nodes()) == 3
    xs = [torch.full((3,), float(k), device=f"node:{k}") for k in range(3)]
    dt.all_reduce(xs)
    assert [x.tolist() for x in xs] == [[3.0] * 3] * 3
    assert (before.to("node:2") + xs[2]).tolist() == [3.0, 4.0, 5.0]
    assert xs[1].to(cpu).tolist() == [3.0] * 3
    with dt.node(2):
        assert dt.run(os.getpid, node=2) == dt.nodes()[2]["pid"]
    assert len(dt.collectives.new_group()) == 3


def test_one_at_a_time(session: None) -> None:
    assert dt.wait_for_nodes(1) == 1
    assert dt.wait_for_nodes(2, 50) == 2
    assert dt.wait_for_nodes(3, 50) == 3
    with pytest.raises(ValueError, match="4 nodes: this session can have 3"):
        dt.wait_for_nodes(4)


class Sized:
    def size(self) -> int:
        return dt.tasks.here().world_size

    def size_in_a_thread(self) -> int:
        sizes: list[int] = []
        thread = threading.Thread(target=lambda: sizes.append(dt.tasks.here().world_size))
        thread.start()
        thread.join()
        return sizes[0]


def test_a_function_knows_how_many_nodes_there_are() -> None:
    """When the script issued it: what joins meanwhile is not seen, and what is lost is left out of the next one's."""
    assert dt.tasks.here().world_size == 0

    def size() -> int:
        return dt.tasks.here().world_size

    with (
        dt.init_master_worker(launcher="nearby", hosts="a:3", nodes=(1, 3), threads=1),
        dt.tasks.Channel() as gate,
    ):
        assert dt.tasks.here().world_size == dt.run(size, node=0) == 1
        early = dt.submit(lambda: (gate.get(), dt.tasks.here().world_size), node=0, beside=True)
        assert dt.wait_for_nodes() == 3
        gate.put("go on")
        assert early.result() == ("go on", 1)
        mesh, actor = dt.mesh(dp=3), dt.actor(Sized, node=1)
        assert dt.tasks.here().world_size == 3
        assert (
            dt.run(size, node=[0, 1, 2])
            == dt.run(size, node=mesh)
            == dt.run(size, node=[0, 1, 2], distributed=True)
            == [3, 3, 3]
        )
        assert list(dt.map(lambda _: size(), range(4))) == [3] * 4
        assert actor.size().result() == actor.size_in_a_thread().result() == 3
        dt.kill(2)
        with pytest.raises(dt.NodeLost):
            dt.synchronize(2)
        assert dt.tasks.here().world_size == dt.run(size, node=0) == actor.size().result() == 2
        assert dt.session.node_count() == 3  # their numbers stay


def test_they_know_what_was_said_before_they_came(session: None) -> None:
    try:
        torch.set_default_dtype(torch.float64)
        torch.backends.cudnn.deterministic = True
        dt.channels.select("send", "shm")
        assert dt.wait_for_nodes(2, 50) == 2
        assert dt.run(lambda: str(torch.ones(1).dtype), node=1) == "torch.float64"
        assert dt.run(lambda: torch.backends.cudnn.deterministic, node=1)
        x = torch.ones(1 << 16, device="node:0").to("node:1")
        y = torch.ones(1 << 16, device="node:1").to("node:0")
        assert x.sum().item() == y.sum().item() == 1 << 16
    finally:
        torch.set_default_dtype(torch.float32)
        torch.backends.cudnn.deterministic = False


def test_none_comes_into_a_graph(session: None) -> None:
    with pytest.raises(dt.errors.GraphError, match="wait_for_nodes"), dt.graph(dt.Graph()):
        dt.wait_for_nodes()
    assert dt.wait_for_nodes(2, 50) == 2


MEANWHILE: dict[str, Callable[[], object]] = {
    "synchronize": dt.synchronize,
    "manual_seed": lambda: torch.manual_seed(3),
    "stats": dt.channels.stats,
    "available": dt.channels.available,
    "memory": lambda: torch.node.memory_allocated(torch.node.device_count() - 1),
    "item": lambda: torch.ones(1, device="node:0").item(),
}


@pytest.mark.parametrize("name", MEANWHILE)
def test_nothing_is_sent_to_nodes_that_have_not_come_yet(name: str, session: None) -> None:
    """By another thread, while they join: they would be taken for lost, as nothing reaches them."""
    over, calls = threading.Event(), 0

    def ask() -> None:
        nonlocal calls
        while not over.is_set():
            MEANWHILE[name]()
            calls += 1

    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(ask)
        try:
            assert dt.wait_for_nodes() == 3
        finally:
            over.set()
        asking.result(50)
    assert calls
    assert [node["alive"] for node in dt.nodes()] == [True] * 3
    assert torch.ones(2, device="node:2").sum().item() == 2


def test_a_graph_is_recorded_while_nodes_join(session: None) -> None:
    begun, go = threading.Event(), threading.Event()
    x = torch.ones(3, device="node:0")

    def record() -> None:
        with dt.graph(dt.Graph()):
            y = x + 1
            begun.set()
            go.wait(50)
            y * 2

    with ThreadPoolExecutor(1) as pool:
        recording = pool.submit(record)
        assert begun.wait(50)
        assert dt.wait_for_nodes(2, 50) == 2
        go.set()
        recording.result(50)
    a, g = torch.ones(3, device="node:1"), dt.Graph()
    with dt.graph(g):
        b = a + 1
    a.fill_(5)
    g.replay()
    assert b.tolist() == [6.0] * 3


@pytest.mark.parametrize("known", [False, True])
def test_without_a_root_nobody_waits_for_nodes(session: None, known: bool) -> None:
    assert dt.wait_for_nodes(1) == 1
    launcher = current.session().launcher
    os.kill(launcher._server.pid, signal.SIGKILL)
    launcher.vacant = 0  # as if others had taken the room that it has told of
    link = current.session().link
    while known and not link.losses.launcher_died:  # another thread may have heard of it before
        link.waiting.pause(0.01)
    with pytest.raises(dt.errors.StartError, match="no other can come: the root of the nodes' hosts"):
        dt.wait_for_nodes(3, 50)
    with pytest.raises(dt.NodeLost):
        dt.shutdown()


def test_a_loss_makes_room_for_another(session: None) -> None:
    assert dt.wait_for_nodes(2, 50) == 2
    with pytest.raises(dt.NodeLost):
        dt.run(os._exit, 3, node=0)
    assert dt.wait_for_nodes(2, 50) == 2
    assert [node["alive"] for node in dt.nodes()] == [False, True, True]
    assert torch.ones(2, device="node:1").to("node:2").sum().item() == 2
    with pytest.raises(ValueError, match="3 nodes: this session can have 2"):
        dt.wait_for_nodes(3)


def test_a_session_that_does_not_grow() -> None:
    with dt.init_master_worker(nodes=(1, 2), launcher="inproc"):
        assert dt.session.node_count() == dt.wait_for_nodes() == dt.wait_for_nodes(2) == 2, (
            "none comes later, so all begin"
        )
        with pytest.raises(ValueError, match="3 nodes: this session can have 2"):
            dt.wait_for_nodes(3)


def test_one_that_does_not_start(session: None) -> None:
    here = current.session()
    here.bundle = msgspec.structs.replace(here.bundle, backend="no-such-channel")
    with pytest.raises(
        dt.errors.StartError, match=r"node [12] on a did not start: exit code 1\nits last output:\n(.*\n)*.*no-such"
    ):
        dt.wait_for_nodes()
    assert [node["rank"] for node in dt.nodes()] == [0]
    with pytest.raises(dt.NodeLost, match="node 1"):
        torch.ones(2, device="node:1")
    assert torch.ones(2, device="node:0").sum().item() == 2
    with pytest.raises(dt.NodeLost):  # the loss that the end of the script would tell
        dt.shutdown()
