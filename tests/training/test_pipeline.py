"""Pipeline against a local twin that computes the same sums in the same order, and torch.distributed.pipelining."""

from __future__ import annotations

import gc
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from equal import bits
from mesh_kit import connected
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.utils.checkpoint import checkpoint
from torch_schedules import THEIRS, torchs_order

import disttensor as dt
from disttensor.training import Pipeline

pytestmark = pytest.mark.usefixtures("settled")

NODES = 4
DOUBLE = torch.float64


@pytest.fixture(scope="module", autouse=True)
def session() -> Iterator[None]:
    with connected(NODES):
        # what is made at first use: before the tests look for leaks
        dt.run(dist.barrier, node=dt.mesh(dp=NODES), distributed=True)
        yield


# ---- modules, and their twin -----------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def blocks() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), Block(8), nn.Sequential(nn.Tanh(), Block(8)), nn.Linear(8, 3))


def seeded(make: Callable[[], nn.Sequential], dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(0)
    return make().to(dtype)


def nodes(stages: int) -> list[str]:
    return [f"node:{k}" for k in range(stages)]


def twin_step(model: nn.Module, x: Any, y: Any, loss_fn: Any, microbatches: int) -> torch.Tensor:
    """A step of the unsplit module: micro-batches one after the other, weighted by their rows."""
    total: Any = 0
    rows = y.shape[0]
    for part, wanted in zip(x.tensor_split(microbatches), y.tensor_split(microbatches), strict=True):
        loss = loss_fn(model(part), wanted) * (len(wanted) / rows)
        loss.backward()
        total = total + loss.detach()
    return total


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.02)


def fit(model: nn.Module, optimizer: Any, step: Callable[[Any, Any], torch.Tensor], x: Any, y: Any) -> list[Any]:
    """The losses of some steps with other batches, and the weights afterwards."""
    found: list[Any] = []
    made = optimizer(model)
    for batch, target in zip(x, y, strict=True):
        made.zero_grad()
        found.append(step(batch, target))
        made.step()
    return found + [value.detach() for value in model.state_dict().values()]


def same_bits(ours: list[Any], theirs: list[Any]) -> None:
    assert len(ours) == len(theirs)
    for i, (value, wanted) in enumerate(zip(ours, theirs, strict=True)):
        got = value.detach().cpu()
        assert got.dtype == wanted.dtype, i
        assert bits(got) == bits(wanted), f"{i}: {got} and {wanted}"


