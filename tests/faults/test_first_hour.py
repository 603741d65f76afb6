"""What people write in their first hour, and what they are told: the messages that docs/dev/first-hour.md names."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator
from linecache import getline
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from telling import warned
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import disttensor

#: Untyped: what follows is wrong, and mypy would say so.
dt: Any = disttensor

Script = Callable[..., Any]
#: The kind of error, its text, and what raises it, given the mesh of all nodes.
Mistake = tuple[type[Exception], str, Callable[[Any], object]]


@pytest.fixture
def mesh(nodes: object) -> Iterator[Any]:
    """A mesh of two nodes' CPUs, with no error left over before the test and none after it."""
    dt.synchronize()
    made = dt.mesh(dp=2, nodes=[0, 1], device="cpu")
    yield made
    made.close()
    dt.synchronize()


def wrong(mistake: Mistake, mesh: Any) -> None:
    kind, text, program = mistake
    with pytest.raises(kind) as raised:
        program(mesh)
    assert re.search(text, str(raised.value)), str(raised.value)
    assert "node:64" not in str(raised.value)
    assert type(raised.value) is kind


def ones(*where: Any) -> list[torch.Tensor]:
    return [torch.ones(2, device=device) for device in where]


# ---- meshes ----------------------------------------------------------------------------------------------------------

OF_MESHES: dict[str, Mistake] = {
    "two meshes": (
        RuntimeError,
        r"\.mesh\(dp=2, nodes=\[0, 1\], device='cpu'\)\.device\) or \.to\(dt\.mesh\(tp=2, nodes=\[1, 0\]\)\.device\)$",
        lambda mesh: torch.add(*ones(mesh.device, dt.mesh(tp=2, nodes=[1, 0]).device)),
    ),
    "a mesh and a node": (
        RuntimeError,
        r"move one with \.to\(dt\.mesh\(dp=2, .*\)\.device\) or \.to\('node:2'\)$",
        lambda mesh: torch.add(*ones(mesh.device, "node:2")),
    ),
    "two devices of a node": (
        RuntimeError,
        r"move one with \.to\('node:0'\) or \.to\(dt\.device\(0, 'cuda:1'\)\)$",
        lambda mesh: torch.add(*ones("node:0", dt.device(0, "cuda:1"))),
    ),
    "to another device": (
        RuntimeError,
        r"x\.at\(dp=0\)\.to\(dt\.device\(1, 'cuda:1'\)\) copies one",
        lambda mesh: torch.ones(2).to(mesh).to(dt.device(1, "cuda:1")),
    ),
    "a generator": (
        RuntimeError,
        r"make it with torch\.Generator\(device=dt\.mesh\(dp=2, nodes=\[0, 1\], device='cpu'\)\.device\)$",
        lambda mesh: torch.randn(2, device=mesh.device, generator=torch.Generator("node:1")),
    ),
    "a local layer": (
        RuntimeError,
        r"it is 'bias' of the layer Linear, which is here: move the model with \.to\(dt\.mesh\(dp=2, .*\)\.device\)$",
        lambda mesh: nn.Sequential(nn.Linear(3, 3))(torch.ones(2, 3, device=mesh.device)),
    ),
    "sizes without names": (
        TypeError,
        r"^mesh\(2, 2\): each size has the name of its dim, as in dt\.mesh\(dp=2, tp=2\)$",
        lambda mesh: dt.mesh(2, 2),
    ),
    "devices": (AttributeError, "^a mesh has no attribute 'devices'; did you mean 'device'", lambda mesh: mesh.devices),
    "a dim": (AttributeError, r"mesh\.size\('dp'\) is the size of its dim", lambda mesh: mesh.dp),
    "a mesh as a tensor": (
        TypeError,
        r"^cat: a mesh is a place and not a tensor; mesh\.device is its device$",
        lambda mesh: torch.cat([torch.ones(2), mesh]),
    ),
    "fully_shard": (
        TypeError,
        r"^fully_shard\(\) needs mesh, as in dt\.fully_shard\(module, dt\.mesh\(dp=2\)\)$",
        lambda mesh: dt.fully_shard(nn.Linear(2, 2)),
    ),
    "DataParallel": (
        TypeError,
        r"^DataParallel\(\) needs mesh, as in dt\.DataParallel\(model\.to\(mesh\.device\), mesh\), where",
        lambda mesh: dt.DataParallel(nn.Linear(2, 2)),
    ),
    "distribute": (
        TypeError,
        r"^distribute\(\) needs where, as in dt\.data\.distribute\(loader, dt\.mesh\(dp=2\)\)$",
        lambda mesh: dt.data.distribute([1]),
    ),
    "Pipeline": (
        TypeError,
        r"^Pipeline\(\) needs places, as in dt\.training\.Pipeline\(stages, \['node:0', 'node:1'\], microbatches=4\)$",
        lambda mesh: dt.training.Pipeline([nn.Linear(2, 2)]),
    ),
    "if of ranks that differ": (
        dt.errors.RanksDiffer,
        r"dt\.all_reduce\(x, 'max', over='dp'\) is whether it is so on any rank, with 'min' whether it is on all",
        lambda mesh: bool(mesh.coordinate("dp") > 0),
    ),
}


