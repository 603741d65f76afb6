"""python tools/ci/soak.py [--seconds 600] [--seed N] [--nodes 2]

All kinds of work, failing work among it, round after round in one session, while memory, descriptors, threads, shared
memory of the script and of its nodes are looked at every second, between two rounds. After the warm-up, a third of the
time, memory may grow by less than 1 MB per million commands (least squares) in each process, and of the others nothing
may grow; no node may be lost. Under LONG seconds a slope says little: what allocators keep, a megabyte or two, is much
for a hundred thousand commands. It has to be below SHORT there, which finds what every command leaves behind.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import gc
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

import disttensor as dt
from disttensor.session import current

#: Seconds from which on slopes are held against the figure, in MB per million commands; the bound for shorter runs.
LONG, FIGURE, SHORT = 300.0, 1.0, 30.0
#: Seconds without a round after which it hangs: all threads are printed.
HANG = 60.0


class Failed(Exception):
    """What must be constant is not."""


def raises(x: torch.Tensor) -> None:
    y = x * 2
    raise ZeroDivisionError(f"soak {tuple(y.shape)}")


def centered(x: torch.Tensor) -> tuple[torch.Tensor, int]:
    return x - x.mean(), x.shape[0]


class Work:
    """Rounds of work on some nodes."""

    def __init__(self, nodes: int) -> None:
        self.nodes = nodes
        self.model = torch.nn.Linear(16, 16).to("node:0")
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.x = [torch.rand(16, 16).to(f"node:{k}") for k in range(nodes)]
        self.graphs = []
        for k in range(nodes):
            (self.x[k] * 0.5 + 0.25).tanh().sum().item()
            graph = dt.Graph()
            with dt.graph(graph):
                out = (self.x[k] * 0.5 + 0.25).tanh()
            self.graphs.append((graph, out))

    def round(self) -> None:
        for k in range(self.nodes):
            self.operations(k)
            self.failures(k)
            graph, out = self.graphs[k]
            for _ in range(50):
                graph.replay()
            out.sum().item()
            dt.run(centered, self.x[k], node=k)
            there = (k + 1) % self.nodes
            for x in (self.x[k], torch.ones(1 << 16, device=f"node:{k}")):
                x.to(f"node:{there}").add_(1.0).cpu()
                dt.fetch(x).result()
        dt.all_reduce([x.clone() for x in self.x], "AVG")
        dt.broadcast([torch.ones(1 << 15, device=f"node:{k}") for k in range(self.nodes)], src=0)
        for _ in range(5):
            self.optimizer.zero_grad()
            self.model(self.x[0]).square().mean().backward()
            self.optimizer.step()
        dt.synchronize()

    def operations(self, k: int) -> None:
        x, total = self.x[k], torch.zeros(16, 16, device=f"node:{k}")
        for i in range(1000):
            total.add_(x * 0.999).mul_(0.5)
            if i % 20 == 0:
                cycle: list[Any] = [x + float(i)]
                cycle.append(cycle)
        total.sum().item()

    def failures(self, k: int) -> None:
        for _ in range(3):
            local = self.x[k] * 2  # the exception's frames hold it
            far = torch.full((3,), 10**6, device=f"node:{k}")
            for fails in (lambda x=local, far=far: x.flatten()[far].sum().item(), lambda x=local: x @ torch.ones(3)):
                try:
                    fails()  # type: ignore[no-untyped-call]
                except (IndexError, RuntimeError) as error:
                    if isinstance(error, dt.DisttensorError):
                        raise
                else:
                    raise Failed("a mistake was not raised")
            with contextlib.suppress(ZeroDivisionError):
                dt.run(raises, local, node=k)


def rested(pids: dict[str, int], least: dict[str, int]) -> None:
    """Waits until the processes have no more threads than when they had ``least``, as some end a moment after the work
    for which they are there; or for a second: what leaks stays."""
    until = time.monotonic() + 1
    while time.monotonic() < until and any(threads_of(pid) > least.get(name, 0) for name, pid in pids.items()):
        time.sleep(0.02)
    for name, pid in pids.items():
        least[name] = min(threads_of(pid), least.get(name, 1 << 30))


def threads_of(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/task"))


def sample(pids: dict[str, int]) -> dict[str, dict[str, int]]:
    """What each process holds; memory in KB."""
    found = {}
    for name, pid in pids.items():
        status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        maps = Path(f"/proc/{pid}/maps").read_text()
        found[name] = {
            "rss": int(status["VmRSS"].split()[0]),
            "threads": threads_of(pid),
            "descriptors": len(os.listdir(f"/proc/{pid}/fd")),
            "shared memory": maps.count("/memfd:disttensor") + maps.count("/dev/shm/"),
        }
    return found


def slope(points: list[tuple[float, float]]) -> float:
    """Least squares."""
    n = len(points)
    mx, my = sum(x for x, _ in points) / n, sum(y for _, y in points) / n
    return sum((x - mx) * (y - my) for x, y in points) / max(sum((x - mx) ** 2 for x, _ in points), 1e-12)


def judge(seconds: float, samples: list[tuple[int, dict[str, dict[str, int]]]]) -> list[str]:
    """Prints the figures; returns what is wrong."""
    wrong, bound = [], FIGURE if seconds >= LONG else SHORT
    for name in samples[0][1]:
        growth = slope([(commands / 1e6, found[name]["rss"] / 1024) for commands, found in samples])
        first, last = samples[0][1][name], samples[-1][1][name]
        print(
            f"{name}: {first['rss'] / 1024:.1f} -> {last['rss'] / 1024:.1f} MB, {growth:+.2f} MB per million commands"
        )
        if growth >= bound:
            wrong.append(f"{name} grows by {growth:.2f} MB per million commands, not less than {bound:g}")
        half = len(samples) // 2
        for what in ("threads", "descriptors", "shared memory"):
            counts = [found[name][what] for _, found in samples]
            print(f"    {what}: {min(counts)} to {max(counts)}, {counts[-1]} at the end")
            if max(counts[half:]) > max(counts[:half]):
                wrong.append(f"{name}: {what} grow from {max(counts[:half])} to {max(counts[half:])}")
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=0, help="of the numbers")
    parser.add_argument("--nodes", type=int, default=2)
    options = parser.parse_args()
    print(f"soak: seed {options.seed}, {options.seconds:g} s", flush=True)
    torch.set_num_threads(1)
    with dt.init_master_worker(nodes=options.nodes, threads=1) as session:
        torch.manual_seed(options.seed)
        work = Work(options.nodes)
        nodes = current.session().nodes
        pids = {"script": os.getpid()} | {f"node {node.rank}": node.hello.pid for node in nodes}
        samples: list[tuple[int, dict[str, dict[str, int]]]] = []
        least: dict[str, int] = {}
        began = looked = time.monotonic()
        rounds = 0
        while (now := time.monotonic()) < began + options.seconds or len(samples) < 4:
            faulthandler.dump_traceback_later(HANG, exit=True)
            work.round()
            rounds += 1
            if now - looked >= 1 and now > began + options.seconds / 3:
                looked = now
                gc.collect()
                rested(pids, least)
                samples.append((sum(node.outbox.sent for node in nodes), sample(pids)))
        faulthandler.cancel_dump_traceback_later()
        commands = sum(node.outbox.sent for node in nodes)
    del session
    wrong = judge(options.seconds, samples)
    print(f"{rounds} rounds, {commands} commands, {len(samples)} samples, no node lost")
    if wrong:
        sys.exit("soak: FAILED: " + "; ".join(wrong))


if __name__ == "__main__":
    main()
