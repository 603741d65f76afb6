"""Ranks in messages: the bytes that a collective takes for all nodes grow as their number, and each node finds its own
group among those that all are told of."""

from __future__ import annotations

import itertools
import random
from types import SimpleNamespace
from typing import Any, cast

import pytest
from fake_hub import HELLO, FakeHub
from msgspec.structs import replace

from disttensor.collectives.groups import Group
from disttensor.collectives.issue import CollectiveCall, CollectivePart
from disttensor.runtime.master.link import Link
from disttensor.runtime.protocol import codec
from disttensor.runtime.protocol import commands as c
from disttensor.runtime.protocol.errors import ProtocolError
from disttensor.runtime.protocol.rank_lists import MAX_RANKS, group_list, own_group, rank_list, ranks_of
from disttensor.tasks.process_groups import SessionWorlds

Groups = tuple[tuple[int, ...], ...]
SIZES = (8, 64, 512)
#: Bytes of a message with one collective, whatever the number of nodes.
BYTES = 64


# ---- what travels ----------------------------------------------------------------------------------------------------


def along(sizes: tuple[int, ...], dims: tuple[int, ...], nodes: range | tuple[int, ...]) -> Groups:
    """Returns the groups of nodes along some dims of a mesh."""
    found: dict[tuple[int, ...], list[int]] = {}
    for node, at in zip(nodes, itertools.product(*map(range, sizes)), strict=True):
        found.setdefault(tuple(i for dim, i in enumerate(at) if dim not in dims), []).append(node)
    return tuple(map(tuple, found.values()))


def some_tensor() -> Any:
    return SimpleNamespace(_h=SimpleNamespace(ref=5), numel=lambda: 1 << 20)


class Stubs:
    """A session whose nodes answer nothing, on hosts of eight."""

    def __init__(self, nodes: int) -> None:
        self.hub = FakeHub()
        self.link = Link(self.hub, nodes, None, lambda error: None)
        for node in self.link.nodes:
            node.connection.greet(replace(HELLO, host=f"host{node.rank // 8}"))
        router = SimpleNamespace(
            rules=(), automatic=False, introduce_groups=lambda *_: None, introduce_all=lambda *_: None,
            open=lambda *_: 0, data=[SimpleNamespace(capabilities=SimpleNamespace(collectives=False))],
            unusable=lambda _: "",
        )  # fmt: skip
        self.session = cast(
            Any,
            SimpleNamespace(
                link=self.link, nodes=self.link.nodes, router=router, shares_process=False,
                transfers=SimpleNamespace(new_loose=lambda: 1), flush=self.link.sender.at_limit,
            ),
        )  # fmt: skip

    def bytes_of(self, groups: Groups, mesh: bool) -> int:
        """Issues a collective; returns the bytes that leave for it."""
        ranks = tuple(sorted(itertools.chain(*groups)))
        place = SimpleNamespace(ranks=ranks, outbox=self.link.sender.fan_out(ranks)) if mesh else None
        call = CollectiveCall(
            "all_reduce", Group(groups[0]), [CollectivePart([some_tensor()])] * (1 if mesh else len(ranks)),
            place=cast(Any, place), groups=groups if len(groups) > 1 else (),
        )  # fmt: skip
        with self.link.lock:  # or the idle flush may be about to send it
            self.hub.sent.clear()
            call.queue(self.session, False, None)
            self.link.sender.flush_all()
        assert sorted(rank for rank, _ in self.hub.sent) == list(ranks)
        for rank, message in self.hub.sent:
            (told,) = codec.decode_batch(message).commands
            assert isinstance(told, c.Collective)
            assert own_group(told.ranks, told.sizes, rank) == next(group for group in groups if rank in group)
        return sum(len(message) for _, message in self.hub.sent)

    def end(self) -> None:
        self.link.close()
        self.link.interrupts.restore()
        self.hub.close()


