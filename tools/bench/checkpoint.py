"""python tools/bench/checkpoint.py [--what time cpu] [--nodes 2] [--mib 256] [--rounds 5] [--folder .]

Checkpoints of tensors on nodes, ``--mib`` MiB on each.

time: seconds, beside ``dd conv=fsync`` of as many bytes in all to the same
disk, in turns in one run: save, load (of what the kernel still has in memory), the same without hashes, and async_save:
the time until an operation that comes next is done on all nodes (the pause: for so long no command of training could
run), and until all is on the disk. Beside it the worst that training can do: every tensor is written in place at once,
with nothing between (``optimizer.step()`` without a forward and a backward pass), during a save and without one.
Prints medians, and ratios of each round's save to its dd. A ratio above 1 is faster than dd.

cpu: seconds of CPU of the script and of all processes, of a save and a load here and of what others need for as many
bytes, in turns in one run: ``torch.save`` and torch.distributed.checkpoint (without a process group) of local tensors,
and sha256 of them alone, which a save and a load of ours have in them. Prints the least of the rounds.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import shutil
import statistics
import subprocess
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

import disttensor as dt

#: Tensors on each node.
TENSORS = 16


def seconds(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def dd(folder: Path, mib: int) -> None:
    """Writes zeros, and waits for the disk."""
    command = ["dd", "if=/dev/zero", f"of={folder / 'dd'}", "bs=1M", f"count={mib}", "conv=fsync", "status=none"]
    subprocess.run(command, check=True)
    (folder / "dd").unlink()


def measure(folder: Path, nodes: int, mib: int, rounds: int) -> dict[str, list[float]]:
    """Returns the seconds of each round, by what was measured."""
    entries = mib * (1 << 20) // 4 // TENSORS
    state = {f"{node}.{i}": torch.rand(entries, device=f"node:{node}") for node in range(nodes) for i in range(TENSORS)}
    probes = [torch.ones(1, device=f"node:{node}") for node in range(nodes)]
    path = folder / "checkpoint"
    found: dict[str, list[float]] = {}

    def note(what: str, run: Callable[[], object]) -> None:
        dt.synchronize()
        found.setdefault(what, []).append(seconds(run))

    def fresh() -> None:
        shutil.rmtree(path, ignore_errors=True)
        subprocess.run(["sync"], check=True)

    def done() -> None:
        for fetched in [dt.fetch(probe + 1) for probe in probes]:
            fetched.wait()

    def write() -> None:
        for x in state.values():
            x.mul_(0.5)
        done()

    dt.checkpoint.save(state, path)  # imports, first touches of memory
    for _ in range(rounds):
        fresh()
        note("dd", lambda: dd(folder, mib * nodes))
        note("save", lambda: dt.checkpoint.save(state, path))
        note("load", lambda: dt.checkpoint.load(state, path))
        note("load without hashes", lambda: dt.checkpoint.load(state, path, check_hashes=False))
        fresh()
        dt.synchronize()
        began = time.perf_counter()
        work = dt.checkpoint.async_save(state, path)
        done()
        found.setdefault("async: pause", []).append(time.perf_counter() - began)
        work.wait()
        found.setdefault("async: until it is on the disk", []).append(time.perf_counter() - began)
        note("all tensors written, no save", write)
        fresh()
        dt.synchronize()
        work = dt.checkpoint.async_save(state, path)
        found.setdefault("all tensors written, beside a save", []).append(seconds(write))
        work.wait()
    return found


def nodes_cpu() -> float:
    """The seconds of CPU of all nodes, of threads that have ended too: by the clocks that Linux has for processes."""
    return sum(time.clock_gettime(~node.pid << 3 | 2) for node in dt.nodes())


def measure_cpu(folder: Path, nodes: int, mib: int, rounds: int) -> dict[str, tuple[float, float]]:
    """Returns the least seconds of CPU of the script and of all processes, by what was measured."""
    entries = mib * (1 << 20) // 4 // TENSORS
    local: dict[str, Any] = {f"{node}.{i}": torch.rand(entries) for node in range(nodes) for i in range(TENSORS)}
    state = {name: x.to(f"node:{name.partition('.')[0]}") for name, x in local.items()}
    torchs, ours = folder / "torchs", folder / "ours"
    run: dict[str, Callable[[], object]] = {
        "sha256 alone": lambda: [hashlib.sha256(memoryview(x.numpy()).cast("B")).digest() for x in local.values()],
        "torch.save": lambda: torch.save(local, folder / "file"),
        "torch DCP: save": lambda: save(local, checkpoint_id=torchs, no_dist=True),
        "save": lambda: dt.checkpoint.save(state, ours),
        "torch DCP: load": lambda: load(local, checkpoint_id=torchs, no_dist=True),
        "load": lambda: dt.checkpoint.load(state, ours),
        "load without hashes": lambda: dt.checkpoint.load(state, ours, check_hashes=False),
    }
    least = dict.fromkeys(run, (math.inf, math.inf))
    for n in range(rounds + 1):
        for path in (torchs, ours):
            shutil.rmtree(path, ignore_errors=True)
        for what, call in run.items():
            subprocess.run(["sync"], check=True)
            dt.synchronize()
            there, here = nodes_cpu(), time.process_time()
            call()
            dt.synchronize()
            script = time.process_time() - here
            if n:  # the first round has imports, and first touches of memory
                before = least[what]
                least[what] = min(before[0], script), min(before[1], script + nodes_cpu() - there)
    return least


def print_cpu(folder: Path, nodes: int, mib: int, rounds: int) -> None:
    """Prints the table of CPU time."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # as it is to be here
    found = measure_cpu(folder, nodes, mib, rounds)
    print(f"{mib * nodes} MiB on {nodes} nodes, least of {rounds} rounds, ms of CPU")
    print(f"{'':24}{'script':>9}{'all':>9}{'over DCP':>10}")
    for what, (script, every) in found.items():
        dcps = found["torch DCP: load" if "load" in what else "torch DCP: save"][1]
        print(f"{what:24}{1e3 * script:9.0f}{1e3 * every:9.0f}{every / dcps:9.2f}x")


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--what", nargs="*", choices=("time", "cpu"), default=["time", "cpu"])
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=Path())
    options = parser.parse_args()
    tables = {"time": print_time, "cpu": print_cpu}
    for what in options.what:
        with tempfile.TemporaryDirectory(dir=options.folder) as made, dt.init_master_worker(nodes=options.nodes):
            tables[what](Path(made).resolve(), options.nodes, options.mib, options.rounds)


def print_time(folder: Path, nodes: int, each: int, rounds: int) -> None:
    """Prints the table of seconds."""
    found = measure(folder, nodes, each, rounds)
    mib = each * nodes
    print(f"{mib} MiB on {nodes} nodes, {rounds} rounds")
    for what, times in found.items():
        print(f"{what:32}{statistics.median(times):9.3f} s{mib / statistics.median(times):9.0f} MiB/s")
    ratios = sorted(d / s for d, s in zip(found["dd"], found["save"], strict=True))
    print(f"save over dd: {statistics.median(ratios):.2f}x ({ratios[0]:.2f} to {ratios[-1]:.2f})")
    whole = zip(found["async: pause"], found["async: until it is on the disk"], strict=True)
    shares = sorted(pause / every for pause, every in whole)
    print(f"async pause: {statistics.median(shares):.1%} of the save ({shares[0]:.1%} to {shares[-1]:.1%})")
    every, plain, beside = (
        statistics.median(found[what])
        for what in (
            "async: until it is on the disk",
            "all tensors written, no save",
            "all tensors written, beside a save",
        )
    )
    print(f"and {(beside - plain) / every:.1%} where every tensor is written at once: copied first, on shared cores")


if __name__ == "__main__":
    main()
