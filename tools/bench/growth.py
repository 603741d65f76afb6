"""python tools/bench/growth.py [--what nodes tensors graph streams] [--blocks 9] [--most 1]

How cost grows with the nodes of a mesh, live tensors, a graph's commands, and streams: CPU time in microseconds, of the
issuing thread, of the script's process, and of the nodes. The least of some blocks; the last column is that of the
thread over the first row's.
``--most 0.1`` takes a tenth of the largest sizes.

nodes    an operation on a mesh of so many nodes, waited for each 200; `.item()` of the mesh
tensors  an operation on one tensor while so many others live; `made`: what one of these costs to make
graph    a graph of so many commands: recording one of them; a replay of them all
streams  an operation in a block of its own, on so many streams in turns; the first row is without blocks
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import cycle

import torch

import disttensor as dt

#: Operations of a block.
CALLS = 200
SIZES = {
    "nodes": (1, 4, 16, 64),
    "tensors": (0, 10_000, 100_000, 1_000_000),
    "graph": (100, 1000, 10_000, 100_000),
    "streams": (0, 1, 4, 16, 64),
}
#: The largest size by which others go, where ``--most`` is less than 1.
LEAST = {"nodes": 4, "tensors": 10_000, "graph": 1000, "streams": 4}

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--what", nargs="*", choices=SIZES, default=list(SIZES))
parser.add_argument("--blocks", type=int, default=9)
parser.add_argument("--most", type=float, default=1.0)
options = parser.parse_args()


class Cost:
    """CPU time of the thread, of the process, and of the nodes, in microseconds a call."""

    def __init__(self, thread: float, process: float, nodes: float) -> None:
        self.thread, self.process, self.nodes = thread, process, nodes

    def least(self, other: Cost) -> Cost:
        return Cost(*map(min, self._all(), other._all()))

    def _all(self) -> tuple[float, float, float]:
        return self.thread, self.process, self.nodes

    def each(self, count: int) -> Cost:
        return Cost(*(figure / count for figure in self._all()))

    def over(self, first: Cost) -> str:
        return f"{self.thread / first.thread:8.2f}"

    def __str__(self) -> str:
        return "".join(f"{each:10.1f}" for each in self._all())


def nodes_cpu() -> float:
    """The seconds of CPU of all nodes, of threads that have ended too: by the clocks that Linux has for processes."""
    return sum(time.clock_gettime(~node.pid << 3 | 2) for node in dt.nodes())


def cost(call: Callable[[], object], calls: int = CALLS, blocks: int = 0) -> Cost:
    """What a call costs that is made so often, and waited for."""
    found: Cost | None = None
    for _ in range(blocks or options.blocks):
        dt.synchronize()
        there, process, thread = nodes_cpu(), time.process_time(), time.thread_time()
        for _ in range(calls):
            call()
        issued = time.thread_time() - thread
        dt.synchronize()
        taken = [issued, time.process_time() - process, nodes_cpu() - there]
        block = Cost(*(1e6 * each / calls for each in taken))
        found = block if found is None else found.least(block)
    assert found is not None
    return found


class Table:
    """Rows of one kind of growth."""

    def __init__(self, what: str) -> None:
        print(f"\n{what:>24}{'thread':>10}{'process':>10}{'nodes':>10}{'growth':>8}")
        self._first: dict[str, Cost] = {}

    def row(self, kind: str, size: int, found: Cost) -> None:
        first = self._first.setdefault(kind, found)
        print(f"{kind:>14}{size:>10,}{found}{found.over(first)}", flush=True)


@contextmanager
def session(nodes: int) -> Iterator[None]:
    with dt.init_master_worker(nodes=nodes, threads=1):
        gc.collect()
        gc.disable()
        try:
            yield
        finally:
            gc.enable()


def nodes(sizes: tuple[int, ...]) -> None:
    table = Table("nodes")
    for size in sizes:
        with session(size):
            x = torch.ones(1, device=dt.mesh(dp=size).device if size > 1 else "node:0")
            table.row("operation", size, cost(partial(x.mul_, 1)))
            table.row("item", size, cost(x.item, 20))


def tensors(sizes: tuple[int, ...]) -> None:
    table = Table("live tensors")
    with session(1):
        x, alive = torch.ones(16, 16, device="node:0"), list[torch.Tensor]()
        for size in sizes:
            if size > len(alive):
                missing = size - len(alive)
                made = cost(lambda: alive.append(x + 1), missing, blocks=1)
                table.row("made", size, made)
            table.row("operation", size, cost(partial(x.mul_, 1)))


def graph(sizes: tuple[int, ...]) -> None:
    table = Table("commands of a graph")
    with session(1):
        x = torch.ones(16, 16, device="node:0")
        for size in sizes:
            recorded = dt.Graph()
            found = cost(partial(record, recorded, x, size), 1, blocks=1)
            table.row("recorded", size, found.each(size))
            recorded.replay()
            table.row("replay", size, cost(recorded.replay, 1))


def record(graph: dt.Graph, x: torch.Tensor, size: int) -> None:
    with dt.graph(graph):
        for _ in range(size):
            x.mul_(1)


def streams(sizes: tuple[int, ...]) -> None:
    table = Table("streams")
    with session(1):
        x = torch.ones(16, 16, device="node:0")
        for size in sizes:
            turns = cycle([dt.Stream(0) for _ in range(size)])
            table.row("operation", size, cost(partial(switched, x, turns) if size else partial(x.mul_, 1)))


def switched(x: torch.Tensor, turns: Iterator[dt.Stream]) -> None:
    with dt.stream(next(turns)):
        x.mul_(1)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for what in options.what:
        most = max(LEAST[what], options.most * SIZES[what][-1])
        globals()[what](tuple(size for size in SIZES[what] if size <= most))
