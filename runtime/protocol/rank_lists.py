"""Lists of ranks in messages. That of a mesh mostly goes by steps, which take the same few bytes for any number of
nodes: told to each of N nodes, the ranks themselves would be N x N numbers.

    (0, 1, 2, 3, 4, 5, 6, 7)    starts=(0,)     8 times by steps of 1
    (0, 4, 1, 5, 2, 6, 3, 7)    starts=(0,)     4 times by steps of 1, each of these 2 times by steps of 4
    (8, 9, 0, 1, 4, 5)          starts=(8, 0, 4)    each of these 2 times by steps of 1
    (3, 0, 7)                   starts=(3, 0, 7)
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from math import gcd, prod

from .commands import RankList
from .errors import ProtocolError

#: The most ranks of a list: it may take few bytes however many they are.
MAX_RANKS = 1 << 16


@lru_cache(maxsize=256)
def rank_list(ranks: tuple[int, ...]) -> RankList:
    """Returns a list of ranks as it goes into a message."""
    counts, steps = list[int](), list[int]()
    while len(ranks) > 1:
        step = ranks[1] - ranks[0]
        ends = [i for i in range(1, len(ranks)) if ranks[i] - ranks[i - 1] != step]
        run = gcd(len(ranks), *ends)  # so that each run ends at an end of one of these
        if run == 1:
            break
        counts.insert(0, run)
        steps.insert(0, step)
        ranks = ranks[::run]
    return RankList(ranks, tuple(counts), tuple(steps))


@lru_cache(maxsize=256)
def ranks_of(told: RankList) -> tuple[int, ...]:
    """Returns the ranks of a list. Raises ProtocolError for a list of more than MAX_RANKS, and for one that is none."""
    ranks = told.starts
    if len(told.counts) != len(told.steps) or min(told.counts, default=1) < 1:
        raise ProtocolError(f"{told!s:.200} is not a list of ranks")
    if len(ranks) * prod(told.counts) > MAX_RANKS:
        raise ProtocolError(f"a list of more than {MAX_RANKS} ranks")
    for count, step in zip(told.counts, told.steps, strict=True):
        ranks = tuple([rank + i * step for rank in ranks for i in range(count)])
    return ranks


@lru_cache(maxsize=256)
def group_list(groups: tuple[tuple[int, ...], ...]) -> tuple[RankList, tuple[int, ...]]:
    """Returns the ranks of groups, one group after the other, and the groups' sizes, as ``own_group`` takes them."""
    sizes = tuple(map(len, groups))
    if len(groups) == 1:
        sizes = ()
    elif len(set(sizes)) == 1:
        sizes = sizes[:1]
    return rank_list(tuple([rank for group in groups for rank in group])), sizes


@lru_cache(maxsize=256)
def own_group(told: RankList, sizes: Sequence[int], rank: int) -> tuple[int, ...]:
    """Returns the group that a rank is in. ``sizes``: of each group, or of all where that is one number; of none, all
    ranks are one group. Raises ProtocolError where the rank is in none."""
    ranks = ranks_of(told)
    if rank in ranks:
        at = ranks.index(rank)
        if not sizes:
            return ranks
        if len(sizes) == 1 and sizes[0] > 0:
            first = at - at % sizes[0]
            return ranks[first : first + sizes[0]]
        for end, size in zip(accumulate(sizes), sizes, strict=True):
            if end > at:
                return ranks[end - size : end]
    raise ProtocolError(f"node {rank} is in none of the groups of {told!s:.200}")
