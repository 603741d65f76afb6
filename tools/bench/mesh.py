"""python tools/bench/mesh.py [--nodes 4 16 64] [--rounds 20]

What a mesh of N nodes costs the script, over a single node: in turns, in one session each. By the CPU's clock, of the
issuing thread and of the whole process.

issue        an operation, queued and not sent
operation    an operation with its share of messages, of the whole process
item         a question to all nodes, over N questions to single ones that are issued together
alternating  an operation on the mesh, one on a node, one on the mesh, ..., over three on the mesh
dropout      the same with dropout on the mesh and on a slice of it, whose generators are swapped, over the mesh's only
step         a training step of MLP 4x64, batch 32, without collectives; the collectives of its gradients beside it
replay       that step with its collectives from a graph, over the same of one node without them
wire         commands and bytes of that step to each node
fan-out      the time from the first node that has a command to the last, over that of a bare ZeroMQ socket with as many
             pipes, encrypted, to processes that run the same operator; beside it over that of the system's pipes, to
             processes that do nothing
busy         the part of the time that nodes work, by their clocks, in steps of 20 commands of which one sleeps for 5
             ms: eagerly, replayed; and the part that they sleep
start        the seconds until all nodes are there, over those of `import torch` in one process
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
import zmq

import disttensor as dt
from disttensor import testing
from disttensor.session import current

parser = argparse.ArgumentParser()
parser.add_argument("--nodes", type=int, nargs="+", default=[4, 16])
parser.add_argument("--rounds", type=int, default=20)
options = parser.parse_args()


def turns(*calls: Callable[[], object], clock: Callable[[], float], settle: bool = True) -> list[float]:
    """The median time of each, taken in turns."""
    times: list[list[float]] = [[] for _ in calls]
    for call in calls:
        call()
    for _ in range(options.rounds):
        for call, found in zip(calls, times, strict=True):
            if settle:
                dt.synchronize()
            begin = clock()
            call()
            found.append(clock() - begin)
    return [statistics.median(found) for found in times]


def many(x: torch.Tensor, count: int) -> Callable[[], None]:
    def call() -> None:
        y = x
        for _ in range(count):
            y = y * 0.999

    return call


def training(device: torch.device) -> tuple[Callable[[], None], Callable[[], None]]:
    """A step, and the mean of its gradients."""
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.ReLU()))).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.randn(32, 64).to(device)

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    def reduce() -> None:
        for p in model.parameters():
            grad: Any = p.grad
            dt.collectives.all_reduce_(grad, "avg", over="dp")

    return step, reduce


#: Operators that tell when a node has a command, and that keep it busy without the processor.
OPERATORS = """
import time, torch
def now(x):
    x.fill_(time.monotonic())
def nap(x):
    time.sleep(0.005)
library = torch.library.Library("bench", "DEF")
for function in (now, nap):
    library.define(f"{function.__name__}(Tensor(a!) x) -> ()")
    library.impl(function.__name__, function, "CPU")
    library.impl(function.__name__, lambda x: None, "Meta")
torch.bench_library = library
"""


def spread(times: list[float]) -> float:
    return max(times) - min(times)


class Router:
    """Forked processes with torch, a CURVE socket each, which run the operator for each message, and tell when."""

    CODE = """
import os, struct, sys
import torch, zmq
exec(sys.argv[1], {})
torch.set_num_threads(1)
x, now = torch.zeros((), dtype=torch.float64), torch.ops.bench.now
for _ in range(int(sys.argv[4]) - 1):
    if not os.fork():
        break
socket = zmq.Context().socket(zmq.DEALER)
socket.curve_serverkey = sys.argv[3].encode()
socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
socket.connect(sys.argv[2])
socket.send(b"")
poller = zmq.Poller()
poller.register(socket, zmq.POLLIN)
while True:
    poller.poll()
    if not socket.recv():
        os._exit(0)
    now(x)
    socket.send(struct.pack("d", x.item()))
