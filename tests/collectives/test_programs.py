"""Collectives as the master calls them, over tensors on four nodes."""

from __future__ import annotations

import asyncio
import inspect
import os
import threading

import pytest
import torch
from stream_kit import busy
from telling import said

import disttensor as dt
from disttensor import testing
from disttensor.collectives import functional as F

N = 4


@pytest.fixture(scope="module")
def four():
    with dt.init_master_worker(nodes=N, launcher="inproc", simulate_cuda=1) as session:
        yield session


@pytest.fixture(autouse=True)
def nothing_unsaid(four):
    yield
    dt.synchronize()


def on_nodes(make, device=None):
    """(local tensors, the same on the nodes)"""
    local = [make(k) for k in range(N)]
    return local, [x.to(dt.device(k, device) if device else f"node:{k}") for k, x in enumerate(local)]


def random(k, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(k))


@pytest.mark.row("T3", "G10")
@pytest.mark.parametrize("members", [[0, 1, 2, 3], [2, 0, 3]])
def test_a_barrier_holds(members, tmp_path):
    """A node is busy until it is let go; until then no other one of the group has got behind the barrier."""
    path = tmp_path / "gate"
    os.mkfifo(path)
    busy = threading.Thread(target=dt.run, args=(path.read_bytes,), kwargs={"node": 0})
    busy.start()
    with open(path, "w"):  # when it is open, the node has begun to read
        dt.collectives.barrier(dt.collectives.new_group(members))
        for node in {1, 2, 3} & set(members):
            with pytest.raises(TimeoutError):
                dt.synchronize(node=node, timeout=0.2)
        for node in {1} - set(members):
            dt.synchronize(node=node)
    busy.join()
    for node in range(N):
        dt.synchronize(node=node)


@pytest.mark.row("T8", "T17")
@pytest.mark.parametrize(
    "dtype",
    [
        *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float32, torch.float64),
        *(torch.float16, torch.bfloat16, torch.complex64, torch.complex128),
    ],
    ids=str,
)
def test_scalars_of_every_kind_of_number(dtype):
    """As TorchMPI's four calls for each of C's types."""
    _, xs = on_nodes(lambda k: torch.tensor(k + 1, dtype=dtype))
    assert [y.item() for y in F.all_reduce(xs)] == [10] * N
    assert [y.item() for y in F.broadcast(xs[2], dt.collectives.new_group())] == [3] * N
    assert F.reduce(xs, 1, "SUM" if dtype.is_complex else "MAX").item() == (10 if dtype.is_complex else 4)
    dt.collectives.sendreceive(xs)
    assert [x.item() for x in xs] == [4, 1, 2, 3]
    assert {x.dtype for x in xs} == {dtype}


@pytest.mark.row("T11", "T12", "T13", "T14", "T16", "G8", "G9", "G10", "G11")
@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
@pytest.mark.parametrize("async_op", [False, True])
def test_every_collective(device, async_op):
    local, xs = on_nodes(lambda k: random(k, 3, 5), device)

    def end(work):
        assert (work is not None) == async_op
        if work is not None:
            assert work.wait()

    outs = [torch.empty_like(x) for x in xs]
    end(dt.all_reduce(xs, out=outs, async_op=async_op))
    for x, y, out in zip(xs, local, outs, strict=True):
        torch.testing.assert_close(out.cpu(), sum(local))
        assert torch.equal(x.cpu(), y), "out of place the input stays"
        assert out.device == x.device
    end(dt.all_reduce(outs, dt.collectives.ReduceOp.MAX, async_op=async_op))
    end(dt.collectives.reduce(xs, 2, "AVG", async_op=async_op))
    torch.testing.assert_close(xs[2].cpu(), sum(local) / N)
    assert torch.equal(xs[1].cpu(), local[1])
    end(dt.broadcast(xs, 1, async_op=async_op))
    assert all(torch.equal(x.cpu(), local[1]) for x in xs)

    local, xs = on_nodes(lambda k: random(k, k, 2), device)
    lists = [[torch.empty(other.shape, device=x.device) for other in local] for x in xs]
    end(dt.all_gather(lists, xs, async_op=async_op))
    assert all(torch.equal(out.cpu(), x) for outs in lists for out, x in zip(outs, local, strict=True))
    at_3 = [torch.empty(other.shape, device=xs[3].device) for other in local]
    end(dt.collectives.gather(xs, at_3, 3, async_op=async_op))
    assert all(torch.equal(out.cpu(), x) for out, x in zip(at_3, local, strict=True))
    back = [torch.zeros_like(x) for x in xs]
    end(dt.collectives.scatter(back, at_3, 3, async_op=async_op))
    assert all(torch.equal(out.cpu(), x) for out, x in zip(back, local, strict=True))

    rows = [[random(10 * i + j, j + 1) for j in range(N)] for i in range(N)]
    there = [[x.to(dt.device(i, device)) for x in row] for i, row in enumerate(rows)]
    sums = [torch.empty(j + 1, device=there[j][0].device) for j in range(N)]
    end(dt.collectives.reduce_scatter(sums, there, async_op=async_op))
    for j, total in enumerate(sums):
        torch.testing.assert_close(total.cpu(), sum(row[j] for row in rows))
    turned = [[torch.empty(i + 1, device=there[i][0].device) for _ in range(N)] for i in range(N)]
    end(dt.collectives.all_to_all(turned, there, async_op=async_op))
    assert all(torch.equal(turned[i][j].cpu(), rows[j][i]) for i in range(N) for j in range(N))

    _, xs = on_nodes(lambda k: torch.tensor([k]), device)
    end(dt.collectives.sendreceive(xs, async_op=async_op))
    assert [x.item() for x in xs] == [3, 0, 1, 2]
    end(dt.collectives.sendreceive(xs, -2, async_op=async_op))
    assert [x.item() for x in xs] == [1, 2, 3, 0]
    end(dt.collectives.send(xs[3], xs[1], async_op=async_op))
    end(dt.collectives.recv(xs[0], xs[2], async_op=async_op))
    assert [x.item() for x in xs] == [3, 0, 3, 0]
    end(dt.collectives.barrier(async_op=async_op))


