"""python examples/mnist/ps_easgd.py [--nodes 3] [--together]

Elastic averaging SGD: each node trains on its part of each batch, with the paper's momentum, and every second step it
and a centre, which a parameter server has, go towards each other. `--together`: without a server, each node has a copy
of the centre, and all meet.
"""

import argparse

import digits
import torch

import disttensor as dt
from disttensor.training import EASGD, ParameterServer, Schedule, drive

parser = argparse.ArgumentParser()
parser.add_argument("--nodes", type=int, default=3)
parser.add_argument("--together", action="store_true")
options = parser.parse_args()
batches = [batch for epoch in range(digits.EPOCHS) for batch in digits.local_batches(epoch)]


def step(worker, t):
    x, y = (part.chunk(options.nodes)[worker.index].to(worker.device) for part in batches[t - 1][:2])
    loss = digits.loss_of(worker.module(x), y)
    loss.backward()
    return loss


with dt.init_master_worker(nodes=options.nodes, threads=1):
    first = digits.model()
    server = None if options.together else ParameterServer(first)
    nets = [digits.model().to(f"node:{k}") for k in range(options.nodes)]
    strategy = EASGD(server, Schedule(every=2), beta=0.9, momentum=0.9, local=digits.RATE)
    history = drive(nets, step, strategy, steps=len(batches))
    for epoch in range(digits.EPOCHS):
        found = [loss for losses in history.losses for loss in losses[5 * epoch : 5 * epoch + 5]]
        digits.show(epoch, sum(found) / len(found))
    centre = digits.model()
    if server is not None:
        server.pull(into=centre)
    else:
        with torch.no_grad():
            for p, value in zip(centre.parameters(), strategy.centres[0], strict=True):
                p.copy_(value)
    print(f"accuracy {digits.accuracy(centre):.4f} of the centre")
    print(f"the centre has moved: {not torch.equal(centre.weight, first.weight)}")
