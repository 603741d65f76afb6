"""fully_shard against torch's own and DDP, on the same nodes by gloo, and against plain modules."""

from __future__ import annotations

import copy
import gc
import io
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from equal import same
from mesh_kit import connected
from safetensors.torch import save_file
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from training_programs import Tied, Unused, adamw, clipped, normed, plain, scaled, sgd, step, stepwise, train

import disttensor as dt
from disttensor import mesh, shard
from disttensor.meshes import Mesh, from_shards
from disttensor.tasks import device_mesh
from disttensor.training import DataParallel, fully_shard

pytestmark = [
    pytest.mark.usefixtures("settled"),
    # torch's own, of what it is compared with
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .FSDPUnused. returned a view:UserWarning"),
]

NODES = 4
STEPS = 10
DOUBLE = torch.float64


@pytest.fixture(scope="module", autouse=True)
def session() -> Iterator[None]:
    with connected(NODES):
        for n in (2, 3):
            # what is made at first use: before the tests look for leaks
            dt.run(dist.barrier, node=ranks(n), distributed=True)
        yield


def ranks(n: int) -> Mesh:
    return mesh(dp=n, nodes=list(range(n)))


def layers(model: nn.Module) -> list[nn.Module]:
    """What is sharded by itself: the layers with parameters, unless two of them share one."""
    return [] if isinstance(model, Tied) else [child for child in model.children() if list(child.parameters())]


def sharded(model: nn.Module, m: Mesh, **options: Any) -> Any:
    for layer in layers(model):
        fully_shard(layer, m, **options)
    return fully_shard(model, m, **options)


def by_torch(model: nn.Module, policy: Any = None) -> nn.Module:
    from torch.distributed import fsdp

    options = {"mesh": device_mesh()["dp"], **({} if policy is None else {"mp_policy": policy})}
    for layer in layers(model):
        fsdp.fully_shard(layer, **options)
    return fsdp.fully_shard(model, **options)  # type: ignore[no-any-return]


def by_ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(
        model, process_group=device_mesh().get_group("dp"), find_unused_parameters=isinstance(model, Unused)
    )


def full(values: list[torch.Tensor]) -> list[torch.Tensor]:
    return [x.full_tensor() if hasattr(x, "full_tensor") else x for x in values]


def both(
    m: Mesh, make: Any, optimizer: Any, fit: Any, wrap: Any, dtype: torch.dtype = torch.float32, **options: Any
) -> tuple[list[Any], list[list[torch.Tensor]]]:
    """The state after training with ours, and those of the ranks of what torch has for it."""
    torch.manual_seed(1)
    x, y = torch.randn(STEPS, 12, 6, dtype=dtype), torch.randn(STEPS, 12, 3, dtype=dtype)
    xs, ys = shard(x, m, dp=1), shard(y, m, dp=1)
    theirs = dt.run(lambda x, y: full(train(make, wrap, optimizer, fit, x, y)), xs, ys, node=m, distributed=True)
    ours = train(make, lambda model: sharded(model, m, **options), optimizer, fit, xs, ys)
    return ours, [[value.cpu() for value in values] for values in theirs]


def accumulated(model: Any, optimizer: Any, x: Any, y: Any) -> None:
    """Two backward passes that only add, then one that reduces."""
    for i in range(len(x)):
        model.set_requires_gradient_sync(i % 3 == 2)
        F.mse_loss(model(x[i]), y[i]).backward()
        if i % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()


PROGRAMS: dict[str, tuple[Any, Any, Any, Any]] = {
    "SGD": (plain, sgd, stepwise(step), by_torch),
    "AdamW": (plain, adamw, stepwise(step), by_torch),
    "BatchNorm": (normed, sgd, stepwise(step), by_torch),
    "unused parameters": (Unused, sgd, stepwise(step), by_torch),
    "tied weights": (Tied, adamw, stepwise(step), by_torch),
    "accumulated": (plain, sgd, accumulated, by_torch),
    "unused parameters, accumulated": (Unused, sgd, accumulated, by_torch),
    "SGD, DDP": (plain, sgd, stepwise(step), by_ddp),
    "AdamW, DDP": (plain, adamw, stepwise(step), by_ddp),
    "unused parameters, DDP": (Unused, adamw, stepwise(step), by_ddp),
    "GradScaler, DDP": (plain, adamw, scaled, by_ddp),
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_on_two_ranks_it_has_the_bits_of_torchs(program: str) -> None:
    m = ranks(2)
    ours, theirs = both(m, *PROGRAMS[program])
    for i, value in enumerate(ours):
        for rank in range(2):
            if program.startswith("GradScaler"):  # it clips, by a norm whose squares are added in another order
                torch.testing.assert_close(value.at(dp=rank).cpu(), theirs[rank][i], rtol=1e-5, atol=1e-7)
            else:
                same(value.at(dp=rank), theirs[rank][i], strides=False)


@pytest.mark.parametrize("program", ["SGD", "AdamW, DDP", "tied weights", "accumulated"])
def test_on_three_ranks_it_is_torchs_but_for_rounding(program: str) -> None:
    """Of 9, 7 and 3 rows each has a third, rounded up."""
    ours, theirs = both(ranks(3), *PROGRAMS[program], dtype=DOUBLE)
    for i, value in enumerate(ours):
        torch.testing.assert_close(value.cpu(), theirs[0][i], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("n", [2, 3])
def test_clipping_is_torchs(n: int) -> None:
    ours, theirs = both(ranks(n), plain, sgd, stepwise(clipped), by_torch, dtype=DOUBLE)
    for i, value in enumerate(ours):
        torch.testing.assert_close(value.cpu(), theirs[0][i], rtol=1e-12, atol=1e-12)


POLICIES = {
    "bfloat16": MixedPrecisionPolicy(param_dtype=torch.bfloat16),
    "reduced as float32": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    "output": MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32, cast_forward_inputs=True),
}


@pytest.mark.parametrize("name", POLICIES)
def test_mixed_precision_has_the_bits_of_torchs(name: str) -> None:
    policy = POLICIES[name]

    def fit(model: Any, optimizer: Any, x: Any, y: Any) -> None:
        for i in range(len(x)):
            optimizer.zero_grad()
            out = model(x[i])
            assert out.dtype is (policy.output_dtype or torch.bfloat16)
            F.mse_loss(out.float(), y[i]).backward()
            optimizer.step()

    ours, theirs = both(ranks(2), plain, sgd, fit, lambda model: by_torch(model, policy), mp_policy=policy)
    for i, value in enumerate(ours):
        assert value.dtype is torch.float32
        same(value.at(dp=1), theirs[1][i], strides=False)


@pytest.mark.parametrize("n", [2, 3])
def test_it_is_data_parallel_also_in_what_is_random(n: int) -> None:
    m = ranks(n)

    def dropping() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Linear(6, 9), nn.Dropout(0.5), nn.Linear(9, 7), nn.Dropout(0.3), nn.Linear(7, 3)
        ).double()

    x, y = torch.randn(STEPS, 12, 6, dtype=DOUBLE), torch.randn(STEPS, 12, 3, dtype=DOUBLE)
    xs, ys = shard(x, m, dp=1), shard(y, m, dp=1)
    found = []
    for model in (sharded(dropping(), m), DataParallel(dropping().to(m.device), m)):
        torch.manual_seed(3)
        stepwise(step)(model, sgd(model), xs, ys)
        found.append([value.cpu() for value in model.state_dict().values()])
    for got, wanted in zip(*found, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)


