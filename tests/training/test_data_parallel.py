"""DataParallel against torch's DistributedDataParallel on the same nodes, by gloo: real nodes."""

from __future__ import annotations

import copy
import inspect
import itertools
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from equal import same
from mesh_kit import connected
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from training_programs import (
    Tied,
    Unused,
    adamw,
    clipped,
    evaluated,
    never_cleared,
    normed,
    plain,
    scaled,
    sgd,
    step,
    stepwise,
    train,
    unsynchronized,
    zeroed_in_place,
)

import disttensor as dt
from disttensor import mesh, shard
from disttensor.meshes import Mesh, from_shards
from disttensor.tasks import device_mesh
from disttensor.training import DataParallel, assert_replicas_equal

pytestmark = pytest.mark.usefixtures("settled")

NODES = 4
STEPS = 20


@pytest.fixture(scope="module", autouse=True)
def session() -> Iterator[None]:
    with connected(NODES):
        for n in (2, 3):
            # what is made at first use: before the tests look for leaks
            dt.run(dist.barrier, node=ranks(n), distributed=True)
        yield


def ranks(n: int) -> Mesh:
    return mesh(dp=n, nodes=list(range(n)))


# ---- against DDP -----------------------------------------------------------------------------------------------------


def both(
    m: Mesh,
    make: Any,
    optimizer: Any,
    fit: Any,
    dtype: torch.dtype = torch.float32,
    hook: Any = None,
    whole: bool = False,
    **options: Any,
) -> tuple[list[Any], list[list[torch.Tensor]]]:
    """The state after training with ours, and those of DDP's ranks."""

    def wrap(model: nn.Module) -> nn.Module:
        group = device_mesh().get_group("dp")
        made = DistributedDataParallel(model, process_group=group, find_unused_parameters=make is Unused)
        if hook is not None:
            made.register_comm_hook(group, hook)
        return made

    torch.manual_seed(1)
    x, y = torch.randn(STEPS, 12, 6, dtype=dtype), torch.randn(STEPS, 12, 3, dtype=dtype)
    xs, ys = shard(x, m, dp=1), shard(y, m, dp=1)
    theirs = dt.run(lambda x, y: train(make, wrap, optimizer, fit, x, y), xs, ys, node=m, distributed=True)
    options = {"bucket_mb": 1e-4, "whole": whole, **options}
    if whole:
        xs, ys = x.to(m.device), y.to(m.device)  # type: ignore[assignment]
    ours = train(make, lambda model: DataParallel(model.to(m.device), m, **options), optimizer, fit, xs, ys)
    return ours, [[value.cpu() for value in values] for values in theirs]


PROGRAMS: dict[str, tuple[Any, Any, Any]] = {
    "SGD": (plain, sgd, stepwise(step)),
    "AdamW": (plain, adamw, stepwise(step)),
    "BatchNorm": (normed, sgd, stepwise(step)),
    "BatchNorm, evaluated": (normed, sgd, evaluated),
    "unused parameters": (Unused, sgd, stepwise(step)),
    "unused parameters, zeroed in place": (Unused, adamw, stepwise(zeroed_in_place)),
    "unused parameters, no_sync": (Unused, sgd, unsynchronized),
    "tied weights": (Tied, sgd, stepwise(step)),
    "GradScaler": (plain, adamw, scaled),
    "clipping": (plain, sgd, stepwise(clipped)),
    "zeroed in place": (plain, sgd, stepwise(zeroed_in_place)),
    "never cleared": (plain, sgd, stepwise(never_cleared)),
    "no_sync": (plain, sgd, unsynchronized),
}


@pytest.mark.row("G17")
@pytest.mark.parametrize("program", PROGRAMS)
def test_on_two_ranks_it_has_ddps_bits(program: str) -> None:
    ours, theirs = both(ranks(2), *PROGRAMS[program])
    for i, value in enumerate(ours):
        for rank, got in enumerate(value.shards()):
            same(got, theirs[rank][i], strides=False)


@pytest.mark.parametrize("program", ["SGD", "AdamW", "BatchNorm", "GradScaler", "no_sync"])
def test_whole_batches_on_two_ranks_have_ddps_bits(program: str) -> None:
    ours, theirs = both(ranks(2), *PROGRAMS[program], whole=True)
    for i, value in enumerate(ours):
        for rank, got in enumerate(value.shards()):
            same(got, theirs[rank][i], strides=False)


