"""python examples/patterns/broadcast.py [--backend tcp]

What the root has, all get: an array, then the variables of a model. Nobody has to be told how long the array is, as one
script knows all shapes. Prints

    Rank 0, data received: [0.0, 0.34888889, 0.69777778, 1.04666667, 1.39555556, 1.74444444, 2.09333333, 2.44222222, 2.79111111, 3.14]
    Rank 1, data received: [0.0, 0.34888889, 0.69777778, 1.04666667, 1.39555556, 1.74444444, 2.09333333, 2.44222222, 2.79111111, 3.14]
    Rank 2, data received: [0.0, 0.34888889, 0.69777778, 1.04666667, 1.39555556, 1.74444444, 2.09333333, 2.44222222, 2.79111111, 3.14]
    Rank 3, data received: [0.0, 0.34888889, 0.69777778, 1.04666667, 1.39555556, 1.74444444, 2.09333333, 2.44222222, 2.79111111, 3.14]
    rank 0 before broadcast: [0.0, 0.0, 0.0]
    rank 1 before broadcast: [1.0, 1.0, 1.0]
    rank 0 after broadcast: [99.0, 99.0, 99.0]
    rank 1 after broadcast: [99.0, 99.0, 99.0]
"""  # noqa: E501

import argparse

import torch

import disttensor as dt

parser = argparse.ArgumentParser()
parser.add_argument("--backend", default="auto")
options = parser.parse_args()

with dt.init_master_worker(options.backend, nodes=4):
    data = [torch.linspace(0, 3.14, 10, dtype=torch.float64, device="node:0")]
    data += [torch.empty_like(data[0], device=f"node:{rank}") for rank in (1, 2, 3)]
    dt.broadcast(data, src=0)
    for rank, received in enumerate(data):
        print(f"Rank {rank}, data received: {[round(x, 8) for x in received.tolist()]}")

    variables = [torch.ones(3, device=f"node:{rank}") * rank for rank in range(2)]
    for rank, variable in enumerate(variables):
        print(f"rank {rank} before broadcast: {variable.tolist()}")
    variables[0].fill_(99)
    dt.broadcast(variables, src=0)
    for rank, variable in enumerate(variables):
        print(f"rank {rank} after broadcast: {variable.tolist()}")
