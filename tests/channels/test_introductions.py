"""Peers are introduced to each other at first use: what that costs, who is told what, and that busy peers wait."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from limits import HANG

import disttensor as dt
from disttensor import testing
from disttensor.runtime.channel.base import MASTER
from disttensor.runtime.collective import Way
from disttensor.runtime.process.observing import MessageSent
from disttensor.runtime.protocol import codec
from disttensor.runtime.protocol import commands as c
from disttensor.session import current

N = 6


@contextmanager
def started(n: int = N, launcher: str = "inproc", **options: object) -> Iterator[list[tuple[int, c.Batch]]]:
    """A session, with the messages that have left for its nodes since they said hello."""
    dt.init_master_worker(launcher=launcher, nodes=n, **options)
    try:
        sent: list[tuple[int, c.Batch]] = []

        def note(event: MessageSent) -> None:
            sent.append((event.node, codec.decode_batch(event.message)))

        seam = current.session().link.seam.sent
        seam.add(note)
        try:
            yield sent
        finally:
            seam.remove(note)
    finally:
        dt.shutdown()


def told(sent: list[tuple[int, c.Batch]]) -> list[tuple[int, int]]:
    """Returns which nodes were told of whom, in order, and forgets it."""
    dt.synchronize()
    found = [(node, command.rank) for node, batch in sent for command in batch.commands if type(command) is c.Peer]
    sent.clear()
    return found


def each_way(*pairs: tuple[int, int]) -> list[tuple[int, int]]:
    return sorted(pair for a, b in pairs for pair in ((a, b), (b, a)))


def rings() -> list[tuple[int, int]]:
    return each_way(*((rank, (rank + 1) % N) for rank in range(N)))


def test_a_start_introduces_nobody_and_a_pair_costs_two_commands_at_its_first_use() -> None:
    with started() as sent:
        assert not any(current.session().router._introduced)
        x = torch.ones(3, device="node:1") * 2
        assert told(sent) == []
        assert x.sum().item() == 6
        assert told(sent) in ([], [(1, MASTER)])  # a number may come with the answer
        for _ in range(3):
            y = x.to("node:4")
        assert told(sent) == each_way((1, 4))
        x.copy_(y)
        assert told(sent) == []
        assert torch.ones(1 << 20).to("node:2").cpu().sum() == 1 << 20
        assert told(sent) == [(2, MASTER)]


def test_commands_that_introduce_leave_with_the_transfer() -> None:
    with started() as sent:
        x = torch.ones(3, device="node:1")
        dt.synchronize()
        sent.clear()
        x.to("node:4")
        kinds = {
            node: [type(command) for command in batch.commands if type(command) in (c.Peer, c.Send, c.Recv)]
            for node, batch in sent
            if any(type(command) in (c.Send, c.Recv) for command in batch.commands)
        }
        assert kinds == {1: [c.Peer, c.Send], 4: [c.Peer, c.Recv]}


@pytest.mark.parametrize("form", ["a list", "a mesh", "groups of a mesh"])
def test_a_ring_costs_two_commands_for_each_node_in_the_same_batch(form: str) -> None:
    ring = Way("ring")
    with started() as sent:
        if form == "a list":
            tensors = [torch.full((5,), float(rank), device=f"node:{rank}") for rank in range(N)]
            wanted = rings()
        elif form == "a mesh":
            x = dt.meshes.from_shards(dt.mesh(dp=N), [torch.full((5,), float(rank)) for rank in range(N)])
            wanted = rings()
        else:
            x = dt.meshes.from_shards(dt.mesh(dp=2, tp=3), [torch.full((5,), float(rank)) for rank in range(N)])
            wanted = each_way((0, 1), (1, 2), (0, 2), (3, 4), (4, 5), (3, 5))
        told(sent)

        def reduce() -> None:
            if form == "a list":
                dt.all_reduce(tensors, algorithm=ring)
            else:
                dt.collectives.all_reduce_(x, over="dp" if form == "a mesh" else "tp", algorithm=ring)

        reduce()
        dt.synchronize()
        for node, batch in sent:
            kinds = [type(command) for command in batch.commands]
            if c.Collective in kinds:
                assert kinds.count(c.Peer) == 2, node
                assert kinds.index(c.Peer) < kinds.index(c.Collective)
        assert sorted(told(sent)) == wanted
        reduce()
        assert told(sent) == []
        if form == "a list":
            assert all(tensor.cpu().tolist() == [15.0 * N] * 5 for tensor in tensors)


def test_a_loss_is_told_to_those_that_know_the_node() -> None:
    with started(4) as sent:
        torch.ones(3, device="node:1").to("node:2")
        dt.synchronize()
        sent.clear()
        testing.cut(2)
        with pytest.raises(dt.errors.NodeLost):
            (torch.ones(3, device="node:2") + 1).sum().item()
        assert (torch.ones(3, device="node:0") + torch.ones(3, device="node:3").to("node:0")).sum().item() == 6
        dt.synchronize()
        lost = [node for node, batch in sent for command in batch.commands if type(command) is c.Lost]
        assert lost == [1]


def test_a_node_is_told_of_a_lost_one_what_it_is() -> None:
    """The introduction comes after the loss: transfers with the lost node fail, and the node goes on."""
    with started(3) as sent:
        testing.cut(2)
        with pytest.raises(dt.errors.NodeLost):
            torch.ones(3, device="node:2").sum().item()
        router = current.session().router
        router.introduce(0, 1, 2)
        dt.synchronize()
        kinds = [type(command) for _, batch in sent for command in batch.commands]
        assert [kind for kind in kinds if kind in (c.Peer, c.Lost)] == [c.Peer, c.Lost]


held, go = threading.Event(), threading.Event()


def hold() -> None:
    held.set()
    go.wait(HANG)


def test_a_node_that_computes_is_introduced_afterwards() -> None:
    """What is sent to it meanwhile arrives: the one that sends goes on."""
    held.clear()
    go.clear()
    with started(2):
        dt.submit(hold, node=1)
        assert held.wait(HANG)
        x = torch.ones(1 << 18, device="node:0")
        y = x.to("node:1")
        assert (x + 1).sum().item() == 2 << 18
        go.set()
        assert y.sum().item() == 1 << 18


def test_a_node_has_the_keys_of_its_own_pairs_only() -> None:
    """So one that was taken over can neither read nor forge what two others exchange: no key follows from others."""
    with started(4) as sent:
        tensors = [torch.ones(3, device=f"node:{rank}") for rank in range(4)]
        dt.all_reduce(tensors, algorithm=Way("direct"))
        for tensor in tensors:
            tensor.cpu()
        dt.synchronize()
        keys: dict[frozenset[int], set[bytes]] = {}
        for node, batch in sent:
            for command in batch.commands:
                if type(command) is c.Peer:
                    keys.setdefault(frozenset((node, command.rank)), set()).add(command.key)
                    assert current.session().router._secret not in codec.encode(batch)
        assert len(keys) >= 6
        assert all(len(of) == 1 for of in keys.values())  # both were told the same one
        assert len(set.union(*keys.values())) == len(keys)  # and no other pair has it
