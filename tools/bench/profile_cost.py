"""python tools/bench/profile_cost.py [--what training operations] [--steps 100] [--repeats 25]

What ``dt.seeing.profile`` costs while it records: CPU time of a launch-bound step on one node, with and without, in
turns in one run, of the script and of the node. Training: the step of launch.py, a small MLP's; operations: fifty small
ones in place, which is all that a command can cost, as none is cheaper.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from operator import itemgetter
from pathlib import Path

import torch
from launch import trainer

import disttensor as dt


def cpu_of(pid: int) -> float:
    """Seconds of CPU of all threads of a process, as the scheduler counts them."""
    return sum(int(file.read_text().split()[0]) for file in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9


def operations() -> Callable[[], object]:
    """Fifty small operations, whose issue takes longer than they do."""
    x, w = torch.rand(16, 16, device="node:0"), torch.rand(16, 16, device="node:0")

    def step() -> None:
        for _ in range(10):
            x.mul_(1.0001).add_(w).clamp_(-1, 1).sub_(w).tanh_()

    return step


#: name -> what makes the step.
STEPS: dict[str, Callable[[], Callable[[], object]]] = {
    "training": lambda: trainer("node:0"), "operations": operations,
}  # fmt: skip


def measure(step: Callable[[], object], steps: int, recorded: bool, node: int) -> tuple[float, float]:
    """Seconds of CPU a step, of the script and of the node. What a profile does at its end is not in them."""
    with dt.seeing.profile() if recorded else nullcontext():
        dt.synchronize()
        script, there = time.process_time(), cpu_of(node)
        for _ in range(steps):
            step()
        dt.synchronize()
        return (time.process_time() - script) / steps, (cpu_of(node) - there) / steps


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--what", nargs="*", choices=STEPS, default=list(STEPS))
    options.add_argument("--steps", type=int, default=100)
    options.add_argument("--repeats", type=int, default=25)
    given = options.parse_args()
    torch.set_num_threads(1)
    for what in given.what:
        with dt.init_master_worker(nodes=1, threads=1):
            step, pid = STEPS[what](), dt.nodes()[0].pid
            measure(step, given.steps, False, pid), measure(step, given.steps, True, pid)
            off, on = [], []
            for _ in range(given.repeats):
                off.append(measure(step, given.steps, False, pid))
                on.append(measure(step, given.steps, True, pid))
        for who, of in (("script", itemgetter(0)), ("node", itemgetter(1)), ("both", sum)):
            ratios = sorted(of(b) / of(a) for a, b in zip(off, on, strict=True))
            without, recording = (1e6 * statistics.median(map(of, side)) for side in (off, on))
            low, middle, high = (ratios[len(ratios) * k // 4] for k in (1, 2, 3))
            print(
                f"{what}, {who}: {without:.0f} us of CPU a step, {recording:.0f} us recorded, "
                f"ratio {middle:.3f} ({low:.3f} to {high:.3f})",
                flush=True,
            )


if __name__ == "__main__":
    main()
