"""python tools/bench/torch_parallel.py [--width 256] [--layers 4] [--steps 20] [--repeats 5]

A training step of a Llama that torch's parallelize_module cuts in two (tensor parallel with sequence and loss parallel:
tests/kit/parallel_twin.py): under torchrun with gloo, one process for each rank; and from one script over two nodes, in
eager and as one command by @dt.graphed. One compute thread on each rank. Milliseconds of a step, by the clock, which
wants a free core for each rank; and of CPU, of all ranks' processes, and of the script's beside. The least of all
repeats; torchrun's and ours take turns.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import disttensor as dt

sys.path.insert(0, str(Path(__file__).parents[2] / "tests/kit"))

import parallel_twin as twin

PLAN, RANKS = "loss parallel", 2


def enlarge(options: argparse.Namespace) -> None:
    """Has the twin's model be of another size."""
    twin.WIDTH, twin.HIDDEN, twin.LAYERS = options.width, 3 * options.width, options.layers
    twin.LENGTH, twin.BATCH, twin.HEADS, twin.KEYS = options.length, 8, 8, 4


def measured(step: Callable[[], Any], wait: Callable[[], Any], steps: int) -> tuple[float, float]:
    """Returns the milliseconds of a step, by the clock and of this process' CPU."""
    wait()
    began, cpu = time.perf_counter(), time.process_time()
    for _ in range(steps):
        step()
    wait()
    return (time.perf_counter() - began) * 1e3 / steps, (time.process_time() - cpu) * 1e3 / steps


def rank(options: argparse.Namespace) -> None:
    """Measures a rank of torchrun's, and prints that as JSON."""
    torch.set_num_threads(1)
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    tp = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tp",))["tp"]
    _, _, step = twin.training(twin.new_model(), tp, PLAN)
    x, y = twin.new_batch()
    for _ in range(3):
        step(x, y)
    wall, cpu = measured(lambda: step(x, y), dist.barrier, options.steps)
    found: list[Any] = [None] * RANKS
    dist.all_gather_object(found, cpu)
    if dist.get_rank() == 0:
        print(json.dumps([wall, sum(found)]), flush=True)
    dist.barrier()
    os._exit(0)


def under_torchrun(arguments: list[str]) -> tuple[float, float]:
    """Returns the milliseconds of a step of torchrun's, by the clock and of all ranks' CPU."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, __file__, "--rank", *arguments],
        capture_output=True,
        text=True,
        env=environment,
        check=True,
        timeout=300,
    )
    wall, cpu = json.loads(done.stdout.splitlines()[-1])
    return wall, cpu


def of_nodes() -> float:
    """Returns the seconds of CPU of all nodes."""
    return sum(dt.run(time.process_time, node=list(range(RANKS))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    enlarge(options)
    if options.rank:
        rank(options)
    best: dict[str, list[float]] = {}

    def note(name: str, *figures: float) -> None:
        known = best.setdefault(name, list(figures))
        best[name] = [min(pair) for pair in zip(known, figures, strict=True)]

    with dt.init_master_worker(nodes=RANKS, threads=1):
        mesh = dt.mesh(tp=RANKS)
        _, _, step = twin.training(twin.new_model().to(mesh.device), mesh.torch["tp"], PLAN)
        x, y = (each.to(mesh.device) for each in twin.new_batch())
        replayed = dt.graphed(step)
        ways: dict[str, Callable[[Any, Any], Any]] = {"one script, in eager": step, "one script, @dt.graphed": replayed}
        for way in ways.values():
            for _ in range(3):
                way(x, y)
        for _ in range(options.repeats):
            wall, cpu = under_torchrun(sys.argv[1:])
            note("torchrun", wall, cpu, 0)
            for name, way in ways.items():
                nodes = of_nodes()
                wall, own = measured(lambda way=way: way(x, y), dt.synchronize, options.steps)  # type: ignore[misc]
                note(name, wall, (of_nodes() - nodes) * 1e3 / options.steps, own)
    print(f"{'ms a step':26}{'clock':>10}{'ranks':>10}{'script':>10}")
    for name, figures in best.items():
        print(f"{name:26}" + "".join(f"{figure:10.2f}" for figure in figures))
    print(f"{'@dt.graphed over torchrun':26}" + f"{best['one script, @dt.graphed'][0] / best['torchrun'][0]:10.2f}")


if __name__ == "__main__":
    main()
