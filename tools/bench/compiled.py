"""python tools/bench/compiled.py [--models vit gpt] [--steps 10] [--repeats 9] [--engine interpreter]

Forward and backward of ten models (compiled_models.py): locally in eager, on a node in eager, and on a node by
torch.compile, in turns in one process, one compute thread on either side; the least of all repeats. The script's CPU
time, of the process and of the thread that calls; the node's; and how many steps a second all of it makes, by the
clock, for which script and node want a free core each. Local eager's CPU time has its arithmetic, the script's of a
node has not. An engine that compiles is waited for before anything is measured.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from compiled_models import MODELS, Made

import disttensor as dt

Step = Callable[[], None]
#: Seconds after which a model is measured with whatever runs it then.
COMPILING = 300
HEAD = """\
ms a step  the script's CPU, process | thread           the node's     compiled over              steps a second
           local          node eager     compiled       eager  comp.   local        node eager    over local's"""


def stepper(made: Made, device: str, options: dict[str, Any] | None) -> Step:
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


def turn(step: Step, steps: int) -> tuple[float, float, float, float]:
    """Returns the ms that a step takes: of the process' CPU, until all is done, of this thread's, of the node's, and by
    the clock."""
    node = dt.run(time.process_time, node=0)
    clock, process, thread = time.perf_counter(), time.process_time(), time.thread_time()
    for _ in range(steps):
        step()
    thread = time.thread_time() - thread
    dt.synchronize()
    process, clock = time.process_time() - process, time.perf_counter() - clock
    spent = process, thread, dt.run(time.process_time, node=0) - node, clock
    return tuple(seconds / steps * 1e3 for seconds in spent)  # type: ignore[return-value]


def wait_for_engines(step: Step, engine: str) -> str:
    """Steps until what replays on the node is the engine; says what does so in the end."""
    graphs = [each for each in gc.get_objects() if type(each) is dt.Graph and each.id]
    until = time.monotonic() + COMPILING
    while True:
        found = [pair for graph in graphs for pairs in graph.engines().values() for pair in pairs]
        if all(name == engine or why for name, why in found) or time.monotonic() > until:
            return ", ".join(f"{name} ({why})" if why else name for name, why in found)
        step()
        time.sleep(0.1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--engine", default="interpreter")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(HEAD, flush=True)
    with dt.init_master_worker(nodes=1, threads=1):
        for name in options.models:
            torch.manual_seed(0)
            compiling = {"engine": options.engine}
            kinds = (("cpu", None), ("node:0", None), ("node:0", compiling))
            steps = [stepper(MODELS[name](), device, how) for device, how in kinds]
            for step in steps:
                turn(step, 4)
            engines = wait_for_engines(steps[-1], options.engine) if options.engine != "interpreter" else ""
            rows = [[turn(step, options.steps) for step in steps] for _ in range(options.repeats)]
            local, eager, compiled = (tuple(map(min, zip(*column, strict=True))) for column in zip(*rows, strict=True))
            times = "  ".join(f"{process:5.2f} | {thread:5.2f}" for process, thread, *_ in (local, eager, compiled))
            over = "  ".join(f"{compiled[0] / it[0]:4.2f} | {compiled[1] / it[1]:4.2f}" for it in (local, eager))
            row = f"{times}  {eager[2]:5.2f}  {compiled[2]:5.2f}   {over}   {local[3] / compiled[3]:.2f}  {engines}"
            print(f"{name:11s}{row}".rstrip(), flush=True)


if __name__ == "__main__":
    main()
