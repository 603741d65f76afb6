"""A node is not its connection: a worker is taken away in the middle of commands, and another one comes in its place
with none of the tensors. What it held is gone, by a named error; all else goes on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from incarnations import NODE, Cluster, gone
from side_channels import await_side_channels

import disttensor as dt


@pytest.fixture(params=["threads", "processes"])
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """The session ends without an error: nothing that was raised or read is raised again."""
    kind = request.param
    with dt.init_master_worker(nodes=3, threads=1, launcher="inproc" if kind == "threads" else "local"):
        yield Cluster(kind)


def test_nothing_is_lost_or_done_twice_on_the_others(cluster: Cluster) -> None:
    """Counts, in place: on single nodes and on a mesh of those that stay; and on a mesh with the one that is lost."""
    alone = [torch.zeros(1, dtype=torch.int64, device=f"node:{node}") for node in range(3)]
    stays = torch.zeros(1, dtype=torch.int64, device=dt.mesh(dp=2, nodes=[0, 2]).device)
    every = torch.zeros(1, dtype=torch.int64, device=dt.mesh(dp=3).device)
    done = {"alone": 0, "stays": 0, "every": 0}

    def count(times: int, with_the_node: bool) -> None:
        for _ in range(times):
            for node in (0, 2):
                alone[node] += 1
            done["alone"] += 1
            stays.add_(1)
            done["stays"] += 1
            if with_the_node:
                alone[NODE] += 1
                every.add_(1)
                done["every"] += 1

    count(100, with_the_node=True)
    busy = torch.full((1200, 1200), 1e-3, device=f"node:{NODE}")
    for _ in range(20):
        busy = busy @ busy
    count(200, with_the_node=True)  # that is behind these when the worker is taken away
    cluster.lose()
    count(50, with_the_node=False)
    with pytest.raises(dt.NodeLost):
        (alone[NODE] + 1).item()
    with pytest.raises(dt.NodeLost):
        (every + 1).at(dp=0).item()
    cluster.come()
    count(100, with_the_node=False)
    every.add_(1)
    done["every"] += 1
    for node in (0, 2):
        assert alone[node].item() == done["alone"]
        assert every.at(dp=node).item() == done["every"]
    assert stays.shards()[0].item() == stays.shards()[1].item() == done["stays"]
    with pytest.raises(dt.NodeLost) as error:
        alone[NODE].item()
    gone(error)
    with pytest.raises(dt.NodeLost) as error:
        every.at(dp=NODE).item()
    gone(error)


def test_operations_on_what_it_held_name_who_held_it(cluster: Cluster) -> None:
    first = torch.arange(4.0, device=f"node:{NODE}")
    view, local = first.view(2, 2), torch.ones(4, device="node:0")
    cluster.again()
    second = torch.arange(4.0, device=f"node:{NODE}")
    uses = [
        lambda x: (x * 2).cpu(), lambda x: x.sum().item(), lambda x: x.to("node:0").cpu(), lambda x: x.add_(1).cpu(),
        lambda x: dt.run(torch.sum, x, node=NODE), lambda x: x.nonzero(),
        lambda x: (second + x).cpu(),
    ]  # fmt: skip
    for use in uses:
        with pytest.raises(dt.NodeLost) as error:
            use(first)
        gone(error)
    with pytest.raises(dt.NodeLost) as error:
        (view + 1).cpu()
    gone(error)
    dt.all_reduce([local, first])
    with pytest.raises(dt.NodeLost) as error:
        local.cpu()
    gone(error)
    assert torch.equal(second.cpu(), torch.arange(4.0))
    cluster.again()
    with pytest.raises(dt.NodeLost) as error:
        (second * 2).cpu()
    assert "incarnation 1" in gone(error, 1)
    assert f"node {NODE} (host" in str(error.value)
    assert ", incarnation 1) is lost" in str(error.value)
    with pytest.raises(dt.NodeLost) as error:
        (first * 2).cpu()
    gone(error, 0)
    assert torch.equal((torch.ones(2, device=f"node:{NODE}") * 3).cpu(), torch.full((2,), 3.0))


def test_templates_and_places_stay(cluster: Cluster) -> None:
    mesh = dt.mesh(dp=3)
    inner = dt.mesh(dp=3, tp=1).slice(tp=0)
    devices = [torch.device(f"node:{NODE}"), mesh.device, inner.device]

    def step() -> list[torch.Tensor]:
        made = [torch.arange(6.0).to(device) for device in devices]
        return [((x.view(2, 3) * 2 + x.view(2, 3)) @ x.view(3, 2)).sum() for x in made]

    def values() -> list[float]:
        return [x.item() for x in step()]

    before = values()
    values()
    known, places = cluster.templates(), [cluster.place(device) for device in devices]
    cluster.again()
    assert values() == before
    assert cluster.templates() == known, "each that was known is defined on the new worker, and no other"
    assert [cluster.place(device) for device in devices] == places
    assert [torch.ones(3).to(device).device for device in devices] == devices


@pytest.mark.parametrize("cluster", ["threads"], indirect=True)
def test_it_looks_at_what_it_computes_and_what_was_held_has_no_value(cluster: Cluster) -> None:
    held = torch.ones(3, device=f"node:{NODE}")
    with dt.seeing.check_finite():
        cluster.again()
        x = torch.zeros(3, device=f"node:{NODE}")
        x / x
        with pytest.raises(dt.errors.NonFiniteError, match=r"aten::div\.Tensor has given float32 \(3,\) with 3 NaN"):
            dt.synchronize()
    x / x
    dt.synchronize()
    assert dt.seeing.whence(held).failure == f"it was lost with an earlier worker in the place of node {NODE}"
    assert dt.seeing.whence(x).failure == ""


@pytest.mark.parametrize("cluster", ["threads"], indirect=True)
def test_one_of_another_kind_is_refused(cluster: Cluster) -> None:
    """By what differs. The node is lost as before, as it is when none has come, and another one can come."""
    x = torch.ones(3, device=f"node:{NODE}")
    cluster.lose()
    for other, says in (
        ({"simulate_cuda": 1}, rf"in the place of node {NODE}: its devices are cpu, cuda:0, and"),
        ({"backend": "pigeons"}, "pigeons"),
    ):
        with pytest.raises((dt.DisttensorError, ValueError), match=says):
            cluster.come(**other)
        assert [(node.rank, node.alive) for node in dt.nodes()] == [(0, True), (NODE, False), (2, True)]
        with pytest.raises(dt.NodeLost):
            (x + 1).cpu()
    cluster.come()
    assert torch.ones(3, device=f"node:{NODE}").sum().item() == 3
    with pytest.raises(dt.NodeLost):
        x.cpu()


def test_streams_go_on(cluster: Cluster) -> None:
    side, dropped = dt.Stream(node=NODE), dt.Stream(node=NODE)
    with dt.stream(side):
        x = torch.ones(3, device=f"node:{NODE}") * 2
    assert x.sum().item() == 6
    del dropped
    cluster.again()
    assert cluster.standing() == [side.stream_id]
    y = torch.ones(3, device=f"node:{NODE}")
    with dt.stream(side):
        z = y * 5
    assert (z + 1).sum().item() == 18
    side.synchronize()
    with pytest.raises(dt.NodeLost) as error:
        (x + 1).cpu()
    gone(error)


def test_channels_between_peers_go_on(cluster: Cluster) -> None:
    """The script's, those of each pair, and those of collectives, small ones in shared pages and large ones."""
    mesh = dt.mesh(dp=3)

    def step(size: int) -> None:
        x = torch.arange(float(size)).to("node:0")
        around = x.to(f"node:{NODE}").to("node:2").to(f"node:{NODE}").to("node:0")
        assert torch.equal(around.cpu(), torch.arange(float(size)))
        parts = [torch.full((size,), float(node + 1), device=f"node:{node}") for node in range(3)]
        dt.all_reduce(parts)
        for part in parts:
            assert torch.equal(part.cpu(), torch.full((size,), 6.0))
        whole = torch.ones(size).to(mesh.device)
        dt.collectives.all_reduce_(whole, over="dp")
        assert torch.equal(whole.at(dp=NODE).cpu(), torch.full((size,), 3.0))

    for size in (8, 100_000):
        step(size)
    for _ in range(2):
        cluster.again()
        for size in (8, 100_000):
            step(size)


