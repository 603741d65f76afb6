"""Random programs of collectives over overlapping groups, beside other operations, and the same done locally."""

from __future__ import annotations

import random
import threading

import torch

import disttensor as dt

N = 4


def step(rng, local, there, works):
    """One operation on both. Values stay small integers, so that sums are exact."""
    nodes = rng.sample(range(N), rng.randint(1, N))
    mine, theirs = [local[k] for k in nodes], [there[k] for k in nodes]
    async_op, root = rng.random() < 0.4, rng.randrange(len(nodes))
    work = None
    group = dt.collectives.new_group(nodes) if len(nodes) == 1 else None  # one tensor alone is an error
    match rng.randrange(11):
        case 0:
            total = sum(mine) % 97
            outs = [torch.empty_like(x) for x in theirs]
            algorithm = rng.choice([None, "ring", "halving", "tree", dt.collectives.Way("direct", chunk=64)])
            work = dt.all_reduce(theirs, out=outs, group=group, async_op=async_op, algorithm=algorithm)
            for k, out in zip(nodes, outs, strict=True):
                local[k], there[k] = total.clone(), out % 97
        case 1:
            work = dt.broadcast(theirs, nodes[root], group=group, async_op=async_op)
            for x in mine:
                x.copy_(mine[root].clone())
        case 2:
            work = dt.collectives.reduce(
                theirs, nodes[root], dt.collectives.ReduceOp.MAX, group=group, async_op=async_op
            )
            mine[root].copy_(torch.stack(mine).amax(0))
        case 3:
            work = dt.collectives.sendreceive(theirs, group=group, async_op=async_op)
            shifted = [mine[i - 1].clone() for i in range(len(mine))]
            for x, y in zip(mine, shifted, strict=True):
                x.copy_(y)
        case 4:
            lists = [[torch.empty_like(x) for _ in nodes] for x in theirs]
            work = dt.all_gather(lists, theirs, group=group, async_op=async_op)
            for k, outs in zip(nodes, lists, strict=True):
                there[k] = sum(outs) % 89
                local[k] = sum(mine) % 89
        case 5:
            k = nodes[0]
            local[k] = (local[k] * 2 + 1) % 83
            there[k] = (there[k] * 2 + 1) % 83
        case 6:
            k, other = nodes[0], nodes[-1]
            local[k] = local[other].clone()
            there[k] = there[other].to(f"node:{k}") * 1
        case 7:  # two of each node
            pairs = [y for x in theirs for y in (x, x + 1)]
            work = dt.all_reduce(pairs, group=group, async_op=async_op, algorithm=rng.choice([None, "tree", "ring"]))
            for k, y in zip(nodes, pairs[1::2], strict=True):
                local[k], there[k] = (2 * sum(mine) + len(mine)) % 97, y % 97
        case 8:  # one that grows
            outs = [x.new_empty(0) for x in theirs]
            work = dt.collectives.all_gather_into_tensor(outs, theirs, group=group, async_op=async_op)
            for k, out in zip(nodes, outs, strict=True):
                local[k], there[k] = sum(mine) % 79, (out * 1).view(len(nodes), -1).sum(0) % 79
        case 9:  # some have nothing
            values = [None if i != root and rng.random() < 0.3 else x for i, x in enumerate(theirs)]
            sums, _ = dt.all_reduce(
                values, torch.add, dt.collectives.new_group(nodes), algorithm=dt.collectives.Way("tree", 3)
            )
            total = sum(x for x, value in zip(mine, values, strict=True) if value is not None) % 73
            for k, y in zip(nodes, sums, strict=True):
                local[k], there[k] = total.clone(), y % 73
        case 10:  # by parts
            split = dt.collectives.new_group(nodes).split(lambda k: k % 2)
            work = dt.all_reduce(theirs, group=split, async_op=async_op)
            total = sum(mine)
            for k, x in zip(nodes, theirs, strict=True):
                local[k], there[k] = total % 71, x % 71
    if work is not None:
        works.append(work)


def run(seed, steps=40):
    rng = random.Random(seed)
    numel = rng.choice([1, 7, 1001])
    local = [torch.randint(0, 50, (numel,), generator=torch.Generator().manual_seed(k)) for k in range(N)]
    there = [x.to(f"node:{k}") for k, x in enumerate(local)]
    works: list[dt.futures.Work] = []
    for _ in range(steps):
        step(rng, local, there, works)
    for x, y in zip(local, there, strict=True):
        assert torch.equal(x, y.cpu()), seed
    assert all(work.wait() for work in works)


def by_threads():
    """Their collectives meet on the nodes in one order, whichever that is."""
    failed = []

    def work(seed):
        try:
            run(seed)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(100 + seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


def with_streams():
    """Two nodes' programs run on streams of theirs."""
    streams = [dt.Stream(k) for k in range(N)]
    with dt.stream(streams[0]), dt.stream(streams[2]):
        for seed in range(50, 54):
            run(seed)
