"""Places of tensors: a place is one (node, device) pair, or several of them, in order, as one: the place of a mesh. A
slot is its index as ``torch.device("node", slot)``.

Torch keeps a device's index in an int8 that wraps silently, so a proxy carries its place itself, and slots are only a
small table of names for places: slot k < 64 is node k's default device, whether that node is there yet or not. Higher
ones are given out on demand: to meshes, and to other devices and nodes from 64 on when somebody asks for their
``torch.device``, as a tensor there does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from hashlib import blake2b
from itertools import count, product
from math import prod
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, Self, TypeAlias, TypeVar, overload

import torch

from ..runtime.master.command_queue import CommandQueue
from ..runtime.master.connection import Progress
from ..runtime.master.failures import Site
from ..runtime.master.home import Home
from ..runtime.master.link import Link
from ..runtime.master.mesh_home import MeshHome
from ..runtime.master.node import Node
from ..runtime.master.route import route, waits
from ..runtime.process.signals import uninterrupted
from ..runtime.process.spelling import did_you_mean, shown
from ..runtime.protocol import commands as c
from ..runtime.protocol.allow_list import BASE, AllowList
from ..runtime.protocol.errors import DisttensorError
from . import kernel_choice
from .likeness import unlike

#: The type of the reply to a request.
R = TypeVar("R", bound=c.Message)

#: What factories use now, by thread and asyncio task: a node's number, or the place of a mesh.
current_node: ContextVar[int | MeshPlace] = ContextVar("disttensor_node", default=0)

#: The dims of meshes along which random numbers vary now, by thread and asyncio task.
varied: ContextVar[tuple[str, ...]] = ContextVar("disttensor_varied", default=())

#: The indices of a place's members, in groups: each member is in one of them.
Groups = tuple[tuple[int, ...], ...]

#: Slots that torch.device can name.
MAX_SLOTS = 128
#: Slots that are those of nodes.
NODE_SLOTS = 64


class Owner(Protocol):
    """The part of a session that its places use."""

    link: Link
    allow: AllowList  #: the operators that nodes may run
    places: Places
    transfers: Any  #: its Transfers
    check: Any  #: what ``verify=`` has called in the place of copies and collectives

    @property
    def nodes(self) -> list[Node]: ...

    def ask(
        self,
        place: Place,
        kind: type[R],
        command: Callable[[int], c.Command],
        site: Site | None,
        due: int = 0,
        what: str = "this operation",
    ) -> R: ...

    def flush(self, outbox: CommandQueue) -> None: ...


class _Place:
    """The base of places: what those of one node and of several have in common."""

    __slots__ = (
        "dead",
        "device",
        "drawing",
        "home",
        "index",
        "kernels",
        "name",
        "origin",
        "outbox",
        "record",
        "session",
        "slot",
    )

    home: Home  #: where its templates are defined
    origin: Place  #: of a twin: the place that it is one of; else itself
    slot: int  #: given out when it is first asked for, unless it is a node's own
    device: torch.device

    def _twin(self) -> Self:
        """Returns the same place for tensors that torch is to take for local ones (composites/as_cpu.py)."""
        made = type(self).__new__(type(self))
        for kind in type(self).__mro__:
            for name in getattr(kind, "__slots__", ()):
                with suppress(AttributeError):  # a slot of torch's is given out later
                    kind.__dict__[name].__set__(made, kind.__dict__[name].__get__(self))
        made.device = torch.device("cpu")
        return made

    def _init_place(
        self, session: Owner, home: Home, name: str, record: kernel_choice.KernelFacts, slot: int | None
    ) -> None:
        self.session = session
        self.home = home
        self.name = name  #: "cpu" or "cuda:1", as the node calls it
        self.index = -1 if name == "cpu" else int(name.partition(":")[2])  #: the result of get_device(): -1 for the CPU
        self.record = record
        #: the kind of kernels that run there: a simulated CUDA device computes as a CPU does
        self.kernels = record.kind
        if slot is not None:
            self.take_slot(slot)
        self.outbox = home.outbox
        # finalizers append to this list directly; it is the outbox's own for its whole life
        self.dead = self.outbox.dead
        #: the number of its generator that is in use on all of its nodes; -1 where that may be another place's
        self.drawing = -1
        self.origin = self  # type: ignore[assignment]  # a NodePlace or a MeshPlace: there is no other

    if not TYPE_CHECKING:  # to type checkers, any name would be there

        def __getattr__(self, name: str) -> Any:
            """Has a slot given out for ``slot`` or ``device``, where the place has none yet."""
            if name not in ("slot", "device"):
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            if self.origin is not self:
                return getattr(self.origin, name)
            self.session.places.give_slot(self)
            return object.__getattribute__(self, name)

    def __deepcopy__(self, memo: object) -> Self:
        """Returns the place itself: there is one object per place."""
        return self

    def take_slot(self, slot: int) -> None:
        """Names the place as a device of torch's."""
        self.slot = slot
        self.device = torch.device("node", slot)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The nodes of its members."""
        return self.outbox.ranks

    @property
    def progress(self) -> list[Progress]:
        """How far each of its nodes has come, as far as it has reported that: no message, and no wait."""
        return [self.session.nodes[rank].progress for rank in self.ranks]

    @property
    def hello(self) -> c.Hello:
        """The hello of its node; of several, of the first one."""
        return self.session.nodes[self.ranks[0]].hello

    @property
    def draws_from(self) -> str:
        """The device whose generator of torch's its nodes draw from: simulated CUDA devices draw from the CPU's."""
        return "cpu" if self.kernels == "cpu" else self.name

    def is_cuda(self) -> bool:
        return self.index >= 0

    def define(
        self,
        op: str,
        args: tuple[c.Spec, ...],
        kwargs: tuple[tuple[str, c.Spec], ...],
        outs: int,
        site: Site | None,
        foreseen: bool = False,
    ) -> int:
        """Returns the number of a template, which is defined on the node at its first use. ``foreseen``: the caller
        warns of what its calls warn of.

        Raises NotImplementedError for an operator that the node would refuse: the node itself could report that only
        long after the call.
        """
        if op not in self.home.permitted:
            self._permit(op, site)
        return self.home.define(op, args, kwargs, outs, site, foreseen)

    def _permit(self, op: str, site: Site | None) -> None:
        """Raises NotImplementedError unless its nodes may run ``op`` and have it."""
        raise NotImplementedError


class NodePlace(_Place):
    """One device of one node. One object per session and pair."""

    __slots__ = ("node", "twin")

    twin: NodePlace  #: the same place for tensors that torch is to take for local ones

    def __init__(self, session: Owner, node: int, name: str, slot: int | None) -> None:
        self.node = node
        home = session.nodes[node]  # the node that has it
        hello = home.said_hello
        record = kernel_choice.here() if hello is None else kernel_choice.record(hello, name)
        self._init_place(session, home, name, record, slot)
        self.twin = self._twin()
        self.twin.twin = self.twin

    def __repr__(self) -> str:
        return f"node {self.node} {self.name}"

    @property
    def members(self) -> tuple[NodePlace, ...]:
        """The places of single nodes that it consists of."""
        return (self,)

    @property
    def one(self) -> NodePlace:
        """The place itself, for what is for one node only: a mesh raises there."""
        return self

    @property
    def written(self) -> str:
        """The device as a script writes it: not by torch's index, unless that is the number of the node."""
        if self.slot == self.node:
            return f"'node:{self.node}'"
        is_default = self.origin is self.session.places.at(self.node)
        return f"dt.device({self.node})" if is_default else f"dt.device({self.node}, {self.name!r})"

    @property
    def incarnation(self) -> int:
        """How many workers were in the node's place before the one that is there."""
        return self.session.nodes[self.node].connection.number

    @property
    def host(self) -> NodePlace:
        """The place of the same node's CPU."""
        return self.session.places.at(self.node, "cpu")

    def _permit(self, op: str, site: Site | None) -> None:
        """Raises NotImplementedError unless the node may run ``op`` and has it.

        A node is asked once for each operator of another library. One that is missing may come later, so the next call
        asks again.
        """
        library = op.partition("::")[0]
        if not self.session.allow.allows(op):
            if library == "aten":
                raise NotImplementedError(f"{op}: nodes don't run what reaches beyond tensors")
            raise NotImplementedError(
                f"{op} is no operator of torch's, and nodes run others only where they are allowed: "
                f"init_master_worker(allow_ops=['{library}::*']), and have the nodes import the library that has it: "
                f"disttensor.run(exec, 'import {library}', node=[...])"
            )
        if f"{library}::*" not in BASE:  # every node has the libraries of BASE, as it has torch
            if route.get().recorder is not None:
                return  # nothing answers while a graph is recorded
            place = self.session.places.at(self.node)
            unusable = self.session.ask(place, c.Unusable, lambda id: c.Usable(id, (op,), ops=True), site, 1)
            if why_not := "".join(unusable.reasons):
                raise NotImplementedError(f"node {self.node}: {why_not}")
        self.home.permitted.add(op)


