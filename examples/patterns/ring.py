"""python examples/patterns/ring.py [--backend tcp]

Every node hands on to the next what it has got from the one before, and adds it up: after three turns each has the sum
of all four. (`dt.all_reduce(values, algorithm="ring")` does so by pieces, and with less traffic.) Prints

    start: passing [1, 2, 3, 4], sums [1, 2, 3, 4]
    turn 1: passing [4, 1, 2, 3], sums [5, 3, 5, 7]
    turn 2: passing [3, 4, 1, 2], sums [8, 7, 6, 9]
    turn 3: passing [2, 3, 4, 1], sums [10, 10, 10, 10]
    all_reduce: [10, 10, 10, 10]
"""

import argparse

import torch

import disttensor as dt

parser = argparse.ArgumentParser()
parser.add_argument("--backend", default="auto")
options = parser.parse_args()

with dt.init_master_worker(options.backend, nodes=4):
    values = [torch.tensor(rank + 1, device=f"node:{rank}") for rank in range(4)]
    passing = [value.clone() for value in values]
    sums = [value.clone() for value in values]
    print(f"start: passing {[x.item() for x in passing]}, sums {[x.item() for x in sums]}")
    for turn in range(1, 4):
        dt.collectives.sendreceive(passing)
        for total, got in zip(sums, passing, strict=True):
            total += got
        print(f"turn {turn}: passing {[x.item() for x in passing]}, sums {[x.item() for x in sums]}")

    dt.all_reduce(values, algorithm="ring")
    print("all_reduce:", [x.item() for x in values])
