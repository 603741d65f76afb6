"""python tools/bench/profile_cost.py [--steps 100] [--repeats 5]

What ``dt.seeing.profile`` costs while it records: CPU time of a launch-bound step on one node, with and without, in
turns in one run, of the script and of the node.
"""

from __future__ import annotations

import argparse
import statistics
import time
from contextlib import nullcontext
from pathlib import Path

import torch

import disttensor as dt


def cpu_of(pid: int) -> float:
    """Seconds of CPU of all threads of a process, as the scheduler counts them."""
    return sum(int(file.read_text().split()[0]) for file in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9


def step(x: torch.Tensor, w: torch.Tensor) -> None:
    """Fifty small operations, whose issue takes longer than they do."""
    for _ in range(10):
        x.mul_(1.0001).add_(w).clamp_(-1, 1).sub_(w).tanh_()


def measure(steps: int, recorded: bool, node: int, x: torch.Tensor, w: torch.Tensor) -> tuple[float, float]:
    """Seconds of CPU a step, of the script and of the node. What a profile does at its end is not in them."""
    with dt.seeing.profile() if recorded else nullcontext():
        dt.synchronize()
        script, there = time.process_time(), cpu_of(node)
        for _ in range(steps):
            step(x, w)
        dt.synchronize()
        return (time.process_time() - script) / steps, (cpu_of(node) - there) / steps


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--steps", type=int, default=100)
    options.add_argument("--repeats", type=int, default=5)
    given = options.parse_args()
    with dt.init_master_worker(nodes=1, threads=1):
        x, w = torch.rand(16, 16, device="node:0"), torch.rand(16, 16, device="node:0")
        pid = dt.nodes()[0].pid
        measure(given.steps, False, pid, x, w)
        off, on = [], []
        for _ in range(given.repeats):
            off.append(measure(given.steps, False, pid, x, w))
            on.append(measure(given.steps, True, pid, x, w))
    for who, at in (("script", 0), ("node", 1)):
        ratio = statistics.median(b[at] / a[at] for a, b in zip(off, on, strict=True))
        without, recording = (1e6 * statistics.median(each[at] for each in side) for side in (off, on))
        print(f"{who}: {without:.0f} us of CPU a step, {recording:.0f} us recorded, ratio {ratio:.2f}")


if __name__ == "__main__":
    main()