@pytest.mark.parametrize("name", OF_MESHES)
def test_mistakes_with_meshes(name: str, mesh: Any) -> None:
    wrong(OF_MESHES[name], mesh)


def test_tensors_and_modules_go_to_a_mesh(mesh: Any) -> None:
    local = torch.arange(3.0)
    for sent in (
        local.to(mesh), local.to(mesh, non_blocking=True), local.to(device=mesh), local.to("node:2").to(mesh),
        local.to(mesh, torch.float64).float(),
    ):  # fmt: skip
        assert sent.device == mesh.device
        assert [shard.tolist() for shard in sent.shards()] == [[0.0, 1.0, 2.0]] * 2
    assert local.to(mesh, torch.float64).dtype == torch.float64
    model = nn.Linear(3, 1)
    before = [*model.parameters()]
    assert model.to(mesh) is model
    assert [*model.parameters()] == before
    assert {p.device for p in before} == {mesh.device}


def test_a_layer_that_is_here_is_named(mesh: Any) -> None:
    x = torch.ones(2, 4, device="node:1")
    for layer, name in (
        (nn.Linear(4, 4), "bias"), (nn.LayerNorm(4), "weight"), (nn.LSTM(4, 4), "weight_ih_l0"),
        (nn.BatchNorm1d(4), "weight"), (nn.Linear(4, 4, bias=False), "weight"),
    ):  # fmt: skip
        with pytest.raises(RuntimeError, match=f"'{name}' of the layer {type(layer).__name__}, which is here: move"):
            nn.Sequential(layer)(x)
    for program in (lambda: x + torch.ones(4), lambda: nn.Linear(4, 4).to("node:1")(torch.ones(4))):
        with pytest.raises(RuntimeError, match=r"on the script's cpu and .*; send it with \.to\('node:1'\) or \.dist_"):
            program()


def test_a_mesh_in_texts(mesh: Any) -> None:
    """By its dims: the index of its device means nothing to a reader."""
    assert repr(mesh) == "Mesh(dp=2, nodes=[0, 1])"
    assert repr(torch.ones(2).to(mesh)) == "tensor([1., 1.], device=mesh(dp=2))"
    assert repr(mesh.coordinate("dp")).startswith("on the mesh (dp=2) of nodes 0 and 1 cpu:\ndp=0: tensor(0, device=")
    with pytest.raises(TypeError, match=r"not a tensor \(\) torch.float32 on the mesh \(dp=2\) of nodes 0 and 1"):
        dt.collectives.new_group(torch.ones(2).to(mesh))


# ---- a Work that is used as its value --------------------------------------------------------------------------------

NOT_YET = r"^.*a Work is a value on its way.*work\.result\(\) waits for it and returns it, work\.wait\(\)"

AS_A_VALUE: dict[str, Callable[[Any], object]] = {
    "add": lambda work: work + 1,
    "radd": lambda work: 1 + work,
    "of a local tensor": lambda work: torch.ones(2) * work,
    "of a tensor on a node": lambda work: torch.ones(2, device="node:1") - work,
    "matmul": lambda work: work @ work,
    "negative": operator.neg,
    "greater": lambda work: work > 0,
    "index": lambda work: work[0],
    "float": float,
    "int": int,
    "range": range,
    "len": len,
    "round": round,
    "format": lambda work: f"{work:.3f}",
    "unpacked": lambda work: [*work],
    "in": lambda work: 1 in work,
    "sum": lambda work: sum([work]),
    "torch": lambda work: torch.stack([work]),
    "numpy": lambda work: np.mean([work]),
    "array": np.asarray,
}


class Counter:
    def next(self) -> int:
        return 3


WORKS: dict[str, Callable[[], Any]] = {
    "fetch": lambda: dt.fetch(torch.ones(2, device="node:1")),
    "submit": lambda: dt.submit(list, (1, 2), node=1),
    "all_reduce": lambda: dt.all_reduce(ones("node:0", "node:1"), async_op=True),
    "actor": lambda: dt.actor(Counter, node=0).next(),
}