@pytest.mark.parametrize("program", ["SGD", "AdamW", "BatchNorm", "unused parameters", "no_sync"])
def test_on_three_ranks_it_is_ddp_but_for_rounding(program: str) -> None:
    ours, theirs = both(ranks(3), *PROGRAMS[program], dtype=torch.float64)
    for i, value in enumerate(ours):
        for rank, got in enumerate(value.shards()):
            torch.testing.assert_close(got.cpu(), theirs[rank][i], rtol=1e-12, atol=1e-12)


@pytest.mark.row("T36")
@pytest.mark.parametrize("options", [{"bucket_mb": 25.0}, {"overlap": False}, {"bucket_mb": 4e-4}], ids=str)
def test_buckets_change_no_bits(options: dict[str, Any]) -> None:
    ours, theirs = both(ranks(2), *PROGRAMS["SGD"], **options)
    for value, wanted in zip(ours, theirs[0], strict=True):
        same(value, wanted, strides=False)


@pytest.mark.row("S10")
def test_a_transport_is_ddps_compression() -> None:
    """Gradients travel as bfloat16: on two ranks the bits of torch's own hook."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

    # by another name, as DDP refuses it by its own where there is no GPU
    hook = lambda group, bucket: bf16_compress_hook(group, bucket)  # noqa: E731
    ours, theirs = both(ranks(2), plain, sgd, stepwise(step), hook=hook, transport=torch.bfloat16)
    exact, _ = both(ranks(2), plain, sgd, stepwise(step))
    for value, wanted in zip(ours, theirs[0], strict=True):
        same(value, wanted, strides=False)
    assert not torch.equal(ours[0].cpu(), exact[0].cpu())


# ---- several passes --------------------------------------------------------------------------------------------------


def gradients(model: nn.Module) -> list[Any]:
    return [p.grad for p in model.parameters()]


def made(m: Mesh, **options: Any) -> tuple[nn.Module, DataParallel]:
    """A local model in double precision, and its copy on a mesh."""
    torch.manual_seed(0)
    local = plain().double()
    torch.manual_seed(0)
    return local, DataParallel(plain().double().to(m.device), m, **{"bucket_mb": 1e-4, **options})


def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


@pytest.mark.row("T34")
@pytest.mark.parametrize("op", ["avg", "sum"])
def test_accumulated_passes_are_one_with_a_large_batch(op: str) -> None:
    m = ranks(3)
    local, model = made(m, accumulate=4, op=op, bucket_mb=1e-6)
    x = torch.randn(24, 6, dtype=torch.float64)
    with dt.testing.MessageLog() as log:
        for part in x.chunk(4):
            loss(model, part).backward()
    assert sum(name.startswith("Collective") for name in log[0].commands) == 6  # one pass's: a bucket a parameter
    loss(local, x).backward()
    for got, wanted in zip(gradients(model), gradients(local), strict=True):
        torch.testing.assert_close(got.cpu(), wanted * (1 if op == "avg" else 12), rtol=1e-12, atol=1e-14)


def test_a_pass_with_several_losses_and_one_with_several_forwards() -> None:
    m = ranks(2)
    local, model = made(m)
    x = torch.randn(8, 6, dtype=torch.float64)
    loss(model, x).backward()
    (loss(model, x * 2) + loss(model, x * 3)).backward()  # adds to the mean of before
    for k in (1, 2, 3):
        loss(local, x * k).backward()
    for got, wanted in zip(gradients(model), gradients(local), strict=True):
        torch.testing.assert_close(got.cpu(), wanted, rtol=1e-12, atol=1e-14)


class WithLoss(nn.Module):
    """Computes its loss by itself, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.net = plain()

    def forward(
        self, x: torch.Tensor, labels: torch.Tensor, *, scale: torch.Tensor, num_items_in_batch: Any = None
    ) -> dict[str, Any]:
        out = self.net(x) * scale
        wrong = (out - labels).square()
        count = num_items_in_batch or wrong.numel()
        return {"loss": wrong.sum() / count, "out": out, "rows": len(x), "first": out[0]}