def batches(steps: int, rows: int, dtype: torch.dtype, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(steps, rows, 6, dtype=dtype, generator=random)
    return x, torch.randn(steps, rows, 3, dtype=dtype, generator=random)


# ---- training --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", [sgd, adamw])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("rows", [16, 14])
def test_ten_steps_have_the_twins_bits(schedule: str, optimizer: Any, rows: int) -> None:
    """With 14 rows micro-batches have 4, 4, 3 and 3."""
    x, y = batches(10, rows, DOUBLE)
    local, model = seeded(blocks, DOUBLE), seeded(blocks, DOUBLE)
    pipeline = Pipeline(model, nodes(4), microbatches=4, schedule=schedule)
    ours = fit(pipeline, optimizer, lambda x, y: pipeline.step(x, y, F.mse_loss), x, y)
    theirs = fit(local, optimizer, lambda x, y: twin_step(local, x, y, F.mse_loss, 4), x, y)
    same_bits(ours, theirs)
    assert list(pipeline.state_dict()) == list(local.state_dict())


@pytest.mark.parametrize("optimizer", [sgd, adamw])
def test_ten_steps_are_those_of_whole_batches_but_for_rounding(optimizer: Any) -> None:
    x, y = batches(10, 14, DOUBLE)
    local, model = seeded(blocks, DOUBLE), seeded(blocks, DOUBLE)
    pipeline = Pipeline(model, nodes(4), microbatches=4)
    ours = fit(pipeline, optimizer, lambda x, y: pipeline.step(x, y, F.mse_loss), x, y)
    theirs = fit(local, optimizer, lambda x, y: twin_step(local, x, y, F.mse_loss, 1), x, y)
    for value, wanted in zip(ours, theirs, strict=True):
        torch.testing.assert_close(value.cpu(), wanted, rtol=1e-12, atol=1e-12)


PLACES = {
    "one": ["node:2"],
    "round robin": ["node:1", "node:3"] * 2,
    "side by side": ["node:1", "node:1", "node:0", "node:0"],
    "backwards": [3, "node:2", 1, "node:0"],
}


@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_places_in_any_order(places: str, schedule: str) -> None:
    x, y = batches(2, 9, DOUBLE)
    local, model = seeded(blocks, DOUBLE), seeded(blocks, DOUBLE)
    stages = model if len(PLACES[places]) == 4 else [model]
    pipeline = Pipeline(stages, PLACES[places], microbatches=3, schedule=schedule)
    same_bits(
        fit(pipeline, sgd, lambda x, y: pipeline.step(x, y, F.mse_loss), x, y),
        fit(local, sgd, lambda x, y: twin_step(local, x, y, F.mse_loss, 3), x, y),
    )


@pytest.mark.parametrize("microbatches", [1, 2, 3])
def test_fewer_microbatches_than_stages(microbatches: int) -> None:
    x, y = batches(1, 6, DOUBLE)
    local, model = seeded(blocks, DOUBLE), seeded(blocks, DOUBLE)
    pipeline = Pipeline(model, nodes(4), microbatches=microbatches)
    same_bits(
        fit(pipeline, sgd, lambda x, y: pipeline.step(x, y, F.mse_loss), x, y),
        fit(local, sgd, lambda x, y: twin_step(local, x, y, F.mse_loss, microbatches), x, y),
    )


# ---- against torch ---------------------------------------------------------------------------------------------------


def theirs(schedule: str, x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    """On a rank: the losses of three steps, on the last one, and the gradients of the rank's stage."""
    torch.manual_seed(0)
    rank, size = dist.get_rank(), dist.get_world_size()
    stage = PipelineStage(blocks().double()[rank], rank, size, torch.device("cpu"))
    run = THEIRS[schedule](stage, 4, loss_fn=F.mse_loss)
    found: list[torch.Tensor] = []
    for batch, target in zip(x, y, strict=True):
        stage.submod.zero_grad()
        losses: list[torch.Tensor] = []
        if rank == 0:
            run.step(batch)
        elif rank == size - 1:
            run.step(target=target, losses=losses)
        else:
            run.step()
        found += [sum(loss.detach() for loss in losses) / len(losses)] if losses else []
        found += [p.grad.clone() for p in stage.submod.parameters()]
    return found


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_losses_and_gradients_have_the_bits_of_torchs_pipelining(schedule: str) -> None:
    """With four micro-batches of a size, where a mean is a sum times a power of two."""
    x, y = batches(3, 12, DOUBLE)
    each = dt.run(theirs, schedule, x, y, node=dt.mesh(pp=NODES), distributed=True)
    pipeline = Pipeline(seeded(blocks, DOUBLE), nodes(4), microbatches=4, schedule=schedule)
    wanted = [[value.cpu() for value in values] for values in each]
    for batch, target in zip(x, y, strict=True):
        pipeline.zero_grad()
        loss = pipeline.step(batch, target, F.mse_loss)
        assert bits(loss.cpu()) == bits(wanted[-1].pop(0))
        for rank, stage in enumerate(pipeline.children()):
            for p in stage.parameters():
                assert bits(p.grad.cpu()) == bits(wanted[rank].pop(0))  # type: ignore[union-attr]
    assert not any(wanted)


#: An activation for each micro-batch, whose forward and backward operators are like no other's.
MARKS: list[Callable[[torch.Tensor], torch.Tensor]] = [
    torch.tanh, torch.sigmoid, F.softplus, F.elu, F.silu, F.leaky_relu, F.hardtanh, F.mish,
]  # fmt: skip
NAMES = ["tanh", "sigmoid", "softplus", "elu", "silu", "leaky_relu", "hardtanh", "mish"]


class Marked(nn.Module):
    """Treats each micro-batch by an operator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return MARKS[self.calls - 1](x * self.weight)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_each_node_is_sent_the_order_of_torchs_schedule(schedule: str) -> None:
    """What is recorded on the wire, command by command: which pass of which micro-batch."""
    pipeline = Pipeline([Marked() for _ in range(4)], nodes(4), microbatches=8, schedule=schedule)
    with dt.testing.MessageLog() as log:
        pipeline.step(torch.randn(8, 3), torch.randn(8, 3), F.mse_loss)
    for k in range(4):
        found, sends = [], []
        for name in log[k].commands:
            operator = name.removeprefix("Call aten::").partition(".")[0]
            mark = operator.removesuffix("_backward").removesuffix("_")
            if name.startswith("Call aten::") and mark in NAMES:
                found.append(f"{k}{'B' if operator.endswith('_backward') else 'F'}{NAMES.index(mark)}")
            elif name == "Send":
                sends.append(found[-1])
        assert found == torchs_order(schedule, k, 4, 8)
        # what a node has made leaves before it goes on: activations but the last's, gradients but the first's
        assert sends == [each for each in found if (k < 3 if "F" in each else k > 0)]


class Held(nn.Module):
    """Keeps 1 MiB for its backward pass, and looks at what its node holds then."""

    def __init__(self, node: int, held: list[float]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.node, self.held = node, held

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = (x * self.weight).tanh_()
        del x
        self.held.append(dt.testing.usage(self.node).bytes / 2**20)
        return y


@pytest.mark.parametrize(("schedule", "most"), [("1f1b", [4, 3, 2, 1]), ("gpipe", [8, 8, 8, 8])])
def test_a_stage_keeps_no_more_than_its_schedule_says(schedule: str, most: list[int]) -> None:
    """Counted on the nodes at each forward pass, as micro-batches: of each the input and the output."""
    held: list[list[float]] = [[] for _ in range(4)]
    stages = [Held(k, held[k]) for k in range(4)]
    pipeline = Pipeline(stages, nodes(4), microbatches=8, schedule=schedule)
    x = torch.randn(8, 512, 512)
    gc.collect()
    gc.disable()
    try:
        before = [dt.testing.usage(k).bytes / 2**20 for k in range(4)]
        pipeline.step(x, torch.zeros(8, 1, 1), lambda out, _: out.mean())
    finally:
        gc.enable()
    peaks = [max(each) - start for each, start in zip(held, before, strict=True)]
    assert [round(peak / 2) for peak in peaks] == most, peaks


def test_an_evaluation_goes_through_the_stages_in_turns_and_keeps_nothing() -> None:
    held: list[list[float]] = [[] for _ in range(3)]
    pipeline = Pipeline([Held(k, held[k]) for k in range(3)], nodes(3), microbatches=4)
    x = torch.randn(5, 6)
    local = nn.Sequential(*[Held(0, []) for _ in range(3)])
    out = pipeline(x)
    assert not out.requires_grad
    with torch.no_grad():
        assert bits(out.cpu()) == bits(local(x))
    assert [p.grad for p in pipeline.parameters()] == [None] * 3


# ---- what stages may be ----------------------------------------------------------------------------------------------


class Embedded(nn.Module):
    """Takes numbers, and hands on a tensor and what is no float: a mask, a number, nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 4)

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        h = self.table(x)
        return {"h": (h, h), "mask": x > 2, "scale": 2.0, "none": None, "index": x}


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, got: dict[str, Any]) -> tuple[torch.Tensor, ...]:
        assert got["none"] is None
        first, second = got["h"]
        assert first is second  # one tensor, as it was
        h = self.linear(first).relu() * got["scale"]
        return h.masked_fill(got["mask"].unsqueeze(-1), 0.5), second, got["index"]