@pytest.mark.row("T9", "T10", "I17", "P2", "P5", "P8")
@pytest.mark.parametrize("root", range(N))
def test_any_root(root):
    """Of several tensors per node too, and none but the root's is changed by a reduction."""
    local, xs = on_nodes(lambda k: random(k, 7))
    dt.collectives.reduce(xs, root)
    torch.testing.assert_close(xs[root].cpu(), sum(local))
    assert all(torch.equal(x.cpu(), y) for k, (x, y) in enumerate(zip(xs, local, strict=True)) if k != root)
    local, xs = on_nodes(lambda k: random(k, 7))
    dt.broadcast(xs, root)
    assert all(torch.equal(x.cpu(), local[root]) for x in xs)


@pytest.mark.row("P2", "P3", "P4", "P5", "P6", "P7", "P8", "P9")
def test_what_the_ancestors_print():
    """distributed-training-patterns, and the sums of the others' tests."""
    _, xs = on_nodes(lambda k: torch.tensor([float(k)]))
    for op, value in (("SUM", 6), ("MAX", 3)):
        ys = [x.clone() for x in xs]
        dt.collectives.reduce(ys, 0, op)
        assert ys[0].item() == value
    for op, value in (("MIN", 1), ("MAX", 4), ("SUM", 10)):
        ys = [x + 1 for x in xs]
        dt.all_reduce(ys, op)
        assert [y.item() for y in ys] == [value] * N
    two = [(torch.tensor([1.0, 2.0, 3.0]) + k).to(f"node:{k}") for k in range(2)]
    assert [y.tolist() for y in F.all_reduce(two)] == [[3, 5, 7]] * 2
    assert [y.tolist() for y in F.all_reduce(two, "AVG")] == [[1.5, 2.5, 3.5]] * 2
    weights = [torch.tensor([99.0 if k == 0 else 0.0]).to(f"node:{k}") for k in range(N)]
    dt.broadcast(weights, 0)
    assert [w.item() for w in weights] == [99] * N
    rows = F.all_gather([torch.full((3,), k).to(f"node:{k}") for k in range(2)])
    assert [torch.cat(row).tolist() for row in rows] == [[0, 0, 0, 1, 1, 1]] * 2
    pieces = torch.arange(40.0, device="node:1").chunk(N)
    outs = [torch.empty(10, device=f"node:{k}") for k in range(N)]
    dt.collectives.scatter(outs, pieces, 1)
    assert [out[0].item() for out in outs] == [0, 10, 20, 30]
    back = [torch.empty(10, device="node:0") for _ in range(N)]
    dt.collectives.gather(outs, back, 0)
    assert torch.equal(torch.cat(back).cpu(), torch.arange(40.0))


def test_nothing_is_waited_for():
    _, xs = on_nodes(lambda k: torch.ones(3))
    with testing.MessageLog() as log:
        assert dt.all_reduce(xs) is None
    # by our own algorithms, or by the channel's: "Collective all_reduce native"; the first one introduces nodes
    assert [[" ".join(name.split()[:2]) for name in log[k].commands if name != "Peer"] for k in range(N)] == [
        ["Collective all_reduce"]
    ] * N
    assert log.reports == 0


