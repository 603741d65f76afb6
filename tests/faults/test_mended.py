"""A script that was told of a loss, and goes on with the nodes that are left, is told no more of it, and ends well."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Sequence

import pytest
import torch
from aftermath import probe
from variants import variants

import disttensor as dt
from disttensor.collectives import functional

Script = Callable[..., subprocess.CompletedProcess[str]]
Tensors = Sequence[torch.Tensor]


def one_each() -> list[torch.Tensor]:
    return [torch.ones(4, device=f"node:{node}") for node in range(3)]


def there() -> torch.Tensor:
    return torch.ones(4, device="node:1")


def on_a_stream() -> Tensors:
    with dt.stream(dt.Stream("node:0")):
        return [there().to("node:0") + 1]


def in_a_graph() -> Tensors:
    graph, x = dt.Graph(), there()
    with dt.graph(graph):
        y = x.to("node:2") + 1
    graph.replay()
    return [y]


def in_place() -> Tensors:
    tensors = one_each()
    dt.all_reduce(tensors, async_op=True)
    return tensors


def sent() -> Tensors:
    dt.collectives.send(there(), target := torch.zeros(4, device="node:0"))
    return [target]


#: What nodes 0 and 2 can't do without node 1. Each gives the tensors that it makes there.
WORK: dict[str, Callable[[dt.meshes.Mesh], Tensors]] = {
    "all_reduce": lambda mesh: functional.all_reduce(one_each()),
    "all_reduce of a mesh": lambda mesh: dt.all_reduce(torch.ones(4, device=mesh.device), over="dp").shards(),
    "all_reduce in place": lambda mesh: in_place(),
    "reduce": lambda mesh: [functional.reduce(one_each(), 0)],
    "broadcast": lambda mesh: functional.broadcast(there(), dt.collectives.new_group([0, 1, 2])),
    "all_gather": lambda mesh: [part for row in functional.all_gather(one_each()) for part in row],
    "gather": lambda mesh: functional.gather(one_each(), 2),
    "permuted": lambda mesh: dt.collectives.permute_ranks(torch.ones(4, device=mesh.device), over="dp", by=1).shards(),
    "a copy": lambda mesh: [there().to("node:0")],
    "what is made of a copy": lambda mesh: [there().to("node:2") * 2],
    "a copy on a stream": lambda mesh: on_a_stream(),
    "a copy in a graph": lambda mesh: in_a_graph(),
    "a tensor that is sent": lambda mesh: sent(),
}


@pytest.mark.parametrize("backend", variants(["auto", "tcp", "gloo"]))
def test_what_a_loss_has_broken_is_no_news_to_who_was_told_of_it(backend: str) -> None:
    """A value that nobody has read raises it when it is read, as ever."""
    with dt.init_master_worker(backend, nodes=3, threads=1):
        mesh = dt.mesh(dp=3)
        for make in WORK.values():  # connections, groups and kernels are there
            make(mesh)
        dt.synchronize()
        asked, pid = there(), int(dt.nodes()[1]["pid"])
        os.kill(pid, signal.SIGSTOP)
        made = {name: [x for x in make(mesh) if x.device != asked.device] for name, make in WORK.items()}
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(dt.NodeLost):
            asked.sum().item()
        for _ in range(2):
            dt.synchronize()
            for node in (0, 2):
                dt.synchronize(node)
                probe(node)
        for name, tensors in made.items():
            assert tensors, name
            for x in tensors:
                with pytest.raises(dt.NodeLost, match="node 1 ") as told:
                    x.cpu()
                assert any("failed: " in note for note in told.value.__notes__), name
        with pytest.raises(dt.NodeLost):  # of the node itself it is said to whoever asks
            dt.synchronize(1)


#: A script that loses a node in each way of training, and goes on with the others.
MENDS = """
import os, signal, torch, torch.nn as nn, torch.nn.functional as F, disttensor as dt
from torch import distributed as dist

def net():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
def replicated(ranks):
    mesh = dt.mesh(dp=len(ranks), nodes=ranks)
    module = dt.DataParallel(net().to(mesh.device), mesh, bucket_mb=0.0001)
    return module, lambda: module(torch.randn(4 * len(ranks), 8)).square().mean()
def sharded(ranks):
    mesh = dt.mesh(dp=len(ranks), nodes=ranks)
    module = net().to(mesh.device)
    dt.fully_shard(module, mesh)
    return module, lambda: module(dt.shard(torch.randn(4 * len(ranks), 8), mesh, dp=0)).square().mean()