# ---- against the plain module ----------------------------------------------------------------------------------------


def made(m: Mesh, make: Callable[[], nn.Module] = plain, **options: Any) -> tuple[Any, Any]:
    """A local model in double precision, and the same sharded."""
    torch.manual_seed(0)
    local = make().double()
    return local, sharded(copy.deepcopy(local), m, **options)


def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def whole(m: Mesh, parameter: Any, rows: int) -> torch.Tensor:
    """Parts put together here; what is behind the rows has to be zero."""
    joined = torch.cat([parameter.detach().at(dp=at).cpu() for at in range(m.size("dp"))])
    assert not joined[rows:].any()
    return joined[:rows]


def same_gradients(m: Mesh, model: nn.Module, local: nn.Module) -> None:
    for got, wanted in zip(model.parameters(), local.parameters(), strict=True):
        assert (got.grad is None) == (wanted.grad is None)
        if wanted.grad is not None:
            found = whole(m, got.grad, len(wanted))
            torch.testing.assert_close(found, wanted.grad, rtol=1e-12, atol=1e-14)


def batch(rows: int = 12) -> torch.Tensor:
    return torch.randn(rows, 6, dtype=DOUBLE, generator=torch.Generator().manual_seed(4))


@pytest.mark.parametrize("options", [{}, {"reshard_after_forward": False}], ids=str)
def test_several_forwards_one_backward_and_several_backwards(options: dict[str, Any]) -> None:
    m = ranks(3)
    local, model = made(m, **options)
    x = batch()
    for net in (local, model):
        loss(net, x).backward()
        (loss(net, x * 2) + loss(net, x * 3)).backward()
        twice = loss(net, x)
        twice.backward(retain_graph=True)
        twice.backward()
        with torch.no_grad():
            loss(net, x)
        loss(net, x).backward()
    same_gradients(m, model, local)


def test_frozen_parameters_and_frozen_groups() -> None:
    m = ranks(3)
    local, model = made(m)
    for net in (local, model):
        net[0].requires_grad_(False)
        net[2].weight.requires_grad_(False)
        x = batch() if net is local else shard(batch(), m, dp=0)
        x.requires_grad_()
        loss(net, x).backward()
        net[4].requires_grad_(False)
        loss(net, x).backward()
    same_gradients(m, model, local)
    assert [p.grad is None for p in model.parameters()] == [True, True, True, False, False, False]


def test_a_group_that_is_used_twice_and_one_in_another_order() -> None:
    class Turns(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(6, 6) for _ in range(3))
            self.turn = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.turn += 1
            for layer in (self.a, self.b, self.c, self.a) if self.turn % 2 else (self.c, self.a, self.c):
                x = layer(x).tanh()
            return x

    m = ranks(2)
    local, model = made(m, Turns)
    for _ in range(4):
        for net in (local, model):
            loss(net, batch()).backward()
    same_gradients(m, model, local)


def test_a_sharded_module_within_the_pass_of_another() -> None:
    """It is no submodule, but what the other one calls."""
    m = ranks(2)

    class Calls(nn.Module):
        def __init__(self, other: Any) -> None:
            super().__init__()
            self.first, self.last, self.other = nn.Linear(6, 6), nn.Linear(3, 3), [other]

        def forward(self, x: torch.Tensor) -> Any:
            return self.last(self.other[0](self.first(x)))

    torch.manual_seed(0)
    inner, outer = plain().double(), Calls(None).double()
    inner_there, outer_there = sharded(copy.deepcopy(inner), m), sharded(copy.deepcopy(outer), m)
    outer.other, outer_there.other = [inner], [inner_there]
    for _ in range(2):
        for net in (outer, outer_there):
            loss(net, batch()).backward()
    same_gradients(m, inner_there, inner)
    same_gradients(m, outer_there, outer)


