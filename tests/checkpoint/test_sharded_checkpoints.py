"""Checkpoints of what is on meshes, against torch.distributed.checkpoint in one process and in jobs of real ranks."""

from __future__ import annotations

import asyncio
import ctypes
import math
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from limits import HANG
from mesh_kit import connected
from telling import said
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.optim import SGD, AdamW

import disttensor as dt
from disttensor import shard
from disttensor.checkpoint import async_save, load, save
from disttensor.errors import GraphError, RanksDiffer
from disttensor.meshes import Mesh, agree_, from_shards
from disttensor.nn import ColumnParallelLinear, ParallelEmbedding, RowParallelLinear
from disttensor.training import DataParallel

pytestmark = [pytest.mark.usefixtures("settled"), pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]

NODES = 4
#: Sizes that 2, 3 and 4 ranks do not divide.
WORDS, WIDE = 11, 21


@pytest.fixture(scope="module", autouse=True)
def session() -> Iterator[None]:
    with connected(NODES):
        dt.run(job_begins, node=[0, 1], distributed=True)  # what is made at first use: before the tests look for leaks
        yield


def job_begins() -> None:
    torch.distributed.barrier()


def mesh(**dims: int) -> Mesh:
    """A mesh of the first nodes."""
    return dt.mesh(**dims, nodes=list(range(math.prod(dims.values()))))


def same(first: torch.Tensor, second: torch.Tensor) -> bool:
    return first.dtype is second.dtype and torch.equal(first, second)


# ---- one model in all its forms --------------------------------------------------------------------------------------


def plain(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Embedding(WORDS, 8), nn.BatchNorm1d(8), nn.Linear(8, WIDE), nn.GELU(), nn.Linear(WIDE, 8), nn.Linear(8, 3)
    )


def parallel(where: Mesh, seed: int = 0) -> nn.Sequential:
    """The same model, cut along the dim "tp"."""
    table, norm, up, act, down, out = plain(seed)
    return nn.Sequential(
        ParallelEmbedding.from_plain(table, where),
        norm.to(where.device),
        ColumnParallelLinear.from_plain(up, where, gather_output=False),
        act,
        RowParallelLinear.from_plain(down, where, input_is_parallel=True),
        out.to(where.device),
    )


def replicated(where: Mesh, seed: int = 0) -> nn.Module:
    return plain(seed).to(where.device)


def wrapped(where: Mesh, seed: int = 0) -> nn.Module:
    return DataParallel(plain(seed).to(where.device), where)


def sharded(where: Mesh, seed: int = 0) -> nn.Module:
    """Cut along the dim "dp" by dt.fully_shard; along "r", if there is one, it is alike."""
    model = plain(seed).to(where.device)
    for layer in model:
        dt.fully_shard(layer, where, replicas="r" if "r" in where.names else None)
    return dt.fully_shard(model, where, replicas="r" if "r" in where.names else None)


def on_a_node(where: Mesh, seed: int = 0) -> nn.Module:
    return plain(seed).to("node:2")


def adamw(model: nn.Module) -> AdamW:
    return AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    """Steps whose batches are alike on all ranks."""
    where = next(model.parameters()).device
    for i in range(steps):
        x = (torch.arange(16) * (i + 3) % WORDS).to(where)
        optimizer.zero_grad()
        F.mse_loss(model(x), torch.ones(16, 3).to(where)).backward()
        optimizer.step()


def trained(make: Callable[..., nn.Module], where: Mesh, steps: int = 3) -> tuple[nn.Module, AdamW]:
    model = make(where)
    optimizer = adamw(model)
    train(model, optimizer, steps)
    return model, optimizer


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    """A module's whole tensors, local, by the names of the plain one."""
    return {name.removeprefix("module."): x.cpu() for name, x in model.state_dict().items()}


def all_equal(first: Any, second: Any) -> None:
    """Compares nested values, tensors to the bit."""
    if isinstance(first, dict):
        assert first.keys() == second.keys()
        for key in first:
            all_equal(first[key], second[key])
    elif isinstance(first, list):
        assert len(first) == len(second)
        for one, other in zip(first, second, strict=True):
            all_equal(one, other)
    elif isinstance(first, torch.Tensor):
        assert same(first, second)
    else:
        assert first == second


