"""python tools/bench/mesh.py [--nodes 4 16] [--rounds 20]

What a mesh of N nodes costs the script, over a single node: in turns, in one session each. By the CPU's clock, of the
issuing thread and of the whole process.

issue        an operation, queued and not sent
operation    an operation with its share of messages, of the whole process
item         a question to all nodes, over N questions to single ones that are issued together
alternating  an operation on the mesh, one on a node, one on the mesh, ..., over three on the mesh
step         a training step of MLP 4x64, batch 32, without collectives; the collectives of its gradients beside it
wire         commands and bytes of that step to each node
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn as nn

import disttensor as dt
from disttensor import testing

parser = argparse.ArgumentParser()
parser.add_argument("--nodes", type=int, nargs="+", default=[4, 16])
parser.add_argument("--rounds", type=int, default=20)
options = parser.parse_args()


def turns(*calls: Callable[[], None], clock: Callable[[], float], settle: bool = True) -> list[float]:
    """The median time of each, taken in turns."""
    times: list[list[float]] = [[] for _ in calls]
    for call in calls:
        call()
    for _ in range(options.rounds):
        for call, found in zip(calls, times, strict=True):
            if settle:
                dt.synchronize()
            begin = clock()
            call()
            found.append(clock() - begin)
    return [statistics.median(found) for found in times]


def many(x: torch.Tensor, count: int) -> Callable[[], None]:
    def call() -> None:
        y = x
        for _ in range(count):
            y = y * 0.999

    return call


def training(device: torch.device) -> tuple[Callable[[], None], Callable[[], None]]:
    """A step, and the mean of its gradients."""
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.ReLU()))).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.randn(32, 64).to(device)

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    def reduce() -> None:
        for p in model.parameters():
            dt.collectives.all_reduce_(p.grad, "avg", over="dp")

    return step, reduce


def measure(nodes: int) -> None:
    with dt.init_master_worker(nodes=nodes, threads=1):
        mesh = dt.mesh(dp=nodes)
        there, single = torch.ones(16, 16, device=mesh.device), torch.ones(16, 16, device="node:0")
        thread, process = time.thread_time, time.process_time

        with testing.limits(message=100_000):  # nothing leaves meanwhile
            one, all_ = turns(many(single, 60), many(there, 60), clock=thread)
        print(
            f"{nodes} nodes: issue        {one / 60 * 1e6:.2f} us, of the mesh {all_ / 60 * 1e6:.2f}: {all_ / one:.2f}x"
        )

        def flushed(x: torch.Tensor) -> Callable[[], None]:
            call = many(x, 2000)

            def run() -> None:
                call()
                dt.synchronize()

            return run

        one, all_ = turns(flushed(single), flushed(there), clock=process)
        one, all_ = one / 2e3 * 1e6, all_ / 2e3 * 1e6
        print(f"{nodes} nodes: operation    {one:.2f} us, of the mesh {all_:.2f}: {all_ / one:.2f}x")

        s, parts = there.sum(), [torch.ones((), device=f"node:{k}") for k in range(nodes)]

        def together() -> None:
            for work in [dt.fetch(part) for part in parts]:
                work.result()

        asked, fetched, node = turns(lambda: s.item(), together, lambda: parts[0].item(), clock=time.perf_counter)
        print(
            f"{nodes} nodes: item         {asked * 1e6:.0f} us, of {nodes} fetches together {asked / fetched:.2f}x, "
            f"of one node's {asked / node:.1f}x"
        )

        def alternating() -> None:
            x, y = there, single
            for _ in range(20):
                x = x * 0.999
                y = y * 0.999
                x = x * 0.999

        def plain() -> None:
            x = there
            for _ in range(60):
                x = x * 0.999

        mixed, pure = turns(alternating, plain, clock=process)
        each, ratio = mixed / 60 * 1e6, mixed / pure
        print(f"{nodes} nodes: alternating  {each:.1f} us an operation, {ratio:.2f}x of the mesh's only")

        (step, _), (on_mesh, reduce) = training(torch.device("node:0")), training(mesh.device)
        one, all_ = turns(step, on_mesh, clock=process)
        (reduced,) = turns(reduce, clock=process)
        print(
            f"{nodes} nodes: step         {one * 1e3:.2f} ms, of the mesh {all_ * 1e3:.2f}: {all_ / one:.2f}x; "
            f"its 8 collectives {reduced * 1e3:.2f} ms"
        )
        gc.collect()
        with testing.MessageLog() as log:
            on_mesh()
            dt.synchronize()
        print(f"{nodes} nodes: wire         {len(log[0].commands)} commands, {log[0].bytes_sent} bytes to each node")


for count in options.nodes:
    measure(count)
