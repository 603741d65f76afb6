"""Small collectives through shared memory: as through messages, and in trouble nobody waits for ever."""

from __future__ import annotations

import ctypes
import os
import signal
from contextlib import suppress

import pytest
import torch
from collective_kit import Ranks, contribution, reduced

import disttensor as dt
from disttensor.runtime import collective as C
from disttensor.runtime.channel.shm.segments import Mapping
from disttensor.runtime.collective import ReduceOp, shared_pages
from disttensor.runtime.protocol.errors import BrokenError, PoisonedError

N = 3
FITS = shared_pages.SLOT // 4


@pytest.fixture
def ranks():
    made = Ranks("shm", N, shared_pages=True)
    yield made
    made.close()


def made_pages(ranks, members=tuple(range(N))):
    return [ranks.shared_pages[rank]._known[id(ranks.channels[rank]), tuple(members)] for rank in members]


def operations(ranks):
    """How many operations each rank's board has seen."""
    return [one._count for one in made_pages(ranks)]


@pytest.mark.row("T16")
@pytest.mark.parametrize("numel", [0, 1, 7, 1024, FITS, FITS + 1])
@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.AVG, ReduceOp.MAX, ReduceOp.PRODUCT])
def test_all_reduce(ranks, numel, op):
    gives = [contribution(rank, numel, torch.float32) for rank in range(N)]
    outs = [torch.empty_like(x) for x in gives]
    for _ in range(3):  # both slots, and the first one again
        ranks.results(lambda exchange: C.all_reduce(exchange, gives[exchange.me], outs[exchange.me], op))
        for out in outs:
            torch.testing.assert_close(out, reduced(gives, op), rtol=1e-6, atol=0)
            assert torch.equal(out, outs[0])  # to the bit
        torch._foreach_zero_(outs)
    if numel <= FITS:
        assert operations(ranks) == [3] * N
    else:
        assert not any(shared_pages._known for shared_pages in ranks.shared_pages)


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.float16, torch.bfloat16, torch.complex64, torch.int64]
)
def test_dtypes(ranks, dtype):
    xs = [contribution(rank, 33, dtype) for rank in range(N)]
    expected = reduced(xs, ReduceOp.SUM)
    ranks.results(lambda exchange: C.all_reduce(exchange, xs[exchange.me], xs[exchange.me], ReduceOp.SUM))
    assert all(torch.equal(x, expected) for x in xs)


def test_in_place_strided_and_of_many_kinds_in_turn(ranks):
    bases = [torch.arange(24.0).view(4, 6) + rank for rank in range(N)]
    kept = [base.clone() for base in bases]
    others = [torch.full((5,), rank) for rank in range(N)]

    def call(exchange):
        strided = bases[exchange.me].t()[::2]
        C.all_reduce(exchange, strided, strided)
        C.broadcast(exchange, others[exchange.me], 2)
        C.barrier(exchange)
        gathered = [torch.empty(i + 1) for i in range(N)]
        C.all_gather(exchange, torch.full((exchange.me + 1,), float(exchange.me)), gathered)
        total = torch.zeros(2)
        C.reduce(exchange, torch.full((2,), 1.0 + exchange.me), total if exchange.me == 1 else None, 1)
        return torch.cat(gathered).tolist(), total.tolist()

    for me, (gathered, total) in enumerate(ranks.results(call)):
        assert gathered == [0.0, 1.0, 1.0, 2.0, 2.0, 2.0]
        assert total == ([6.0, 6.0] if me == 1 else [0.0, 0.0])
        assert others[me].tolist() == [2] * 5
        assert torch.equal(bases[me].t()[::2], sum(base.t()[::2] for base in kept))
        assert torch.equal(bases[me].t()[1::2], kept[me].t()[1::2])
    assert operations(ranks) == [5] * N


def test_a_barrier_waits_for_all(ranks):
    entered = [0] * N

    def call(exchange):
        for count in range(1, 20):
            entered[exchange.me] = count
            C.barrier(exchange)
            assert min(entered) >= count, "this rank has returned before another one came"

    ranks.results(call)
    assert operations(ranks) == [19] * N


def test_groups_have_their_own(ranks):
    for members in ([0, 2], [2, 0], [1, 2], [0, 1, 2]):
        for x in ranks.results(lambda exchange: _summed(exchange), members=members):
            assert x.tolist() == [sum(range(1, len(members) + 1))] * 4
        assert all(made_pages(ranks, members))


def _summed(exchange):
    x = torch.full((4,), 1.0 + exchange.me)
    C.all_reduce(exchange, x, x)
    return x