def test_a_recorded_graph_goes_on(cluster: Cluster) -> None:
    """One whose commands need nothing that the worker held; and one that does names it, at the line of the replay."""
    static, held = torch.ones(3, device="node:0"), torch.ones(3, device=f"node:{NODE}")

    def step() -> torch.Tensor:
        y = static.to(f"node:{NODE}") * 2
        return y.to("node:0") + static

    (step(), (static.to(f"node:{NODE}") * held).to("node:0"))
    graph, other = dt.Graph(), dt.Graph()
    with dt.graph(graph):
        result = step()
        there = result.to(f"node:{NODE}") * 3
    with dt.graph(other):
        lost = (static.to(f"node:{NODE}") * held).to("node:0")
    graph.replay()
    other.replay()
    assert result.sum().item() == 9
    assert lost.sum().item() == 3
    cluster.again()
    static.fill_(2)
    graph.replay()
    assert result.sum().item() == 18
    assert there.sum().item() == 54, "what a graph makes is made again, under the same name"
    static.fill_(3)
    graph.replay()
    assert result.sum().item() == 27
    other.replay()
    with pytest.raises(dt.NodeLost) as error:
        lost.cpu()
    gone(error)
    graph.replay()
    assert there.sum().item() == 81
    other.reset()
    assert cluster.standing() == [("graph", graph.id)]