@pytest.mark.row("T17")
def test_views_strides_and_bits():
    _, bases = on_nodes(lambda k: torch.full((4, 6), float(k)))
    dt.all_reduce([base.t()[::2] for base in bases])
    for k, base in enumerate(bases):
        assert base[:, ::2].eq(6).all()
        assert base[:, 1::2].eq(k).all()
    _, zs = on_nodes(lambda k: torch.full((2,), complex(k, 1)))
    assert F.all_reduce([z.conj() for z in zs])[0].tolist() == [6 - 4j] * 2
    with pytest.raises(RuntimeError, match="resolve_conj"):
        dt.all_reduce([z.conj() for z in zs])


def expanded(k):
    return (torch.arange(2.0) + k).to(f"node:{k}").expand(3, 2)


def whole(k):
    return torch.zeros(3, 2, device=f"node:{k}")


def wholes(k):
    return [whole(k) for _ in range(N)]


C = dt.collectives
EACH = range(N)
#: collectives that read expanded tensors: what they write, how, and whose values come there
READERS = {
    "broadcast": ([0, 2, 3], lambda xs, to: dt.broadcast([to[0], xs[1], *to[1:]], 1), [1, 1, 1]),
    "all_gather": ([2] * N, lambda xs, to: dt.all_gather([to if k == 2 else wholes(k) for k in EACH], xs), EACH),
    "gather": ([2] * N, lambda xs, to: C.gather(xs, to, 2), EACH),
    "scatter": (EACH, lambda xs, to: C.scatter(to, [xs[1]] * N, 1), [1] * N),
    "send": ([0], lambda xs, to: C.send(xs[3], to[0]), [3]),
    "all_reduce": (EACH, lambda xs, to: dt.all_reduce(xs, "max", out=to), [3] * N),
    "reduce_scatter": (EACH, lambda xs, to: dt.collectives.reduce_scatter(to, [[x] * N for x in xs], "max"), [3] * N),
}  # fmt: skip


@pytest.mark.parametrize("what", READERS)
def test_what_is_read_may_be_expanded(what):
    """It is not written: a broadcast wrote its source, with the values that it had."""
    places, run, expected = READERS[what]
    targets = list(map(whole, places))
    run(list(map(expanded, EACH)), targets)
    for x, k in zip(targets, expected, strict=True):
        assert torch.equal(x.cpu(), (torch.arange(2.0) + k).expand(3, 2))
    dt.synchronize()  # no node has failed


#: collectives that write what ``x`` makes for a node
WRITERS = {
    "all_reduce": lambda x: dt.all_reduce([whole(0), x(1)]),
    "all_reduce out": lambda x: dt.all_reduce([whole(0), whole(1)], out=[x(0), whole(1)]),
    "reduce": lambda x: C.reduce([whole(0), x(1)], 1),
    "broadcast": lambda x: dt.broadcast([whole(0), x(1)], 0),
    "all_gather": lambda x: dt.all_gather([[whole(0), x(0)], [whole(1), whole(1)]], [whole(0), whole(1)]),
    "gather": lambda x: C.gather([whole(0), whole(1)], [whole(1), x(1)], 1),
    "scatter": lambda x: C.scatter([whole(0), x(1)], [whole(0), whole(0)], 0),
    "reduce_scatter": lambda x: dt.collectives.reduce_scatter(
        [whole(0), x(1)], [[whole(0), whole(0)], [whole(1), whole(1)]]
    ),
    "all_to_all": lambda x: C.all_to_all([[x(0), whole(0)], [whole(1)] * 2], [[whole(0)] * 2, [whole(1)] * 2]),
    "sendreceive": lambda x: C.sendreceive([whole(0), x(1)]),
    "send": lambda x: C.send(whole(0), x(1)),
}


@pytest.mark.parametrize("what", WRITERS)
def test_what_is_written_may_not_be_expanded(what):
    """Some would be written at the line, and the others fail later on their nodes, as local torch refuses it there."""
    made = []

    def x(k):
        made.append(expanded(k))
        return made[-1]

    shown = r"shape \(3, 2\) and strides \(0, 1\) cannot be written by a collective"
    with pytest.raises(RuntimeError, match=shown):
        WRITERS[what](x)
    k = int(made[0].device.index)
    assert torch.equal(made[0].cpu(), (torch.arange(2.0) + k).expand(3, 2))


