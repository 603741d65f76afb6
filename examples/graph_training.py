"""python examples/graph_training.py

Two trainings, each done twice: in eager, and with its step recorded once and replayed, which sends one small command
per node and step. The losses are the same to the last bit.

 1. A classifier of digits in two halves on two nodes, recorded with `dt.graph`: forward, the activations' way from node
    to node and their gradients' way back, and the optimizer. New batches are copied into the recorded inputs.
 2. A small transformer with dropout and a schedule of learning rates, as a function that `@dt.graphed` records by
    itself. Random numbers, the schedule and Adam's count of steps go on as they do in eager.
"""

import time

import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits

import disttensor as dt

digits = load_digits()
images = torch.tensor(digits.data, dtype=torch.float32) / 16
labels = torch.tensor(digits.target)


def train_digits(replayed: bool) -> list[float]:
    """Losses of 5 epochs."""
    torch.manual_seed(0)
    first = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU()).to("node:0")
    second = nn.Linear(64, 10).to("node:1")
    optimizer = torch.optim.Adam([*first.parameters(), *second.parameters()], lr=3e-3)
    x, y = torch.empty(100, 64, device="node:0"), torch.empty(100, dtype=torch.long, device="node:1")

    def step() -> torch.Tensor:
        loss = F.cross_entropy(second(first(x).to("node:1")), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    g, losses = dt.Graph(), []
    for i, batch in enumerate(torch.arange(1500).split(100) * 5):
        x.copy_(images[batch])
        y.copy_(labels[batch])
        if replayed and i == 1:  # the first step, in eager, has made Adam's state
            with dt.graph(g):
                loss = step()
        if replayed and i > 0:
            g.replay()
        else:
            loss = step()
        losses.append(loss.clone())  # a replay writes the next loss into the same tensor
    return [loss.item() for loss in losses]


def train_transformer(replayed: bool) -> tuple[list[float], float]:
    """Losses of 60 steps, and milliseconds per step of the last 40."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, nhead=4, dim_feedforward=64, dropout=0.1, batch_first=True)
    model = nn.Sequential(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Flatten(), nn.Linear(320, 2))
    model.to("node:0")
    optimizer = torch.optim.AdamW(model.parameters())
    torch.manual_seed(1)

    def step(x: torch.Tensor, y: torch.Tensor, rate: float) -> torch.Tensor:
        optimizer.param_groups[0]["lr"] = rate
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    run = dt.graphed(step) if replayed else step
    data = torch.Generator().manual_seed(2)
    losses = []
    for i in range(60):
        if i == 20:
            dt.synchronize()
            began = time.perf_counter()
        x = torch.randn(16, 10, 32, generator=data)
        y = (x[:, 0].sum(1) > x[:, 1].sum(1)).long()
        losses.append(run(x.to("node:0"), y.to("node:0"), 2e-3 * 0.95**i))
    dt.synchronize()
    return [loss.item() for loss in losses], (time.perf_counter() - began) / 40 * 1e3


torch.set_num_threads(1)
with dt.init_master_worker(nodes=2, threads=1):
    eager = train_digits(replayed=False)
    replayed = train_digits(replayed=True)
    for i in (0, 1, 25, 50, 74):
        print(f"digits, step {i:2}: eager {eager[i]:.6f}   replayed {replayed[i]:.6f}")
    print("all 75 losses identical:", eager == replayed)

    eager, slow = train_transformer(replayed=False)
    replayed, fast = train_transformer(replayed=True)
    for i in (0, 2, 20, 40, 59):
        print(f"transformer, step {i:2}: eager {eager[i]:.6f}   replayed {replayed[i]:.6f}")
    print("all 60 losses identical:", eager == replayed)
    print(f"a step takes {slow:.1f} ms in eager, {fast:.1f} ms replayed")
