"""Tells which ranks of a group exchange messages in a collective: the pairs that the master introduces to each other.

An algorithm has its pairs here, by what its module does; ``tests/collectives/test_pairs.py`` compares them with the
messages that it really sends. Where nodes choose the algorithm, by the bytes that they see, the pairs are those of all
that the table may choose for a group of that size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from itertools import combinations

from .algorithm_table import NATIVE, Way, ways
from .hierarchical import Hosts
from .tree import Tree

#: Pairs of places in a group, the lower one first.
Pairs = frozenset[tuple[int, int]]

_NONE: Pairs = frozenset()


def _pairs(of: Iterable[tuple[int, int]]) -> Pairs:
    return frozenset((min(pair), max(pair)) for pair in of if pair[0] != pair[1])


@lru_cache(256)
def everyone(size: int) -> Pairs:
    """Returns the pairs of direct algorithms, and of a channel's own: all."""
    return _pairs(combinations(range(size), 2))


@lru_cache(256)
def shifted(size: int, by: int) -> Pairs:
    """Returns the pairs of a shift; by 1 those of a ring."""
    return _pairs((me, (me + by) % size) for me in range(size))


@lru_cache(256)
def doubled(size: int) -> Pairs:
    """Returns the pairs of recursive algorithms (halving.py)."""
    power = 1 << size.bit_length() - 1
    folds = size - power
    among = [2 * number if number < folds else number + folds for number in range(power)]
    partners = ((among[number], among[number ^ mask]) for number in range(power) for mask in _powers(power))
    return _pairs(partners) | _pairs((2 * fold, 2 * fold + 1) for fold in range(folds))


def _powers(below: int) -> list[int]:
    return [1 << bit for bit in range(below.bit_length() - 1)]


@lru_cache(256)
def branched(size: int, root: int, base: int) -> Pairs:
    """Returns the pairs of a tree."""
    return _pairs((me, child) for me in range(size) for child in Tree(size, me, root, base).children)


def star(size: int, root: int) -> Pairs:
    """Returns the pairs of one rank with each other one."""
    return _pairs((root, me) for me in range(size))


def _of_all_reduce(way: Way, size: int, root: int) -> Pairs:
    match way.algorithm:
        case "ring":
            return shifted(size, 1)
        case "doubling" | "halving":
            return doubled(size)
        case "tree":
            return branched(size, 0, way.base)
    return everyone(size)


def _of_tree(way: Way, size: int, root: int) -> Pairs:
    return branched(size, root, way.base) if way.algorithm == "tree" else everyone(size)


def _of_pieces(way: Way, size: int, root: int) -> Pairs:
    return shifted(size, 1) if way.algorithm == "ring" else everyone(size)


def _of_one(way: Way, size: int, root: int) -> Pairs:
    return star(size, root)


#: What gives the pairs of each kind of collective: of an algorithm, for a size of the group and the command's root.
PAIRS: dict[str, Callable[[Way, int, int], Pairs]] = {
    "all_reduce": _of_all_reduce,
    "reduce": _of_tree,
    "broadcast": _of_tree,
    "all_gather": _of_pieces,
    "gather": _of_one,
    "scatter": _of_one,
    "reduce_scatter": _of_pieces,
    "all_to_all": lambda way, size, root: everyone(size),
    "shift": lambda way, size, root: shifted(size, root % size),
    "barrier": _of_all_reduce,
}


@lru_cache(256)
def pairs(kind: str, algorithm: str, base: int, size: int, root: int, hosts: tuple[object, ...], pages: bool) -> Pairs:
    """Returns the pairs of places in a group of ``size`` ranks that exchange messages in a collective.

    ``algorithm``, ``base``, ``root`` and ``hosts`` are the command's. ``pages``: small tensors may go by shared pages
    (shared_pages.py), whose ranks gather their descriptors first.
    """
    if algorithm == NATIVE:
        return everyone(size)
    named = Way(algorithm, base) if algorithm else None
    if hosts and kind in ("all_reduce", "broadcast") and (who := Hosts(hosts, 0)).helps:
        return _by_hosts(kind, named, root, who)
    found = _by_ways(kind, named, size, root)
    return found | _by_ways("all_gather", None, size, 0) if pages and named is None else found


def _by_ways(kind: str, named: Way | None, size: int, root: int) -> Pairs:
    run = "all_reduce" if kind == "barrier" else kind
    return _NONE.union(*(PAIRS[kind](way, size, root) for way in ([named] if named is not None else ways(run, size))))


def _by_hosts(kind: str, named: Way | None, root: int, who: Hosts) -> Pairs:
    """Returns the pairs of a hierarchical algorithm: within each host, and between the hosts."""
    inside = _NONE.union(*(_pairs(combinations(members, 2)) for members in who.members))
    if kind == "broadcast":
        heads = [root if root in members else members[0] for members in who.members]
        return inside | _among(heads, branched(len(heads), heads.index(root), 1))
    across = _by_ways("all_reduce", named, len(who.members), 0)
    places = range(len(who.mine)) if who.even else [0]
    return inside.union(*(_among([members[place] for members in who.members], across) for place in places))


def _among(members: Sequence[int], places: Pairs) -> Pairs:
    return _pairs((members[one], members[other]) for one, other in places)
