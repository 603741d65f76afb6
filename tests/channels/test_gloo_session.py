"""A session of processes over gloo."""

from __future__ import annotations

import os
import signal
import threading

import pytest
import torch

import disttensor as dt

N = 3


@pytest.fixture
def three():
    with dt.init_master_worker(nodes=N, backend="gloo"):
        yield


def test_tensors_and_collectives(three):
    local = [torch.randn(300, 400) for _ in range(N)]
    xs = [x.to(f"node:{k}") for k, x in enumerate(local)]
    for _ in range(3):
        ys = [x.clone() for x in xs]
        dt.all_reduce(ys)
        for y in ys:
            torch.testing.assert_close(y.cpu(), sum(local))
        assert torch.equal(xs[0].to("node:2").cpu(), local[0])
        dt.broadcast(ys[:2], 1)
    work = dt.all_reduce(xs, "AVG", async_op=True)
    assert work.wait()
    torch.testing.assert_close(xs[1].cpu(), sum(local) / N)


@pytest.mark.parametrize("met", [False, True], ids=["the first", "a later one"])
def test_a_node_killed_in_the_middle_of_a_collective(met):
    with dt.init_master_worker(nodes=N, backend="gloo"):
        pid = dt.run(os.getpid, node=2)
        xs = [torch.ones(1 << 20, device=f"node:{k}") for k in range(N)]
        if met:
            dt.all_reduce([x.clone() for x in xs])
            dt.synchronize()
        os.kill(pid, signal.SIGSTOP)  # the others are in it, and it never comes
        dt.all_reduce(xs)
        threading.Timer(0.3, os.kill, (pid, signal.SIGKILL)).start()
        for x in xs:
            with pytest.raises(dt.DisttensorError, match=r"rank 2|node 2"):
                x.cpu()
        ys = [torch.ones(1 << 20, device=f"node:{k}") for k in range(2)]
        dt.all_reduce(ys)
        assert ys[0][0].item() == ys[1][0].item() == 2
