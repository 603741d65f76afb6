"""Homes: on a mesh the ranks have different values, and what is compared is one of them."""

from __future__ import annotations

import pytest
import torch
from homes import RANKS, Home, Rank

import disttensor as dt

pytestmark = pytest.mark.usefixtures("clean")

NOT_ON_A_MESH = {"test_what_asks_for_one_value": "it asks for one value"}
VALUES = [torch.ones(3), torch.arange(4), torch.tensor([True, False, False, False]), torch.randn(2, 3).t()]


@pytest.mark.parametrize("rank", range(RANKS))
def test_the_ranks_of_a_mesh_have_different_values(rank: int, nodes: object) -> None:
    sent = Rank(rank).send(VALUES)
    for k in range(RANKS):
        for x, value in zip(sent, VALUES, strict=True):
            assert torch.equal(x.shards()[k].cpu(), value) == (k == rank)
    layer = Rank(rank).differ(torch.nn.Linear(2, 3).to(sent[0].device))
    with pytest.raises(dt.errors.RanksDiffer):
        layer.bias.cpu()


def test_what_is_sent_is_there(home: Home) -> None:
    sent = home.send(VALUES)
    home.same(sent, VALUES)
    assert {x.device for x in sent} == {home.device}
    with pytest.raises(AssertionError):
        home.same(sent[0], torch.zeros(3))


def test_what_asks_for_one_value(home: Home) -> None:
    assert home.send(torch.ones(3)).tolist() == [1, 1, 1]