@pytest.mark.parametrize("kind", WORKS)
def test_a_work_is_not_its_value(kind: str, nodes: object, settled: None) -> None:
    work = WORKS[kind]()
    for name, use in AS_A_VALUE.items():
        with pytest.raises(TypeError) as raised:
            use(work)
        assert re.search(NOT_YET, str(raised.value)), name
    with pytest.raises(
        AttributeError, match=r"has no attribute 'shape': |a Work is .*\('\w+' object has no .*'shape'\)"
    ):
        work.shape  # noqa: B018
    assert work
    assert not hasattr(work, "shape")
    assert (work == 1, work == work, work in {work}, f"{work}") == (False, True, True, str(work))
    assert work.result() is not None


# ---- torch.distributed -----------------------------------------------------------------------------------------------

x1: Callable[[], torch.Tensor] = lambda: torch.ones(2, device="node:1")  # noqa: E731
TORCHS: dict[str, tuple[Callable[[], object], str]] = {
    "all_reduce": (lambda: dist.all_reduce(x1()), "dt.all_reduce"),
    "broadcast": (lambda: dist.broadcast(x1(), 0), "dt.broadcast"),
    "all_gather": (lambda: dist.all_gather([x1()], x1()), "dt.all_gather"),
    "reduce": (lambda: dist.reduce(x1(), 0), "dt.collectives.reduce"),
    "gather": (lambda: dist.gather(x1(), dst=0), "dt.collectives.gather"),
    "scatter": (lambda: dist.scatter(x1(), src=0), "dt.collectives.scatter"),
    "reduce_scatter": (lambda: dist.reduce_scatter(x1(), [x1()]), "dt.collectives.reduce_scatter"),
    "all_to_all": (lambda: dist.all_to_all([x1()], [x1()]), "dt.collectives.all_to_all"),
    "send": (lambda: dist.send(x1(), 1), "dt.collectives.send"),
    "recv": (lambda: dist.recv(x1(), 1), "dt.collectives.recv"),
    "isend": (lambda: dist.isend(x1(), 1), "dt.collectives.isend"),
    "irecv": (lambda: dist.irecv(x1(), 1), "dt.collectives.irecv"),
    "P2POp": (lambda: dist.P2POp(dist.isend, x1(), 1), "dt.collectives.P2POp"),
    "broadcast_object_list": (lambda: dist.broadcast_object_list([x1()]), "dt.collectives.broadcast_object"),
    "all_gather_object": (lambda: dist.all_gather_object([None], x1()), "dt.collectives.all_gather_object"),
}


@pytest.mark.parametrize("name", TORCHS)
def test_torchs_collectives_name_ours(name: str, nodes: object, settled: None) -> None:
    call, ours = TORCHS[name]
    with pytest.raises(TypeError) as raised:
        call()
    assert str(raised.value).startswith(
        f"torch.distributed.{name} is for processes that each have tensors of their own"
    )
    assert f"this tensor is on node 1 cuda:0: {ours} does it for tensors on nodes" in str(raised.value)
    assert operator.attrgetter(ours.removeprefix("dt."))(dt)


def test_torchs_collectives_on_a_mesh(mesh: Any) -> None:
    x = torch.ones(2).to(mesh)
    with pytest.raises(TypeError, match=r"on the mesh \(dp=2\) .*: dt\.all_reduce\(x, \.\.\., over='dp'\) does it"):
        dist.all_reduce(x)
    with pytest.raises(TypeError, match=r"dt\.collectives\.reduce does it for .*; of one on a mesh take x\.shards\(\)"):
        dist.reduce(x, 0)


def test_torchs_parallel_modules_name_ours(mesh: Any) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    on_node, on_mesh = nn.Linear(2, 2).to("node:1"), nn.Linear(2, 2).to(mesh)
    for make, name, ours in (
        (DistributedDataParallel, "DistributedDataParallel", "DataParallel"),
        (nn.DataParallel, "DataParallel", "DataParallel"),
        (FullyShardedDataParallel, "FullyShardedDataParallel", "fully_shard"),
        (fully_shard, "fully_shard", "fully_shard"),
    ):
        told = rf"^{name} is for processes .*: dt\.{ours}\(model, mesh\) is the same"
        with pytest.raises(TypeError, match=told):
            make(on_mesh)
        told = (
            rf"this model is on node 1 cuda:0: dt\.{ours}\(model\.to\(mesh\), mesh\), where mesh is dt\.mesh\(dp=3\),"
        )
        with pytest.raises(TypeError, match=told):
            make(on_node)