class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(4, 3)

    def forward(self, got: tuple[torch.Tensor, ...]) -> torch.Tensor:
        h, skipped, index = got
        return self.out(h + skipped).mean(1) + index.sum(1, keepdim=True)


class Checkpointed(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)  # type: ignore[no-any-return]


class Unused(nn.Module):
    """Hands on what its successor does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.one(x), self.other(x)


class First(nn.Module):
    def forward(self, got: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return got[0][:, :3].relu_()


class Passing(nn.Module):
    """Hands on what it was given, and a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x, self.weight


class Product(nn.Module):
    def forward(self, got: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return (got[0] * got[1])[:, :3]


def frozen(model: nn.Sequential, *stages: int) -> nn.Sequential:
    for k in stages:
        model[k].requires_grad_(False)
    return model


def tied() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 3))
    model[2].weight = model[0].weight
    return model


def tied_modules() -> nn.Sequential:
    layer = nn.Linear(6, 6)
    return nn.Sequential(layer, nn.Tanh(), layer, nn.Linear(6, 3))


PROGRAMS: dict[str, Callable[[], nn.Sequential]] = {
    "trees of tensors, and integers": lambda: nn.Sequential(Embedded(), Masked(), Both()),
    "checkpointed": lambda: nn.Sequential(nn.Linear(6, 8), Checkpointed(8), nn.Linear(8, 3)),
    "in place": lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(inplace=True), nn.Linear(8, 3)),
    "batch norm": lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)),
    "an output that nobody uses": lambda: nn.Sequential(nn.Linear(6, 6), Unused(), First()),
    "handed on": lambda: nn.Sequential(nn.Linear(6, 6), Passing(), Product()),
    "first frozen": lambda: frozen(nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4), nn.Linear(4, 3)), 0),
    "middle frozen": lambda: frozen(nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4), nn.Linear(4, 3)), 1),
    "last frozen": lambda: frozen(nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4), nn.Linear(4, 3)), 2),
    "no parameters": lambda: nn.Sequential(nn.Linear(6, 3), nn.Flatten(), nn.Tanh(), nn.Identity()),
    "named": lambda: nn.Sequential(OrderedDict(body=nn.Linear(6, 4), head=nn.Linear(4, 3))),
}


