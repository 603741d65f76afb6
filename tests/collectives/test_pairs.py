"""The pairs that the master introduces for a collective are those between which messages go."""

from __future__ import annotations

import math

import pytest
import torch
from collective_kit import Ranks

from disttensor.runtime.collective import pairs
from disttensor.runtime.node import collectives
from disttensor.runtime.protocol import codec
from disttensor.runtime.protocol import commands as c
from disttensor.runtime.protocol.collective_kinds import KINDS
from disttensor.runtime.protocol.rank_lists import rank_list

#: The kinds with one root, or a distance.
ROOTED = {"reduce", "broadcast", "gather", "scatter", "shift"}
#: The hosts of ranks: as many on each, more on one, one after the other.
HOSTS = {4: [(0, 0, 1, 1), (0, 1, 0, 1), (0, 0, 0, 1)], 6: [(0, 0, 1, 1, 2, 2), (0, 1, 1, 1, 2, 2)], 9: [(0, 1, 2) * 3]}
#: Elements of each tensor: below a slot of shared pages, and above all bounds of the table.
NUMEL = (3, (1 << 20) + 17)


def command(kind: str, size: int, numel: int, way: str, base: int, root: int, hosts: tuple[int, ...]) -> c.Collective:
    return c.Collective(
        kind=kind, transfer=1, ranks=rank_list(tuple(range(size))), inputs=(), outs=(), lengths=(),
        dtype=codec.dtype_id(torch.float32), op=0, root=root, algorithm=way, base=base, chunk=1 << 20, carry=-1,
        hosts=rank_list(hosts), request=0,
    )  # fmt: skip


def tensors(kind: str, me: int, size: int, numel: int, root: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Returns a rank's inputs and outs, as the command has them."""

    def some(count: int) -> list[torch.Tensor]:
        return [torch.ones(numel) for _ in range(count)]

    match kind:
        case "barrier":
            return [], []
        case "reduce":
            return some(1), some(me == root)
        case "broadcast":
            return (some(1), []) if me == root else ([], some(1))
        case "all_gather":
            return some(1), some(size)
        case "gather":
            return some(1), some(size if me == root else 0)
        case "scatter":
            return some(size if me == root else 0), some(1)
        case "reduce_scatter":
            return some(size), some(1)
        case "all_to_all":
            return some(size), some(size)
    return some(1), some(1)


def seen(ranks: Ranks, told: c.Collective, numel: int) -> set[tuple[int, int]]:
    """Returns the pairs that have sent each other messages."""

    def run(wire) -> set[int]:
        inputs, outs = tensors(told.kind, wire.me, wire.size, numel, told.root)
        collectives._run(told, wire, inputs, outs)
        assert all(bool((out != 0).all()) for out in outs if told.kind != "scatter") or not numel
        return {*wire._sent, *wire._received}

    return {tuple(sorted((me, peer))) for me, peers in enumerate(ranks.results(run)) for peer in peers}


@pytest.fixture(scope="module", params=(2, 3, 4, 5, 6, 7, 8, 9, 12))
def ranks(request):
    made = Ranks("inproc", request.param)
    yield made
    made.close()


@pytest.mark.parametrize("kind", KINDS)
def test_each_algorithm_by_name_has_its_pairs_and_no_others(ranks, kind):
    for way in KINDS[kind].algorithms:
        for base in (1, 2, 3) if way == "tree" else (2,):
            for root in {0, 1, ranks.size - 1} if kind in ROOTED else {0}:
                told = command(kind, ranks.size, 64, way, base, root, ())
                said = pairs.pairs(kind, way, base, ranks.size, root, (), pages=False)
                assert seen(ranks, told, 64) == said, (way, base, root)


@pytest.mark.parametrize("kind", KINDS)
def test_what_nodes_choose_has_pairs_that_were_introduced(ranks, kind):
    """Whatever the bytes. Of kinds with one algorithm, exactly those."""
    for root in {0, 1, ranks.size - 1} if kind in ROOTED else {0}:
        said = pairs.pairs(kind, "", 2, ranks.size, root, (), pages=False)
        for numel in NUMEL if KINDS[kind].algorithms else NUMEL[:1]:
            used = seen(ranks, command(kind, ranks.size, numel, "", 2, root, ()), numel)
            assert used <= said, (root, numel)
            assert used == said or KINDS[kind].algorithms or kind == "barrier", (root, numel)


@pytest.mark.parametrize("kind", ["all_reduce", "broadcast"])
def test_of_several_hosts(ranks, kind):
    for hosts in HOSTS.get(ranks.size, ()):
        for way in ("", *KINDS[kind].algorithms):
            for root in {0, 1, ranks.size - 1} if kind in ROOTED else {0}:
                said = pairs.pairs(kind, way, 2, ranks.size, root, hosts, pages=False)
                for numel in NUMEL:
                    used = seen(ranks, command(kind, ranks.size, numel, way, 2, root, hosts), numel)
                    assert used <= said, (hosts, way, root, numel)
                # between hosts there are as few as the algorithm has
                inside = {pair for pair in said if hosts[pair[0]] == hosts[pair[1]]}
                assert len(said - inside) <= len(pairs.everyone(len(set(hosts)))) * math.ceil(ranks.size / 2)


@pytest.mark.parametrize("size", [2, 5, 8, 9])
def test_ranks_that_share_memory(size):
    made = Ranks("shm", size, shared_pages=True)
    try:
        for kind in ("all_reduce", "reduce", "broadcast", "all_gather", "barrier"):
            said = pairs.pairs(kind, "", 2, size, 0, (), pages=True)

            def run(wire, kind=kind) -> set[int]:
                wire.shared_pages = made.shared_pages[wire.me]
                collectives._run(command(kind, size, 3, "", 2, 0, ()), wire, *tensors(kind, wire.me, size, 3, 0))
                return {*wire._sent, *wire._received}

            first = made.shared_pages[0]._known
            used = {tuple(sorted((me, peer))) for me, peers in enumerate(made.results(run)) for peer in peers}
            assert used <= said, kind
            for pages in made.shared_pages:  # the next kind makes them anew
                pages.close()
            assert not first
    finally:
        made.close()


def test_a_ring_has_two_peers_each_and_a_large_group_no_pair_for_all_of_them():
    """However many ranks there are."""
    assert len(pairs.pairs("all_reduce", "ring", 2, 1000, 0, (), pages=True)) == 1000
    assert len(pairs.pairs("all_reduce", "", 2, 1000, 0, (), pages=True)) < 1000 * 12
    assert pairs.PAIRS.keys() == KINDS.keys()
