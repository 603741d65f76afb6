"""Groups of nodes for collectives: ``new_group([0, 2])``, ``group.split(key)``. A group is a value that nodes know
nothing of, so any number of groups costs nothing, and groups can overlap."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors.argument_checks import spelled
from ..runtime.process.spelling import shown
from ..runtime.protocol.commands import Hello
from ..session import current

#: A function from a node's number to its key, or a list of the keys of all nodes of a group, in order.
Key = Callable[[int], Hashable] | Sequence[Hashable]


@dataclass(frozen=True)
class Group:
    """An ordered set of nodes. Tensors are given to a collective in that order, one per node.

    ``new_group`` makes groups. Two groups of the same nodes in the same order are equal, whatever their names.
    """

    nodes: tuple[int, ...]  #: the numbers of the nodes
    name: str = ""  #: a name for people to read
    parts: tuple[int, ...] = ()  #: for the group that was split (``Split.whole``): the part that each node is in

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
        """Returns the position of a node in the group, from 0. Raises ValueError for a node that is not in it."""
        try:
            return self.nodes.index(node)
        except ValueError:
            raise ValueError(f"node {node} is not in {self}") from None

    def split(self, key: Key) -> Split:
        """Returns a Split: for each key, the group of the nodes that have it.

        ``key`` is a function from a node's number to its key, or a list of the keys of all nodes, in order. Within a
        group nodes keep their order; groups are in the order in which their keys come first. Raises ValueError for a
        list of another length.

            >>> dt.collectives.new_group().split(lambda node: node % 2)     # of two nodes
            <Split {0: <Group '0' of nodes 0>, 1: <Group '1' of nodes 1>}>
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
        """Returns groups in groups, from outside inwards: ``levels(host=host_of, pair=lambda node: node // 2)``.

        Each name stands for a split of the groups of the name before it; the first one for a split of this group.
        ``keys`` are as ``split`` takes them, for all nodes. Without any there are two levels: ``host``, and in it
        ``cuda``, which sets those apart that have no GPU; the others can use each other's memory by CUDA IPC. Raises
        ValueError as ``split`` does.
        """
        return Levels(self, keys or {"host": host_of, "cuda": _has_cuda})

    def by_host(self) -> Split:
        """Returns a Split by host: for each host's name, the group of the nodes on it."""
        return self.split(host_of)

    def by_numa(self) -> Split:
        """Returns a Split by NUMA node: for each host's each, the group of the nodes whose default device is there."""
        return self.split(numa_of)

    def by_pcie_root(self) -> Split:
        """Returns a Split by PCIe root: for each host's each, the group of the nodes whose first GPU is attached to
        it."""
        return self.split(pcie_root_of)

    def __repr__(self) -> str:
        return f"<Group {f'{self.name!r} ' if self.name else ''}of nodes {', '.join(map(str, self.nodes))}>"


class Split(Mapping[Any, Group]):
    """A mapping from keys to disjoint groups, returned by ``Group.split``.

    A split can be the ``group`` of an all_reduce or a broadcast over all its nodes. An all_reduce then goes within
    these groups first, then between them, so that as little as possible crosses between two groups.
    """

    def __init__(self, groups: dict[Any, Group], whole: Group) -> None:
        self._groups = groups
        self.whole = whole  #: the group that was split
        prefix = f"{whole.name}/" if whole.name else ""
        #: the group of the first nodes of all groups, which can act for the others
        self.leaders = Group(tuple(group.nodes[0] for group in groups.values()), f"{prefix}leaders")

    @property
    def across(self) -> Split:
        """The split across the groups: by position, the first nodes of all groups, the second ones, and so on."""
        place = {node: i for group in self._groups.values() for i, node in enumerate(group)}
        return Group(self.whole.nodes, f"{self.whole.name or 'all'} across").split(place.__getitem__)

    def __getitem__(self, key: Any) -> Group:
        return self._groups[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._groups)

    def __len__(self) -> int:
        return len(self._groups)

    def of(self, node: int) -> Group:
        """Returns the group that a node is in. Raises ValueError for a node that is in none."""
        for group in self._groups.values():
            if node in group:
                return group
        raise ValueError(f"node {node} is in none of {list(self._groups.values())}")

    def __repr__(self) -> str:
        return f"<Split {self._groups}>"