def gradients(model: nn.Module) -> list[torch.Tensor | None]:
    return [p.grad for p in model.parameters()]


def numbers(rows: int) -> torch.Tensor:
    return torch.randint(7, (rows, 5), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("program", PROGRAMS)
def test_stages_of_all_kinds(program: str) -> None:
    make = PROGRAMS[program]
    local, pipeline = seeded(make, DOUBLE), None
    model = seeded(make, DOUBLE)
    pipeline = Pipeline(model, nodes(len(model)), microbatches=4)
    x, y = batches(2, 10, DOUBLE)
    xs = [numbers(10), numbers(10)] if "trees" in program else x
    same_bits(
        fit(pipeline, sgd, lambda x, y: pipeline.step(x, y, F.mse_loss), xs, y),
        fit(local, sgd, lambda x, y: twin_step(local, x, y, F.mse_loss, 4), xs, y),
    )
    for got, wanted in zip(gradients(pipeline), gradients(local), strict=True):
        assert (got is None) == (wanted is None)
    pipeline.eval()
    local.eval()
    whole = local(xs[0]).detach()
    torch.testing.assert_close(pipeline(xs[0]).cpu(), whole, rtol=1e-12, atol=1e-12)


def test_a_stage_may_write_what_the_one_before_has_kept_on_the_same_node() -> None:
    """Tanh keeps its output for its backward pass: the next stage writes a copy of it."""
    pipeline = Pipeline(
        [nn.Linear(6, 6), nn.Tanh(), nn.Hardtanh(-0.3, 0.3, inplace=True)], ["node:1"] * 3, microbatches=2
    )
    (layer, *_) = pipeline.children()
    x, y = batches(1, 4, torch.float32)
    pipeline.step(x[0], y[0], lambda out, y: F.mse_loss(out[:, :3], y))
    weight = layer.weight.detach().cpu().requires_grad_()  # type: ignore[union-attr, operator]
    out = F.hardtanh(torch.tanh(F.linear(x[0], weight, layer.bias.detach().cpu())), -0.3, 0.3)  # type: ignore[union-attr, operator]
    F.mse_loss(out[:, :3], y[0]).backward()
    torch.testing.assert_close(layer.weight.grad.cpu(), weight.grad)  # type: ignore[union-attr, operator]


@pytest.mark.parametrize("make", [tied, tied_modules])
def test_tied_weights_stay_tied(make: Any) -> None:
    """The owner's gradient is the sum of both stages', whose order differs from the twin's."""
    local, model = seeded(make, DOUBLE), seeded(make, DOUBLE)
    pipeline = Pipeline(model, nodes(4), microbatches=3)
    assert len(list(pipeline.parameters())) == len(list(local.parameters()))
    assert list(pipeline.state_dict()) == list(local.state_dict())
    x, y = batches(10, 9, DOUBLE)
    ours = fit(pipeline, adamw, lambda x, y: pipeline.step(x, y, F.mse_loss), x, y)
    theirs = fit(local, adamw, lambda x, y: twin_step(local, x, y, F.mse_loss, 3), x, y)
    for value, wanted in zip(ours, theirs, strict=True):
        torch.testing.assert_close(value.cpu(), wanted, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(pipeline(x[0]).cpu(), local(x[0]).detach(), rtol=1e-12, atol=1e-12)


def test_each_stage_drops_out_by_its_own_generator() -> None:
    make = lambda: nn.Sequential(nn.Sequential(nn.Linear(6, 8), nn.Dropout()), nn.Dropout(0.2), nn.Linear(8, 3))  # noqa: E731
    local, model = seeded(make, DOUBLE), seeded(make, DOUBLE)
    pipeline = Pipeline(model, nodes(3), microbatches=4)
    x, y = batches(1, 12, DOUBLE)
    torch.manual_seed(5)
    states = [torch.get_rng_state()] * 3  # as all nodes begin
    loss = pipeline.step(x[0], y[0], F.mse_loss)
    wanted: Any = 0
    for part, target in zip(x[0].chunk(4), y[0].chunk(4), strict=True):
        for k, stage in enumerate(local):
            torch.set_rng_state(states[k])
            part = stage(part)
            states[k] = torch.get_rng_state()
        one = F.mse_loss(part, target) / 4
        one.backward()
        wanted = wanted + one.detach()
    assert bits(loss.cpu()) == bits(wanted)
    same_bits(gradients(pipeline), gradients(local))


def test_hooks_fire_for_each_microbatch() -> None:
    pipeline = Pipeline(seeded(blocks, DOUBLE), nodes(4), microbatches=3)
    fired: list[str] = []
    block: Any = list(pipeline.children())[1]
    block.register_forward_hook(lambda *_: fired.append("forward"))
    block.register_full_backward_hook(lambda *_: fired.append("backward"))
    block.up.weight.register_post_accumulate_grad_hook(lambda p: fired.append("gradient"))
    x, y = batches(1, 6, DOUBLE)
    pipeline.step(x[0], y[0], F.mse_loss)
    assert fired == ["forward", "forward", "forward"] + ["gradient", "backward"] * 3


class Square(torch.autograd.Function):
    """Has a product of floats in its backward pass, which autocast would make one of bfloat16."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return torch.mm(grads[0] * x, 2 * torch.eye(x.shape[1], device=x.device))


class Squared(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Square.apply(super().forward(x).float().tanh())  # type: ignore[no-any-return, no-untyped-call]


def test_reduced_precision() -> None:
    """A backward pass is outside of autocast, where the user's would be."""
    make = lambda: nn.Sequential(nn.Linear(6, 8), Squared(8), nn.Linear(8, 3))  # noqa: E731
    local, model = seeded(make, torch.float32), seeded(make, torch.float32)
    pipeline = Pipeline(model, nodes(3), microbatches=2)
    x, y = batches(1, 8, torch.float32)
    with torch.autocast("node", dtype=torch.bfloat16):
        loss = pipeline.step(x[0], y[0], F.mse_loss)
    total: Any = 0
    for part, target in zip(x[0].chunk(2), y[0].chunk(2), strict=True):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            one = F.mse_loss(local(part), target) / 2
        one.backward()
        total = total + one.detach()
    assert bits(loss.cpu()) == bits(total)
    same_bits(gradients(pipeline), gradients(local))


def test_a_grad_scaler_scales_and_unscales() -> None:
    x, y = batches(4, 8, torch.float32)

    def train(model: nn.Module, scaler: Any, step: Any) -> list[Any]:
        optimizer = sgd(model)
        for batch, target in zip(x, y, strict=True):
            optimizer.zero_grad()
            step(batch, target, lambda out, y: scaler.scale(F.mse_loss(out, y)))
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        return [torch.tensor(scaler.get_scale()), *[p.detach() for p in model.parameters()]]

    local, model = seeded(blocks, torch.float32), seeded(blocks, torch.float32)
    pipeline = Pipeline(model, nodes(4), microbatches=2)
    options: dict[str, Any] = {"init_scale": 2.0**127, "growth_interval": 2}  # the first steps are left out
    theirs = train(local, torch.amp.GradScaler("cpu", **options), lambda x, y, f: twin_step(local, x, y, f, 2))
    same_bits(train(pipeline, torch.amp.GradScaler("node", **options), pipeline.step), theirs)


def test_gradients_add_up_and_are_clipped_as_those_of_one_module() -> None:
    local, model = seeded(blocks, DOUBLE), seeded(blocks, DOUBLE)
    pipeline = Pipeline(model, nodes(4), microbatches=4)
    x, y = batches(2, 8, DOUBLE)
    for batch, target in zip(x, y, strict=True):
        pipeline.step(batch, target, F.mse_loss)
        twin_step(local, batch, target, F.mse_loss, 4)
    same_bits(gradients(pipeline), gradients(local))
    ours = nn.utils.clip_grad_norm_(pipeline.parameters(), 0.01)
    norm = nn.utils.clip_grad_norm_(local.parameters(), 0.01)
    torch.testing.assert_close(ours.cpu(), norm, rtol=1e-12, atol=0)
    for got, wanted in zip(gradients(pipeline), gradients(local), strict=True):
        torch.testing.assert_close(got.cpu(), wanted, rtol=1e-12, atol=1e-14)  # type: ignore[union-attr]


def test_a_checkpoint_is_that_of_the_unsplit_module() -> None:
    local, model = seeded(blocks, DOUBLE), blocks().double()
    pipeline = Pipeline(model, nodes(4), microbatches=2)
    pipeline.load_state_dict(local.state_dict())
    x, _ = batches(1, 4, DOUBLE)
    assert bits(pipeline(x[0]).cpu()) == bits(torch.cat([local(part) for part in x[0].chunk(2)]))
    blocks().double().load_state_dict(pipeline.state_dict())
    listed = Pipeline([nn.Linear(6, 4), nn.Linear(4, 3)], nodes(2), microbatches=2)
    assert list(listed.state_dict()) == list(nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3)).state_dict())


