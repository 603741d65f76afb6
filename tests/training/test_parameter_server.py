"""Parameter servers over real nodes: shards of any size, rules, whose push holds up whom, memory, losses."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from limits import HANG
from stream_kit import thread
from torch import nn

import disttensor as dt
from disttensor.training import ParameterServer

pytestmark = pytest.mark.usefixtures("settled")

NODES = 3
SIZE = (911, 101)


@pytest.fixture(scope="module", autouse=True)
def session() -> Iterator[None]:
    with dt.init_master_worker(nodes=NODES, threads=1):
        for source in range(NODES):
            for target in range(NODES):
                torch.ones(1 << 14, device=f"node:{source}").to(f"node:{target}").cpu()
        dt.fetch(torch.ones(1, device="node:0")).add_done_callback(
            lambda work: None
        )  # its thread stays for the session
        yield


def each(size: tuple[int, ...] = SIZE) -> list[torch.Tensor]:
    """Values of each node's own."""
    return [torch.full(size, float(k), device=f"node:{k}") for k in range(NODES)]


def of_shards(size: tuple[int, ...] = SIZE) -> torch.Tensor:
    """What there is when shard k has the value k."""
    numel = torch.Size(size).numel()
    parts = torch.empty(numel).tensor_split(NODES)
    return torch.cat([torch.full_like(part, float(k)) for k, part in enumerate(parts)]).view(size)


@pytest.mark.row("T38")
@pytest.mark.parametrize("size", [SIZE, (7,), (2,), ()], ids=str)
def test_shard_k_begins_with_the_values_of_node_k(size: tuple[int, ...]) -> None:
    with ParameterServer(each(size), init="each") as server:
        assert torch.equal(server.pull(), of_shards(size))
        assert [shard[0].get_node() for shard in server.shards()] == [0, 1, 2]
        sizes = [shard[0].numel() for shard in server.shards()]
        assert sum(sizes) == torch.Size(size).numel()
        assert max(sizes) - min(sizes) <= 1


@pytest.mark.row("T43")
def test_shards_of_a_mesh_and_of_the_first() -> None:
    mesh = dt.mesh(dp=2, nodes=[2, 1])
    mine = dt.meshes.from_shards(mesh, [torch.zeros(5), torch.ones(5)])
    with ParameterServer(mine, nodes=[0, 1], init="each") as server:
        assert server.pull().tolist() == [0, 0, 0, 1, 1]
    with ParameterServer(mine, nodes=["node:2"]) as server:
        assert server.pull().tolist() == [0] * 5


@pytest.mark.row("T39", "T40", "T41")
def test_zero_copy_and_add_by_all_a_hundred_times() -> None:
    with ParameterServer(each(), init="each") as server:
        for turn in range(100):
            server.push(rule="zero", async_op=True).wait(HANG)
            server.push(torch.full(SIZE, float(turn), device=f"node:{turn % NODES}"), "copy", async_op=True).wait(HANG)
            works = [server.push(x, async_op=True) for x in each()]
            server.push(each()[0] + 100, "none")
            for work in works:
                work.wait(HANG)
            if turn in (0, 99):
                assert torch.equal(server.pull(), torch.full(SIZE, turn + 3.0))
                for node in range(NODES):
                    there = server.pull(node=node, async_op=True)
                    assert there.result(HANG).get_node() == node
                    assert torch.equal(there.result().cpu(), torch.full(SIZE, turn + 3.0))
        assert server.version == 600


RULES = {"halve": lambda shard, value: shard.mul_(0.5).sub_(value), "most": lambda s, v: torch.maximum(s, v, out=s)}


