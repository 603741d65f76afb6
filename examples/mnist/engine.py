"""python examples/mnist/engine.py [--nodes 4]

A training engine with hooks, such as torchnet's, TorchMPI's AllReduceSGDEngine and ignite's: here it is an ordinary
loop and a list of functions for each event, and distribution is one of the hooks. All begin with the first node's
parameters, gradients are averaged after the backward pass, batches are prefetched, a profiler on node 0 watches the
steps 3 to 8, and after each epoch a second hook compares the replicas. The losses are those of sequential.py.
"""

import argparse
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import digits
import torch

import disttensor as dt


class Engine:
    """Trains a module; functions that are given to `on` are called with it at each event."""

    def __init__(self, net: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.net, self.optimizer, self.step, self.epoch = net, optimizer, 0, 0
        self.hooks: dict[str, list[Callable[[Engine], None]]] = defaultdict(list)

    def on(self, event: str) -> Callable[..., Any]:
        return lambda hook: self.hooks[event].append(hook) or hook

    def fire(self, event: str) -> None:
        for hook in self.hooks[event]:
            hook(self)

    def run(self, loader: Iterable[list[torch.Tensor]], epochs: int) -> None:
        self.fire("start")
        for self.epoch in range(epochs):
            self.fire("start_epoch")
            for self.x, self.y, _ in loader:
                self.step += 1
                self.fire("sample")
                self.optimizer.zero_grad()
                self.loss = digits.loss_of(self.net(self.x), self.y)
                self.fire("forward")
                self.loss.backward()
                self.fire("backward")
                self.optimizer.step()
                self.fire("update")
            self.fire("end_epoch")


def begin_profile() -> None:
    """Runs on the node: the profiler sees what the script has it do from here on."""
    torch.profiler.of_engine = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])  # type: ignore
    torch.profiler.of_engine.start()  # type: ignore


def end_profile() -> dict[str, int]:
    """Runs on the node: how often each operator has run."""
    torch.profiler.of_engine.stop()  # type: ignore
    return {event.key: event.count for event in torch.profiler.of_engine.key_averages()}  # type: ignore


parser = argparse.ArgumentParser()
parser.add_argument("--nodes", type=int, default=4)
options = parser.parse_args()

with dt.init_master_worker(nodes=options.nodes, threads=1):
    mesh = dt.mesh(dp=options.nodes)
    net = digits.model().to(mesh.device)
    for rank in range(1, options.nodes):
        net.weight.data.at(dp=rank).add_(rank)  # all others begin somewhere else
    engine = Engine(net, torch.optim.SGD(net.parameters(), lr=digits.RATE))
    total = torch.zeros((), device=mesh.device)
    counts: dict[str, int] = {}
    compared: list[int] = []

    @engine.on("start")
    def same_parameters(engine: Engine) -> None:
        for p in engine.net.parameters():
            p.data.copy_(dt.broadcast(p.data, over="dp"))

    @engine.on("sample")
    def profile(engine: Engine) -> None:
        if engine.step == 3:
            dt.run(begin_profile, node=0)
        elif engine.step == 9:
            counts.update(dt.run(end_profile, node=0))

    @engine.on("backward")
    def average(engine: Engine) -> None:
        dt.training.reduce_gradients(engine.net)

    @engine.on("forward")
    def add_loss(engine: Engine) -> None:
        total.add_(engine.loss.detach())

    @engine.on("end_epoch")
    def show(engine: Engine) -> None:
        digits.show(engine.epoch, dt.all_reduce(total, "avg", over="dp").item() / 5)
        total.zero_()

    @engine.on("end_epoch")
    def compare(engine: Engine) -> None:
        dt.training.assert_replicas_equal(engine.net)
        compared.append(engine.epoch)

    engine.run(dt.data.distribute(digits.training, mesh, batch_size=digits.BATCH, shuffle=True), digits.EPOCHS)
    print(f"accuracy {digits.accuracy(net):.4f}")
    print(f"steps 3 to 8 on node 0: {counts['aten::addmm']} forward passes, {counts['aten::mm']} of a gradient")
    print(f"the replicas were equal after {len(compared)} epochs")
