"""torch.nn.SyncBatchNorm on a mesh against BatchNorm of the whole batch in one process."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from mesh_kit import connected
from torch import nn

import disttensor as dt
from disttensor import mesh, shard
from disttensor.meshes import Mesh

pytestmark = pytest.mark.usefixtures("settled")

DOUBLE = torch.float64
STEPS = 3


@pytest.fixture(scope="module", autouse=True)
def session() -> Iterator[None]:
    with connected(4):
        yield


def synced(module: nn.Module, m: Mesh, group: Any = None) -> Any:
    return nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(module), group).to(m.device)


def layer(dims: int, **options: Any) -> nn.Module:
    kind = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}[dims]
    made: nn.Module = kind(3, dtype=DOUBLE, **options)
    for p in made.parameters():
        nn.init.normal_(p)
    return made


def close(got: torch.Tensor, expected: torch.Tensor, **bounds: float) -> None:
    torch.testing.assert_close(got, expected, **(bounds or {"rtol": 1e-12, "atol": 1e-12}))


def whole(x: Any) -> torch.Tensor:
    """What the ranks have, one below the other."""
    return torch.cat([part.detach().cpu() for part in x.shards()])


def state(module: nn.Module) -> dict[str, torch.Tensor]:
    """The buffers of a module, which have to be alike on all ranks."""
    return {name: buffer.cpu() for name, buffer in module.named_buffers()}


FORMS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "rows": ((8, 3), {}),
    "one row a rank": ((4, 3), {}),
    "sequences": ((8, 3, 5), {"momentum": 0.3}),
    "images": ((8, 3, 4, 5), {"eps": 1e-2}),
    "volumes": ((4, 3, 2, 3, 2), {}),
    "not affine": ((8, 3), {"affine": False}),
    "the mean of all batches": ((8, 3, 4, 5), {"momentum": None}),
    "no running statistics": ((8, 3), {"track_running_stats": False}),
}


@pytest.mark.parametrize("grid", [{"dp": 4}, {"dp": 2, "sp": 2}], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_the_layer_is_batch_norm_of_the_whole_batch(form: str, grid: dict[str, int]) -> None:
    shape, options = FORMS[form]
    m = mesh(**grid)
    local = layer(len(shape), **options)
    ours = synced(local, m)
    for step in range(STEPS):
        x = (torch.randn(shape, dtype=DOUBLE) * 3 + 100 * step).requires_grad_()
        g = torch.randn(shape, dtype=DOUBLE)
        parts, slopes = (dt.meshes.from_shards(m, list(v.detach().chunk(4))) for v in (x, g))
        parts.requires_grad_()
        out, expected = ours(parts), local(x)
        out.backward(slopes)
        expected.backward(g)
        close(whole(out), expected)
        close(whole(parts.grad), x.grad)  # type: ignore[arg-type]
        for p, q in zip(ours.parameters(), local.parameters(), strict=True):
            close(torch.stack([part.cpu() for part in p.grad.shards()]).sum(0), q.grad)
    close_states(ours, local)
    ours.eval()
    local.eval()
    x = x.detach()  # without running statistics each rank takes those of its own rows then, as torch's layer does
    alone = torch.cat([local(rows) for rows in x.chunk(4)]) if form != "one row a rank" else local(x)
    close(whole(ours(parts)), alone)
    close_states(ours, local)


def close_states(ours: nn.Module, local: nn.Module) -> None:
    expected = state(local)
    assert state(ours).keys() == expected.keys()
    for name, buffer in state(ours).items():
        close(buffer, expected[name])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_halves_have_statistics_in_float32(dtype: torch.dtype) -> None:
    m, local = mesh(dp=4), nn.BatchNorm2d(3)
    ours = synced(local, m)
    x = (torch.randn(8, 3, 16, 16) + 30).to(dtype)
    out = ours(shard(x, m, dp=0))
    assert out.dtype is dtype
    close(whole(out).float(), local(x.float()).detach(), rtol=torch.finfo(dtype).eps, atol=1e-5)
    for name, buffer in state(ours).items():
        close(buffer, state(local)[name], rtol=1e-5, atol=1e-6)


def test_channels_last() -> None:
    m, local = mesh(dp=4), layer(4)
    x = torch.randn(8, 3, 4, 5, dtype=DOUBLE).contiguous(memory_format=torch.channels_last)
    parts = shard(x, m, dp=0).contiguous(memory_format=torch.channels_last)
    out = synced(local, m)(parts)
    assert out.is_contiguous(memory_format=torch.channels_last)
    close(whole(out), local(x))


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 2)).to(DOUBLE)


def fit(model: Any, x: Any, y: Any) -> list[Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for i in range(len(x)):
        optimizer.zero_grad()
        F.mse_loss(model(x[i]), y[i]).backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


WRAPPED = {
    "DataParallel": lambda module, m: dt.DataParallel(module, m),
    "DataParallel, buckets of one": lambda module, m: dt.DataParallel(module, m, bucket_mb=1e-4),
    "fully_shard": lambda module, m: dt.fully_shard(module, m),
}


@pytest.mark.parametrize("graphed", [False, True])
@pytest.mark.parametrize("wrap", WRAPPED)
def test_training_is_that_of_one_process(wrap: str, graphed: bool) -> None:
    m, local = mesh(dp=4), network()
    x, y = torch.randn(5, 12, 6, dtype=DOUBLE), torch.randn(5, 12, 2, dtype=DOUBLE)
    module = synced(local, m)
    model: Any = WRAPPED[wrap](module, m)
    xs, ys = shard(x, m, dp=1), shard(y, m, dp=1)
    if graphed:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

        @dt.graphed
        def step(x: Any, y: Any) -> Any:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            return loss.detach()

        for i in range(5):
            step(xs[i], ys[i])
    else:
        fit(model, xs, ys)
    fit(local, x, y)
    close_states(module, local)
    probe = torch.randn(4, 6, dtype=DOUBLE)
    model.eval()
    close(whole(model(shard(probe, m, dp=0))), local.eval()(probe))


def test_along_dims_by_name() -> None:
    """Ranks along another dim have channels of their own."""
    m = mesh(dp=2, tp=2)
    locals = [layer(2), layer(2)]
    ours = synced(locals[0], m, "dp")
    x = torch.randn(2, 8, 3, dtype=DOUBLE)  # of each coordinate along tp
    parts = dt.meshes.from_shards(m, [x[tp, dp * 4 : dp * 4 + 4] for dp in range(2) for tp in range(2)])
    out = ours(parts)
    locals[1].load_state_dict(locals[0].state_dict())
    for tp, local in enumerate(locals):
        close(torch.cat([out.at(dp=dp, tp=tp).cpu() for dp in range(2)]), local(x[tp]))
        close(ours.running_var.at(dp=1, tp=tp).cpu(), local.running_var)  # type: ignore[arg-type]
    every = layer(2)
    both = synced(every, m, ["dp", "tp"])(parts)
    close(whole(both), every(whole(parts)))


def test_what_a_process_group_can_not_be() -> None:
    m = mesh(dp=4)
    x = shard(torch.randn(8, 3), m, dp=0)
    for group in (object(), 3, (), [1]):
        with pytest.raises(TypeError, match=r"process_group is the name of a dim of the mesh.*\(dp\)"):
            nn.SyncBatchNorm(3, process_group=group, device=m.device)(x)
    with pytest.raises(ValueError, match=r"SyncBatchNorm.*'tp'"):
        nn.SyncBatchNorm(3, process_group="tp", device=m.device)(x)
    with pytest.raises(ValueError, match="at least 2D input"):
        nn.SyncBatchNorm(3, device=m.device)(x[:, 0])


def test_elsewhere_it_is_torchs() -> None:
    x = torch.randn(8, 3, dtype=DOUBLE)
    local = layer(2)
    expected = copy.deepcopy(local)(x)
    for place in (torch.device("cpu"), torch.device("node:1"), mesh(dp=1, nodes=[2]).device):
        ours = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(local)).to(place)
        close(ours(x.to(place)).cpu(), expected)
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        nn.SyncBatchNorm(3, device=mesh(dp=1, nodes=[2]).device)(shard(torch.ones(1, 3), mesh(dp=1, nodes=[2]), dp=0))
