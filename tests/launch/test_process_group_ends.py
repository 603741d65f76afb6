"""``dt.run(fn, node=..., distributed=True)``: nodes that die, and sessions of other kinds."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from variants import variants

import disttensor as dt
from disttensor import testing


def reduced(x: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(x)
    return x


def test_all_nodes_know_each_other_when_a_channel_is_open() -> None:
    with dt.init_master_worker(nodes=2):
        dt.channels.select("all_reduce", "gloo")
        assert testing.queued().commands == 0


def killed(who: int, size: int) -> None:
    x = torch.ones(size)
    dist.all_reduce(x)
    if dist.get_rank() == who:
        os.kill(os.getpid(), signal.SIGKILL)
    while True:
        dist.all_reduce(x)


@pytest.mark.parametrize("size", [1, 1 << 22])
def test_a_killed_node_ends_the_others_waiting(size: int) -> None:
    with dt.init_master_worker(nodes=3, threads=1):
        with pytest.raises(dt.NodeLost, match="SIGKILL") as caught:
            dt.run(killed, 1, size, node=[0, 1, 2], distributed=True)
        assert caught.value.rank == 1
        assert "and 2 other nodes broke off, as ranks wait for each other" in caught.value.__notes__
        assert [one.item() for one in dt.run(reduced, torch.ones(1), node=[0, 2], distributed=True)] == [2.0] * 2
        with pytest.raises(dt.NodeLost):
            dt.run(reduced, torch.ones(1), node=[0, 1, 2], distributed=True)


def test_threads_have_no_process_groups() -> None:
    with dt.init_master_worker(nodes=2, launcher="inproc"):
        with pytest.raises(dt.DisttensorError, match="one process group per process"):
            dt.run(reduced, torch.ones(1), node=[0, 1], distributed=True)
        assert dt.run(lambda: 1, node=[0, 1]) == [1, 1]


def test_nodes_that_run_no_functions() -> None:
    refused = pytest.raises(dt.DisttensorError, match="runs no user functions")
    with dt.init_master_worker(nodes=2, functions="none"), refused:
        dt.run(reduced, torch.ones(1), node=[0, 1], distributed=True)


@pytest.mark.parametrize("blocking", variants(["0", "1"]))
def test_sessions_after_each_other(script: Callable[..., Any], blocking: str) -> None:
    """The end of a session with a process group is as any other's."""
    found = script(
        "import torch.distributed as dist, disttensor as dt\n"
        "for backend in ('auto', 'gloo'):\n"
        "    with dt.init_master_worker(backend, nodes=2):\n"
        "        print(dt.run(lambda: dist.get_rank(), node=[0, 1], distributed=True))\n",
        DISTTENSOR_LAUNCH_BLOCKING=blocking,
    )
    assert (found.stdout, found.stderr, found.returncode) == ("[0, 1]\n" * 2, "", 0)


@pytest.mark.gpu
@pytest.mark.gpu(2)
def test_nccl() -> None:
    def total() -> tuple[str, float]:
        x = torch.ones(4, device="cuda")
        dist.all_reduce(x)
        return dist.get_backend(), x.sum().item()

    with dt.init_master_worker(nodes=2):
        assert dt.run(total, node=[0, 1], distributed=True) == [("cpu:gloo,cuda:nccl", 8.0)] * 2
