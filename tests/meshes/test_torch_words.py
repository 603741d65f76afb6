"""Torch's words on meshes, as its DeviceMesh has them: ``mesh["dp"]``, ``mesh_dim_names``, ``ndim``, ``size(0)``."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import disttensor as dt
from disttensor.meshes import Mesh

NODES = 8


@pytest.fixture(scope="module", autouse=True)
def session() -> Iterator[None]:
    with dt.init_master_worker(nodes=NODES, launcher="inproc"):
        yield


@contextmanager
def torchs(m: Mesh, rank: int) -> Iterator[DeviceMesh]:
    """Torch's mesh of the same dims, as a rank has it."""
    dist.init_process_group("fake", rank=rank, world_size=NODES, store=FakeStore())
    try:
        yield dist.init_device_mesh("cpu", m.shape, mesh_dim_names=m.mesh_dim_names)
    finally:
        dist.destroy_process_group()


def cube() -> Mesh:
    return dt.mesh(rep=2, dp=2, tp=2)


def words(m: Any) -> list[Any]:
    """What both say of a mesh without asking for a rank."""
    return [m.mesh_dim_names, m.ndim, tuple(m.shape), m.size(), [m.size(i) for i in range(-m.ndim, m.ndim)]]


CHOICES: list[Any] = ["rep", "dp", "tp", ("tp",), ("rep", "dp"), ("rep", "tp"), ("dp", "tp"), ("rep", "dp", "tp")]


def test_a_mesh_says_what_torchs_says() -> None:
    for m in (cube(), dt.mesh(dp=4, tp=2), dt.mesh(all=NODES)):
        with torchs(m, 0) as theirs:
            assert words(m) == words(theirs)


@pytest.mark.parametrize("names", CHOICES, ids=str)
def test_dims_by_their_names(names: Any) -> None:
    with torchs(cube(), 3) as theirs:
        assert words(cube()[names]) == words(theirs[names])
        inner, wanted = cube()["dp", "tp"], theirs["dp", "tp"]
        if set(names if isinstance(names, tuple) else (names,)) <= {"dp", "tp"}:
            assert words(inner[names]) == words(wanted[names])
        else:
            for one in (inner, wanted):
                with pytest.raises(KeyError):
                    one[names]


@pytest.mark.parametrize("names", ["pp", ("dp", "pp"), ("tp", "dp"), ("dp", "rep"), ("dp", "dp")], ids=str)
def test_dims_that_a_mesh_does_not_have(names: Any) -> None:
    with torchs(cube(), 0) as theirs, pytest.raises((KeyError, RuntimeError)):
        theirs[names]
    with pytest.raises(KeyError):
        cube()[names]


def test_coordinates_are_each_ranks() -> None:
    for name in ("rep", "dp", "tp"):
        ours = [int(x) for x in cube().coordinate(name).shards()]  # type: ignore[attr-defined]
        theirs = []
        for rank in range(NODES):
            with torchs(cube(), rank) as made:
                theirs.append(made.get_local_rank(name))
                assert made[name].get_local_rank() == theirs[-1]
        assert ours == theirs
        assert [int(x) for x in cube()[name].coordinate(name).shards()] == ours  # type: ignore[attr-defined]


def test_some_dims_are_of_the_same_place() -> None:
    m = cube()
    some = m["rep", "dp"]
    assert (some.device, some.nodes, len(some)) == (m.device, m.nodes, NODES)
    assert some == m["rep", "dp"] != m["rep", "tp"]
    assert m["rep", "dp", "tp"] == m
    assert repr(some) == "Mesh(rep=2, dp=2, tp=2, nodes=[0, 1, 2, 3, 4, 5, 6, 7])['rep', 'dp']"
    flat = some.flatten("ranks")
    assert (flat.names, flat.size(), flat.device) == (("ranks",), 4, m.device)
    x = torch.ones(2, device=flat.device)
    assert dt.all_reduce(x, over="ranks").tolist() == [4.0, 4.0]  # type: ignore[attr-defined]
    assert dt.run(lambda: None, node=some) == [None] * NODES


