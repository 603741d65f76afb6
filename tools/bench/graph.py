"""python tools/bench/graph.py [--engine interpreter] [--steps 200] [--repeats 5] [--sessions 3]

Training steps replayed from a graph on one node against the same steps done locally in eager, in turns in one run, one
compute thread on either side: a launch-bound step (a 4-layer MLP of width 64, batch 32) and one of a 12-layer
transformer; and the commands that a replayed step sends.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from step import timed

import disttensor as dt
from disttensor.session import current

Step = Callable[[], torch.Tensor]


def mlp(device: str, optimizer: str) -> Step:
    torch.manual_seed(0)
    layers = [part for _ in range(3) for part in (nn.Linear(64, 64), nn.ReLU())]
    return trainer(nn.Sequential(*layers, nn.Linear(64, 10)), torch.randn(32, 64), device, optimizer)


def transformer(device: str, optimizer: str) -> Step:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.1, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 12, enable_nested_tensor=False)
    model = nn.Sequential(encoder, nn.Flatten(0, 1), nn.Linear(64, 10))
    return trainer(model, torch.randn(8, 16, 64), device, optimizer)


def trainer(model: nn.Module, x: torch.Tensor, device: str, optimizer: str) -> Step:
    """A training step on a device; returns its loss, not fetched."""
    model = model.to(device)
    step_of: Any = torch.optim.SGD if optimizer == "SGD" else torch.optim.AdamW
    optimize = step_of(model.parameters(), lr=1e-3)
    y = torch.randint(0, 10, (x.numel() // x.shape[-1],)).to(device)
    x = x.to(device)

    def step() -> torch.Tensor:
        optimize.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimize.step()
        return loss.detach()

    return step


def ready(g: dt.Graph, replay: Step) -> None:
    """Replays until the nodes have compiled, or have said why they don't."""
    while not all(used != "interpreter" or why for programs in g.engines().values() for used, why in programs):
        timed(replay, 20)
    timed(replay, 20)


def compare(make: Callable[[str, str], Step], optimizer: str, engine: str, steps: int, repeats: int) -> Any:
    """(local seconds, replayed seconds, local over replayed, commands per replayed step) of one session."""
    with dt.init_master_worker(nodes=1, threads=1):
        box = current.session().nodes[0].outbox
        local, remote = make("cpu", optimizer), make("node:0", optimizer)
        timed(local, 3), timed(remote, 3)
        g = dt.Graph()
        with dt.graph(g, engine=engine):
            loss = remote()

        def replay() -> torch.Tensor:
            g.replay()
            return loss

        timed(replay, 20)
        if engine != "interpreter":  # beside replays, the programs are compiled: not what is measured
            ready(g, replay)
        dt.synchronize()
        sent = box.sent
        for _ in range(100):
            g.replay()
        commands = (box.sent - sent) / 100
        times = [(timed(local, steps), timed(replay, steps)) for _ in range(repeats)]
        here, there = (statistics.median(column) for column in zip(*times, strict=True))
        return here, there, statistics.median(a / b for a, b in times), commands


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", default="interpreter")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--sessions", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name, make, optimizer, share in (
        ("MLP, SGD", mlp, "SGD", 1),
        ("MLP, AdamW", mlp, "AdamW", 1),
        ("12-layer transformer, AdamW", transformer, "AdamW", 10),
    ):
        sessions = [
            compare(make, optimizer, options.engine, options.steps // share, options.repeats)
            for _ in range(options.sessions)
        ]
        here, there, ratio, commands = (statistics.median(column) for column in zip(*sessions, strict=True))
        ratios = sorted(s[2] for s in sessions)
        print(
            f"{name}: local eager {here * 1e3:.2f} ms, replayed {there * 1e3:.2f} ms a step; {ratio:.2f}x local "
            f"throughput ({ratios[0]:.2f} to {ratios[-1]:.2f}), {commands:.2f} commands a step",
            flush=True,
        )


if __name__ == "__main__":
    main()