@pytest.mark.parametrize("count", [None, 17])
@pytest.mark.parametrize("rows", [8, 7])
@pytest.mark.parametrize("where", ["script", "mesh"])
def test_whole_batches_go_in_and_come_out(where: str, rows: int, count: int | None) -> None:
    """The loss is the whole batch's, and so are the outputs where there is no gradient. Seven rows do not divide."""
    m = mesh(dp=2, pp=2)
    torch.manual_seed(0)
    local = WithLoss().double()
    model = DataParallel(copy.deepcopy(local).to(m.device), m, over=("dp", "pp") if rows == 8 else "dp", whole=True)
    x, y = torch.randn(rows, 6, dtype=torch.float64), torch.randn(rows, 3, dtype=torch.float64)
    scale = torch.full((1, 3), 2.0, dtype=torch.float64)
    given = [t if where == "script" else t.to(m.device) for t in (x, y, scale)]
    with torch.no_grad():
        out, wanted = model(*given[:2], scale=given[2]), local(x, y, scale=scale)
    torch.testing.assert_close(out["out"].cpu(), wanted["out"])
    out = model(*given[:2], scale=given[2], num_items_in_batch=count)
    wanted = local(x, y, scale=scale, num_items_in_batch=count)
    torch.testing.assert_close(out["loss"].item(), wanted["loss"].item(), rtol=1e-12, atol=0)
    assert out["rows"] == len(out["out"]) == (2 if rows == 8 else 7)
    assert out["first"].shape == (3,)
    out["loss"].backward()
    wanted["loss"].backward()
    for got, grad in zip(gradients(model), gradients(local), strict=True):
        torch.testing.assert_close(got.cpu(), grad, rtol=1e-12, atol=1e-14)


def test_dropout_of_whole_batches() -> None:
    """Ranks draw other numbers for their parts, and the same where all have the whole batch."""
    m = ranks(2)
    model = DataParallel(nn.Sequential(nn.Linear(2, 64), nn.Dropout()).to(m.device), m, whole=True)
    with torch.no_grad():
        parts, all_rows = (model(torch.ones(rows, 2)).cpu() == 0 for rows in (4, 3))
    assert not torch.equal(parts[:2], parts[2:])
    assert 0 < all_rows.sum() < all_rows.numel()


def test_mistakes_of_whole_batches() -> None:
    m = ranks(2)
    model = DataParallel(WithLoss().to(m.device), m, whole=True)
    x, y = torch.ones(4, 6), torch.ones(4, 3)
    with pytest.raises(
        ValueError, match=r"the argument \['scale'\] has the shape \(3, 3\), and the batch has 4 samples"
    ):
        model(x, y, scale=torch.ones(3, 3))
    with pytest.raises(ValueError, match="an argument is on the mesh"):
        model(x.to(ranks(3).device), y, scale=torch.ones(1))
    with pytest.raises(ValueError, match="there are no shares"):
        model.shares = (1, 2)
    with pytest.raises(ValueError, match="op='sum' adds up"):
        DataParallel(plain().to(m.device), m, whole=True, op="sum")
    with pytest.raises(TypeError, match="whole is True or False"):
        DataParallel(plain().to(m.device), m, whole="batch")  # type: ignore[arg-type]


# ---- as the module


def test_the_signature_is_the_modules() -> None:
    m = ranks(2)
    module = WithLoss().to(m.device)
    model = DataParallel(module, m)
    assert inspect.signature(model.forward) == inspect.signature(module.forward)
    names = ["self", "x", "labels", "scale", "num_items_in_batch"]
    assert [*inspect.signature(type(model).forward).parameters] == names
    again = copy.deepcopy(model)
    assert inspect.signature(again.forward) == inspect.signature(module.forward)
    assert isinstance(again, DataParallel)
    assert type(again).__name__ == "DataParallel"

    class Mine(DataParallel):
        def forward(self, y: torch.Tensor) -> Any:
            return super().forward(y, y[:, :3], scale=torch.tensor(1.0))

    own = Mine(module, m)
    assert [*inspect.signature(own.forward).parameters] == ["y"]
    assert own(torch.ones(2, 6))["rows"] == 1
    sharded = dt.fully_shard(WithLoss(), m)
    assert inspect.signature(sharded.forward) == inspect.signature(module.forward)


def test_what_only_the_module_has() -> None:
    m = ranks(2)
    module = WithLoss().to(m.device)
    module.config = {"a": 1}  # type: ignore[assignment]
    module.register_buffer("_private", torch.ones(1))
    model = DataParallel(module, m)
    assert model.config is module.config
    assert model.net is module.net
    for name in ("_private", "nothing"):
        with pytest.raises(AttributeError, match=f"'DataParallel' object has no attribute '{name}'"):
            getattr(model, name)