@pytest.mark.parametrize("nodes", SIZES)
def test_the_bytes_of_a_collective_grow_as_the_number_of_nodes(nodes: int) -> None:
    stubs = Stubs(nodes)
    try:
        sizes = (2, nodes // 8, 4)
        whole = tuple(range(nodes))
        assert stubs.bytes_of((whole,), mesh=False) <= BYTES * nodes
        assert stubs.bytes_of((whole,), mesh=True) <= BYTES * nodes
        for dims in ((0,), (1,), (2,), (0, 1), (0, 2), (1, 2)):
            assert stubs.bytes_of(along(sizes, dims, range(nodes)), mesh=True) <= BYTES * nodes
        # a slice of a mesh; and where hosts are in no order, groups within them take a number for each host only
        assert stubs.bytes_of(along((2, 2), (0,), range(0, nodes, nodes // 4)), mesh=True) <= BYTES * nodes
        hosts = [*range(nodes // 8)]
        random.Random(0).shuffle(hosts)
        shuffled = tuple(8 * host + i for host in hosts for i in range(8))
        assert stubs.bytes_of(along((nodes // 8, 8), (1,), shuffled), mesh=True) <= (BYTES + 3 * len(hosts)) * nodes
        assert stubs.bytes_of(along((nodes // 8, 8), (0,), shuffled), mesh=True) <= (BYTES + 3 * nodes) * nodes
    finally:
        stubs.end()


@pytest.mark.parametrize("nodes", SIZES)
def test_the_bytes_of_a_process_group_grow_as_the_number_of_nodes(nodes: int) -> None:
    stubs, ranks = Stubs(nodes), tuple(range(nodes))
    try:
        with SessionWorlds().turn(stubs.session, cast(Any, SimpleNamespace(nodes=ranks, mesh=None)), None) as world:
            assert codec.size(c.Run(1, b"", b"", True, "", world=world)) <= BYTES
        assert ranks_of(world.ranks) == ranks
    finally:
        stubs.end()


# ---- the lists -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "told"),
    [
        ((), c.RankList(())),
        ((3,), c.RankList((3,))),
        ((0, 1, 2, 3, 4, 5, 6, 7), c.RankList((0,), (8,), (1,))),
        ((0, 4, 1, 5, 2, 6, 3, 7), c.RankList((0,), (4, 2), (1, 4))),
        ((8, 9, 0, 1, 4, 5), c.RankList((8, 0, 4), (2,), (1,))),
        ((0, 0, 0, 1, 1, 1), c.RankList((0,), (2, 3), (1, 0))),
        ((3, 0, 7), c.RankList((3, 0, 7))),
    ],
)
def test_a_list_in_a_message(ranks: tuple[int, ...], told: c.RankList) -> None:
    assert rank_list(ranks) == told
    assert ranks_of(told) == ranks


def some_groups(chance: random.Random) -> Groups:
    """Returns groups of a mesh, or some nodes in no order in groups of no one size."""
    sizes = tuple(chance.randint(1, 4) for _ in range(chance.randint(1, 4)))
    count = 1
    for size in sizes:
        count *= size
    nodes = tuple(range(0, 3 * count, chance.randint(1, 3)))[:count]
    if chance.random() < 0.5:
        return along(sizes, tuple(dim for dim in range(len(sizes)) if chance.random() < 0.5), nodes)
    shuffled = chance.sample(nodes, count)
    ends = sorted({*chance.choices(range(1, count + 1), k=3), count})
    return tuple(tuple(shuffled[a:b]) for a, b in itertools.pairwise([0, *ends]))


@pytest.mark.parametrize("seed", range(5))
def test_each_rank_finds_its_own_group(seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(100):
        groups = some_groups(chance)
        told, sizes = group_list(groups)
        for group in groups:
            for rank in group:
                assert own_group(told, sizes, rank) == group
        with pytest.raises(ProtocolError, match="node 1000 is in none of the groups"):
            own_group(told, sizes, 1000)


@pytest.mark.parametrize(
    ("told", "message"),
    [
        (c.RankList((0,), (2,), ()), "is not a list of ranks"),
        (c.RankList((0,), (2, 0), (1, 1)), "is not a list of ranks"),
        (c.RankList((0,), (-1, -3), (1, 1)), "is not a list of ranks"),
        (c.RankList((0,), (1 << 40, 1 << 40), (1, 1)), f"more than {MAX_RANKS} ranks"),
        (c.RankList((0,), (MAX_RANKS + 1,), (1,)), f"more than {MAX_RANKS} ranks"),
    ],
)
def test_lists_that_are_refused(told: c.RankList, message: str) -> None:
    with pytest.raises(ProtocolError, match=message):
        ranks_of(told)


def test_a_list_at_its_bound() -> None:
    assert len(ranks_of(c.RankList((0,), (MAX_RANKS,), (1,)))) == MAX_RANKS


def test_sizes_that_leave_a_rank_out_are_refused() -> None:
    for sizes in ((2, 1), (0,)):
        with pytest.raises(ProtocolError, match="node 3 is in none of the groups"):
            own_group(rank_list((0, 1, 2, 3)), sizes, 3)