class MeshPlace(_Place):
    """One device of each of several nodes, in order, as one place.

    A tensor there has a shard on each, all of one shape, and a command goes to all of them. The nodes are a grid, whose
    dims have names.
    """

    __slots__ = ("_members", "_varying", "axes", "begun", "claims", "dims", "number", "seed", "takes_whole", "twin")

    twin: MeshPlace  #: the same place for tensors that torch is to take for local ones

    def __init__(
        self,
        session: Owner,
        members: Sequence[NodePlace],
        home: Home,
        slot: int,
        dims: Mapping[str, int],
        number: int,
        seed: int,
    ) -> None:
        self._members = tuple(members)
        self.claims = 0  #: how many meshes that the script has made have it, and are not closed
        self.number = number  #: of its generator that is the same on all ranks
        self.seed = seed  #: with which its generators begin
        self.dims = dict(dims)  #: the sizes of the dims, by name
        self.takes_whole = False  #: batches may come whole: a module cuts them, or the program has been warned
        #: the groups of members along each dim, those of views too, as indices of members, by name
        self.axes: dict[str, Groups] = {}
        self._varying: dict[tuple[str, ...], int] = {}  #: numbers of the generators that vary along dims
        self.begun: set[int] = set()  #: those of them that the nodes know, since all were seeded
        self._init_place(session, home, members[0].name, members[0].record, slot)
        self.name_dims(dims)
        self.outbox.where = self._gone
        self.twin = self._twin()
        self.twin.twin = self.twin

    def __repr__(self) -> str:
        dims = ", ".join(f"{name}={size}" for name, size in self.dims.items())
        return f"the mesh ({dims}) of nodes {numbers(self.ranks)} {self.name}"

    @property
    def made_by(self) -> str:
        """The call that gives the script this place."""
        device = "" if self.name == self.session.places.at(self.ranks[0]).name else f", device={self.name!r}"
        return f"dt.mesh({', '.join(f'{name}={n}' for name, n in self.dims.items())}, nodes={list(self.ranks)}{device})"

    @property
    def written(self) -> str:
        """The device as a script writes it, which has no number for it."""
        return f"{self.made_by}.device"

    @property
    def one(self) -> NoReturn:
        """Raises DisttensorError: what asks for it is for one node."""
        raise DisttensorError(
            f"this is for one node, and {self} has {len(self._members)}: "
            f"x.at({self.where(0)}) is a tensor's shard on one of them, x.shards() are all"
        )

    @property
    def members(self) -> tuple[NodePlace, ...]:
        """The places of single nodes that it consists of."""
        return self._members

    @property
    def host(self) -> MeshPlace:
        """The place of the same nodes' CPUs."""
        return self.session.places.mesh([member.host for member in self._members], self.dims)

    def name_dims(self, dims: Mapping[str, int]) -> None:
        """Has names mean dims of the members, which are numbered row by row. Raises ValueError for a name that has
        another meaning here already: a function that takes it could not know which is meant."""
        found: dict[str, Groups] = {}
        for axis, name in enumerate(dims):
            groups: dict[tuple[int, ...], list[int]] = {}
            for rank, at in enumerate(product(*map(range, dims.values()))):
                groups.setdefault(at[:axis] + at[axis + 1 :], []).append(rank)
            found[name] = tuple(map(tuple, groups.values()))
        for name, ranks in found.items():
            if self.axes.get(name, ranks) != ranks:
                raise ValueError(f"{shown(name)} is another dim of {self}; call this one otherwise")
        self.axes |= found

    def groups(self, name: str, what: str) -> Groups:
        """Returns the groups of members along a dim. Raises ValueError for an unknown name."""
        if name not in self.axes:
            dims = ", ".join(f"{known}={len(groups[0])}" for known, groups in self.axes.items())
            raise ValueError(f"{what}: {self} has no dim {shown(name)}; it has {dims}{did_you_mean(name, self.axes)}")
        return self.axes[name]

    def generator(
        self, along: tuple[str, ...], new: Callable[[], int], begun: Container[int], seed: int
    ) -> tuple[int, tuple[tuple[int, int], ...]]:
        """Returns the number of the generator that varies along dims; and, where the nodes do not know it yet (it is
        not among ``begun``), the seed that each rank begins with, by node."""
        if not along:
            return self.number, ()
        number = self._varying.get(along)
        if number is None:
            number = self._varying.setdefault(along, new())
        if number in begun:
            return number, ()
        for name in along:
            self.groups(name, "varying")
        at = self.along(along)
        return number, tuple((rank, derived(seed, along, *own)) for rank, own in zip(self.ranks, at, strict=True))

    def along(self, names: Sequence[str]) -> list[tuple[int, ...]]:
        """Returns the coordinates of each member in some dims, those of views too."""
        found: list[list[int]] = [[] for _ in self._members]
        for name in names:
            for group in self.axes[name]:
                for at, rank in enumerate(group):
                    found[rank].append(at)
        return list(map(tuple, found))

    def numbered(self, names: Sequence[str]) -> list[int]:
        """Returns the number of each member among those that differ in some dims: the first of these counts most."""
        at = self.along(names)
        numbers = {coordinates: number for number, coordinates in enumerate(sorted(set(at)))}
        return [numbers[coordinates] for coordinates in at]

    def where(self, index: int) -> str:
        """Returns the coordinates of a member, as in "dp=3, tp=0"."""
        return where(self.dims, index)

    def _gone(self, rank: int) -> str:
        """Says which of the tensors' shards are gone with a node."""
        at = self.where(self.ranks.index(rank))
        return f"  it was {at} of {self}; the other ranks are usable: x.at(...), mesh.slice(...)"

    def _permit(self, op: str, site: Site | None) -> None:
        for member in self._members:
            if op not in member.home.permitted:
                member._permit(op, site)
        self.home.permitted.add(op)


