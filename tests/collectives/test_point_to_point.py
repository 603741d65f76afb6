"""Messages in batches, beside torch.distributed's by gloo, and the barrier that names who is missing."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import torch
from mesh_kit import connected

import disttensor as dt
from disttensor import testing
from disttensor.collectives import P2POp, batch_isend_irecv, irecv, isend, monitored_barrier

N = 3


@pytest.fixture(scope="module", autouse=True)
def session() -> Iterator[None]:
    with connected(N):
        # what is made at first use: before leaks are looked for
        dt.run(torch.distributed.barrier, node=list(range(N)), distributed=True)
        yield


def values(k: int) -> torch.Tensor:
    return torch.randn(4, 2, generator=torch.Generator().manual_seed(k))


def by_gloo(rank: int, size: int) -> list[torch.Tensor]:
    """A rank of the ring both ways, as a program of torch.distributed has it."""
    import torch.distributed as dist

    left, right = torch.zeros(4, 2), torch.zeros(4, 2)
    before, behind = (rank - 1) % size, (rank + 1) % size
    mine = torch.randn(4, 2, generator=torch.Generator().manual_seed(rank))
    ops = [
        dist.P2POp(dist.isend, mine, behind),
        dist.P2POp(dist.isend, mine * 2, before),
        dist.P2POp(dist.irecv, left, before),
        dist.P2POp(dist.irecv, right, behind),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return [left, right]


def test_a_ring_both_ways_is_what_gloo_gives():
    there = dt.run(
        lambda: by_gloo(torch.distributed.get_rank(), torch.distributed.get_world_size()),
        node=list(range(N)),
        distributed=True,
    )
    xs = [values(k).to(f"node:{k}") for k in range(N)]
    twice = [x * 2 for x in xs]
    lefts, rights = ([torch.zeros(4, 2, device=f"node:{k}") for k in range(N)] for _ in range(2))
    ops = []
    for k in range(N):
        before, behind = (k - 1) % N, (k + 1) % N
        ops += [P2POp(isend, xs[k], behind), P2POp(torch.distributed.isend, twice[k], before)]
        ops += [P2POp(irecv, lefts[k], before), P2POp("irecv", rights[k], behind)]
    works = batch_isend_irecv(ops)
    assert len(works) == len(ops)
    assert all(work.wait() for work in works)
    for k, (left, right) in enumerate(there):
        assert torch.equal(lefts[k].cpu(), left.cpu()), k
        assert torch.equal(rights[k].cpu(), right.cpu()), k


def test_several_messages_between_two_nodes_come_in_order_by_tag():
    first, second = torch.ones(3, device="node:0"), torch.full((3,), 2.0, device="node:0")
    outs = [torch.zeros(3, device="node:1") for _ in range(3)]
    third = torch.full((3,), 3.0, device="node:0")
    works = batch_isend_irecv(
        [
            P2POp(irecv, outs[0], 0),
            P2POp(irecv, outs[1], 0),
            P2POp(irecv, outs[2], 0, tag=7),
            P2POp(isend, third, 1, tag=7),
            P2POp(isend, first, 1),
            P2POp(isend, second, 1),
        ]
    )
    assert works[0].result() is outs[0]
    assert works[0] is works[4]
    assert [out[0].item() for out in outs] == [1.0, 2.0, 3.0]


def test_what_uses_a_received_tensor_waits_for_it_without_the_script():
    x, y = torch.arange(5.0, device="node:2") + 1, torch.zeros(5, device="node:0")
    batch_isend_irecv([P2POp(isend, x, 0), P2POp(irecv, y, 2)])
    assert (y * 2).tolist() == [2.0, 4.0, 6.0, 8.0, 10.0]


def at(node: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(shape or (2,), dtype=dtype, device=f"node:{node}")


@pytest.mark.parametrize(
    ("ops", "error", "words"),
    [
        (list, ValueError, "at least one"),
        (lambda: P2POp(isend, at(0), 1), TypeError, "a list of P2POps, not P2POp"),
        (lambda: [at(0)], TypeError, "op 2 is a DistributedTensor"),
        (lambda: [P2POp(isend, torch.ones(2), 1)], TypeError, "P2POp 2: its tensor has to be a tensor on a node"),
        (lambda: [P2POp(isend, at(0), 0)], ValueError, "P2POp 2: from node 0 to itself"),
        (lambda: [P2POp(isend, at(0), 9)], ValueError, "node 9"),
        (lambda: [P2POp(sum, at(0), 1)], ValueError, "isend or irecv"),
        (lambda: [P2POp(isend, at(0), 1)], ValueError, r"no other end: P2POp\(irecv, y, 0\) with a tensor on node 1"),
        (
            lambda: [P2POp(irecv, at(1), 0, tag=1), P2POp(isend, at(0), 1)],
            ValueError,
            "P2POp 3 is one end of a message from node 0 to node 1, and",
        ),
        (lambda: [P2POp(isend, at(0, 3), 1), P2POp(irecv, at(1, 2), 0)], ValueError, "P2POps 2 .isend. and 3"),
        (
            lambda: [P2POp(isend, at(0), 1), P2POp(irecv, at(1, dtype=torch.int64), 0)],
            TypeError,
            "int64, but torch.float32",
        ),
    ],
)
def test_bad_batches_send_nothing(ops, error, words):
    made, target = ops(), at(2)
    if isinstance(made, list) and made:  # behind a message that is right
        made = [P2POp(isend, torch.ones(2, device="node:0"), 2), P2POp(irecv, target, 0), *made]
    with pytest.raises(error, match=words):
        batch_isend_irecv(made)
    assert target.tolist() == [0.0, 0.0]


def test_a_monitored_barrier_waits_for_all(tmp_path):
    path = tmp_path / "done"
    dt.run(path.write_text, "done", node=1)
    monitored_barrier()
    assert path.read_text() == "done"


def test_a_monitored_barrier_names_who_is_missing():
    x = torch.ones(2, device="node:1")
    dt.synchronize()
    testing.stop(1)
    try:
        y = x + 1
        with pytest.raises(TimeoutError) as late:
            monitored_barrier(timeout=0.2)
        monitored_barrier(dt.collectives.new_group([0, 2]), timeout=60)
    finally:
        testing.resume(1)
    text = str(late.value)
    assert re.search(r"1 of 3 nodes did not arrive within 0.2 s", text)
    assert re.findall(r"node (\d) \(host", text) == ["1"]
    assert "test_point_to_point.py:" in text, text
    monitored_barrier(timeout=60)
    assert y.tolist() == [2.0, 2.0]


@pytest.mark.parametrize(("timeout", "error"), [(0, ValueError), (-1.0, ValueError), ("soon", TypeError)])
def test_a_monitored_barrier_refuses_other_timeouts(timeout, error):
    with pytest.raises(error, match="timeout"):
        monitored_barrier(timeout=timeout)


def test_a_lost_node_ends_both():
    """The last test: the module's session has one node less afterwards."""
    testing.stop(1)
    x = torch.ones(2, device="node:1") + 1
    testing.kill(1)
    with pytest.raises(dt.NodeLost, match="node 1"):
        monitored_barrier(timeout=60)
    with pytest.raises(dt.NodeLost, match="node 1"):
        batch_isend_irecv([P2POp(isend, at(0), 1), P2POp("irecv", x, 0)])
    monitored_barrier(dt.collectives.new_group([0, 2]), timeout=60)
    assert torch.ones(2, device="node:0").sum().item() == 2.0
