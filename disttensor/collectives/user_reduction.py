r"""``dt.all_reduce(values, fn)``: a reduction of nested values, some of which may be missing, by a user's function.

    v0     v1     v2     v3
     \_____/       \_____/
    f(v0, v1)    f(v2, v3)        each where its first operand is; the second is sent there
         \____________/
    f(f(v0, v1), f(v2, v3))       a broadcast of this is the result

The function is called in the script, with proxies: its operations run on the nodes, with gradients and in graphs as
ever, and no code is sent. Trees of any base join neighbours only, those of lower numbers first: the function has to be
associative, and need not commute.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_unflatten

from ..proxy.proxy import DistributedTensor
from ..runtime.collective import Way
from ..runtime.process.spelling import shown
from ..session.current import session as current_session
from ..session.places import NodePlace, one_session
from .groups import Group, Split, given_group, new_group
from .issue import named
from .objects import copies
from .tensor_collectives import Algorithm

Function = Callable[[Any, Any], Any]
IsLeaf = Callable[[Any], bool]


class Reduced(NamedTuple):
    """The result of ``all_reduce(values, fn)``."""

    values: list[Any]  #: the reduction once for each value, with its tensors on the device of that value's tensors
    contributors: int  #: the number of values that were not None


def reduce_by(
    fn: Function,
    values: Sequence[Any],
    group: Group | Split | None,
    algorithm: Algorithm,
    is_leaf: IsLeaf | None,
) -> Reduced:
    """Reduces values by a function of the user's, as ``all_reduce`` in api.py describes it. Returns at once."""
    base = _base(algorithm)
    trees = [None if value is None else tree_flatten(value, is_leaf) for value in values]
    spec = _spec([None if tree is None else tree[1] for tree in trees])
    if spec is None:
        return Reduced(list(values), 0)
    rows = [[None] * spec.num_leaves if tree is None else tree[0] for tree in trees]
    if group is not None and not isinstance(group, Split):
        given_group(group, "all_reduce")
    homes = _homes(rows, group.whole if isinstance(group, Split) else group)
    columns = [_reduce([row[k] for row in rows], homes, fn, base) for k in range(spec.num_leaves)]
    reduced = [tree_unflatten([column[i] for column in columns], spec) for i in range(len(rows))]
    return Reduced(reduced, sum(tree is not None for tree in trees))


def _reduce(leaves: list[Any], homes: Sequence[NodePlace | None], fn: Function, base: int) -> list[Any]:
    """Reduces one leaf over all values, and returns it once for each. A leaf that is None contributes nothing."""
    parts = [(leaf, False) for leaf in leaves if leaf is not None]
    if not parts:
        return leaves
    if len({_place(leaf) is None for leaf, _ in parts}) > 1:
        raise TypeError("all_reduce: what is a tensor in one value has to be one in all of them")
    step = 1
    while step < len(parts):
        for i in range(0, len(parts), step * base):
            for other in parts[i + step : i + step * base : step]:
                parts[i] = _call(fn, *parts[i], *other), True
        step *= base
    total, new = parts[0]
    return _spread(total if new else _copy(total), [_place(x) or home for x, home in zip(leaves, homes, strict=True)])


def _call(fn: Function, a: Any, a_is_new: bool, b: Any, b_is_new: bool) -> Any:
    """Returns ``fn(a, b)``, computed at the place of ``a``. ``fn`` may write both, so it gets copies of the user's
    tensors."""
    place = _place(a)
    if place is None:
        return fn(a, b)
    moved = _to(b, place)
    result = fn(a if a_is_new else _copy(a), moved if b_is_new or moved is not b else _copy(b))
    found = [named(x, "all_reduce: what the function returns") for x in tree_leaves(result) if torch.is_tensor(x)]
    if not found:
        raise TypeError(
            f"all_reduce: the function has to return a tensor where it is given tensors, not {shown(result)}"
        )
    return result


def _spread(total: Any, places: Sequence[NodePlace | None]) -> list[Any]:
    """Returns ``total`` once for each value, its tensors at the value's place."""
    if _place(total) is None:
        return [total] * len(places)
    if None in places:
        raise ValueError(
            f"all_reduce: value {places.index(None)} has no tensor, so on which node is it? Name the group"
        )
    there = [place for place in places if place is not None]
    leaves, spec = tree_flatten(total)
    columns = [copies(leaf, there) if isinstance(leaf, DistributedTensor) else [leaf] * len(there) for leaf in leaves]
    return [tree_unflatten(list(row), spec) for row in zip(*columns, strict=True)]


def _place(leaf: Any) -> NodePlace | None:
    """Returns the place of a leaf's first tensor; None for plain data."""
    place = next((x._place for x in tree_leaves(leaf) if isinstance(x, DistributedTensor)), None)
    return None if place is None else place.session.places.at(place.one.node, place.name)


def _copy(leaf: Any) -> Any:
    return tree_map(lambda x: x.clone() if isinstance(x, DistributedTensor) else x, leaf)


def _to(leaf: Any, place: NodePlace) -> Any:
    """Returns a copy of ``leaf`` at ``place``; ``leaf`` itself if all its tensors are there."""
    if {x.device for x in tree_leaves(leaf) if isinstance(x, DistributedTensor)} <= {place.device}:
        return leaf
    return tree_map(lambda x: x.to(place.device, copy=True) if isinstance(x, DistributedTensor) else x, leaf)


# ---- mistakes, at the user's line ------------------------------------------------------------------------------------


def _base(algorithm: str | Way | None) -> int:
    way = algorithm if isinstance(algorithm, Way) else Way(algorithm or "tree")
    if way.algorithm != "tree" or way.base < 2:
        raise ValueError(f"all_reduce by a function goes through a tree of a base of at least 2, not {way}")
    return way.base


def _spec(specs: Sequence[TreeSpec | None]) -> TreeSpec | None:
    """Returns the nesting of all values (None if all are None). Raises ValueError where nestings differ."""
    first, spec = next(((i, spec) for i, spec in enumerate(specs) if spec is not None), (0, None))
    for i, other in enumerate(specs):
        if other is not None and other != spec:
            raise ValueError(f"all_reduce: value {i} is nested in another way than value {first}: {other}, {spec}")
    return spec


def _homes(rows: Sequence[Sequence[Any]], group: Group | None) -> list[NodePlace | None]:
    """Returns the place of each value: that of its first tensor, else its node of the group (None if neither is known).

    Raises TypeError for local tensors, ValueError for tensors that are not on their node of the group.
    """
    tensors = [
        [named(x, f"all_reduce: what is in value {i}") for x in tree_leaves(list(row)) if torch.is_tensor(x)]
        for i, row in enumerate(rows)
    ]
    homes = [_place(its) for its in tensors]
    there = [home for home in homes if home is not None]
    if not there:
        return homes
    one_session(*there)
    if group is None:
        everybody = new_group()
        if len(homes) != len(everybody) or any(home and home.node != i for i, home in enumerate(homes)):
            return homes
        group = everybody
    if len(group) != len(rows):
        raise ValueError(f"all_reduce has {len(rows)} values for the {len(group)} nodes of {group}")
    for i, (its, node) in enumerate(zip(tensors, group, strict=True)):
        wrong = next((x._place.one.node for x in its if x._place.one.node != node), None)
        if wrong is not None:
            raise ValueError(f"all_reduce: value {i} has a tensor on node {wrong}, not on node {node}")
    places = current_session().places
    return [home or places.at(node) for home, node in zip(homes, group, strict=True)]