def test_local_tensors_are_told_what_torch_tells(mesh: Any) -> None:
    for call in (
        lambda: dist.all_reduce(torch.ones(2)), lambda: dist.broadcast(torch.ones(2), 0), dist.get_rank,
        lambda: DistributedDataParallel(nn.Linear(2, 2)),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="Default process group has not been initialized"):
            call()
    local = nn.Linear(2, 2)
    assert torch.equal(nn.DataParallel(local)(torch.ones(1, 2)), local(torch.ones(1, 2)))


# ---- values, files, graphs, checkpoints ------------------------------------------------------------------------------


def of_an_open_file() -> object:
    with open(__file__) as file:
        return dt.run(lambda: file.read(), node=0)


def recorded(mesh: Any) -> None:
    with dt.graph(dt.Graph()):
        torch.ones(2, device="node:1").sum().item()


OTHERS: dict[str, Mistake] = {
    "numpy": (
        TypeError,
        r"^numpy\.mean can't compute with a tensor on node 1 cuda:0: .*use x\.cpu\(\)\.numpy\(\)$",
        lambda mesh: np.mean(x1()),  # type: ignore[call-overload]
    ),
    "array": (TypeError, r"can't convert a tensor .* use x\.cpu\(\)\.numpy\(\)$", lambda mesh: np.stack([x1()])),
    "mean": (
        TypeError,
        r"'mean' is not a reduction; .*; did you mean 'avg'\?$",
        lambda mesh: dt.all_reduce(torch.ones(2).to(mesh), "mean", over="dp"),
    ),
    "summ": (
        TypeError,
        r"'summ' is not a reduction; .*; did you mean 'sum'\?$",
        lambda mesh: dt.all_reduce(ones("node:0", "node:1"), "summ"),
    ),
    "local tensors": (
        TypeError,
        r"tensor 0 has to be a tensor on a node, not a local tensor of cpu; x\.to\('node:0'\) sends it to node 0$",
        lambda mesh: dt.all_reduce(ones("cpu", "cpu")),
    ),
    "in a recording": (
        dt.errors.GraphError,
        r"nothing runs while a graph is recorded: end the recording first, and read values after g\.replay\(\)$",
        recorded,
    ),
    "an open file": (
        TypeError,
        r"^<lambda>\(\) can't be sent to node 0: the variable 'file' of .* is a .*: pass its path, or what it holds\)",
        lambda mesh: of_an_open_file(),
    ),
    "a device that nobody has made": (
        RuntimeError,
        r"a device of a mesh, or of dt\.device\(\), is of the session in which it was made: make it again$",
        lambda mesh: torch.ones(2, device="node:127"),
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_mistakes(name: str, mesh: Any) -> None:
    wrong(OTHERS[name], mesh)


def test_what_numpy_does_with_tensors_methods_it_does_still(mesh: Any) -> None:
    x = torch.ones(1, 2, device="node:1")
    assert np.shape(x) == (1, 2)
    assert np.ndim(x) == 2
    assert np.squeeze(x).device == x.device  # type: ignore[call-overload]


def test_a_key_that_a_checkpoint_lacks(mesh: Any, tmp_path: Any) -> None:
    """KeyError shows a text as a repr, in quotes."""
    dt.checkpoint.save({"a": x1()}, tmp_path)
    with pytest.raises(KeyError) as raised:
        dt.checkpoint.load({"b": x1()}, tmp_path)
    assert str(raised.value) == f"{tmp_path} has no 'b'; with strict=False what is not there stays as it is"


# ---- waits -----------------------------------------------------------------------------------------------------------


def test_a_thousand_waits_of_a_line_are_told_once(mesh: Any) -> None:
    x = torch.ones((), device="node:1")
    with warned("has waited") as log:
        for _ in range(500):
            float(x) + x.cpu().item()  # two of them
        for _ in range(999):
            x.item()
        (told,) = log.texts
        place, _, words = told.partition(" in test_a_thousand_waits_of_a_line_are_told_once has waited for values of ")
        assert re.fullmatch(
            r"nodes 1,000 times, \d+\.\d s in all: each \.item\(\), \.cpu\(\) or print\(\) there waits\. "
            r"disttensor\.fetch\(x\) returns at once, and what is added up on the node needs one \.item\(\) at the end",
            words,
        ), told
        file, _, line = place.rpartition(":")
        assert (file, "# two of them" in getline(file, int(line))) == (__file__, True)
        for _ in range(1500):
            float(x)
        assert len(log.texts) == 2


# ---- sessions --------------------------------------------------------------------------------------------------------


def test_an_earlier_session_is_named(script: Script) -> None:
    """Where there is another one it need not be begun again; and an old mesh's device may be another's now."""
    done = script(
        """
import torch, disttensor as dt

def said(program):
    try:
        print(program())
    except dt.DisttensorError as e:
        print(e)

dt.init_master_worker(nodes=2, launcher="inproc")
x, mesh = torch.ones(2, device="node:0"), dt.mesh(dp=2)
dt.shutdown()
said(lambda: x + 1)
dt.init_master_worker(nodes=2, launcher="inproc")
other = dt.mesh(tp=2, nodes=[1, 0])
for program in (lambda: x + 1, lambda: x + torch.ones(2, device="node:0"), lambda: torch.ones(2).to(mesh)):
    said(program)
print(other.device)
"""
    )
    earlier = (
        "this is of an earlier session, which was shut down, and its tensors are gone: make it anew in the session "
        "that runs now"
    )
    assert done.stdout.splitlines() == [
        "the session was shut down; its tensors are gone (call init_master_worker again)",
        earlier,
        earlier,
        "Mesh(dp=2, nodes=[0, 1]) is of an earlier session, which was shut down; dt.mesh(dp=2, nodes=[0, 1]) makes it",
        "node:64",
    ], done


CHILDREN = """
import os, sys
import torch, disttensor as dt
import torch.multiprocessing as mp
from torch.utils.data import DataLoader, Dataset

print("session in", os.getpid(), flush=True)
dt.init_master_worker(nodes=1, launcher="inproc")

class Squares(Dataset):
    def __len__(self): return 2
    def __getitem__(self, i): return {item}

def child(rank):
    pass

try:
    {program}
except Exception as e:
    print(type(e).__name__, flush=True)
"""
NO_SESSION = (
    "RuntimeError: init_master_worker: this is a child of multiprocessing, by spawn or forkserver (such as a worker of "
    "a DataLoader), which runs the script's file once more; a child starts no session. Put what only the script is to "
    'do below `if __name__ == "__main__":`, or start children by fork'
)


@pytest.mark.parametrize(
    ("program", "error"),
    [
        ("list(DataLoader(Squares(), num_workers=1, multiprocessing_context='spawn'))", "RuntimeError"),
        ("mp.spawn(child)", "ProcessExitedException"),
    ],
)
def test_a_child_that_runs_the_script_again_starts_no_session(script: Script, program: str, error: str) -> None:
    done = script(CHILDREN.format(program=program, item="i * i"))
    assert done.stdout.count("session in") == 2, done  # the line before the start, once in the child
    assert NO_SESSION in done.stderr, done
    assert done.stdout.splitlines()[-1] == error, done


def test_a_loaders_worker_that_uses_a_node_is_told_what_to_return(script: Script) -> None:
    program = "list(DataLoader(Squares(), num_workers=1, multiprocessing_context='fork'))"
    program = f"try: {program}\n    except dt.errors.ForkError as e: print(e)"
    done = script(CHILDREN.format(program=program, item="torch.ones(1, device='node:0')"))
    assert "It is a worker of a DataLoader: let the dataset return local tensors, and disttensor.data.distribute(" in (
        done.stdout
    ), done


# ---- starting --------------------------------------------------------------------------------------------------------

STARTS: dict[str, Mistake] = {
    "python": (TypeError, r"did you mean launcher_options=\{\"python\": \.\.\.\}\?$", lambda _: start(python="/x")),
    "num_nodes": (TypeError, r"'num_nodes'; did you mean nodes=\?$", lambda _: start(num_nodes=2)),
}


def start(**arguments: Any) -> None:
    dt.init_master_worker(launcher="inproc", **arguments).__exit__(None, None, None)


@pytest.mark.parametrize("name", STARTS)
def test_mistakes_at_the_start(name: str) -> None:
    wrong(STARTS[name], None)


def test_a_number_of_nodes_that_dtrun_does_not_get_is_told(script: Script) -> None:
    """dtrun sets the variable for its script."""
    text = """
import disttensor as dt
with dt.init_master_worker(nodes=3, launcher="inproc"):
    print(len(dt.nodes()))
with dt.init_master_worker(launcher="inproc"), dt.init_master_worker(nodes=2, launcher="inproc", exist_ok=True):
    print(len(dt.nodes()))
"""
    done = script(text, DISTTENSOR_NODES="2")
    assert done.stdout.split() == ["3", "2"], done
    (told,) = [line for line in done.stderr.splitlines() if "counts" in line]
    assert told.endswith(
        "program.py:3 in <module>: nodes=3 of the script counts, and not the 2 that dtrun -n, or DISTTENSOR_NODES, "
        "asks for; leave nodes out to have that number"
    )