def test_batches_that_are_on_nodes_already() -> None:
    x, y = batches(1, 8, DOUBLE)
    wanted = Pipeline(seeded(blocks, DOUBLE), nodes(4), microbatches=4)
    wanted.step(x[0], y[0], F.mse_loss)
    for here, there in (("node:0", "node:3"), ("node:2", "node:0")):
        pipeline = Pipeline(seeded(blocks, DOUBLE), nodes(4), microbatches=4)
        pipeline.step(x[0].to(here), y[0].to(there), F.mse_loss)
        same_bits(gradients(pipeline), [grad.cpu() for grad in gradients(wanted)])  # type: ignore[union-attr]


def test_a_step_waits_for_nothing() -> None:
    pipeline = Pipeline(seeded(blocks, DOUBLE), nodes(4), microbatches=4)
    x, y = batches(1, 8, DOUBLE)
    pipeline.step(x[0], y[0], F.mse_loss)  # what is asked once has been asked
    with dt.testing.MessageLog() as log:
        pipeline.step(x[0], y[0], F.mse_loss)
        pipeline(x[0])
        assert log.questions == []


def test_activations_go_from_node_to_node() -> None:
    pipeline = Pipeline([nn.Linear(64, 64) for _ in range(3)], nodes(3), microbatches=2)
    x = torch.randn(4, 64).to("node:0")
    y = torch.randn(4, 64).to("node:2")
    dt.channels.reset_stats()
    with dt.testing.MessageLog() as log:
        pipeline.step(x, y, F.mse_loss)
        dt.synchronize()
    sends = [sum(name == "Send" for name in log[k].commands) for k in range(3)]
    receives = [sum(name == "Recv" for name in log[k].commands) for k in range(3)]
    assert (sends, receives) == ([2, 4, 2], [2, 4, 2])  # two micro-batches: activations down, gradients up


