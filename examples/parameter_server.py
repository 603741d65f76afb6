"""python examples/parameter_server.py [workers]

A parameter server with workers that pull and push at their own pace: the server is an actor, whose handle each worker
gets as an argument and calls by itself, from node to node. Nobody waits for the slowest, and the script does nothing
meanwhile. (Ray's program of this kind has 38 lines without comments; this one has no more.)
"""

import sys

import torch
import torch.nn as nn
import torch.nn.functional as F

import disttensor as dt


class Server:
    def __init__(self, weights, lr):
        self.weights, self.lr, self.pushed = weights, lr, {}

    def pull(self):
        return self.weights

    def push(self, worker, gradients):
        for name, gradient in gradients.items():
            self.weights[name] -= self.lr * gradient
        self.pushed[worker] = self.pushed.get(worker, 0) + 1

    def state(self):
        return self.weights, self.pushed


def work(server, model, inputs, targets, steps):
    model.requires_grad_()
    for step in range(steps):
        model.load_state_dict(server.pull().result())
        rows = slice(32 * step % len(inputs), 32 * step % len(inputs) + 32)
        model.zero_grad()
        F.mse_loss(model(inputs[rows]), targets[rows]).backward()
        server.push(dt.tasks.here().node, {name: p.grad for name, p in model.named_parameters()}).wait()


workers = int(sys.argv[1]) if len(sys.argv) > 1 else 3
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))
inputs = torch.randn(768, 16)
targets = torch.sin(inputs @ torch.randn(16, 1) / 4)
with dt.init_master_worker(nodes=1 + workers, threads=1):
    server = dt.actor(Server, model.state_dict(), 0.1, node=0)
    parts = zip(inputs.chunk(workers), targets.chunk(workers), strict=True)
    works = [dt.submit(work, server, model, x, y, 100, node=1 + k) for k, (x, y) in enumerate(parts)]
    print(f"loss at first {F.mse_loss(model(inputs), targets).item():.3f}")
    [each.result() for each in works]
    weights, pushed = server.state().result()
    model.load_state_dict(weights)
    print(f"loss at the end {F.mse_loss(model(inputs), targets).item():.3f}, pushes {dict(sorted(pushed.items()))}")