#: A place of tensors. What a node and a mesh have in common is asked of either; only NodePlace has a ``node``.
Place: TypeAlias = NodePlace | MeshPlace


def _without_gpus(names: Sequence[str]) -> str:
    """Says what has CUDA devices where there are none; "" for a node that has some."""
    if len(names) > 1:
        return ""
    return ". Without a GPU, init_master_worker(simulate_cuda=2) gives each node two CUDA devices of CPU memory"


def where(dims: Mapping[str, int], index: int) -> str:
    """Returns the coordinates of a member of a grid with these dims, as in "dp=3, tp=0"."""
    found, left = [], prod(dims.values())
    for name, size in dims.items():
        left //= size
        at, index = divmod(index, left)
        found.append(f"{name}={at}")
    return ", ".join(found)


def signed(seed: int) -> int:
    """Returns a seed of torch's range, -2**63 to 2**64 - 1, as a signed 64-bit number. Raises RuntimeError for
    others."""
    seed = int(seed)
    if not -(1 << 63) <= seed < 1 << 64:
        raise RuntimeError(f"Overflow when unpacking long long: a seed has 64 bits, and {seed} doesn't fit")
    return seed - (1 << 64) if seed >= 1 << 63 else seed


def derived(*key: object) -> int:
    """Returns a seed that depends on all of a key."""
    return int(blake2b(repr(key).encode(), digest_size=8).hexdigest(), 16) >> 1


