"""Tensor parallel modules against the plain ones in float64: outputs, gradients, training, sizes that do not divide."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from equal import bits
from mesh_kit import connected
from torch import nn

import disttensor as dt
from disttensor.meshes import Mesh, from_shards, mesh, replicate, shard
from disttensor.nn import ColumnParallelLinear, ParallelEmbedding, RowParallelLinear

pytestmark = pytest.mark.usefixtures("settled")

NODES = 4
DOUBLE = torch.float64


@pytest.fixture(scope="module", autouse=True)
def session() -> Iterator[None]:
    with connected(NODES):
        yield


def pair() -> Mesh:
    return mesh(tp=2, nodes=[2, 0])


def three() -> Mesh:
    return mesh(tp=3, nodes=[1, 2, 3])


def grid() -> Mesh:
    return mesh(dp=2, tp=2)


MESHES = [pair, three, grid]


def close(got: torch.Tensor, wanted: torch.Tensor) -> None:
    """Asserts that all ranks have one value, and that it is the wanted one but for rounding."""
    torch.testing.assert_close(got.detach().cpu(), wanted.detach(), rtol=1e-12, atol=1e-12)


def whole(m: Mesh, x: torch.Tensor, size: int, dim: int) -> torch.Tensor:
    """The shards along tp, alike along other dims, put together here; what is behind ``size`` has to be zero."""
    parts = [x.detach().at(tp=at).cpu() for at in range(m.size("tp"))]  # type: ignore[attr-defined]
    joined = torch.cat(parts, dim)
    assert not joined.narrow(dim, size, joined.shape[dim] - size).any()
    return joined.narrow(dim, 0, size)


def seeded(make: Callable[[], Any], seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return make()


# ---- one module ------------------------------------------------------------------------------------------------------


@pytest.mark.row("T52")
@pytest.mark.parametrize("place", MESHES)
@pytest.mark.parametrize("out", [12, 7, 2, 1])
@pytest.mark.parametrize("bias", [True, False])
def test_column_parallel_is_linear(place: Callable[[], Mesh], out: int, bias: bool) -> None:
    m = place()
    there = seeded(lambda: ColumnParallelLinear(5, out, bias, mesh=m, dtype=DOUBLE))
    here = seeded(lambda: nn.Linear(5, out, bias, dtype=DOUBLE))
    x, weight = torch.randn(3, 4, 5, dtype=DOUBLE), torch.randn(out, dtype=DOUBLE)
    local, remote = x.clone().requires_grad_(), x.to(m.device).requires_grad_()
    y, z = here(local), there(remote)
    close(z, y)
    (y.square() * weight).sum().backward()
    (z.square() * weight.to(m.device)).sum().backward()
    close(remote.grad, local.grad)  # type: ignore[arg-type]
    close(whole(m, there.weight.grad, out, 0), here.weight.grad)  # type: ignore[arg-type]
    if bias:
        close(whole(m, there.bias.grad, out, 0), here.bias.grad)  # type: ignore[arg-type]


@pytest.mark.row("T52")
@pytest.mark.parametrize("place", MESHES)
@pytest.mark.parametrize("inner", [12, 7, 2, 1])
@pytest.mark.parametrize("bias", [True, False])
def test_row_parallel_is_linear(place: Callable[[], Mesh], inner: int, bias: bool) -> None:
    m = place()
    there = seeded(lambda: RowParallelLinear(inner, 5, bias, mesh=m, dtype=DOUBLE))
    here = seeded(lambda: nn.Linear(inner, 5, bias, dtype=DOUBLE))
    x = torch.randn(3, 4, inner, dtype=DOUBLE)
    local, remote = x.clone().requires_grad_(), x.to(m.device).requires_grad_()
    y, z = here(local), there(remote)
    close(z, y)
    y.square().sum().backward()
    z.square().sum().backward()
    close(remote.grad, local.grad)  # type: ignore[arg-type]
    close(whole(m, there.weight.grad, inner, 1), here.weight.grad)  # type: ignore[arg-type]
    if bias:
        close(there.bias.grad, here.bias.grad)  # type: ignore[arg-type]


@pytest.mark.parametrize("place", MESHES)
@pytest.mark.parametrize("vocabulary", [12, 7, 2])
@pytest.mark.parametrize("padding_idx", [None, 1, -1])
def test_parallel_embedding_is_embedding(place: Callable[[], Mesh], vocabulary: int, padding_idx: int | None) -> None:
    m = place()
    there = seeded(lambda: ParallelEmbedding(vocabulary, 3, padding_idx, mesh=m, dtype=DOUBLE))
    here = seeded(lambda: nn.Embedding(vocabulary, 3, padding_idx, dtype=DOUBLE))
    index = torch.cat([torch.arange(vocabulary), torch.randint(vocabulary, (8,))]).view(1, -1)
    y, z = here(index), there(index.to(m.device))
    assert torch.equal(z.detach().cpu(), y.detach())
    assert torch.equal(there(index.int().to(m.device)).detach().cpu(), y.detach())
    y.sin().sum().backward()
    z.sin().sum().backward()
    close(whole(m, there.weight.grad, vocabulary, 0), here.weight.grad)  # type: ignore[arg-type]
    assert there.padding_idx == here.padding_idx


def test_a_padding_row_keeps_its_values() -> None:
    """nn.Embedding gives what the row has; only its gradient is zero."""
    table = nn.Embedding(7, 3, padding_idx=2)
    with torch.no_grad():
        table.weight[2] = torch.tensor([1.0, 2.0, 3.0])
    m = three()
    there = ParallelEmbedding.from_plain(table, m)
    assert there(torch.tensor([2]).to(m.device)).tolist() == [[1.0, 2.0, 3.0]]


@pytest.mark.parametrize("index", [7, -1, 8, 100])
def test_an_index_out_of_range_is_an_error(index: int) -> None:
    """On every rank, although 7 and 8 are in the padding of the last one."""
    m = three()
    rows = ParallelEmbedding(7, 3, mesh=m)(torch.tensor([0, index]).to(m.device))
    for shard_ in rows.shards():
        with pytest.raises(IndexError, match="index out of range"):
            shard_.cpu()


def test_second_derivatives() -> None:
    m = three()
    up, down = ColumnParallelLinear(4, 5, mesh=m, dtype=DOUBLE), RowParallelLinear(5, 4, mesh=m, dtype=DOUBLE)
    local = nn.Sequential(up.to_plain(), nn.Tanh(), down.to_plain())
    x = torch.randn(3, 4, dtype=DOUBLE)
    found = []
    for model, at in ((local, x.clone()), (nn.Sequential(up, nn.Tanh(), down), x.to(m.device))):
        at.requires_grad_()
        (first,) = torch.autograd.grad(model(at).square().sum(), at, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), at)
        found.append((first, second))
    for got, wanted in zip(found[1], found[0], strict=True):
        close(got, wanted)


# ---- two together ----------------------------------------------------------------------------------------------------


def mlp(m: Mesh | None, hidden: int = 7, gather: bool = False, act: type[nn.Module] = nn.GELU) -> nn.Sequential:
    torch.manual_seed(0)
    if m is None:
        return nn.Sequential(
            nn.Embedding(11, 5, dtype=DOUBLE), nn.Linear(5, hidden, dtype=DOUBLE), act(),
            nn.Linear(hidden, 5, dtype=DOUBLE), nn.LayerNorm(5, dtype=DOUBLE), nn.Linear(5, 11, dtype=DOUBLE),
        )  # fmt: skip
    return nn.Sequential(
        ParallelEmbedding(11, 5, mesh=m, dtype=DOUBLE),
        ColumnParallelLinear(5, hidden, gather_output=gather, mesh=m, dtype=DOUBLE),
        act(),
        RowParallelLinear(hidden, 5, input_is_parallel=not gather, mesh=m, dtype=DOUBLE),
        nn.LayerNorm(5, dtype=DOUBLE).to(m.device),
        ColumnParallelLinear(5, 11, mesh=m, dtype=DOUBLE),
    )


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
}


def tokens() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    index = torch.randint(11, (2, 4, 6), generator=generator)
    return index[0], index[1]


def fit(model: nn.Module, m: Mesh | None, optimizer: str, steps: int = 5) -> list[torch.Tensor]:
    """The losses; a mesh that has a dp gets parts of the batch, and the mean of their gradients."""
    x, y = tokens()
    parallel = m is not None and "dp" in m.names
    if m is not None:
        x, y = (shard(v, m, dp=0) if parallel else replicate(v, m) for v in (x, y))
    made, losses = OPTIMIZERS[optimizer](model.parameters()), []
    for _ in range(steps):
        made.zero_grad()
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        if parallel:
            for p in model.parameters():
                dt.collectives.all_reduce_(p.grad, "avg", over="dp")  # type: ignore[arg-type]
        made.step()
        losses.append(dt.all_reduce(loss.detach(), "avg", over="dp") if parallel else loss.detach())
    return losses  # type: ignore[return-value]


@pytest.mark.parametrize("place", MESHES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("gather", [False, True])
def test_training_is_the_plain_training(place: Callable[[], Mesh], optimizer: str, gather: bool) -> None:
    """Five steps: losses, all parameters, and zeros in the padding."""
    m = place()
    here, there = mlp(None), mlp(m, gather=gather)
    for got, wanted in zip(fit(there, m, optimizer), fit(here, None, optimizer), strict=True):
        close(got, wanted)
    for (name, got), wanted in zip(there.state_dict().items(), here.state_dict().values(), strict=True):
        torch.testing.assert_close(got.cpu(), wanted, rtol=1e-10, atol=1e-10, msg=name)
    whole(m, there[0].weight, 11, 0)
    whole(m, there[1].weight, 7, 0)
    whole(m, there[1].bias, 7, 0)
    whole(m, there[3].weight, 7, 1)


@pytest.mark.parametrize("act", [nn.Sigmoid, nn.LogSigmoid, nn.Softplus])
def test_an_activation_that_makes_something_of_zero(act: type[nn.Module]) -> None:
    """The padding is no zero behind it: still nothing of it is in the output, or in a gradient."""
    m = three()
    here, there = mlp(None, act=act), mlp(m, act=act)
    for got, wanted in zip(fit(there, m, "adamw"), fit(here, None, "adamw"), strict=True):
        close(got, wanted)
    whole(m, there[3].weight.grad, 7, 1)
    whole(m, there[3].weight, 7, 1)


def test_what_is_not_finite_in_the_padding_counts_for_nothing() -> None:
    m = three()
    down = RowParallelLinear(7, 5, input_is_parallel=True, mesh=m, dtype=DOUBLE)
    x = torch.randn(4, 9, dtype=DOUBLE)
    x[:, 7:] = float("inf")
    close(down(shard(x, m, tp=1)), down.to_plain()(x[:, :7]))


def test_the_padding_of_a_rank_s_own_features_is_zero() -> None:
    """Whatever a user's own initialization has made of it, and without a gradient, whatever looks at it."""
    m = three()
    layer = ColumnParallelLinear(5, 7, gather_output=False, mesh=m, dtype=DOUBLE)
    with torch.no_grad():
        layer.weight.fill_(1)
        layer.bias.fill_(2)  # type: ignore[union-attr]
    y = layer(torch.randn(3, 5, dtype=DOUBLE).to(m.device))
    assert whole(m, y, 7, 1).all()
    y.exp().sum().backward()
    assert whole(m, layer.weight.grad, 7, 0).any()  # type: ignore[arg-type]
    assert whole(m, layer.bias.grad, 7, 0).any()  # type: ignore[union-attr, arg-type]


