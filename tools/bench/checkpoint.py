"""python tools/bench/checkpoint.py [--nodes 2] [--mib 256] [--rounds 5] [--folder .]

Checkpoints of tensors on nodes, ``--mib`` MiB on each, beside ``dd conv=fsync`` of as many bytes in all to the same
disk, in turns in one run: save, load (of what the kernel still has in memory), the same without hashes, and async_save:
the time until an operation that comes next is done on all nodes (the pause: for so long no command of training could
run), and until all is on the disk. Beside it the worst that training can do: every tensor is written in place at once,
with nothing between (``optimizer.step()`` without a forward and a backward pass), during a save and without one.

Prints medians, and ratios of each round's save to its dd. A ratio above 1 is faster than dd.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

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


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=Path())
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as made, dt.init_master_worker(nodes=options.nodes):
        found = measure(Path(made).resolve(), options.nodes, options.mib, options.rounds)
    mib = options.mib * options.nodes
    print(f"{mib} MiB on {options.nodes} nodes, {options.rounds} rounds")
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
