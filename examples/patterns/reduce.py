"""python examples/patterns/reduce.py [--backend tcp]

A value of each node's, added up on the root, and the largest of them. Prints

    Rank 0, value = 0.0
    Rank 1, value = 1.0
    Rank 2, value = 2.0
    Rank 3, value = 3.0
    Rank 0: value_sum = 6.0
    Rank 0: value_max = 3.0
"""

import argparse

import torch

import disttensor as dt

parser = argparse.ArgumentParser()
parser.add_argument("--backend", default="auto")
options = parser.parse_args()

with dt.init_master_worker(options.backend, nodes=4):
    values = [torch.tensor(float(rank), device=f"node:{rank}") for rank in range(4)]
    for rank, value in enumerate(values):
        print(f"Rank {rank}, value = {value.item()}")
    for name, op in (("sum", dt.collectives.ReduceOp.SUM), ("max", dt.collectives.ReduceOp.MAX)):
        results = [value.clone() for value in values]  # it is in place
        dt.collectives.reduce(results, dst=0, op=op)
        print(f"Rank 0: value_{name} = {results[0].item()}")
