"""Random programs over nodes, a mesh and two of its slices that overlap: each rank has what one process computes.

Tensors are made, written, seen as shards, copied between places, reduced, asked for and dropped, in one order for all.
The twin is local: a list with the tensor of each rank, where a shard is the very tensor that stands in the list.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from equal import bits
from fuzzing import SEEDS, fuzz
from hypothesis import strategies as st
from mesh_kit import connect

import disttensor as dt
from disttensor.meshes import Mesh, from_shards

NODES = 4
SHAPE = (2, 3)
#: (dims, nodes) of the mesh and of two slices; both have node 1.
PLACES = (({"dp": 2, "tp": 2}, (0, 1, 2, 3)), ({"tp": 2}, (0, 1)), ({"dp": 2}, (1, 3)))


@pytest.fixture(scope="module", params=["local", "inproc"], autouse=True)
def session(request: pytest.FixtureRequest) -> Iterator[None]:
    with dt.init_master_worker(nodes=NODES, threads=1, launcher=request.param):
        if request.param == "local":
            connect(NODES)
        yield


def places() -> list[Mesh]:
    return [dt.mesh(nodes=nodes, **dims) for dims, nodes in PLACES]


@dataclass
class Pair:
    """A tensor, and its twin: the tensors of its ranks here. ``place`` is an index of PLACES, or -1 for a node."""

    remote: Any
    local: list[torch.Tensor]
    place: int

    def check(self) -> None:
        shards = [self.remote] if self.place < 0 else self.remote.shards()
        for shard, wanted in zip(shards, self.local, strict=True):
            assert bits(shard.cpu()) == bits(wanted)


def groups(place: int, over: str) -> list[list[int]]:
    if len(PLACES[place][0]) == 1:
        return [[0, 1]]
    return [[0, 2], [1, 3]] if over == "dp" else [[0, 1], [2, 3]]


def step(pool: list[Pair], kind: str, i: int, j: int, k: int) -> None:
    x = pool[i % len(pool)]
    alike = [pair for pair in pool if pair.remote.device == x.remote.device]
    y = alike[j % len(alike)]
    match kind:
        case "add":
            pool.append(Pair(x.remote + y.remote, [a + b for a, b in zip(x.local, y.local, strict=True)], x.place))
        case "scale":
            pool.append(Pair(x.remote * (k / 4), [a * (k / 4) for a in x.local], x.place))
        case "write":
            x.remote.mul_(0.5).add_(y.remote)
            for a, b in zip(x.local, y.local, strict=True):
                a.mul_(0.5).add_(b)
        case "row":
            x.remote[k % 2].fill_(float(k))
            for a in x.local:
                a[k % 2].fill_(float(k))
        case "shard" if x.place >= 0:
            rank = k % len(x.local)
            pool.append(Pair(x.remote.shards()[rank], [x.local[rank]], -1))
        case "slice" if x.place == 0:
            place, at = ((1, {"dp": 0}), (2, {"tp": 1}))[k % 2]
            pool.append(Pair(x.remote.at(**at), [x.local[rank] for rank in PLACES[place][1]], place))
        case "move" if x.place < 0:
            place = k % 3
            device = places()[place].device
            pool.append(Pair(x.remote.to(device), [x.local[0].clone() for _ in PLACES[place][1]], place))
        case "move" if x.place > 0:
            ways = {1: [0, 1, 0, 1], 2: [0, 0, 1, 1]}[x.place]
            pool.append(Pair(x.remote.to(places()[0].device), [x.local[rank].clone() for rank in ways], 0))
        case "move":
            there = x.local[2] if k % 4 == 2 else x.local[k % 4].clone()  # what is there already is not copied
            pool.append(Pair(x.remote.shards()[k % 4].to("node:2"), [there], -1))
        case "reduce" if x.place >= 0:
            over = list(PLACES[x.place][0])[k % len(PLACES[x.place][0])]
            sums = list(x.local)
            for group in groups(x.place, over):
                for rank in group:
                    sums[rank] = torch.maximum(*(x.local[member] for member in group))
            pool.append(Pair(dt.all_reduce(x.remote, "max", over=over), sums, x.place))
        case "ask":
            x.check()
        case "drop" if len(pool) > 8:
            pool.pop(8 + i % (len(pool) - 8))
        case "collect":
            gc.collect(0)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            ["add", "scale", "write", "row", "shard", "slice", "move", "reduce", "drop", "drop", "ask", "collect"]
        ),
        st.integers(0, 40), st.integers(0, 40), st.integers(0, 7),
    ),
    min_size=1, max_size=60,
)  # fmt: skip


def run(steps: list[tuple[str, int, int, int]]) -> None:
    generator = torch.Generator().manual_seed(len(steps))
    pool: list[Pair] = []
    for place, mesh in enumerate(places()):
        values = [torch.randn(SHAPE, generator=generator) for _ in PLACES[place][1]]
        pool.append(Pair(from_shards(mesh, values), values, place))
    for node in range(NODES):
        value = torch.randn(SHAPE, generator=generator)
        pool.append(Pair(value.to(f"node:{node}"), [value], -1))
    for name, *numbers in steps:
        step(pool, name, *numbers)
    for pair in pool:
        pair.check()


@pytest.mark.parametrize("name", SEEDS)
def test_each_rank_has_what_one_process_computes(name: str) -> None:
    fuzz(SEEDS[name], 15, run, STEPS)
