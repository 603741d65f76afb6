"""python tools/bench/compiled.py [--what models step] [--models vit gpt] [--steps 10] [--repeats 9] [--engine auto]

Forward and backward of ten models (compiled_models.py): locally in eager, on a node in eager, and on a node by
torch.compile, in turns in one process, one compute thread on either side; the least of all repeats. The script's CPU
time, of the process and of the thread that calls; the node's; and how many steps a second all of it makes, by the
clock, for which script and node want a free core each. Local eager's CPU time has its arithmetic, the script's of a
node has not. An engine that compiles is waited for before anything is measured.

`--what step`: a training step of a small MLP (9 layers, forward, backward, SGD), by each way that there is to have it
on a node: in eager, by torch.compile with an eager optimizer, as one dt.graph, by @dt.graphed. The node's CPU time, of
all its threads and of the one that computes, three times: as the commands come; with all of a block's commands there
before it begins (it is stopped while they are issued), so that it never waits, and has its caches; and, of the ways
that cost the script less than torch.compile does, with a script that computes besides for as long as that takes.
"""

from __future__ import annotations

import argparse
import gc
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from compiled_models import MODELS, Made, classes, layers

import disttensor as dt

Step = Callable[[], object]
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


# ---- a whole step ----------------------------------------------------------------------------------------------------

WAYS = ("local eager", "node eager", "compiled, eager SGD", "one dt.graph", "@dt.graphed")
STEP_HEAD = """\
us a step             the script's CPU   the node's CPU, all threads | the one that computes  steps a second
                      process | thread   as they come   all there first   at compiled's pace  over local's"""
#: Microseconds: of the script's process, of its thread; of the node's, of its thread that computes; by the clock.
Cost = tuple[float, ...]


def train(device: str, way: str) -> Step:
    """Returns a training step of the MLP."""
    torch.manual_seed(0)
    model = layers(*[64] * 5, 10).to(device)
    x, y = torch.randn(32, 64).to(device), classes(10, 32).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    loss_of: Callable[..., torch.Tensor] = lambda x, y: F.cross_entropy(model(x), y)  # noqa: E731
    if way.startswith("compiled"):
        loss_of = torch.compile(loss_of)

    def step(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
        loss = loss_of(x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    if way == "@dt.graphed":
        graphed = dt.graphed(step)
        return lambda: graphed(x, y)
    step(), step()
    if way != "one dt.graph":
        return step
    g = dt.Graph()
    with dt.graph(g):
        step()
    return g.replay


def cpu_of(pid: int) -> tuple[float, float]:
    """Returns the seconds of CPU time that a process' threads have used, and its first one."""
    spent = {
        int(file.parent.name): int(file.read_text().split()[0]) / 1e9
        for file in Path(f"/proc/{pid}/task").glob("*/schedstat")
    }
    return sum(spent.values()), spent[pid]


def block(step: Step, steps: int, node: int, stopped: bool, pace: float) -> Cost:
    """Returns what a step costs in a block of these. ``stopped``: the node begins when all is issued; ``pace``: seconds
    of the script's thread that a step takes at least."""
    there, process, thread, clock = cpu_of(node), time.process_time(), time.thread_time(), time.perf_counter()
    if stopped:
        os.kill(node, signal.SIGSTOP)
    for _ in range(steps):
        end = time.thread_time() + pace
        step()
        while time.thread_time() < end:
            pass
    if stopped:
        os.kill(node, signal.SIGCONT)
    thread = time.thread_time() - thread
    dt.synchronize()
    spent = time.process_time() - process, thread, *map(float.__sub__, cpu_of(node), there), time.perf_counter() - clock
    return tuple(seconds / steps * 1e6 for seconds in spent)


def measure_step(steps: int, repeats: int) -> None:
    print(STEP_HEAD, flush=True)
    least: dict[tuple[str, str], Cost] = {}
    with dt.init_master_worker(nodes=1, threads=1):
        node = dt.run(os.getpid, node=0)
        ways = {way: train("cpu" if way == "local eager" else "node:0", way) for way in WAYS}
        for step in ways.values():
            block(step, 5, node, False, 0)
        pace = 0.0
        for _ in range(repeats):
            for way, step in ways.items():
                for how in ("as they come", "all there first", "paced"):
                    if how != "paced" or way in WAYS[3:]:
                        cost = block(step, steps, node, how == "all there first", pace if how == "paced" else 0.0)
                        least[way, how] = tuple(map(min, cost, least.get((way, how), cost)))
                pace = least.get((WAYS[2], "as they come"), (0, 0))[1] / 1e6
    for way in WAYS:
        free, ready = least[way, "as they come"], least[way, "all there first"]
        there = [free, ready, *(found for key, found in least.items() if key == (way, "paced"))]
        texts = [f"{it[2]:5.0f} | {it[3]:4.0f}" for it in there if way != "local eager"]
        ratio = least["local eager", "as they come"][4] / free[4]
        print(
            f"{way:21s} {free[0]:6.0f} | {free[1]:5.0f}     {'   '.join(texts):47s} {ratio:5.2f}".rstrip(), flush=True
        )
    graph, compiled = least[WAYS[3], "all there first"], least[WAYS[2], "all there first"]
    free, paced = least[WAYS[2], "as they come"], least[WAYS[3], "paced"]
    print(
        f"the node's CPU, compiled over one dt.graph: {compiled[2] / graph[2]:.2f}x with all commands there, "
        f"{free[2] / paced[2]:.2f}x at one pace, {free[2] / least[WAYS[3], 'as they come'][2]:.2f}x as they come"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--engine", default="interpreter")
    parser.add_argument("--what", nargs="+", default=["models", "step"], choices=["models", "step"])
    options = parser.parse_args()
    torch.set_num_threads(1)
    if "step" in options.what:
        measure_step(4 * options.steps, 2 * options.repeats)
    if "models" in options.what:
        measure_models(options)


def measure_models(options: argparse.Namespace) -> None:
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