"""

    def __init__(self, count: int) -> None:
        key, secret = zmq.curve_keypair()
        self._socket: Any = zmq.Context.instance().socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
        self._socket.setsockopt(zmq.CURVE_SERVER, 1)
        at = f"tcp://127.0.0.1:{self._socket.bind_to_random_port('tcp://127.0.0.1')}"
        arguments = [OPERATORS, at, key.decode(), str(count)]
        self._process = subprocess.Popen([sys.executable, "-c", self.CODE, *arguments])
        self._peers: list[bytes] = [self._socket.recv_multipart()[0] for _ in range(count)]

    def time(self) -> float:
        """The time from the first to the last one when all are sent to."""
        for peer in self._peers:
            self._socket.send_multipart([peer, b"x" * 64])
        return spread([struct.unpack("d", self._socket.recv_multipart()[1])[0] for _ in self._peers])

    def end(self) -> None:
        for peer in self._peers:
            self._socket.send_multipart([peer, b""])
        self._process.wait()
        self._socket.close()


class Pipes:
    """Processes that read from a pipe of the system's each, and tell when."""

    CODE = "import os, struct, time\nwhile os.read(0, 64): os.write(1, struct.pack('d', time.monotonic()))"

    def __init__(self, count: int) -> None:
        command = [sys.executable, "-S", "-c", self.CODE]
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._children: list[Any] = [subprocess.Popen(command, **pipes) for _ in range(count)]

    def time(self) -> float:
        """The time from the first to the last one when all are written to."""
        for child in self._children:
            os.write(child.stdin.fileno(), b"x" * 64)
        return spread([struct.unpack("d", os.read(child.stdout.fileno(), 8))[0] for child in self._children])

    def end(self) -> None:
        for child in self._children:
            child.stdin.close()
            child.wait()


def fan_out(mesh: dt.meshes.Mesh) -> None:
    """Prints fan-out and busy."""
    nodes, bench = len(mesh), torch.ops.bench
    at = torch.zeros((), dtype=torch.float64, device=mesh.device)

    def times() -> list[float]:
        return [float(work.result()) for work in [dt.fetch(shard) for shard in at.shards()]]  # type: ignore[attr-defined]

    def ours() -> float:
        dt.synchronize()
        bench.now(at)
        dt.synchronize()
        return spread(times())

    for what, bare in (("ZeroMQ's", Router(nodes)), ("the system's", Pipes(nodes))):
        bare.time()
        pairs = [(ours(), bare.time()) for _ in range(options.rounds)]
        bare.end()
        one, other = (statistics.median(values) for values in zip(*pairs, strict=True))
        print(
            f"{nodes} nodes: fan-out      {one * 1e6:.0f} us from the first to the last, {other * 1e6:.0f} by {what} "
            f"pipes: {statistics.median(a / b for a, b in pairs):.2f}x"
        )
    x = torch.ones(16, 16, device=mesh.device)

    def step() -> None:
        bench.nap(x)
        for _ in range(19):
            x.mul_(0.999)

    steps = 20
    members = current.session().nodes

    def share(call: Callable[[], None]) -> tuple[float, float]:
        call()
        dt.synchronize()
        before = [node.connection.busy for node in members]
        bench.now(at)
        for _ in range(steps):
            call()
        begun = at.clone()
        bench.now(at)
        dt.synchronize()
        worked = [node.connection.busy - was for node, was in zip(members, before, strict=True)]
        starts = [float(work.result()) for work in [dt.fetch(shard) for shard in begun.shards()]]  # type: ignore[attr-defined]
        passed = [end - begin for begin, end in zip(starts, times(), strict=True)]
        median = statistics.median(passed)
        return statistics.median(w / p for w, p in zip(worked, passed, strict=True)), steps * 0.005 / median

    (busy, nap) = share(step)
    with dt.graph(g := dt.Graph()):
        step()
    (again, slept) = share(g.replay)
    print(f"{nodes} nodes: busy         {busy:.0%} eagerly, {again:.0%} replayed; asleep {nap:.0%}, {slept:.0%}")


