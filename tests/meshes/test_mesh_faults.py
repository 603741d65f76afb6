"""What happens to a mesh when something happens to one of its nodes. With real nodes."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from aftermath import aftermath, probe, within
from variants import variants

import disttensor as dt
from disttensor import testing


def step(mesh: dt.meshes.Mesh, w: torch.Tensor) -> None:
    """Issues some commands, collectives among them."""
    for _ in range(5):
        w.mul_(0.99).add_(torch.ones_like(w), alpha=0.01)
        dt.collectives.all_reduce_(w, "avg", over="dp")


def for_ever(mesh: dt.meshes.Mesh, w: torch.Tensor) -> None:
    while True:
        step(mesh, w)
        w.sum().item()


@pytest.mark.fault(1, 2)
@pytest.mark.parametrize("seed", variants(range(8)))
def test_a_node_that_is_killed_is_named_by_its_coordinates_and_the_others_stay(seed: int) -> None:
    """At any moment: in a collective, with commands under way, while nothing is at work."""
    chance = random.Random(seed)
    with dt.init_master_worker(nodes=4, threads=1):
        mesh = dt.mesh(dp=2, tp=2)
        w = torch.ones(1000, device=mesh.device)
        kept = torch.arange(4.0, device=mesh.device)
        kept.sum().item()
        for rank in range(4):
            probe(rank)
        victim = chance.randrange(4)
        pid = int(dt.nodes()[victim]["pid"])
        for _ in range(chance.randrange(4)):
            step(mesh, w)
        with within(1.0):
            os.kill(pid, signal.SIGKILL)
            with pytest.raises(dt.NodeLost, match=f"node {victim} "):
                for_ever(mesh, w)
        where = f"it was dp={victim // 2}, tp={victim % 2} of the mesh (dp=2, tp=2)"
        with pytest.raises(dt.NodeLost, match=f"node {victim} ") as raised:
            kept + 1
        assert any(where in note for note in raised.value.__notes__)
        for rank, part in enumerate(kept.shards()):  # type: ignore[attr-defined]
            if rank != victim:
                assert (part * 2).tolist() == [0, 2, 4, 6]
                probe(rank)
        other = mesh.slice(dp=1 - victim // 2)
        half = kept.at(dp=1 - victim // 2)  # type: ignore[attr-defined]
        assert dt.all_reduce(half, "sum", over="tp").tolist() == [0, 2, 4, 6]
        assert other.device == half.device
        del w, kept, part, half
        again = dt.mesh(three=3, nodes=[rank for rank in range(4) if rank != victim])
        assert dt.all_reduce(torch.ones(2, device=again.device), over="three").tolist() == [3, 3]
        with contextlib.suppress(dt.NodeLost):  # collectives that nobody asked about have failed by it, too
            dt.shutdown()


@pytest.mark.fault(5)
def test_a_node_that_stands_still_is_waited_for() -> None:
    with dt.init_master_worker(nodes=3, threads=1):
        mesh = dt.mesh(dp=3)
        x = torch.ones(8, device=mesh.device)
        x.sum().item()
        with aftermath(0, 2):
            pid = int(dt.nodes()[1]["pid"])
            os.kill(pid, signal.SIGSTOP)
            y = x
            for _ in range(300):
                y = y + 1
            assert y.at(dp=0).sum().item() == 8 * 301  # the others go on
            with pytest.raises(TimeoutError, match="node 1 has not answered"):
                dt.synchronize(1, timeout=0.5)
            os.kill(pid, signal.SIGCONT)
            assert y.sum().item() == 8 * 301
            del y


INTERRUPTED = """
import os, signal, threading, torch
import disttensor as dt

dt.init_master_worker(nodes=3, threads=1)
mesh = dt.mesh(dp=3)
w, caught = torch.zeros(50, device=mesh.device), 0
for i in range(30):
    timer = threading.Timer(0.002 * i, os.kill, (os.getpid(), signal.SIGINT))
    try:
        timer.start()
        while True:
            w.add_(1).sub_(1)
            dt.collectives.all_reduce_(w, "sum", over="dp")
            w.sum().item()
    except KeyboardInterrupt:
        caught += 1
    timer.join()
    w.sum().item()  # all ranks have the same
    w.zero_()
    assert dt.all_reduce(torch.ones(2, device=mesh.device), over="dp").tolist() == [3, 3]