@pytest.mark.parametrize("inside", [False, True])
def test_checkpoints(inside: bool) -> None:
    """Around layers that are sharded, and within one; dropout draws the same again."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 6)

        def inner(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.down(F.dropout(self.up(x).tanh(), 0.5))

        def forward(self, x: torch.Tensor) -> Any:
            return checkpoint(self.inner, x, use_reentrant=False) if self.saves and inside else self.inner(x)

        saves = False

    class Blocks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks, self.saves = nn.ModuleList(Block() for _ in range(3)), False

        def forward(self, x: torch.Tensor) -> Any:
            for block in self.blocks:
                block.saves = self.saves
                x = checkpoint(block, x, use_reentrant=False) if self.saves and not inside else block(x)
            return x

    m = ranks(2)
    found = []
    for saves in (False, True):
        torch.manual_seed(0)
        model = Blocks().double()
        for block in model.blocks:
            fully_shard(block, m)
        fully_shard(model, m)
        model.saves = saves
        torch.manual_seed(5)
        loss(model, shard(batch(), m, dp=0).requires_grad_()).backward()
        found.append([whole(m, p.grad, rows) for p, rows in zip(model.parameters(), [10, 10, 6, 6] * 3, strict=True)])
    for got, wanted in zip(*found, strict=True):
        assert torch.equal(got, wanted)


class Block(nn.Module):
    """A residual block, with a checkpoint within or around it."""

    def __init__(self, width: int, saves: str) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(width),
            nn.Linear(width, 2 * width + 1),
            nn.Linear(2 * width + 1, width),
        )
        self.saves = saves

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(self.norm(x)).tanh())  # type: ignore[no-any-return]

    def forward(self, x: torch.Tensor) -> Any:
        return checkpoint(self.inner, x, use_reentrant=False) if self.saves == "within" else self.inner(x)


class Stack(nn.Module):
    def __init__(self, width: int, saves: list[str]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, kind) for kind in saves)
        self.head = nn.Linear(width, 3)

    def forward(self, x: torch.Tensor) -> Any:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if block.saves == "around" else block(x)
        return self.head(x)


@pytest.mark.parametrize("seed", range(5))
def test_any_groups_of_any_model_in_any_order_train_as_the_plain_model(seed: int) -> None:
    m, choose = ranks(3), random.Random(seed)
    torch.manual_seed(seed)
    width = choose.choice([4, 5, 7])
    local = Stack(width, choose.choices(["", "within", "around"], k=choose.randint(1, 4))).double()
    there: Any = copy.deepcopy(local)
    for block in there.blocks:
        for module, often in ((block.up, 0.3), (block, 0.7)):
            if choose.random() < often:
                fully_shard(module, m, reshard_after_forward=choose.random() < 0.6)
    fully_shard(there, m, reshard_after_forward=choose.random() < 0.6)
    for p, q in zip(there.parameters(), local.parameters(), strict=True):
        trained = choose.random() > 0.15
        p.requires_grad_(trained)
        q.requires_grad_(trained)
    optimizers = [adamw(net) for net in (local, there)]
    for _ in range(5):
        x, how = torch.randn(6, width, dtype=DOUBLE), choose.choice(["once", "twice", "together", "held", "evaluated"])
        for net, optimizer in zip((local, there), optimizers, strict=True):
            optimizer.zero_grad()
            own = x.clone() if net is local else shard(x, m, dp=0)
            own.requires_grad_()
            if how == "evaluated":
                with torch.no_grad():
                    net(own)
            if net is there:
                net.set_requires_gradient_sync(how != "held")
            first = loss(net, own)
            if how != "together":
                first.backward()
            if net is there:
                net.set_requires_gradient_sync(True)
            if how in ("twice", "held"):
                loss(net, own * 2).backward()
            elif how == "together":
                (first + loss(net, own / 2)).backward()
            nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            optimizer.step()
    for (name, got), wanted in zip(there.state_dict().items(), local.state_dict().values(), strict=True):
        torch.testing.assert_close(got.cpu(), wanted, rtol=1e-9, atol=1e-10, msg=name)


def test_recurrent_layers_and_attention() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.LSTM(6, 5, batch_first=True)
            self.attention = nn.MultiheadAttention(5, 1, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y, _ = self.rnn(x.unflatten(0, (-1, 2)))
            return self.attention(y, y, y)[0]  # type: ignore[no-any-return]

    m = ranks(2)
    local, model = made(m, Mixed)
    for net in (local, model):
        loss(net, batch()).backward()
    same_gradients(m, model, local)
    torch.testing.assert_close(model.eval()(batch().to(m.device)).cpu(), local.eval()(batch()), rtol=1e-12, atol=1e-12)


def test_parameters_of_any_kind() -> None:
    """One that is empty, complex ones, integers, a kernel of a convolution in another memory format."""

    class Kinds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.none = nn.Parameter(torch.ones(0, 6))
            self.table = nn.Parameter(torch.arange(7), requires_grad=False)
            self.wave = nn.Parameter(torch.randn(6, dtype=torch.complex128))
            self.conv = nn.Conv2d(1, 5, 2).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            self.one = nn.Parameter(torch.ones(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = (torch.cat([x, x @ self.none.t()], 1) * self.wave).real * self.table[:6]
            return self.conv(x.view(-1, 1, 2, 3)).flatten(1) * self.one  # type: ignore[no-any-return]

    m = ranks(3)
    local, model = made(m, Kinds)
    for net in (local, model):
        loss(net, batch()).backward()
    same_gradients(m, model, local)
    assert model.table.dtype is torch.int64
    assert torch.equal(model.state_dict()["table"].cpu(), local.table)


def test_autocast_is_that_of_data_parallel() -> None:
    m = ranks(2)
    x, y = torch.randn(STEPS, 12, 6), torch.randn(STEPS, 12, 3)
    xs, ys = shard(x, m, dp=1), shard(y, m, dp=1)

    def fit(model: Any, optimizer: Any, x: Any, y: Any) -> None:
        for i in range(len(x)):
            optimizer.zero_grad()
            with torch.autocast("node", dtype=torch.bfloat16):
                out = model(x[i])
                assert out.dtype is torch.bfloat16
                value = F.mse_loss(out.float(), y[i])
            value.backward()
            optimizer.step()

    ours = train(plain, lambda model: sharded(model, m), sgd, fit, xs, ys)
    theirs = train(plain, lambda model: DataParallel(model.to(m.device), m), sgd, fit, xs, ys)
    for value, wanted in zip(ours, theirs, strict=True):
        assert torch.equal(value.cpu(), wanted.cpu())


def test_evaluation() -> None:
    """Without gradients, and in inference mode; what has been trained since is seen."""
    m = ranks(3)
    local, model = made(m, reshard_after_forward=False)
    x = batch()
    there = x.to(m.device)
    for mode in (torch.no_grad, torch.inference_mode):
        optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (local, model)]
        for net, optimizer in zip((local, model), optimizers, strict=True):
            loss(net, x).backward()
            optimizer.step()
            optimizer.zero_grad()
        with mode():
            torch.testing.assert_close(model(there).cpu(), local(x), rtol=1e-12, atol=1e-12)
    loss(model, x).backward()
    loss(local, x).backward()
    same_gradients(m, model, local)


def test_a_graph_replays_it() -> None:
    m = ranks(2)
    _, eager = made(m)
    _, recorded = made(m)
    x = shard(batch(), m, dp=0)

    def one(model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.Tensor:
        optimizer.zero_grad()
        value = loss(model, x)
        value.backward()
        optimizer.step()
        return value.detach()

    first, second = (torch.optim.SGD(model.parameters(), lr=0.1) for model in (eager, recorded))
    wanted = [one(eager, first).at(dp=0).item() for _ in range(5)]  # type: ignore[attr-defined]
    losses = [one(recorded, second).at(dp=0).item() for _ in range(2)]  # type: ignore[attr-defined]
    graph = dt.Graph()
    with dt.graph(graph):
        value = one(recorded, second)
    for _ in range(3):
        graph.replay()
        losses.append(value.at(dp=0).item())  # type: ignore[attr-defined]
    assert losses == wanted


def test_unshard_and_reshard() -> None:
    m = ranks(2)
    local, model = made(m)
    model[0].unshard()
    assert model[0].weight.shape == (9, 6)
    assert isinstance(model[0].weight, nn.Parameter)
    same(model[0].weight.detach(), local[0].weight.detach())
    model[0].reshard()
    assert model[0].weight.shape == (5, 6)
    assert model[0].unshard(async_op=True).wait()
    assert model[0].unshard() is None
    with dt.testing.MessageLog() as log, torch.no_grad():
        model[0](batch())
        model[0](batch())
    assert sum(name.startswith("Collective") for name in log[0].commands) == 0
    loss(model, batch()).backward()
    loss(local, batch()).backward()
    assert model[0].weight.shape == (5, 6)
    same_gradients(m, model, local)


def test_whole_parameters_are_those_of_now() -> None:
    m = ranks(2)
    local, model = made(m)
    parts = list(model[0].parameters())
    model[0].unshard()
    with torch.no_grad():
        for p, part in zip(local[0].parameters(), parts, strict=True):
            p.mul_(2)
            part.mul_(2)
    loss(model, batch()).backward()
    loss(local, batch()).backward()
    same_gradients(m, model, local)


# ---- what happens when -----------------------------------------------------------------------------------------------


def collectives(log: Any) -> list[str]:
    return [name.split()[1] for name in log[0].commands if name.startswith("Collective")]


def square() -> nn.Module:
    return nn.Sequential(*(nn.Linear(6, 6, bias=False) for _ in range(5)))


@pytest.mark.parametrize("keep", [False, True])
def test_one_collective_gathers_a_group_and_one_reduces_it(keep: bool) -> None:
    m = ranks(2)
    _, model = made(m, reshard_after_forward=not keep)
    with dt.testing.MessageLog() as log:
        loss(model, batch()).backward()
    found = collectives(log)
    # the weights of the first layer are not needed again, as the batch has no gradient
    assert found.count("all_gather") == (3 if keep else 5)
    assert found.count("reduce_scatter") == 3


def test_a_group_is_gathered_before_the_computation_of_the_one_before() -> None:
    """Products: five of the forward pass, and two for each layer in the backward pass, but one for the first one."""
    m = ranks(2)
    x = shard(batch(), m, dp=0)
    for _ in range(2):  # what is new to the nodes has other commands
        loss(made(m, square)[1], x).backward()
    _, model = made(m, square)
    with dt.testing.MessageLog() as log:
        loss(model, x).backward()
    products, gathered, reduced = 0, [], []
    for name in log[0].commands:
        products += name in ("Call aten::mm", "Call aten::linear")
        if name.startswith("Collective all_gather"):
            gathered.append(products)
        if name.startswith("Collective reduce_scatter"):
            reduced.append(products)
    # the first two before any product, and those of the last two layers before the first of the backward pass
    assert gathered == [0, 0, 1, 2, 3, 5, 5, 7, 9]
    assert reduced == [7, 9, 11, 13, 14]


def test_a_part_is_all_that_a_node_keeps() -> None:
    """Parameters, gradients and AdamW's states, between steps; and the most of a forward pass."""
    m, width, depth = mesh(dp=NODES), 256, 6

    def deep() -> nn.Module:
        return nn.Sequential(*(nn.Linear(width, width) for _ in range(depth)))

    x = torch.randn(NODES, width)
    dt.synchronize()
    before = torch.node.memory_allocated("node:1")
    model = sharded(deep(), m)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
    layer = (width * width + width) * 4
    plain_model = depth * layer
    assert torch.node.memory_allocated("node:1") - before < 1.15 * 4 * plain_model / NODES + layer
    optimizer.zero_grad()
    peaks = []
    torch.node.reset_peak_memory_stats("node:1")
    out = model(x)
    peaks.append(torch.node.max_memory_allocated("node:1") - before)
    between = torch.node.memory_allocated("node:1") - before
    torch.node.reset_peak_memory_stats("node:1")
    out.sum().backward()
    peaks.append(torch.node.max_memory_allocated("node:1") - before)
    states = 3 * plain_model / NODES
    assert peaks[0] < 1.15 * states + 3 * layer  # this layer, as it comes and as a whole, or the next one on its way
    assert between < 1.15 * states + layer / 4
    assert peaks[1] < 1.15 * 4 * plain_model / NODES + 4 * layer  # and the gradients of one
    del out, model, optimizer
    gc.collect()
    assert torch.node.memory_allocated("node:1") - before < layer / 4


