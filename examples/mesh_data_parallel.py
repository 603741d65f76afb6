"""python examples/mesh_data_parallel.py [--nodes 8]

Digits on eight nodes that are one place: the model, the batches and the optimizer are one object each, and an operation
is one command for all nodes. Three lines differ from the program for one node: the mesh, DataParallel, which shards
batches and takes the mean of the gradients, and the shards of the labels. At the end one process trains with whole
batches: the losses are the same but for rounding.
"""

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits

import disttensor as dt

parser = argparse.ArgumentParser()
parser.add_argument("--nodes", type=int, default=8)
options = parser.parse_args()

digits = load_digits()
images = torch.tensor(digits.data, dtype=torch.float32) / 16
labels = torch.tensor(digits.target)
order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
train, test = order[:1440], order[1440:]


def fit(mesh: dt.meshes.Mesh | None) -> tuple[list[float], float]:
    """The loss of each epoch's last batch, and the accuracy afterwards."""
    torch.manual_seed(0)
    device = mesh.device if mesh else "cpu"
    model: nn.Module = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to(device)
    if mesh:
        model = dt.DataParallel(model, mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    losses = []
    for _ in range(5):
        for batch in train.split(120):
            x, y = images[batch], labels[batch]
            if mesh:
                y = dt.shard(y, mesh, dp=0)  # each node has an eighth of the batch
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
        losses.append((dt.all_reduce(loss.detach(), "avg", over="dp") if mesh else loss).item())
    with torch.no_grad():
        right = model(images[test].to(device)).argmax(1) == labels[test].to(device)
        return losses, right.float().mean().item()  # all nodes have this value, or it would be an error


with dt.init_master_worker(nodes=options.nodes, threads=1):
    losses, accuracy = fit(dt.mesh(dp=options.nodes))
alone, _ = fit(None)

for epoch, (there, here) in enumerate(zip(losses, alone, strict=True)):
    print(f"epoch {epoch}: loss {there:.4f} on {options.nodes} nodes, {here:.4f} in one process")
print(f"accuracy {accuracy:.3f}")
assert torch.allclose(torch.tensor(losses), torch.tensor(alone), rtol=1e-3)
