"""``dt.futures.as_completed``: what comes first, from whichever node."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from test_flow import Busy

import disttensor as dt


@pytest.fixture(scope="module")
def three():
    with dt.init_master_worker(nodes=3, threads=1) as session:
        xs = [torch.ones(1 << 16, device=f"node:{k}") for k in range(3)]
        dt.all_reduce(xs)
        for x in xs:  # connections are made at first use: have them before the tests look for leaks
            dt.fetch(x).wait()
        yield session


@pytest.mark.row("G8")
def test_what_comes_first(three, tmp_path: Path) -> None:
    xs = [torch.full((3,), float(k), device=f"node:{k}") for k in range(3)]
    with Busy(0, tmp_path) as busy, Busy(1, tmp_path) as other:
        senders = {dt.fetch(x): k for k, x in enumerate(xs)}
        coming = dt.futures.as_completed(senders)
        first = next(coming)
        assert senders[first] == 2
        assert first.result().tolist() == [2, 2, 2]
        with pytest.raises(TimeoutError):
            next(dt.futures.as_completed(list(senders)[:2], timeout=0.01))
        other.release()
        assert senders[next(coming)] == 1
        busy.release()
        assert [senders[work] for work in coming] == [0]
    assert len(list(dt.futures.as_completed(senders))) == 3
    assert list(dt.futures.as_completed([])) == []


def test_collectives_and_what_fails(three) -> None:
    xs = [torch.ones(3, device=f"node:{k}") for k in range(3)]
    bad = dt.fetch(torch.ones(3, device="node:1")[torch.tensor([9], device="node:1")])
    joint = dt.all_reduce(xs, async_op=True)
    assert joint is not None
    works = [bad, joint, bad]
    ended = list(dt.futures.as_completed(works))
    assert len(ended) == 2
    assert set(ended) == {bad, joint}
    assert joint.result() is xs
    with pytest.raises(IndexError):
        bad.result()


def test_many_in_any_order(three) -> None:
    works = [dt.fetch(torch.full((100,), k, device=f"node:{k % 3}")) for k in range(60)]
    ended = list(dt.futures.as_completed(works))
    assert sorted(work.result()[0].item() for work in ended) == list(range(60))
    for node in range(3):
        assert [w for w in ended if w in works[node::3]] == works[node::3], "those of one node in order"
