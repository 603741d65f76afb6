"""A channel's own collectives when a rank is lost in the middle, or its input is poison."""

from __future__ import annotations

import native_channel
import pytest
import torch
from collective_kit import Ranks

from disttensor.runtime.channel.registry import _registered, register_channel
from disttensor.runtime.collective import LOST, ReduceOp, native
from disttensor.runtime.protocol.errors import BrokenError, PoisonedError


@pytest.fixture
def ranks():
    register_channel("native", native_channel.NativeChannel)
    found = Ranks("native", 3)
    yield found
    found.close()
    del _registered["native"]


def test_a_rank_that_is_forgotten_breaks_everybody(ranks):
    """It never comes; the master tells the others of its death."""

    def call(exchange):
        if exchange.me == 2:
            for channel in ranks.channels[:2]:
                channel.mark_lost(2, "killed")
        else:
            x = torch.zeros(5)
            native(exchange, "all_reduce", [x], [x], ReduceOp.SUM, 0, 1)

    for outcome in ranks.outcomes(call)[:2]:
        assert isinstance(outcome, BrokenError)
        assert "rank 2" in str(outcome)


def test_the_poison_of_one_is_everybodys(ranks):
    def call(exchange):
        x = torch.zeros(5)
        native(
            exchange, "broadcast", [x] if exchange.me == 0 else [], [] if exchange.me == 0 else [x], ReduceOp.SUM, 0, 2
        )

    for outcome in ranks.outcomes(call, poison={1: (1, 33)}):
        assert isinstance(outcome, PoisonedError)
        assert (outcome.rank, outcome.seq) == (1, 33)
        assert outcome.seq != LOST


def test_what_fails_on_one_rank_fails_on_all(ranks):
    def call(exchange):
        x = torch.zeros(5)
        native(exchange, "all_reduce", [x], [x], ReduceOp.SUM, 0, 3)

    def broken(*args):
        type(ranks.channels[1]).collective(ranks.channels[1], *args)
        raise ArithmeticError("of rank 1")

    ranks.channels[1].collective = broken
    first, second, third = ranks.outcomes(call)
    assert isinstance(second, ArithmeticError)
    for outcome in (first, third):
        assert isinstance(outcome, PoisonedError)
        assert (outcome.rank, outcome.seq) == (1, 7)