def test_over_one_dim_of_two() -> None:
    """Ranks that differ along tp have parameters of their own, and gradients."""
    m = mesh(dp=2, tp=2)
    weights = [torch.randn(3, 2) for _ in range(2)]
    layer = nn.Linear(2, 3, bias=False).to(m.device)
    with torch.no_grad():
        layer.weight.copy_(from_shards(m, [weights[0], weights[1], weights[0] + 1, weights[1] + 1]))
    model = DataParallel(layer, m, "dp")
    x = torch.randn(4, 2)
    model(x).square().sum().backward()
    for tp, weight in enumerate(weights):
        wanted = (2 * (x @ weight.t()).t() @ x) / 2
        for dp in range(2):
            same(layer.weight.detach().at(dp=dp, tp=tp), weight)  # the first ones', along dp
            torch.testing.assert_close(layer.weight.grad.at(dp=dp, tp=tp).cpu(), wanted)  # type: ignore[union-attr]
    both_dims = DataParallel(nn.Linear(2, 3).to(m.device), m, ("dp", "tp"))
    assert both_dims(torch.randn(8, 2)).shape == (2, 3)


def test_arguments_of_any_kind() -> None:
    class Takes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))

        def forward(self, x: torch.Tensor, *, more: dict[str, Any], scale: float, zero: torch.Tensor) -> torch.Tensor:
            assert zero.dim() == 0
            return x * more["y"][0] * self.weight * scale

    m = ranks(2)
    model = DataParallel(Takes().to(m.device), m)
    x = torch.arange(8.0).reshape(4, 2)
    out = model(x, more={"y": [x.to("node:3")]}, scale=2.0, zero=torch.tensor(1.0))
    for got, part in zip(out.shards(), x.chunk(2), strict=True):
        same(got.detach(), part * part * 2)
    there = shard(x, m, dp=0)
    assert model(there, more={"y": [there]}, scale=1.0, zero=torch.tensor(1.0)).shape == (2, 2)


# ---- beside the backward pass ----------------------------------------------------------------------------------------


@pytest.mark.row("T34", "T36")
def test_each_bucket_is_reduced_before_later_gradients_are_computed() -> None:
    """The gradients of five layers' weights are products; before each collective so many of them were issued."""
    m = ranks(2)
    layers = [nn.Linear(16, 16, bias=False) for _ in range(5)]
    model = DataParallel(nn.Sequential(*layers).to(m.device), m, bucket_mb=1e-4)
    x = torch.randn(4, 16)
    model(x).sum().backward()
    with dt.testing.MessageLog() as log:
        model(x).sum().backward()
    names = log[0].commands
    products = list(itertools.accumulate(name == "Call aten::mm" for name in names))
    before = [products[i] for i, name in enumerate(names) if name.startswith("Collective all_reduce")]
    # autograd computes the gradients of a layer's weight and of its input together, and the first layer has one only
    assert before == [2, 4, 6, 8, 9]
    asynchronous = [bool(c.request) for c in log.issued()[0] if type(c).__name__ == "Collective"]
    assert asynchronous == [True] * 4 + [False]  # what comes next waits for the last one


@pytest.mark.row("T36")
def test_one_bucket_is_one_plain_collective() -> None:
    m = ranks(2)
    _, model = made(m, bucket_mb=25.0)
    x = torch.randn(4, 6, dtype=torch.float64)
    with dt.testing.MessageLog() as log:
        loss(model, x).backward()
    assert [bool(c.request) for c in log.issued()[0] if type(c).__name__ == "Collective"] == [False]
    flat = gradients(model)[0]._base
    assert [grad._base is flat for grad in gradients(model)] == [True] * 6
    assert len({grad.storage_offset() for grad in gradients(model)}) == 6


@pytest.mark.row("T36")
def test_what_comes_next_waits_for_all_buckets() -> None:
    """Large buckets, whose collectives take longer than what is issued behind them."""
    m = ranks(2)
    wide = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(3)))
    model = DataParallel(wide.to(m.device), m, bucket_mb=0.5)
    for i in range(3):
        model.zero_grad(set_to_none=bool(i % 2))
        x = m.coordinate("dp").float().expand(2, 512)
        sum((p * (x[0, 0] + 1)).sum() for p in model.parameters()).backward()  # type: ignore[union-attr]
        for p in model.parameters():
            assert (p.grad == 1.5).all().item(), i  # type: ignore[union-attr]
    loss(model, torch.randn(4, 512)).backward()
    assert_replicas_equal(gradients(model), bitwise=True)


def test_a_graph_replays_it() -> None:
    m = ranks(2)
    x = torch.randn(4, 6, dtype=torch.float64).to(m.device)

    def steps(replayed: bool) -> list[torch.Tensor]:
        _, model = made(m)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def one() -> None:
            optimizer.zero_grad(set_to_none=False)
            loss(model, x).backward()
            optimizer.step()

        one()
        if replayed:
            g = dt.Graph()
            with dt.graph(g):
                one()
            for _ in range(3):
                g.replay()
        else:
            for _ in range(3):
                one()
        return [p.detach().cpu() for p in model.parameters()]

    for got, wanted in zip(steps(True), steps(False), strict=True):
        assert torch.equal(got, wanted)