def train(make, ranks, steps, victim=None):
    module, loss = make(ranks)
    optimizer = torch.optim.AdamW(module.parameters())
    for i in range(steps):
        if i == 3 and victim is not None:
            os.kill(dt.nodes()[victim]["pid"], signal.SIGKILL)
        optimizer.zero_grad()
        value = loss()
        value.backward()
        optimizer.step()
    return float(value.at(dp=0).item())
def piped(ranks, victim):
    stages = [nn.Linear(8, 8) for _ in ranks]
    pipeline = dt.training.Pipeline(stages, [f"node:{rank}" for rank in ranks], microbatches=4)
    for i in range(1000):
        if i == 3:
            os.kill(dt.nodes()[victim]["pid"], signal.SIGKILL)
        pipeline.step(torch.randn(12, 8), torch.zeros(12, 8), F.mse_loss)
def meets():
    dist.barrier()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()

dt.init_master_worker(nodes=4, threads=1)
def training():
    for make, ranks, victim in ((replicated, [0, 1, 2, 3], 3), (sharded, [0, 1, 2], 2)):
        try:
            train(make, ranks, 1000, victim)
        except dt.NodeLost as error:
            assert error.rank == victim
        dt.synchronize()
        assert train(make, ranks[:-1], 3) > 0
def others():
    try:
        piped([0, 1, 2, 3], 3)
    except dt.NodeLost as error:
        assert error.rank == 3
    dt.synchronize()
    work = dt.submit(meets, node=[0, 1, 2], distributed=True)  # nobody asks for what it returns
    try:
        while True:
            torch.ones(2, device="node:1").sum().item()
    except dt.NodeLost as error:
        assert error.rank == 1
    dt.synchronize()
    assert train(replicated, [0, 2], 3) > 0
"""


@pytest.mark.parametrize("ways", variants(["training", "others"]))
def test_a_script_that_goes_on_without_the_nodes_that_it_lost_ends_well(script: Script, ways: str) -> None:
    done = script(f"{MENDS}{ways}()\nprint('mended')")
    assert (done.returncode, done.stdout) == (0, "mended\n"), done.stderr
    assert "Traceback" not in done.stderr


#: What meets the loss of node 1 inside of us, and tells the script nothing of it: what is done before, and after it.
MEETS = {
    "a collective": ("y = dt.all_reduce(torch.ones(4, device=mesh.device), over='dp')", ""),
    "a callback": ("dt.submit(forever, node=1).add_done_callback(over.append)", "while not over: time.sleep(0.01)"),
    "a wait for any of several": (
        "works = [dt.submit(forever, node=1), dt.submit(abs, -3, node=0)]",
        "assert len(list(dt.futures.as_completed(works))) == 2",
    ),
    "counting": ("", "dt.channels.stats()"),
    "an actor": ("a = dt.actor(dict, node=1)", ""),
}


@pytest.mark.parametrize("what", variants(MEETS))
def test_a_loss_that_only_we_have_met_fails_the_script(script: Script, what: str) -> None:
    before, after = MEETS[what]
    done = script(f"""
import os, signal, time, torch, disttensor as dt
def forever():
    time.sleep(3600)
over = []
dt.init_master_worker(nodes=2, threads=1)
mesh, pid = dt.mesh(dp=2), dt.nodes()[1]["pid"]
os.kill(pid, signal.SIGSTOP)
{before}
os.kill(pid, signal.SIGKILL)
{after}
while dt.nodes()[1]["alive"]:
    torch.ones(2, device="node:0").sum().item()
print("end of script")
""")
    assert (done.returncode, done.stdout) == (1, "end of script\n"), done.stderr
    assert "a node was lost" in done.stderr
    assert "node 1" in done.stderr


def test_a_loss_is_an_error_of_a_function_only_by_a_node_that_is_there() -> None:
    """A function may raise our own errors, with any rank: that costs nobody a node."""

    def lies(kind: type[Exception], rank: object) -> None:
        raise kind("mine", rank)

    def says_that_it_is_lost(rank: object) -> None:
        raise dt.NodeLost(rank)  # type: ignore[arg-type]

    with dt.init_master_worker(nodes=2, launcher="inproc"):
        for kind in (dt.errors.BrokenError, dt.errors.PeerFailed):
            for rank in (-2, -1, 0, 1, 2, 1 << 70, True, "one", None):
                with pytest.raises(dt.DisttensorError, match="mine"):
                    dt.run(lies, kind, rank, node=0)
        for rank in (-1, 0, 1, 2, 1 << 70, "one"):
            with pytest.raises(dt.DisttensorError, match=f"node {rank} .* cause unknown"):
                dt.run(says_that_it_is_lost, rank, node=0)
        probe(0)
        probe(1)
