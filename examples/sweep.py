"""python examples/sweep.py [nodes]

A sweep over learning rates, all at once: a plain loop trains one model per node. Operations return before they have
run, so the one script keeps every node busy, and what it prints it may look at, compare and stop in mid-training:
after each round the worst half is dropped (successive halving). No processes to write, no messages, no callbacks.
"""

import sys
import time

import torch
import torch.nn as nn
import torch.nn.functional as F

import disttensor as dt

nodes = int(sys.argv[1]) if len(sys.argv) > 1 else 4
torch.manual_seed(0)
inputs = torch.randn(2048, 32)
targets = torch.sin(inputs @ torch.randn(32, 1))


class Trial:
    """One model on one node."""

    def __init__(self, node: int, lr: float) -> None:
        self.node, self.lr = node, lr
        with torch.device(f"node:{node}"):
            self.model = nn.Sequential(nn.Linear(32, 256), nn.Tanh(), nn.Linear(256, 1))
        self.x, self.y = inputs.to(f"node:{node}"), targets.to(f"node:{node}")
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=lr)

    def step(self) -> None:
        """Returns as soon as it is issued."""
        self.optimizer.zero_grad()
        self.loss = F.mse_loss(self.model(self.x), self.y)
        self.loss.backward()
        self.optimizer.step()


with dt.init_master_worker(nodes=nodes):
    trials = [Trial(node, 10 ** (-4 + 3 * node / max(1, nodes - 1))) for node in range(nodes)]
    start = time.perf_counter()
    while True:
        for _ in range(40):
            for trial in trials:
                trial.step()
        ranking = sorted(trials, key=lambda trial: trial.loss.item())
        print("   ".join(f"node {t.node} lr {t.lr:.4f} loss {t.loss.item():.4f}" for t in ranking))
        if len(ranking) == 1:
            break
        trials = ranking[: len(ranking) // 2]
    print(f"best learning rate {trials[0].lr:.4f}, found in {time.perf_counter() - start:.1f} s")