# ---- ranks with different numbers of samples -------------------------------------------------------------------------


def rows(m: Mesh, parts: list[torch.Tensor], most: int) -> tuple[Any, Any]:
    """Parts of different lengths as one tensor on a mesh, filled up, and which of its rows are real."""
    filled = [
        torch.cat([part, torch.full((most - len(part), *part.shape[1:]), 7.0, dtype=part.dtype)]) for part in parts
    ]
    return from_shards(m, filled), from_shards(m, [torch.arange(most) < len(part) for part in parts])


def mean_of_real(model: nn.Module, x: Any, real: Any) -> torch.Tensor:
    return (model(x).square().mean(1) * real).sum() / real.sum().clamp(min=1)


@pytest.mark.row("T32")
@pytest.mark.parametrize("bucket_mb", [25.0, 1e-6])
def test_uneven_parts_are_weighted(bucket_mb: float) -> None:
    """The gradient is that of one batch with the samples of all ranks."""
    m = ranks(3)
    local, model = made(m, bucket_mb=bucket_mb, shares=(4, 4, 4))
    for counts in ((5, 3, 1), (1, 0, 4), (2, 2, 2)):
        x = torch.randn(sum(counts), 6, dtype=torch.float64)
        model.zero_grad()
        local.zero_grad()
        model.shares = counts
        mean_of_real(model, *rows(m, list(x.split(counts)), 5)).backward()
        loss(local, x).backward()
        for got, wanted in zip(gradients(model), gradients(local), strict=True):
            torch.testing.assert_close(got.cpu(), wanted, rtol=1e-12, atol=1e-14)
    assert model.shares == (2, 2, 2)


def test_uneven_parts_of_several_passes_and_dims() -> None:
    m = mesh(dp=2, tp=2)
    torch.manual_seed(0)
    local = plain().double()
    torch.manual_seed(0)
    counts = (1, 2, 3, 2)  # of the ranks in the order of the dims that are named
    model = DataParallel(plain().double().to(m.device), m, ("tp", "dp"), shares=counts, accumulate=2)
    for _ in range(2):
        x = torch.randn(8, 6, dtype=torch.float64)
        parts = x.split(counts)
        at = [parts[0], parts[2], parts[1], parts[3]]  # dp=0 tp=0, dp=0 tp=1, dp=1 tp=0, dp=1 tp=1
        mean_of_real(model, *rows(m, at, 3)).backward()
        (loss(local, x) / 2).backward()
    for got, wanted in zip(gradients(model), gradients(local), strict=True):
        torch.testing.assert_close(got.cpu(), wanted, rtol=1e-12, atol=1e-14)


def test_an_epoch_whose_last_batch_is_filled_up() -> None:
    """The loader's counts are the shares: the parameters of one process that has the batches in one piece."""
    m = ranks(3)
    data = torch.utils.data.TensorDataset(torch.randn(16, 6, dtype=torch.float64))
    local, model = made(m)
    here = torch.optim.SGD(local.parameters(), lr=0.1)
    there = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = dt.data.distribute(data, m, batch_size=6, uneven="pad")
    for (x,), (y,) in zip(loader, torch.utils.data.DataLoader(data, 6), strict=True):
        model.shares = loader.counts
        real = from_shards(m, [torch.arange(len(x)) < n for n in loader.counts])
        there.zero_grad()
        mean_of_real(model, x, real).backward()
        there.step()
        here.zero_grad()
        loss(local, y).backward()
        here.step()
    assert loader.state_dict()["epoch"] == 1
    for got, wanted in zip(model.parameters(), local.parameters(), strict=True):
        torch.testing.assert_close(got.detach().cpu(), wanted.detach(), rtol=1e-12, atol=1e-14)


def test_shares_that_cannot_be() -> None:
    m = ranks(2)
    _, model = made(m)
    with pytest.raises(TypeError, match="shares are"):
        model.shares = ["a", "b"]
    for shares in ([1], [0, 0], [1, -1], [1, float("inf")]):
        with pytest.raises(ValueError, match=r"shares are 2 numbers of samples.*along dp of Mesh\(dp=2"):
            model.shares = shares
    with pytest.raises(ValueError, match="shares weigh a mean, and op is 'sum'"):
        made(m, op="sum", shares=(1, 2))
    with model.no_sync():
        loss(model, torch.randn(4, 6, dtype=torch.float64)).backward()
    with pytest.raises(RuntimeError, match="have not been reduced yet"):
        model.shares = (1, 2)
    loss(model, torch.randn(4, 6, dtype=torch.float64)).backward()
    model.shares = (1, 2)


