"""python tools/bench/compiled.py [--layers 6] [--steps 20] [--repeats 9]

Forward and backward of a transformer and of an MLP, by the CPU time of the script's thread: locally in eager, on a node
in eager and on a node by torch.compile, in turns in one run, one compute thread on either side. The least of all
repeats. Local eager's time has its arithmetic, a node's has not.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
import torch.nn as nn
import torch.nn.functional as F

import disttensor as dt

Step = Callable[[], None]


def transformer(layers: int) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
    model = nn.Sequential(nn.Embedding(100, 64), encoder, nn.Flatten(), nn.Linear(64 * 16, 10))
    return model, torch.randint(0, 100, (4, 16)), torch.randint(0, 10, (4,))


def mlp(layers: int) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    parts = [part for _ in range(layers) for part in (nn.Linear(64, 64), nn.ReLU())]
    return nn.Sequential(*parts, nn.Linear(64, 10)), torch.randn(32, 64), torch.randint(0, 10, (32,))


def stepper(made: tuple[nn.Module, torch.Tensor, torch.Tensor], device: str, compiled: bool) -> Step:
    model, x, y = made[0].to(device), made[1].to(device), made[2].to(device)
    loss_of: Callable[[], torch.Tensor] = lambda: F.cross_entropy(model(x), y)  # noqa: E731
    if compiled:
        loss_of = torch.compile(loss_of)

    def step() -> None:
        loss_of().backward()
        for p in model.parameters():
            p.grad = None

    return step


def turn(step: Step, steps: int) -> float:
    """Returns the seconds of this thread's CPU that a step takes."""
    begun = time.thread_time()
    for _ in range(steps):
        step()
    spent = time.thread_time() - begun
    dt.synchronize()
    return spent / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with dt.init_master_worker(nodes=1, threads=1):
        for make in (transformer, mlp):
            steps = [
                stepper(make(options.layers), device, compiled)
                for device, compiled in (("cpu", False), ("node:0", False), ("node:0", True))
            ]
            for step in steps:
                turn(step, 4)
            local, eager, compiled = map(
                min, zip(*[[turn(step, options.steps) for step in steps] for _ in range(options.repeats)], strict=True)
            )
            print(
                f"{make.__name__}, {options.layers} layers: local eager {local * 1e3:.2f} ms, node eager "
                f"{eager * 1e3:.2f} ({eager / local:.2f}x), compiled {compiled * 1e3:.2f} ({compiled / local:.2f}x)",
                flush=True,
            )


if __name__ == "__main__":
    main()