print(caught)
dt.shutdown()
"""


@pytest.mark.fault(18)
def test_ctrl_c_in_operations_on_a_mesh(script: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    done = script(INTERRUPTED)
    assert (done.returncode, done.stdout) == (0, "30\n"), done.stderr


#: What a script may issue without an end, on a mesh and on one of its nodes, mostly the last; each with what it needs.
ENDLESS: dict[str, Callable[[dt.meshes.Mesh], Callable[[], object]]] = {
    "operations": lambda mesh: partial(torch.add, torch.ones(4, device=mesh.device), 0),
    "a mesh and a node": lambda mesh: partial(
        in_turns, torch.ones(4, device=mesh.device), torch.ones(4, device="node:2")
    ),
    "a mesh and another node": lambda mesh: partial(
        in_turns, torch.ones(4, device=mesh.device), torch.ones(4, device="node:0"), 40
    ),
    "many commands in turns": lambda mesh: partial(
        in_turns, torch.ones(4, device=mesh.device), torch.ones(4, device="node:2"), 40
    ),
    "draws": lambda mesh: lambda: (torch.rand(2, device=mesh.device), torch.rand(2, device="node:2")),
    "collectives": lambda mesh: partial(
        sums, torch.ones(4, device=mesh.device), torch.ones(4, device=dt.mesh(row=2, nodes=[1, 2]).device)
    ),
    "replays": lambda mesh: replays(mesh),
}


def in_turns(x: torch.Tensor, y: torch.Tensor, count: int = 1) -> None:
    for _ in range(count):
        x + 0
    y * 2


def sums(x: torch.Tensor, y: torch.Tensor) -> None:
    dt.collectives.all_reduce_(x, "avg", over="dp")
    dt.collectives.all_reduce_(y, "avg", over="row")


def replays(mesh: dt.meshes.Mesh) -> Callable[[], None]:
    def step() -> tuple[torch.Tensor, ...]:
        return torch.rand(2, device=mesh.device), torch.rand(2, device="node:1")

    step()
    g = dt.Graph()
    with dt.graph(g):
        step()
    return g.replay


def many(issue: Callable[[], object]) -> None:
    for _ in range(5000):
        issue()


@contextlib.contextmanager
def small_window(kind: str) -> Iterator[tuple[dt.meshes.Mesh, Callable[[], object], int]]:
    """A mesh of three with a small window, what is issued without an end, and the last node's process."""
    with dt.init_master_worker(nodes=3, threads=1), testing.limits(window=2000):
        mesh = dt.mesh(dp=3)
        issue = ENDLESS[kind](mesh)
        issue()
        dt.synchronize()
        yield mesh, issue, int(dt.nodes()[2]["pid"])


@pytest.mark.fault(29)
@pytest.mark.parametrize("kind", ENDLESS)
def test_one_slow_member_holds_the_script_at_its_window(kind: str) -> None:
    """Also one that goes from the mesh to a node and back for every operation, or for what operations need."""
    with small_window(kind) as (mesh, issue, pid):
        os.kill(pid, signal.SIGSTOP)
        held = threading.Event()
        with testing.at("window", held.set):
            thread = threading.Thread(target=many, args=(issue,))
            thread.start()
            assert held.wait(60)
            assert testing.queued(2).in_flight <= 2000 + 256
            os.kill(pid, signal.SIGCONT)
            thread.join(60)
            assert not thread.is_alive()
        assert torch.ones(4, device=mesh.device).sum().item() == 4


@pytest.mark.fault(18)
@pytest.mark.parametrize("kind", ["draws", "replays"])
def test_ctrl_c_at_a_full_window_leaves_replicas_equal(kind: str) -> None:
    """Nodes and the script agree on which generators are in use."""
    with small_window(kind) as (mesh, issue, pid):
        for _ in range(2):
            os.kill(pid, signal.SIGSTOP)
            with testing.at("window", partial(signal.raise_signal, signal.SIGINT)), pytest.raises(KeyboardInterrupt):
                many(issue)
            os.kill(pid, signal.SIGCONT)
            dt.synchronize()
            first, *others = [shard.cpu() for shard in torch.rand(3, device=mesh.device).shards()]  # type: ignore[attr-defined]
            assert all(torch.equal(first, other) for other in others)
