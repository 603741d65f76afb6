"""python examples/mnist/ps_dsgd.py [--nodes 3]

Synchronous SGD by a parameter server. Each node computes the gradients of its part of the batch; the server's values
are set to zero, each node adds its gradients and takes the sum, of which it makes the mean: the losses of
sequential.py. The script is in one order, so it needs no barriers.
"""

import argparse

import digits
import torch

import disttensor as dt
from disttensor.training import ParameterServer

parser = argparse.ArgumentParser()
parser.add_argument("--nodes", type=int, default=3)
nodes = parser.parse_args().nodes

with dt.init_master_worker(nodes=nodes, threads=1):
    nets = [digits.model().to(f"node:{k}") for k in range(nodes)]
    server = ParameterServer(nets[0])  # a part of the values on each node
    for epoch in range(digits.EPOCHS):
        losses = []
        for x, y, _ in digits.local_batches(epoch):
            server.push(rule="zero")
            for net, images, labels in zip(nets, x.chunk(nodes), y.chunk(nodes), strict=True):
                net.zero_grad()
                loss = digits.loss_of(net(images.to(net.weight.device)), labels.to(net.weight.device))
                loss.backward()
                server.push([p.grad for p in net.parameters()])
                losses.append(dt.fetch(loss.detach()))
            for net in nets:
                total = server.pull(node=net.weight.device)
                with torch.no_grad():
                    for name, p in net.named_parameters():
                        p -= digits.RATE * total[name].div(nodes)
        found = [loss.result().item() for loss in losses]
        digits.show(epoch, sum(found) / len(found))
    print(f"accuracy {digits.accuracy(nets[0]):.4f}")
