r"""``dt.all_reduce(values, fn)``: a reduction of nested values, some of which may be missing, by a user's function.

    v0     v1     v2     v3
     \_____/       \_____/
    f(v0, v1)    f(v2, v3)        each where its first operand is; the second is sent there
         \____________/
    f(f(v0, v1), f(v2, v3))       a broadcast of this is the result

The function is called here, with proxies: what it does is done on the nodes, with gradients and in graphs as ever, and
none of it is sent to them as code. Trees of any base join neighbours only, those of lower numbers first: the function
has to be associative, and need not commute.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, overload

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_unflatten

from ..futures.work import Work
from ..proxy.proxy import DistributedTensor
from ..runtime.collective import ReduceOp, Way
from ..session.current import session as current_session
from ..session.places import Place, one_session
from . import api
from .api import Algorithm, Tensors
from .groups import Group, Split, new_group
from .issue import named
from .objects import copies

Function = Callable[[Any, Any], Any]
IsLeaf = Callable[[Any], bool]


class Reduced(NamedTuple):
    """What ``all_reduce(values, fn)`` gives."""

    values: list[Any]  #: the reduction, as often as there were values: each has its tensors where that value's were
    contributors: int  #: how many values were not None


@overload
def all_reduce(
    tensors: Sequence[Any],
    op: Function,
    group: Group | None = None,
    *,
    algorithm: Algorithm = None,
    is_leaf: IsLeaf | None = None,
) -> Reduced: ...


@overload
def all_reduce(
    tensors: Tensors,
    op: Any = ReduceOp.SUM,
    group: Group | Split | None = None,
    async_op: bool = False,
    *,
    out: Tensors | None = None,
    algorithm: Algorithm = None,
    transport: torch.dtype | None = None,
) -> Work | None: ...


def all_reduce(
    tensors: Sequence[Any],
    op: Any = ReduceOp.SUM,
    group: Group | Split | None = None,
    async_op: bool = False,
    *,
    is_leaf: IsLeaf | None = None,
    algorithm: Algorithm = None,
    **options: Any,
) -> Work | Reduced | None:
    """Each of ``tensors`` (or of ``out``, then those stay as they are) becomes the reduction of all; to the same bits.

    ``result()`` of the Work is the list that was written. With a split as ``group`` (``group.split(key)``) it goes
    within its groups first, then between them; without one, so for hosts.

    With a function in place of ``op`` the values may be nested (lists, dicts, ... of tensors, numbers, anything), all
    in the same way. They stay as they are; new ones are returned, and how many values contributed. A value that is None
    does not: that of a node, say, that has nothing left. It gets the result all the same; ``group`` says which node it
    is, unless there is one value for each node of the session.

        sums, contributors = dt.all_reduce([{"w": x, "n": 1}, None, {"w": y, "n": 2}], lambda a, b: a + b)

    ``fn(a, b)`` joins two leaves, that of the lower value first, and may write them; it has to be associative.
    ``is_leaf(x)`` says what is one leaf to it though nested. ``algorithm=dt.Way("tree", base=4)`` is a wider tree.
    """
    if not callable(op) or isinstance(getattr(op, "name", None), str):  # torch's, which can be called, too
        return api.all_reduce(tensors, op, group, async_op, algorithm=algorithm, **options)
    if async_op or options:
        raise TypeError("all_reduce by a function takes no async_op, out or transport")
    base = _base(algorithm)
    trees = [None if value is None else tree_flatten(value, is_leaf) for value in tensors]
    spec = _spec([None if tree is None else tree[1] for tree in trees])
    if spec is None:
        return Reduced(list(tensors), 0)
    rows = [[None] * spec.num_leaves if tree is None else tree[0] for tree in trees]
    homes = _homes(rows, group.whole if isinstance(group, Split) else group)
    columns = [_reduce([row[k] for row in rows], homes, op, base) for k in range(spec.num_leaves)]
    reduced = [tree_unflatten([column[i] for column in columns], spec) for i in range(len(rows))]
    return Reduced(reduced, sum(tree is not None for tree in trees))


def _reduce(leaves: list[Any], homes: Sequence[Place | None], fn: Function, base: int) -> list[Any]:
    """One leaf of all values. One that is None contributes nothing."""
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
    """``fn(a, b)``, where ``a`` is. It may write both: it gets copies of what is the user's."""
    place = _place(a)
    if place is None:
        return fn(a, b)
    moved = _to(b, place)
    result = fn(a if a_is_new else _copy(a), moved if b_is_new or moved is not b else _copy(b))
    found = [named(x, "all_reduce: what the function returns") for x in tree_leaves(result) if torch.is_tensor(x)]
    if not found:
        raise TypeError(
            f"all_reduce: the function has to return a tensor where it is given tensors, not {result!r:.60}"
        )
    return result


def _spread(total: Any, places: Sequence[Place | None]) -> list[Any]:
    """``total`` for each value, its tensors where those of the value are."""
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


def _place(leaf: Any) -> Place | None:
    """Where its first tensor is; None for plain data."""
    place = next((x._place for x in tree_leaves(leaf) if isinstance(x, DistributedTensor)), None)
    return None if place is None else place.session.places.at(place.node, place.name)


def _copy(leaf: Any) -> Any:
    return tree_map(lambda x: x.clone() if isinstance(x, DistributedTensor) else x, leaf)


def _to(leaf: Any, place: Place) -> Any:
    """A copy at ``place``; itself if it is there."""
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
    """How all are nested. Raises ValueError where they differ."""
    first, spec = next(((i, spec) for i, spec in enumerate(specs) if spec is not None), (0, None))
    for i, other in enumerate(specs):
        if other is not None and other != spec:
            raise ValueError(f"all_reduce: value {i} is nested in another way than value {first}: {other}, {spec}")
    return spec


def _homes(rows: Sequence[Sequence[Any]], group: Group | None) -> list[Place | None]:
    """Where each value is: where its first tensor is, or its node of the group. Raises TypeError, ValueError."""
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
        wrong = next((x._place.node for x in its if x._place.node != node), None)
        if wrong is not None:
            raise ValueError(f"all_reduce: value {i} has a tensor on node {wrong}, not on node {node}")
    places = current_session().places
    return [home or places.at(node) for home, node in zip(homes, group, strict=True)]