@pytest.mark.row("T35")
def test_a_wait_for_the_gradients() -> None:
    m = ranks(2)
    _, model = made(m)
    model.wait()  # nothing is under way
    loss(model, torch.randn(4, 6, dtype=torch.float64)).backward()
    model.wait()
    x = torch.ones(4, 6, dtype=torch.float64)
    for other in (0, 9):  # the first time has signatures asked, which would raise it
        model.zero_grad()
        at = from_shards(m, [torch.tensor([0]), torch.tensor([other])])
        (loss(model, x) * x.to(m.device).index_select(0, at).mean()).backward()
    with pytest.raises((IndexError, RuntimeError), match=r"out of range|out of bounds"):
        model.wait()


@pytest.mark.row("T35")
@pytest.mark.parametrize("which", [0, -1])
def test_it_waits_for_all_buckets(which: int) -> None:
    """An error of one gradient only, that of the first bucket or of the last one."""
    m = ranks(2)
    _, model = made(m, bucket_mb=1e-6)
    x = torch.ones(4, 6, dtype=torch.float64)
    for other in (0, 9):  # the first time has signatures asked, which would raise it
        model.zero_grad()
        at = from_shards(m, [torch.tensor([0]), torch.tensor([other])])
        factor = x.to(m.device).index_select(0, at).mean()
        hook = list(model.parameters())[which].register_hook(lambda grad, factor=factor: grad * factor)
        loss(model, x).backward()
        hook.remove()
        if other == 0:
            model.wait()
    with pytest.raises((IndexError, RuntimeError), match=r"out of range|out of bounds"):
        model.wait()


def stand(began: str, on: str) -> None:
    """Stands still until it may go on."""
    with open(began, "w"):
        pass
    with open(on) as opened:
        opened.read()


@pytest.mark.row("T35")
@pytest.mark.parametrize("overlap", [True, False])
def test_it_waits_until_all_ranks_have_reduced(overlap: bool, tmp_path: Path) -> None:
    """While one node stands still ``wait()`` does not return; once it goes on the gradients are the mean's."""
    m = ranks(2)
    _, model = made(m, overlap=overlap)
    x = torch.randn(4, 6, dtype=torch.float64)
    loss(model, x).backward()
    expected = [p.grad.shards()[0].cpu() for p in model.parameters()]
    model.zero_grad()
    began, on = str(tmp_path / "began"), str(tmp_path / "on")
    os.mkfifo(began)
    os.mkfifo(on)
    standing = threading.Thread(target=dt.run, args=(stand, began, on), kwargs={"node": 1})
    standing.start()
    with open(began):
        loss(model, x).backward()
    returned = threading.Event()
    waiting = threading.Thread(target=lambda: (model.wait(), returned.set()))
    waiting.start()
    early = returned.wait(0.2)  # it cannot return, however long this waits
    with open(on, "w"):
        pass
    waiting.join()
    standing.join()
    assert not early
    assert returned.is_set()
    for p, grad in zip(model.parameters(), expected, strict=True):
        assert [torch.equal(shard.cpu(), grad) for shard in p.grad.shards()] == [True, True]


# ---- buffers, and what stays each rank's own -------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["first", "avg", None])
def test_buffers(how: str | None) -> None:
    m = ranks(2)
    model = DataParallel(nn.BatchNorm1d(1, momentum=1.0).to(m.device), m, buffers=how)
    x = torch.tensor([[1.0], [3.0], [10.0], [20.0]])
    model(x).sum().backward()
    assert [s.item() for s in model.module.running_mean.shards()] == [2, 15]  # type: ignore[union-attr]
    model.eval()
    model(x)
    wanted = {"first": [2, 2], "avg": [8.5, 8.5], None: [2, 15]}[how]
    assert [s.item() for s in model.module.running_mean.shards()] == wanted  # type: ignore[union-attr]


