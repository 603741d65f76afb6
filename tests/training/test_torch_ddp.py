"""Communication hooks of DistributedDataParallel, and torch.distributed.nn, on a mesh: as under torchrun with gloo."""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Iterator
from typing import Any

import ddp_twin as twin
import pytest
import torch
from torch import nn
from torch.distributed.algorithms.join import Join
from torchrun_kit import torchrun

import disttensor as dt
from disttensor.errors import DisttensorError

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it compiles by torch.jit.script
    from torch.distributed.optim import ZeroRedundancyOptimizer

#: Functions of torch.distributed.nn.functional that are another call on one rank, and what to write.
REFUSED = {
    "broadcast": "torch.distributed._functional_collectives.broadcast",
    "gather": "torch.distributed.nn.functional.all_gather",
    "scatter": "dt.shard(t, mesh, dp=0)",
}


@pytest.fixture(scope="module", autouse=True)
def session() -> Iterator[None]:
    with dt.init_master_worker(nodes=twin.RANKS, launcher="inproc"):
        yield


@pytest.fixture(scope="module")
def under_torchrun(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The tensors of each rank of torchrun's, by name."""
    return torchrun(twin.__file__, tmp_path_factory.mktemp("twin") / "found", ranks=twin.RANKS)


def grid() -> dt.meshes.Mesh:
    mesh = dt.mesh(dp=twin.RANKS)
    _ = mesh.torch
    return mesh


def at_ranks(x: Any) -> list[torch.Tensor]:
    return [part.detach().cpu() for part in x.shards()]


def model(**options: Any) -> dt.DataParallel:
    return dt.DataParallel(twin.module().to(grid().device), grid(), **options)


@pytest.mark.parametrize("name", twin.HOOKS)
def test_a_hook_makes_the_bits_of_ddps(name: str, under_torchrun: list[dict[str, Any]]) -> None:
    state, hook, size = twin.HOOKS[name]
    ours = model(bucket_mb=size)
    ours.register_comm_hook(state(grid().torch.get_group("dp")), hook)
    found = [at_ranks(parameter) for parameter in twin.trained(ours, twin.batch())]
    for rank, theirs in enumerate(under_torchrun):
        for parts, wanted in zip(found, theirs[name], strict=True):
            assert torch.equal(parts[rank], wanted)


def test_a_hook_knows_the_buckets_of_a_pass() -> None:
    seen: list[tuple[int, bool]] = []

    def hook(group: Any, bucket: Any) -> Any:
        seen.append((bucket.index(), bucket.is_last()))
        return twin.signs(group, bucket)

    ours = model(bucket_mb=5e-4)
    ours.register_comm_hook(grid().torch.get_group("dp"), hook)
    ours(twin.batch()).sum().backward()
    assert len(seen) > 1
    assert seen == [(i, i == len(seen) - 1) for i in range(len(seen))]


def future_of(value: object) -> Any:
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(value)
    return future


@pytest.mark.parametrize(
    ("hook", "error", "words"),
    [
        (lambda state, bucket: bucket.buffer(), TypeError, "a torch.futures.Future of the bucket's tensor"),
        (lambda state, bucket: future_of([bucket.buffer()]), TypeError, "list, not a tensor; future.then"),
        (lambda state, bucket: future_of(bucket.buffer()[1:]), ValueError, "numbers on node"),
        (lambda state, bucket: future_of(torch.zeros(bucket.buffer().numel())), ValueError, "numbers on cpu"),
    ],
    ids=["no future", "a list", "too short", "elsewhere"],
)
def test_what_a_hook_may_not_return(hook: Any, error: type[Exception], words: str) -> None:
    ours = model()
    ours.register_comm_hook(None, hook)
    with pytest.raises(error, match=words):
        ours(twin.batch()).sum().backward()


def test_one_hook_that_can_be_called_and_is_alone() -> None:
    ours = model()
    with pytest.raises(TypeError, match="a function of a state and a bucket, not 3"):
        ours.register_comm_hook(None, 3)  # type: ignore[arg-type]
    ours.register_comm_hook(None, twin.signs)
    with pytest.raises(RuntimeError, match="has a hook"):
        ours.register_comm_hook(None, twin.signs)
    with pytest.raises(ValueError, match="shares weigh the collective"):
        ours.shares = [1, 3]
    for options in ({"transport": torch.bfloat16}, {"shares": [1, 3]}):
        with pytest.raises(ValueError, match=f"register_comm_hook: {next(iter(options))} is of"):
            model(**options).register_comm_hook(None, twin.signs)


def test_every_function_of_torch_distributed_nn_is_among_them() -> None:
    there = inspect.getmembers(twin.functional, inspect.isfunction)
    public = {name for name, it in there if it.__module__ == twin.functional.__name__ and not name.startswith("_")}
    assert public == twin.FUNCTIONS.keys()


@pytest.mark.parametrize("name", twin.FUNCTIONS)
@pytest.mark.filterwarnings("ignore:torch.distributed.nn.functional:FutureWarning")
def test_a_function_of_torch_distributed_nn(name: str, under_torchrun: list[dict[str, Any]]) -> None:
    mesh = grid()
    x = dt.meshes.from_shards(mesh, [twin.start(rank) for rank in range(twin.RANKS)]).requires_grad_()
    by = dt.meshes.from_shards(mesh, [twin.weights(rank) for rank in range(twin.RANKS)])
    if name in REFUSED:
        with pytest.raises(DisttensorError, match=f"at once: {re.escape(REFUSED[name])}"):
            twin.gradient(twin.FUNCTIONS[name], x, by)
        return
    grad, results = twin.gradient(twin.FUNCTIONS[name], x, by)
    for rank, theirs in enumerate(under_torchrun):
        wanted_grad, wanted = theirs[name]
        assert torch.equal(at_ranks(grad)[rank], wanted_grad)
        if name != "reduce" or rank == 1:  # the others' results are left open
            assert all(torch.equal(at_ranks(y)[rank], w) for y, w in zip(results, wanted, strict=True))


def test_what_is_for_ranks_that_run_the_script_is_refused_in_words() -> None:
    ours = model()
    with pytest.raises(TypeError, match=r"Join is for ranks that .*`model.shares = loader.counts`"):
        Join([ours])  # type: ignore[list-item]
    with pytest.raises(TypeError, match="one script cuts each batch"):
        ours.join()
    with pytest.raises(TypeError, match=r"dt.DataParallel\(model, mesh\)"):
        nn.parallel.DistributedDataParallel(ours.module)
    with pytest.raises(
        DisttensorError, match=r"ZeroRedundancyOptimizer is another call.*dt.fully_shard\(model, mesh\)"
    ):
        ZeroRedundancyOptimizer(ours.parameters(), torch.optim.SGD, lr=0.1)