def numbers(ranks: Sequence[int]) -> str:
    """Returns nodes' numbers in words: "0, 1, 2 and 3", or for many "0 to 63"."""
    if len(ranks) > 4 and list(ranks) == list(range(ranks[0], ranks[0] + len(ranks))):
        return f"{ranks[0]} to {ranks[-1]}"
    shown = [str(rank) for rank in ranks]
    return " and ".join(filter(None, [", ".join(shown[:-1]), shown[-1]]))


def one_session(*places: Place) -> None:
    """Raises DisttensorError for places of two sessions: a ref of one session means nothing in the other."""
    if any(place.session is not places[0].session for place in places):
        for place in places:  # all sessions but the newest have been shut down
            place.session.link.check(place.outbox)


def _key(members: Sequence[NodePlace], dims: Mapping[str, int]) -> tuple[object, ...]:
    return (*((member.node, member.name) for member in members), *dims.items())


class Places:
    """A session's places, by slot and by (node, device name)."""

    #: whether this process has ever made a mesh: then places may have to take turns with random numbers
    meshes_made = False

    def __init__(self, session: Owner, nodes: Sequence[Node]) -> None:
        self._session = session
        self._nodes: list[Node] = []
        self.lock = threading.RLock()
        self._by_pair: dict[tuple[int, str], NodePlace] = {}
        self._by_node: list[NodePlace] = []  #: the nodes' default places
        self._by_slot: dict[int, Place] = {}
        self._free = iter(range(NODE_SLOTS, MAX_SLOTS))
        self._given_back: list[int] = []  #: those of meshes that were closed
        self._closed: dict[tuple[object, ...], MeshPlace] = {}  #: these, which come back when they are made again
        self._meshes: dict[tuple[object, ...], MeshPlace] = {}
        self._places_of_meshes: list[MeshPlace] = []  #: those of closed meshes, too
        self._homes: dict[tuple[int, ...], MeshHome] = {}  #: of meshes, by their nodes
        self._below_zero = count(-1, -1)  #: numbers of meshes' templates
        self._made = count(1)  #: numbers of meshes' generators
        self.seed = torch.initial_seed()  #: that of the nodes' own generators, and of new meshes
        self._own = count()  #: of what has a seed of its own since then
        for node in nodes:
            self.extend(node)

    def extend(self, node: Node) -> None:
        """Adds a node's default device."""
        self._nodes.append(node)
        name = node.devices[1] if len(node.devices) > 1 else "cpu"
        place = self._by_pair[node.rank, name] = NodePlace(
            self._session, node.rank, name, node.rank if node.rank < NODE_SLOTS else None
        )
        self._by_node.append(place)
        if node.rank < NODE_SLOTS:
            self._by_slot[node.rank] = place

    def mesh(self, members: Sequence[NodePlace], dims: Mapping[str, int]) -> MeshPlace:
        """Returns the one place of these members, in this order, and with these dims."""
        key = _key(members, dims)
        with self.lock:
            place = self._meshes.get(key)
            if place is None:
                waits("a new mesh")
                place = self._closed.pop(key, None)
                if place is not None and place.slot not in self._by_slot:
                    self._given_back.remove(place.slot)
                    self._meshes[key] = self._by_slot[place.slot] = place
                    return place
                ranks = tuple(member.node for member in members)
                home = self._homes.get(ranks)
                if home is None:
                    nodes = [self._nodes[rank] for rank in ranks]
                    queue = self._session.link.sender.fan_out(ranks)
                    home = self._homes[ranks] = MeshHome(queue, self._below_zero, nodes)
                slot = self._slot(f"a mesh of nodes {numbers(ranks)}")
                number = next(self._made)
                place = MeshPlace(self._session, members, home, slot, dims, number, derived(self.seed, number))
                self._meshes[key] = self._by_slot[slot] = place
                self._places_of_meshes.append(place)
                Places.meshes_made = True
            return place

    def claim(self, members: Sequence[NodePlace], dims: Mapping[str, int]) -> MeshPlace:
        """Returns the place of these members for one mesh more, which ``close_mesh`` ends."""
        with self.lock:
            place = self.mesh(members, dims)
            place.claims += 1
            return place

    def seeded(self, seed: int) -> None:
        """Notes that all generators, of all places, have been seeded."""
        with self.lock:
            self.seed, self._own = seed, count()
            for mesh in self._places_of_meshes:
                mesh.seed = seed
                mesh.begun.clear()

    def begin_anew(self, place: MeshPlace, seed: int) -> None:
        """Notes that the generators of a mesh begin with a seed, as far as they do not get states after that."""
        with self.lock:
            place.seed = seed
            place.begun.clear()
            place.drawing = -1

    def drawn_along(self, place: Place) -> list[tuple[str, ...]]:
        """Returns the ways in which the numbers of a place have varied since all generators were seeded: the dims, for
        each of its generators that have drawn, and none for the one that is the same on all ranks."""
        # only a mesh has generators that vary along dims
        if not isinstance(place, MeshPlace):
            return [()]
        with self.lock:
            return [(), *(along for along, number in place._varying.items() if number in place.begun)]

    def own_seed(self) -> int:
        """Returns a seed for something that draws from a generator of its own: another one each time, and the same ones
        in the same order after the same ``torch.manual_seed``."""
        with self.lock:
            return derived(self.seed, -1, next(self._own))

    def draw(self, place: Place) -> None:
        """Puts the generator of a place in use on its nodes, or in the recording under way; to be called before a
        command that draws random numbers.

        Each place has generators of its own on each of its nodes, which are swapped where another place has drawn last.
        A mesh has several: the one that is the same on all ranks, and one for each way in which they may vary.

        Raises ValueError for a mesh without a dim along which numbers are to vary.
        """
        recorder = route.get().recorder
        if recorder is not None:
            recorder.draw(place.origin)
        elif self.with_meshes:
            self.use(place.origin)

    def draw_on(self, node: int) -> None:
        """Does what ``draw`` does for all places of a node: a command may draw from any of their generators."""
        if self.with_meshes or route.get().recorder is not None:
            for place in self.of_node(node):
                self.draw(place)

    @contextmanager
    def turn(self, place: Place) -> Iterator[None]:
        """Has the generator of a place in use until the commands that draw are queued: no other thread puts another one
        in use meanwhile."""
        with self.lock:
            self.draw(place)
            yield

    @property
    def with_meshes(self) -> bool:
        """Returns whether the session has ever had a mesh, so that places take turns with random numbers."""
        return bool(self._places_of_meshes)

    @uninterrupted
    def use(self, place: Place) -> None:
        """Puts the generator of a place in use on its nodes, as ``draw`` does outside of recordings."""
        number, seeds = self.generator(place)
        streams = route.get().streams
        if any(rank in streams for rank in place.ranks):
            raise NotImplementedError(
                f"random numbers of {place} on a stream of its own, where there are meshes: their generators are "
                "swapped in the order of the default streams"
            )
        if place.drawing == number and not seeds:
            return
        with self.lock:
            self.in_use(place, number, bool(seeds))
            place.outbox.add(self.swap(place, number, seeds))

    def generator(
        self, place: Place, begun: Container[int] | None = None, seed: int | None = None
    ) -> tuple[int, tuple[tuple[int, int], ...]]:
        """Returns the number of the generator from which a place draws now; and, where its nodes do not know that yet,
        the seed that each begins with. ``begun``: the generators that they know, if not those of now."""
        # a node has one generator, which its number 0 stands for
        if not isinstance(place, MeshPlace):
            return 0, ()
        known = place.begun if begun is None else begun
        return place.generator(varied.get(), lambda: next(self._made), known, place.seed if seed is None else seed)

    def swap(self, place: Place, number: int, seeds: tuple[tuple[int, int], ...], seed: int | None = None) -> c.Swap:
        """Returns the command that puts a generator of a place in use. ``seed``: of all, if not that of now."""
        if seed is None:
            # a mesh may have been seeded by itself
            seed = place.seed if isinstance(place, MeshPlace) else self.seed
        return c.Swap(number, place.name, signed(seed), seeds)

    def in_use(self, place: Place, number: int, begins: bool) -> None:
        """Notes that this generator of a place is in use now, and no other of its nodes; and whether it has begun with
        seeds."""
        # a node's own generator has begun when it started
        if begins and isinstance(place, MeshPlace):
            place.begun.add(number)
        for other in [*self._by_pair.values(), *self._places_of_meshes]:
            if other.draws_from == place.draws_from and not set(other.ranks).isdisjoint(place.ranks):
                other.drawing = -1
        place.drawing = number

    def begin_again(self, node: Node) -> list[c.Command]:
        """Notes that another worker is in a node's place: its generators begin with their seeds. Returns the commands
        by which they do. The caller holds the lock.

        Raises DisttensorError for a worker that is unlike the one before it.
        """
        rank, hello = node.rank, node.hello
        former = node.former[0].hello  # the first of all, so that none is a little less than the one before it
        if former is not None and (why := unlike(former, hello)):
            raise DisttensorError(f"the process on {hello.host} can't be in the place of node {rank}: {why}")
        mine, meshes = self.of_node(rank), [mesh for mesh in self._places_of_meshes if rank in mesh.ranks]
        for each in (*mine, *meshes):
            each.home.permitted.clear()
            each.drawing = -1
        seeds: list[c.Command] = [c.Seed(signed(self.seed), True)]
        for mesh in meshes:
            for along, number in mesh._varying.items():
                if number in mesh.begun:
                    every = mesh.generator(along, self._made.__next__, (), mesh.seed)[1]
                    seeds.append(self.swap(mesh, number, tuple(each for each in every if each[0] == rank)))
        return seeds

    def close_mesh(self, place: MeshPlace) -> None:
        """Ends one mesh's claim to its place. The last one gives the slot back: the place's tensors stay as they are,
        and new ones can't be made there."""
        with self.lock:
            place.claims -= 1
            key = _key(place.members, place.dims)
            if place.claims <= 0 and self._meshes.pop(key, None) is not None:
                del self._by_slot[place.slot]
                self._given_back.append(place.slot)
                self._closed[key] = place

    def of_node(self, node: int) -> list[NodePlace]:
        """Returns the places of one node that there are: those of devices that somebody has named."""
        return [place for (rank, _), place in list(self._by_pair.items()) if rank == node]

    @property
    def meshes(self) -> list[MeshPlace]:
        """The places of meshes that are not closed, the oldest first."""
        return list(self._meshes.values())

    def coordinates(self, rank: int) -> str:
        """Says which rank of the largest mesh a node is, as in "dp=3 of the mesh (dp=4) of nodes 0 to 3 cpu"; "" for
        one that is in none."""
        within = [mesh for mesh in self.meshes if rank in mesh.ranks]
        if not within:
            return ""
        largest = max(within, key=lambda mesh: len(mesh.ranks))
        return f"{largest.where(largest.ranks.index(rank))} of {largest}"

    @property
    def every(self) -> list[Place]:
        """The places of nodes that there are, and those of meshes that are not closed."""
        return [*self._by_pair.values(), *self._meshes.values()]

    def give_slot(self, place: Place) -> None:
        """Gives a place a slot, if it has none. Raises DisttensorError where none is left."""
        with self.lock:
            if place not in self._by_slot.values():  # another thread may have asked
                slot = self._slot(str(place))
                place.take_slot(slot)
                self._by_slot[slot] = place

    def _slot(self, what: str) -> int:
        slot = next(self._free, None)
        if slot is None and self._given_back:  # the oldest: who still has tensors there is to notice
            slot = self._given_back.pop(0)
        if slot is None:
            held = "; ".join(str(place) for slot, place in sorted(self._by_slot.items()) if slot >= NODE_SLOTS)
            raise DisttensorError(
                f"all {MAX_SLOTS} slots of torch.device('node', slot) are in use: {NODE_SLOTS} are those of nodes 0 to "
                f"{NODE_SLOTS - 1}, and none is left for {what}. These have the others (mesh.close() gives a mesh's "
                f"back): {held}"
            )
        return slot

    def here(self) -> Place:
        """Returns the current place: a node's default device, or a mesh.

        Raises RuntimeError for a mesh that is closed, or of a session that was shut down.
        """
        found = current_node.get()
        # a node is current by its number, which stays when its session ends; a mesh is one session's
        if not isinstance(found, MeshPlace):
            return self._by_node[found]
        if found.session is not self._session:
            raise RuntimeError(
                f"the current device is {found} of a session that was shut down; torch.node.set_device(0) changes that"
            )
        return self.of(found.device)

    def current(self, target: int | str | torch.device) -> int | MeshPlace:
        """Returns what ``current_node`` holds for a node's number, a device or its index. Raises as ``at``."""
        if isinstance(target, int) and not isinstance(target, bool) and target >= len(self._nodes):
            found = self._by_slot.get(target)
            # indices beyond the nodes' numbers are those of meshes, and of further devices
            if isinstance(found, MeshPlace):
                return found
            if target >= NODE_SLOTS:
                raise ValueError(
                    f"node {target} does not exist, and no mesh has the index {target} either: {self._there()}; "
                    f"mesh.device.index, from {NODE_SLOTS} on, is a mesh's"
                )
        found = self.named(target) if isinstance(target, (str, torch.device)) else self.at(target)
        # a node is current by its number, a mesh by its place
        return found if isinstance(found, MeshPlace) else found.node

    @overload
    def at(self, node: int, device: str | int | torch.device | None = None) -> NodePlace: ...

    @overload
    def at(self, node: int | str | torch.device, device: str | int | torch.device | None = None) -> Place: ...

    def at(self, node: int | str | torch.device, device: str | int | torch.device | None = None) -> Place:
        """Returns the place of a node's device.

        ``device`` is "cpu", "cuda", "cuda:1", 1 (cuda:1), -1 (cpu), or None: the node's default device, or the one that
        ``node`` itself names ("node:1"). Raises TypeError for a ``node`` of another type, ValueError for a node that
        does not exist, RuntimeError for a device that the node doesn't have; the message names what there is.
        """
        if isinstance(node, (str, torch.device)):
            named = self.named(node)
            if device is None:
                return named
            node = named.one.node
        if isinstance(node, bool) or not isinstance(node, int):
            raise TypeError(f"a node is an integer or a text such as 'node:1', not {shown(node)}")
        if not 0 <= node < len(self._nodes):
            n = len(self._nodes)
            raise ValueError(
                f"node {node} does not exist; there {f'are {n} nodes, 0 to {n - 1}' if n > 1 else 'is 1 node, 0'}"
            )
        if device is None:
            return self._by_node[node]
        name = self._name(device)
        if name not in (names := self._nodes[node].devices):
            raise RuntimeError(f"node {node} has no device {name}; it has {', '.join(names)}{_without_gpus(names)}")
        place = self._by_pair.get((node, name))
        if place is None:
            with self.lock:
                place = self._by_pair.setdefault((node, name), NodePlace(self._session, node, name, None))
        return place

    @staticmethod
    def _name(device: str | int | torch.device) -> str:
        if isinstance(device, int):
            return "cpu" if device < 0 else f"cuda:{device}"
        device = torch.device(device)
        if device.type == "cpu":
            return "cpu"
        if device.type == "cuda":
            return f"cuda:{device.index or 0}"
        raise ValueError(f"a node's device is 'cpu' or 'cuda:k', not {str(device)!r}")

    def named(self, device: str | torch.device) -> Place:
        """Returns the place that "node:1" names.

        Raises RuntimeError as ``of`` does, TypeError for a text that names no device, ValueError for a local device.
        """
        try:
            found = torch.device(device)
        except RuntimeError:
            raise TypeError(f"a node is an integer or a text such as 'node:1', not {shown(device)}") from None
        if found.type != "node":
            raise ValueError(f"a node is an integer or a text such as 'node:1', not {str(device)!r}")
        return self.of(found)

    def of(self, device: torch.device) -> Place:
        """Returns the place of a device of type "node"; without an index that of the current node's default device.

        Raises RuntimeError for a slot that no place has.
        """
        slot = device.index
        if slot is None:
            return self.here()
        place = self._by_slot.get(slot)
        if place is None:
            for closed in self._closed.values():
                if closed.slot == slot:
                    raise RuntimeError(
                        f"device {str(device)!r} is closed: it was {closed}, whose close() has given it back; what "
                        f"is there stays, and {closed.made_by} has new tensors there again"
                    )
            also = "a node's other devices are named by disttensor.device(node, 'cuda:1')"
            if slot >= NODE_SLOTS:
                also = "a device of a mesh, or of dt.device(), is of the session in which it was made: make it again"
            if NODE_SLOTS <= slot < len(self._nodes):
                also = f"node {slot}'s device is disttensor.device({slot}), as its index is not the node's number"
            raise RuntimeError(f"device {str(device)!r} does not exist: {self._there()}; {also}")
        return place

    def _there(self) -> str:
        n = len(self._nodes)
        if n == 1:
            return "the session has one node, node:0"
        more = f" (from {NODE_SLOTS} on an index is given out on demand)" if n > NODE_SLOTS else ""
        return f"the session has {n} nodes, node:0 to node:{min(n, NODE_SLOTS) - 1}{more}"