@pytest.mark.row("T35")
def test_what_is_skipped_stays_each_ranks_own() -> None:
    m = ranks(2)
    net = nn.Sequential(nn.Linear(2, 2, bias=False), nn.BatchNorm1d(2), nn.Linear(2, 1)).to(m.device)
    own = from_shards(m, [torch.eye(2), torch.eye(2) * 2])
    with torch.no_grad():
        net[0].weight.copy_(own)
    model = DataParallel(net, m, skip=["0.weight", "1"])
    for _ in range(2):
        model(torch.randn(8, 2)).square().sum().backward()
    model.eval()(torch.randn(8, 2))  # which would have all take the first one's statistics
    assert_replicas_equal([net[2].weight, net[2].weight.grad, net[2].bias.grad], bitwise=True)
    for values in (net[0].weight, net[0].weight.grad, net[1].weight.grad, net[1].running_mean):
        with pytest.raises(AssertionError, match="replicas differ"):
            assert_replicas_equal([values])


@pytest.mark.row("T31")
def test_ranks_begin_with_the_first_ones_parameters_and_buffers() -> None:
    m = ranks(3)
    with dt.meshes.varying("dp"):
        net = nn.BatchNorm1d(4).to(m.device)
        with torch.no_grad():
            net.weight.normal_()
            net.running_mean.normal_()  # type: ignore[union-attr]
    first = net.weight.detach().at(dp=0).cpu()  # type: ignore[attr-defined]
    with pytest.raises(AssertionError):
        assert_replicas_equal(net)
    DataParallel(net, m)
    assert_replicas_equal(net, bitwise=True)
    assert torch.equal(net.weight.detach().cpu(), first)


def test_forward_draws_other_numbers_on_each_rank() -> None:
    m = ranks(2)
    model = DataParallel(nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5)).to(m.device), m)
    one, other = (s.cpu() == 0 for s in model(torch.randn(2, 64)).detach().shards())
    assert not torch.equal(one, other)


# ---- mistakes and failures -------------------------------------------------------------------------------------------


def test_mistakes_at_the_construction() -> None:
    m = ranks(2)
    net = nn.Linear(2, 2).to(m.device)
    with pytest.raises(TypeError, match=r"'weight' is on cpu, and on no mesh; module\.to\(mesh\.device\)"):
        DataParallel(nn.Linear(2, 2), m)
    with pytest.raises(TypeError, match="'weight' is on node:1, and on no mesh"):
        DataParallel(nn.Linear(2, 2).to("node:1"), m)
    with pytest.raises(ValueError, match=r"'weight' is on the mesh \(dp=3\) .*, and not on Mesh\(dp=2"):
        DataParallel(nn.Linear(2, 2).to(ranks(3).device), m)
    with pytest.raises(ValueError, match="has no dim 'tp'; it has dp"):
        DataParallel(net, m, "tp")
    with pytest.raises(ValueError, match="over names no dim"):
        DataParallel(net, m, ())
    with pytest.raises(TypeError, match="takes a mesh"):
        DataParallel(net, "dp")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="takes a module, not list"):
        DataParallel([net], m)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="op 'max' is unknown"):
        DataParallel(net, m, op="max")
    with pytest.raises(ValueError, match="buffers 'last' is unknown"):
        DataParallel(net, m, buffers="last")
    for wrong in (0, -1, True, 1.5):
        with pytest.raises(ValueError, match="accumulate is a positive number"):
            DataParallel(net, m, accumulate=wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="bucket_mb is a positive number of megabytes, not 0"):
        DataParallel(net, m, bucket_mb=0)
    with pytest.raises(TypeError, match="transport is a dtype of floats"):
        DataParallel(net, m, transport=torch.int8)
    with pytest.raises(ValueError, match=r"skip names 'wieght', .* did you mean 'weight'"):
        DataParallel(net, m, skip=["wieght"])
    with pytest.raises(TypeError, match=r"skip=\['weight'\]"):
        DataParallel(net, m, skip="weight")
    with pytest.raises(ValueError, match="no parameter of the module requires a gradient"):
        DataParallel(nn.Linear(2, 2).to(m.device).requires_grad_(False), m)


def test_mistakes_of_a_forward_pass() -> None:
    m = ranks(3)
    model = DataParallel(nn.Linear(2, 2).to(m.device), m)
    with pytest.raises(ValueError, match=r"8 rows .* \(8, 2\) do not divide among dp=3, .* leave 2 rows out"):
        model(torch.ones(8, 2))
    with pytest.raises(ValueError, match=r"an argument is on the mesh \(dp=2\)"):
        model(torch.ones(6, 2).to(ranks(2).device))
    model.module.weight = nn.Parameter(model.module.weight.detach().clone())
    with pytest.raises(RuntimeError, match=r"'weight' .* was added or replaced when its buckets were made"):
        model(torch.ones(6, 2))
    frozen = nn.Linear(2, 2).to(m.device)
    frozen.bias.requires_grad_(False)
    model = DataParallel(frozen, m)
    frozen.bias.requires_grad_(True)
    with pytest.raises(RuntimeError, match=r"'bias' .* did not require a gradient when"):
        model(torch.ones(6, 2))
    model = DataParallel(nn.Linear(2, 2).to(m.device), m)
    model.double()
    with pytest.raises(RuntimeError, match=r"'weight' \(torch.float64.* was torch.float32 when"):
        model(torch.ones(6, 2, dtype=torch.float64))


