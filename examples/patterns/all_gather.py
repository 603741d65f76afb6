"""python examples/patterns/all_gather.py [--backend tcp]

What every node has, one after the other, on every node; the pieces may differ in length. Prints

    Rank 0: [0.0, 0.0, 0.0, 1.0, 1.0, 1.0]
    Rank 1: [0.0, 0.0, 0.0, 1.0, 1.0, 1.0]
    Rank 0: [0, 0, 1]
    Rank 1: [0, 0, 1]
"""

import argparse

import torch

import disttensor as dt
from disttensor.collectives import functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--backend", default="auto")
options = parser.parse_args()

with dt.init_master_worker(options.backend, nodes=2):
    rows = [torch.ones(3, device=f"node:{rank}") * rank for rank in range(2)]
    uneven = [torch.full((2 - rank,), rank, device=f"node:{rank}") for rank in range(2)]
    for pieces in (rows, uneven):
        for rank, gathered in enumerate(F.all_gather(pieces)):
            print(f"Rank {rank}: {torch.cat(gathered).tolist()}")
