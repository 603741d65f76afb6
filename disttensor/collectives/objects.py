"""Collectives of objects: plain data with tensors at any depth, as ``dt.run`` takes and returns them.

In one script plain data is at hand for every node, and only the tensors travel. So these functions apply the
collectives of ``functional``, which return new tensors with gradients, to values nested in any way: lists, tuples,
dicts, ... are copied, all other objects in them stay the same objects. A tensor that occurs twice is copied once.
Nothing is pickled. All of them return at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from ..errors.argument_checks import spelled
from ..proxy.proxy import DistributedTensor
from ..session.current import session as current_session
from ..session.places import NodePlace
from . import functional
from .groups import Group, given_group, new_group


@spelled
def broadcast_object(obj: Any, group: Group | None = None) -> list[Any]:
    """Returns a list with a copy of ``obj`` for each node of the group (default: all), its tensors on that node.

    Tensors are copied to the device of the same name as before, local tensors to the node's default device. Raises
    RuntimeError for a device that a node lacks.
    """
    group = given_group(group, "broadcast_object")
    places = current_session().places
    leaves, spec = tree_flatten(obj)
    columns: dict[int, list[Any]] = {}
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor) and id(leaf) not in columns:
            there: Any = leaf if isinstance(leaf, DistributedTensor) else leaf.to(places.at(group.nodes[0]).device)
            columns[id(leaf)] = copies(there, [places.at(node, there._place.name) for node in group])
    rows = [[columns[id(x)][i] if id(x) in columns else x for x in leaves] for i in range(len(group))]
    return [tree_unflatten(row, spec) for row in rows]


@spelled
def scatter_object(objs: Sequence[Any], group: Group | None = None) -> list[Any]:
    """Returns copies of ``objs``, the i-th with its tensors on the i-th node of the group (default: all).

    Raises ValueError unless there is one object per node.
    """
    group = _one_each(objs, group, "scatter_object")
    return [_on_node(obj, node) for obj, node in zip(objs, group, strict=True)]


@spelled
def gather_object(objs: Sequence[Any], dst: int) -> list[Any]:
    """Returns copies of ``objs`` (any number) with all their tensors on node ``dst``."""
    return [_on_node(obj, dst) for obj in objs]


@spelled
def all_gather_object(objs: Sequence[Any], group: Group | None = None) -> list[list[Any]]:
    """Returns a list for each node of the group (default: all), with copies of all ``objs`` on that node.

    Raises ValueError unless there is one object per node.
    """
    group = _one_each(objs, group, "all_gather_object")
    return [list(row) for row in zip(*(broadcast_object(obj, group) for obj in objs), strict=True)]


def copies(tensor: Any, places: Sequence[NodePlace]) -> list[Any]:
    """Returns copies of a tensor on a node, one at each of ``places``."""
    mine = tensor._place
    if len({mine.name, *(place.name for place in places)}) > 1:  # to devices of other names: one by one
        return [tensor.to(place.device, copy=True) for place in places]
    nodes = new_group(dict.fromkeys([mine.one.node, *(place.node for place in places)]))
    by_node = dict(zip(nodes, functional.broadcast(tensor, nodes), strict=True))
    return [by_node[p.node].clone() if p in places[:i] else by_node[p.node] for i, p in enumerate(places)]


def _on_node(obj: Any, node: int) -> Any:
    places = current_session().places
    leaves, spec = tree_flatten(obj)
    moved: dict[int, torch.Tensor] = {}
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor) and id(leaf) not in moved:
            there: Any = leaf
            name = there._place.name if isinstance(leaf, DistributedTensor) else None
            moved[id(leaf)] = leaf.to(places.at(node, name).device, copy=True)
    return tree_unflatten([moved.get(id(leaf), leaf) for leaf in leaves], spec)


def _one_each(objs: Sequence[Any], group: Group | None, what: str) -> Group:
    group = given_group(group, what)
    if len(objs) != len(group):
        raise ValueError(f"{what} takes one object per node: {len(objs)} for the {len(group)} nodes of {group}")
    return group
