"""python tools/bench/launch.py [--steps 200] [--repeats 7] [--sessions 3]

What a launch-bound training step costs the master in CPU time, against the CPU time of the same step done locally, in
turns in one run, one compute thread on either side. The step: a 4-layer MLP of width 64, batch 32, cross entropy, SGD
with momentum. CPU time is the process's, so ZeroMQ's thread and the flushing one count as the master's; that of the
thread that runs the script is given beside it.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from itertools import pairwise

import torch
import torch.nn as nn
import torch.nn.functional as F

import disttensor as dt


def trainer(device: str) -> Callable[[], torch.Tensor]:
    """A step of the MLP. Returns its loss, not fetched."""
    torch.manual_seed(0)
    sizes = (64, 64, 64, 64, 10)
    layers = [layer for a, b in pairwise(sizes) for layer in (nn.Linear(a, b), nn.ReLU())]
    model = nn.Sequential(*layers[:-1]).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    x = torch.randn(32, 64).to(device)
    y = torch.randint(0, 10, (32,)).to(device)

    def step() -> torch.Tensor:
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return step


def timed(step: Callable[[], torch.Tensor], steps: int) -> tuple[float, float, float]:
    """Seconds a step: the process's CPU time, this thread's, and by the clock; the loss is fetched at the end."""
    step().item()
    clocks = (time.process_time, time.thread_time, time.perf_counter)
    starts = [clock() for clock in clocks]
    for _ in range(steps):
        loss = step()
    loss.item()
    cpu, thread, wall = ((clock() - start) / steps for clock, start in zip(clocks, starts, strict=True))
    return cpu, thread, wall


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--sessions", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for _ in range(options.sessions):
        with dt.init_master_worker(nodes=1, threads=1):
            local, remote = trainer("cpu"), trainer("node:0")
            timed(local, 30), timed(remote, 30)
            rows += [(*timed(local, options.steps), *timed(remote, options.steps)) for _ in range(options.repeats)]
    here, _, here_wall, cpu, thread, wall = (statistics.median(column) * 1e6 for column in zip(*rows, strict=True))
    print(f"local step: {here:.0f} us of CPU time, {here_wall:.0f} us by the clock")
    print(
        f"node step, at the master: {cpu:.0f} us of CPU time, {thread:.0f} in its own thread, {wall:.0f} by the clock"
    )
    for name, column in (("the master's CPU time", 3), ("its own thread's", 4)):
        ratios = sorted(row[column] / row[0] for row in rows)
        print(
            f"launch-bound step, {name} over local eager's: "
            f"{statistics.median(ratios):.2f}x ({ratios[0]:.2f} to {ratios[-1]:.2f})"
        )


if __name__ == "__main__":
    main()
