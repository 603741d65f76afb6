"""Nodes are watched while a job runs, whatever they are at: what they note comes by the side channel."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from side_channels import await_side_channels

import disttensor as dt
from disttensor.runtime.master.looking_in import LookingIn, NodeEvent
from disttensor.session import current
from disttensor.tasks import Channel


@pytest.fixture(scope="module")
def looking() -> Iterator[LookingIn]:
    with dt.init_master_worker("tcp", nodes=2, threads=1):
        await_side_channels()
        dt.run(greet, told := Channel(), node=0)  # has the script open what is shared, before a test's leaks are sought
        assert told.get() == "here"
        for node in (0, 1):
            assert torch.ones(1, device=dt.device(node)).tolist() == [1.0]
        yield current.session().link.looking


@pytest.fixture(autouse=True)
def nobody_watches(looking: LookingIn) -> Iterator[None]:
    yield
    looking.watch([0, 1], [])
    for rank in (0, 1):
        looking.fetch(rank)


def greet(told: Channel) -> None:
    told.put("here")


def hold(told: Channel, go_on: Channel) -> int:
    told.put("in it")
    return int(go_on.get())


def until(looking: LookingIn, rank: int, has: Callable[[NodeEvent], object]) -> list[NodeEvent]:
    """What a node has noted, up to such an event."""
    found = list[NodeEvent]()
    while not any(map(has, found)):
        found += looking.fetch(rank).events
    return found


def watch(looking: LookingIn, *points: str, ranks: Sequence[int] = (0,), room: int = 100) -> None:
    """Has nodes watched from now on: they have heard of it when they have answered."""
    looking.watch(ranks, points, room)
    for rank in ranks:
        looking.fetch(rank)


def line(event: NodeEvent) -> str:
    assert event.site is not None
    return event.site[0].co_name


def test_a_node_that_is_in_a_function_is_watched_from_then_on_and_answers(looking: LookingIn) -> None:
    told, go_on, x = Channel(), Channel(), torch.ones(4, device="node:0")
    work = dt.submit(hold, told, go_on, node=0)
    assert told.get() == "in it"
    looking.watch([0], ["commands", "function"])
    y = x * 2
    assert looking.fetch(0).events == ()
    go_on.put(7)
    assert work.result() == 7
    assert y.tolist() == [2.0] * 4
    found = until(looking, 0, lambda event: event.kind == "done" and event.what == "aten::mul.Tensor")
    (begun,) = [each for each in found if (each.kind, each.what) == ("begun", "aten::mul.Tensor")]
    assert line(begun) == "test_a_node_that_is_in_a_function_is_watched_from_then_on_and_answers"


def test_a_function_is_seen_while_it_runs(looking: LookingIn) -> None:
    told, go_on = Channel(), Channel()
    watch(looking, "commands", "function")
    work = dt.submit(hold, told, go_on, node=0)
    found = until(looking, 0, lambda event: event.kind == "begun" and event.what == "hold()")
    assert not [each for each in found if each.kind == "function"]
    go_on.put(7)
    assert work.result() == 7
    found = until(looking, 0, lambda event: event.kind == "function")
    (ended,) = [each for each in found if each.kind == "function"]
    assert (ended.what, ended.failed, line(ended)) == ("hold()", False, "test_a_function_is_seen_while_it_runs")


def test_nothing_is_noted_before_and_after_and_on_others(looking: LookingIn) -> None:
    x, y = torch.ones(4, device="node:0"), torch.ones(4, device="node:1")
    x * 2, y * 2
    dt.synchronize()
    watch(looking, "commands", ranks=[1])
    x * 3, y * 3
    dt.synchronize()
    looking.watch([1], [])
    assert [each.what for each in looking.fetch(1).events if each.kind == "done"].count("aten::mul.Tensor") == 1
    x * 4, y * 4
    dt.synchronize()
    assert [looking.fetch(rank).events for rank in (0, 1)] == [(), ()]


def test_both_ends_of_a_transfer_and_a_collective_are_on_one_clock(looking: LookingIn) -> None:
    x, y = torch.ones(4, device="node:0"), torch.ones(4, device="node:1")
    watch(looking, "transferred", "collective", ranks=[0, 1])
    before = time.monotonic()
    z = x.to("node:1")
    dt.all_reduce([x, y])
    dt.synchronize()
    after = time.monotonic()
    found = [looking.fetch(rank) for rank in (0, 1)]
    for each in found:
        assert abs(each.ahead) <= each.within + 1e-3  # of one machine
        times = [moment - each.ahead for event in each.events for moment in (event.began, event.at)]
        assert before - each.within - 1e-3 <= min(times)
        assert max(times) <= after + each.within + 1e-3
    (sent,) = [it for it in found[0].events if it.kind == "sent" and it.what.endswith("transfers")]
    (received,) = [it for it in found[1].events if it.kind == "received" and it.what.endswith("transfers")]
    assert (sent.peer, received.peer, sent.bytes, received.bytes) == (1, 0, 16, 16)
    assert sent.transfer == received.transfer
    for each in found:
        (joint,) = [it for it in each.events if it.kind == "collective"]
        assert (joint.what, joint.bytes, line(joint)) == (
            "all_reduce", 32, "test_both_ends_of_a_transfer_and_a_collective_are_on_one_clock",
        )  # fmt: skip
    del z


def test_a_node_keeps_no_more_than_it_has_room_for(looking: LookingIn) -> None:
    x = torch.ones(4, device="node:0")
    watch(looking, "commands", room=3)
    for _ in range(20):
        x.mul_(1)
    dt.synchronize()
    found = looking.fetch(0)
    assert len(found.events) == 3
    assert found.dropped >= 2 * 20 - 3