def test_what_was_made_before_sees_it_and_autograd_knows():
    _, xs = on_nodes(lambda k: torch.ones(2))
    views = [x[:1] for x in xs]
    before = [x * 1 for x in xs]
    w = torch.ones(2, device="node:0", requires_grad=True)
    loss = (w * xs[0]).sum()
    dt.all_reduce(xs)
    assert [v.item() for v in views] == [N] * N
    assert [b.tolist() for b in before] == [[1, 1]] * N
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.row("T22")
def test_options():
    local, xs = on_nodes(lambda k: random(k, 1001))
    for algorithm in (
        "all",
        "doubling",
        "halving",
        "direct",
        "ring",
        "tree",
        dt.collectives.Way("tree", 3),
        dt.collectives.Way("ring", chunk=64),
    ):
        outs = [torch.empty_like(x) for x in xs]
        dt.all_reduce(xs, out=outs, algorithm=algorithm)
        assert all(torch.equal(out.cpu(), outs[0].cpu()) for out in outs)
        torch.testing.assert_close(outs[0].cpu(), sum(local))
    dt.all_reduce(xs, transport=torch.bfloat16)
    assert torch.equal(xs[0].cpu(), xs[1].cpu())
    assert torch.equal(xs[0].cpu(), xs[0].cpu().bfloat16().float())
    torch.testing.assert_close(xs[0].cpu(), sum(local), atol=0.1, rtol=0.1)
    with pytest.raises(ValueError, match="all_reduce has no algorithm 'rings'; it has all, doubling"):
        dt.all_reduce(xs, algorithm="rings")


IN_BFLOAT16 = {
    "all_reduce": lambda xs, **how: dt.all_reduce(xs, **how) or xs,
    "reduce": lambda xs, **how: dt.collectives.reduce(xs, 2, **how) or xs[2:3],
    "reduce_scatter": lambda xs, **how: (
        dt.collectives.reduce_scatter(
            outs := [torch.empty_like(x[:1024]) for x in xs], [list(x.split(1024)) for x in xs], **how
        )
        or outs
    ),
}


@pytest.mark.row("S10")
@pytest.mark.parametrize("name", IN_BFLOAT16)
def test_what_travels_as_bfloat16_is_half_as_long(name):
    """It is rounded on its way, and comes as what it was."""
    reduced, sent = IN_BFLOAT16[name], []
    for how in ({}, {"transport": torch.bfloat16}):
        local, xs = on_nodes(lambda k: random(k, 4096))
        dt.synchronize()
        dt.channels.reset_stats()
        found = reduced(xs, **how)
        dt.synchronize()
        sent.append(sum(row.sent.bytes for row in dt.channels.stats()))
        values = torch.stack([x.cpu() for x in found])
        wanted = sum(local).view(len(found), -1) if name == "reduce_scatter" else sum(local).expand(len(found), -1)
        torch.testing.assert_close(values, wanted, **({"atol": 0.1, "rtol": 0.02} if how else {}))
        assert torch.equal(values, values.bfloat16().float()) == bool(how)
        if name == "all_reduce":
            assert all(torch.equal(value, values[0]) for value in values)
    assert sent[0] == 2 * sent[1] > 0


#: What each reduction of torch.distributed makes of the values of these four nodes.
REDUCED = {"SUM": 31, "PRODUCT": 3360, "MIN": 6, "MAX": 10, "BAND": 0, "BOR": 15, "BXOR": 3, "AVG": 7.75}


@pytest.mark.row("G12")
@pytest.mark.parametrize("name", REDUCED)
def test_torch_distributeds_reductions_mean_the_same(name):
    """As torch's own value, ours, the name in capitals and small letters, and by the old name of the type."""
    assert set(REDUCED) == set(dt.collectives.ReduceOp.__members__)
    ops = [getattr(torch.distributed.ReduceOp, name), dt.collectives.ReduceOp[name], name, name.lower()]
    if name != "AVG":
        with pytest.warns(FutureWarning, match="reduce_op"):
            ops.append(getattr(torch.distributed.reduce_op, name))
    for op in ops:
        _, xs = on_nodes(
            lambda k: torch.tensor([6, 7, 8, 10][k], dtype=torch.float64 if name == "AVG" else torch.int64)
        )
        dt.all_reduce(xs, op)
        assert [x.item() for x in xs] == [REDUCED[name]] * N


@pytest.mark.row("G12")
@pytest.mark.parametrize("op", ["mean", torch.distributed.ReduceOp.PREMUL_SUM], ids=str)
def test_what_is_no_reduction_is_refused(op):
    _, xs = on_nodes(lambda k: torch.ones(2))
    with pytest.raises(TypeError, match="is not a reduction; there are SUM, AVG"):
        dt.all_reduce(xs, op)
    assert [x.tolist() for x in xs] == [[1, 1]] * N


