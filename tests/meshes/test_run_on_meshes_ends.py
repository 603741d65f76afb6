"""``dt.run(fn, node=mesh, distributed=True)``: nodes that die, and sessions of other kinds."""

from __future__ import annotations

import os
import signal

import pytest
import torch
import torch.distributed as dist
from variants import variants

import disttensor as dt
from disttensor.tasks import device_mesh


def total(x: torch.Tensor) -> float:
    dist.all_reduce(x, group=device_mesh().get_group("tp"))
    return x.sum().item()


def killed(who: int, over: str) -> None:
    """The others wait, some of them for each other in a group that the dead one is not in. None of them sends: gloo may
    forget who sends to one that ends."""
    x, me = torch.ones(1), dist.get_rank()
    if me == who:
        for _ in range(dist.get_world_size() - 1):
            dist.recv(x)
        os.kill(os.getpid(), signal.SIGKILL)
    dist.send(x, who)
    group = device_mesh().get_group(over)
    other = next(rank for rank in dist.get_process_group_ranks(group) if rank != me)
    dist.recv(x, other, group=group)


@pytest.mark.parametrize("over", variants(["dp", "tp"]))
def test_a_killed_node_ends_the_others_waiting(over: str) -> None:
    with dt.init_master_worker(nodes=4, threads=1):
        mesh = dt.mesh(dp=2, tp=2)
        with pytest.raises(dt.NodeLost, match="SIGKILL") as caught:
            dt.run(killed, 1, over, node=mesh, distributed=True)
        note = (
            f"  node 1 is dp=0, tp=1 of {mesh}; mesh.slice(...) and dt.mesh(nodes=[...], ...) are meshes of other nodes"
        )
        assert caught.value.rank == 1
        assert note in caught.value.__notes__
        assert "and 3 other nodes broke off, as ranks wait for each other" in caught.value.__notes__
        assert dt.run(total, torch.ones(1), node=mesh.slice(dp=1), distributed=True) == [2, 2]
        for where in ({"node": mesh, "distributed": True}, {"node": mesh}):
            with pytest.raises(dt.NodeLost) as again:
                dt.run(total, torch.ones(1), **where)
            assert note in again.value.__notes__


def test_a_node_that_dies_while_groups_are_made() -> None:
    def deadly() -> None:
        dist.new_group = lambda *args, **options: os.kill(os.getpid(), signal.SIGKILL)

    with dt.init_master_worker(nodes=2, threads=1):
        mesh = dt.mesh(tp=2, one=1)
        dt.run(deadly, node=1)
        with pytest.raises(dt.NodeLost, match="SIGKILL") as caught:
            dt.run(total, torch.ones(1), node=mesh, distributed=True)
        assert caught.value.rank == 1
        assert dt.run(total, torch.ones(1), node=dt.mesh(tp=1, nodes=[0]), distributed=True) == [1]


def test_threads_have_no_process_groups() -> None:
    with dt.init_master_worker(nodes=2, launcher="inproc"):
        mesh = dt.mesh(tp=2)
        with pytest.raises(dt.DisttensorError, match=r"one process group per process.*node= alone runs it without"):
            dt.run(total, torch.ones(1), node=mesh, distributed=True)
        x = dt.meshes.from_shards(mesh, [torch.zeros(1), torch.ones(1)])
        assert dt.run(lambda t: t.item(), x, node=mesh) == [0, 1]


@pytest.mark.parametrize("device", ["cuda:0", "cpu"])
def test_on_simulated_devices(device: str) -> None:
    """torch.distributed sees the CPU's memory that they are, and results are on the device of the arguments."""

    def kind(x: torch.Tensor) -> tuple[str, torch.Tensor]:
        dist.all_reduce(x, group=device_mesh().get_group("tp"))
        return device_mesh().device_type, x

    with dt.init_master_worker(nodes=2, simulate_cuda=1, threads=1):
        mesh = dt.mesh(tp=2, device=device)
        x = dt.meshes.from_shards(mesh, [torch.zeros(1), torch.ones(1)])
        found = dt.run(kind, x, node=mesh, distributed=True)
        assert [one for one, _ in found] == ["cpu", "cpu"]
        assert [part.device for _, part in found] == [dt.device(node, device) for node in range(2)]
        assert dt.meshes.from_shards(mesh, [part for _, part in found]).item() == 1


def test_a_mesh_of_another_session() -> None:
    with dt.init_master_worker(nodes=2, launcher="inproc"):
        old = dt.mesh(dp=1, tp=2)
        assert dt.run(lambda: 1, node=old) == [1, 1]
    with dt.init_master_worker(nodes=3, launcher="inproc"):
        dt.mesh(all=3)  # in the other one's slot
        with pytest.raises(dt.DisttensorError) as caught:
            dt.run(lambda: 1, node=old)
        assert str(caught.value) == (
            "run: the mesh (dp=1, tp=2) of nodes [0, 1] is one of a session that was shut down; "
            "dt.mesh(dp=1, tp=2, nodes=[0, 1]) makes another"
        )
