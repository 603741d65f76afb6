"""python examples/sharded.py [--nodes 4]

Digits on nodes of which each has a part of the parameters, of their gradients and of the optimizer's states. The model
is made on the meta device, so that nobody ever holds it as a whole: each node makes its parts. A group of layers is
gathered for as long as it computes, and the next one meanwhile. At the end one process trains with whole batches: the
losses are the same but for rounding.
"""

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits

import disttensor as dt

parser = argparse.ArgumentParser()
parser.add_argument("--nodes", type=int, default=4)
options = parser.parse_args()

# AdamW makes steps of one size of gradients that are nothing but rounding: in float32 the losses would differ by 0.2 %
# on some CPUs, whose kernels add in another order.
torch.set_default_dtype(torch.float64)

digits = load_digits()
images = torch.tensor(digits.data) / 16
labels = torch.tensor(digits.target)
order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
train, test = order[:1440], order[1440:]


def make() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 250), nn.ReLU(), nn.Linear(250, 250), nn.ReLU(), nn.Linear(250, 10))


def fit(mesh: dt.meshes.Mesh | None) -> tuple[list[float], float]:
    """The loss of each epoch's last batch, and the accuracy afterwards."""
    torch.manual_seed(0)
    if mesh:
        with torch.device("meta"):
            model = make()
        for layer in model[::2]:
            dt.fully_shard(layer, mesh)
        dt.fully_shard(model, mesh).to_empty(device=mesh.device)
        dt.training.initialize(model)
        parts = [tuple(p.shape) for p in model.parameters()]
        print(f"each node has {parts[0]} of (250, 64), {sum(p.numel() for p in model.parameters())} numbers in all")
    else:
        model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.002)
    losses = []
    for _ in range(5):
        for batch in train.split(120):
            x, y = images[batch], labels[batch]
            if mesh:
                y = dt.shard(y, mesh, dp=0)  # each node has its share of the batch
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
        losses.append((dt.all_reduce(loss.detach(), "avg", over="dp") if mesh else loss).item())
    with torch.no_grad():
        device = mesh.device if mesh else "cpu"
        right = model(images[test].to(device)).argmax(1) == labels[test].to(device)
        return losses, right.float().mean().item()


with dt.init_master_worker(nodes=options.nodes, threads=1):
    losses, accuracy = fit(dt.mesh(dp=options.nodes))
alone, _ = fit(None)

for epoch, (there, here) in enumerate(zip(losses, alone, strict=True)):
    print(f"epoch {epoch}: loss {there:.4f} on {options.nodes} nodes, {here:.4f} in one process")
print(f"accuracy {accuracy:.3f}")
assert torch.allclose(torch.tensor(losses), torch.tensor(alone), rtol=1e-9)
