"""python examples/quickstart.py            (starts two local nodes itself)
dtrun -n 2 examples/quickstart.py        (the same, with nodes started from outside)

First where tensors live, by the program of PyTorch's issue 241; then a classifier of handwritten digits whose two
halves live on two nodes. One plain script; every tensor operation runs on the node that holds its operands. At the end
each process says what it has done.
"""

import os
import time

import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits

import disttensor as dt

dt.init_master_worker(simulate_cuda=2)  # without a GPU: two simulated ones per node, so that .cuda() works

# ---- where tensors live ----------------------------------------------------------------------------------------------


def show(name: str, tensor: torch.Tensor) -> None:
    """The script has a proxy; the node has the numbers."""
    device = tensor.get_device()
    print(f"{name:<19} is on node {tensor.get_node()}, {'CPU' if device < 0 else f'its GPU {device} (simulated)'}")


x = dt.FloatTensor(20, 20).fill_(4)  # on the current node's CPU
y = torch.randn(20, 20).dist_send()  # a local tensor goes to the current node
show("z = x + y", x + y)  # runs where its operands live; returns at once
cuda_x = x.cuda()
show("cuda_x = x.cuda()", cuda_x)
with dt.node(1):
    show("a", dt.FloatTensor(10, device=1))
    cuda_y = y.cuda()  # an operation follows its operand, not the context
    show("cuda_y = y.cuda()", cuda_y)
    show("q = cuda_x + cuda_y", cuda_x + cuda_y)

# ---- a model in two halves -------------------------------------------------------------------------------------------

digits = load_digits()
images = torch.tensor(digits.data, dtype=torch.float32) / 16
labels = torch.tensor(digits.target)
order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
train, test = order[:1500], order[1500:]

torch.manual_seed(0)
first = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU()).to("node:0")
second = nn.Linear(64, 10).to("node:1")
optimizer = torch.optim.Adam([*first.parameters(), *second.parameters()], lr=3e-3)


def model(batch: torch.Tensor) -> torch.Tensor:
    """The activations go from node 0 to node 1 directly; autograd brings their gradients back the same way."""
    return second(first(batch.to("node:0")).to("node:1"))


nodes = [node["rank"] for node in dt.nodes()]
before = [dt.run(time.process_time, node=k) for k in nodes]
for epoch in range(8):
    total = torch.zeros((), device="node:1")
    for batch in train.split(100):
        loss = F.cross_entropy(model(images[batch]), labels[batch].to("node:1"))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.detach()
    print(f"epoch {epoch}: loss {total.item() / 15:.4f}")  # .item() is the only thing that waits

with torch.no_grad():
    accuracy = (model(images[test]).argmax(1) == labels[test].to("node:1")).float().mean().item()
print(f"test accuracy {accuracy:.1%}")

# ---- who did it ------------------------------------------------------------------------------------------------------

parts = {0: "the first half, its gradients and Adam's states", 1: "the second half, its gradients and Adam's states"}
print(f"the script, process {os.getpid()}: no number of the model, only proxies")
for k in nodes:
    process, seconds = dt.run(os.getpid, node=k), dt.run(time.process_time, node=k) - before[k]
    held = torch.node.memory_allocated(k) / 1024
    print(f"node {k}, process {process}: {held:.1f} KiB, {parts.get(k, 'nothing')}; computed for {seconds:.2f} s")

dt.shutdown()
