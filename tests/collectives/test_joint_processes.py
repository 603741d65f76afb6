"""Collectives between nodes that are processes, and the death of one."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from contextlib import suppress

import joint_programs as programs
import pytest
import torch
from channel_kit import BETWEEN_PROCESSES
from variants import variants

import disttensor as dt


@pytest.mark.row("I11")
@pytest.mark.parametrize("backend", BETWEEN_PROCESSES)
def test_between_processes_and_when_one_dies(backend):
    dt.init_master_worker(nodes=3, backend=backend, threads=1)
    xs = [torch.full((300_001,), float(k), device=f"node:{k}") for k in range(3)]
    for way in ("ring", "direct", "halving", "tree", None):
        ys = [torch.empty_like(x) for x in xs]
        dt.all_reduce(xs, out=ys, algorithm=way)
        assert all(y.eq(3).all() for y in ys)
    os.kill(dt.nodes()[2]["pid"], signal.SIGKILL)

    def until_it_is_known():
        while True:
            dt.all_reduce(xs)

    with pytest.raises(dt.NodeLost, match="node 2"):
        until_it_is_known()
    for k in range(2):  # what was under way has ended; whether well depends on when it was
        with suppress(dt.DisttensorError):
            xs[k].cpu()
    with suppress(dt.DisttensorError):
        dt.synchronize()
    rest = [torch.ones(1000, device=f"node:{k}") for k in (0, 1)]
    dt.all_reduce(rest)
    assert rest[0].sum().item() == 2000
    with suppress(dt.DisttensorError):
        dt.shutdown()


#: What fails on nodes 0 and 1 by the end of node 2; each gives what it has made there.
BROKEN: dict[str, Callable[[list[torch.Tensor]], list[torch.Tensor]]] = {
    "all_reduce": lambda xs: dt.all_reduce(xs) or xs[:2],
    "broadcast": lambda xs: dt.broadcast([*xs[:2], xs[2]], 2) or xs[:2],  # to one of them by way of the other
    "transfer": lambda xs: [xs[2].to(f"node:{k}") for k in range(2)],
}


@pytest.mark.parametrize("backend", variants(BETWEEN_PROCESSES))
def test_what_breaks_by_a_nodes_loss_raises_that_loss(backend):
    """It is raised by tensors of nodes that are there, and names what has failed on them, and its line."""
    with dt.init_master_worker(nodes=3, backend=backend, threads=1):  # whose end raises the loss no more
        inputs = [[torch.ones(size, device=f"node:{k}") for k in range(3)] for size in (10, 300_001) for _ in BROKEN]
        for xs in inputs:
            dt.all_reduce(xs)
        dt.synchronize()
        pid = dt.nodes()[2]["pid"]
        os.kill(pid, signal.SIGSTOP)  # what is issued now waits for it
        broken = [(name, BROKEN[name](xs)) for name, xs in zip([*BROKEN, *BROKEN], inputs, strict=True)]
        os.kill(pid, signal.SIGKILL)
        for name, made in broken:
            for x in made:
                with pytest.raises(dt.NodeLost, match=r"node 2 .* is lost: killed by SIGKILL") as raised:
                    x.sum().item()
                assert raised.value.rank == 2
                where = rf"failed: {name} on node [01] .*\n  issued: .*test_joint_processes.py:\d+ in "
                assert re.search(where, "\n".join(raised.value.__notes__))
        assert (torch.ones(2, device="node:1") + 1).tolist() == [2, 2]


@pytest.mark.parametrize("backend", BETWEEN_PROCESSES)
def test_other_transfers_do_not_stand_in_the_way(backend):
    """What a node sends and what its collectives send are in no order that its peers could rely on."""
    with dt.init_master_worker(nodes=programs.N, backend=backend, threads=1):
        for seed in range(200, 212):
            programs.run(seed)
        programs.by_threads()
        programs.with_streams()
        dt.synchronize()


def test_who_waits_for_a_stopped_node_goes_on_when_that_is_ended():
    """Stopped, not dead: its connections stay, and nothing but the user ends it, and so the waiting of the others."""
    dt.init_master_worker(nodes=3, threads=1)
    xs = [torch.ones(1000, device=f"node:{k}") for k in range(3)]
    dt.all_reduce(xs)
    dt.synchronize()
    os.kill(dt.nodes()[2]["pid"], signal.SIGSTOP)
    dt.all_reduce(xs)
    with pytest.raises(TimeoutError, match="node"):
        dt.synchronize(timeout=0.1)
    dt.kill(2)
    for x in xs:
        with pytest.raises(dt.NodeLost, match="node 2"):
            x.cpu()
    with suppress(dt.DisttensorError):
        dt.synchronize()
    assert (torch.ones(2, device="node:1") + 1).tolist() == [2, 2]
    with suppress(dt.DisttensorError):
        dt.shutdown()


def test_a_node_that_dies_while_a_function_runs_on_all():
    def work(k):
        if k == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return k, torch.ones(k)

    dt.init_master_worker(nodes=3, threads=1)
    with pytest.raises(dt.NodeLost, match="node 1"):
        dt.run(work, dt.tasks.Each(range(3)), node=range(3))
    assert dt.run(work, dt.tasks.Each([0, 2]), node=[0, 2])[1][1].tolist() == [1, 1]
    with suppress(dt.DisttensorError):
        dt.shutdown()
