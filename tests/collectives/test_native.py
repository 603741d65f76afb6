"""Collectives that a channel does by itself: the same results, errors and ends as ours."""

from __future__ import annotations

import inspect
import itertools

import pytest
import torch
from telling import said

import disttensor as dt
from disttensor import testing
from disttensor.runtime.channel import get_channel

N = 3


CHANNELS = {"native": "native_channel:NativeChannel", "gloo": "gloo"}


@pytest.fixture(params=CHANNELS)
def three(request):
    with dt.init_master_worker(nodes=N, launcher="inproc", backend=CHANNELS[request.param]):
        yield request.param
        dt.synchronize()


@pytest.fixture
def log(three):
    with testing.MessageLog() as log:
        yield log


def algorithms(log):
    """Those of the collectives that were issued, node by node; "" where none was named."""
    words = [name.split() for name in log.commands if name.startswith("Collective")]
    return [" ".join(algorithm) for _, _, *algorithm in words]


def random(k, *shape, dtype=torch.float32):
    numbers = torch.randn(*shape, generator=torch.Generator().manual_seed(k)) * 4
    return numbers.to(dtype)


def on_nodes(tensors):
    return [x.to(f"node:{k}") for k, x in enumerate(tensors)]


def grid(shape, dtype):
    """A list of tensors per node."""
    return [[random(10 * i + j, *shape, dtype=dtype).to(f"node:{i}") for j in range(N)] for i in range(N)]


def everything(shape, dtype, **own):
    """What every collective gives."""
    results = []
    like = lambda k: [torch.empty(shape, dtype=dtype, device=f"node:{k}") for _ in range(N)]  # noqa: E731
    ops = ["SUM", "MAX", "PRODUCT", "AVG"] if dtype.is_floating_point else ["SUM", "MIN", "BXOR"]
    for op in ops:
        xs = on_nodes([random(k, *shape, dtype=dtype) for k in range(N)])
        dt.all_reduce(xs, op, **own)
        results += xs
        dt.collectives.reduce(xs, 1, op, **own)
        results += xs
        outs = [torch.empty(shape, dtype=dtype, device=f"node:{k}") for k in range(N)]
        dt.collectives.reduce_scatter(outs, grid(shape, dtype), op, **own)
        results += outs
    xs = on_nodes([random(k, *shape, dtype=dtype) for k in range(N)])
    dt.broadcast(xs, 2, **own)
    results += xs
    xs = on_nodes([random(k, *shape, dtype=dtype).mT for k in range(N)])
    lists = [[torch.empty_like(xs[0]).to(f"node:{k}") for _ in range(N)] for k in range(N)]
    dt.all_gather(lists, xs, **own)
    results += itertools.chain(*lists)
    there = like(1)
    dt.collectives.gather(on_nodes([random(k, *shape, dtype=dtype) for k in range(N)]), there, 1)
    results += there
    xs = [like(k)[0] for k in range(N)]
    dt.collectives.scatter(xs, grid(shape, dtype)[2], 2)
    results += xs
    lists = [like(k) for k in range(N)]
    dt.collectives.all_to_all(lists, grid(shape, dtype))
    results += itertools.chain(*lists)
    dt.collectives.barrier()
    return [x.cpu() for x in results]


OURS = {"all_reduce": "ring", "reduce": "tree", "reduce_scatter": "ring", "broadcast": "tree", "all_gather": "ring"}


@pytest.mark.row("T18")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int32, torch.uint8], ids=str)
@pytest.mark.parametrize("shape", [(0, 2), (5, 7), (300, 300)], ids=str)
def test_it_gives_what_ours_give(shape, dtype, three, monkeypatch):
    with testing.MessageLog() as log:
        native = everything(shape, dtype)
    # Gloo has another opinion about NaN in a maximum, and a barrier that costs more than ours.
    assert set(algorithms(log)) == ({"native"} if three == "native" else {"native", ""})
    assert algorithms(log).count("") <= 4 * N
    monkeypatch.setattr(get_channel(CHANNELS[three]), "has_collective", lambda *a, **k: False)
    with testing.MessageLog() as log:
        ours = everything(shape, dtype)
    assert "native" not in algorithms(log)
    for one, other in zip(native, ours, strict=True):
        torch.testing.assert_close(one, other)


def test_what_the_channel_has_not_is_done_by_ours(log):
    xs = on_nodes([torch.full((4,), k, dtype=torch.int16) for k in range(N)])
    dt.all_reduce(xs)
    dt.all_reduce(on_nodes([torch.ones(4)] * N), transport=torch.bfloat16)
    dt.all_reduce(on_nodes([torch.ones(4)] * N), algorithm="ring")
    dt.collectives.sendreceive(xs)
    dt.all_reduce(xs[:1], group=dt.collectives.new_group([0]))
    assert "native" not in algorithms(log)
    assert xs[1].tolist() == [3] * 4
    with pytest.raises(ValueError, match=r"the channel '\w+' has no all_reduce of its own for torch.int16"):
        dt.all_reduce(xs, algorithm="native")
    dt.all_reduce(on_nodes([torch.ones(4)] * N), algorithm="native")
    assert algorithms(log)[-1] == "native"