def test_the_loss_of_ranks_that_are_alike_counts_once() -> None:
    """And not once a rank: a parameter that is not cut has the plain gradient on each, and a collective with the
    gradients of dt.all_reduce would have three times that."""
    m = three()
    x = torch.randn(4, 7, dtype=DOUBLE)
    scale = torch.ones(7, dtype=DOUBLE, device=m.device, requires_grad=True)
    layer = RowParallelLinear(7, 5, mesh=m, dtype=DOUBLE)
    layer(x.to(m.device) * scale).square().sum().backward()
    plain = torch.ones(7, dtype=DOUBLE, requires_grad=True)
    layer.to_plain()(x * plain).square().sum().backward()
    close(scale.grad, plain.grad)  # type: ignore[arg-type]


def test_the_gradient_of_what_was_copied_to_the_mesh_is_the_sum_of_all_ranks() -> None:
    """As docs/MESHES.md says of each copy to a mesh, and docs/TENSOR_PARALLEL.md of these modules."""
    m = three()
    layer = ColumnParallelLinear(4, 7, mesh=m, dtype=DOUBLE)
    x = torch.randn(3, 4, dtype=DOUBLE, requires_grad=True)
    layer(replicate(x, m)).square().sum().backward()
    y = x.detach().clone().requires_grad_()
    layer.to_plain()(y).square().sum().backward()
    close(x.grad, 3 * y.grad)  # type: ignore[arg-type, operator]