@pytest.mark.parametrize("transport", [torch.int8, "bfloat16", torch.bool])
def test_what_travels_as_no_float_is_refused(transport) -> None:
    """Values would have been cut to whole numbers on their way, silently."""
    _, xs = on_nodes(lambda k: torch.full((2,), 0.75))
    with pytest.raises(TypeError, match=r"all_reduce: transport is a dtype of floats, such as torch\.bfloat16, not "):
        dt.all_reduce(xs, transport=transport)
    assert [x.tolist() for x in xs] == [[0.75, 0.75]] * N


GROUPED = {
    "all_reduce": lambda xs, group: dt.all_reduce(xs, group=group),
    "reduce": lambda xs, group: dt.collectives.reduce(xs, 0, group=group),
    "broadcast": lambda xs, group: dt.broadcast(xs, 0, group),
    "all_gather": lambda xs, group: dt.all_gather([[x] * N for x in xs], xs, group),
    "gather": lambda xs, group: dt.collectives.gather(xs, [xs[0]] * N, 0, group),
    "scatter": lambda xs, group: dt.collectives.scatter(xs, [xs[0]] * N, 0, group),
    "reduce_scatter": lambda xs, group: dt.collectives.reduce_scatter(xs, [[x] * N for x in xs], group=group),
    "all_to_all": lambda xs, group: dt.collectives.all_to_all([[x] * N for x in xs], [[x] * N for x in xs], group),
    "sendreceive": lambda xs, group: dt.collectives.sendreceive(xs, group=group),
    "barrier": lambda xs, group: dt.collectives.barrier(group),
    "broadcast_object": lambda xs, group: dt.collectives.broadcast_object(xs[0], group),
    "scatter_object": lambda xs, group: dt.collectives.scatter_object(xs, group),
    "all_gather_object": lambda xs, group: dt.collectives.all_gather_object(xs, group),
    "functional.all_reduce": lambda xs, group: dt.collectives.functional.all_reduce(xs, group=group),
    "functional.broadcast": lambda xs, group: dt.collectives.functional.broadcast(xs[0], group),
    "functional.scatter": lambda xs, group: dt.collectives.functional.scatter([xs[0]] * N, group),
    "function": lambda xs, group: dt.all_reduce(xs, torch.add, group=group),
}


@pytest.mark.parametrize("group", [3, [0, 1, 2, 3], "all"])
@pytest.mark.parametrize("name", GROUPED)
def test_what_is_no_group_is_named(name: str, group) -> None:
    _, xs = on_nodes(lambda k: torch.ones(2))
    with pytest.raises(TypeError, match=r": group is what disttensor.collectives.new_group\(\[0, 1\]\) gives, not "):
        GROUPED[name](xs, group)


# ---- groups --------------------------------------------------------------------------------------


@pytest.mark.row("T4")
def test_rank_and_size():
    """Of all nodes, of a group in another order, of the groups of a split, and of a group of one."""
    everybody = dt.collectives.new_group()
    assert (len(everybody), [everybody.rank(k) for k in range(N)]) == (N, list(range(N)))
    some = dt.collectives.new_group([3, 0, 2])
    assert (len(some), [some.rank(k) for k in (3, 0, 2)]) == (3, [0, 1, 2])
    with pytest.raises(ValueError, match="node 1 is not in <Group of nodes 3, 0, 2>"):
        some.rank(1)
    odd = some.split(lambda k: k % 2)
    assert (len(odd.of(2)), odd.of(2).rank(2), odd.of(3).rank(3)) == (2, 1, 0)
    assert (len(dt.collectives.new_group([2])), dt.collectives.new_group([2]).rank(2)) == (1, 0)


@pytest.mark.row("T7", "T25", "T28", "T30", "G7")
def test_groups():
    everybody = dt.collectives.new_group(name="world")
    assert everybody.nodes == (0, 1, 2, 3)
    assert (
        dt.collectives.new_group([2, 0])
        == dt.collectives.new_group((2, 0), "another name")
        != dt.collectives.new_group([0, 2])
    )
    parity = everybody.split(lambda node: node % 2)
    assert {key: group.nodes for key, group in parity.items()} == {0: (0, 2), 1: (1, 3)}
    assert (len(parity), len(everybody.split("abba")), len(everybody.split("abcd"))) == (2, 2, 4)
    assert parity.leaders.nodes == (0, 1)
    assert parity.of(3) is parity[1]
    assert parity[0].name == "world/0"
    assert everybody.split("abba")["b"].nodes == (1, 2)
    assert [group.nodes for group in everybody.by_host().values()] == [(0, 1, 2, 3)]
    assert 2 in parity[0]
    assert 1 not in parity[0]
    with pytest.raises(AttributeError):
        everybody.nodes = (1,)
    for wrong, words in (([0, 4], "node 4 does not exist; there are 4"), ([1, 1], "each once"), ([], "at least one")):
        with pytest.raises(ValueError, match=words):
            dt.collectives.new_group(wrong)
    with pytest.raises(ValueError, match="3 keys for the 4 nodes"):
        everybody.split([1, 2, 3])