@pytest.mark.row("T39")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.bfloat16], ids=str)
def test_rules(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    first, a, b = (torch.randn(13, 5).mul(9).to(dtype) for _ in range(3))
    rules = dict(RULES) if dtype.is_floating_point else {"most": RULES["most"]}
    scale = -0.5 if dtype.is_floating_point else 3
    with ParameterServer([first], rules=rules) as server:
        server.push([a.to("node:1")], scale=scale)
        wanted = first.clone().add_(a, alpha=scale)
        assert torch.equal(server.pull()[0], wanted)
        server.push([b.to("node:2")], "most")
        wanted = torch.maximum(wanted, b)
        assert torch.equal(server.pull()[0], wanted)
        if "halve" in rules:
            server.push([a], "halve")  # from the script
            wanted = wanted.clone().mul_(0.5).sub_(a)
            assert torch.equal(server.pull()[0], wanted)
        server.push([b.to("node:0")], "copy", scale=scale)
        assert torch.equal(server.pull()[0], (b * scale).to(dtype))


@pytest.mark.row("T53")
def test_gradients_of_parts_are_those_of_the_whole_batch() -> None:
    """Zero, add by all, and a pull by each, in the script's order: without barriers."""
    torch.manual_seed(3)
    here = nn.Linear(4, 3).double()
    x = torch.randn(6, 4, dtype=torch.float64)
    nets = [copy.deepcopy(here).to(f"node:{k}") for k in range(NODES)]
    with ParameterServer(here) as server:
        for _ in range(3):
            here.zero_grad()
            here(x).square().mean().backward()
            server.push(rule="zero")
            for net, rows in zip(nets, x.chunk(NODES), strict=True):
                net.zero_grad()
                net(rows.to(net.weight.device)).square().mean().backward()
                server.push([p.grad for p in net.parameters()])
            for net in nets:
                total = server.pull(node=net.weight.device)
                for (name, p), q in zip(net.named_parameters(), here.parameters(), strict=True):
                    mean = total[name].div(NODES)
                    torch.testing.assert_close(mean.cpu(), q.grad, rtol=1e-12, atol=1e-14)
                    p.data.sub_(mean, alpha=0.1)
            for q in here.parameters():
                q.data.sub_(q.grad, alpha=0.1)  # type: ignore[arg-type]


@pytest.mark.row("T43", "T44")
def test_modules_of_several_dtypes_are_pushed_preprocessed_and_integrated() -> None:
    torch.manual_seed(2)
    net = nn.ModuleDict({"a": nn.Linear(4, 3), "b": nn.Linear(3, 2).double(), "c": nn.LayerNorm(3)})
    with torch.no_grad():
        wanted = {name: p.clone() for name, p in net.named_parameters()}
    worker = nn.ModuleDict({name: nn.Linear(1, 1) for name in ()})
    worker = net  # its parameters move, in two halves as a pipeline has them
    with ParameterServer(net, nodes=[2, 0]) as server:
        worker["a"].to("node:0")
        worker["b"].to("node:1")
        worker["c"].to("node:0")
        server.push(worker, preprocess=lambda p: p.sign(), scale=2.0)
        got = server.pull()
        assert list(got) == list(wanted)
        for name, value in wanted.items():
            assert torch.equal(got[name], value + 2 * value.sign()), name
        server.pull(into=worker, integrate=lambda own, value: own.sub_(value))
        for name, p in worker.named_parameters():
            assert torch.equal(p.detach().cpu(), wanted[name] - got[name]), name
        server.pull(into=worker)
        assert all(torch.equal(p.detach().cpu(), got[name]) for name, p in worker.named_parameters())


@pytest.mark.row("T44")
def test_a_pull_begun_earlier_has_the_values_of_then() -> None:
    x = torch.zeros(1000, device="node:1")
    with ParameterServer(x) as server:
        early = server.pull(into=x, async_op=True)
        server.push(torch.ones(1000, device="node:2"))
        assert server.pull().sum().item() == 1000
        x += 7
        assert early.result() is x
        assert x.sum().item() == 0


def hold(here: str, go: str) -> None:
    for path in (here, go):
        open(path, "rb").close()


@pytest.mark.row("T39", "T41")
def test_a_slow_workers_push_holds_up_nobody(tmp_path: Path) -> None:
    here, go = str(tmp_path / "here"), str(tmp_path / "go")
    os.mkfifo(here)
    os.mkfifo(go)
    unrelated = torch.ones(10, device="node:0")
    server, other = ParameterServer(torch.zeros(10), nodes=[0]), ParameterServer(torch.zeros(10), nodes=[0])
    holder = thread(lambda: dt.run(hold, here, go, node=1))
    open(here, "wb").close()
    try:
        slow = server.push(torch.ones(10, device="node:1"), async_op=True)
        other.push(torch.ones(10, device="node:1"))  # in the script's order: only what uses this server's shard waits
        for _ in range(20):
            assert server.push(torch.ones(10, device="node:2"), async_op=True).wait(HANG / 4)
        assert server.pull(async_op=True).result(HANG / 4).tolist() == [20] * 10
        assert dt.fetch(unrelated.add_(1)).result(HANG / 4).tolist() == [2] * 10
        late = server.pull(node=1, async_op=True)
        for work in (slow, late):
            assert not work.is_completed()
            with pytest.raises(TimeoutError):
                work.wait(0.01)
    finally:
        open(go, "wb").close()
        holder.join()
    assert slow.result(HANG) == 21
    assert late.wait(HANG)
    assert late.result().tolist() == [20] * 10  # the values of then
    assert server.pull().tolist() == [21] * 10
    assert other.pull().tolist() == [1] * 10
    server.close()
    other.close()


def test_a_push_that_fails_leaves_the_shards_as_they_are() -> None:
    with ParameterServer(torch.zeros(10), nodes=[0, 2]) as server:
        index = torch.tensor([99], device="node:1")
        broken = nn.functional.embedding(index, torch.zeros(3, 10, device="node:1"))[0]
        work = server.push(broken, async_op=True)
        assert isinstance(work.exception(HANG), IndexError)
        with pytest.raises(IndexError):
            work.result()
        assert server.version == 0
        assert server.pull().tolist() == [0] * 10
        server.push(torch.ones(10, device="node:1"))
        assert server.pull().tolist() == [1] * 10


def test_states_go_to_other_nodes() -> None:
    net = nn.Linear(5, 3)
    with ParameterServer(net, nodes=[0, 1]) as server, ParameterServer(nn.Linear(5, 3), nodes=[2]) as other:
        server.push(net, scale=2.0)
        state = server.state_dict()
        assert state["version"] == 1
        other.load_state_dict(state)
        assert other.version == 1
        assert all(torch.equal(other.pull()[name], value) for name, value in state["values"].items())
        with pytest.raises(ValueError, match="'extra'"):
            other.load_state_dict({"values": {**state["values"], "extra": torch.ones(1)}, "version": 1})


@pytest.mark.row("T42")
def test_memory_is_back_after_close() -> None:
    dt.synchronize()
    before = [torch.node.memory_allocated(f"node:{k}") for k in range(NODES)]  # type: ignore[attr-defined]
    server = ParameterServer(torch.ones(SIZE))
    for k in range(NODES):
        server.push(torch.ones(SIZE, device=f"node:{k}"))
        server.push(torch.ones(SIZE, device=f"node:{k}"), async_op=True).wait(HANG)
        server.pull(node=k)
    dt.synchronize()
    held = [torch.node.memory_allocated(f"node:{k}") - before[k] for k in range(NODES)]  # type: ignore[attr-defined]
    assert held == [shard[0].nbytes for shard in server.shards()]
    server.close()
    server.close()
    dt.synchronize()
    assert [torch.node.memory_allocated(f"node:{k}") for k in range(NODES)] == before  # type: ignore[attr-defined]
    with pytest.raises(dt.DisttensorError, match="was closed"):
        server.pull()
    with pytest.raises(dt.DisttensorError, match="was closed"):
        server.push(torch.ones(SIZE))


MISTAKES: dict[str, tuple[Any, type[Exception], str]] = {
    "shape": (lambda s: s.push([torch.ones(3)]), ValueError, r"push: 0 is \(3,\), and \(4,\) at the server"),
    "number": (lambda s: s.push([torch.ones(4)] * 2), ValueError, "2 tensors, and the server has 1"),
    "rule": (lambda s: s.push([torch.ones(4)], "ad"), ValueError, "not 'ad'; did you mean 'add'"),
    "scale": (lambda s: s.push([torch.ones(4)], "zero", scale=2.0), ValueError, "scale=2.0 is for 'add' and 'copy'"),
    "nothing": (lambda s: s.push(), TypeError, "rule 'add' needs values"),
    "no tensor": (lambda s: s.push([3]), TypeError, "0 has to be a tensor, not int"),
    "a mesh": (
        lambda s: s.push([torch.ones(4).to(dt.mesh(dp=2, nodes=[0, 1]).device)]),
        ValueError,
        r"whose ranks may differ; x.at\(dp=0\)",
    ),
    "integrate": (lambda s: s.pull(integrate=print), TypeError, "integrate is for values that go into others"),
    "no node": (lambda s: s.pull(node=9), ValueError, "9"),
    "nodes": (lambda s: ParameterServer(torch.ones(2), nodes=[1, 1]), ValueError, r"different ones, not \[1, 1\]"),
    "init": (lambda s: ParameterServer(torch.ones(2), init="all"), ValueError, "not 'all'"),
    "each": (lambda s: ParameterServer(each()[:2], init="each"), ValueError, "values of each of 3 nodes, not 2"),
    "no tensors": (lambda s: ParameterServer([]), ValueError, "no tensors"),
    "a rule's name": (lambda s: ParameterServer(torch.ones(2), rules={"add": print}), ValueError, r"rules\['add'\]"),
}


@pytest.mark.row("T42")
@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_raise_here_and_change_nothing(mistake: str) -> None:
    do, kind, text = MISTAKES[mistake]
    with ParameterServer([torch.ones(4)], nodes=[1]) as server:
        with pytest.raises(kind, match=text):
            do(server)
        assert server.version == 0
        assert server.pull()[0].tolist() == [1] * 4