def test_mistakes_of_a_backward_pass() -> None:
    from torch.utils.checkpoint import checkpoint

    m = ranks(2)
    model = DataParallel(nn.Embedding(4, 2, sparse=True).to(m.device), m)
    with pytest.raises(TypeError, match=r"gradient of 'weight' is torch\.sparse_coo, .*sparse=False"):
        model(torch.arange(4)).sum().backward()
    _, model = made(m)
    with pytest.raises(RuntimeError, match="has a gradient itself"):
        loss(model, torch.ones(2, 6, dtype=torch.float64)).backward(create_graph=True)
    for order in (1, -1):  # whichever comes first
        _, model = made(m)
        layers = list(model.module)[::2]  # type: ignore[call-overload]
        x = torch.ones(2, 6, dtype=torch.float64, device=m.device, requires_grad=True)
        parts = [nn.Sequential(*layers[:1]), nn.Sequential(*layers[1:])]
        hidden = parts[0](x) if order == 1 else checkpoint(parts[0], x, use_reentrant=True)
        out = checkpoint(parts[1], hidden, use_reentrant=True) if order == 1 else parts[1](hidden)
        with pytest.raises(RuntimeError, match="use_reentrant=False"):
            out.sum().backward()


def test_checkpoints_that_are_not_reentrant() -> None:
    from torch.utils.checkpoint import checkpoint

    m = ranks(2)
    local, model = made(m)
    inner = model.module
    x = torch.randn(4, 6, dtype=torch.float64)

    class Saved(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> Any:
            return checkpoint(self.inner, x, use_reentrant=False)

    loss(Saved(), shard(x, m, dp=0)).backward()
    loss(local, x).backward()
    for got, wanted in zip(gradients(model), gradients(local), strict=True):
        torch.testing.assert_close(got.cpu(), wanted, rtol=1e-12, atol=1e-14)


def test_after_a_pass_that_failed_the_next_one_is_right() -> None:
    m = ranks(2)
    local, model = made(m)
    x = torch.randn(4, 6, dtype=torch.float64)

    def broken(grad: torch.Tensor) -> None:
        raise KeyError("mine")

    handle = model.module[2].weight.register_hook(broken)  # type: ignore[index]
    with pytest.raises(KeyError, match="mine"):
        loss(model, x).backward()
    handle.remove()
    model.zero_grad()
    loss(model, x).backward()
    loss(local, x).backward()
    for got, wanted in zip(gradients(model), gradients(local), strict=True):
        torch.testing.assert_close(got.cpu(), wanted, rtol=1e-12, atol=1e-14)


@pytest.mark.row("T35")
def test_without_its_data_parallel_a_module_is_itself_again() -> None:
    m = ranks(2)
    _, model = made(m)
    net = model.module
    del model
    with dt.testing.MessageLog() as log:
        loss(net, torch.ones(2, 6, dtype=torch.float64, device=m.device)).backward()
    assert [name for name in log[0].commands if name.startswith("Collective")] == []


@pytest.mark.parametrize("set_to_none", [True, False])
def test_an_error_on_one_rank_is_that_of_all_gradients(set_to_none: bool) -> None:
    m = ranks(2)
    _, model = made(m)
    x = torch.ones(4, 6, dtype=torch.float64)
    for other in (0, 9):  # the first time has signatures asked, which would raise it
        model.zero_grad(set_to_none)
        at = from_shards(m, [torch.tensor([0]), torch.tensor([other])])
        (loss(model, x) * x.to(m.device).index_select(0, at).mean()).backward()
    for grad in gradients(model):
        for rank in range(2):
            with pytest.raises((IndexError, RuntimeError), match=r"out of range|out of bounds"):
                grad.shards()[rank].cpu()
    net = model.module
    del model, grad  # the buckets stay poisoned
    made_anew = DataParallel(net, m)
    made_anew.zero_grad()
    loss(made_anew, x).backward()
    assert_replicas_equal(gradients(made_anew), bitwise=True)