# ---- state -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [plain, Tied, normed])
def test_a_state_dict_is_the_plain_ones(make: Callable[[], nn.Module]) -> None:
    m = ranks(3)
    local, model = made(m, make)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    saved = torch.load(file)
    assert list(saved) == list(local.state_dict())
    for name, value in local.state_dict().items():
        assert torch.equal(saved[name], value)
    torch.manual_seed(8)
    other = make().double()
    _, there = made(m, make)
    for state in (other.state_dict(), {name: value.to(m.device) for name, value in other.state_dict().items()}):
        there.load_state_dict(state)
        for p in there.parameters():
            p.data.add_(1)
        there.load_state_dict(state)
        for got, wanted in zip(there.parameters(), other.parameters(), strict=True):
            assert torch.equal(whole(m, got, len(wanted)), wanted)
    there.load_state_dict(other.state_dict(), assign=True)
    there.to(m.device)  # buffers, which are now those of the other one
    x = shard(batch(), m, dp=0)
    there.train()(x).sum().backward()
    for got, wanted in zip(there.parameters(), other.parameters(), strict=True):
        assert torch.equal(whole(m, got, len(wanted)), wanted)
        assert got.grad is not None
    sharded_state = model.state_dict(keep_vars=True)
    assert [id(sharded_state[name]) for name, _ in model.named_parameters()] == [id(p) for p in model.parameters()]
    there.load_state_dict(sharded_state)
    for got, wanted in zip(there.parameters(), local.parameters(), strict=True):
        assert torch.equal(whole(m, got, len(wanted)), wanted)