@pytest.mark.row("G7")
def test_groups_at_once():
    """Halves, pairs across them, and the leaders, each in the order of issue, without a word between."""
    _, xs = on_nodes(lambda k: torch.full((50_000,), float(k)))
    for group in (
        dt.collectives.new_group([0, 1]),
        dt.collectives.new_group([2, 3]),
        dt.collectives.new_group([0, 2]),
        dt.collectives.new_group([3, 1]),
    ):
        dt.all_reduce([xs[k] for k in group], group=group, async_op=True)
    assert [x[-1].item() for x in xs] == [6] * N


@pytest.mark.row("I14")
def test_a_group_of_one():
    x, list_of_one = torch.ones(3, device="node:2"), [[torch.zeros(3, device="node:2")]]
    group = dt.collectives.new_group([2])
    for call in (dt.all_reduce, dt.collectives.sendreceive):
        call([x], group=group)
    dt.collectives.reduce([x], 2, "AVG", group)
    dt.broadcast([x], 2, group)
    dt.all_gather(list_of_one, [x], group)
    assert x.tolist() == list_of_one[0][0].tolist() == [1, 1, 1]
    gathered, scattered, summed, turned = (torch.zeros(3, device="node:2") for _ in range(4))
    dt.collectives.gather([x], [gathered], 2, group)
    dt.collectives.scatter([scattered], [x * 2], 2, group)
    dt.collectives.reduce_scatter([summed], [[x * 3]], group=group)
    dt.collectives.all_to_all([[turned]], [[x * 4]], group)
    outs = [torch.zeros(3, device="node:2")]
    dt.all_reduce([x * 5], out=outs, group=group)
    assert [y.tolist() for y in (gathered, scattered, summed, turned, *outs)] == [[float(k)] * 3 for k in range(1, 6)]