def test_what_takes_a_mesh_goes_along_its_dims() -> None:
    m = cube()
    net = nn.Linear(3, 1)
    assert dt.DataParallel(net.to(m.device), m["rep", "dp"]).over == ("rep", "dp")
    assert dt.DataParallel(nn.Linear(3, 1).to(m.device), m["rep"]).over == ("rep",)
    layer = dt.nn.ColumnParallelLinear(3, 8, mesh=m["dp"])
    assert (layer.over, layer.mesh) == ("dp", m)
    assert dt.nn.ColumnParallelLinear(3, 8, mesh=m).over == "tp"
    table = torch.arange(8.0)
    loader = dt.data.distribute(torch.utils.data.TensorDataset(table), m["rep", "dp"], batch_size=4)
    (x,) = next(iter(loader))
    assert [shard.tolist() for shard in x.shards()] == [[float(i // 2)] for i in range(NODES)]


#: The dims that cut, of which each rank has a part; and those with copies.
SHARDS: list[tuple[Callable[[], Mesh], dict[str, str], int, int]] = [
    (lambda: dt.mesh(all=8), {}, 8, 1),
    (lambda: dt.mesh(dp=4, tp=2), {}, 4, 1),
    (lambda: dt.mesh(dp=4, tp=2)["dp"], {}, 4, 1),
    (lambda: dt.mesh(dp=4, tp=2)["tp"], {}, 2, 1),
    (lambda: dt.mesh(replicate=4, shard=2), {}, 2, 4),
    (lambda: dt.mesh(rep=4, dp=2), {}, 2, 1),
    (lambda: dt.mesh(rep=4, dp=2)["rep", "dp"], {}, 2, 4),
    (lambda: dt.mesh(rep=4, dp=2)["rep", "dp"], {"over": "rep"}, 4, 1),
    (lambda: dt.mesh(rep=4, dp=2)["rep", "dp"], {"replicas": "dp"}, 4, 2),
    (lambda: dt.mesh(rep=2, dp=2, tp=2)["rep", "dp"], {}, 2, 2),
    (lambda: dt.mesh(rep=2, dp=2, tp=2), {"replicas": "rep"}, 2, 2),
]


@pytest.mark.parametrize(("make", "options", "cut", "copies"), SHARDS)
def test_fully_shard_takes_dims_as_torchs(
    make: Callable[[], Mesh], options: dict[str, str], cut: int, copies: int
) -> None:
    """Of one dim that, of two the second with copies along the first: what a rank has, and what the mean is over."""
    m = make()
    layer = dt.fully_shard(nn.Linear(1, 16, bias=False), mesh=m, **options)
    assert layer.weight.shape == (16 // cut, 1)
    layer(torch.arange(8.0).reshape(8, 1)).sum().backward()
    shares = cut * copies  # each has 8 / shares rows, and the gradient is the mean of all shares' sums
    assert layer.weight.grad is not None
    for shard in layer.weight.grad.shards():  # type: ignore[attr-defined]
        assert shard.flatten().tolist() == [28.0 / shares] * (16 // cut)


MISTAKES: dict[str, tuple[Callable[[Mesh], Any], type[Exception], str]] = {
    "a dim": (lambda m: m["pp"], KeyError, "has no dim 'pp'; it has rep, dp, tp"),
    "order": (lambda m: m["tp", "dp"], KeyError, r"in the order rep, dp, tp, .* not \('tp', 'dp'\)"),
    "a number": (lambda m: m[0], TypeError, r"takes names of dims, as in mesh\['rep'\], not 0; mesh.slice\(rep=0\)"),  # type: ignore[index]
    "an index": (lambda m: m.size(3), IndexError, r"has 3 dims \(rep, dp, tp\), and none of index 3"),
    "going through": (list, TypeError, "'Mesh' object is not iterable"),
    "of a rank": (
        lambda m: m.get_local_rank("dp"),  # type: ignore[attr-defined]
        AttributeError,
        "each rank has another of, .*device_mesh",
    ),
    "a slice": (lambda m: m["dp"].slice(dp=0), ValueError, r"slice: Mesh.*\['dp'\] are some dims of a mesh"),
    "a split": (lambda m: m["dp"].split(dp=("a", "b"), a=2), ValueError, "split: .* are some dims of a mesh"),
    "a name": (lambda m: m["dp"].rename(dp="x"), ValueError, "rename: .* are some dims of a mesh"),
    "apart": (lambda m: m["rep", "tp"].flatten(), ValueError, "do not lie side by side; it has rep, dp, tp"),
    "a name that is there": (lambda m: m["rep", "dp"].flatten("tp"), ValueError, "'tp' is another dim of Mesh"),
    "over": (lambda m: dt.fully_shard(nn.Linear(2, 2), mesh=m["dp"], over="tp"), ValueError, "no dim 'tp'; it has dp"),
    "replicas": (
        lambda m: dt.fully_shard(nn.Linear(2, 2), mesh=m["dp"], replicas="tp"),
        ValueError,
        "no dim 'tp'; it has dp",
    ),
    "three": (
        lambda m: dt.fully_shard(nn.Linear(2, 2), mesh=m["rep", "dp", "tp"]),
        ValueError,
        "are 3 dims; over= says along which of them to cut",
    ),
    "two to cut": (
        lambda m: dt.nn.ColumnParallelLinear(2, 2, mesh=m["rep", "dp"]),
        TypeError,
        "over is the name of one dim",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_say_what_is_meant(mistake: str) -> None:
    call, kind, words = MISTAKES[mistake]
    with pytest.raises(kind) as raised:
        call(cube())
    assert re.search(words, str(raised.value))
