"""python examples/patterns/gather.py [--backend tcp]

A piece from each node, in their order, into an array of the root's. Prints

    Rank 0, sendbuf: [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
    Rank 1, sendbuf: [11, 12, 13, 14, 15, 16, 17, 18, 19, 20]
    Rank 2, sendbuf: [21, 22, 23, 24, 25, 26, 27, 28, 29, 30]
    Rank 3, sendbuf: [31, 32, 33, 34, 35, 36, 37, 38, 39, 40]
    Rank 0, recvbuf received: [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31, 32, 33, 34, 35, 36, 37, 38, 39, 40]
"""  # noqa: E501

import argparse

import torch

import disttensor as dt

parser = argparse.ArgumentParser()
parser.add_argument("--backend", default="auto")
options = parser.parse_args()

with dt.init_master_worker(options.backend, nodes=4):
    pieces = [torch.arange(10 * rank + 1, 10 * rank + 11, device=f"node:{rank}") for rank in range(4)]
    for rank, piece in enumerate(pieces):
        print(f"Rank {rank}, sendbuf: {piece.tolist()}")
    whole = torch.zeros(40, dtype=torch.int64, device="node:0")
    dt.collectives.gather(pieces, whole.chunk(4), dst=0)  # the chunks are views: what arrives in them is in the whole
    print("Rank 0, recvbuf received:", whole.tolist())