#: What a program does between a load and the first forward pass.
AFTER_A_LOAD: dict[str, Callable[[Any], object]] = {
    "nothing": lambda model: None,
    "a save": lambda model: model.state_dict(),
    "a move": lambda model: model.to(ranks(2).device),
    "a reshard": lambda model: [layer.reshard() for layer in layers(model)],
    "a load of nothing": lambda model: model.load_state_dict({}, strict=False),
    "a load of whole ones": lambda model: (model[0].unshard(), model.load_state_dict({}, strict=False)),
}


@pytest.mark.parametrize("then", AFTER_A_LOAD)
def test_what_was_loaded_in_the_place_of_parts_stays(then: str) -> None:
    m = ranks(2)
    torch.manual_seed(8)
    other = plain().double()
    _, model = made(m)
    before = list(model.parameters())
    model.load_state_dict(other.state_dict(), assign=True)
    parts = list(model.parameters())
    assert not any(new is old for new, old in zip(parts, before, strict=True))
    AFTER_A_LOAD[then](model)
    for got, wanted in zip(parts, other.parameters(), strict=True):
        assert torch.equal(whole(m, got, len(wanted)), wanted)
    for name, value in model.state_dict().items():
        assert torch.equal(value.cpu(), other.state_dict()[name])
    loss(model, batch()).backward()
    loss(other, batch()).backward()
    same_gradients(m, model, other)


def test_an_optimizer_knows_what_was_loaded_as_parts() -> None:
    m = ranks(2)
    local, model = made(m)
    optimizer = adamw(local)
    loss(local, batch()).backward()
    optimizer.step()
    model.load_state_dict(local.state_dict(), assign=True)
    again = adamw(model)
    dt.training.load_whole_state_dict(again, optimizer.state_dict())
    for p, state in again.state.items():
        assert state["exp_avg"].shape == p.shape


def test_an_optimizers_states_are_the_plain_ones() -> None:
    m = ranks(3)
    local, model = made(m)
    optimizers = [adamw(net) for net in (local, model)]
    for net, optimizer in zip((local, model), optimizers, strict=True):
        loss(net, batch()).backward()
        optimizer.step()
    file = io.BytesIO()
    torch.save(dt.training.whole_state_dict(optimizers[1]), file)
    file.seek(0)
    saved, wanted = torch.load(file), optimizers[0].state_dict()
    assert saved["param_groups"] == wanted["param_groups"]
    for number, state in wanted["state"].items():
        for name, value in state.items():
            torch.testing.assert_close(saved["state"][number][name], value, rtol=1e-10, atol=1e-12)
    again = adamw(model)
    dt.training.load_whole_state_dict(again, saved)
    for optimizer, net in ((optimizers[0], local), (again, model)):
        optimizer.zero_grad()
        loss(net, batch()).backward()
        optimizer.step()
    for got, value in zip(model.parameters(), local.parameters(), strict=True):
        torch.testing.assert_close(whole(m, got, len(value)), value.detach(), rtol=1e-10, atol=1e-12)


