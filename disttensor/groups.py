"""Groups of nodes, for collectives: ``new_group([0, 2])``, ``group.split(key)``. A group is a value; nodes know nothing
of it, so any number of them costs nothing, and they can overlap."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from . import state


@dataclass(frozen=True)
class Group:
    """Some nodes in an order. Tensors are given to a collective in that order, one per node.

    Made by ``new_group``. Two of the same nodes in the same order are equal.
    """

    nodes: tuple[int, ...]  #: their numbers
    name: str = ""  #: for people

    def __len__(self) -> int:
        return len(self.nodes)

    def __iter__(self) -> Iterator[int]:
        return iter(self.nodes)

    def __contains__(self, node: object) -> bool:
        return node in self.nodes

    def __eq__(self, other: object) -> bool:
        return self.nodes == other.nodes if isinstance(other, Group) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.nodes)

    def rank(self, node: int) -> int:
        """The place of a node in the group. Raises ValueError for one that is not in it."""
        try:
            return self.nodes.index(node)
        except ValueError:
            raise ValueError(f"node {node} is not in {self}") from None

    def split(self, key: Callable[[int], Hashable] | Sequence[Hashable]) -> Split:
        """Groups of the nodes with equal keys. ``key`` gives that of a node, or lists those of all, in order.

        Within a group nodes keep their order; groups are in the order in which their keys come first. Raises
        ValueError for a list of another length.
        """
        keys = [key(node) for node in self.nodes] if callable(key) else list(key)
        if len(keys) != len(self.nodes):
            raise ValueError(f"{len(keys)} keys for the {len(self.nodes)} nodes of {self}")
        members: dict[Hashable, list[int]] = {}
        for node, its in zip(self.nodes, keys, strict=True):
            members.setdefault(its, []).append(node)
        prefix = f"{self.name}/" if self.name else ""
        return Split({k: Group(tuple(nodes), f"{prefix}{k}") for k, nodes in members.items()}, prefix)

    def by_host(self) -> Split:
        """Groups of the nodes that are on one host, by its name."""
        hellos = state.session().link.hellos
        return self.split(lambda node: hellos[node].host)

    def __repr__(self) -> str:
        return f"<Group {f'{self.name!r} ' if self.name else ''}of nodes {', '.join(map(str, self.nodes))}>"


class Split(Mapping[Any, Group]):
    """What ``Group.split`` gives: key -> group, and the group of their first nodes, which can talk for the others."""

    def __init__(self, groups: dict[Any, Group], prefix: str = "") -> None:
        self._groups = groups
        self.leaders = Group(tuple(group.nodes[0] for group in groups.values()), f"{prefix}leaders")

    def __getitem__(self, key: Any) -> Group:
        return self._groups[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._groups)

    def __len__(self) -> int:
        return len(self._groups)

    def of(self, node: int) -> Group:
        """The group that a node is in. Raises ValueError for one that is in none."""
        for group in self._groups.values():
            if node in group:
                return group
        raise ValueError(f"node {node} is in none of {list(self._groups.values())}")

    def __repr__(self) -> str:
        return f"<Split {self._groups}>"


def new_group(nodes: Iterable[int] | None = None, name: str = "") -> Group:
    """A group of these nodes (default: all) in this order.

    Raises ValueError for a node that does not exist or is named twice, or for no node at all.
    """
    there = state.session().states
    chosen = tuple(range(len(there))) if nodes is None else tuple(nodes)
    for node in chosen:
        if isinstance(node, bool) or not isinstance(node, int):
            raise TypeError(f"a node is an integer, not {node!r}")
        if not 0 <= node < len(there):
            raise ValueError(f"node {node} does not exist; there are {len(there)} nodes, 0 to {len(there) - 1}")
    if not chosen or len(set(chosen)) < len(chosen):
        raise ValueError(f"a group has at least one node, and each once: {list(chosen)}")
    return Group(chosen, name)
