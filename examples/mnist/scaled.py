"""python examples/mnist/scaled.py [--nodes 4] [--checkpoint FILE]

Horovod's recipe, whose batch grows with the nodes: each has 56 samples of a batch, the learning rate is that of one
node times their number, there are so many steps fewer, all begin with what the first one drew, and one checkpoint is
written. At the end one process trains with the same large batches: the losses are the same but for rounding.
"""

import argparse

import digits
import torch

import disttensor as dt

EACH, RATE, STEPS = 56, 0.02, 120

parser = argparse.ArgumentParser()
parser.add_argument("--nodes", type=int, default=4)
parser.add_argument("--checkpoint", default="digits.pt")
options = parser.parse_args()
size = options.nodes


def batches(step: int) -> torch.Tensor:
    """The numbers of the samples of a step."""
    return torch.arange(step * EACH * size, (step + 1) * EACH * size) % digits.SAMPLES


with dt.init_master_worker(nodes=size, threads=1):
    for node in dt.nodes():  # which of its host's devices is a node's: the script never chooses one by hand
        print(f"rank {node['rank']} of {size}: {', '.join(node['devices'])}")
    mesh = dt.mesh(dp=size)
    with torch.device(mesh.device), dt.meshes.varying("dp"):
        net = torch.nn.Linear(64, 10)  # each rank draws its own values
    model = dt.DataParallel(net, mesh)  # and takes those of the first
    first = {name: p.at(dp=0).cpu() for name, p in net.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE * size)
    losses = []
    for step in range(STEPS // size):
        x, y, _ = digits.training[batches(step)]
        optimizer.zero_grad()
        loss = digits.loss_of(model(x), dt.shard(y, mesh, dp=0))
        loss.backward()
        optimizer.step()
        losses.append(dt.all_reduce(loss.detach(), "avg", over="dp").item())
    torch.save(net.state_dict(), options.checkpoint)  # once, although every rank has the parameters
    print(f"{len(losses)} steps, loss {losses[-1]:.8f}, accuracy {digits.accuracy(net):.4f}")

alone = torch.nn.Linear(64, 10)
alone.load_state_dict(first)
optimizer = torch.optim.SGD(alone.parameters(), lr=RATE * size)
for step, there in enumerate(losses):
    x, y, _ = digits.training[batches(step)]
    optimizer.zero_grad()
    loss = digits.loss_of(alone(x), y)
    loss.backward()
    optimizer.step()
    assert abs(loss.item() - there) < 1e-6, (step, loss.item(), there)
print(f"of one process {loss.item():.8f}")
saved = torch.load(options.checkpoint)
assert all(torch.allclose(saved[name], p, atol=1e-6) for name, p in alone.state_dict().items())
