"""Collectives between ranks, over real channels, against exact values and what torch computes in one process."""

from __future__ import annotations

import functools

import pytest
import torch
from collective_kit import CHANNELS, Ranks, contribution, reduced

from disttensor.runtime import collective as C
from disttensor.runtime.channel.payload import DTYPES
from disttensor.runtime.collective import ReduceOp, Way

#: Short enough that the sizes below take several slabs.
CHUNK = 16 << 10
SIZES = (0, 1, 1001, 2**14 + 3)
WAYS = [
    Way("all"),
    Way("doubling"),
    Way("halving"),
    Way("ring"),
    Way("direct"),
    *(Way("tree", b) for b in (1, 2, 4, 8)),
]
WAYS = [Way(way.algorithm, way.base, CHUNK) for way in WAYS]


@pytest.fixture(
    scope="module", params=[(name, n) for name in CHANNELS for n in (2, 3, 4, 8)], ids=lambda p: f"{p[0]}-{p[1]}"
)
def ranks(request):
    made = Ranks(*request.param)
    yield made
    made.close()


def floats(n, numel):
    return [contribution(rank, numel, torch.float32) for rank in range(n)]


@pytest.mark.row("T11", "T16", "T29", "I10", "I12")
@pytest.mark.parametrize("way", WAYS, ids=lambda way: f"{way.algorithm}{way.base if way.algorithm == 'tree' else ''}")
def test_all_reduce_in_and_out_of_place(ranks, way):
    for numel in SIZES:
        inputs = floats(ranks.size, numel)

        def call(exchange, inputs=inputs):
            x = inputs[exchange.me].clone()
            out = torch.empty_like(x)
            C.all_reduce(exchange, x, out, ReduceOp.SUM, way)
            assert torch.equal(x, inputs[exchange.me]), "out of place the input stays"
            C.all_reduce(exchange, x, x, ReduceOp.AVG, way)
            return out, x

        for out, mean in ranks.results(call):
            assert torch.equal(out, reduced(inputs, ReduceOp.SUM))
            assert torch.equal(mean, reduced(inputs, ReduceOp.SUM) / ranks.size)


@pytest.mark.row("T11")
def test_all_reduce_up_to_2_to_20(ranks):
    for numel in (2**8, 2**12, 2**16, 2**20):
        expected = ranks.size * (ranks.size - 1) / 2

        def call(exchange, numel=numel):
            x = torch.full((numel,), float(exchange.me))
            C.all_reduce(exchange, x, x)
            return x

        for x in ranks.results(call):
            assert (x == expected).all()


@pytest.mark.parametrize("way", WAYS, ids=lambda way: f"{way.algorithm}{way.base if way.algorithm == 'tree' else ''}")
@pytest.mark.parametrize("n", [2, 3, 4, 7])
def test_all_ranks_get_the_same_bits(n, way):
    """Of what rounds: sums of arbitrary floats, in half precision too, and transported in half precision."""
    ranks = Ranks("inproc", n)
    for dtype, carry in ((torch.float32, None), (torch.bfloat16, None), (torch.float32, torch.bfloat16)):
        inputs = [torch.randn(1001, generator=torch.Generator().manual_seed(r)).to(dtype) for r in range(ranks.size)]

        def call(exchange, inputs=inputs):
            out = torch.empty_like(inputs[exchange.me])
            C.all_reduce(exchange, inputs[exchange.me], out, ReduceOp.AVG, way)
            return out

        first, *others = ranks.results(call, carry=carry)
        for other in others:
            assert torch.equal(first, other)
        exact = torch.stack(inputs).double().mean(0)
        tolerance = 1e-6 if dtype is torch.float32 and carry is None else 0.05
        assert (first.double() - exact).abs().max() < tolerance
    ranks.close()


def test_the_direct_way_adds_in_the_order_of_ranks(ranks):
    inputs = [torch.randn(1001, generator=torch.Generator().manual_seed(r)) for r in range(ranks.size)]

    def call(exchange):
        outs = [torch.empty(1001) for _ in range(2)]
        for out, name in zip(outs, ("direct", "all"), strict=True):
            C.all_reduce(exchange, inputs[exchange.me], out, ReduceOp.SUM, Way(name))
        return outs

    expected = functools.reduce(torch.add, inputs)
    for outs in ranks.results(call):
        for out in outs:
            assert torch.equal(out, expected)


