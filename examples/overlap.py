"""python examples/overlap.py

Transfers hidden behind computation: batches of images go to a node, a convolution makes feature maps of them, and those
come back. The plain loop waits for each result, so that the node idles while bytes move and nothing moves while it
computes. The other one has two batches sent ahead (`dt.prefetch`) and lets results come when they come (`dt.fetch`).
"""

import time

import torch
import torch.nn as nn

import disttensor as dt

torch.manual_seed(0)
batches = [torch.randn(16, 3, 224, 224) for _ in range(20)]  # 9 MiB each
network = nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.ReLU()).requires_grad_(False)


def one_after_the_other():
    return [network(x.to("node:0")).cpu() for x in batches]


def overlapped():
    works = [dt.fetch(network(x)) for x in dt.prefetch(batches, "node:0", depth=2)]
    return [work.result() for work in works]


def transfers():
    return [work.result() for work in [dt.fetch(x) for x in dt.prefetch(batches, "node:0")]]


def computation():
    x = batches[0].to("node:0")
    for _ in batches:
        y = network(x)
    return y.cpu()


def timed(function):
    function()  # connections, warm memory
    start = time.perf_counter()
    result = function()
    print(f"{function.__name__.replace('_', ' '):22}{time.perf_counter() - start:6.2f} s")
    return result


with dt.init_master_worker(nodes=1, threads=1):
    network.to("node:0")
    timed(transfers)
    timed(computation)
    expected = timed(one_after_the_other)
    results = timed(overlapped)
    print("same results:", all(torch.equal(a, b) for a, b in zip(results, expected, strict=True)))