def torchs(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The state as a program of torch's has it."""
    model_state, optim_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optim": optim_state}


FORMS = {
    "dp x tp": (parallel, {"dp": 2, "tp": 2}),
    "tp=3": (parallel, {"tp": 3}),
    "dp=4": (replicated, {"dp": 4}),
    "wrapped": (wrapped, {"dp": 2}),
    "sharded": (sharded, {"dp": 3}),
    "hybrid": (sharded, {"r": 2, "dp": 2}),
    "one node": (on_a_node, {"dp": 2}),
}


def made(form: str, seed: int = 0) -> nn.Module:
    make, dims = FORMS[form]
    return make(mesh(**dims), seed)


# ---- into one process, and back --------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_torch_loads_it_in_one_process(form: str, tmp_path: Path) -> None:
    """By names and values all is what it would be if the plain model had been saved: parameters, buffers, states."""
    make, dims = FORMS[form]
    model, optimizer = trained(make, mesh(**dims))
    save({"model": model, "optim": optimizer, "step": 3}, tmp_path / "c")
    other = plain(1)
    theirs = adamw(other)
    state = {**torchs(other, theirs), "step": 0}
    dcp.load(state, checkpoint_id=tmp_path / "c", no_dist=True)
    set_state_dict(other, theirs, model_state_dict=state["model"], optim_state_dict=state["optim"])
    all_equal(values(other), values(model))
    assert state["step"] == 3
    # the states are those of the parameters: both go on alike, but for the order of sums
    train(other, theirs, 2)
    train(model, optimizer, 2)
    for name, x in values(model).items():
        torch.testing.assert_close(x, other.state_dict()[name], rtol=2e-4, atol=1e-5, msg=name)


def test_torch_converts_it(tmp_path: Path) -> None:
    model, optimizer = trained(parallel, mesh(dp=2, tp=2))
    tensors = {"a": [torch.ones(2, device="node:1"), 5], "b": {"half": torch.arange(4.0).bfloat16(), "text": "x"}}
    save({"model": model, "optim": optimizer, "more": tensors}, tmp_path / "c")
    dcp_to_torch_save(tmp_path / "c", tmp_path / "whole.pt")
    whole = torch.load(tmp_path / "whole.pt")
    all_equal(whole["model"], values(model))
    all_equal(whole["more"], {"a": [torch.ones(2), 5], "b": tensors["b"]})
    assert whole["optim"]["param_groups"][0]["params"] == [name for name, _ in plain().named_parameters()]


@pytest.mark.parametrize("form", FORMS)
def test_it_loads_what_torch_has_saved_in_one_process(form: str, tmp_path: Path) -> None:
    """Into an optimizer that has made no step. Back it comes to the bit, with the optimizer's states."""
    model = plain()
    optimizer = adamw(model)
    train(model, optimizer, 3)
    optimizer.param_groups[0]["initial_lr"] = 0.5  # as a scheduler does
    dcp.save({**torchs(model, optimizer), "step": 3}, checkpoint_id=tmp_path / "c", no_dist=True)
    here = made(form, seed=1)
    ours = AdamW(here.parameters(), lr=0.7)
    state = {"model": here, "optim": ours, "step": 0}
    load(state, tmp_path / "c")
    all_equal(values(here), model.state_dict())
    assert state["step"] == 3
    assert (ours.param_groups[0]["lr"], ours.param_groups[0]["initial_lr"]) == (0.01, 0.5)
    save(state, tmp_path / "d")
    dcp_to_torch_save(tmp_path / "c", tmp_path / "c.pt")
    dcp_to_torch_save(tmp_path / "d", tmp_path / "d.pt")
    all_equal(torch.load(tmp_path / "d.pt"), torch.load(tmp_path / "c.pt"))


# ---- into another mesh -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_another_mesh_loads_it(form: str, tmp_path: Path) -> None:
    model, optimizer = trained(parallel, mesh(dp=2, tp=2))
    save({"model": model, "optim": optimizer}, tmp_path / "c")
    here = made(form, seed=1)
    ours = adamw(here)
    load({"model": here, "optim": ours}, tmp_path / "c")
    all_equal(values(here), values(model))
    save({"model": here, "optim": ours}, tmp_path / "d")
    dcp_to_torch_save(tmp_path / "c", tmp_path / "c.pt")
    dcp_to_torch_save(tmp_path / "d", tmp_path / "d.pt")
    all_equal(torch.load(tmp_path / "d.pt"), torch.load(tmp_path / "c.pt"))


def test_training_goes_on_to_the_bit(tmp_path: Path) -> None:
    """In a model and an optimizer that are new, with a scheduler."""
    where = mesh(dp=2, tp=2)

    def new(seed: int) -> dict[str, Any]:
        model = parallel(where, seed)
        optimizer = adamw(model)
        return {"model": model, "optim": optimizer, "rate": torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)}

    def go(state: dict[str, Any], steps: int) -> None:
        for _ in range(steps):
            train(state["model"], state["optim"], 1)
            state["rate"].step()

    first, second = new(0), new(1)
    go(first, 3)
    save(first, tmp_path / "c")
    go(first, 3)
    load(second, tmp_path / "c")
    go(second, 3)
    all_equal(values(second["model"]), values(first["model"]))
    assert second["optim"].param_groups[0]["lr"] == first["optim"].param_groups[0]["lr"] == 0.01 / 8