def test_some_of_the_nodes_in_any_order_asynchronously(log):
    for _ in range(3):
        xs = [torch.full((1000,), float(k), device=f"node:{k}") for k in (2, 0)]
        ys = [torch.full((1000,), float(k), device=f"node:{k}") for k in (1, 2)]
        works = [dt.all_reduce(xs, async_op=True), dt.all_reduce(ys, async_op=True)]
        assert all(work.wait() for work in works)
        assert xs[0][0].item() == xs[1][0].item() == 2
        assert ys[0][0].item() == ys[1][0].item() == 3
    assert set(algorithms(log)) == {"native"}


def test_poison_reaches_everybody_and_the_next_one_works(log):
    xs = on_nodes([torch.ones(3) for _ in range(N)])
    line = inspect.currentframe().f_lineno + 1
    bad = torch.ones(5, device="node:1")[torch.tensor([9], device="node:1")]
    xs[1] = torch.cat([bad] * 3)
    dt.all_reduce(xs)
    for x in xs:
        with pytest.raises(IndexError) as caught:
            x.cpu()
        assert f"test_native.py:{line}" in said(caught.value)
    good = on_nodes([torch.ones(3) for _ in range(N)])
    dt.all_reduce(good)
    assert all(x.tolist() == [N] * 3 for x in good)
    assert algorithms(log)[-1] == "native"


def test_a_graph_records_it(three):
    xs = on_nodes([torch.ones(3) for _ in range(N)])
    graph = dt.Graph()
    with dt.graph(graph):
        ys = [x + 1 for x in xs]
        dt.all_reduce(ys)
    for k in range(3):
        for x in xs:
            x.fill_(k)
        graph.replay()
        assert [y[0].item() for y in ys] == [N * (k + 1)] * N


def over_dims(m, over, **own):
    """What collectives over dims of a mesh give, by rank."""
    named = {"algorithm": own["algorithm"]} if own else {}
    x = dt.meshes.from_shards(m, [random(k, 12) for k in range(len(m))])
    into = dt.meshes.from_shards(m, [random(k, 12) for k in range(len(m))])
    dt.collectives.all_reduce_(into, "max", over=over, **named)
    outs = [
        into,
        dt.all_reduce(x, "avg", over=over, **named),
        dt.all_gather(x, over=over, **named),
        dt.collectives.reduce_scatter(x, over=over, **named),
        dt.broadcast(x, over=over, src=1),
        dt.collectives.all_to_all(x, over=over),
        dt.collectives.permute_ranks(x, over=over),
        dt.all_reduce(x, over=over, async_op=True, **named).result(),
    ]
    return [[shard.cpu() for shard in out.shards()] for out in outs]


@pytest.mark.parametrize("channel", CHANNELS)
def test_over_dims_of_a_mesh(channel):
    """Each group does it by itself, and as lists have it: by the session's channel, a selected one, an algorithm."""
    with dt.init_master_worker(nodes=4, launcher="inproc"):
        m = dt.mesh(dp=2, tp=2)
        for over in ("dp", "tp", ("dp", "tp")):
            with testing.MessageLog() as log:
                ours = over_dims(m, over)
                assert set(algorithms(log)) == {""}
                by_ring = over_dims(m, over, algorithm="ring") if over == "dp" else ours
            dt.channels.select("*", CHANNELS[channel])
            with testing.MessageLog() as log:
                native = over_dims(m, over)
                assert "native" in algorithms(log)
            dt.channels.reset()
            for one, ring, other in zip(ours, by_ring, native, strict=True):
                torch.testing.assert_close(one, other)
                torch.testing.assert_close(one, ring)


def test_over_dims_an_algorithm_is_selected_or_named(three, log):
    m = dt.mesh(dp=N)
    x = dt.meshes.replicate(torch.ones(5), m)
    assert dt.all_reduce(x, over="dp").at(dp=0).sum().item() == 5 * N
    assert dt.all_reduce(x, over="dp", algorithm="ring").at(dp=1).sum().item() == 5 * N
    dt.channels.select("all_reduce", algorithm="doubling")
    assert dt.all_reduce(x, over="dp").at(dp=0).sum().item() == 5 * N
    assert algorithms(log) == ["native", "ring", "doubling"] * N  # of each node
    for wrong, call in (
        (
            "all_reduce has no algorithm 'rings'; it has all, doubling",
            lambda: dt.all_reduce(x, over="dp", algorithm="rings"),
        ),
        ("broadcast has no algorithm 'ring'; it has tree", lambda: dt.broadcast(x, over="dp", algorithm="ring")),
    ):
        with pytest.raises(ValueError, match=wrong):
            call()