# ---- beside them -----------------------------------------------------------------------------------------------------


def test_dropout_is_alike_along_tp_and_differs_along_dp() -> None:
    m = grid()
    up = ColumnParallelLinear(8, 8, gather_output=False, mesh=m)
    down = RowParallelLinear(8, 64, input_is_parallel=True, mesh=m)
    x = torch.ones(4, 8).to(m.device)
    with dt.meshes.varying("dp"):
        y = F.dropout(down(up(x).relu()), 0.5)
    values = [bits(shard_.detach().cpu()) for shard_ in y.shards()]
    assert values[0] == values[1]
    assert values[2] == values[3]
    assert values[0] != values[2]
    y.sum().backward()
    down.bias.grad.at(dp=0).cpu()  # type: ignore[union-attr]
    down.bias.grad.at(dp=1).cpu()  # type: ignore[union-attr]


def test_autocast() -> None:
    m = pair()
    there = nn.Sequential(ColumnParallelLinear(8, 7, gather_output=False, mesh=m), nn.ReLU(),
                          RowParallelLinear(7, 6, input_is_parallel=True, mesh=m))  # fmt: skip
    here = nn.Sequential(there[0].to_plain(), nn.ReLU(), there[2].to_plain())
    x = torch.randn(16, 8)
    with torch.autocast("node", dtype=torch.bfloat16):
        got = there(x.to(m.device))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        wanted = here(x)
    assert got.dtype == wanted.dtype == torch.bfloat16
    torch.testing.assert_close(got.detach().cpu(), wanted.detach(), rtol=2e-2, atol=2e-2)
    got.float().square().sum().backward()
    wanted.float().square().sum().backward()
    assert there[0].weight.grad.dtype == torch.float32
    torch.testing.assert_close(whole(m, there[2].weight.grad, 7, 1), here[2].weight.grad, rtol=5e-2, atol=5e-2)