def test_a_sharded_checkpoint_goes_on_elsewhere(tmp_path: Path) -> None:
    """Written by four nodes, while the first layer is whole, and read by three into a model from the meta device."""
    local, model = made(ranks(4))
    optimizers = [adamw(net) for net in (local, model)]
    for net, optimizer in zip((local, model), optimizers, strict=True):
        loss(net, batch()).backward()
        optimizer.step()
    model[0].unshard()
    dt.checkpoint.save({"model": model, "optim": optimizers[1]}, tmp_path / "saved")
    m = ranks(3)
    with torch.device("meta"):
        there = sharded(plain().double(), m)
    there.to_empty(device=m.device)
    optimizer = adamw(there)
    there[2].unshard()
    dt.checkpoint.load({"model": there, "optim": optimizer}, tmp_path / "saved")
    for net, one in ((local, optimizers[0]), (there, optimizer)):
        one.zero_grad()
        loss(net, batch()).backward()
        one.step()
    for got, value in zip(there.parameters(), local.parameters(), strict=True):
        torch.testing.assert_close(whole(m, got, len(value)), value.detach(), rtol=1e-10, atol=1e-12)


def test_what_is_on_the_mesh_begins_with_the_first_ranks_values() -> None:
    m = ranks(3)
    values = [torch.full((7, 2), float(i)) for i in range(3)]
    layer = nn.Linear(2, 7, bias=False).to(m.device)
    with torch.no_grad():
        layer.weight.copy_(from_shards(m, values))
    fully_shard(layer, m)
    assert torch.equal(whole(m, layer.weight, 7), values[0])


def test_over_one_dim_of_two() -> None:
    """Ranks that differ along the other have parameters, and gradients, of their own."""
    m = mesh(tp=2, dp=2)
    local, model = made(m)
    x = batch()
    parts = [[x[0:2], x[2:4]], [x[4:6], x[6:8]]]
    loss(model, from_shards(m, [part for row in parts for part in row])).backward()
    for tp in range(2):
        local.zero_grad()
        loss(local, torch.cat(parts[tp])).backward()
        for got, wanted in zip(model.parameters(), local.parameters(), strict=True):
            grad = torch.cat([got.grad.at(dp=dp, tp=tp).cpu() for dp in range(2)])[: len(wanted)]
            torch.testing.assert_close(grad, wanted.grad, rtol=1e-12, atol=1e-14)


def test_a_cast_and_a_move_are_of_the_parts() -> None:
    m = ranks(2)
    _, model = made(m, reshard_after_forward=False)
    model(batch())  # its layers have whole parameters now
    model.float()
    assert [p.dtype for p in model.parameters()] == [torch.float32] * 6
    assert [tuple(p.shape) for p in model.parameters()] == [(5, 6), (5,), (4, 9), (4,), (2, 7), (2,)]
    loss(model, batch().float()).backward()
    assert model[0].weight.grad.dtype is torch.float32
    model.to(mesh(dp=2, nodes=[2, 3]).device)
    with pytest.raises(RuntimeError, match=r"'weight' was sharded over Mesh\(dp=2, .* is on the mesh .*2 and 3"):
        model(batch().float())


def test_replicas_along_another_dim() -> None:
    """Hybrid sharding, against torch's: cut along dp, with copies along rep."""
    m = mesh(rep=2, dp=2)

    def by_hsdp(model: nn.Module) -> nn.Module:
        from torch.distributed import fsdp

        for layer in layers(model):
            fsdp.fully_shard(layer, mesh=device_mesh())
        return fsdp.fully_shard(model, mesh=device_mesh())  # type: ignore[no-any-return]

    torch.manual_seed(1)
    x, y = torch.randn(STEPS, 12, 6, dtype=DOUBLE), torch.randn(STEPS, 12, 3, dtype=DOUBLE)
    xs, ys = (shard(v, m, rep=1, dp=1) for v in (x, y))
    theirs = dt.run(
        lambda x, y: full(train(plain, by_hsdp, adamw, stepwise(clipped), x, y)), xs, ys, node=m, distributed=True
    )
    for place, options in ((m, {"replicas": "rep"}), (m["rep", "dp"], {})):  # our words, and torch's
        ours = train(plain, lambda model: sharded(model, place, **options), adamw, stepwise(clipped), xs, ys)  # noqa: B023
        for value, wanted in zip(ours, theirs[3], strict=True):
            torch.testing.assert_close(value.cpu(), wanted.cpu(), rtol=1e-11, atol=1e-12)  # alike on all four ranks
    _, model = made(m, replicas="rep")
    assert model(torch.ones(8, 6, dtype=DOUBLE)).shape == (2, 3)
    with pytest.raises(ValueError, match="over and replicas are two dims of the mesh, and both are 'dp'"):
        fully_shard(plain(), m, replicas="dp")


# ---- models that no node holds as a whole ----------------------------------------------------------------------------


