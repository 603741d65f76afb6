"""python tools/bench/compiled.py [--models vit gpt] [--steps 10] [--repeats 9] [--engine interpreter]

Forward and backward of ten models (compiled_models.py) by the script's CPU time, of the process and of the thread that
calls: locally in eager, on a node in eager, and on a node by torch.compile, in turns in one process, one compute thread
on either side; the least of all repeats. Local eager's time has its arithmetic, a node's has not.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from compiled_models import MODELS, Made

import disttensor as dt

Step = Callable[[], None]


def stepper(made: Made, device: str, options: dict[str, str] | None) -> Step:
    """Returns a step of the model; ``options`` are those of torch.compile, without which it is not compiled."""
    model, batch, labels = made.model.to(device), [x.to(device) for x in made.batch], made.labels.to(device)
    parameters = list(model.parameters())
    loss_of: Callable[[], torch.Tensor] = lambda: F.cross_entropy(model(*batch), labels)  # noqa: E731
    if options is not None:
        loss_of = torch.compile(loss_of, options=options)

    def step() -> None:
        loss_of().backward()
        for p in parameters:
            p.grad = None

    return step


def turn(step: Step, steps: int) -> tuple[float, float]:
    """Returns the ms of CPU that a step takes: of the process, until all is done, and of this thread."""
    process, thread = time.process_time(), time.thread_time()
    for _ in range(steps):
        step()
    thread = time.thread_time() - thread
    dt.synchronize()
    return (time.process_time() - process) / steps * 1e3, thread / steps * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--engine", default="interpreter")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("ms of CPU a step, process | thread                   node compiled over local, over node eager", flush=True)
    with dt.init_master_worker(nodes=1, threads=1):
        for name in options.models:
            torch.manual_seed(0)
            compiling = {"engine": options.engine}
            kinds = (("cpu", None), ("node:0", None), ("node:0", compiling))
            steps = [stepper(MODELS[name](), device, how) for device, how in kinds]
            for step in steps:
                turn(step, 4)
            rows = [[turn(step, options.steps) for step in steps] for _ in range(options.repeats)]
            (local, local_), (eager, eager_), (compiled, compiled_) = (
                tuple(map(min, zip(*column, strict=True))) for column in zip(*rows, strict=True)
            )
            print(
                f"{name:10s} local {local:5.2f} | {local_:5.2f}, node eager {eager:5.2f} | {eager_:5.2f}, node compiled "
                f"{compiled:5.2f} | {compiled_:5.2f}: {compiled / local:.2f} | {compiled_ / local_:.2f}x, "
                f"{compiled / eager:.2f} | {compiled_ / eager_:.2f}x",
                flush=True,
            )


if __name__ == "__main__":
    main()
