"""python tools/bench/overlap.py [--mib 8] [--batches 24] [--repeats 7] [--gbit 10 2.5 1] [--what gradients]

The same transfer-heavy loop with overlap and without, in turns in one run, one compute thread per node. Round trip: a
batch goes to a node, is computed with, and the result of its size comes back; node to node: node 0 makes it, node 1
computes with it, the result comes back. Without: each batch waits for the one before, as a loop with `.cpu()` does.
With: `dt.data.prefetch` and `dt.fetch`. Gradients: steps of `dt.DataParallel` on both nodes, whose buckets are reduced
beside the backward pass, or not (`overlap=False`). The computation is made to take as long as the transfers.

Once through shared memory, where a transfer is one copy, and at the speed of networks (see network.py), where it waits
for the wire: the slower that is, the less of the cores' time is a transfer's. (TCP over loopback copies twice and keeps
two cores busy by itself, so that on a machine of two cores nothing goes on beside it.)
"""

from __future__ import annotations

import argparse
import copy
import os
import time
from collections import deque
from collections.abc import Callable, Iterable

import torch
import torch.nn as nn
from network import GBIT, Network

import disttensor as dt

#: Results that the script lets be under way.
UNDER_WAY = 4


class Loop:
    """``batches`` of ``mib`` MiB through one node."""

    name = "round trip by one node"

    def __init__(self, mib: int, batches: int) -> None:
        self.batches = [torch.ones(mib << 18) for i in range(batches)]
        for i, x in enumerate(self.batches):
            x[-1] = i
        self.weights = [torch.eye(384, device=f"node:{node}") for node in range(2)]
        self.turns = 0  #: of the computation

    def compute(self, x: torch.Tensor, node: int = 0) -> torch.Tensor:
        """Needs the batch, and takes a time of its own."""
        weight = self.weights[node] * x[0]
        for _ in range(self.turns):
            weight = weight @ weight
        return x * weight[0, 0]

    def serial(self) -> list[torch.Tensor]:
        return [self.compute(x.to("node:0")).cpu() for x in self.batches]

    def overlapped(self) -> list[torch.Tensor]:
        return collect(dt.fetch(self.compute(x)) for x in dt.data.prefetch(self.batches, "node:0"))

    def transfers(self) -> None:
        collect(dt.fetch(x) for x in dt.data.prefetch(self.batches, "node:0"))

    def computation(self) -> None:
        x = self.batches[0].to("node:0")
        for _ in self.batches:
            self.compute(x)
        dt.synchronize()


class Between(Loop):
    """The same from node 0 to node 1, both of which compute."""

    name = "node to node and back to the script"

    def __init__(self, mib: int, batches: int) -> None:
        super().__init__(mib, batches)
        self.batches = [x.to("node:0") for x in self.batches]

    def both(self, x: torch.Tensor) -> torch.Tensor:
        return self.compute(self.compute(x).to("node:1"), 1)

    def serial(self) -> list[torch.Tensor]:
        return [self.both(x).cpu() for x in self.batches]

    def overlapped(self) -> list[torch.Tensor]:
        return collect(dt.fetch(self.both(x)) for x in self.batches)

    def transfers(self) -> None:
        collect(dt.fetch(x.to("node:1")) for x in self.batches)

    def computation(self) -> None:
        x, y = self.batches[0], self.batches[0].to("node:1")
        for _ in self.batches:
            self.compute(x), self.compute(y, 1)
        dt.synchronize()


class Gradients:
    """Steps of a model with ten linear layers, a bucket for each; of all the same gradients."""

    name = "gradients of data parallel training"

    def __init__(self, mib: int, batches: int) -> None:
        mesh = dt.mesh(dp=2)
        width = round((mib << 18) ** 0.5)
        model = nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(10)]).to(mesh.device)
        self.bucket = mib / 2  # full with one layer
        self.models = [
            dt.DataParallel(copy.deepcopy(model), mesh, bucket_mb=self.bucket, overlap=overlap)
            for overlap in (False, True)
        ]
        self.steps, self.turns = max(1, batches // 10), 0  #: turns: rows of a batch
        self.rows = torch.randn(4096, width, device=mesh.device)

    def step(self, model: dt.DataParallel) -> None:
        model.zero_grad()
        model(self.rows[: self.turns]).square().mean().backward()

    def train(self, model: dt.DataParallel) -> list[torch.Tensor]:
        for _ in range(self.steps):
            self.step(model)
        dt.synchronize()
        return [p.grad for p in model.parameters() if p.grad is not None]

    def serial(self) -> list[torch.Tensor]:
        return self.train(self.models[0])

    def overlapped(self) -> list[torch.Tensor]:
        return self.train(self.models[1])

    def transfers(self) -> None:
        for _ in range(self.steps):
            dt.training.reduce_gradients(self.models[0], bucket_mb=self.bucket)
        dt.synchronize()

    def computation(self) -> None:
        with self.models[0].no_sync():
            self.train(self.models[0])


KINDS: dict[str, type[Loop | Gradients]] = {"trip": Loop, "nodes": Between, "gradients": Gradients}


def collect(works: Iterable[dt.futures.Work[torch.Tensor]]) -> list[torch.Tensor]:
    """Their results, while a few are under way."""
    out, under_way = [], deque[dt.futures.Work[torch.Tensor]]()
    for work in works:
        under_way.append(work)
        if len(under_way) > UNDER_WAY:
            out.append(under_way.popleft().result())
    return out + [work.result() for work in under_way]


def timed(loop: Callable[[], object]) -> float:
    start = time.perf_counter()
    loop()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=8)
    parser.add_argument("--batches", type=int, default=24)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--gbit", type=float, nargs="*", default=[10.0, 2.5, 1.0], help="speeds of networks")
    parser.add_argument("--what", nargs="*", choices=KINDS, default=[*KINDS])
    options = parser.parse_args()
    torch.set_num_threads(1)
    dt.channels.register_channel("network", Network)
    for gbit in (None, *options.gbit):
        channel, name = ("shm", "shared memory") if gbit is None else ("network", f"{gbit:g} Gbit/s")
        os.environ[GBIT] = str(gbit)
        with dt.init_master_worker(channel, nodes=2, threads=1):
            for kind in options.what:
                loop = KINDS[kind](options.mib, options.batches)
                print(f"{loop.name}, {options.batches} times {options.mib} MiB, {name}:", flush=True)
                compare(loop, options.repeats)


def compare(loop: Loop | Gradients, repeats: int) -> None:
    """Prints what the four ways take: the fastest run of each, since other programs can only slow them down."""
    timed(loop.transfers), timed(loop.serial)
    loop.turns = 20
    timed(loop.computation)
    wanted, measured = (min(timed(way) for _ in range(5)) for way in (loop.transfers, loop.computation))
    loop.turns = max(1, round(20 * wanted / measured))
    assert all(torch.equal(a, b) for a, b in zip(loop.serial(), loop.overlapped(), strict=True))
    ways = (loop.transfers, loop.computation, loop.serial, loop.overlapped)
    rows = [[timed(way) for way in ways] for _ in range(repeats)]
    transfers, computation, serial, overlapped = (min(column) * 1e3 for column in zip(*rows, strict=True))
    print(f"  transfers alone {transfers:.0f} ms, computation alone {computation:.0f} ms")
    print(
        f"  one after the other {serial:.0f} ms, overlapped {overlapped:.0f} ms: {serial / overlapped:.2f}x; "
        f"{overlapped / max(transfers, computation):.2f}x the larger of the two alone, "
        f"{overlapped / (transfers + computation):.2f}x their sum",
        flush=True,
    )


if __name__ == "__main__":
    main()