def allowed(op):
    for dtype in DTYPES:
        try:
            C.check(op, dtype)
        except TypeError:
            continue
        yield dtype


REDUCIBLE = {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
FLOATS = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
COMPLEX = {torch.complex64, torch.complex128}


@pytest.mark.row("G12")
def test_what_each_op_takes():
    for op in ReduceOp:
        takes = set(allowed(op)) & (REDUCIBLE | FLOATS | COMPLEX | {torch.bool})  # others where torch can do it
        match op:
            case ReduceOp.SUM:
                assert takes == REDUCIBLE | FLOATS | COMPLEX | {torch.bool}
            case ReduceOp.AVG:
                assert takes == FLOATS | COMPLEX
            case ReduceOp.PRODUCT | ReduceOp.MIN | ReduceOp.MAX:
                assert takes == REDUCIBLE | FLOATS | {torch.bool}
            case _:
                assert takes == REDUCIBLE | {torch.bool}
    with pytest.raises(TypeError, match=r"ReduceOp\.SUM cannot reduce torch.float8_e5m2"):
        C.check(ReduceOp.SUM, torch.float8_e5m2)


@pytest.mark.row("T8", "T17")
@pytest.mark.parametrize("op", list(ReduceOp), ids=lambda op: op.name)
@pytest.mark.parametrize("n", [2, 3])
def test_every_op_with_every_dtype(op, n):
    ranks = Ranks("inproc", n)
    for dtype in allowed(op):
        inputs = [contribution(rank, 129, dtype) for rank in range(n)]

        def call(exchange, inputs=inputs):
            outs = [torch.empty_like(inputs[exchange.me]) for _ in range(3)]
            C.all_reduce(exchange, inputs[exchange.me], outs[0], op)
            C.all_reduce(exchange, inputs[exchange.me], outs[1], op, Way("ring"))
            C.reduce(exchange, inputs[exchange.me], outs[2], 0, op)
            return outs

        try:
            expected = reduced(inputs, op)
        except (RuntimeError, NotImplementedError):  # a dtype whose reductions torch lacks
            expected = functools.reduce(C.reduction.kernel(op), inputs)
        results = ranks.results(call)
        assert torch.equal(results[0][2], expected)
        for both in results:
            assert torch.equal(both[0], expected)
            assert torch.equal(both[1], expected)
    ranks.close()


@pytest.mark.row("T9", "T10", "I10", "I17")
@pytest.mark.parametrize("root", [0, 1])
def test_reduce_and_broadcast_with_any_root(ranks, root):
    for numel in SIZES:
        inputs = floats(ranks.size, numel)
        for way in (Way("tree", 1, CHUNK), Way("tree", 2, CHUNK), Way("tree", 8, CHUNK), Way("scatter", chunk=CHUNK)):

            def call(exchange, inputs=inputs, way=way):
                x = inputs[exchange.me].clone()
                out = torch.full_like(x, -1)
                C.reduce(exchange, x, out, root, ReduceOp.SUM, way)
                assert torch.equal(x, inputs[exchange.me])
                C.reduce(exchange, x, x, root, ReduceOp.MAX, way)
                told = out.clone()
                C.broadcast(exchange, told, root, way if way.algorithm == "tree" else None)
                return out, x, told

            for rank, (out, most, told) in enumerate(ranks.results(call)):
                total = reduced(inputs, ReduceOp.SUM)
                assert torch.equal(out, total if rank == root else torch.full_like(total, -1))
                assert torch.equal(most, reduced(inputs, ReduceOp.MAX) if rank == root else inputs[rank])
                assert torch.equal(told, total)


@pytest.mark.row("T13", "G10")
@pytest.mark.parametrize("way", [Way("ring", chunk=CHUNK), Way("direct", chunk=CHUNK)], ids=lambda way: way.algorithm)
def test_gathers_of_different_lengths(ranks, way):
    lengths = [(0, 1, 10_001, 7, 3, 20_000, 2, 1)[rank] for rank in range(ranks.size)]
    inputs = [contribution(rank, numel, torch.int32) for rank, numel in enumerate(lengths)]

    def call(exchange):
        everywhere = [torch.empty_like(x) for x in inputs]
        C.all_gather(exchange, inputs[exchange.me], everywhere, way)
        at_root = [torch.empty_like(x) for x in inputs] if exchange.me == 1 else None
        C.gather(exchange, inputs[exchange.me], at_root, 1)
        back = torch.empty_like(inputs[exchange.me])
        C.scatter(exchange, at_root, back, 1)
        return everywhere, at_root, back

    for rank, (everywhere, at_root, back) in enumerate(ranks.results(call)):
        for got in (everywhere, at_root) if rank == 1 else (everywhere,):
            for out, x in zip(got, inputs, strict=True):
                assert torch.equal(out, x)
        assert torch.equal(back, inputs[rank])


@pytest.mark.parametrize("way", [Way("ring", chunk=CHUNK), Way("direct", chunk=CHUNK)], ids=lambda way: way.algorithm)
def test_reduce_scatter(ranks, way):
    n = ranks.size
    for lengths in ([0] * n, [1001] * n, [10_000 + i for i in range(n)]):
        inputs = [[contribution(rank + i, numel, torch.int64) for i, numel in enumerate(lengths)] for rank in range(n)]

        def call(exchange, inputs=inputs):
            sources = [x.clone() for x in inputs[exchange.me]]
            out = torch.empty_like(sources[exchange.me])
            C.reduce_scatter(exchange, sources, out, ReduceOp.SUM, way)
            assert all(map(torch.equal, sources, inputs[exchange.me]))
            C.reduce_scatter(exchange, sources, sources[exchange.me], ReduceOp.MIN, way)
            return out, sources[exchange.me]

        for rank, (total, least) in enumerate(ranks.results(call)):
            column = [inputs[other][rank] for other in range(n)]
            assert torch.equal(total, reduced(column, ReduceOp.SUM))
            assert torch.equal(least, reduced(column, ReduceOp.MIN))


@pytest.mark.row("T12")
def test_all_to_all_and_shifts(ranks):
    n = ranks.size
    inputs = [[contribution(10 * a + b, (a * b * 4001) % 9000, torch.int32) for b in range(n)] for a in range(n)]

    def call(exchange):
        targets = [torch.empty_like(inputs[other][exchange.me]) for other in range(n)]
        C.all_to_all(exchange, inputs[exchange.me], targets)
        x = torch.full((30_001,), exchange.me)
        C.sendreceive(exchange, x, x, (exchange.me + 1) % n, (exchange.me - 1) % n)
        square = torch.full((n, 3), exchange.me)
        C.all_to_all(exchange, list(square), list(square))
        C.barrier(exchange)
        return targets, x, square

    for rank, (targets, x, square) in enumerate(ranks.results(call)):
        for other in range(n):
            assert torch.equal(targets[other], inputs[other][rank])
        assert (x == (rank - 1) % n).all()
        assert square[:, 0].tolist() == list(range(n))


def test_a_barrier_waits_for_all(ranks):
    entered = [0] * ranks.size

    def call(exchange):
        for count in range(1, 20):
            entered[exchange.me] = count
            C.barrier(exchange)
            assert min(entered) >= count, "this rank has returned before another one came"

    ranks.results(call)


@pytest.mark.row("T17")
def test_strides_scalars_and_views():
    """What is not plain memory is staged, and nothing beside it is written."""
    ranks = Ranks("inproc", 3)

    def call(exchange):
        base = torch.full((4, 6), float(exchange.me))
        C.all_reduce(exchange, base.t()[::2], base.t()[::2])
        scalar = torch.tensor(exchange.me + 1)
        C.all_reduce(exchange, scalar, scalar, ReduceOp.PRODUCT)
        z = torch.full((3,), complex(exchange.me, 1)).conj()
        out = torch.empty(3, dtype=z.dtype)
        C.all_reduce(exchange, z, out)
        rows = torch.zeros(3, 4).t()
        C.broadcast(exchange, rows.fill_(exchange.me), 2)
        return base, scalar, out, rows

    for rank, (base, scalar, out, rows) in enumerate(ranks.results(call)):
        assert (base[:, ::2] == 3).all()
        assert (base[:, 1::2] == rank).all()
        assert scalar == 6
        assert (out == complex(3, -3)).all()
        assert (rows == 2).all()
    ranks.close()


def layouts():
    yield [0, 0, 1, 1]
    yield [0, 1, 0, 1]
    yield [0, 0, 0, 1]
    yield ["a", "b", "b", "a", "c", "c", "b", "a"]
    yield [0, 0, 0, 0, 1, 1, 1, 1]


@pytest.mark.row("T29")
@pytest.mark.parametrize("hosts", list(layouts()), ids=lambda h: "".join(map(str, h)))
@pytest.mark.parametrize("name", CHANNELS)
def test_hierarchical(name, hosts):
    n = len(hosts)
    ranks = Ranks(name, n)
    crossed = [0]
    for channel in ranks.channels:
        rank = ranks.channels.index(channel)

        def counted(tensor, peer, transfer, isend=channel.isend, rank=rank):
            if hosts[rank] != hosts[peer]:
                crossed[0] += tensor.numel() * tensor.element_size()
            return isend(tensor, peer, transfer)

        channel.isend = counted
    for numel in (0, 5, 100_003):
        inputs = floats(n, numel)

        def call(exchange, inputs=inputs):
            outs = [torch.empty_like(inputs[exchange.me]) for _ in range(2)]
            C.all_reduce(exchange, inputs[exchange.me], outs[0], ReduceOp.SUM, Way("ring", chunk=CHUNK), hosts)
            C.all_reduce(exchange, inputs[exchange.me], outs[1], ReduceOp.AVG, Way("ring", chunk=CHUNK), hosts)
            return outs

        crossed[0] = 0
        for total, mean in ranks.results(call):
            assert torch.equal(total, reduced(inputs, ReduceOp.SUM))
            assert torch.equal(mean, reduced(inputs, ReduceOp.SUM) / n)
        away = len(set(hosts)) - 1
        assert crossed[0] == 2 * 2 * away * inputs[0].numel() * 4, "between hosts as if each were one rank"

        def tell(exchange, inputs=inputs):
            x = inputs[exchange.me].clone()
            C.broadcast(exchange, x, n - 1, None, hosts)
            return x

        crossed[0] = 0
        for x in ranks.results(tell):
            assert torch.equal(x, inputs[n - 1])
        assert crossed[0] == away * inputs[0].numel() * 4
    ranks.close()


def test_groups_at_once(ranks):
    """Two halves of the ranks and pairs across them, in the same order everywhere."""
    n = ranks.size
    half = n // 2
    if half < 2:
        return
    low, high = list(range(half)), list(range(half, 2 * half))

    def call(exchange):
        x = torch.full((50_000,), float(exchange.me))
        mine = low if exchange.me in low else high
        inside = exchange.part(mine)
        C.all_reduce(inside, x, x, ReduceOp.SUM, Way("ring", chunk=CHUNK))
        C.all_reduce(exchange.part([i + (exchange.me % half) for i in (0, half)]), x, x)
        return x

    for x in ranks.results(call, members=low + high):
        assert (x == sum(low) + sum(high)).all()


def test_the_ids_of_a_call_suffice():
    ranks = Ranks("inproc", 2)

    def call(exchange):
        x = torch.empty(1 << 20, dtype=torch.uint8)
        C.all_reduce(exchange, x, x, ReduceOp.SUM, Way("ring", chunk=1))
        return max(exchange._sent.values())

    from disttensor.runtime.collective.cut import _MOST

    small = [torch.empty(10 * _MOST, dtype=torch.uint8)]
    assert C.calls.slabs(small, 1) == _MOST
    # in a ring two messages per slab and other rank, over one pair: the most of all ways
    assert 2 * _MOST * 7 < C.IDS
    ranks.close()
