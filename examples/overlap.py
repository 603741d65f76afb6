"""python examples/overlap.py

Transfers hidden behind computation: batches of images go to a node, which changes their contrast, and come back. The
plain loop waits for each result, so that the node idles while bytes move and nothing moves while it computes. The other
one has two batches sent ahead (`dt.data.prefetch`) and lets results come when they come (`dt.fetch`).
"""

import time

import torch

import disttensor as dt

torch.manual_seed(0)
batches = [torch.randn(16, 3, 224, 224) for _ in range(24)]  # 9 MiB each


def develop(x):
    return torch.sigmoid(4 * x - 1)


def one_after_the_other():
    return [develop(x.to("node:0")).cpu() for x in batches]


def overlapped():
    works = [dt.fetch(develop(x)) for x in dt.data.prefetch(batches, "node:0", depth=2)]
    return [work.result() for work in works]


def transfers():
    return [work.result() for work in [dt.fetch(x) for x in dt.data.prefetch(batches, "node:0")]]


def computation():
    x = batches[0].to("node:0")
    for _ in batches:
        y = develop(x)
    return y.cpu()


def timed(function):
    """Prints how long the fastest of some runs took: the first ones make connections and touch new memory."""
    times = []
    for _ in range(5):
        start = time.perf_counter()
        result = function()
        times.append(time.perf_counter() - start)
    print(f"{function.__name__.replace('_', ' '):22}{min(times) * 1000:6.0f} ms")
    return result


with dt.init_master_worker("shm", nodes=1, threads=1):  # shared memory; "tcp" between hosts
    timed(transfers)
    timed(computation)
    expected = timed(one_after_the_other)
    results = timed(overlapped)
    print("same results:", all(torch.equal(a, b) for a, b in zip(results, expected, strict=True)))
