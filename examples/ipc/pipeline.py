"""python examples/ipc/pipeline.py

torch-ipc's example of model parallelism: each layer on a node of its own, and channels between them. All nodes work at
once, each at another batch. The end of the batches closes the first channel, and each node closes the next one when its
own is empty. Prints

    node 0: 6 batches
    node 1: 6 batches
    node 2: 6 batches
    the same as one process's: True
"""

import torch
from torch import nn

import disttensor as dt


def stage(layer, source, target):
    count = 0
    with target:  # closes it at the end, also after an error
        for batch in source:  # until it is closed and empty
            target.put(layer(batch).detach())
            count += 1
    return count


with dt.init_master_worker(nodes=3):
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3)]
    batches = [torch.randn(4, 16) for _ in range(6)]
    channels = [dt.tasks.Channel(maxsize=2) for _ in range(3)] + [dt.tasks.Channel()]
    works = [dt.submit(stage, layer, *channels[i : i + 2], node=i) for i, layer in enumerate(layers)]
    for batch in batches:
        channels[0].put(batch)  # waits while two are there
    channels[0].close()
    results = list(channels[-1])
    for node, work in enumerate(works):
        print(f"node {node}: {work.result()} batches")
    expected = [nn.Sequential(*layers)(batch) for batch in batches]
    print("the same as one process's:", all(map(torch.equal, results, expected)) and len(results) == 6)