def measure(nodes: int) -> None:
    begin = time.perf_counter()
    with dt.init_master_worker(nodes=nodes, threads=1, allow_ops=["bench::*"]):
        started = time.perf_counter() - begin
        alone = statistics.median(importing() for _ in range(3))
        print(f"{nodes} nodes: start        {started:.1f} s, {started / alone:.1f}x of import torch ({alone:.1f} s)")
        mesh = dt.mesh(dp=nodes)
        there, single = torch.ones(16, 16, device=mesh.device), torch.ones(16, 16, device="node:0")
        thread, process = time.thread_time, time.process_time

        with testing.limits(message=100_000):  # nothing leaves meanwhile
            one, all_ = turns(many(single, 60), many(there, 60), clock=thread)
        print(
            f"{nodes} nodes: issue        {one / 60 * 1e6:.2f} us, of the mesh {all_ / 60 * 1e6:.2f}: {all_ / one:.2f}x"
        )

        def flushed(x: torch.Tensor) -> Callable[[], None]:
            call = many(x, 2000)

            def run() -> None:
                call()
                dt.synchronize()

            return run

        one, all_ = turns(flushed(single), flushed(there), clock=process)
        one, all_ = one / 2e3 * 1e6, all_ / 2e3 * 1e6
        print(f"{nodes} nodes: operation    {one:.2f} us, of the mesh {all_:.2f}: {all_ / one:.2f}x")

        s, parts = there.sum(), [torch.ones((), device=f"node:{k}") for k in range(nodes)]

        def together() -> None:
            for work in [dt.fetch(part) for part in parts]:
                work.result()

        asked, fetched, node = turns(lambda: s.item(), together, lambda: parts[0].item(), clock=time.perf_counter)
        print(
            f"{nodes} nodes: item         {asked * 1e6:.0f} us, of {nodes} fetches together {asked / fetched:.2f}x, "
            f"of one node's {asked / node:.1f}x"
        )

        def alternating() -> None:
            x, y = there, single
            for _ in range(20):
                x = x * 0.999
                y = y * 0.999
                x = x * 0.999

        def plain() -> None:
            x = there
            for _ in range(60):
                x = x * 0.999

        mixed, pure = turns(alternating, plain, clock=process)
        each, ratio = mixed / 60 * 1e6, mixed / pure
        print(f"{nodes} nodes: alternating  {each:.1f} us an operation, {ratio:.2f}x of the mesh's only")

        part = torch.ones(16, 16, device=dt.mesh(part=nodes // 2, nodes=range(nodes // 2)).device)

        def taking_turns() -> None:
            for _ in range(20):
                nn.functional.dropout(there)
                nn.functional.dropout(part)

        def one_place() -> None:
            for _ in range(40):
                nn.functional.dropout(there)

        mixed, pure = turns(taking_turns, one_place, clock=process)
        each, ratio = mixed / 40 * 1e6, mixed / pure
        print(f"{nodes} nodes: dropout      {each:.1f} us an operation, {ratio:.2f}x of the mesh's only")

        (step, _), (on_mesh, reduce) = training(torch.device("node:0")), training(mesh.device)
        one, all_ = turns(step, on_mesh, clock=process)
        (reduced,) = turns(reduce, clock=process)
        print(
            f"{nodes} nodes: step         {one * 1e3:.2f} ms, of the mesh {all_ * 1e3:.2f}: {all_ / one:.2f}x; "
            f"its 8 collectives {reduced * 1e3:.2f} ms"
        )

        def whole() -> None:
            on_mesh()
            reduce()

        whole()
        with dt.graph(g := dt.Graph()):
            whole()
        with dt.graph(h := dt.Graph()):
            step()
        one, all_ = turns(h.replay, g.replay, clock=process)
        print(f"{nodes} nodes: replay       {one * 1e6:.0f} us, of the mesh {all_ * 1e6:.0f}: {all_ / one:.2f}x")
        gc.collect()
        with testing.MessageLog() as log:
            on_mesh()
            dt.synchronize()
        print(f"{nodes} nodes: wire         {len(log[0].commands)} commands, {log[0].bytes_sent} bytes to each node")
        dt.run(exec, OPERATORS, {}, node=list(mesh.nodes))
        fan_out(mesh)


def importing() -> float:
    begin = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    return time.perf_counter() - begin


exec(OPERATORS, {})
for count in options.nodes:
    measure(count)
