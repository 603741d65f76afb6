"""Several data channels in one session, between processes."""

from __future__ import annotations

import io
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import joint_programs as programs
import pytest
import torch
from equal import bits
from variants import variants

import disttensor as dt


@pytest.mark.row("T18")
@pytest.mark.parametrize("backend", variants(["auto", "tcp"]))
def test_channels_side_by_side(backend):
    with dt.init_master_worker(nodes=programs.N, backend=backend, threads=1):
        dt.channels.select("*", "tcp", min_bytes=256)
        dt.channels.select(["all_reduce", "send", "download"], "shm", min_bytes=64)
        dt.channels.select(["broadcast", "all_gather"], "gloo", min_bytes=128)
        dt.channels.select("upload", "auto", max_bytes=128)
        for seed in range(300, 312):
            programs.run(seed)
        programs.by_threads()
        programs.with_streams()
        for n in (1, 33, 300_001):
            x = torch.randn(n)
            ys = [x.to(f"node:{k}") for k in range(programs.N)]
            dt.collectives.sendreceive(ys)
            assert all(bits(y.to("node:0").cpu()) == bits(x) for y in ys)
        dt.synchronize()


def test_a_node_that_dies_is_lost_to_all_channels():
    dt.init_master_worker(nodes=3, threads=1)
    xs = [torch.full((300_001,), float(k), device=f"node:{k}") for k in range(3)]
    dt.channels.select("*", "tcp")
    dt.all_reduce(xs)
    dt.synchronize()
    os.kill(dt.nodes()[2]["pid"], signal.SIGKILL)

    def until_it_is_known():
        while True:
            dt.all_reduce(xs)

    with pytest.raises(dt.NodeLost, match="node 2"):
        until_it_is_known()
    with suppress(dt.DisttensorError):
        dt.synchronize()
    rest = [torch.ones(1000, device=f"node:{k}") for k in (0, 1)]
    dt.all_reduce(rest)
    dt.channels.select("*", "shm")  # is opened among those that are left
    dt.all_reduce(rest)
    assert rest[0].to("node:1").sum().item() == 4000
    with pytest.raises(dt.NodeLost):
        rest[0].to("node:2")
    with suppress(dt.DisttensorError):
        dt.shutdown()


#: How a tensor comes to a node, or from there: of a local tensor, and of one that is on a node.
ARRIVALS: dict[str, Callable[[torch.Tensor, Any], Any]] = {
    "up": lambda x, there: x.to("node:1"),
    "up to a mesh": lambda x, there: x.to(dt.mesh(dp=2, nodes=[0, 1]).device),
    "a shard": lambda x, there: dt.shard(torch.stack([x, x]), dt.mesh(dp=2, nodes=[0, 1]), dp=0).detach_().sum(0),
    "to another node": lambda x, there: there.to("node:0"),
    "down": lambda x, there: there.cpu(),
    "fetched": lambda x, there: dt.fetch(there).result(),
    "a function's": lambda x, there: dt.run(torch.clone, x, node=1),
    "broadcast": lambda x, there: dt.collectives.functional.broadcast(there, dt.collectives.new_group([0, 1]))[0],
    "from a file": lambda x, there: torch.load(_saved(x), map_location="node:1"),
}


def _saved(x: torch.Tensor) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    return file


@pytest.mark.parametrize("backend", variants(["auto", "tcp"]))
def test_what_arrives_is_not_a_view(backend: str) -> None:
    """``detach_`` refuses views, and in inference mode nodes execute it."""
    with dt.init_master_worker(nodes=2, backend=backend, threads=1), torch.inference_mode():
        for numel in (6, 1 << 15, 1 << 20):
            x = torch.arange(numel, dtype=torch.float32)
            there = x.to("node:1")
            for way, arrive in ARRIVALS.items():
                arrived = arrive(x, there)
                assert not arrived._is_view(), (way, numel)
                assert bits(arrived.detach_().cpu()) == bits(x), (way, numel)
