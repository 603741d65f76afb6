"""python tools/bench/step.py [--steps 40] [--repeats 3] [--sessions 5]

Training steps on one node against the same steps done locally, in turns in one run, one compute thread on either side:
throughput of a step with at least 5 ms of compute, and the bytes per command over steps of a small transformer. Where
a process's memory happens to lie changes its speed by some percent, so that several sessions are measured.
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
from disttensor.session import current


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


def compare(width: int, batch: int, steps: int, repeats: int) -> tuple[float, float, float, float, float]:
    """(local seconds, node seconds, local over node, commands a step, bytes a command) of one session."""
    with dt.init_master_worker(nodes=1, threads=1):
        box = current.session().nodes[0].outbox
        local, remote = trainer("cpu", width, batch), trainer("node:0", width, batch)
        timed(local, 3), timed(remote, 3)
        sent = box.sent
        times = [(timed(local, steps), timed(remote, steps)) for _ in range(repeats)]
        here, there = (statistics.median(column) for column in zip(*times, strict=True))
        ratio = statistics.median(a / b for a, b in times)
        commands = (box.sent - sent) / repeats / (steps + 1)
        sizes, sent = list[int](), box.sent
        with current.session().link.seam.sent.heard_by(lambda message: sizes.append(len(message.message))):
            timed(remote, steps)
        return here, there, ratio, commands, sum(sizes) / (box.sent - sent)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--sessions", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name, width, batch in (("launch-bound", 32, 4), ("compute-bound", 128, 16)):
        sessions = [compare(width, batch, options.steps, options.repeats) for _ in range(options.sessions)]
        here, there, ratio, commands, size = (statistics.median(column) for column in zip(*sessions, strict=True))
        ratios = sorted(s[2] for s in sessions)
        print(
            f"{name}: local {here * 1e3:.2f} ms, node {there * 1e3:.2f} ms a step; {ratio:.2f}x local throughput "
            f"({ratios[0]:.2f} to {ratios[-1]:.2f}); {commands:.0f} commands a step, {size:.1f} bytes each"
        )


if __name__ == "__main__":
    main()