@pytest.mark.row("T25")
def test_new_groups_by_key_add_up_as_in_torchmpi():
    _, xs = on_nodes(lambda k: torch.tensor([float(k)]))
    split = dt.collectives.new_group().split(lambda node: node // 2)
    for group in split.values():
        dt.collectives.reduce([xs[k] for k in group], group.nodes[0], group=group)
    dt.all_reduce([xs[k] for k in split.leaders])
    for group in split.values():
        dt.broadcast([xs[k] for k in group], group.nodes[0])
    assert [x.item() for x in xs] == [6] * N


# ---- mistakes ------------------------------------------------------------------------------------


@pytest.mark.row("I8", "G7")
def test_mistakes_raise_here():
    _, xs = on_nodes(lambda k: torch.ones(3))
    other = [torch.ones(2, device="node:0"), *xs[1:]]
    cases = [
        (ValueError, "tensor 1 has the shape .3,., tensor 0 .2,.", lambda: dt.all_reduce(other)),
        (TypeError, "tensor 1 is torch.float64", lambda: dt.all_reduce([xs[0], xs[1].double()])),
        (
            TypeError,
            "tensor 1 has to be a tensor on a node, not a local",
            lambda: dt.all_reduce([xs[0], torch.ones(3)]),
        ),
        (
            ValueError,
            r"one tensor per node; these are on nodes \[0, 0\]",
            lambda: dt.collectives.sendreceive([xs[0], xs[0]]),
        ),
        (ValueError, "tensor 1 is there twice", lambda: dt.all_reduce([xs[0], xs[0]])),
        (ValueError, "but the group is", lambda: dt.all_reduce(xs, group=dt.collectives.new_group([0, 1]))),
        (TypeError, "takes a list of tensors, one per node, not", lambda: dt.all_reduce(xs[0])),
        (ValueError, "at least one", lambda: dt.all_reduce([])),
        (TypeError, "BAND cannot reduce torch.float32", lambda: dt.all_reduce(xs, dt.collectives.ReduceOp.BAND)),
        (TypeError, "AVG cannot reduce torch.int64", lambda: dt.all_reduce([x.long() for x in xs], "AVG")),
        (ValueError, "node 7 is not in", lambda: dt.broadcast(xs, 7)),
        (ValueError, "2 lists for 4 tensors", lambda: dt.all_gather([xs, xs], xs)),
        (ValueError, "list 0: tensors on nodes .0, 1, 2, 3., not .0, 0, 0, 0.", lambda: dt.all_gather([xs] * 4, xs)),
        (ValueError, "gather_list has 1 tensors, and the group 4", lambda: dt.collectives.gather(xs, [xs[0]], 0)),
        (ValueError, r"arrives", lambda: dt.collectives.send(xs[0], torch.ones(2, device="node:1"))),
        (TypeError, "recv: the target", lambda: dt.collectives.recv(torch.ones(3), xs[0])),
        (
            RuntimeError,
            "MAX has no gradient",
            lambda: F.all_reduce([x.requires_grad_() for x in xs], dt.collectives.ReduceOp.MAX),
        ),
    ]
    for kind, words, call in cases:
        with pytest.raises(kind, match=words):
            call()


def here():
    return inspect.currentframe().f_back.f_lineno


def test_poison_reaches_all_and_names_its_line():
    _, xs = on_nodes(lambda k: torch.ones(3))
    line = here() + 1
    xs[2] = xs[2] + torch.ones(3, device="node:2")[torch.tensor([9, 9, 9], device="node:2")]
    for make in (lambda: dt.all_reduce(xs), lambda: dt.all_reduce(xs, async_op=True).wait()):
        with pytest.raises(IndexError) as told:
            make() or xs[0].cpu()
        assert f"test_programs.py:{line}" in said(told.value)
    for x in xs:
        with pytest.raises(IndexError):
            x.cpu()
    _, ys = on_nodes(lambda k: torch.ones(3))
    dt.all_reduce(ys)
    assert ys[3].tolist() == [4, 4, 4]


def test_poison_that_is_overwritten_harms_nobody_else():
    _, xs = on_nodes(lambda k: torch.full((3,), float(k)))
    xs[2] = torch.ones(3, device="node:2")[torch.tensor([9, 9, 9], device="node:2")]
    dt.broadcast(xs, 1, algorithm=dt.collectives.Way("tree", 1))
    assert [xs[k].tolist() for k in (0, 1, 3)] == [[1, 1, 1]] * 3
    with pytest.raises(IndexError):
        xs[2].cpu()


# ---- asynchronous --------------------------------------------------------------------------------


@pytest.mark.row("T15")
def test_to_wait_is_to_wait_for_all_nodes(tmp_path):
    """While one node is busy its collective has not ended, and ``wait`` gives up after its time and not before."""
    path = tmp_path / "gate"
    os.mkfifo(path)
    busy = threading.Thread(target=dt.run, args=(path.read_bytes,), kwargs={"node": 3})
    _, xs = on_nodes(lambda k: torch.ones(3))
    busy.start()
    with open(path, "w"):  # when it is open, the node has begun to read
        work = dt.all_reduce(xs, async_op=True)
        assert not work.is_completed()
        for wait in (work.wait, work.result, work.exception):
            with pytest.raises(TimeoutError):
                wait(timeout=0.01)
    assert work.wait()
    assert work.is_completed()
    busy.join()
    assert [x.tolist() for x in xs] == [[N] * 3] * N


@pytest.mark.row("G9")
@pytest.mark.parametrize("begin", ["isend", "irecv"])
def test_to_wait_for_a_message_is_to_wait_for_both_of_its_ends(begin, tmp_path):
    """While the node that sends is busy the message has not ended; nobody looks at the tensor, which would wait."""
    path = tmp_path / "gate"
    os.mkfifo(path)
    busy = threading.Thread(target=dt.run, args=(path.read_bytes,), kwargs={"node": 3})
    x, y = torch.ones(3, device="node:3"), torch.zeros(3, device="node:1")
    busy.start()
    with open(path, "w"):  # when it is open, the node has begun to read
        work = dt.collectives.isend(x, y) if begin == "isend" else dt.collectives.irecv(y, x)
        assert not work.is_completed()
        for wait in (work.wait, work.result, work.exception):
            with pytest.raises(TimeoutError):
                wait(timeout=0.01)
    assert work.wait()
    assert work.is_completed()
    busy.join()
    assert work.result() is y
    assert y.tolist() == [1, 1, 1]


@pytest.mark.row("T14", "G11")
def test_works():
    _, xs = on_nodes(lambda k: torch.ones(200_000))
    work = dt.all_reduce(xs, async_op=True)
    ys = [x + 1 for x in xs]  # waits for it, on the nodes
    assert work.result() is xs
    assert work.is_completed()
    assert "all_reduce" in repr(work)
    assert [y[0].item() for y in ys] == [5] * N

    async def several():
        works = [dt.all_reduce(xs, async_op=True) for _ in range(3)]
        for each in works:
            assert await each is xs

    asyncio.run(several())
    assert xs[1][7].item() == 4**4


@pytest.mark.row("T23")
def test_beside_streams():
    """With streams all is done by lanes: a collective waits for the stream that it is issued to, and that for it."""
    _, xs = on_nodes(lambda k: torch.ones(1000))
    streams = [dt.Stream(k) for k in range(N)]
    with dt.stream(streams[0]), dt.stream(streams[1]):
        views = [x[:1] for x in xs]
        for x in xs[:2]:
            x.mul_(2)
        dt.all_reduce(xs)
        assert [v.item() for v in views] == [6] * N
        bad = torch.ones(3, device="node:1")[torch.tensor([9, 9, 9], device="node:1")]
        rest = [torch.ones(3, device=f"node:{k}") for k in (0, 2, 3)]
        dt.all_reduce([rest[0], bad, *rest[1:]])
        for x in (*rest, bad):
            with pytest.raises(IndexError):
                x.cpu()
        work = dt.all_reduce(xs, async_op=True)
        work.wait()
    dt.synchronize()
    assert [x[0].item() for x in xs] == [24] * N
    with busy(streams[0]):
        with dt.stream(streams[0]):
            xs[0][:1].zero_()  # by a view: only streams and events order that
            work = dt.all_reduce(xs, async_op=True)
        assert (torch.ones(2, device="node:0") + 1).tolist() == [2, 2]  # the default stream goes on
        assert not work.is_completed()
    work.wait()
    assert [x[0].item() for x in xs] == [72] * N


def test_in_a_graph():
    _, xs = on_nodes(lambda k: torch.full((3,), float(k)))
    g = dt.Graph()
    with dt.graph(g):
        ys = [x * 2 for x in xs]
        dt.all_reduce(ys)
        zs = [y + 1 for y in ys]
        with pytest.raises(dt.errors.GraphError, match="async_op=True"):
            dt.all_reduce(ys, async_op=True)
    for turn in range(3):
        g.replay()
        assert [z.tolist() for z in zs] == [[13 + 8 * turn] * 3] * N
        for x in xs:
            x.add_(1)


# ---- gradients -----------------------------------------------------------------------------------


def test_gradients_are_those_of_the_whole():
    def local_all(xs):
        return [sum(xs) * 1 for _ in xs]

    cases = {
        "all_reduce": (F.all_reduce, local_all),
        "average": (lambda xs: F.all_reduce(xs, "AVG"), lambda xs: [y / N for y in local_all(xs)]),
        "reduce": (lambda xs: [F.reduce(xs, 1)], lambda xs: [sum(xs)]),
        "mean": (lambda xs: [F.reduce(xs, 1, dt.collectives.ReduceOp.AVG)], lambda xs: [sum(xs) / N]),
        "broadcast": (lambda xs: F.broadcast(xs[2], dt.collectives.new_group()), lambda xs: [xs[2] * 1 for _ in xs]),
        "all_gather": (
            lambda xs: [torch.cat(row) for row in F.all_gather(xs)],
            lambda xs: [torch.cat(xs) for _ in xs],
        ),
        "gather": (lambda xs: F.gather(xs, 3), lambda xs: [x * 1 for x in xs]),
        "scatter": (lambda xs: F.scatter(xs[1].split(1), dt.collectives.new_group()), lambda xs: list(xs[1].split(1))),
        "reduce_scatter": (
            lambda xs: F.reduce_scatter([x.split(1) for x in xs]),
            lambda xs: list(sum(xs).split(1)),
        ),
        "reduce_scatter_average": (
            lambda xs: F.reduce_scatter([x.split(1) for x in xs], "AVG"),
            lambda xs: list((sum(xs) / N).split(1)),
        ),
        "all_to_all": (
            lambda xs: [torch.cat(row) for row in F.all_to_all([x.split(1) for x in xs])],
            lambda xs: [torch.cat([x[i : i + 1] for x in xs]) for i in range(N)],
        ),
    }
    for name, (remote, local) in cases.items():
        ours, theirs = on_nodes(lambda k: random(k, 4, 3))
        for x in (*ours, *theirs):
            x.requires_grad_()
        outs, expected = remote(theirs), local(ours)
        weights = [random(100 + i, *y.shape) for i, y in enumerate(expected)]
        for out, y in zip(outs, expected, strict=True):
            torch.testing.assert_close(out.detach().cpu(), y.detach(), msg=name)
        loss = sum((out * w.to(out.device)).sum().cpu() for out, w in zip(outs, weights, strict=True))
        loss.backward()
        sum((y * w).sum() for y, w in zip(expected, weights, strict=True)).backward()
        for x, y in zip(theirs, ours, strict=True):
            got = torch.zeros_like(y) if x.grad is None else x.grad.cpu()
            want = torch.zeros_like(y) if y.grad is None else y.grad
            torch.testing.assert_close(got, want, msg=name)
