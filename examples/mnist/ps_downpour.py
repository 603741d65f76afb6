"""python examples/mnist/ps_downpour.py [--nodes 3]

Downpour SGD: each node trains on its part of each batch with Nesterov's momentum, as fast as it can, whatever the
others do. After every 2 steps it adds what it has changed to the server's values, and every 3 it takes these, which it
has asked for a step before.
"""

import argparse

import digits
import torch

import disttensor as dt
from disttensor.training import Downpour, ParameterServer, Schedule, drive

parser = argparse.ArgumentParser()
parser.add_argument("--nodes", type=int, default=3)
nodes = parser.parse_args().nodes
batches = [batch for epoch in range(digits.EPOCHS) for batch in digits.local_batches(epoch)]


def step(worker, t):
    x, y = (part.chunk(nodes)[worker.index].to(worker.device) for part in batches[t - 1][:2])
    loss = digits.loss_of(worker.module(x), y)
    loss.backward()
    return loss


def nesterov(parameters):
    return torch.optim.SGD(parameters, lr=digits.RATE / nodes, momentum=0.5, nesterov=True)


with dt.init_master_worker(nodes=nodes, threads=1):
    server = ParameterServer(digits.model())
    nets = [digits.model().to(f"node:{k}") for k in range(nodes)]
    strategy = Downpour(server, Schedule(every=3, prefetch=1), send_every=2, local=nesterov)
    history = drive(nets, step, strategy, steps=len(batches))
    for epoch in range(digits.EPOCHS):
        found = [loss for losses in history.losses for loss in losses[5 * epoch : 5 * epoch + 5]]
        digits.show(epoch, sum(found) / len(found))
    net = digits.model()
    server.pull(into=net)
    print(f"accuracy {digits.accuracy(net):.4f} of the server's values, after {server.version} pushes")
    print(f"other nodes' pushes between a pull and a push: {max(history.staleness())} at most")