def test_functions_and_shared_objects_go_on(cluster: Cluster) -> None:
    def triple(x: torch.Tensor, channel: Any) -> torch.Tensor:
        channel.put(float(x.sum()))
        return x * 3

    channel: Any = dt.tasks.Channel()
    await_side_channels()
    for turn in range(2):
        for node in range(3):
            x = torch.full((2,), float(turn + 1), device=f"node:{node}")
            assert dt.run(triple, x, channel, node=node).sum().item() == 6 * (turn + 1)
            assert channel.get() == 2.0 * (turn + 1)
        if not turn:
            cluster.again()
    await_side_channels()  # the new worker has one, by a key of its own
    assert cluster.has_side_channel()


def test_how_far_a_place_is_can_be_read_without_a_message(cluster: Cluster) -> None:
    device = dt.mesh(dp=3).device
    x = torch.ones(3).to(device) * 2
    cluster.send()
    marks = cluster.progress(device)
    dt.synchronize()
    now = cluster.progress(device)
    assert [each.rank for each in now] == [0, 1, 2]
    assert all(each.has_reached(mark) for each, mark in zip(now, marks, strict=True))
    cluster.again()
    dt.synchronize()
    now = cluster.progress(device)
    assert [each.has_reached(mark) for each, mark in zip(now, marks, strict=True)] == [True, False, True]
    assert [each.incarnation for each in now] == [0, 1, 0]
    assert all(each.done >= mark.done for each, mark in zip(now, marks, strict=True)), "numbers are never used again"
    assert x.at(dp=0).sum().item() == 6


def test_random_numbers_begin_with_the_seed(cluster: Cluster) -> None:
    mesh = dt.mesh(dp=3)
    torch.manual_seed(7)
    here = torch.rand(3, device=f"node:{NODE}").cpu()
    torch.manual_seed(7)
    with dt.meshes.varying("dp"):
        apart = torch.rand(3, device=mesh.device).shards()
    cluster.again()
    if cluster.kind == "processes":  # threads draw from one generator, the script's
        assert torch.equal(torch.rand(3, device=f"node:{NODE}").cpu(), here)
        with dt.meshes.varying("dp"):
            again = torch.rand(3, device=mesh.device).shards()
        assert not torch.equal(again[0].cpu(), again[NODE].cpu())
        assert not torch.equal(again[0].cpu(), apart[0].cpu()), "on the others they go on"
    assert torch.rand(3, device=mesh.device).shape == (3,)
