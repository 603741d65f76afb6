"""Groups of nodes, for collectives: ``new_group([0, 2])``, ``group.split(key)``. A group is a value; nodes know nothing
of it, so any number of them costs nothing, and they can overlap."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors.argument_checks import spelled
from ..session import current

#: Gives that of a node, or lists those of all, in order.
Key = Callable[[int], Hashable] | Sequence[Hashable]


@dataclass(frozen=True)
class Group:
    """Some nodes in an order. Tensors are given to a collective in that order, one per node.

    Made by ``new_group``. Two of the same nodes in the same order are equal.
    """

    nodes: tuple[int, ...]  #: their numbers
    name: str = ""  #: for people
    parts: tuple[int, ...] = ()  #: of a split's whole: which of its groups each node is in

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

    def split(self, key: Key) -> Split:
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
        numbers = {key: i for i, key in enumerate(members)}
        whole = Group(self.nodes, self.name, tuple(numbers[key] for key in keys))
        return Split({k: Group(tuple(nodes), f"{prefix}{k}") for k, nodes in members.items()}, whole)

    def levels(self, **keys: Key) -> Levels:
        """Groups in groups, from outside inwards: ``levels(host=dt.host_of, pair=lambda node: node // 2)``.

        Each name stands for a split of the groups of the name before; of the outermost, of this one. ``keys`` are as
        ``split`` takes them, of all nodes. Raises ValueError as it does, and for none at all.
        """
        return Levels(self, keys)

    def by_host(self) -> Split:
        """Groups of the nodes that are on one host, by its name."""
        return self.split(host_of)

    def __repr__(self) -> str:
        return f"<Group {f'{self.name!r} ' if self.name else ''}of nodes {', '.join(map(str, self.nodes))}>"


class Split(Mapping[Any, Group]):
    """What ``Group.split`` gives: key -> group.

    As the ``group`` of an all_reduce or a broadcast of all its nodes: within these groups first, then between them.
    """

    def __init__(self, groups: dict[Any, Group], whole: Group) -> None:
        self._groups = groups
        self.whole = whole  #: the group that was split
        prefix = f"{whole.name}/" if whole.name else ""
        #: the first nodes of all groups, which can talk for the others
        self.leaders = Group(tuple(group.nodes[0] for group in groups.values()), f"{prefix}leaders")

    @property
    def across(self) -> Split:
        """The other way: the first nodes of all groups, the second ones, and so on, by their place."""
        place = {node: i for group in self._groups.values() for i, node in enumerate(group)}
        return Group(self.whole.nodes, f"{self.whole.name or 'all'} across").split(place.__getitem__)

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


class Levels(Mapping[str, Split]):
    """What ``Group.levels`` gives: name of a level -> all its groups by their keys, those of inner levels by tuples of
    keys, from outside inwards."""

    def __init__(self, whole: Group, keys: Mapping[str, Key]) -> None:
        if not keys:
            raise ValueError("levels takes a key for each: levels(host=dt.host_of)")
        self.whole = whole
        self._levels: dict[str, Split] = {}
        paths: list[tuple[Hashable, ...]] = [()] * len(whole)
        for name, key in keys.items():
            own = [key(node) for node in whole] if callable(key) else list(key)
            if len(own) != len(whole):
                raise ValueError(f"{len(own)} keys of {name!r} for the {len(whole)} nodes of {whole}")
            paths = [(*path, its) for path, its in zip(paths, own, strict=True)]
            names = [path[0] if len(path) == 1 else path for path in paths]
            found = whole.split(names)
            prefix = f"{whole.name}/" if whole.name else ""
            groups = {k: Group(group.nodes, f"{prefix}{name} {_text(k)}") for k, group in found.items()}
            self._levels[name] = Split(groups, found.whole)

    def __getitem__(self, name: str) -> Split:
        return self._levels[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._levels)

    def __len__(self) -> int:
        return len(self._levels)

    def of(self, node: int) -> dict[str, Group]:
        """The groups that a node is in, from outside inwards, by the names of their levels. Raises ValueError."""
        return {name: split.of(node) for name, split in self._levels.items()}

    def span(self, begin: str, end: str) -> dict[Any, Split]:
        """For each group of level ``begin``, by its key, its split into groups of a level inside, ``end``.

        Raises KeyError for a name that is none, ValueError unless ``end`` is inside of ``begin``.
        """
        outer, inner = self._levels[begin], self._levels[end]
        if list(self._levels).index(begin) >= list(self._levels).index(end):
            raise ValueError(f"level {end!r} is not inside of {begin!r}; from outside inwards: {', '.join(self)}")
        found = {}
        for key, group in outer.items():
            keys = [next(k for k, one in inner.items() if node in one) for node in group]
            split = group.split(keys)
            found[key] = Split({k: inner[k] for k in split}, split.whole)
        return found

    def __str__(self) -> str:
        lines = [str(self.whole)]

        def add(group: Group, names: list[str], depth: int) -> None:
            for inner in self._levels[names[0]].values() if names else ():
                if inner.nodes[0] in group:
                    lines.append(f"{'  ' * depth}{inner}")
                    add(inner, names[1:], depth + 1)

        add(self.whole, list(self._levels), 1)
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"<Levels {', '.join(self)} of {self.whole}>"


def _text(key: Any) -> str:
    return ", ".join(map(str, key)) if isinstance(key, tuple) else str(key)


def host_of(node: int) -> str:
    """The name of a node's host: a key for ``split`` and ``levels``. Raises ValueError for a node that is none."""
    hello = current.session().link.hellos.get(node)
    if hello is None:
        raise ValueError(f"node {node} does not exist")
    return hello.host


@spelled
def new_group(nodes: Iterable[int] | None = None, name: str = "") -> Group:
    """A group of these nodes (default: all) in this order.

    Raises ValueError for a node that does not exist or is named twice, or for no node at all.
    """
    session = current.session()
    if isinstance(nodes, str) or not (nodes is None or isinstance(nodes, Iterable)):
        raise TypeError(f"a group is made of a list of nodes, such as [0, 1], not of {nodes!r}")
    numbers = range(len(session.states))
    chosen = tuple(numbers) if nodes is None else tuple(session.places.at(node).node for node in nodes)
    if not chosen or len(set(chosen)) < len(chosen):
        raise ValueError(f"a group has at least one node, and each once: {list(chosen)}")
    return Group(chosen, name)