@pytest.mark.parametrize("place", [three, grid])
def test_a_graph(place: Callable[[], Mesh]) -> None:
    m = place()
    eager, recorded = mlp(m), mlp(m)
    x, y = (v.to(m.device) for v in tokens())

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        optimizer.step()
        return loss.detach()

    first, second = (torch.optim.SGD(model.parameters(), lr=0.1) for model in (eager, recorded))
    wanted = [step(eager, first).item() for _ in range(4)]
    losses = [step(recorded, second).item()]
    graph = dt.Graph()
    with dt.graph(graph):
        loss = step(recorded, second)
    for _ in range(3):
        graph.replay()
        losses.append(loss.item())
    assert losses == wanted


def test_transforms_of_torch_func() -> None:
    m = three()
    layer = ColumnParallelLinear(4, 7, mesh=m, dtype=DOUBLE)
    x = torch.randn(3, 4, dtype=DOUBLE)
    got = torch.func.grad(lambda v: layer(v).square().sum())(x.to(m.device))
    plain = layer.to_plain()
    close(got, torch.func.grad(lambda v: plain(v).square().sum())(x))


# ---- from and to the plain modules -----------------------------------------------------------------------------------

PLAIN: list[tuple[Callable[[], nn.Module], Callable[[Any, Mesh], nn.Module]]] = [
    (lambda: nn.Linear(5, 7), ColumnParallelLinear.from_plain),
    (lambda: nn.Linear(7, 5), RowParallelLinear.from_plain),
    (lambda: nn.Linear(7, 5, bias=False), RowParallelLinear.from_plain),
    (lambda: nn.Embedding(7, 5, padding_idx=3), ParallelEmbedding.from_plain),
]


