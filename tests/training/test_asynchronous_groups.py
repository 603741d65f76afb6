"""Asynchronous training whose workers are groups of nodes of several sizes, and workers that are lost: real nodes."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from typing import Any

import async_twins
import pytest
import torch
import torch.nn.functional as F
from equal import bits
from limits import HANG
from mesh_kit import connected
from torch import nn

import disttensor as dt
from disttensor.meshes import from_shards
from disttensor.training import (
    EASGD,
    DataParallel,
    Downpour,
    LocalSGD,
    ParameterServer,
    Schedule,
    assert_replicas_equal,
    average_parameters,
    drive,
    reduce_gradients,
)

RATE = 0.1
GROUPS = [[0, 1, 2], [3, 4], [5]]


@pytest.fixture(scope="module", autouse=True)
def session() -> Iterator[None]:
    with connected(6):
        yield


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def batch(i: int, t: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows for worker i, of which each rank of its group has four of its own."""
    generator, rows = torch.Generator().manual_seed(1000 * i + t), 4 * len(GROUPS[i])
    return torch.randn(rows, 5, generator=generator), torch.randint(0, 3, (rows,), generator=generator)


def mesh_of(nodes: list[int]) -> dt.meshes.Mesh:
    return dt.mesh(dp=len(nodes), nodes=nodes)


def groups(count: int = 3) -> list[nn.Module]:
    found: list[nn.Module] = []
    for mesh in map(mesh_of, GROUPS[:count]):
        found.append(DataParallel(copy.deepcopy(net()).to(mesh.device), mesh))
    return found


def step(worker: Any, t: int) -> torch.Tensor:
    x, y = batch(worker.index, t)
    loss = F.cross_entropy(worker.module(x), dt.shard(y, worker.module.mesh, dp=0))
    loss.backward()
    return dt.all_reduce(loss.detach(), "avg", over="dp")


def alone(worker: Any, t: int) -> torch.Tensor:
    """The step of a worker that is one node, or local."""
    x, y = batch(worker.index, t)
    loss = F.cross_entropy(worker.module(x.to(worker.device)), y.to(worker.device))
    loss.backward()
    return loss


def gradient(i: int, t: int, x: list[torch.Tensor]) -> list[torch.Tensor]:
    here = net()
    with torch.no_grad():
        for p, value in zip(here.parameters(), x, strict=True):
            p.copy_(value)
    found = []
    for features, y in zip(*(rows.split(4) for rows in batch(i, t)), strict=True):
        here.zero_grad()
        F.cross_entropy(here(features), y).backward()
        found.append([p.grad for p in here.parameters()])
    return [_mean(grads) for grads in zip(*found, strict=True)]


def replayed(worker: Any, t: int) -> None:
    for p, g in zip(worker.parameters, gradient(worker.index, t, worker.values()), strict=True):
        p.grad = g


def _mean(grads: tuple[Any, ...]) -> torch.Tensor:
    """Of all ranks, in their order."""
    total = grads[0]
    for g in grads[1:]:
        total = total + g
    return total / len(grads)


