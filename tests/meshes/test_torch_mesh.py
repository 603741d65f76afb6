"""``mesh.torch``: torch's DeviceMesh over a mesh, its process groups, and torch.distributed called in the script."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed import checkpoint
from torch.distributed.checkpoint import state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import disttensor as dt
from disttensor.errors import DisttensorError, RanksDiffer

#: Torch has newer names for some of its functions.
pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")

NODES = 4


@pytest.fixture(scope="module", autouse=True)
def session() -> Iterator[None]:
    with dt.init_master_worker(nodes=NODES, launcher="inproc"):
        yield


@pytest.fixture(autouse=True)
def ended() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def grid() -> dt.meshes.Mesh:
    return dt.mesh(dp=2, tp=2)


def at_ranks(value: Any) -> list[Any]:
    """What each rank has: of a tensor on the mesh, a number of ranks, several of them, or what is the same for all."""
    if isinstance(value, functional.AsyncCollectiveTensor):
        value = value.wait()
    if isinstance(value, torch.Tensor):
        return [x.cpu().tolist() for x in value.shards()] if value.device.type == "node" else [value.tolist()] * NODES
    if isinstance(value, (list, tuple)):
        return [list(each) for each in zip(*map(at_ranks, value), strict=True)]
    return list(value.node.values) if isinstance(value, torch.SymInt) else [value] * NODES


# ---- what torchrun's ranks have, which the rank is an argument of


def lines(names: tuple[str, ...]) -> Callable[[int], tuple[int, ...]]:
    """The ranks of the group of a rank along dims of the 2 x 2 mesh."""
    known = {("dp",): ((0, 2), (1, 3)), ("tp",): ((0, 1), (2, 3)), ("dp", "tp"): ((0, 1, 2, 3),)}[names]
    return lambda rank: next(line for line in known if rank in line)


def start() -> list[torch.Tensor]:
    return [torch.arange(4.0).view(4, 1) + 10 * rank for rank in range(NODES)]


def xs() -> Any:
    return dt.meshes.from_shards(grid(), start())


def written(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    x = xs()
    call(x, *args, **kwargs)
    return x


def into(shape: tuple[int, ...], call: Callable[[Any], Any]) -> Any:
    out = torch.empty(shape, device=grid().device)
    call(out)
    return out


def several(call: Callable[[list[Any]], Any], shape: tuple[int, ...]) -> Any:
    outs = [torch.empty(shape, device=grid().device) for _ in range(2)]
    call(outs)
    return torch.cat(outs)


def summed(rank: int, group: tuple[int, ...]) -> torch.Tensor:
    return sum(start()[r] for r in group)  # type: ignore[return-value]


def part(x: torch.Tensor, i: int, n: int) -> torch.Tensor:
    return x.chunk(n)[i]


#: By name: the call with a group, and what a rank in a group has afterwards.
CALLS: dict[str, tuple[Callable[[Any], Any], Callable[[int, tuple[int, ...]], Any]]] = {
    "all_reduce": (lambda g: written(dist.all_reduce, group=g), summed),
    "all_reduce max": (lambda g: written(dist.all_reduce, dist.ReduceOp.MAX, g), lambda r, g: start()[max(g)]),
    "all_reduce avg": (lambda g: written(dist.all_reduce, dist.ReduceOp.AVG, g), lambda r, g: summed(r, g) / len(g)),
    "all_reduce async": (lambda g: written(lambda x: dist.all_reduce(x, group=g, async_op=True).wait()), summed),
    "broadcast": (lambda g: written(dist.broadcast, group=g, group_src=1), lambda r, g: start()[g[1]]),
    "broadcast by its rank": (
        lambda g: written(dist.broadcast, dist.get_global_rank(g, 1), g), lambda r, g: start()[g[1]],
    ),
    "reduce_scatter": (
        lambda g: into((4 // g.size(), 1), lambda o: dist.reduce_scatter(o, list(xs().chunk(g.size())), group=g)),
        lambda r, g: part(summed(r, g), g.index(r), len(g)),
    ),
    "all_to_all_single": (
        lambda g: into((4, 1), lambda o: dist.all_to_all_single(o, xs(), group=g)),
        lambda r, g: torch.cat([part(start()[other], g.index(r), len(g)) for other in g]),
    ),
    "functional all_reduce": (lambda g: functional.all_reduce(xs(), "sum", g), summed),
    "functional all_gather": (
        lambda g: functional.all_gather_tensor(xs(), 0, g), lambda r, g: torch.cat([start()[other] for other in g]),
    ),
    "functional reduce_scatter": (
        lambda g: functional.reduce_scatter_tensor(xs(), "avg", 0, g),
        lambda r, g: part(summed(r, g), g.index(r), len(g)) / len(g),
    ),
    "functional all_to_all": (
        lambda g: functional.all_to_all_single(xs(), None, None, g),
        lambda r, g: torch.cat([part(start()[other], g.index(r), len(g)) for other in g]),
    ),
    "functional broadcast": (lambda g: functional.broadcast(xs(), 1, g), lambda r, g: start()[g[1]]),
    "get_rank": (lambda g: dist.get_rank(g), lambda r, g: g.index(r)),
    "ProcessGroup.rank": (lambda g: g.rank(), lambda r, g: g.index(r)),
    "get_world_size": (lambda g: dist.get_world_size(g), lambda r, g: len(g)),
    "get_global_rank": (lambda g: dist.get_global_rank(g, 1), lambda r, g: g[1]),
    "get_group_rank": (lambda g: dist.get_group_rank(g, dist.get_rank()), lambda r, g: g.index(r)),
    "get_process_group_ranks": (lambda g: dist.get_process_group_ranks(g), lambda r, g: list(g)),
}  # fmt: skip


def group_of(m: DeviceMesh, names: tuple[str, ...]) -> Any:
    return m.get_group(names[0]) if len(names) == 1 else m._flatten("flat").get_group()


@pytest.mark.parametrize("names", [("dp",), ("tp",), ("dp", "tp")], ids="-".join)
@pytest.mark.parametrize("name", CALLS)
def test_each_rank_has_what_it_has_under_torchrun(name: str, names: tuple[str, ...]) -> None:
    call, wanted = CALLS[name]
    found = at_ranks(call(group_of(grid().torch, names)))
    for rank in range(NODES):
        own = wanted(rank, lines(names)(rank))
        assert found[rank] == (own.tolist() if isinstance(own, torch.Tensor) else own)


def test_lists_of_tensors() -> None:
    g, of = grid().torch.get_group("dp"), lines(("dp",))
    gathered = at_ranks(several(lambda outs: dist.all_gather(outs, xs(), group=g), (4, 1)))
    halves = at_ranks(several(lambda outs: dist.all_to_all(outs, list(xs().chunk(2)), group=g), (2, 1)))
    for rank in range(NODES):
        line = of(rank)
        assert gathered[rank] == torch.cat([start()[other] for other in line]).tolist()
        assert halves[rank] == torch.cat([part(start()[other], line.index(rank), 2) for other in line]).tolist()


def test_one_tensor_for_all() -> None:
    g, of = grid().torch.get_group("tp"), lines(("tp",))
    gathered = at_ranks(into((8, 1), lambda o: dist.all_gather_into_tensor(o, xs(), group=g)))
    scattered = at_ranks(into((2, 1), lambda o: dist.reduce_scatter_tensor(o, xs(), group=g)))
    for rank in range(NODES):
        line = of(rank)
        assert gathered[rank] == torch.cat([start()[other] for other in line]).tolist()
        assert scattered[rank] == part(summed(rank, line), line.index(rank), 2).tolist()


def test_functional_collectives_have_gradients() -> None:
    x = xs().requires_grad_()
    (functional.all_gather_tensor_autograd(x, 0, grid().torch.get_group("dp")) * 3).sum().backward()
    assert at_ranks(x.grad) == [[[6.0]] * 4] * NODES


# ---- the mesh


def test_it_is_torchs_own() -> None:
    m = grid()
    assert m.torch is m.torch
    assert isinstance(m.torch, DeviceMesh)
    assert (m.torch.mesh_dim_names, m.torch.shape, m.torch.device_type) == (("dp", "tp"), (2, 2), "node")
    assert m.torch.mesh.tolist() == [[0, 1], [2, 3]]
    assert at_ranks(m.torch.get_coordinate()) == [[0, 0], [0, 1], [1, 0], [1, 1]]
    assert at_ranks(m.torch.get_local_rank("tp")) == [0, 1, 0, 1]
    assert at_ranks(m.torch.get_rank()) == [0, 1, 2, 3]


def test_its_dims_by_name() -> None:
    m = grid()
    for tp in (m.torch["tp"], m["tp"].torch):
        assert (tp.mesh_dim_names, tp.shape) == (("tp",), (2,))
        assert at_ranks(tp.get_local_rank()) == [0, 1, 0, 1]
        assert at_ranks(tp.mesh) == [[0, 1], [0, 1], [2, 3], [2, 3]]
        assert tp.get_group() is m.torch.get_group("tp")
    assert m.torch.get_all_groups() == [m.torch.get_group("dp"), m.torch.get_group("tp")]
    with pytest.raises(KeyError):
        m.torch["pp"]


def test_flat_and_split() -> None:
    m = grid()
    flat = m.torch._flatten("both")
    assert at_ranks(flat.get_local_rank()) == [0, 1, 2, 3]
    assert flat.get_group() is dist.GroupMember.WORLD
    again = m.flatten("all").torch._unflatten(0, (2, 2), ("outer", "inner"))
    assert at_ranks(again["outer"].get_local_rank()) == [0, 0, 1, 1]
    three = dt.mesh(dp=2, tp=2).split(tp=("cp", "in"), cp=2).torch
    assert at_ranks(three["dp", "in"]._flatten("apart").get_local_rank()) == [0, 0, 1, 1]


@pytest.mark.parametrize("names", [("dp", "tp"), None], ids=["named", "bare"])
def test_init_device_mesh_makes_it(names: tuple[str, ...] | None) -> None:
    made = init_device_mesh("node", (2, 2), mesh_dim_names=names)
    assert at_ranks(made.get_coordinate()) == [[0, 0], [0, 1], [1, 0], [1, 1]]
    m = grid() if names else dt.mesh(dim_0=2, dim_1=2)
    x = dt.meshes.from_shards(m, start())
    dist.all_reduce(x, group=made.get_group(0))
    assert at_ranks(x) == [summed(rank, lines(("dp",))(rank)).tolist() for rank in range(NODES)]
    assert m.torch.get_group(0) is made.get_group(0)


def test_a_device_mesh_of_other_nodes() -> None:
    with pytest.raises(ValueError, match="there are 4 nodes"):
        init_device_mesh("node", (3,))
    with pytest.raises(ValueError, match=r"in order, not \[0, 2, 1, 3\]; dt.mesh"):
        DeviceMesh("node", [[0, 2], [1, 3]])
    assert not dist.is_initialized()


# ---- the default process group


def test_the_mesh_alone_makes_no_process_group() -> None:
    m = grid()
    assert m["dp"].size() == 2
    assert not dist.is_initialized()
    _ = m.torch
    assert dist.is_initialized()
    assert (dist.get_backend(), dist.get_world_size()) == ("node", NODES)


def test_it_goes_with_the_mesh() -> None:
    m = dt.mesh(a=2, b=2)
    _ = m.torch
    m.close()
    assert not dist.is_initialized()


def test_there_is_one_at_a_time() -> None:
    _ = grid().torch
    with pytest.raises(DisttensorError, match=r"there is that of the mesh \(dp=2, tp=2\).*destroy_process_group\(\)"):
        _ = dt.mesh(other=4).torch
    dist.destroy_process_group()
    assert dt.mesh(other=4).torch.shape == (4,)
    dist.destroy_process_group()
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    with pytest.raises(DisttensorError, match="there is one of 'gloo'"):
        _ = grid().torch


def test_after_its_end_another_is_made() -> None:
    first = grid().torch
    dist.destroy_process_group()
    assert grid().torch is not first
    assert at_ranks(grid().torch.get_local_rank("dp")) == [0, 0, 1, 1]


# ---- refusals


def test_tensors_that_are_not_the_meshs() -> None:
    g = grid().torch.get_group("dp")
    other = torch.ones(2, device=dt.mesh(nodes=[0, 1], x=2).device)
    for x, words in (
        (torch.ones(2), "the script's own, and the script is none of the ranks. x.to(mesh.device)"),
        (torch.ones(2, device="node:1"), "on node 1 cpu; x.to(mesh.device) has it on all ranks; dt.collectives takes"),
        (other, "on the mesh (x=2) of nodes 0 and 1 cpu; x.to(mesh.device)"),
    ):
        for call in (dist.all_reduce, lambda x, group: dist.broadcast(x, group=group, group_src=0)):
            with pytest.raises(TypeError, match=re.escape(words)):
                call(x, group=g)
        with pytest.raises(TypeError, match=re.escape(words)):
            functional.all_reduce(x, "sum", g)


def test_a_group_of_processes() -> None:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    name = dist.GroupMember.WORLD.group_name  # type: ignore[union-attr]
    with pytest.raises(TypeError, match=r"one of processes.*mesh.torch.get_group\(dim\)"):
        torch.ops._c10d_functional.all_reduce(xs(), "sum", name)
    with pytest.raises(TypeError, match=r"dt.all_reduce\(x, ..., over='dp'\)"):
        dist.all_reduce(xs())


ANOTHER_CALL: dict[str, tuple[Callable[[Any], Any], str]] = {
    "send": (lambda x: dist.send(x, 1), "dt.collectives.permute_ranks"),
    "recv": (lambda x: dist.recv(x, 1), "dt.collectives.permute_ranks"),
    "isend": (lambda x: dist.isend(x, 1), "dt.collectives.permute_ranks"),
    "batch": (lambda x: dist.batch_isend_irecv([dist.P2POp(dist.isend, x, 1)]), "dt.collectives.permute_ranks"),
    "gather": (lambda x: dist.gather(x, dst=0), "torch.distributed.all_gather"),
    "scatter": (lambda x: dist.scatter(x, src=0), "dt.shard(t, mesh, dp=0)"),
    "broadcast_object_list": (lambda x: dist.broadcast_object_list([1], 0), "dt.run(fn, obj, node=mesh)"),
    "gather_object": (lambda x: dist.gather_object(1, None, 0), "dt.run(fn, node=mesh)"),
    "new_group": (lambda x: dist.new_group([0, 1]), "mesh.torch.get_group(dim)"),
    "new_subgroups": (lambda x: dist.new_subgroups(2), "mesh.torch.get_group(dim)"),
    "split_group": (lambda x: dist.split_group(split_ranks=[[0, 1], [2, 3]]), "mesh.torch.get_group(dim)"),
}


@pytest.mark.parametrize(("call", "words"), ANOTHER_CALL.values(), ids=ANOTHER_CALL)
def test_what_each_rank_would_call_otherwise(call: Callable[[Any], Any], words: str) -> None:
    _ = grid().torch
    with pytest.raises((RanksDiffer, TypeError), match=f"at once: .*{re.escape(words)}"):
        call(xs())


def test_a_global_rank_that_is_in_one_line_only() -> None:
    g = grid().torch.get_group("dp")
    with pytest.raises(ValueError, match="Global rank 0 is not part of group <process group of 2 ranks along dp"):
        dist.broadcast(xs(), 0, g)


def test_sizes_that_do_not_fit() -> None:
    g = grid().torch.get_group("dp")
    with pytest.raises(ValueError, match="2 ranks do not divide 3"):
        torch.ops._c10d_functional.reduce_scatter_tensor(xs()[:3], "sum", 2, g.group_name)
    with pytest.raises(ValueError, match="2 ranks do not divide 3"):
        into((1, 1), lambda o: dist.all_to_all_single(o, xs()[:3], group=g))
    with pytest.raises(ValueError, match="all parts have one size"):
        functional.all_to_all_single(xs(), [3, 1], [3, 1], g)
    with pytest.raises(ValueError, match="1 tensors for 2 ranks"):
        dist.all_gather([xs()], xs(), group=g)


def test_a_barrier_waits_for_no_rank_of_the_script() -> None:
    _ = grid().torch
    dist.barrier()
    dist.barrier(grid().torch.get_group("dp"))


# ---- plain local programs, with it and without


def saved(**how: Any) -> Any:
    """What torch.distributed.checkpoint has written and read."""
    found = {"a": torch.zeros(2)}
    with tempfile.TemporaryDirectory() as folder:
        checkpoint.save({"a": torch.ones(2)}, checkpoint_id=folder, **how)
        checkpoint.load(found, checkpoint_id=folder, **how)
    return found["a"].tolist()


def written_by_torch() -> Any:
    with tempfile.TemporaryDirectory() as folder:
        torch.save({"a": torch.ones(2)}, f"{folder}/x")
        return torch.load(f"{folder}/x")["a"].tolist()


def synchronized() -> Any:
    layer = torch.nn.SyncBatchNorm(2)
    out = layer(torch.arange(8.0).view(4, 2))
    return out.tolist(), layer.running_mean.tolist(), layer.num_batches_tracked.item()  # type: ignore[union-attr]


def model_state() -> Any:
    return sorted(state_dict.get_model_state_dict(torch.nn.Linear(2, 2)))


def compiled() -> Any:
    return torch.compile(torch.nn.ReLU(), backend="eager")(torch.ones(2)).tolist()


def traced() -> Any:
    """A program whose operand is a size that torch traces."""
    graph = make_fx(lambda x: x + x.shape[0] * x, tracing_mode="symbolic")(torch.ones(3))
    return graph(torch.ones(5)).tolist()


def loader() -> Any:
    return [x.tolist() for (x,) in DataLoader(TensorDataset(torch.arange(6)), batch_size=4)]


def sampled() -> Any:
    return list(DistributedSampler(TensorDataset(torch.arange(6)), num_replicas=2, rank=1, shuffle=False))


@pytest.mark.filterwarnings("ignore:.*(single process|TypedStorage|non-distributed)")
@pytest.mark.parametrize(
    "program",
    [
        loader,
        sampled,
        synchronized,
        traced,
        written_by_torch,
        model_state,
        compiled,
        lambda: saved(no_dist=True),
    ],
)
def test_local_programs_are_as_without(program: Callable[[], Any]) -> None:
    without = program()
    _ = grid().torch
    assert program() == without


@pytest.mark.parametrize(
    "program",
    [saved, lambda: list(DistributedSampler(TensorDataset(torch.arange(6))))],
    ids=["torch.distributed.checkpoint", "DistributedSampler"],
)
def test_local_programs_that_ask_for_the_scripts_rank(program: Callable[[], Any]) -> None:
    _ = grid().torch
    with pytest.raises(RanksDiffer, match=r"another one on each rank.*destroy_process_group\(\) ends"):
        program()


def test_a_local_model_is_no_replica_of_the_ranks() -> None:
    _ = grid().torch
    with pytest.raises(TypeError, match="the script's own"):
        torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))


def test_statistics_of_a_batch_go_along_the_group() -> None:
    m, rows = grid(), torch.randn(8, 3)
    layers = [torch.nn.SyncBatchNorm(3, process_group=group).to(m.device) for group in ("dp", m.torch.get_group("dp"))]
    by_name, by_group = (at_ranks(layer(dt.shard(rows, m, dp=0))) for layer in layers)
    assert by_group == by_name
