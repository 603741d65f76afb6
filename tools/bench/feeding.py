"""python tools/bench/feeding.py [--nodes 1 4 16 64] [--rounds 20]

Whether one controlling process can feed many devices: how many operations a second a script issues, and the CPU time
of the script for each, with this many nodes.

nodes    an operation on each node in turn (``x[k] = x[k] * 2``): operations of all nodes a second, and a command is one
mesh     an operation on a mesh of them: one command for all, so operations of nodes are so many times as many
issued   a second, by the issuing thread's CPU time: what it issues where it has a core to itself
CPU      microseconds for each operation that the script writes, of the issuing thread and of the whole process (with
         ZeroMQ's thread, which encrypts), the least and the median of the rounds
feeds    how long an operation on a node has to take on average for the script to keep all of them busy
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

import disttensor as dt

#: Operations of a round that the script writes.
COUNT = 1024


def figures(call: Callable[[], None], rounds: int) -> tuple[list[float], list[float]]:
    """Seconds of the thread, and of the process, for a round."""
    thread, process = [], []
    for _ in range(rounds):
        dt.synchronize()
        mine, all_of = time.thread_time(), time.process_time()
        call()
        thread.append(time.thread_time() - mine)
        process.append(time.process_time() - all_of)
    return thread, process


def show(name: str, nodes: int, thread: list[float], process: list[float], each: int) -> None:
    """Prints a line. ``each``: the nodes that one written operation is for."""
    least, median = min(thread) / COUNT, statistics.median(thread) / COUNT
    all_of = min(process) / COUNT, statistics.median(process) / COUNT
    print(
        f"{name:6} {nodes:4}  {each / median:12,.0f}  {least * 1e6:6.2f} {median * 1e6:6.2f}   "
        f"{all_of[0] * 1e6:6.2f} {all_of[1] * 1e6:6.2f}  {all_of[1] * 1e6 * nodes / each:9.1f} us",
        flush=True,
    )


def measure(nodes: int, rounds: int) -> None:
    with dt.init_master_worker(nodes=nodes, threads=1):
        xs = [torch.ones(4, device=dt.device(k)) for k in range(nodes)]
        mesh = dt.mesh(dp=nodes)
        y = torch.ones(4, device=mesh.device)

        def on_nodes() -> None:
            for i in range(COUNT):
                xs[i % nodes] * 2

        def on_mesh() -> None:
            for _ in range(COUNT):
                y * 2

        for call in (on_nodes, on_mesh):
            call()
        show("nodes", nodes, *figures(on_nodes, rounds), each=1)
        show("mesh", nodes, *figures(on_mesh, rounds), each=nodes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    print(f"{'':6} {'of':>4}  {'issued /s':>12}  {'CPU us (thread)':>13}  {'(process)':>13}  {'feeds':>12}")
    for nodes in options.nodes:
        measure(nodes, options.rounds)


if __name__ == "__main__":
    main()
