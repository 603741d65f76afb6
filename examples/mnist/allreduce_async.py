"""python examples/mnist/allreduce_async.py [--nodes 4]

As allreduce.py, but gradients are reduced beside the rest of the backward pass, each bucket as soon as it is full: the
losses of sequential.py. A backward pass issues its collectives before it has computed all gradients.
"""

import argparse

import digits
import torch

import disttensor as dt

parser = argparse.ArgumentParser()
parser.add_argument("--nodes", type=int, default=4)
options = parser.parse_args()

with dt.init_master_worker(nodes=options.nodes, threads=1):
    mesh = dt.mesh(dp=options.nodes)
    model = dt.DataParallel(digits.model().to(mesh.device), mesh, bucket_mb=1e-4)  # weight and bias by themselves
    optimizer = torch.optim.SGD(model.parameters(), lr=digits.RATE)
    loader = dt.data.distribute(digits.training, mesh, batch_size=digits.BATCH, shuffle=True)
    for epoch in range(digits.EPOCHS):
        total = torch.zeros((), device=mesh.device)
        for x, y, _ in loader:
            optimizer.zero_grad()
            loss = digits.loss_of(model(x), y)
            loss.backward()
            optimizer.step()  # waits on the nodes for the gradients; the script does not
            total += loss.detach() / len(loader)
        digits.show(epoch, dt.all_reduce(total, "avg", over="dp").item())
    print(f"accuracy {digits.accuracy(model.module):.4f}")