def test_a_graph_replays_it() -> None:
    x, y = batches(1, 8, DOUBLE)
    there, wanted = x[0].to("node:0"), y[0].to("node:3")

    def steps(replayed: bool) -> list[torch.Tensor]:
        pipeline = Pipeline(seeded(blocks, DOUBLE), nodes(4), microbatches=4)
        optimizer = sgd(pipeline)

        def one() -> None:
            optimizer.zero_grad(set_to_none=False)
            pipeline.step(there, wanted, F.mse_loss)
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
        return [p.detach().cpu() for p in pipeline.parameters()]

    same_bits(steps(True), steps(False))


# ---- on slices of a mesh ---------------------------------------------------------------------------------------------


def two() -> nn.Sequential:
    return nn.Sequential(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), Block(8)), nn.Sequential(Block(8), nn.Linear(8, 3)))


def slices(m: dt.meshes.Mesh) -> list[dt.meshes.Mesh]:
    return [m.slice(pp=k) for k in range(m.size("pp"))]


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_on_slices_of_a_mesh_it_is_data_parallel_too(schedule: str) -> None:
    x, y = batches(5, 12, DOUBLE)
    local, model = seeded(two, DOUBLE), seeded(two, DOUBLE)
    pipeline = Pipeline(model, slices(dt.mesh(pp=2, dp=2)), microbatches=3, schedule=schedule)
    ours = fit(pipeline, adamw, lambda x, y: pipeline.step(x, y, F.mse_loss), x, y)
    theirs = fit(local, adamw, lambda x, y: twin_step(local, x, y, F.mse_loss, 1), x, y)
    for value, wanted in zip(ours, theirs, strict=True):
        torch.testing.assert_close(value.cpu(), wanted, rtol=1e-12, atol=1e-12)  # equal on all ranks, or an error
    out = pipeline(x[0])
    assert [part.shape[0] for part in out.shards()] == [6, 6]
    torch.testing.assert_close(torch.cat([part.cpu() for part in out.shards()]), local(x[0]).detach())