class Levels(Mapping[str, Split]):
    """A mapping from a level's name to a Split with all its groups, returned by ``Group.levels``.

    The keys of inner levels' groups are tuples of keys, from outside inwards.
    """

    def __init__(self, whole: Group, keys: Mapping[str, Key]) -> None:
        self.whole = whole
        self._levels: dict[str, Split] = {}
        paths: list[tuple[Hashable, ...]] = [()] * len(whole)
        for name, key in keys.items():
            own = [key(node) for node in whole] if callable(key) else list(key)
            if len(own) != len(whole):
                raise ValueError(f"{len(own)} keys of {name!r} for the {len(whole)} nodes of {shown(whole)}")
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
        """Returns the groups that a node is in, from outside inwards, by the names of their levels.

        Raises ValueError for a node that is in none.
        """
        return {name: split.of(node) for name, split in self._levels.items()}

    def span(self, begin: str, end: str) -> dict[Any, Split]:
        """Returns, for the key of each group of level ``begin``, the split of that group into its groups of level
        ``end``.

        Raises KeyError for a name that is no level's, ValueError unless ``end`` is inside of ``begin``.
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
    """Returns the name of a node's host, as a key for ``split`` and ``levels``. Does not wait.

    Raises ValueError for a node that does not exist.
    """
    return _hello(node).host


def numa_of(node: int) -> str:
    """Returns host and NUMA node of a node's default device, such as "left numa1", as a key for ``split`` and
    ``levels``.

    It is where the node's first GPU is; of a node without GPUs, where the CPUs are that it may run on. The host's name
    alone stands for those of which the kernel says no NUMA node, or several. Read when the node started; does not wait.
    Raises ValueError for a node that does not exist.
    """
    hello = _hello(node)
    return hello.host if hello.numa < 0 else f"{hello.host} numa{hello.numa}"


def pcie_root_of(node: int) -> str:
    """Returns host and PCIe root of a node's first GPU, such as "left pci0000:3a", as a key for ``split`` and
    ``levels``.

    The host's name alone stands for nodes without a GPU. Read when the node started; does not wait. Raises ValueError
    for a node that does not exist.
    """
    hello = _hello(node)
    return f"{hello.host} {hello.pcie_root}".rstrip()


def _hello(node: int) -> Hello:
    nodes = current.session().nodes
    if not 0 <= node < len(nodes) or nodes[node].said_hello is None:
        raise ValueError(f"node {node} does not exist")
    return nodes[node].hello


def _has_cuda(node: int) -> bool:
    return len(current.session().nodes[node].devices) > 1


@spelled
def new_group(nodes: Iterable[int] | None = None, name: str = "") -> Group:
    """Returns a group of these nodes (default: all) in this order. Nothing is sent.

    Raises TypeError for ``nodes`` that are no list, ValueError for a node that does not exist or is named twice, or for
    no node at all.
    """
    session = current.session()
    if isinstance(nodes, str) or not (nodes is None or isinstance(nodes, Iterable)):
        raise TypeError(f"a group is made of a list of nodes, such as [0, 1], not of {shown(nodes)}")
    numbers = range(len(session.nodes))
    chosen = tuple(numbers) if nodes is None else tuple(session.places.at(node).one.node for node in nodes)
    if not chosen or len(set(chosen)) < len(chosen):
        raise ValueError(f"a group has at least one node, and each once: {list(chosen)}")
    return Group(chosen, name)


def given_group(group: Any, what: str) -> Group:
    """Returns ``group``, or one of all nodes for None. Raises TypeError for what is no group."""
    if group is None:
        return new_group()
    if not isinstance(group, Group):
        raise TypeError(f"{what}: group is what disttensor.collectives.new_group([0, 1]) gives, not {shown(group)}")
    return group
