"""Fetches, uploads and batches sent ahead on streams, beside a default stream that is busy."""

from __future__ import annotations

import pytest
import torch
from stream_kit import busy

import disttensor as dt

pytestmark = pytest.mark.usefixtures("calm")


@pytest.mark.parametrize("n", [3, 1 << 20])
def test_a_fetch_passes_a_busy_default_stream(n: int) -> None:
    x, side = torch.ones(n, device="node:1"), dt.Stream(1)
    with busy(dt.streams.default_stream("node:1")), dt.stream(side):
        assert dt.fetch(x + 1).result().sum().item() == 2 * n


def test_a_fetch_waits_for_the_stream_that_makes_its_tensor() -> None:
    x, side = torch.ones(3, device="node:1"), dt.Stream(1)
    with busy(side) as release:
        with dt.stream(side):
            y = x + 1
        work = dt.fetch(y)
        assert x.sum().item() == 3  # the default stream goes on; what is fetched from one node comes in its order
        assert not work.is_completed()
        release()
        assert work.result().tolist() == [2, 2, 2]


def test_it_holds_what_the_tensor_held_then() -> None:
    x, side = torch.zeros(1 << 20, device="node:1"), dt.Stream(1)
    side.wait_stream(dt.streams.default_stream("node:1"))
    with dt.stream(side):
        works = []
        for _ in range(20):
            works.append(dt.fetch(x))
            x += 1
        assert [work.result().unique().tolist() for work in works] == [[i] for i in range(20)]


def test_a_failure_on_a_stream() -> None:
    with dt.stream(dt.Stream(1)):
        bad = torch.nn.functional.embedding(torch.tensor([7]).to("node:1"), torch.ones(3, 2).to("node:1"))
        work = dt.fetch(bad * 2)
    with pytest.raises(IndexError, match=r"issued: .*test_work_streams.py:\d+ in test_a_failure_on_a_stream"):
        work.wait()


def test_batches_pass_a_busy_default_stream() -> None:
    side, works = dt.Stream(1), []
    with busy(dt.streams.default_stream("node:1")), dt.stream(side):
        for x in dt.data.prefetch((torch.full((1 << 18,), float(i)) for i in range(10)), "node:1"):
            works.append(dt.fetch(x * 2))
        assert [work.result()[-1].item() for work in works] == [2.0 * i for i in range(10)]


def test_a_pipeline_over_streams_and_nodes() -> None:
    sides = [dt.Stream(node) for node in range(2)]
    works = []
    for i in range(30):
        with dt.stream(sides[0]):
            x = torch.full((1 << 16,), float(i)).to("node:0", non_blocking=True) + 1
        with dt.stream(sides[1]):
            y = x.to("node:1") * 2
        works.append(dt.fetch(y))
    assert [work.result()[-1].item() for work in works] == [2.0 * i + 2 for i in range(30)]
