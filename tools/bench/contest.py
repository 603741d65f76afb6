"""What benchmarks have in common that compare contestants: processes that wait for tasks and take turns, in blocks of
calls in the same minutes, since machines are shared and noisy; and a plot over sizes.
"""

from __future__ import annotations

import json
import multiprocessing
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

#: What a rank is: does tasks from the pipe until None comes. (who, rank, how many ranks, pipe, folder)
Main = Callable[[str, int, int, Connection, str], None]

_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def parse_size(text: str) -> int:
    """ "4K" is 4096."""
    return int(text[:-1]) * _UNITS[text[-1]] if text[-1] in _UNITS else int(text)


def parse_sizes(texts: Iterable[str]) -> list[int]:
    """Of "1K-256M" each fourth power of two."""
    sizes = []
    for text in texts:
        first, _, last = text.partition("-")
        size, top = parse_size(first), parse_size(last or first)
        while size <= top:
            sizes.append(size)
            size <<= 2
    return sizes


def show_size(nbytes: int) -> str:
    for unit, size in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= size:
            return f"{nbytes // size} {unit}"
    return f"{nbytes} B"


def calls_of(nbytes: int) -> int:
    """Calls in a block: enough to measure, about as long for each size."""
    return max(3, min(200, (16 << 20) // nbytes))


class Team:
    """The ranks of one contestant, processes of their own. ``addresses``: each says where it is, and is told of all."""

    def __init__(self, who: str, size: int, main: Main, introduce: Callable[[list[Any]], Any] | None = None) -> None:
        self.name = who
        self._folder = tempfile.TemporaryDirectory()
        context = multiprocessing.get_context("spawn")
        pairs = [context.Pipe() for _ in range(size)]
        self._pipes = [ours for ours, _ in pairs]
        self._processes = [
            context.Process(target=main, args=(who, rank, size, theirs, self._folder.name))
            for rank, (_, theirs) in enumerate(pairs)
        ]
        for process in self._processes:
            process.start()
        for _, theirs in pairs:
            theirs.close()  # so that a rank that fails is noticed
        try:
            if introduce is not None:
                told = introduce([pipe.recv() for pipe in self._pipes])
                for pipe in self._pipes:
                    pipe.send(told)
            for pipe in self._pipes:
                pipe.recv()
        except EOFError:
            self.close()
            raise ImportError(f"{who} can't be measured here; it says why above") from None

    def measure(self, *task: Any) -> list[Any]:
        """What each rank replies."""
        for pipe in self._pipes:
            pipe.send(task)
        return [pipe.recv() for pipe in self._pipes]

    def close(self) -> None:
        for pipe in self._pipes:
            try:
                pipe.send(None)
            except OSError:  # it has ended
                continue
        for process in self._processes:
            process.join(10)
            process.kill()
            process.join()
        self._folder.cleanup()


class Mpi:
    """The ranks that mpiexec starts, of the script that runs, with ``--mpi-rank``. They do ``mpi_ranks``."""

    name = "mpi"

    def __init__(self, size: int) -> None:
        mpiexec = shutil.which("mpiexec")
        if mpiexec is None:
            raise ImportError("no mpiexec on the PATH")
        __import__("mpi4py")
        self._process = subprocess.Popen(
            [mpiexec, "-n", str(size), sys.executable, str(Path(sys.argv[0])), "--mpi-rank"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def measure(self, *task: Any) -> list[Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(task) + "\n")
        self._process.stdin.flush()
        return list(json.loads(self._process.stdout.readline()))

    def close(self) -> None:
        self._process.communicate("\n", timeout=10)


def mpi_ranks(do: Callable[..., Any]) -> None:
    """Rank 0 reads tasks for ``do`` and tells the others. They must not wait by spinning, as MPI does: the other
    contestants would have a core less."""
    from mpi4py import MPI

    torch.set_num_threads(1)
    comm = MPI.COMM_WORLD
    while True:
        if comm.rank == 0:
            line = sys.stdin.readline()
            for rank in range(1, comm.size):
                comm.send(line, rank)
        else:
            while not comm.Iprobe(0):
                time.sleep(0.001)
            line = comm.recv(source=0)
        if not line.strip():
            return
        replies = comm.gather(do(*json.loads(line)))
        if comm.rank == 0:
            print(json.dumps(replies), flush=True)


def plot(path: str, title: str, curves: Mapping[str, Sequence[tuple[int, float]]]) -> None:
    """A PNG of GB/s over bytes, if matplotlib is there."""
    try:
        import matplotlib
    except ImportError:
        print(f"no plot: matplotlib is not installed (pip install 'disttensor[bench]'); {path} was not written")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 6))
    for name, points in curves.items():
        sizes, rates = zip(*points, strict=True)
        axes.plot(sizes, rates, marker="o", markersize=4, label=name)
    axes.set(xscale="log", yscale="log", xlabel="bytes", ylabel="GB/s", title=title)
    ticks = sorted({size for points in curves.values() for size, _ in points})
    axes.set_xticks(ticks, [show_size(size) for size in ticks], rotation=45)
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    print(f"wrote {path}")
