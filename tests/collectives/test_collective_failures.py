"""Collectives in which something goes wrong on one rank: nobody waits for ever, and all whose result depends on it are
told; and what comes later works."""

from __future__ import annotations

import pytest
import torch
from collective_kit import CHANNELS, Ranks

from disttensor.runtime import collective as C
from disttensor.runtime.channel.base import DataChannel
from disttensor.runtime.collective import ReduceOp, Way
from disttensor.runtime.protocol.errors import BrokenError, PoisonedError

CHUNK = 4 << 10
NUMEL = 40_001
HOSTS = [0, 0, 1, 1]
WAYS = [Way(name, chunk=CHUNK) for name in ("all", "doubling", "halving", "ring", "direct", "tree", "hierarchical")]


def reduce_by(way):
    def call(exchange):
        x = torch.full((NUMEL,), float(exchange.me))
        if way.algorithm == "hierarchical":
            C.all_reduce(exchange, x, x, ReduceOp.SUM, Way("ring", chunk=CHUNK), HOSTS)
        else:
            C.all_reduce(exchange, x, x, ReduceOp.SUM, way)
        return x

    return call


def gather(exchange):
    x = torch.full((NUMEL,), float(exchange.me))
    outs = [torch.empty_like(x) for _ in range(4)]
    C.all_gather(exchange, x, outs, Way("ring", chunk=CHUNK))
    return sum(outs)


def exchange(exchange):
    outs = [torch.zeros(NUMEL) for _ in range(4)]
    C.all_to_all(exchange, [torch.full((NUMEL,), float(exchange.me))] * 4, outs)
    return sum(outs)


def scatter_sum(exchange):
    out = torch.zeros(NUMEL)
    C.reduce_scatter(
        exchange, [torch.full((NUMEL,), float(exchange.me))] * 4, out, ReduceOp.SUM, Way("ring", chunk=CHUNK)
    )
    return out


EVERYBODY = [*map(reduce_by, WAYS), gather, exchange, scatter_sum, C.barrier]
NAMES = [*(way.algorithm for way in WAYS), "gather", "exchange", "scatter_sum", "barrier"]


@pytest.fixture(params=CHANNELS)
def ranks(request):
    made = Ranks(request.param, 4)
    yield made
    made.close()


def works(ranks, members=None):
    """What comes later is not in the way of what went wrong."""
    expected = sum(range(4) if members is None else range(len(members)))
    for x in ranks.results(reduce_by(Way("ring", chunk=CHUNK)), members=members):
        assert (x == expected).all()


@pytest.mark.parametrize("call", EVERYBODY, ids=NAMES)
@pytest.mark.parametrize("bad", [0, 3])
def test_poison_reaches_everybody(ranks, call, bad):
    for outcome in ranks.outcomes(call, poison={bad: (bad, 55)}):
        assert isinstance(outcome, PoisonedError), outcome
        assert (outcome.rank, outcome.seq) == (bad, 55)
    works(ranks)


def staged(call):
    """A collective of which rank 1 gives what can't be copied to the CPU."""

    def run(exchange):
        x = torch.ones(40, device="meta" if exchange.me == 1 else "cpu")
        outs = [torch.zeros(40) for _ in range(4)]
        match call:
            case "all_reduce":
                C.all_reduce(exchange, x, outs[0])
            case "all_gather":
                C.all_gather(exchange, x, outs)
            case "reduce_scatter":
                C.reduce_scatter(exchange, [x] * 4, outs[0])
            case "all_to_all":
                C.all_to_all(exchange, [x] * 4, outs)
            case "broadcast":
                C.broadcast(exchange, x if exchange.me == 1 else outs[0], 1)
            case "scatter":
                C.scatter(exchange, [x] * 4 if exchange.me == 1 else None, outs[0], 1)

    return run


@pytest.mark.parametrize("call", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "scatter"])
def test_what_cannot_be_staged_on_one_rank(ranks, call):
    outcomes = ranks.outcomes(staged(call))
    assert isinstance(outcomes[1], NotImplementedError)
    for outcome in (outcomes[0], *outcomes[2:]):
        assert isinstance(outcome, PoisonedError), outcome
        assert (outcome.rank, outcome.seq) == (1, 7)
    works(ranks)


def test_poison_reaches_only_what_depends_on_it(ranks):
    def tell(exchange):
        x = torch.full((NUMEL,), float(exchange.me))
        C.broadcast(exchange, x, 1)
        return x

    def collect(exchange):
        x = torch.full((NUMEL,), float(exchange.me))
        C.reduce(exchange, x, x, 2)
        return x

    for rank, outcome in enumerate(ranks.outcomes(tell, poison={1: (1, 9)})):
        assert isinstance(outcome, PoisonedError), rank
    outcomes = ranks.outcomes(collect, poison={3: (3, 9)})
    assert [isinstance(outcome, PoisonedError) for outcome in outcomes[2:]] == [True, True]
    works(ranks)


def test_a_kernel_that_fails_on_one_rank(ranks, monkeypatch):
    kernel = C.exchange.kernel
    import threading

    victim = []

    def failing(op):
        if not victim:
            victim.append(threading.current_thread())
        if victim[0] is threading.current_thread():
            raise MemoryError("no memory for a sum")
        return kernel(op)

    monkeypatch.setattr(C.exchange, "kernel", failing)
    outcomes = ranks.outcomes(reduce_by(Way("ring", chunk=CHUNK)))
    monkeypatch.undo()
    [where] = [rank for rank, outcome in enumerate(outcomes) if isinstance(outcome, MemoryError)]
    for rank, outcome in enumerate(outcomes):
        if rank != where:
            assert isinstance(outcome, PoisonedError)
            assert (outcome.rank, outcome.seq) == (where, 7), "the others are told who is to blame"
    works(ranks)


class Dies(Exception):
    pass


def dying(ranks, rank, after):
    """Closes a rank's channel in the middle: at the send after so many."""
    channel: DataChannel = ranks.channels[rank]
    isend, left = channel.isend, [after]

    def send(tensor, peer, transfer):
        if left[0] == 0:
            channel.abort()
        left[0] -= 1
        return isend(tensor, peer, transfer)

    channel.isend = send


@pytest.mark.parametrize("call", EVERYBODY[:-1], ids=NAMES[:-1])
@pytest.mark.parametrize("after", [0, 1, 4])
def test_a_rank_that_dies_breaks_everybody(ranks, call, after):
    dying(ranks, 2, after)
    outcomes = ranks.outcomes(call)
    if not ranks.channels[2]._closed:  # this way has fewer messages
        return
    del outcomes[2]
    assert any(isinstance(outcome, BrokenError) for outcome in outcomes)
    for outcome in outcomes:
        if isinstance(outcome, torch.Tensor):  # it had all that it needed before
            assert (outcome == 6).all()
        else:
            assert isinstance(outcome, BrokenError)
            assert "rank 2" in str(outcome)
    works(ranks, members=[0, 1, 3])


def test_a_rank_that_is_forgotten_breaks_everybody():
    """The master tells of a death that the channel can't see; the dead rank never comes."""
    ranks = Ranks("inproc", 3)
    for channel in ranks.channels[:2]:
        channel.mark_lost(2, "killed")

    def call(exchange):
        x = torch.zeros(NUMEL)
        if exchange.me != 2:
            C.all_reduce(exchange, x, x, ReduceOp.SUM, Way("ring", chunk=CHUNK))

    outcomes = ranks.outcomes(call)
    for outcome in outcomes[:2]:
        assert isinstance(outcome, BrokenError)
        assert "rank 2" in str(outcome)
    ranks.close()
