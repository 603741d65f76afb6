"""python examples/patterns/scatter.py [--backend tcp]

An array of the root's, cut into as many pieces as there are nodes, one for each. Prints

    Rank 0, recvbuf received: [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
    Rank 1, recvbuf received: [11, 12, 13, 14, 15, 16, 17, 18, 19, 20]
    Rank 2, recvbuf received: [21, 22, 23, 24, 25, 26, 27, 28, 29, 30]
    Rank 3, recvbuf received: [31, 32, 33, 34, 35, 36, 37, 38, 39, 40]
"""

import argparse

import torch

import disttensor as dt

parser = argparse.ArgumentParser()
parser.add_argument("--backend", default="auto")
options = parser.parse_args()

with dt.init_master_worker(options.backend, nodes=4):
    whole = torch.arange(1, 41, device="node:0")
    pieces = [torch.empty(10, dtype=whole.dtype, device=f"node:{rank}") for rank in range(4)]
    dt.collectives.scatter(pieces, whole.chunk(4), src=0)
    for rank, piece in enumerate(pieces):
        print(f"Rank {rank}, recvbuf received: {piece.tolist()}")
