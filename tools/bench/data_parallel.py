"""python tools/bench/data_parallel.py [--what cnn transformer mlp] [--sessions 3] [--rounds 15] [--ranks 2]

The step of `dt.DataParallel`, eagerly and replayed from a graph, beside the step of torch's DistributedDataParallel
over gloo with as many ranks, in turns of several steps, in an order by chance. All have one thread a rank, and batches
that lie on the ranks before. DDP has the settings that its documentation names for speed: gradients are views of
buckets, and the graph is static. Prints the medians over sessions of DDP's milliseconds a step, and of its time over
ours (above 1: ours is faster), by the clock and of the processors: of all processes, the script included.

cnn          two convolutions and two linear layers on images of 28 x 28, 64 a rank
transformer  four encoder layers of width 256 with 4 heads, causal, 8 sequences of 64 tokens a rank
mlp          four linear layers of width 64, 32 rows a rank: a step of launches and nothing else
"""

from __future__ import annotations

import argparse
import random
import statistics
import subprocess
import sys
from typing import NamedTuple

import psutil
import torch

#: The model, and each rank's batches, alike for all contestants.
WORK = """
import sys, time
import torch, torch.nn as nn, torch.nn.functional as F

class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(256, 256)
        layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.1, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(256, 256)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(64))

    def forward(self, x):
        return self.head(self.layers(self.words(x), mask=self.mask, is_causal=True)).flatten(0, 1)

def made(what):
    torch.manual_seed(0)
    if what == "cnn":
        convolutions = [nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
        return nn.Sequential(*convolutions, nn.Linear(64 * 144, 128), nn.ReLU(), nn.Linear(128, 10))
    if what == "transformer":
        return Words()
    return nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.ReLU())])

def batch(what, k, rank):
    torch.manual_seed(1000 * k + rank)
    if what == "cnn":
        return torch.randn(64, 1, 28, 28), torch.randint(10, (64,))
    if what == "transformer":
        words = torch.randint(256, (8, 65))
        return words[:, :-1].contiguous(), words[:, 1:].flatten()
    return torch.randn(32, 64), torch.randint(64, (32,))

BATCHES = 4
what, ranks, steps = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
def stepped(model, optimizer, x, y):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return loss.detach()
"""

OURS = """
import disttensor as dt
dt.init_master_worker(nodes=ranks, threads=1)
torch.set_num_threads(1)
mesh = dt.mesh(dp=ranks)
model = dt.DataParallel(made(what).to(mesh.device), mesh)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
parts = [[batch(what, k, rank) for rank in range(ranks)] for k in range(BATCHES)]
batches = [tuple(dt.shard(torch.cat([part[i] for part in ps]), mesh, dp=0) for i in (0, 1)) for ps in parts]
def turn(count):
    for k in range(count):
        stepped(model, optimizer, *batches[k % BATCHES])
turn(2)
if sys.argv[4] == "graph":
    x, y = (t.clone() for t in batches[0])
    g = dt.Graph()
    with dt.graph(g):
        stepped(model, optimizer, x, y)
    def turn(count):
        for k in range(count):
            x.copy_(batches[k % BATCHES][0])
            y.copy_(batches[k % BATCHES][1])
            g.replay()
turn(BATCHES)
dt.synchronize()
print("ready", flush=True)
for _ in sys.stdin:
    begin = time.perf_counter()
    turn(steps)
    dt.synchronize()
    print((time.perf_counter() - begin) / steps, flush=True)
dt.shutdown()
"""

DDP = """
import os
import torch.distributed as dist, torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel

def run(rank, orders):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{orders}/store", rank=rank, world_size=ranks)
    model = DistributedDataParallel(made(what), gradient_as_bucket_view=True, static_graph=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    batches = [batch(what, k, rank) for k in range(BATCHES)]
    def turn(count):
        for k in range(count):
            stepped(model, optimizer, *batches[k % BATCHES])
    turn(2 + BATCHES)
    dist.barrier()
    if rank == 0:
        print("ready", flush=True)
        stdin = open(0)
    while True:
        more = [rank == 0 and bool(stdin.readline())]
        dist.broadcast_object_list(more)
        if not more[0]:
            break
        begin = time.perf_counter()
        turn(steps)
        dist.barrier()
        if rank == 0:
            print((time.perf_counter() - begin) / steps, flush=True)
    dist.destroy_process_group()

import tempfile
with tempfile.TemporaryDirectory() as folder:
    children = []
    for rank in reversed(range(ranks)):
        if rank and (pid := os.fork()):
            children.append(pid)
        else:
            run(rank, folder)
            if rank:
                os._exit(0)
    for pid in children:
        os.waitpid(pid, 0)
"""


class Figures(NamedTuple):
    """Seconds of a step: by the clock, and of all processes on their cores."""

    clock: float
    cores: float


class Contestant:
    """A program that takes so many steps for each line of its input."""

    def __init__(self, program: str, what: str, how: str, ranks: int, steps: int) -> None:
        command = [sys.executable, "-c", WORK + program, what, str(ranks), str(steps), how]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.steps = steps
        self.turns: list[Figures] = []
        while self.line() != "ready\n":
            pass

    def line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit("a program has ended")
        return line

    def cores(self) -> float:
        """The seconds that its processes have worked."""
        this = psutil.Process(self.process.pid)
        times = [process.cpu_times() for process in (this, *this.children(recursive=True))]
        return float(sum(time.user + time.system for time in times))

    def turn(self) -> None:
        assert self.process.stdin is not None
        before = self.cores()
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        clock = float(self.line())
        self.turns.append(Figures(clock, (self.cores() - before) / self.steps))

    def end(self) -> Figures:
        """Returns the median turn."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()
        return Figures(*map(statistics.median, zip(*self.turns, strict=True)))


#: Steps of a turn: about half a second, so that a clock of 10 ms for the processor is exact enough.
STEPS = {"cnn": 8, "transformer": 5, "mlp": 200}


def contest(what: str, ranks: int, rounds: int) -> dict[str, Figures]:
    """The figures of one session of each."""
    programs = {"DDP": (DDP, ""), "eager": (OURS, "eager"), "graph": (OURS, "graph")}
    contestants = {
        name: Contestant(program, what, how, ranks, STEPS[what]) for name, (program, how) in programs.items()
    }
    for _ in range(rounds):
        for each in random.sample(list(contestants.values()), len(contestants)):
            each.turn()
    return {name: each.end() for name, each in contestants.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--what", nargs="+", choices=list(STEPS), default=list(STEPS))
    parser.add_argument("--sessions", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--ranks", type=int, default=2)
    options = parser.parse_args()
    print(f"torch {torch.__version__}, {options.ranks} ranks")
    for what in options.what:
        found = [contest(what, options.ranks, options.rounds) for _ in range(options.sessions)]
        base = statistics.median(one["DDP"].clock for one in found)
        print(f"{what:12} DDP {base * 1e3:.1f} ms a step", end="")
        for how in ("eager", "graph"):
            clock = [one["DDP"].clock / one[how].clock for one in found]
            cores = [one["DDP"].cores / one[how].cores for one in found]
            print(
                f"; {how} {statistics.median(clock):.2f}x by the clock ({min(clock):.2f} to {max(clock):.2f}), ", end=""
            )
            print(f"{statistics.median(cores):.2f}x of the processors", end="")
        print(flush=True)


if __name__ == "__main__":
    main()