@pytest.mark.parametrize("place", MESHES)
@pytest.mark.parametrize("case", range(len(PLAIN)))
def test_there_and_back(place: Callable[[], Mesh], case: int) -> None:
    m, (make, convert) = place(), PLAIN[case]
    plain = make().eval()
    plain.weight.requires_grad_(False)  # type: ignore[union-attr, operator]
    remote = copy.deepcopy(plain).to(m.device)
    for module in (plain, remote):
        made: Any = convert(module, m)
        assert [p.requires_grad for p in made.parameters()] == [p.requires_grad for p in plain.parameters()]
        back = made.to_plain()
        assert type(back) is type(plain)
        assert str(back) == str(plain)
        assert not made.training
        assert not back.training
        for got, wanted in zip(back.parameters(), plain.parameters(), strict=True):
            assert torch.equal(got.detach(), wanted.detach())
            assert got.requires_grad == wanted.requires_grad


def test_where_factories_make_tensors_makes_no_difference() -> None:
    """In ``with torch.device(...)``: the values are the script's, the module is on its mesh."""
    m = three()
    plain = seeded(lambda: nn.Linear(5, 7))
    for where in (m.device, "node:1", "cpu"):
        with torch.device(where):
            made = seeded(lambda: ColumnParallelLinear(5, 7, mesh=m))
            back = made.to_plain()
            rank = m.coordinate("tp")
        assert made.weight.device == rank.device == m.device
        assert back.weight.device.type == "cpu"
        assert torch.equal(back.weight, plain.weight)


def test_a_module_on_the_mesh_is_copied() -> None:
    m = three()
    plain = nn.Linear(7, 5).to(m.device)
    made = RowParallelLinear.from_plain(plain, m)
    with torch.no_grad():
        for p in plain.parameters():
            p.zero_()
    assert all(p.any() for p in made.to_plain().parameters())


def test_a_checkpoint_is_plain() -> None:
    """What is saved on one mesh loads in the plain model, and on another mesh; what is loaded is cut."""
    there, here = mlp(grid()), mlp(None)
    fit(there, grid(), "adamw", 2)
    file = io.BytesIO()
    torch.save(there.state_dict(), file)
    file.seek(0)
    saved = torch.load(file)
    assert {name: tuple(v.shape) for name, v in saved.items()} == {
        name: tuple(v.shape) for name, v in here.state_dict().items()
    }
    here.load_state_dict(saved)
    for m in (three(), grid()):
        other = mlp(m)
        with torch.no_grad():
            for p in other.parameters():
                p.zero_()
        other.load_state_dict(saved)
        x, _ = tokens()
        close(other(x.to(m.device)), here(x))
        whole(m, other[1].weight, 7, 0)
    assigned = mlp(three())
    assigned.load_state_dict(mlp(three()).state_dict(), assign=True)  # of tensors on the mesh
    close(assigned(tokens()[0].to(three().device)), mlp(None)(tokens()[0]))


