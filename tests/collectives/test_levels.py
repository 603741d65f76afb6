"""Groups in groups: splits as the group of a collective, levels by name."""

from __future__ import annotations

import pytest
import torch

import disttensor as dt

N = 8


@pytest.fixture(scope="module")
def eight():
    with dt.init_master_worker(nodes=N, launcher="inproc") as session:
        yield session


@pytest.mark.row("T26", "T27")
@pytest.mark.parametrize("n", range(1, 38))
def test_as_in_torchmpi_for_every_number_of_nodes(n):
    """Three levels: all, by remainder, by halves of these; the first of each talk for it at the level above."""
    everybody = dt.collectives.Group(tuple(range(n)))
    levels = everybody.levels(colour=lambda node: node % 3, half=lambda node: node // 3 % 2)
    assert list(levels) == ["colour", "half"]
    assert len(levels["colour"]) == min(n, 3)
    for node in range(n):
        groups = levels.of(node)
        assert groups["colour"].nodes == tuple(k for k in range(n) if k % 3 == node % 3)
        assert groups["half"].nodes == tuple(k for k in range(n) if k % 6 == node % 6)
        assert groups["half"].nodes[groups["half"].rank(node)] == node
    assert levels["colour"].leaders.nodes == tuple(range(min(n, 3)))
    assert levels["half"].leaders.nodes == tuple(range(min(n, 6)))
    for colour, split in levels.span("colour", "half").items():
        assert split.whole == levels["colour"][colour]
        assert [group.nodes for group in split.values()] == [
            group.nodes for group in levels["half"].values() if group.nodes[0] % 3 == colour
        ]
        assert split.leaders.nodes == tuple(k for k in range(min(n, 6)) if k % 3 == colour)
    across = levels["colour"].across
    assert sorted(k for group in across.values() for k in group) == list(range(n))
    assert across[0].nodes == levels["colour"].leaders.nodes
    assert [len(group) for group in across.values()] == [len(range(i, min(i + 3, n))) for i in range(0, n, 3)]


@pytest.mark.row("T7", "T26")
def test_names(eight):
    levels = dt.collectives.new_group(name="world").levels(rack=lambda k: "ab"[k // 4], pair=lambda k: k // 2)
    assert levels["rack"]["b"].name == "world/rack b"
    assert levels["pair"]["b", 2].nodes == (4, 5)
    assert str(levels) == "\n".join(
        [
            "<Group 'world' of nodes 0, 1, 2, 3, 4, 5, 6, 7>",
            "  <Group 'world/rack a' of nodes 0, 1, 2, 3>",
            "    <Group 'world/pair a, 0' of nodes 0, 1>",
            "    <Group 'world/pair a, 1' of nodes 2, 3>",
            "  <Group 'world/rack b' of nodes 4, 5, 6, 7>",
            "    <Group 'world/pair b, 2' of nodes 4, 5>",
            "    <Group 'world/pair b, 3' of nodes 6, 7>",
        ]
    )
    assert list(levels.span("rack", "pair")["a"]) == [("a", 0), ("a", 1)]
    by_host = dt.collectives.new_group().levels(host=dt.collectives.host_of, odd=[0, 1] * 4)
    assert len(by_host["host"]) == 1
    assert [group.nodes for group in by_host["odd"].values()] == [(0, 2, 4, 6), (1, 3, 5, 7)]


def speaking():
    """The pairs of nodes of which one has sent to the other, in collectives, since ``reset_stats``."""
    dt.synchronize()
    rows = [row for row in dt.channels.stats() if row.sent.calls and row.use == "collectives"]
    return {(int(row.at[5:]), int(row.peer[5:])) for row in rows}


def between(split):
    """Those that are in different groups."""
    colour = {node: colour for colour, group in split.items() for node in group}
    return {(a, b) for a, b in speaking() if colour[a] != colour[b]}


@pytest.mark.row("T9", "T10", "T22", "T29", "I10")
@pytest.mark.parametrize("base", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("n", range(2, N + 1))
def test_trees_of_any_base(eight, n, base):
    """Who speaks to whom: rank v's parent is (v - 1) // base, counted from the root; a chain, trees, and a star."""
    group, nodes = dt.collectives.new_group(range(n)[::-1]), list(range(n)[::-1])

    def tree(root):
        return {(nodes[(v + root) % n], nodes[((v - 1) // base + root) % n]) for v in range(1, n)}

    def back(pairs):
        return {(b, a) for a, b in pairs}

    way, root = dt.collectives.Way("tree", base), n // 2
    for call, pairs, sums in (
        (lambda xs: dt.all_reduce(xs, group=group, algorithm=way), tree(0) | back(tree(0)), [1] * n),
        (
            lambda xs: dt.collectives.reduce(xs, nodes[root], group=group, algorithm=way),
            tree(root),
            [root == k for k in range(n)],
        ),
        (lambda xs: dt.broadcast(xs, nodes[root], group, algorithm=way), back(tree(root)), None),
    ):
        xs = [torch.tensor([2.0**k], device=f"node:{k}") for k in nodes]
        dt.channels.reset_stats()
        call(xs)
        assert speaking() == pairs
        if sums is None:
            assert [x.item() for x in xs] == [2.0 ** nodes[root]] * n
        else:
            assert [x.item() for x in xs] == [
                2.0**n - 1 if whole else 2.0**k for k, whole in zip(nodes, sums, strict=True)
            ]


@pytest.mark.row("T27")
@pytest.mark.parametrize("key", [lambda k: k // 4, lambda k: k // 3, lambda k: k % 2, lambda k: k > 0, lambda k: k])
@pytest.mark.parametrize("op", ["SUM", "AVG", "MAX"])
def test_a_split_as_the_group_of_a_collective(eight, key, op):
    """Within its groups first, then between them; the same numbers as flat."""
    split = dt.collectives.new_group().split(key)
    crossing = set()  #: pairs of nodes of different groups that have sent to each other
    for numel in (1, 1001):
        local = [torch.randn(numel, dtype=torch.float64) for _ in range(N)]
        xs = [x.to(f"node:{k}") for k, x in enumerate(local)]
        flat = [x.clone() for x in xs]
        dt.all_reduce(flat, op)
        dt.channels.reset_stats()
        dt.all_reduce(xs, op, split)
        crossing |= between(split)
        assert all(torch.equal(x.cpu(), xs[0].cpu()) for x in xs)
        torch.testing.assert_close(xs[0].cpu(), flat[0].cpu())
        dt.channels.reset_stats()
        ys = [x.to(f"node:{k}") for k, x in enumerate(local)]
        dt.broadcast(ys, 5, split)
        assert all(torch.equal(y.cpu(), local[5]) for y in ys)
        entered = [colour for _, b in between(split) for colour, group in split.items() if b in group]
        assert sorted(entered) == sorted(colour for colour, group in split.items() if 5 not in group), "each once"
    places = {node: group.rank(node) for group in split.values() for node in group}
    assert crossing
    assert all(places[a] == places[b] for a, b in crossing), "only those of one place in their groups speak"
    dt.synchronize()


def test_hierarchical_averages_of_several_tensors_per_node(eight):
    xs = [torch.full((5,), float(k), device=f"node:{k // 2}") for k in range(2 * N - 3)]
    dt.all_reduce(xs, "AVG", dt.collectives.new_group(range(7)).split(lambda k: k // 3))
    assert all(x.eq(6).all() for x in xs)


def test_a_function_may_be_given_a_split_and_others_take_it_as_a_whole(eight):
    split = dt.collectives.new_group([0, 1]).split([0, 1])
    xs = [torch.ones(2, device=f"node:{k}") for k in range(2)]
    assert dt.all_reduce(xs, torch.add, split)[0][1].tolist() == [2, 2]
    dt.collectives.sendreceive(xs, group=split)


def test_mistakes(eight):
    group = dt.collectives.new_group(range(4))
    with pytest.raises(ValueError, match="3 keys of 'a' for the 4 nodes"):
        group.levels(a=[1, 2, 3])
    levels = group.levels(outer=[0, 0, 1, 1], inner=[0, 1, 0, 1])
    with pytest.raises(ValueError, match="'outer' is not inside of 'inner'"):
        levels.span("inner", "outer")
    with pytest.raises(KeyError):
        levels.span("outer", "other")
    with pytest.raises(ValueError, match="node 9 is in none"):
        levels.of(9)
    with pytest.raises(ValueError, match="node 9 does not exist"):
        dt.collectives.host_of(9)
    xs = [torch.ones(2, device=f"node:{k}") for k in range(3)]
    with pytest.raises(ValueError, match="but the group is"):
        dt.all_reduce(xs, group=levels["outer"])
