"""python tools/bench/step.py [--steps 40] [--repeats 5]

Training steps on one node against the same steps done locally, in turns in one run, one compute thread on either side:
throughput of a step with at least 5 ms of compute, and the bytes per command over steps of a small transformer.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn as nn
import torch.nn.functional as F

import disttensor as dt
from disttensor import state


def trainer(device: str, width: int, batch: int) -> Callable[[], torch.Tensor]:
    """A step of a two-layer transformer encoder. Returns its loss, not fetched."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.1, batch_first=True)
    model = nn.Sequential(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(width, 16)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x = torch.randn(batch, 16, width).to(device)
    y = torch.randint(0, 16, (batch * 16,)).to(device)

    def step() -> torch.Tensor:
        loss = F.cross_entropy(model(x).flatten(0, 1), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return step


def timed(step: Callable[[], torch.Tensor], steps: int) -> float:
    """Seconds per step; the loss is fetched once in ten steps, as a training loop does."""
    step().item()
    start = time.perf_counter()
    for i in range(steps):
        loss = step()
        if i % 10 == 9:
            loss.item()
    loss.item()
    return (time.perf_counter() - start) / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with dt.init_master_worker(nodes=1, threads=1):
        box = state.session().link.outboxes[0]
        for name, width, batch in (("launch-bound", 32, 4), ("compute-bound", 128, 16)):
            local, remote = trainer("cpu", width, batch), trainer("node:0", width, batch)
            timed(local, 3), timed(remote, 3)
            sent, size = box.sent, box.bytes
            times = [(timed(local, options.steps), timed(remote, options.steps)) for _ in range(options.repeats)]
            here, there = (statistics.median(column) for column in zip(*times, strict=True))
            ratio = statistics.median(a / b for a, b in times)
            commands = (box.sent - sent) / options.repeats / (options.steps + 1)
            print(
                f"{name}: local {here * 1e3:.2f} ms, node {there * 1e3:.2f} ms a step; {ratio:.2f}x local throughput; "
                f"{commands:.0f} commands a step, {(box.bytes - size) / (box.sent - sent):.1f} bytes each"
            )


if __name__ == "__main__":
    main()