def test_a_checkpoint_of_another_size_is_refused() -> None:
    layer = ColumnParallelLinear(5, 7, mesh=three())
    with pytest.raises(
        RuntimeError, match=r"size mismatch for weight: \(9, 5\) in the checkpoint, \(7, 5\) is the whole"
    ):
        layer.load_state_dict(nn.Linear(5, 9).state_dict())
    with pytest.raises(RuntimeError, match="Missing key") as told:
        layer.load_state_dict({})
    assert "bias" in str(told.value)
    with pytest.raises(RuntimeError, match="Unexpected key"):
        layer.load_state_dict({**layer.state_dict(), "other": torch.ones(1)})


def test_ranks_that_differ_along_dp_have_no_plain_module() -> None:
    m = grid()
    layer = ColumnParallelLinear(5, 6, mesh=m)
    with torch.no_grad():
        layer.weight.at(dp=1, tp=0).add_(1)  # type: ignore[operator]
    with pytest.raises(dt.errors.RanksDiffer):
        layer.to_plain()


def test_a_copy_is_a_module_of_its_own() -> None:
    layer = RowParallelLinear(7, 5, mesh=three())
    copied = copy.deepcopy(layer)
    with torch.no_grad():
        copied.weight.zero_()
    assert layer.to_plain().weight.any()
    assert not copied.to_plain().weight.any()
    with pytest.raises(TypeError, match=r"RowParallelLinear is not pickled.*state_dict\(\)"):
        torch.save(layer, io.BytesIO())


# ---- tools of torch that look at all parameters ----------------------------------------------------------------------


def backward(model: nn.Module, m: Mesh | None) -> None:
    x, y = tokens()
    parallel = m is not None and "dp" in m.names
    if m is not None:
        x, y = (shard(v, m, dp=0) if parallel else replicate(v, m) for v in (x, y))
    F.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
    for p in model.parameters() if parallel else ():
        dt.collectives.all_reduce_(p.grad, "avg", over="dp")  # type: ignore[arg-type]


@pytest.mark.parametrize("place", MESHES)
@pytest.mark.parametrize("norm_type", [2.0, 1.0, "inf"])
@pytest.mark.parametrize("clip", [nn.utils.clip_grad_norm_, dt.training.clip_grad_norm_])
def test_clipping_counts_each_part_once_and_what_all_have_once(
    place: Callable[[], Mesh], norm_type: Any, clip: Callable[..., torch.Tensor]
) -> None:
    m = place()
    here, there = mlp(None), copy.deepcopy(mlp(m))
    backward(here, None)
    backward(there, m)
    close(
        torch.nn.utils.get_total_norm([p.grad for p in there.parameters()], norm_type),  # type: ignore[misc]
        torch.nn.utils.get_total_norm([p.grad for p in here.parameters()], norm_type),
    )  # type: ignore[misc]
    close(clip(there.parameters(), 0.01, norm_type), clip(here.parameters(), 0.01, norm_type))
    close(there[4].weight.grad, here[4].weight.grad)  # type: ignore[arg-type]
    close(whole(m, there[3].weight.grad, 7, 1), here[3].weight.grad)  # type: ignore[arg-type]
    close(torch.nn.utils.get_total_norm([there[4].weight.grad]), here[4].weight.grad.norm())  # type: ignore[list-item, union-attr]


def test_a_norm_that_would_count_padding_is_refused() -> None:
    m = three()
    model = mlp(m)
    backward(model, m)
    with pytest.raises(ValueError, match=r"order -inf of gradients that are cut .* would count their padding"):
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, float("-inf"))
    model[3].weight.grad.at(tp=2)[0, 0] = torch.inf
    with pytest.raises(RuntimeError, match="non-finite"):
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert model[4].weight.grad.cpu().eq(0).all()  # alike on all ranks


