"""What collectives are made of in the script, with nodes that are processes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import zip_longest

import pytest
import torch

import disttensor as dt

N = 4


@pytest.fixture(scope="module", params=["shm", "tcp"])
def four(request: pytest.FixtureRequest) -> Iterator[None]:
    with dt.init_master_worker(nodes=N, backend=request.param, threads=1):
        xs = [torch.ones(1 << 16, device=f"node:{k}") for k in range(N)]
        dt.all_reduce(xs)  # connections are made at first use: have them before the tests look for leaks
        for a in range(N):
            for b in range(N):
                xs[a].to(f"node:{b}").cpu()
        yield


@pytest.fixture(autouse=True)
def nothing_unsaid(four: None) -> Iterator[None]:
    yield
    dt.synchronize()


def test_reductions_by_functions() -> None:
    for way in (None, dt.collectives.Way("tree", 3)):
        values = [{"x": torch.full((100_000,), k + 1.0, device=f"node:{k}"), "n": k} for k in range(N)]
        sums, contributors = dt.all_reduce(values, lambda a, b: a + b, algorithm=way)
        assert contributors == N
        assert all(s["x"].eq(10).all() and s["n"] == 6 and s["x"].get_node() == k for k, s in enumerate(sums))


def test_uneven_numbers_of_steps() -> None:
    steps = [[torch.full((3,), k + 1.0, device=f"node:{k}")] * (k + 1) for k in range(N)]
    totals = [torch.zeros(3, device=f"node:{k}") for k in range(N)]
    for values in zip_longest(*steps):
        sums, _ = dt.all_reduce(values, torch.add)
        for total, own, value in zip(totals, sums, values, strict=True):
            if value is not None:
                total += own
    assert [t.tolist() for t in totals] == [[10] * 3, [19] * 3, [26] * 3, [30] * 3]


def test_objects() -> None:
    def shard(k: int) -> dict[str, object]:
        return {"k": k, "x": torch.full((50_000,), float(k)), "host": {"pid": os.getpid()}}

    shards = dt.run(shard, dt.tasks.Each(range(N)), node=range(N))
    assert [s["host"]["pid"] for s in shards] == [node["pid"] for node in dt.nodes()]
    for i, row in enumerate(dt.collectives.all_gather_object(shards)):
        assert [s["k"] for s in row] == list(range(N))
        assert all(s["x"].get_node() == i and s["x"].eq(k).all() for k, s in enumerate(row))
    assert all(s["x"].eq(k).all() for k, s in enumerate(dt.collectives.gather_object(shards, 1)))
    assert all(
        s["x"].eq(k).all() for k, s in enumerate(dt.collectives.scatter_object(dt.collectives.gather_object(shards, 2)))
    )
    assert all(copy["x"].eq(3).all() for copy in dt.collectives.broadcast_object(shards[3]))


def test_several_tensors_per_node_and_outs_that_grow() -> None:
    for numel in (3, 100_000):
        xs = [torch.full((numel,), float(k), device=f"node:{k // 2}") for k in range(2 * N - 1)]
        dt.all_reduce(xs, "AVG", async_op=True)
        assert all(x.eq(3).all() for x in xs)
        dt.collectives.reduce(xs, 2)
        assert [x[-1].item() for x in xs] == [3, 3, 3, 3, 21, 3, 3]
        split = dt.collectives.new_group(range(N)).split(lambda k: k // 2)
        dt.broadcast(xs, 2, split)
        dt.all_reduce(xs, "MAX", split)
        assert all(x.eq(21).all() for x in xs)
    rows = [torch.full((k, 5000), float(k), device=f"node:{k}") for k in range(N)]
    outs = [torch.empty(0, device=f"node:{k}") for k in range(N)]
    dt.collectives.all_gather_into_tensor(outs, rows, async_op=True)
    assert all(out[:, 0].tolist() == [1, 2, 2, 3, 3, 3] for out in outs)
