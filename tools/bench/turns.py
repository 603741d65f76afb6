"""python tools/bench/turns.py [--what item upload download step] [--sessions 5] [--rounds 100] OLD NEW [MORE ...]

One measurement on two trees or more, in turns: sessions of all trees live side by side, and take turns of some
milliseconds, in an order by chance. So a machine whose speed drifts drifts for all, and ratios are exact to about 1 %.
A tree given twice shows how exact. Prints the medians over sessions of each tree's time over that of the first: by the
clock, and of the script's thread on its core; and the least time of that thread in any turn. ``launch`` is an
asynchronous all_reduce of three nodes, launched many times in a row; ``flight`` one of 64 B and two nodes, of which 16
are in flight and then waited for, ``waited`` with a wait after each, ``reduce`` one that is not asynchronous;
``upload`` and ``download`` are of 1 KiB, ``upload64`` of 64, ``to`` is ``.to("cpu")`` of 1.

Trees are folders with a checkout each (``git worktree add``); all run in this environment.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

#: The program of one contestant: a line on its standard input is a turn.
PROGRAM = """
import sys, time, torch
import disttensor as dt

what = sys.argv[1]
backend = "shm" if what in ("shared", "flight", "waited", "reduce") else "tcp"
dt.init_master_worker(backend, nodes=3 if what == "launch" else 2, threads=1)
x = torch.ones(8, device="node:0")
s = x.sum()
if what in ("copy", "shared"):  # 64 MiB to another node
    big = torch.ones(16 << 20, device="node:0")
    calls = 1
    def call():
        y = big.to("node:1")
        dt.synchronize()
elif what == "launch":
    xs = [torch.ones(16, device=f"node:{k}") for k in range(3)]
    calls, call = 50, lambda: dt.all_reduce(xs, async_op=True)
elif what in ("flight", "waited"):
    xs, many = [torch.ones(16, device=f"node:{k}") for k in range(2)], 16 if what == "flight" else 1
    works = []
    calls = 96
    def call():
        works.append(dt.all_reduce(xs, async_op=True))
        if len(works) == many:
            for work in works:
                work.wait()
            works.clear()
elif what == "reduce":
    xs = [torch.ones(16, device=f"node:{k}") for k in range(2)]
    calls, call = 96, lambda: dt.all_reduce(xs)
elif what == "step":
    model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)]).to("node:0")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    inputs = torch.randn(32, 64).to("node:0")
    calls = 5
    def call():
        optimizer.zero_grad()
        loss = model(inputs).square().mean()
        loss.backward()
        optimizer.step()
        loss.item()
else:
    small, large = torch.ones(256), torch.ones(16 << 10)  # 1 and 64 KiB
    there = small.to("node:0")
    ways = {
        "item": (100, s.item),
        "issue": (1000, lambda: x * 2),
        "upload": (1000, lambda: small.to("node:0")),
        "upload64": (200, lambda: large.to("node:0")),
        "download": (100, there.cpu),
        "to": (100, lambda: there.to("cpu")),
    }
    calls, call = ways[what]
for _ in range(10 * calls):
    call()
dt.synchronize()
print("ready", flush=True)
for _ in sys.stdin:
    dt.synchronize()
    clock, core = time.perf_counter(), time.thread_time()
    for _ in range(calls):
        call()
    core, clock = time.thread_time() - core, time.perf_counter() - clock
    print(clock / calls, core / calls, flush=True)
dt.shutdown()
"""
WHAT = (
    *("item", "issue", "upload", "upload64", "download", "to", "step", "copy", "shared"),
    *("launch", "flight", "waited", "reduce"),
)


class Figures(NamedTuple):
    """Seconds of a call."""

    clock: float
    core: float
    least: float = 0.0  #: of ``core``, in any turn


class Contestant:
    """A session of one tree."""

    def __init__(self, tree: Path, what: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, what],
            cwd=tree,
            env={**os.environ, "PYTHONPATH": str(tree)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.turns: list[Figures] = []

    def line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"a program has ended: {self.process.args!r}")
        return line

    def turn(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        self.turns.append(Figures(*map(float, self.line().split())))

    def end(self) -> Figures:
        """Returns the median turn."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()
        least = min(turn.core for turn in self.turns)
        return Figures(*map(statistics.median, zip(*self.turns, strict=True)))._replace(least=least)


def contest(trees: list[Path], what: str, rounds: int) -> list[Figures]:
    """The figures of one session of each tree."""
    contestants = [Contestant(tree, what) for tree in trees]
    for each in contestants:
        each.line()
    for _ in range(rounds):
        for each in random.sample(contestants, len(contestants)):
            each.turn()
    return [each.end() for each in contestants]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trees", nargs="+", type=Path)
    parser.add_argument("--what", nargs="+", choices=WHAT, default=["item", "issue", "step", "copy"])
    parser.add_argument("--sessions", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=100)
    options = parser.parse_args()
    trees = [tree.resolve() for tree in options.trees]
    for what in options.what:
        rounds = options.rounds // 4 if what in ("copy", "shared", "step") else options.rounds
        sessions = [contest(trees, what, rounds) for _ in range(options.sessions)]
        for tree, figures in zip(options.trees, zip(*sessions, strict=True), strict=True):
            firsts = [session[0] for session in sessions]
            clock = [mine.clock / first.clock for mine, first in zip(figures, firsts, strict=True)]
            core = [mine.core / first.core for mine, first in zip(figures, firsts, strict=True)]
            print(
                f"{what:6} {statistics.median(f.clock for f in figures) * 1e6:9.1f} us; over the first: "
                f"{statistics.median(clock):.3f} ({min(clock):.3f} to {max(clock):.3f}), "
                f"of its thread {statistics.median(core):.3f} "
                f"(at least {min(f.least for f in figures) * 1e6:.1f} us)  {tree}",
                flush=True,
            )


if __name__ == "__main__":
    main()