def test_tied_weights_and_an_extra_state(tmp_path: Path) -> None:
    class Counted(nn.Linear):
        count = 0

        def get_extra_state(self) -> int:
            return self.count

        def set_extra_state(self, state: int) -> None:
            self.count = state

    def model(seed: int) -> nn.ModuleDict:
        torch.manual_seed(seed)
        made = nn.ModuleDict({"table": nn.Embedding(5, 4), "head": Counted(4, 5)})
        made["head"].weight = made["table"].weight
        return made.to(mesh(dp=2).device)

    first, second = model(0), model(1)
    first["head"].count = 7
    optimizer = SGD(first.parameters(), lr=0.1, momentum=0.9)
    save({"model": first, "optim": optimizer}, tmp_path / "c")
    load({"model": second, "optim": SGD(second.parameters(), lr=0.2, momentum=0.9)}, tmp_path / "c")
    assert second["head"].count == 7
    assert second["head"].weight is second["table"].weight
    assert same(second["head"].weight.detach().cpu(), first["head"].weight.detach().cpu())
    local = plain_tied()
    dcp.load({"model": (state := local.state_dict())}, checkpoint_id=tmp_path / "c", no_dist=True)
    assert same(state["head.weight"], first["head"].weight.detach().cpu())


def plain_tied() -> nn.Module:
    made = nn.ModuleDict({"table": nn.Embedding(5, 4), "head": nn.Linear(4, 5)})
    made["head"].weight = made["table"].weight
    return made


def test_padding_is_neither_written_nor_read(tmp_path: Path) -> None:
    """21 features are 6, 6, 6 and 3 of four ranks: torch's own shapes say so, and padding stays zero."""
    layer = ColumnParallelLinear.from_plain(nn.Linear(2, WIDE), mesh(tp=4))
    save({"layer": layer}, tmp_path / "c")
    stored = dcp.FileSystemReader(tmp_path / "c").read_metadata().state_dict_metadata["layer.weight"]
    assert stored.size == (WIDE, 2)
    assert sorted((chunk.offsets[0], chunk.sizes[0]) for chunk in stored.chunks) == [(0, 6), (6, 6), (12, 6), (18, 3)]
    other = ColumnParallelLinear.from_plain(nn.Linear(2, WIDE), mesh(tp=4))
    load({"layer": other}, tmp_path / "c")
    for one, two in zip(other.weight.detach().shards(), layer.weight.detach().shards(), strict=True):
        assert same(one.cpu(), two.cpu())
    assert not other.weight.detach().at(tp=3)[3:].any()


def test_a_model_without_values(tmp_path: Path) -> None:
    """It is cut on the meta device, gets memory for its parts, and the nodes read these; no node has the whole."""
    source, optimizer = trained(parallel, mesh(dp=2, tp=2))
    save({"model": source, "optim": optimizer}, tmp_path / "c")
    where = mesh(dp=3)
    with torch.device("meta"):
        model = plain()
    for layer in model:
        dt.fully_shard(layer, where)
    dt.fully_shard(model, where)
    with pytest.raises(TypeError, match=r"'model.0.weight' is on the meta device.*to_empty"):
        load({"model": model}, tmp_path / "c")
    model.to_empty(device=where.device)
    ours = adamw(model)
    load({"model": model, "optim": ours}, tmp_path / "c")
    all_equal(values(model), values(source))
    all_equal(
        whole({"model": model, "optim": ours}, tmp_path / "d"), whole({"model": source, "optim": optimizer}, tmp_path)
    )


def test_what_a_pass_has_left_whole(tmp_path: Path) -> None:
    """A checkpoint has the parts of what is sharded, and loads them, whatever state a pass has left it in."""
    model, other = sharded(mesh(dp=2)), sharded(mesh(dp=2), 1)
    for each in (model, other):
        each[2].unshard()
    save({"model": model}, tmp_path / "c")
    stored = dcp.FileSystemReader(tmp_path / "c").read_metadata().state_dict_metadata["model.2.weight"]
    assert len(stored.chunks) == 2
    load({"model": other}, tmp_path / "c")
    all_equal(values(other), values(model))


# ---- into a job of ranks, and back -----------------------------------------------------------------------------------


def job(path: str, steps: int, loads: bool) -> dict[str, torch.Tensor]:
    """Trains by torch's FSDP on ranks of gloo; returns the whole parameters and states."""
    model = plain(5)
    model.eval()  # BatchNorm's statistics would be those of each rank
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = adamw(model)
    state = torchs(model, optimizer)
    if loads:
        dcp.load(state, checkpoint_id=path)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    train(model, optimizer, steps)
    state = torchs(model, optimizer)
    if not loads:
        dcp.save(state, checkpoint_id=path)
    found = dict(state["model"])
    for name, its in state["optim"]["state"].items():
        found |= {f"{name}.{key}": value for key, value in its.items()}
    return {name: x.full_tensor() if hasattr(x, "full_tensor") else x for name, x in found.items()}


