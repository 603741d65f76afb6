"""python examples/data_parallel.py [--backend shm|tcp|gloo|auto] [--nodes 4]
mpiexec -n 5 dtrun examples/data_parallel.py --backend mpi        (MPI starts the master and four nodes)

Digits, data parallel: every node has a copy of the model and a part of each batch, and gradients are averaged over the
nodes. The name of the backend is all that changes when the bytes are to take another way. At the end one process trains
with whole batches: the losses are the same but for rounding.
"""

import argparse
import copy

import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits

import disttensor as dt

parser = argparse.ArgumentParser()
parser.add_argument("--backend", default="auto")
parser.add_argument("--nodes", type=int, default=4)
options = parser.parse_args()

digits = load_digits()
images = torch.tensor(digits.data, dtype=torch.float32) / 16
labels = torch.tensor(digits.target)
order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
train, test = order[:1440], order[1440:]


def fit(devices: list[str]) -> tuple[list[float], float]:
    """The mean loss of each epoch, and the accuracy afterwards."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    models = [copy.deepcopy(model).to(device) for device in devices]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.2, momentum=0.9) for m in models]
    epochs = []
    for _ in range(5):
        losses = []
        for batch in train.split(120):
            for m, device, part in zip(models, devices, batch.chunk(len(devices)), strict=True):
                m.zero_grad()
                loss = F.cross_entropy(m(images[part].to(device)), labels[part].to(device))
                loss.backward()
                losses.append(loss.detach())
            if len(devices) > 1:
                for copies in zip(*(m.parameters() for m in models), strict=True):
                    dt.all_reduce([p.grad for p in copies], dt.collectives.ReduceOp.AVG)
            for optimizer in optimizers:
                optimizer.step()
        epochs.append(sum(loss.item() for loss in losses) / len(losses))
    with torch.no_grad():
        right = models[-1](images[test].to(devices[-1])).argmax(1) == labels[test].to(devices[-1])
        return epochs, right.float().mean().item()


with dt.init_master_worker(options.backend, nodes=options.nodes):
    losses, accuracy = fit([f"node:{node}" for node in range(options.nodes)])
alone, _ = fit(["cpu"])

for epoch, (ours, one) in enumerate(zip(losses, alone, strict=True)):
    print(f"epoch {epoch}: loss {ours:.4f}, of one process {one:.4f}")
print(f"test accuracy {accuracy:.1%}")
print("same losses:", all(abs(ours - one) < 1e-4 for ours, one in zip(losses, alone, strict=True)))
