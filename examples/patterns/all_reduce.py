"""python examples/patterns/all_reduce.py [--backend tcp]

A value of each node's: their minimum, maximum and sum, on every node; then the sum and the average of arrays. Prints

    Rank 0, value = 1.0
    Rank 1, value = 2.0
    Rank 2, value = 3.0
    Rank 3, value = 4.0
    Rank 0, value_min = 1.0, value_max = 4.0, value_sum = 10.0
    Rank 1, value_min = 1.0, value_max = 4.0, value_sum = 10.0
    Rank 2, value_min = 1.0, value_max = 4.0, value_sum = 10.0
    Rank 3, value_min = 1.0, value_max = 4.0, value_sum = 10.0
    sum: [3.0, 5.0, 7.0]
    average: [1.5, 2.5, 3.5]
"""

import argparse

import torch

import disttensor as dt
from disttensor.collectives import functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--backend", default="auto")
options = parser.parse_args()

with dt.init_master_worker(options.backend, nodes=4):
    values = [torch.tensor(rank + 1.0, device=f"node:{rank}") for rank in range(4)]
    for rank, value in enumerate(values):
        print(f"Rank {rank}, value = {value.item()}")
    results = {op: F.all_reduce(values, op) for op in ("MIN", "MAX", "SUM")}  # new tensors; dt.all_reduce is in place
    for rank in range(4):
        print(f"Rank {rank},", ", ".join(f"value_{op.lower()} = {ys[rank].item()}" for op, ys in results.items()))

    arrays = [torch.tensor([1.0, 2.0, 3.0], device=f"node:{rank}") + rank for rank in range(2)]
    print("sum:", F.all_reduce(arrays)[1].tolist())
    print("average:", F.all_reduce(arrays, "AVG")[1].tolist())