def whole(state: dict[str, Any], path: Path) -> dict[str, torch.Tensor]:
    """The same of a state that is saved first: what torch finds in it."""
    save(state, path / "whole")
    dcp_to_torch_save(path / "whole", path / "whole.pt")
    found = torch.load(path / "whole.pt")
    return found["model"] | {
        f"{name}.{key}": value for name, its in found["optim"]["state"].items() for key, value in its.items()
    }


def test_what_a_job_of_ranks_has_saved(tmp_path: Path) -> None:
    """FSDP on two ranks writes, with sizes that these do not divide; a mesh of another shape has it to the bit."""
    theirs = dt.run(job, str(tmp_path / "c"), 2, False, node=[0, 1], distributed=True)[0]
    model = parallel(mesh(dp=2, tp=2), 1)
    optimizer = adamw(model)
    load({"model": model, "optim": optimizer}, tmp_path / "c")
    all_equal(whole({"model": model, "optim": optimizer}, tmp_path), {name: x.cpu() for name, x in theirs.items()})


def test_what_a_job_of_ranks_loads(tmp_path: Path) -> None:
    model, optimizer = trained(parallel, mesh(dp=2, tp=2))
    save({"model": model, "optim": optimizer}, tmp_path / "c")
    theirs = dt.run(job, str(tmp_path / "c"), 0, True, node=[0, 1], distributed=True)[0]
    all_equal({n: x.cpu() for n, x in theirs.items()}, whole({"model": model, "optim": optimizer}, tmp_path))


SCRIPT = """
import sys
sys.path[:0] = sys.argv[1:3]
import warnings
import torch, torch.distributed as dist
from test_sharded_checkpoints import job
dist.init_process_group("gloo")
found = job(sys.argv[3], int(sys.argv[4]), sys.argv[5] == "loads")
if not dist.get_rank():
    torch.save(found, sys.argv[6])
dist.destroy_process_group()
"""