def test_a_gradient_that_is_not_finite_on_one_rank_stops_the_step_of_all() -> None:
    m = three()
    model = mlp(m).float()
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("node", init_scale=4.0)
    before = [p.detach().clone() for p in model.parameters()]
    x, y = (v.to(m.device) for v in tokens())
    for at in (1, None):
        optimizer.zero_grad()
        scaler.scale(F.cross_entropy(model(x).flatten(0, 1), y.flatten())).backward()
        if at is not None:
            model[3].weight.grad.at(tp=at)[0, 0] = torch.inf
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == 2.0
        moved = [(p != b).any() for p, b in zip(model.parameters(), before, strict=True)]
        for rank in range(3):
            assert {bool(one.at(tp=rank).item()) for one in moved} == {at is None}  # type: ignore[attr-defined]
    model[4].weight.detach().cpu()  # still alike on all ranks


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_an_optimizers_states_are_put_together_and_taken_apart(optimizer: str) -> None:
    """After three steps, saved; two more, here and on two meshes, from what was saved."""
    first = mlp(grid())
    made = OPTIMIZERS[optimizer](first.parameters())
    steps(first, made, grid(), 3)
    with pytest.raises(dt.errors.RanksDiffer, match=r"whole_state_dict\(optimizer\) put the parts together"):
        torch.save(made.state_dict(), io.BytesIO())
    saved = io.BytesIO()
    torch.save((first.state_dict(), dt.training.whole_state_dict(made)), saved)
    here = mlp(None)
    plain = OPTIMIZERS[optimizer](here.parameters())
    saved.seek(0)
    weights, states = torch.load(saved)
    here.load_state_dict(weights)
    plain.load_state_dict(copy.deepcopy(states))  # an optimizer goes on with the tensors that it is given
    assert [
        {name: getattr(v, "shape", v) for name, v in state.items()} for state in plain.state_dict()["state"].values()
    ] == [{name: getattr(v, "shape", v) for name, v in state.items()} for state in states["state"].values()]
    steps(here, plain, None, 2)
    for m in (three(), grid()):
        there = mlp(m)
        there.load_state_dict(weights)
        again = OPTIMIZERS[optimizer](there.parameters())
        dt.training.load_whole_state_dict(again, copy.deepcopy(states))
        steps(there, again, m, 2)
        for name, value in there.state_dict().items():
            torch.testing.assert_close(value.cpu(), here.state_dict()[name], rtol=1e-10, atol=1e-10, msg=name)
        whole(m, there[1].weight, 7, 0)
    with pytest.raises(TypeError, match="whole states are those of an optimizer, not of Sequential"):
        dt.training.whole_state_dict(first)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="different number of parameter groups"):
        dt.training.load_whole_state_dict(again, {"state": {}, "param_groups": []})


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, m: Mesh | None, count: int) -> None:
    for _ in range(count):
        optimizer.zero_grad()
        backward(model, m)
        optimizer.step()


def test_weights_are_tied() -> None:
    """The table and the output layer are cut alike, so one parameter can be both."""
    m = three()
    table, out = ParallelEmbedding(7, 4, mesh=m, dtype=DOUBLE), ColumnParallelLinear(4, 7, False, mesh=m, dtype=DOUBLE)
    out.weight = table.weight
    local, last = table.to_plain(), nn.Linear(4, 7, False, dtype=DOUBLE)
    last.weight = local.weight
    index = torch.tensor([0, 3, 6, 3])
    out(table(index.to(m.device)).tanh()).square().sum().backward()
    last(local(index).tanh()).square().sum().backward()
    close(whole(m, table.weight.grad, 7, 0), local.weight.grad)  # type: ignore[arg-type]


def test_a_repr_says_how_it_is_cut() -> None:
    m = three()
    assert str(ColumnParallelLinear(5, 7, mesh=m)) == (
        "ColumnParallelLinear(in_features=5, out_features=7 over tp=3, bias=True, gather_output=True)"
    )
    assert str(RowParallelLinear(7, 5, False, mesh=m)) == (
        "RowParallelLinear(in_features=7 over tp=3, out_features=5, bias=False, input_is_parallel=False)"
    )
    assert str(ParallelEmbedding(7, 5, 1, mesh=m)) == "ParallelEmbedding(7 over tp=3, 5, padding_idx=1)"
    layer = RowParallelLinear(7, 5, mesh=m)
    assert (layer.mesh, layer.over, layer.in_features_per_rank) == (m, "tp", 3)