def test_gradients_are_reduced_once_a_step() -> None:
    x, y = batches(1, 16, DOUBLE)
    pipeline = Pipeline(seeded(two, DOUBLE), slices(dt.mesh(pp=2, dp=2)), microbatches=8)
    with dt.testing.MessageLog() as log:
        pipeline.step(x[0], y[0], F.mse_loss)
    collectives = [sum(name.startswith("Collective") for name in log[k].commands) for k in range(4)]
    assert collectives == [1, 1, 2, 2]  # a pack of gradients for each stage, and the loss


def test_with_tensor_parallel_stages() -> None:
    m = dt.mesh(pp=2, tp=2)
    x, y = batches(2, 6, DOUBLE)
    local = seeded(lambda: nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3)), DOUBLE)
    wide = dt.nn.ColumnParallelLinear.from_plain(local[0], m.slice(pp=0))  # type: ignore[arg-type]
    narrow = dt.nn.ColumnParallelLinear.from_plain(local[1], m.slice(pp=1))  # type: ignore[arg-type]
    pipeline = Pipeline([nn.Sequential(wide, nn.Tanh()), narrow], slices(m), microbatches=3, over=())
    plain = nn.Sequential(local[0], nn.Tanh(), local[1])
    ours = fit(pipeline, sgd, lambda x, y: pipeline.step(x, y, F.mse_loss), x, y)[:2]
    theirs = fit(plain, sgd, lambda x, y: twin_step(plain, x, y, F.mse_loss, 3), x, y)[:2]
    for value, wanted in zip(ours, theirs, strict=True):
        torch.testing.assert_close(value.cpu(), wanted, rtol=1e-12, atol=1e-12)