@pytest.mark.parametrize("bad", range(N))
def test_poison_reaches_everybody_and_the_next_is_fine(ranks, bad):
    for _ in range(2):  # before there is a board, and with it
        for outcome in ranks.outcomes(_summed, poison={bad: (bad, 55)}):
            assert isinstance(outcome, PoisonedError)
            assert (outcome.rank, outcome.seq) == (bad, 55)
        for x in ranks.results(_summed):
            assert x.tolist() == [6.0] * 4
    assert all(made_pages(ranks))


def test_a_rank_that_cannot_read_a_contribution_tells_the_others(ranks):
    ranks.results(_summed)
    bad = torch.empty(4, device="meta")
    outcomes = ranks.outcomes(
        lambda exchange: made_pages(ranks)[exchange.me].broadcast(exchange, bad, 0) or exchange.close()
    )
    assert [type(o) for o in outcomes[1:]] == [PoisonedError] * 2
    assert all((o.rank, o.seq) == (0, 7) for o in outcomes[1:])
    assert isinstance(outcomes[0], NotImplementedError)
    assert all(x.tolist() == [6.0] * 4 for x in ranks.results(_summed))


def test_a_rank_that_sees_no_memory_of_others_makes_all_use_messages(ranks, monkeypatch):
    seen = []

    def blind(descriptor, nbytes):
        seen.append(nbytes)
        if len(seen) == 2:
            raise FileNotFoundError("in another container")
        return see(descriptor, nbytes)

    see = Mapping.of
    monkeypatch.setattr(shared_pages.Mapping, "of", blind)
    assert all(x.tolist() == [6.0] * 4 for x in ranks.results(_summed))
    assert made_pages(ranks) == [None] * N
    assert all(x.tolist() == [6.0] * 4 for x in ranks.results(_summed))


def test_without_memory_for_more_all_use_messages(ranks, monkeypatch):
    monkeypatch.setattr(shared_pages, "MOST", 1)
    for members in ([0, 1], [0, 2], [0, 1, 2]):
        ranks.results(_summed, members=members)
    assert all(made_pages(ranks, [0, 1]))
    assert made_pages(ranks, [0, 2]) == [None] * 2  # though rank 2 would have had some
    assert made_pages(ranks) == [None] * N


def test_a_rank_that_is_lost_ends_the_waiting_of_the_others(ranks):
    ranks.results(_summed)

    def call(exchange):
        if exchange.me == 2:
            ranks.channels[2].abort()
            return None
        return _summed(exchange)

    for _ in range(2):
        for outcome in ranks.outcomes(call)[:2]:
            assert isinstance(outcome, (BrokenError, PoisonedError)), outcome
            assert "2" in str(outcome)
    for x in ranks.results(_summed, members=[0, 1]):
        assert x.tolist() == [3.0] * 4


@pytest.mark.skipif(not shared_pages._FUTEX, reason="sleeps are short there")
def test_who_waits_for_long_sleeps_until_it_is_woken(ranks, monkeypatch):
    ranks.results(_summed)
    monkeypatch.setattr(shared_pages, "_nap", (ctypes.c_long * 2)(1000, 0))
    late = made_pages(ranks)[2]

    def call(exchange):
        if exchange.me == 2:
            while not late._sides[2].words[shared_pages._SLEEPER]:
                os.sched_yield()
        return _summed(exchange)

    assert all(x.tolist() == [6.0] * 4 for x in ranks.results(call))


def test_between_processes_and_when_one_dies():
    dt.init_master_worker("shm", nodes=N, threads=1)
    xs = [torch.full((3,), float(k), device=f"node:{k}") for k in range(N)]
    for _ in range(200):
        dt.all_reduce(xs, "AVG")
    assert all(x.tolist() == [1.0] * 3 for x in xs)
    dt.run(os.kill, dt.nodes()[2]["pid"], signal.SIGKILL, node=0)

    def until_it_is_known():
        while True:
            dt.all_reduce(xs)

    with pytest.raises(dt.NodeLost, match="node 2"):
        until_it_is_known()
    for k in range(2):
        with suppress(dt.DisttensorError):
            xs[k].cpu()
    with suppress(dt.DisttensorError):
        dt.synchronize()
    rest = [torch.ones(1000, device=f"node:{k}") for k in (0, 1)]
    dt.all_reduce(rest)
    assert rest[1].sum().item() == 2000
    with suppress(dt.DisttensorError):
        dt.shutdown()
