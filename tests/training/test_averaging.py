"""Means over replicas that a program asks for, and whether replicas are equal: real nodes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from mesh_kit import connected
from stream_kit import thread
from torch import nn

import disttensor as dt
from disttensor import mesh, shard
from disttensor.meshes import from_shards
from disttensor.training import assert_replicas_equal, average_parameters, reduce_gradients

pytestmark = pytest.mark.usefixtures("settled")

NODES = 3


@pytest.fixture(scope="module", autouse=True)
def session() -> Iterator[None]:
    with connected(NODES):
        yield


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)).double()


@pytest.mark.row("T32")
@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("bucket_mb", [25.0, 1e-6])
@pytest.mark.parametrize("op", ["avg", "sum"])
def test_reduced_gradients_are_those_of_the_whole_batch(op: str, bucket_mb: float, async_op: Any) -> None:
    m = mesh(dp=NODES)
    local, remote = net(), net().to(m.device)
    x = torch.randn(9, 4, dtype=torch.float64)
    local(x).square().mean().backward()
    remote(shard(x, m, dp=0)).square().mean().backward()
    with dt.testing.MessageLog() as log:
        work = reduce_gradients(remote, op=op, bucket_mb=bucket_mb, async_op=async_op)
        if async_op:
            assert [work.result() is remote, work.is_completed(), work.wait()] == [True] * 3  # and again
    assert sum(name.startswith("Collective") for name in log[0].commands) == (1 if bucket_mb > 1 else 4)
    for p, q in zip(local.parameters(), remote.parameters(), strict=True):
        wanted = p.grad * (1 if op == "avg" else NODES)
        torch.testing.assert_close(q.grad.cpu(), wanted, rtol=1e-12, atol=1e-14)  # type: ignore[union-attr]


def test_what_comes_next_runs_beside_an_asynchronous_reduction(tmp_path: Path) -> None:
    """One rank is busy: the others go on, and all have the gradients when it has come."""
    m = mesh(dp=NODES)
    local, remote = net(), net().to(m.device)
    x = torch.randn(9, 4, dtype=torch.float64)
    local(x).square().mean().backward()
    remote(shard(x, m, dp=0)).square().mean().backward()
    before = [p.grad.at(dp=0).cpu() for p in remote.parameters()]  # type: ignore[union-attr]
    here, go = str(tmp_path / "here"), str(tmp_path / "go")
    os.mkfifo(here)
    os.mkfifo(go)
    holder = thread(lambda: dt.run(hold, here, go, node=2))
    open(here, "wb").close()
    try:
        work = reduce_gradients(remote, async_op=True)
        for p, grad in zip(remote.parameters(), before, strict=True):
            assert torch.equal(p.grad.at(dp=0).cpu(), grad)  # type: ignore[union-attr]
        assert not work.is_completed()
        with pytest.raises(TimeoutError):
            work.wait(0)
    finally:
        open(go, "wb").close()
    work.wait()
    holder.join()
    for p, q in zip(local.parameters(), remote.parameters(), strict=True):
        torch.testing.assert_close(q.grad.cpu(), p.grad, rtol=1e-12, atol=1e-14)  # type: ignore[union-attr]
    empty = net().to(m.device)
    assert reduce_gradients(empty, async_op=True).result() is empty
    assert asyncio.run(awaited(reduce_gradients(remote, async_op=True))) is remote


def hold(here: str, go: str) -> None:
    for path in (here, go):
        open(path, "rb").close()


async def awaited(work: Any) -> Any:
    return await work


def test_gradients_that_stay_as_they_are() -> None:
    m = mesh(dp=NODES)
    remote = net().to(m.device)
    remote[0].requires_grad_(False)  # type: ignore[index]
    remote(from_shards(m, list(torch.randn(NODES, 2, 4).double()))).square().sum().backward()
    reduce_gradients(remote, skip=["2.bias"], transport=torch.bfloat16)
    weight, bias = remote[2].weight.grad, remote[2].bias.grad  # type: ignore[index]
    assert_replicas_equal(weight, bitwise=True)
    assert torch.equal(weight.cpu(), weight.cpu().bfloat16().double())
    with pytest.raises(AssertionError):
        assert_replicas_equal(bias)
    assert remote[0].weight.grad is None  # type: ignore[index]


@pytest.mark.row("T31")
def test_averaged_parameters_are_the_mean_of_all_ranks() -> None:
    m = mesh(dp=NODES)
    norm = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).to(m.device)
    values = torch.randn(NODES, 2, 2)
    with torch.no_grad():
        norm[0].weight.copy_(from_shards(m, list(values)))
        norm[1].num_batches_tracked.copy_(from_shards(m, [torch.tensor(k + 7) for k in range(NODES)]))
        norm[1].running_mean.copy_(from_shards(m, [torch.full((2,), float(k)) for k in range(NODES)]))
    average_parameters(norm, buffers=False)
    torch.testing.assert_close(norm[0].weight.detach().cpu(), values.mean(0))
    assert [s.item() for s in norm[1].num_batches_tracked.shards()] == [7, 8, 9]  # type: ignore[operator, union-attr]
    average_parameters(norm)
    assert norm[1].num_batches_tracked.item() == 7  # type: ignore[operator]
    assert norm[1].running_mean.tolist() == [1, 1]  # type: ignore[operator]
    assert norm[0].weight.requires_grad


def test_mistakes() -> None:
    m = mesh(dp=NODES)
    for function in (reduce_gradients, average_parameters, assert_replicas_equal):
        with pytest.raises(TypeError, match=r"'0\.weight' is on cpu, and on no mesh"):
            function(net())  # type: ignore[operator]
    with pytest.raises(ValueError, match="no dim 'pp'"):
        average_parameters(net().to(m.device), "pp")
    with pytest.raises(ValueError, match="no dim 'pp'"):
        assert_replicas_equal(torch.ones(2, device=m.device), "pp")
    with pytest.raises(ValueError, match="skip names '3'"):
        reduce_gradients(net().to(m.device), skip=["3"])
    with pytest.raises(TypeError, match="takes a module, tensors, or a dict of them, not int"):
        assert_replicas_equal(3)
    sparse = nn.Embedding(4, 2, sparse=True).to(m.device)
    sparse(torch.arange(4).to(m.device)).sum().backward()
    with pytest.raises(TypeError, match=r"gradient of 'weight' is torch\.sparse_coo"):
        reduce_gradients(sparse)


# ---- equal replicas --------------------------------------------------------------------------------------------------


@pytest.mark.row("T33")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.int64])
def test_one_flipped_bit_is_found(dtype: torch.dtype) -> None:
    m = mesh(dp=NODES)
    x = torch.arange(12).reshape(3, 4).to(dtype).to(m.device)
    assert_replicas_equal(x, bitwise=True)
    assert_replicas_equal({"x": x, "epoch": 3})
    there: Any = x.at(dp=2)  # type: ignore[attr-defined]
    there.view(torch.uint8)[1, 0].bitwise_xor_(1)
    text = r"'w' on node 2 \(dp=2\): 1 of 12 entries, by up to .*; w\[1, 0\] is .*, and .* at dp=0"
    with pytest.raises(AssertionError, match=text):
        assert_replicas_equal({"w": x}, bitwise=True)


@pytest.mark.row("T33")
def test_nans_zeros_and_what_is_allowed() -> None:
    m = mesh(dp=NODES)
    nan = float("nan")

    def of(*values: float) -> Any:
        return from_shards(m, [torch.tensor([1.0, value], dtype=torch.float64) for value in values])

    assert_replicas_equal(of(nan, nan, nan))
    assert_replicas_equal(of(0.0, -0.0, 0.0))
    assert_replicas_equal(of(1.0, 1 + 5e-8, 1.0))
    for wrong in (of(1.0, 1.0, nan), of(nan, 1.0, nan), of(1.0, 1 + 5e-7, 1.0), of(1.0, 2.0, 0.0)):
        with pytest.raises(AssertionError, match=r"1 of 2 entries.*tensor\[1\]"):
            assert_replicas_equal(wrong)
    assert_replicas_equal(of(1.0, 1 + 5e-7, 1.0), rtol=1e-6)
    with pytest.raises(AssertionError):
        assert_replicas_equal(of(0.0, -0.0, 0.0), bitwise=True)


def test_each_group_is_compared_with_its_own_first_rank() -> None:
    m = mesh(a=1, b=NODES)
    x = from_shards(m, [torch.tensor(k) for k in range(NODES)])
    assert_replicas_equal(x, "a")
    with pytest.raises(AssertionError, match=r"(?s)node 1 \(a=0, b=1\): 1 of 1 .*node 2 \(a=0, b=2\)"):
        assert_replicas_equal(x, ("a", "b"))
    many = {f"w{i}": x for i in range(4)}
    with pytest.raises(AssertionError, match=r"\.\.\. and 3 more"):
        assert_replicas_equal(many, "b")


@pytest.mark.row("I38")
def test_uneven_numbers_of_steps() -> None:
    """Rank k has 1 + k batches: each step is the mean of those that have one, and the longest run's values win."""
    m = mesh(dp=NODES)
    local, remote = net(), net().to(m.device)
    batches = torch.randn(NODES, NODES, 2, 4, dtype=torch.float64)  # by rank and step
    runs = [k + 1 for k in range(NODES)]
    for step in range(NODES):
        there = [step < steps for steps in runs]
        local.zero_grad()
        remote.zero_grad()
        for k in range(NODES):
            if there[k]:
                (local(batches[k, step]).square().mean() / sum(there)).backward()
        remote(from_shards(m, list(batches[:, step]))).square().mean().backward()  # of those without a batch, too
        reduce_gradients(remote, contributors=there)
        for p, q in zip(local.parameters(), remote.parameters(), strict=True):
            torch.testing.assert_close(q.grad.cpu(), p.grad, rtol=1e-12, atol=1e-14)  # type: ignore[union-attr]
            with torch.no_grad():
                p.sub_(0.1 * p.grad)  # type: ignore[operator]
                q.sub_(0.1 * q.grad)  # type: ignore[operator]
    norm = nn.BatchNorm1d(3).to(m.device)
    with torch.no_grad():
        norm.weight.copy_(from_shards(m, [torch.tensor([float("nan"), -0.0, k]) for k in range(NODES)]))
        norm.num_batches_tracked.copy_(from_shards(m, [torch.tensor(steps) for steps in runs]))  # type: ignore[operator, union-attr]
    average_parameters(norm, winner=[3, 5, 5])
    assert_replicas_equal(norm, bitwise=True)
    assert norm.num_batches_tracked.item() == 2  # type: ignore[operator]
    assert norm.weight.at(dp=2).tolist()[2] == 1  # type: ignore[operator]
    assert torch.equal(norm.weight.at(dp=0)[1:2].cpu().signbit(), torch.tensor([True]))  # type: ignore[operator]


def test_contributors_and_winners_that_cannot_be() -> None:
    m = mesh(dp=NODES)
    remote = net().to(m.device)
    remote(from_shards(m, list(torch.randn(NODES, 2, 4).double()))).square().mean().backward()
    with pytest.raises(ValueError, match="2 numbers for the 3 ranks"):
        reduce_gradients(remote, contributors=[1, 1])
    with pytest.raises(ValueError, match="op is 'avg' or 'sum', not 'max'"):
        reduce_gradients(remote, op="max", contributors=[1, 1, 1])
    with pytest.raises(ValueError, match="winner=3, and there are 3 ranks"):
        average_parameters(remote, winner=3)
    reduce_gradients(remote, op="sum", contributors=[0, 0, 0])
    assert all(not p.grad.cpu().any() for p in remote.parameters())  # type: ignore[union-attr]
