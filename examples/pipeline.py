"""python examples/pipeline.py [--stages 4] [--schedule 1f1b]

Digits through a network that is cut in stages, each on a node of its own. A batch is cut in micro-batches, and while
one stage works on one of them the others work on others. Two lines differ from the program for one process: the
Pipeline, and its step in place of the forward pass, the loss and the backward pass. At the end one process trains the
same network with whole batches: the losses are the same but for rounding. The table says for which part of an epoch's
time each node has worked, by its own clock, and what the schedule promises where stages take the same time and nothing
else takes any; it takes a core per node to come near.
"""

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits

import disttensor as dt

parser = argparse.ArgumentParser()
parser.add_argument("--stages", type=int, default=4)
parser.add_argument("--schedule", choices=["1f1b", "gpipe"], default="1f1b")
options = parser.parse_args()

digits = load_digits()
images = torch.tensor(digits.data, dtype=torch.float32) / 16
labels = torch.tensor(digits.target)
order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
train, test = order[:1440], order[1440:]


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def network() -> nn.Sequential:
    torch.manual_seed(0)
    stages = [nn.Sequential(Block(64), Block(64)) for _ in range(options.stages - 1)]
    return nn.Sequential(*stages, nn.Sequential(Block(64), nn.LayerNorm(64), nn.Linear(64, 10)))


def epoch(model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    """The last batch's loss."""
    for batch in train.split(240):
        x, y = images[batch], labels[batch]
        optimizer.zero_grad()
        if isinstance(model, dt.training.Pipeline):
            loss = model.step(x, y, F.cross_entropy)  # gradients, as of loss.backward()
        else:
            loss = F.cross_entropy(model(x), y)
            loss.backward()
        optimizer.step()
    return loss.detach()


with dt.init_master_worker(nodes=options.stages, threads=1):
    places = [f"node:{k}" for k in range(options.stages)]
    pipeline = dt.training.Pipeline(network(), places, microbatches=8, schedule=options.schedule)
    optimizer = torch.optim.AdamW(pipeline.parameters(), lr=0.003)
    losses = [epoch(pipeline, optimizer).item() for _ in range(3)]
    with pipeline.measure() as shares:
        losses.append(epoch(pipeline, optimizer).item())
    right = pipeline(images[test]).cpu().argmax(1) == labels[test]
    checkpoint = pipeline.state_dict()
    local = network()
    local.load_state_dict(checkpoint)  # the names of the unsplit network

alone = network()
optimizer = torch.optim.AdamW(alone.parameters(), lr=0.003)
for number, there in enumerate(losses):
    here = epoch(alone, optimizer).item()
    print(f"epoch {number}: loss {there:.4f} on {options.stages} nodes, {here:.4f} in one process")
    assert abs(there - here) < 1e-3 + 0.01 * here
print(f"accuracy {right.float().mean().item():.3f}")
print(shares)
