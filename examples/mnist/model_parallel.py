"""python examples/mnist/model_parallel.py [--nodes 3]

Of the layer's 64 inputs each node has some, with the weights for them, and the sum over the nodes is the output: the
losses of sequential.py, although 3 does not divide 64. All nodes have the whole batch.
"""

import argparse

import digits
import torch

import disttensor as dt

parser = argparse.ArgumentParser()
parser.add_argument("--nodes", type=int, default=3)
options = parser.parse_args()

with dt.init_master_worker(nodes=options.nodes, threads=1):
    mesh = dt.mesh(tp=options.nodes)
    net = dt.nn.RowParallelLinear.from_plain(digits.model(), mesh)
    optimizer = torch.optim.SGD(net.parameters(), lr=digits.RATE)
    for epoch in range(digits.EPOCHS):
        losses = []
        for x, y, _ in digits.local_batches(epoch):
            optimizer.zero_grad()
            loss = digits.loss_of(net(x.to(mesh.device)), y.to(mesh.device))
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        digits.show(epoch, torch.stack(losses).mean().item())
    print(f"accuracy {digits.accuracy(net):.4f}")
