"""Torch's FSDP2 (``torch.distributed.fsdp.fully_shard``) over a dim of ``mesh.torch``, in one script: the weights of
one process after three steps of AdamW, and whole parameters only while they are used."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import disttensor as dt
from disttensor.errors import RanksDiffer

node: Any = torch.node  # type: ignore[attr-defined]
NODES, STEPS = 4, 3
#: What three steps of AdamW make of another order of sums, in float64.
CLOSE = 1e-12


@pytest.fixture(scope="module", autouse=True)
def session() -> Iterator[None]:
    with dt.init_master_worker(nodes=NODES, launcher="inproc"):
        yield


@pytest.fixture(autouse=True)
def no_group() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def net() -> nn.Sequential:
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 8, bias=False))
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), inner, nn.LayerNorm(8)).double()


def rows(seed: int) -> torch.Tensor:
    return torch.randn(8, 8, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def cut(x: torch.Tensor, mesh: Any, names: tuple[str, ...]) -> torch.Tensor:
    """The rows, cut along some dims of a mesh together."""
    over = [mesh.size(mesh.names.index(name)) for name in names]
    parts = x.chunk(torch.Size(over).numel())
    index = torch.zeros(mesh.shape, dtype=torch.int64)
    for name, size in zip(names, over, strict=True):
        at = torch.arange(size).view([size if other == name else 1 for other in mesh.names])
        index = index * size + at
    return dt.meshes.from_shards(mesh, [parts[i] for i in index.flatten().tolist()])


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (model(x) - y).square().mean()


def step(model: nn.Module, x: torch.Tensor, y: torch.Tensor, clip: bool = False) -> None:
    loss_of(model, x, y).backward()
    if clip:
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)


def in_two(model: Any, x: torch.Tensor, y: torch.Tensor, put: Callable[[Any, bool], None]) -> None:
    """Two backward passes a step, of which the last one reduces."""
    for last in (False, True):
        put(model, last)
        (loss_of(model, x, y) / 2).backward()


def trained(model: nn.Module, x: torch.Tensor, y: torch.Tensor, one: Callable[..., None] = step) -> nn.Module:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        one(model, x, y)
        optimizer.step()
    return model


def apart(model: nn.Module, wanted: nn.Module) -> float:
    found = [p.full_tensor().cpu() if isinstance(p, DTensor) else p.cpu() for p in model.parameters()]
    return max((a - b).abs().max().item() for a, b in zip(found, wanted.parameters(), strict=True))


def sharded(model: nn.Module, mesh: Any, **options: Any) -> Any:
    for part in (model[2], model):  # type: ignore[index]
        fully_shard(part, mesh=mesh, **options)
    return model


def prefetching(model: Any) -> None:
    model.set_modules_to_forward_prefetch([model[2]])
    model.set_modules_to_backward_prefetch([model[2]])
    model.unshard(async_op=True).wait()
    model.reshard()
    model.set_reshard_after_forward(True)
    model.set_unshard_in_backward(True)
    model.set_is_last_backward(True)
    if hasattr(model, "set_reduce_scatter_unused_params"):  # not in torch 2.11
        model.set_reduce_scatter_unused_params(True)
    model.set_post_optim_event(node.Event())


def gradient_sync(model: Any, last: bool) -> None:
    model.set_requires_gradient_sync(last)
    model.set_reshard_after_backward(last)


OPTIONS: dict[str, dict[str, Any]] = {
    **{f"reshard_after_forward={value}": {"reshard_after_forward": value} for value in (True, False, 2)},
    "cut in dim 1": {"shard_placement_fn": lambda p: Shard(1) if p.ndim > 1 else None},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_weights_are_those_of_one_process(options: dict[str, Any]) -> None:
    mesh = dt.mesh(dp=NODES)
    model = sharded(net().to(mesh.device), mesh.torch["dp"], **options)
    assert all(isinstance(p, DTensor) and p.to_local().numel() == p.numel() // NODES for p in model.parameters())
    trained(model, cut(rows(1), mesh, ("dp",)), cut(rows(2), mesh, ("dp",)))
    assert apart(model, trained(net(), rows(1), rows(2))) < CLOSE


SET: dict[str, Callable[[Any], None]] = {
    "prefetching": prefetching,
    "set_gradient_divide_factor": lambda model: model.set_gradient_divide_factor(float(NODES)),
    "set_force_sum_reduction_for_comms": lambda model: model.set_force_sum_reduction_for_comms(True),
    "set_all_reduce_hook": lambda model: model.set_all_reduce_hook(lambda grad: grad.mul_(1)),
}


@pytest.mark.parametrize("change", SET.values(), ids=SET)
def test_set_methods(change: Callable[[Any], None]) -> None:
    mesh = dt.mesh(dp=NODES)
    model = sharded(net().to(mesh.device), mesh.torch)
    change(model)
    trained(model, cut(rows(1), mesh, ("dp",)), cut(rows(2), mesh, ("dp",)))
    assert apart(model, trained(net(), rows(1), rows(2))) < CLOSE


@pytest.mark.parametrize("rest", ["local", "meta"])
def test_a_model_that_is_not_on_the_mesh_yet(rest: str) -> None:
    mesh, values = dt.mesh(dp=NODES), net().state_dict()
    with torch.device("meta" if rest == "meta" else "cpu"):
        model = net()
    sharded(model, mesh.torch)
    if rest == "meta":
        model.to_empty(device=mesh.device)
        for name, p in model.named_parameters():
            assert isinstance(p, DTensor)
            p.to_local().detach().copy_(cut(values[name], mesh, ("dp",)))
    trained(model, cut(rows(1), mesh, ("dp",)), cut(rows(2), mesh, ("dp",)))
    assert apart(model, trained(net(), rows(1), rows(2))) < CLOSE


def test_clipping_and_two_backward_passes() -> None:
    mesh = dt.mesh(dp=NODES)
    x, y = cut(rows(1), mesh, ("dp",)), cut(rows(2), mesh, ("dp",))
    clipped = trained(sharded(net().to(mesh.device), mesh.torch), x, y, lambda *a: step(*a, clip=True))
    wanted = trained(net(), rows(1), rows(2), lambda *a: step(*a, clip=True))
    assert apart(clipped, wanted) < CLOSE < apart(clipped, trained(net(), rows(1), rows(2)))
    twice = trained(sharded(net().to(mesh.device), mesh.torch), x, y, lambda *a: in_two(*a, gradient_sync))
    assert apart(twice, trained(net(), rows(1), rows(2))) < CLOSE


@pytest.mark.parametrize("twice", [False, True], ids=["one pass", "reduced along rep in the last"])
def test_replicas_of_shards(twice: bool) -> None:
    """HSDP, and batches that differ along both dims."""
    mesh = dt.mesh(rep=2, dp=2)
    model = sharded(net().to(mesh.device), mesh.torch)
    x, y = (cut(rows(seed), mesh, ("rep", "dp")) for seed in (1, 2))
    one = (lambda *a: in_two(*a, lambda m, last: m.set_requires_all_reduce(last))) if twice else step
    trained(model, x, y, one)
    assert apart(model, trained(net(), rows(1), rows(2))) < CLOSE
    parts = [part.cpu() for part in model[0].weight.to_local().shards()]
    assert torch.equal(parts[0], parts[2])
    assert torch.equal(parts[1], parts[3])
    assert not torch.equal(parts[0], parts[1])


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")  # torch's, of RowwiseParallel's output
def test_with_tensor_parallel() -> None:
    mesh = dt.mesh(dp=2, tp=2)
    model = net().to(mesh.device)
    parallelize_module(model[2], mesh.torch["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    sharded(model, mesh.torch["dp"])
    trained(model, cut(rows(1), mesh, ("dp",)), cut(rows(2), mesh, ("dp",)))
    wanted = trained(net(), rows(1), rows(2))
    assert apart(model, wanted) < CLOSE
    with dt.node(mesh.device):  # for torch the place of "node"
        whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    for name, value in wanted.state_dict().items():
        assert torch.allclose(whole[name].cpu(), value, rtol=0, atol=CLOSE)


def test_mixed_precision() -> None:
    """Parameters are gathered in float32, gradients are summed in float64."""
    mesh, seen = dt.mesh(dp=NODES), []
    policy = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float64)
    model = sharded(net().to(mesh.device), mesh.torch, mp_policy=policy)
    model[2][0].register_forward_hook(lambda module, args, out: seen.append((module.weight.dtype, out.dtype)))
    x, y = cut(rows(1), mesh, ("dp",)), cut(rows(2), mesh, ("dp",))
    (model(x).double() - y).square().mean().backward()
    assert seen == [(torch.float32, torch.float32)]
    low = net().float()
    (low(rows(1).float()).double() - rows(2)).square().mean().backward()
    for mine, theirs in zip(model.parameters(), low.parameters(), strict=True):
        assert mine.grad.dtype == torch.float64
        assert torch.allclose(mine.grad.full_tensor().cpu(), theirs.grad.double(), atol=1e-6)  # type: ignore[union-attr]


# ---- memory


WIDE, BLOCKS = 128, 4


def blocks() -> nn.Sequential:
    made = [nn.Sequential(nn.Linear(WIDE, 4 * WIDE), nn.GELU(), nn.Linear(4 * WIDE, WIDE)) for _ in range(BLOCKS)]
    return nn.Sequential(*made).double()


def held(mesh: Any, wrap: Callable[[Any], object]) -> tuple[int, int, int]:
    """A node's bytes over those of before: after a forward pass, at its peak, and at the peak of the second step."""
    gc.collect()
    dt.synchronize()
    before = node.memory_allocated(0)
    model = blocks().to(mesh.device)
    wrap(model)
    gc.collect()
    x = torch.ones(4, WIDE, dtype=torch.float64, device=mesh.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        dt.synchronize()
        node.reset_peak_memory_stats(0)
        out = model(x)
        dt.synchronize()
        forward = node.memory_allocated(0) - before, node.max_memory_allocated(0) - before
        out.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        del out
    dt.synchronize()
    return (*forward, node.max_memory_allocated(0) - before)


def test_whole_parameters_are_freed() -> None:
    mesh = dt.mesh(nodes=[0, 1], dp=2)

    def torchs(model: Any) -> None:
        for block in (*model, model):
            fully_shard(block, mesh=mesh.torch, reshard_after_forward=True)

    def ours(model: Any) -> None:
        for block in (*model, model):
            dt.fully_shard(block, mesh)

    whole = sum(p.numel() * p.itemsize for p in blocks().parameters())
    after, peak, of_step = held(mesh, torchs)
    dist.destroy_process_group()
    after_ours, peak_ours, _ = held(mesh, ours)
    assert after < 1.1 * after_ours < 1.1 * 0.6 * whole
    assert peak < 1.1 * peak_ours
    # the parts and their gradients; a block's parameters, their gradients, and half of that on its way to be reduced
    assert of_step < whole + 2.75 * whole / BLOCKS


def test_a_step_asks_the_nodes_nothing() -> None:
    """It is issued while they are behind: no question, such as for the size of a memory, is among its commands."""
    mesh = dt.mesh(dp=NODES)
    model = sharded(net().to(mesh.device), mesh.torch)
    x, y = cut(rows(1), mesh, ("dp",)), cut(rows(2), mesh, ("dp",))
    trained(model, x, y)
    with dt.testing.MessageLog() as log:
        trained(model, x, y)
    assert [log[rank].questions for rank in range(NODES)] == [[]] * NODES


# ---- refused


REFUSED: dict[str, tuple[Callable[[Any], object], type[Exception], str]] = {
    "sizes that ranks do not divide": (
        lambda m: fully_shard(nn.Linear(6, 6).to(m.device), mesh=m.torch), RanksDiffer,
        "fully_shard: the ranks of the mesh (dp=4) of nodes 0, 1, 2 and 3 cpu would have parts of 0, 2 of 6 entries",
    ),
    "fewer than ranks": (
        lambda m: fully_shard(nn.Linear(4, 2).to(m.device), mesh=m.torch), RanksDiffer, "parts of 0, 1 of 2 entries",
    ),
    "an offload": (
        lambda m: fully_shard(nn.Linear(4, 4).to(m.device), mesh=m.torch, offload_policy=CPUOffloadPolicy()),
        NotImplementedError, "they stay on their nodes without it",
    ),
    "no mesh": (
        lambda m: dist.fsdp.fully_shard(nn.Linear(4, 4).to(m.device)), TypeError, "fully_shard(model, mesh=mesh.torch)",
    ),
    "memory of the group's": (
        lambda m: with_memory_of_its_group(sharded(net().to(m.device), m.torch)), TypeError, "memory of its own",
    ),
    "recorded": (
        lambda m: recorded(sharded(net().to(m.device), m.torch)), NotImplementedError, "dt.fully_shard(model, mesh)",
    ),
}  # fmt: skip
if hasattr(FSDPModule, "set_separate_reduce_scatter_group"):  # not in torch 2.11
    REFUSED["another group"] = (
        lambda m: sharded(net().to(m.device), m.torch).set_separate_reduce_scatter_group(True), RanksDiffer,
        "torch.distributed.new_group",
    )  # fmt: skip


def with_memory_of_its_group(model: Any) -> None:
    model.set_allocate_memory_from_process_group_for_comm(True)
    model(torch.ones(2, 8, dtype=torch.float64, device=model[0].weight.to_local().device))


def recorded(model: Any) -> None:
    x = torch.ones(2, 8, dtype=torch.float64, device=model[0].weight.to_local().device)
    model(x)
    with dt.graph(dt.Graph()):
        model(x)


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    call, kind, words = REFUSED[name]
    with pytest.raises(kind, match=re.escape(words)):
        call(dt.mesh(dp=NODES))


def test_a_module_is_torchs() -> None:
    mesh = dt.mesh(dp=NODES)
    model = sharded(net().to(mesh.device), mesh.torch)
    assert isinstance(model, FSDPModule)
    assert str(model[0].weight.device) == str(mesh.device)