def test_with_stages_that_are_sharded() -> None:
    """``fully_shard`` has the mean of the gradients of its parts, which are another part on each rank."""
    x, y = batches(4, 16, DOUBLE)
    local, model = seeded(two, DOUBLE), seeded(two, DOUBLE)
    for stage, place in zip(model, slices(dt.mesh(pp=2, dp=2)), strict=True):
        stage.to(place.device)
        for layer in stage:  # type: ignore[attr-defined]
            if list(layer.parameters()):
                dt.fully_shard(layer, place)
        dt.fully_shard(stage, place)
    pipeline = Pipeline(model, slices(dt.mesh(pp=2, dp=2)), microbatches=4)
    ours = fit(pipeline, adamw, lambda x, y: pipeline.step(x, y, F.mse_loss), x, y)
    theirs = fit(local, adamw, lambda x, y: twin_step(local, x, y, F.mse_loss, 1), x, y)
    for value, wanted in zip(ours, theirs, strict=True):
        torch.testing.assert_close(value.cpu(), wanted, rtol=1e-12, atol=1e-12)


def test_tied_weights_on_slices_of_a_mesh() -> None:
    make = lambda: nn.Sequential(*(lambda m: (m[:2], m[2:]))(tied()))  # noqa: E731
    local, model = seeded(make, DOUBLE), seeded(make, DOUBLE)
    pipeline = Pipeline(model, slices(dt.mesh(pp=2, dp=2)), microbatches=2)
    x, y = batches(3, 8, DOUBLE)
    ours = fit(pipeline, sgd, lambda x, y: pipeline.step(x, y, F.mse_loss), x, y)
    theirs = fit(local, sgd, lambda x, y: twin_step(local, x, y, F.mse_loss, 1), x, y)
    for value, wanted in zip(ours, theirs, strict=True):
        torch.testing.assert_close(value.cpu(), wanted, rtol=1e-12, atol=1e-12)


# ---- busy shares -----------------------------------------------------------------------------------------------------


def test_busy_shares_by_the_nodes_clocks() -> None:
    pipeline = Pipeline(seeded(blocks, DOUBLE), ["node:0", "node:1", "node:0", "node:2"], microbatches=5)
    x, y = batches(1, 10, DOUBLE)
    with pipeline.measure() as shares:
        assert "not ended" in str(shares)
        for _ in range(3):
            pipeline.step(x[0], y[0], F.mse_loss)
    assert [(row.node, row.stages, row.coordinates) for row in shares.rows] == [
        (0, (0, 2), ""),
        (1, (1,), ""),
        (2, (3,), ""),
    ]
    for row in shares.rows:
        assert 0 < row.busy <= row.seconds
        assert row.share == row.busy / row.seconds
    assert shares.rows[0].expected == pytest.approx(2 * shares.rows[1].expected)
    lines = str(shares).splitlines()
    assert lines[0].split() == ["stage", "node", "busy", "expected"]
    assert lines[1].split()[:3] == ["0,", "2", "0"]


def test_a_node_that_sleeps_is_not_busy() -> None:
    """Of a node's time only its own work counts: not the wait for another one."""
    pipeline = Pipeline([nn.Linear(3, 3), nn.Linear(3, 3)], nodes(2), microbatches=1)
    x = torch.randn(2, 3)
    with pipeline.measure() as shares:
        dt.run(time.sleep, 0.2, node=0)
        pipeline.step(x, x, F.mse_loss)
    first, second = shares.rows
    assert first.busy > 0.2
    assert first.seconds > 0.2
    assert second.busy < second.seconds - 0.1


def test_shares_of_a_mesh() -> None:
    pipeline = Pipeline(seeded(two, DOUBLE), slices(dt.mesh(pp=2, dp=2)), microbatches=2)
    x, y = batches(1, 8, DOUBLE)
    with pipeline.measure() as shares:
        pipeline.step(x[0], y[0], F.mse_loss)
    assert [(row.node, row.stages, row.coordinates) for row in shares.rows] == [
        (0, (0,), "dp=0"), (1, (0,), "dp=1"), (2, (1,), "dp=0"), (3, (1,), "dp=1"),
    ]  # fmt: skip
    assert "3 (dp=1)" in str(shares)