class Small(nn.Module):
    """Of each kind of initialization some."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(6, 2, 7, batch_first=True) for _ in range(2))
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x: torch.Tensor) -> Any:
        x = self.table(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x.flatten(0, 1)))


def from_meta(m: Mesh) -> Any:
    with torch.device("meta"):
        model = Small()
    for block in model.blocks:
        fully_shard(block, m)
    fully_shard(model, m)
    assert all(p.is_meta for p in model.parameters())
    return model


@pytest.mark.parametrize("n", [2, 3])
def test_initial_values_are_the_plain_ones(n: int) -> None:
    m = ranks(n)
    model = from_meta(m)
    with pytest.raises(RuntimeError, match=r"initialize: 'table.weight' has no memory yet; module.to_empty"):
        dt.training.initialize(model)
    with pytest.raises(RuntimeError, match=r"'table.weight' has no memory yet, as it was made on the meta device"):
        model(torch.ones(6, 2, dtype=torch.int64))
    kept = list(model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert model.to_empty(device=m.device) is model
    assert [id(p) for p in model.parameters()] == [id(p) for p in kept]
    torch.manual_seed(3)
    dt.training.initialize(model)
    with torch.device("meta"):
        whole_one = Small()
    whole_one.to_empty(device="cpu")
    whole_one.head.weight = whole_one.table.weight  # here it has untied them
    torch.manual_seed(3)

    def reset(module: Any) -> None:
        for name in ("reset_parameters", "_reset_parameters"):
            getattr(module, name, lambda: None)()

    whole_one.apply(reset)
    assert list(model.state_dict()) == list(whole_one.state_dict())
    for got, wanted in zip(model.parameters(), whole_one.parameters(), strict=True):
        assert torch.equal(whole(m, got, len(wanted)), wanted)
    for (name, got), wanted in zip(model.state_dict().items(), whole_one.state_dict().values(), strict=True):
        assert torch.equal(got.cpu(), wanted), name
    before = model.head.weight.detach().clone()
    model(torch.arange(12).view(6, 2) % 11).sum().backward()
    optimizer.step()
    assert (model.head.weight != before).any().at(dp=0).item()  # type: ignore[union-attr]


def test_an_initialization_of_ones_own() -> None:
    m = ranks(3)
    model = from_meta(m).to_empty(device=m.device)

    def init(module: Any) -> None:
        if isinstance(module, nn.Linear):
            nn.init.orthogonal_(module.weight)  # of the whole
            if module.bias is not None:
                module.bias.copy_(torch.arange(float(len(module.bias))))

    torch.manual_seed(1)
    dt.training.initialize(model, init)
    weight = model.blocks[1].linear1.weight
    columns = whole(m, weight, 7)
    torch.testing.assert_close(columns.t() @ columns, torch.eye(6), atol=1e-5, rtol=0)
    assert whole(m, model.blocks[1].linear1.bias, 7).tolist() == list(range(7))
    with pytest.raises(RuntimeError, match=r"the function of 'blocks' wrote 'self_attn.*', which is in another group"):
        dt.training.initialize(model, lambda module: [p.zero_() for p in module.parameters()])
    with pytest.raises(TypeError, match=r"initialize: 1 \(Scale\) has parameters and no reset_parameters\(\)"):
        dt.training.initialize(fully_shard(nn.Sequential(nn.Linear(2, 2), Scale()), m))
    with pytest.raises(TypeError, match="takes a module, not list"):
        dt.training.initialize([])  # type: ignore[arg-type]


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))


@pytest.mark.parametrize("n", [2, 3])
def test_nodes_read_safetensors(n: int, tmp_path: Path) -> None:
    m = ranks(n)
    model, local = from_meta(m).to_empty(device=m.device), Small()
    state = {name: value for name, value in local.state_dict().items() if name != "head.weight"}  # tied: saved once
    names = list(state)
    save_file({name: state[name] for name in names[:5]}, tmp_path / "model-1.safetensors")
    save_file({name: state[name] for name in names[5:]}, tmp_path / "model-2.safetensors")
    for files in (tmp_path, [str(tmp_path / "model-2.safetensors"), tmp_path / "model-1.safetensors"]):
        for p in model.parameters():
            p.data.fill_(torch.nan)
        assert dt.training.load_safetensors(model, files) == ([], [])
        for got, wanted in zip(model.parameters(), local.parameters(), strict=True):
            assert torch.equal(whole(m, got, len(wanted)), wanted)
        for (name, got), wanted in zip(model.state_dict().items(), local.state_dict().values(), strict=True):
            assert torch.equal(got.cpu(), wanted), name
    found = dt.training.load_safetensors(model, tmp_path / "model-1.safetensors", strict=False)
    assert found.missing_keys == names[5:]
    assert found.unexpected_keys == []


def test_nodes_read_parts_of_tensor_parallel_and_plain_modules(tmp_path: Path) -> None:
    m = mesh(dp=2, tp=2)
    plain_one = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 5), nn.LayerNorm(5))
    save_file(plain_one.state_dict(), tmp_path / "x.safetensors")
    model = nn.Sequential(
        dt.nn.ColumnParallelLinear(5, 7, mesh=m), dt.nn.RowParallelLinear(7, 5, mesh=m), nn.LayerNorm(5).to(m.device)
    )
    dt.training.load_safetensors(model, tmp_path / "x.safetensors")
    for (name, got), wanted in zip(model.state_dict().items(), plain_one.state_dict().values(), strict=True):
        assert torch.equal(got.cpu(), wanted), name


def test_mistakes_with_safetensors(tmp_path: Path) -> None:
    m = ranks(2)
    model = made(m)[1]
    state = plain().state_dict()
    state["2.bias"] = torch.ones(8)
    state["more"] = state.pop("0.bias")
    save_file(state, tmp_path / "x.safetensors")
    with pytest.raises(RuntimeError, match="load_safetensors for FSDPSequential") as told:
        dt.training.load_safetensors(model, tmp_path / "x.safetensors")
    assert str(told.value).splitlines()[1:] == [
        "\tmissing: '0.bias'",
        "\tof nothing in the module: 'more'",
        "\t'2.bias' has shape (8,) in the file, (7,) in the module",
    ]
    with pytest.raises(FileNotFoundError):
        dt.training.load_safetensors(model, tmp_path / "y.safetensors")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=r"there is no \*\.safetensors in '.*empty'"):
        dt.training.load_safetensors(model, tmp_path / "empty")
    with pytest.raises(TypeError, match=r"'weight' is on cpu, and on no mesh; at the script or on one node it is"):
        dt.training.load_safetensors(nn.Linear(2, 2), tmp_path / "x.safetensors")
    with pytest.raises(RuntimeError, match=r"'table.weight' has no memory yet; module.to_empty"):
        dt.training.load_safetensors(from_meta(m), tmp_path / "x.safetensors")


# ---- mistakes --------------------------------------------------------------------------------------------------------


def test_mistakes_of_the_call() -> None:
    m = ranks(2)
    with pytest.raises(TypeError, match=r"takes a mesh, as in fully_shard\(model, dt.mesh\(dp=4\)\), not device"):
        fully_shard(plain(), m.device)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="takes a module, not list"):
        fully_shard([plain()], m)  # type: ignore[type-var]
    with pytest.raises(ValueError, match="has no dim 'tp'; it has dp"):
        fully_shard(plain(), m, over="tp")
    with pytest.raises(TypeError, match=r"over is the name of one dim of the mesh, .* not \('dp',\)"):
        fully_shard(plain(), m, over=("dp",))  # type: ignore[arg-type]
    with pytest.raises(
        TypeError, match=r"mp_policy is a torch\.distributed.*MixedPrecisionPolicy, not torch\.bfloat16"
    ):
        fully_shard(plain(), m, mp_policy=torch.bfloat16)
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'mp_polcy'.*mp_policy="):
        fully_shard(plain(), m, mp_polcy=None)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="reshard_after_forward is True or False, not 2"):
        fully_shard(plain(), m, reshard_after_forward=2)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="this Sequential is sharded already"):
        fully_shard(fully_shard(plain(), m), m)
    with pytest.raises(ValueError, match="a ModuleList has no forward pass"):
        fully_shard(nn.ModuleList([plain()]), m)
    scalar = nn.Linear(2, 2)
    scalar.scale = nn.Parameter(torch.tensor(1.0))
    with pytest.raises(ValueError, match=r"'scale' has no dimension that could be cut; make it .* shape \(1,\)"):
        fully_shard(scalar, m)
    with pytest.raises(ValueError, match=r"'0.weight' has no shape yet"):
        fully_shard(nn.Sequential(nn.LazyLinear(3)), m)
    with pytest.raises(ValueError, match=r"'weight' is cut along 'dp' already, by ColumnParallelLinear"):
        fully_shard(dt.nn.ColumnParallelLinear(4, 4, mesh=m, over="dp"), m)
    tied = Tied()
    fully_shard(tied.one, m)
    with pytest.raises(ValueError, match=r"'two.weight' is tied to a parameter that an earlier call has cut"):
        fully_shard(tied, m)
    _, model = made(m)
    with pytest.raises(TypeError, match=r"is not copied: make the plain Sequential anew"):
        copy.deepcopy(model)
    with pytest.raises(TypeError, match=r"is not pickled: save its state_dict\(\)"):
        torch.save(model, io.BytesIO())
    with pytest.raises(
        RuntimeError, match=r"mismatch for 0\.weight: \(8, 6\) in the checkpoint, \(9, 6\) is the whole"
    ):
        model.load_state_dict({**plain().state_dict(), "0.weight": torch.ones(8, 6)})
    with pytest.raises(dt.errors.RanksDiffer):
        model[0].weight.detach().cpu()


def test_parts_are_no_replicas() -> None:
    m = mesh(dp=2, tp=2)
    _, model = made(m)
    model(torch.ones(4, 6, dtype=DOUBLE)).sum().backward()
    for attempt in (
        lambda over: DataParallel(model, m, over),
        lambda over: dt.training.average_parameters(model, over),
        lambda over: dt.training.reduce_gradients(model, over),
        lambda over: dt.training.assert_replicas_equal(model, over),
    ):
        with pytest.raises(ValueError, match=r"'0\.weight' is cut along 'dp' \(.*\): each rank has another part of it"):
            attempt("dp")
        attempt("tp")
    with pytest.raises(ValueError, match=r"shape \(5, 6\) is cut along 'dp' .*each rank has another part"):
        dt.meshes.agree_(model.parameters())
    dt.meshes.agree_(model.parameters(), over="tp")


def test_mistakes_of_a_pass() -> None:
    m = ranks(3)
    _, model = made(m)
    with pytest.raises(ValueError, match=r"fully_shard: 8 rows .* do not divide among dp=3, .* leave 2 rows out"):
        model(batch(8))
    with pytest.raises(ValueError, match=r"fully_shard: an argument is on the mesh \(dp=2\)"):
        model(batch().to(ranks(2).device))
    with pytest.raises(RuntimeError, match="has a gradient itself"):
        loss(model, batch()).backward(create_graph=True)
    value = loss(model, batch())
    with torch.no_grad():
        model[4].weight.mul_(2)
    with pytest.raises(RuntimeError, match=r"group of 'weight' was written between a forward pass and its backward"):
        value.backward()
    _, model = made(m)
    x = shard(batch(), m, dp=0).requires_grad_()
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        model[4](model[2](checkpoint(model[0], x, use_reentrant=True))).sum().backward()
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        model[4](checkpoint(model[2], model[0](x), use_reentrant=True)).sum().backward()
    with pytest.raises(RuntimeError, match="a checkpoint is around the outermost module that is sharded, Sequential"):
        checkpoint(model, x, use_reentrant=False)
    table = fully_shard(nn.Embedding(4, 2, sparse=True), m)
    with pytest.raises(TypeError, match=r"gradient of 'weight' is torch\.sparse_coo, .*sparse=False"):
        table(torch.arange(3)).sum().backward()
    model[0].weight = nn.Parameter(torch.ones(9, 6, device=m.device, dtype=DOUBLE))
    with pytest.raises(RuntimeError, match=r"'weight' was replaced .* of shape \(9, 6\), .* part has \(3, 6\)"):
        model(batch())


def test_after_a_pass_that_failed_the_next_one_is_right() -> None:
    m = ranks(2)
    local, model = made(m)

    def broken(grad: torch.Tensor) -> None:
        raise KeyError("mine")

    out = model[:3](model[0].weight.new_ones(2, 6))
    out.register_hook(broken)
    with pytest.raises(KeyError, match="mine"):
        (model[4](out.tanh()).sum()).backward()
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(batch()[:, :5])
    assert model[0].weight.shape == (5, 6)
    model.zero_grad()
    loss(model, batch()).backward()
    loss(local, batch()).backward()
    same_gradients(m, model, local)