def torchrun(folder: Path, steps: int, does: str) -> dict[str, torch.Tensor]:
    (folder / "script.py").write_text(SCRIPT)
    here = Path(__file__).parent
    arguments = [str(here), str(here.parent / "kit"), str(folder / "c"), str(steps), does, str(folder / "found.pt")]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d"]
    command += ["--rdzv-endpoint", "localhost:0", str(folder / "script.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG, check=False)
    assert done.returncode == 0, done.stderr
    return torch.load(folder / "found.pt")  # type: ignore[no-any-return]


@pytest.mark.slow
def test_a_job_of_torchrun_writes(tmp_path: Path) -> None:
    theirs = torchrun(tmp_path, 2, "saves")
    model = parallel(mesh(dp=2, tp=2), 1)
    optimizer = adamw(model)
    load({"model": model, "optim": optimizer}, tmp_path / "c")
    all_equal(whole({"model": model, "optim": optimizer}, tmp_path), theirs)


@pytest.mark.slow
def test_a_job_of_torchrun_reads(tmp_path: Path) -> None:
    model, optimizer = trained(sharded, mesh(dp=3))
    save({"model": model, "optim": optimizer}, tmp_path / "c")
    all_equal(torchrun(tmp_path, 0, "loads"), whole({"model": model, "optim": optimizer}, tmp_path))


# ---- beside training -------------------------------------------------------------------------------------------------


def hold(fifo: str | None) -> None:
    """Has this process stand still in a save, where it has not written anything; None: no more."""
    isdir = getattr(os, "held_isdir", os.path.isdir)
    os.held_isdir = isdir  # type: ignore[attr-defined]

    def held(path: str) -> bool:
        if ".saving_" in str(path):
            assert fifo is not None
            with open(fifo) as opened:
                opened.read()
        return isdir(path)

    os.path.isdir = isdir if fifo is None else held  # type: ignore[assignment]


class Held:
    """Node 1, and the script if it shall, which stand still in the next save until they may go on."""

    def __init__(self, folder: Path, script: bool = True) -> None:
        self.fifo, self._own = folder / "node", folder / "script"
        self._script = script
        os.mkfifo(self.fifo)
        os.mkfifo(self._own)
        dt.run(hold, str(self.fifo), node=1)
        if script:
            hold(str(self._own))

    def go_on(self) -> None:
        with open(self.fifo, "w"):  # waits until it stands still
            dt.run(hold, None, node=1)
        if self._script:
            with open(self._own, "w"):
                hold(None)


def test_training_goes_on_while_it_is_written(tmp_path: Path) -> None:
    """What is issued after async_save is done on all nodes while the write is held open; the checkpoint has what was
    before, of meshes, nodes and the script."""
    where = mesh(dp=2, tp=2)
    model, optimizer = trained(parallel, where)
    before = whole({"model": model, "optim": optimizer}, tmp_path / "before")
    on_node, local = torch.ones(3, device="node:1"), torch.ones(3)
    state = {"model": model, "optim": optimizer, "more": {"x": on_node, "y": local}}
    held = Held(tmp_path)
    work = async_save(state, tmp_path / "c")
    for x in (on_node, local):
        x.fill_(2)
    train(model, optimizer, 3)
    dt.run(min, [1, 2], node=1)  # node 1 has done all of it
    assert on_node.tolist() == [2, 2, 2]
    assert not work.is_completed()
    with pytest.raises(TimeoutError, match="was not written within"):
        work.wait(0.01)
    assert not (tmp_path / "c" / ".metadata").exists()
    held.go_on()
    assert work.wait()
    assert work.result() is None
    dcp_to_torch_save(tmp_path / "c", tmp_path / "c.pt")
    found = torch.load(tmp_path / "c.pt")
    assert found["more"]["x"].tolist() == found["more"]["y"].tolist() == [1, 1, 1]
    all_equal(found["model"], {name: x for name, x in before.items() if name in values(model)})
    for name, its in found["optim"]["state"].items():
        for key, value in its.items():
            assert same(value, before[f"{name}.{key}"])
    assert sorted(os.listdir(tmp_path / "c")) == sorted({*files(tmp_path / "c"), ".metadata"})


def test_copies_go_back_to_the_system(tmp_path: Path) -> None:
    """What a node has copied for a save beside the program is not kept after it, however many there are."""
    x = torch.ones(16 << 18, device="node:1")

    def kept() -> int:
        for _ in range(4):
            async_save({"x": x}, tmp_path / "c").wait()
        return torch.node.memory_reserved("node:1")  # type: ignore[attr-defined, no-any-return]

    before = kept()
    assert kept() - before < x.nbytes // 2


def files(folder: Path) -> set[str]:
    """The files that belong to a checkpoint, but for .metadata."""
    metadata = dcp.FileSystemReader(folder).read_metadata()
    number = metadata.storage_meta.save_id.partition("-")[2]
    return {info.relative_path for info in metadata.storage_data.values()} | {f"hashes_{number}.json"}


def test_a_work_like_any_other(tmp_path: Path) -> None:
    """It is awaited, and can be dropped; on a stream of the program's what this makes is saved."""
    side = dt.Stream(node=1)
    x = torch.zeros(3, device="node:1")
    with dt.stream(side):
        x += 5
        async_save({"x": x}, tmp_path / "c")
    found = {"x": torch.zeros(3)}
    load(found, tmp_path / "c")
    assert found["x"].tolist() == [5, 5, 5]
    work = async_save({"x": x}, tmp_path / "c")

    async def awaited() -> object:
        return await work

    assert asyncio.run(awaited()) is None
    assert work.is_completed()
    with pytest.raises(GraphError), dt.graph(dt.Graph()):
        async_save({"x": x}, tmp_path / "c")


def test_a_state_that_is_nested(tmp_path: Path) -> None:
    """Of an optimizer with lists of tensors and dicts in its state, into a new one."""

    class Nested(SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for p in self.param_groups[0]["params"]:
                self.state[p] = {"past": [p.detach() * 2, p.detach() * 3], "more": {"a": {"b": p.detach() * 4}}, "n": 7}

    def new() -> tuple[nn.Module, Nested]:
        layer = ColumnParallelLinear.from_plain(nn.Linear(2, 3), mesh(tp=2))
        return layer, Nested(layer.parameters(), lr=1.0)

    layer, optimizer = new()
    optimizer.step()
    save({"m": layer, "o": optimizer}, tmp_path / "c")
    other, fresh = new()
    load({"m": other, "o": fresh}, tmp_path / "c")
    state, first = fresh.state[other.weight], optimizer.state[layer.weight]
    assert state["n"] == 7
    for mine, its in [
        *zip(state["past"], first["past"], strict=True),
        (state["more"]["a"]["b"], first["more"]["a"]["b"]),
    ]:
        assert [x.tolist() for x in mine.shards()] == [x.tolist() for x in its.shards()]


def test_one_copy_at_a_time(tmp_path: Path) -> None:
    """The second save waits for the first, and a load sees it."""
    x = torch.zeros(3, device="node:1")
    held = Held(tmp_path)
    first = async_save({"x": x}, tmp_path / "c")
    x += 1
    threading.Thread(target=held.go_on).start()
    second = async_save({"x": x}, tmp_path / "c")
    assert first.is_completed()
    found = {"x": torch.zeros(3)}
    load(found, tmp_path / "c")
    assert second.is_completed()
    assert found["x"].tolist() == [1, 1, 1]
    assert list(dt.futures.as_completed([first, second])) == [first, second]


# ---- what goes wrong -------------------------------------------------------------------------------------------------


def test_ranks_that_differ(tmp_path: Path) -> None:
    """BatchNorm's statistics are those of each rank's data; the error says which, where, and what to write."""
    where = mesh(dp=2, tp=2)
    norm = nn.BatchNorm1d(3).to(where.device)
    save({"norm": norm}, tmp_path / "c")
    norm(shard(torch.arange(24.0).view(8, 3), where, dp=0))
    with pytest.raises(RanksDiffer, match=r"'norm.running_mean' has 2 different values .*dt.meshes.agree_") as raised:
        save({"norm": norm}, tmp_path / "c")
    assert "dp=0, tp=0 and dp=1, tp=0" in str(raised.value)
    found = {"norm": nn.BatchNorm1d(3)}
    load(found, tmp_path / "c")
    assert not found["norm"].running_mean.any()
    save({"norm": norm}, tmp_path / "c", check_replicas=False)
    agree_(norm)
    save({"norm": norm}, tmp_path / "c")
    load(found, tmp_path / "c")
    assert same(found["norm"].running_mean, norm.running_mean.cpu())


@pytest.mark.parametrize("at", [0, 4095, 4096, 9000, 9002])
@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8, torch.bfloat16])
def test_one_entry_on_one_rank_is_found(at: int, dtype: torch.dtype, tmp_path: Path) -> None:
    x = torch.zeros(9003, dtype=dtype).to(mesh(dp=2).device)
    x.at(dp=1)[at] = 1
    with pytest.raises(RanksDiffer, match="'x' has 2 different values"):
        save({"x": x}, tmp_path / "c")


@pytest.mark.fault(48)
def test_a_flipped_byte_is_found(tmp_path: Path) -> None:
    """In each file. Nothing is loaded then, on no node."""
    model = parallel(mesh(dp=2, tp=2))
    save({"model": model, "step": 4}, tmp_path / "c")
    here = parallel(mesh(dp=2, tp=2), 1)
    before = values(here)
    for file in sorted((tmp_path / "c").iterdir()):
        whole_file = file.read_bytes()
        for at in (len(whole_file) // 3, len(whole_file) - 40):
            file.write_bytes(whole_file[:at] + bytes([whole_file[at] ^ 1]) + whole_file[at + 1 :])
            with pytest.raises(ValueError, match=r"is damaged|can't be read") as raised:
                load({"model": here, "step": 0}, tmp_path / "c")
            assert file.name in str(raised.value) or file.name.startswith("hashes_")
            all_equal(values(here), before)
        file.write_bytes(whole_file)
    data = next(iter(sorted((tmp_path / "c").glob("__0_*"))))
    whole_file = data.read_bytes()
    data.write_bytes(whole_file[:-1])
    with pytest.raises(ValueError, match=r"ends at byte .*the checkpoint is damaged"):
        load({"model": here}, tmp_path / "c")
    data.unlink()
    with pytest.raises(FileNotFoundError, match=rf"host .* does not see {data}"):
        load({"model": here}, tmp_path / "c")
    data.write_bytes(whole_file)
    load({"model": here}, tmp_path / "c")
    all_equal(values(here), values(model))


def limit(nbytes: int) -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


@pytest.fixture
def small_files() -> Iterator[None]:
    """Files of node 1 end at 1000 bytes, as a disk that is full."""
    dt.run(limit, 1000, node=1)
    yield
    dt.run(limit, -1, node=1)


@pytest.mark.fault(47)
def test_a_disk_that_is_full_in_the_middle_of_a_tensor(tmp_path: Path) -> None:
    """Where torch says that its own bytes are not where they should be, it is said why."""
    large = torch.ones(300_000, device="node:1")
    dt.run(limit, 500_000, node=1)
    try:
        with pytest.raises(OSError, match=r"File too large: .*/c/__1_\w+_0.distcp can't be written on host \S+"):
            save({"x": large}, tmp_path / "c")
    finally:
        dt.run(limit, -1, node=1)
    assert not (tmp_path / "c").exists()


FULL = """
import os
import sys
import torch
import disttensor as dt

folder = sys.argv[1]
if __name__ == "__main__":
    with dt.init_master_worker(nodes=2, threads=1):
        for numel in (20_000, 60_000, 1_000_000):
            try:
                values = {"x": torch.ones(numel, device="node:1"), "y": torch.ones(9, device="node:0")}
                dt.checkpoint.save(values, folder + "/c")
                print("saved")
            except OSError as error:
                print(str(error).partition(": /")[0], "distcp can't be written on host" in str(error))
        whole = torch.zeros(20_000, device="node:0")
        dt.checkpoint.load({"x": whole}, folder + "/c")
        print(whole.sum().item(), os.listdir(folder), len(os.listdir(folder + "/c")))
"""


@pytest.mark.slow
@pytest.mark.fault(47)
def test_a_file_system_that_is_full(tmp_path: Path) -> None:
    """A tmpfs of 256 KiB in a namespace: a first checkpoint fits, neither of the next two fits beside it."""
    program, folder = tmp_path / "program.py", tmp_path / "full"
    program.write_text(FULL)
    folder.mkdir()
    mount = f"mount -t tmpfs -o size=256k none {folder}"
    if subprocess.run(["unshare", "-rm", "sh", "-c", mount], capture_output=True).returncode:
        pytest.skip("no namespaces of users and mounts here")
    run = f"{mount} && exec {sys.executable} {program} {folder}"
    done = subprocess.run(["unshare", "-rm", "sh", "-c", run], capture_output=True, text=True, timeout=HANG)
    assert done.returncode == 0, done.stderr
    full = "[Errno 28] No space left on device True"
    assert done.stdout.splitlines() == ["saved", full, full, "20000.0 ['c'] 4"]


@pytest.mark.fault(47)
@pytest.mark.usefixtures("small_files")
def test_a_file_that_can_not_be_written(tmp_path: Path) -> None:
    """It is told by save, by the Work, and by the next save if nobody asked; what was there stays, and no more."""
    small, large = torch.arange(2.0, device="node:0"), torch.ones(1000, device="node:1")
    save({"x": small}, tmp_path / "c")
    there = sorted(os.listdir(tmp_path / "c"))
    with pytest.raises(OSError, match=r"File too large: .*/c/__1_\w+_0.distcp can't be written on host") as raised:
        save({"x": large}, tmp_path / "c")
    assert "on node 1 (host" in said(raised.value)
    assert "what was there before still is" in said(raised.value)
    work = async_save({"x": large}, tmp_path / "c")
    assert isinstance(work.exception(), OSError)
    with pytest.raises(OSError, match="File too large"):
        work.wait()
    with pytest.raises(OSError, match="File too large"):
        work.result()
    async_save({"x": large}, tmp_path / "new")
    with pytest.raises(OSError, match="/new/__1_") as raised:
        save({"x": small}, tmp_path / "c")
    assert "an earlier async_save" in said(raised.value)
    assert sorted(os.listdir(tmp_path / "c")) == there
    assert os.listdir(tmp_path) == ["c"]
    found = {"x": torch.zeros(2)}
    load(found, tmp_path / "c")
    assert found["x"].tolist() == [0, 1]


def test_ctrl_c(tmp_path: Path) -> None:
    """It ends save, on the node too, and leaves nothing; the next one works."""
    held, raised = Held(tmp_path, script=False), threading.Event()

    def interrupt() -> None:
        with open(held.fifo, "w"):  # the node stands still
            os.kill(os.getpid(), signal.SIGINT)
            assert raised.wait(HANG)

    thread = threading.Thread(target=interrupt)
    thread.start()
    x = torch.ones(3, device="node:1")
    with pytest.raises(KeyboardInterrupt):
        save({"x": x}, tmp_path / "c")
    raised.set()
    thread.join()
    assert not (tmp_path / "c").exists()
    dt.run(hold, None, node=1)
    dt.synchronize()  # the node, which has found nothing there to write to, has nothing to tell
    save({"x": x}, tmp_path / "c")


def test_a_tensor_that_has_failed(tmp_path: Path) -> None:
    index = torch.tensor([7], device="node:1")
    for saves in (save, lambda state, path: async_save(state, path).wait()):
        broken = F.embedding(index, torch.ones(3, 2, device="node:1"))
        with pytest.raises(IndexError, match="index out of range"):
            saves({"x": broken}, tmp_path / "c")
        assert not (tmp_path / "c").exists()


def hide(folder: str) -> None:
    """Has this thread of a node see another, empty file system in place of a folder."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(0x00020000):  # CLONE_NEWNS
        raise OSError(ctypes.get_errno(), "unshare")
    libc.mount(None, b"/", None, 0x44000, None)  # MS_PRIVATE, MS_REC
    if libc.mount(b"none", folder.encode(), b"tmpfs", 0, None):
        raise OSError(ctypes.get_errno(), "mount")


def unhide(folder: str) -> None:
    if ctypes.CDLL(None, use_errno=True).umount(folder.encode()):
        raise OSError(ctypes.get_errno(), "umount")


@pytest.mark.fault(47)
@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")
def test_a_node_that_does_not_see_the_folder(tmp_path: Path) -> None:
    x, shared = torch.ones(3, device="node:3"), tmp_path / "shared"
    shared.mkdir()
    save({"x": x}, shared / "c")
    dt.run(hide, str(shared), node=3)
    try:
        with pytest.raises(FileNotFoundError, match=r"host \S+ does not see the folder .*/new .*share") as raised:
            save({"x": x}, shared / "new")
        assert "on node 3" in said(raised.value)
        with pytest.raises(FileNotFoundError, match=r"host \S+ does not see .*/c/__3_"):
            load({"x": x}, shared / "c")
    finally:
        dt.run(unhide, str(shared), node=3)
    load({"x": x}, shared / "c")
    assert os.listdir(shared) == ["c"]


def mistakes(folder: Path) -> list[tuple[type[Exception], str, Callable[[], object]]]:
    model = nn.Linear(3, 2).to("node:0")
    save({"model": model}, folder / "c")
    (folder / "file").touch()
    (folder / "empty").mkdir()
    two = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
    groups = [{"params": p} for p in model.parameters()]
    save({"model": model, "optim": SGD(groups, lr=1.0)}, folder / "groups")
    sparse = torch.eye(3).to_sparse()
    return [
        (TypeError, "a state dict is a dict of", lambda: save([model], folder / "x")),  # type: ignore[arg-type]
        (TypeError, "within a dict or list", lambda: save({"a": {"model": model}}, folder / "x")),
        (TypeError, "layout torch.sparse_coo", lambda: save({"a": sparse}, folder / "x")),
        (ValueError, "no module of the state dict has", lambda: save({"o": SGD(two.parameters())}, folder / "x")),
        (
            ValueError,
            "two parameters that are called 'weight'",
            lambda: save({"a": two[0], "b": two[1], "o": SGD(two.parameters())}, folder / "x"),
        ),
        (TypeError, "check_replicas is True or False", lambda: save({}, folder / "x", check_replicas="no")),  # type: ignore[arg-type]
        (TypeError, "did you mean strict", lambda: load({}, folder / "c", stric=False)),  # type: ignore[call-arg]
        (FileExistsError, "file", lambda: save({"model": model}, folder / "file")),
        (FileNotFoundError, "there is no such folder", lambda: load({"model": model}, folder / "none")),
        (FileNotFoundError, "no .metadata", lambda: load({"model": model}, folder / "empty")),
        (KeyError, "did you mean 'model.weight'", lambda: load({"modell": model}, folder / "c")),
        (ValueError, r"\(3, 3\) here, and \(2, 3\) in", lambda: load({"model": nn.Linear(3, 3)}, folder / "c")),
        (
            ValueError,
            "has 1 groups of parameters here",
            lambda: load({"model": model, "optim": SGD(model.parameters(), lr=1.0)}, folder / "groups"),
        ),
        (
            ValueError,
            "group 0 of the optimizer 'optim' has other parameters",
            lambda: load({"model": model, "optim": SGD(groups[::-1], lr=1.0)}, folder / "groups"),
        ),
    ]


def test_mistakes_are_said(tmp_path: Path) -> None:
    for kind, text, does in mistakes(tmp_path):
        with pytest.raises(kind, match=text):
            does()
    assert sorted(os.listdir(tmp_path)) == ["c", "empty", "file", "groups"]


def test_views(tmp_path: Path) -> None:
    """Transposed, a column, conjugated, of another dtype: what it has is written; what is read is its base's."""
    bases = [torch.arange(6.0).view(2, 3).to(device) for device in ("node:1", "cpu")]
    complex_ = torch.tensor([1 + 2j, 3 - 4j]).to("node:1")
    state = {"t": bases[0].t(), "column": bases[1][:, 1], "conj": complex_.conj()}
    save(state, tmp_path / "c")
    dcp_to_torch_save(tmp_path / "c", tmp_path / "c.pt")
    found = torch.load(tmp_path / "c.pt")
    assert found["t"].tolist() == [[0, 3], [1, 4], [2, 5]]
    assert found["column"].tolist() == [1, 4]
    assert found["conj"].tolist() == [1 - 2j, 3 + 4j]
    for x in (*bases, complex_):
        x.zero_()
    load(state, tmp_path / "c")
    assert bases[0].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert bases[1].tolist() == [[0, 1, 0], [0, 4, 0]]
    assert complex_.tolist() == [1 + 2j, 3 - 4j]
    double = {"t": torch.zeros(3, 2, dtype=torch.float64, device="node:0")}
    load(double, tmp_path / "c")
    assert double["t"].tolist() == [[0, 3], [1, 4], [2, 5]]


def test_not_strict(tmp_path: Path) -> None:
    save({"a": torch.ones(2)}, tmp_path / "c")
    state = {"a": torch.zeros(2), "b": torch.full((2,), 5.0), "n": 3}
    load(state, tmp_path / "c", strict=False)
    assert (state["a"].tolist(), state["b"].tolist(), state["n"]) == ([1, 1], [5, 5], 3)


def test_nothing_that_is_on_a_node_passes_through_the_script(tmp_path: Path) -> None:
    """32 MB are saved and loaded; the script's data channels carry less than one of them."""
    x = torch.arange(1 << 22, device=mesh(dp=4).device, dtype=torch.float64)
    dt.synchronize()
    before = dt.channels.stats()
    save({"x": x}, tmp_path / "c")
    y = from_shards(mesh(dp=2), [torch.zeros(1 << 22, dtype=torch.float64, device=f"node:{i}") for i in (0, 1)])
    middle = dt.channels.stats()
    load({"x": y}, tmp_path / "c")
    after = dt.channels.stats()
    assert middle.sent.bytes - before.sent.bytes < 1 << 26  # from_shards' own copies, from node to node
    assert after.sent.bytes == middle.sent.bytes
    assert (y.at(dp=1) == torch.arange(1 << 22, device="node:1", dtype=torch.float64)).all().item()