# ---- errors ----------------------------------------------------------------------------------------------------------


def test_what_is_no_mesh_or_no_dim() -> None:
    m = three()
    with pytest.raises(ValueError, match=r"Mesh\(tp=3, .*\) has no dim 'model'; it has tp"):
        ColumnParallelLinear(5, 7, mesh=m, over="model")
    with pytest.raises(TypeError, match=r"takes a mesh, as in mesh=dt.mesh\(dp=2, tp=2\), not device"):
        RowParallelLinear(5, 7, mesh=m.device)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"over is the name of one dim of the mesh, .* not \('dp', 'tp'\)"):
        ParallelEmbedding(5, 7, mesh=grid(), over=("dp", "tp"))  # type: ignore[arg-type]


def test_an_input_that_is_elsewhere() -> None:
    layer, x = ColumnParallelLinear(5, 7, mesh=three()), torch.ones(2, 5)
    for where in (x, x.to("node:1"), x.to(grid().device)):
        with pytest.raises(
            TypeError, match=r"is on the mesh \(tp=3\) .* and its input \(2, 5\) on .*x.to\(mesh.device\)"
        ):
            layer(where)
    with pytest.raises(TypeError, match=r"takes a tensor on the mesh .* not list"):
        layer([1.0])
    with pytest.raises(TypeError, match="on the script"):
        ParallelEmbedding(5, 7, mesh=three())(torch.tensor([1]))


def test_an_input_of_another_size() -> None:
    m = three()
    with pytest.raises(ValueError, match=r"the last dimension of the input \(2, 4\) has to be 5, in_features"):
        ColumnParallelLinear(5, 7, mesh=m)(torch.ones(2, 4, device=m.device))
    with pytest.raises(ValueError, match=r"\(\) has to be 5"):
        ColumnParallelLinear(5, 7, mesh=m)(torch.ones((), device=m.device))
    with pytest.raises(
        ValueError, match=r"\(2, 7\) has to be 3, a rank's part of in_features=7 over tp=3; input_is_par"
    ):
        RowParallelLinear(7, 5, input_is_parallel=True, mesh=m)(torch.ones(2, 7, device=m.device))
    with pytest.raises(ValueError, match=r"\(2, 3\) has to be 7, in_features; input_is_parallel=True takes"):
        RowParallelLinear(7, 5, mesh=m)(torch.ones(2, 3, device=m.device))


def test_a_module_that_was_moved() -> None:
    m, other = pair(), mesh(tp=2, nodes=[0, 1])
    layer = ColumnParallelLinear(5, 7, mesh=m).to(other.device)
    with pytest.raises(
        RuntimeError, match=r"was made on the mesh .* 2 and 0 .* its weight is on .* 0 and 1 .*from_plain"
    ):
        layer(torch.ones(2, 5, device=other.device))


def test_modules_that_are_not_taken() -> None:
    m = three()
    with pytest.raises(TypeError, match=r"takes an nn.Linear, not Embedding"):
        ColumnParallelLinear.from_plain(nn.Embedding(3, 4), m)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"takes an nn.Embedding, not Linear"):
        ParallelEmbedding.from_plain(nn.Linear(3, 4), m)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"has no max_norm, and this nn.Embedding has max_norm=1.0"):
        ParallelEmbedding.from_plain(nn.Embedding(3, 4, max_norm=1.0), m)
    with pytest.raises(TypeError, match=r"is on the mesh .* and these values on the mesh"):
        ColumnParallelLinear.from_plain(nn.Linear(3, 4).to(grid().device), m)


def test_shards_of_a_local_batch_are_parts_of_it() -> None:
    """dt.meshes.from_shards, too: a row parallel layer takes any tensor whose ranks have their own features."""
    m = three()
    down = RowParallelLinear(6, 4, input_is_parallel=True, mesh=m, dtype=DOUBLE)
    x = torch.randn(2, 6, dtype=DOUBLE)
    close(down(from_shards(m, x.chunk(3, 1))), down.to_plain()(x))
