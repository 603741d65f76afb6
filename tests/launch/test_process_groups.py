"""``dt.run(fn, node=..., distributed=True)``: ranks of torch.distributed, how they fail; nobody waits for ever."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from spies import spy
from telling import said
from torch.nn.parallel import DistributedDataParallel

import disttensor as dt
from disttensor.session import current


@pytest.fixture(scope="module")
def four() -> Iterator[None]:
    """Four nodes that are processes."""
    with dt.init_master_worker(nodes=4, threads=1):
        # what is made at first use: have it before the tests look for leaks
        dt.run(lambda: None, node=range(4), distributed=True)
        for node in range(4):
            torch.ones(1 << 20).to(f"node:{node}").cpu()
        yield


def reduced(x: torch.Tensor) -> tuple[int, int, str, torch.Tensor]:
    dist.all_reduce(x)
    return dist.get_rank(), dist.get_world_size(), dist.get_backend(), x


@pytest.mark.row("G16")
def test_an_all_reduce_is_the_local_sum(four: None) -> None:
    parts = list(torch.randn(3, 100))
    for _ in range(2):
        found = dt.run(reduced, dt.tasks.Each([x.clone() for x in parts]), node=[0, 1, 2], distributed=True)
        assert [one[:3] for one in found] == [(0, 3, "gloo"), (1, 3, "gloo"), (2, 3, "gloo")]
        for *_, total in found:
            torch.testing.assert_close(total.cpu(), sum(parts))
    assert [one[3].get_node() for one in found] == [0, 1, 2]


def test_ranks_are_in_the_groups_order(four: None) -> None:
    assert [one[:2] for one in dt.run(reduced, torch.ones(1), node=[3, 1], distributed=True)] == [(0, 2), (1, 2)]
    place = lambda: (dist.get_rank(), os.getpid())  # noqa: E731
    pids = [node["pid"] for node in dt.nodes()]
    assert dt.run(place, node=dt.collectives.new_group([2, 0, 3]), distributed=True) == [
        (0, pids[2]),
        (1, pids[0]),
        (2, pids[3]),
    ]
    assert dt.run(place, node=[2], distributed=True) == [(0, pids[2])]


def test_it_is_kept_for_the_next_call(four: None) -> None:
    def same() -> int:
        return id(dist.distributed_c10d._get_default_group())

    first = dt.run(same, node=[0, 1], distributed=True)
    assert dt.run(same, node=[0, 1], distributed=True) == first
    dt.run(same, node=[1, 2], distributed=True)
    assert dt.run(lambda: dist.get_world_size(), node=[0, 1], distributed=True) == [2, 2]


def test_what_a_function_does_with_torch_distributed(four: None) -> None:
    def much() -> Any:
        rank = dist.get_rank()
        pair = dist.new_group([0, 2])
        x = torch.full((2,), float(rank))
        if rank != 1:
            dist.all_reduce(x, group=pair)
        objects: list[Any] = [None] * 3
        dist.all_gather_object(objects, {"rank": rank})
        dist.barrier()
        dist.monitored_barrier()
        if rank == 0:
            dist.send(torch.ones(3), 1)
        elif rank == 1:
            dist.recv(x := torch.zeros(3), 0)
        return x.tolist(), objects

    everybody = [{"rank": rank} for rank in range(3)]
    assert dt.run(much, node=[0, 1, 2], distributed=True) == [
        ([2.0, 2.0], everybody),
        ([1.0] * 3, everybody),
        ([2.0, 2.0], everybody),
    ]


def step(model: nn.Module, x: torch.Tensor, y: torch.Tensor, parts: int = 1) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(4):
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if parts > 1:
            dist.all_reduce(loss := loss.detach())
        losses.append(loss.item() / parts)
    return losses


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))


@pytest.mark.row("G16")
def test_data_parallel_training(four: None) -> None:
    def train(x: torch.Tensor, y: torch.Tensor) -> list[float]:
        return step(DistributedDataParallel(network()), x, y, dist.get_world_size())

    x, y = torch.randn(12, 5), torch.randn(12, 1)
    each = dt.tasks.Each(x.chunk(3)), dt.tasks.Each(y.chunk(3))
    found = dt.run(train, *each, node=[0, 1, 2], distributed=True)
    torch.testing.assert_close(torch.tensor(found), torch.tensor([step(network(), x, y)] * 3))


def test_on_a_stream(four: None) -> None:
    streams = [dt.Stream(node=node) for node in range(2)]
    with dt.stream(streams[0]), dt.stream(streams[1]):
        found = dt.run(reduced, torch.ones(2), node=[0, 1], distributed=True)
    assert [one[3].tolist() for one in found] == [[2.0, 2.0]] * 2


def test_the_old_spelling_is_the_new_one_and_warns(four: None) -> None:
    for call in (dt.run, lambda *args, **named: dt.submit(*args, **named).result()):
        with pytest.warns(
            DeprecationWarning, match=r"\(fn, nodes=\.\.\.\) is .*\(fn, node=\.\.\., distributed=True\) now"
        ) as told:
            assert call(dist.get_rank, nodes=[3, 1]) == [0, 1]
        assert [warning.filename for warning in told] == [__file__]
        assert call(dist.get_rank, node=[3, 1], distributed=True) == [0, 1]
    assert dt.run(lambda: dist.get_rank(), node=[3, 1], distributed=False) == [0, 1]  # of the group that stayed


def test_node_runs_without(four: None) -> None:
    dt.run(reduced, torch.ones(1), node=[0, 1], distributed=True)
    assert dt.run(lambda: dist.is_initialized(), node=[2, 3]) == [True, True]  # of the fixture's group
    dt.run(reduced, torch.ones(1), node=range(4), distributed=True)
    with pytest.raises(TypeError, match="node= or nodes="):
        dt.run(reduced, torch.ones(1), node=0, nodes=[0, 1])


def test_a_function_may_destroy_it(four: None) -> None:
    def leave(who: int) -> bool:
        dist.barrier()
        if who in (-1, dist.get_rank()):
            dist.destroy_process_group()
        return dist.is_initialized()

    assert dt.run(leave, -1, node=[0, 1, 2], distributed=True) == [False] * 3
    assert dt.run(leave, 1, node=[0, 1, 2], distributed=True) == [True, False, True]
    assert dt.run(leave, 9, node=[0, 1, 2], distributed=True) == [True] * 3


# ---- failures --------------------------------------------------------------------------------------------------------


def mistaken(who: int, size: int, early: bool = False) -> None:
    x = torch.ones(size)
    if not early:
        dist.all_reduce(x)
    if dist.get_rank() == who:
        raise ValueError(f"a mistake of rank {who}")
    dist.all_reduce(x)


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("size", [1, 1 << 22])
def test_a_mistake_ends_the_others_waiting(four: None, size: int, early: bool) -> None:
    for who in range(3):
        with pytest.raises(ValueError, match=f"a mistake of rank {who}") as caught:
            dt.run(mistaken, who, size, early, node=[0, 1, 2], distributed=True)
        assert "and 2 other nodes broke off, as ranks wait for each other" in caught.value.__notes__
        assert f"on node {who}" in said(caught.value)
    found = dt.run(reduced, torch.ones(1), node=[0, 1, 2], distributed=True)
    assert [one[3].item() for one in found] == [3.0] * 3


def test_a_mistake_of_all(four: None) -> None:
    def wrong() -> None:
        torch.ones(2) @ torch.ones(3)

    with pytest.raises(RuntimeError, match="inconsistent tensor size"):
        dt.run(wrong, node=[0, 1, 2], distributed=True)


def test_an_argument_that_has_failed(four: None) -> None:
    """The function is not run on that node, and the others do not wait for it."""
    for stream in (None, dt.Stream(node=1)):
        x = torch.ones(3, device="node:1")
        with dt.stream(stream):
            bad = x[torch.tensor([7], device="node:1")]
            with pytest.raises(IndexError) as caught:
                dt.run(reduced, dt.tasks.Each([torch.ones(1), bad, torch.ones(1)]), node=[0, 1, 2], distributed=True)
        assert "and 2 other nodes broke off, as ranks wait for each other" in caught.value.__notes__
    dt.synchronize()


def test_a_function_that_cannot_be_loaded(four: None) -> None:
    class Unloadable:
        def __reduce__(self) -> Any:
            return __import__, ("no_such_module",)

    for _ in range(2):
        with pytest.raises(ModuleNotFoundError, match="no_such_module"):
            dt.run(reduced, dt.tasks.Each([Unloadable(), torch.ones(1)]), node=[0, 1], distributed=True)
    dt.run(reduced, torch.ones(1), node=[0, 1], distributed=True)


def test_a_call_that_was_queued_behind_one_that_fails(four: None) -> None:
    """Two threads, one process group: nobody waits in it for a rank that has left it."""
    errors: list[BaseException] = []
    both = threading.Barrier(2)

    def call(who: int) -> None:
        both.wait()
        try:
            dt.run(mistaken, who, 1, node=[0, 1, 2], distributed=True)
        except Exception as error:
            errors.append(error)

    for _ in range(4):
        threads = [threading.Thread(target=call, args=(who,)) for who in (0, 2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(errors) == 8
    assert any(isinstance(error, ValueError) for error in errors)
    dt.run(reduced, torch.ones(1), node=[0, 1, 2], distributed=True)


def test_groups_that_overlap_in_two_threads(four: None) -> None:
    results: list[Any] = []

    def call(nodes: list[int]) -> None:
        results.extend(dt.run(lambda: dist.get_world_size(), node=nodes, distributed=True) for _ in range(5))

    threads = [threading.Thread(target=call, args=(nodes,)) for nodes in ([0, 1, 2], [2, 1], [1, 3])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(map(str, results)) == sorted(map(str, [[3] * 3] * 5 + [[2] * 2] * 10))


def test_a_group_is_replaced_between_the_choice_of_a_group_and_its_commands(
    four: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other thread waits its turn. Otherwise node 1 alone would come back to the first group, and wait for ever."""
    dt.run(dist.get_world_size, node=[1, 3], distributed=True)
    link, sizes = current.session().link, []
    other = threading.Thread(target=lambda: sizes.append(dt.run(dist.get_world_size, node=[1, 2], distributed=True)))

    def late(commands: Any) -> None:
        monkeypatch.undo()
        other.start()
        other.join(1)  # in vain, if it waits
        issue(commands)

    issue = spy(monkeypatch, link.sender, "together", late)
    assert dt.run(dist.get_world_size, node=[1, 3], distributed=True) == [2, 2]
    other.join()
    assert sizes == [[2, 2]]