def same_bits(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> bool:
    return [bits(x) for x in found] == [bits(x) for x in wanted]


@pytest.mark.row("T48", "T56")
@pytest.mark.parametrize("form", ["downpour", "easgd", "together", "local"])
def test_groups_of_several_sizes(form: str) -> None:
    server = ParameterServer(net(), nodes=[1, 3, 5]) if form in ("downpour", "easgd") else None
    first = [p.detach().clone() for p in net().parameters()]
    strategy: Any
    if form == "downpour":
        strategy = Downpour(server, Schedule(every=3, prefetch=1), send_every=2, local=RATE)  # type: ignore[arg-type]
        twin = lambda e: async_twins.downpour(e, first, gradient, RATE)  # noqa: E731
    elif form == "easgd":
        strategy = EASGD(server, Schedule(every=2), local=RATE)
        twin = lambda e: async_twins.easgd(e, first, gradient, RATE, 0.9 / 3)  # noqa: E731
    elif form == "together":
        strategy = EASGD(None, Schedule(every=2), local=RATE)
        twin = lambda e: async_twins.easgd_together(e, first, gradient, RATE, 0.9 / 3)  # noqa: E731
    else:
        strategy = LocalSGD(Schedule(every=2), local=RATE)
        twin = lambda e: async_twins.local_sgd(e, first, gradient, RATE)  # noqa: E731
    workers = groups()
    inside: list[int] = []

    def checked(worker: Any, t: int) -> torch.Tensor:
        for p in worker.parameters if t % 3 == 0 else ():
            assert_replicas_equal(p.detach(), bitwise=True)
            inside.append(worker.index)
        return step(worker, t)

    history = drive(workers, checked, strategy, steps=8)
    assert set(inside) == {0, 1, 2}
    centre, x = twin(history.events)
    for i, worker in enumerate(workers):
        assert_replicas_equal(worker, bitwise=True)
        assert same_bits([p.detach().cpu() for p in worker.parameters()], x[i]), f"worker {i}"
    if server is not None:
        assert same_bits(list(server.pull().values()), centre)
        server.close()


def test_the_mean_of_buffers_reaches_all_ranks_of_groups() -> None:
    """That of the groups' first ranks, whose buffers were those of all in them."""
    found = {}
    for kind in ("own", "mean"):
        torch.manual_seed(0)
        first = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
        workers = [DataParallel(copy.deepcopy(first).to(m.device), m) for m in map(mesh_of, GROUPS)]
        drive(workers, step, Downpour(ParameterServer(first), local=RATE, buffers=kind), steps=3, seed=5)  # type: ignore[arg-type]
        found[kind] = [[buffer.at(dp=0).cpu() for buffer in worker.buffers()] for worker in workers]  # type: ignore[attr-defined]
        if kind == "mean":
            assert_replicas_equal(workers[0], bitwise=True)
            assert_replicas_equal(workers[1], bitwise=True)
    for k in range(2):  # means and variances
        mean = (found["own"][0][k] + found["own"][1][k] + found["own"][2][k]) / 3
        assert all(same_bits([mine[k]], [mean]) for mine in found["mean"])
        assert not same_bits([found["own"][0][k]], [mean])
    assert [mine[2].item() for mine in found["mean"]] == [3, 3, 3]


@pytest.mark.row("I38")
@pytest.mark.parametrize("runs", [[2, 4, 1, 3], [3, 1, 4, 4]])
def test_one_to_four_steps_of_each_rank(runs: list[int]) -> None:
    """Ranks that have ended keep their values, until all have those of the longest run. Sums of whole numbers are
    exact, so there is one order of them."""
    m = dt.mesh(dp=4, nodes=[0, 1, 2, 3])
    batches = torch.randint(-99, 99, (4, 4, 5, 3), generator=torch.Generator().manual_seed(0)).double()
    module = nn.Linear(3, 2).double().to(m.device)
    first = [p.detach().at(dp=0).cpu() for p in module.parameters()]  # type: ignore[attr-defined]
    for t in range(max(runs)):
        there = [t < steps for steps in runs]
        module.zero_grad()
        module(from_shards(m, list(batches[:, t]))).sum().backward()
        if t % 2:
            reduce_gradients(module, contributors=there, async_op=True).wait()
        else:
            reduce_gradients(module, contributors=there)
        mine = from_shards(m, [torch.tensor(float(here), dtype=torch.float64) for here in there])
        with torch.no_grad():
            for p in module.parameters():
                p.sub_(p.grad * mine * 0.5)  # type: ignore[operator]

    def gradient(k: int, t: int) -> list[torch.Tensor]:
        return [batches[k, t].sum(0).expand(2, 3), torch.full((2,), 5.0, dtype=torch.float64)]

    each, longest = async_twins.all_reduce_sgd(runs, first, gradient, 0.5)
    for k in range(4):
        assert same_bits([p.detach().at(dp=k).cpu() for p in module.parameters()], each[k])  # type: ignore[attr-defined]
    average_parameters(module, winner=runs)
    assert_replicas_equal(module, bitwise=True)
    assert same_bits([p.detach().cpu() for p in module.parameters()], longest)


@pytest.mark.row("T48")
def test_lost_workers_are_told_and_the_others_go_on(caplog: pytest.LogCaptureFixture) -> None:
    first = [p.detach().clone() for p in net().parameters()]
    victims = {"node": 5, "group": 4}

    def losing(victim: int, index: int) -> Any:
        def lose(worker: Any, t: int) -> torch.Tensor:
            loss = step(worker, t)
            if worker.index == index and t == 4:
                dt.kill(victim)
            return loss

        return lose

    for kind, index, form in (("node", 2, "served"), ("group", 1, "together")):
        workers = groups(index + 1)
        server = ParameterServer(net(), nodes=[0, 1, 2]) if form == "served" else None
        strategy: Any = (
            Downpour(server, Schedule(every=2), local=RATE)
            if server is not None
            else LocalSGD(Schedule(every=3), local=RATE)
        )
        with caplog.at_level(logging.WARNING, "disttensor"):
            history = drive(workers, losing(victims[kind], index), strategy, steps=9)
        assert list(history.lost) == [index]
        assert isinstance(history.lost[index], dt.NodeLost)
        assert f"worker {index} is lost in step" in caplog.text
        left = [i for i in range(len(workers)) if i != index]
        assert all(history.steps[i] == 9 for i in left)
        assert 3 <= history.steps[index] <= 4
        twin = (
            async_twins.downpour(history.events, first, gradient, RATE)
            if server is not None
            else async_twins.local_sgd(history.events, first, gradient, RATE)
        )
        local = [net() for _ in workers]
        again = history.replay(local, replayed)
        assert (again.events, again.steps) == (history.events, history.steps)
        for i in left:
            assert same_bits([p.detach().cpu() for p in workers[i].parameters()], twin[1][i]), f"worker {i}"
            assert same_bits([p.detach() for p in local[i].parameters()], twin[1][i]), f"worker {i}"
        if server is not None:
            assert same_bits(list(server.pull().values()), twin[0])
            there = [p.detach().at(dp=0) for p in workers[index].parameters()]
            with pytest.raises(dt.NodeLost):
                server.push(there, async_op=True).wait(HANG)
            assert same_bits(list(server.pull().values()), twin[0])


@pytest.mark.parametrize("form", ["served", "together"])
def test_the_mean_of_buffers_is_that_of_the_workers_that_are_left(form: str) -> None:
    """One is lost in its last step, when the others come to their mean."""
    victim = {"served": 3, "together": 2}[form]  # the test before has ended 4 and 5
    first = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    server = ParameterServer(first, nodes=[0, 1])
    strategy: Any = (
        Downpour(server, Schedule(every=2), local=RATE, buffers="mean")
        if form == "served"
        else LocalSGD(Schedule(every=3), local=RATE, buffers="mean")
    )

    def losing(worker: Any, t: int) -> torch.Tensor:
        loss = alone(worker, t)
        if (worker.index, t) == (2, 3):
            dt.kill(victim)
        return loss

    workers = [copy.deepcopy(first).to(f"node:{node}") for node in (0, 1, victim)]
    history = drive(workers, losing, strategy, steps=3)
    assert list(history.lost) == [2]
    assert [event.workers for event in history.events if event.kind == "buffers"][-1] == (0, 1)
    left = [[buffer.cpu() for buffer in module.buffers()] for module in workers[:2]]
    assert same_bits(left[0], left[1])
    local = [copy.deepcopy(first) for _ in workers]
    assert history.replay(local, alone).events == history.events
    assert same_bits([buffer.detach() for buffer in local[0].buffers()], left[0])
