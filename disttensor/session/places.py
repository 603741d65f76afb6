"""Where tensors live: a place is one (node, device) pair; a slot is its index as ``torch.device("node", slot)``.

Torch keeps a device's index in an int8 that wraps silently, so a proxy carries its place itself, and slots are only a
small table of names for places: slot k < N is node k's default device, higher ones are given out on demand. N counts
the nodes that may still join, too.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from contextvars import ContextVar
from itertools import count
from typing import Protocol, TypeVar

import torch

from ..runtime.master.failures import Site
from ..runtime.master.link import Link
from ..runtime.master.outbox import Outbox
from ..runtime.master.route import route
from ..runtime.protocol import commands as c
from ..runtime.protocol.allow_list import BASE, AllowList
from ..runtime.protocol.errors import DisttensorError
from . import kernel_choice

R = TypeVar("R", c.Answer, c.Shapes, c.Result, c.Done)

#: The node that factories use now, by thread and asyncio task.
current_node: ContextVar[int] = ContextVar("disttensor_node", default=0)

#: Slots that torch.device can name.
MAX_SLOTS = 128
#: Templates between two clean-ups of a node's table.
GENERATION = 32_768


class Owner(Protocol):
    """What places know of the session that they belong to."""

    link: Link
    allow: AllowList  #: operators that nodes run
    states: list[NodeState]
    places: Places

    def ask(self, place: Place, kind: type[R], command: Callable[[int], c.Command], site: Site | None) -> R: ...

    def flush(self, outbox: Outbox) -> None: ...


class NodeState:
    """The master's account of one node's refs and templates."""

    def __init__(self, session: Owner, rank: int, outbox: Outbox) -> None:
        self.session = session
        self.rank = rank
        self.outbox = outbox
        self.lock = threading.RLock()
        self.templates: dict[object, int] = {}
        self.defined: dict[int, c.Define] = {}  #: what nodes know of templates, for graphs
        self._permitted: set[str] = set()  #: operators that the node has
        self.generation = 0  #: of templates; raised by ``turn``
        self._next = count()
        self._generations = [0, 0]

    def define(
        self, op: str, args: tuple[c.Spec, ...], kwargs: tuple[tuple[str, c.Spec], ...], outs: int, site: Site | None
    ) -> int:
        """The number of a template, defined on the node at first use.

        The table is bounded: after a generation of new templates older ones are dropped. Plans that name them were
        dropped one generation before (``full`` says when), so no thread can still be about to use one.
        """
        if op not in self._permitted:
            self._permit(op, site)
        key = (op, exact(args), exact(kwargs), outs)
        with self.lock:
            number = self.templates.get(key)
            if number is None:
                number = next(self._next)
                self.defined[number] = define = c.Define(number, op, args, kwargs, outs)
                self.outbox.add(define, site)
                self.templates[key] = number
            return number

    def _permit(self, op: str, site: Site | None) -> None:
        """Raises NotImplementedError for what the node would refuse, which is told long after the call.

        Which operators of other libraries a node has is asked once for each; one that is missing may come later.
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
        if f"{library}::*" not in BASE:  # what every node has, as it has torch
            if route.get().recorder is not None:
                return  # nothing answers while a graph is recorded
            place = self.session.places.at(self.rank)
            why_not = self.session.ask(place, c.Answer, lambda id: c.Usable(id, (op,), ops=True), site).value
            if why_not:
                raise NotImplementedError(f"node {self.rank}: {why_not}")
        self._permitted.add(op)

    @property
    def full(self) -> bool:
        return len(self.templates) >= GENERATION

    def turn(self) -> None:
        """Starts a generation; the one before the last is dropped. The caller has dropped all plans."""
        with self.lock:
            self.templates.clear()
            self.generation += 1
            self._generations = [self._generations[1], next(self._next)]
            self.defined = {n: d for n, d in self.defined.items() if n >= self._generations[0]}
            self.outbox.add(c.Forget(self._generations[0]))


def exact(value: object) -> object:
    """A dictionary key that tells 1, 1.0 and True, 0.0 and -0.0 apart, and NaN equal to itself."""
    if isinstance(value, tuple):
        return tuple(map(exact, value))
    if isinstance(value, c.Items):
        return ("items", *map(exact, value.items))
    if isinstance(value, float):
        return (float, value.hex())
    if isinstance(value, (complex, c.Complex)):
        return (type(value), value.real.hex(), value.imag.hex())
    return (type(value), value)


class Place:
    """One device of one node. One object per session and pair."""

    __slots__ = (
        "dead",
        "device",
        "index",
        "kernels",
        "name",
        "node",
        "outbox",
        "record",
        "session",
        "slot",
        "state",
        "twin",
    )

    def __init__(self, session: Owner, node: int, name: str, slot: int) -> None:
        self.session = session
        self.node = node
        self.name = name  #: "cpu" or "cuda:1", as the node calls it
        self.index = -1 if name == "cpu" else int(name.partition(":")[2])  #: what get_device() says
        #: which kernels run there: a simulated CUDA device computes as a CPU does
        self.record = (
            kernel_choice.record(session.link.hellos[node], name)
            if node in session.link.hellos
            else kernel_choice.here()
        )
        self.kernels = self.record.kind
        self.slot = slot
        self.device = torch.device("node", slot)
        self.state = session.states[node]
        self.outbox = self.state.outbox
        # finalizers append to this list directly; it is the outbox's own for its whole life
        self.dead = self.outbox.dead
        #: the same place for tensors that torch is to take for local ones (composites/as_cpu.py)
        self.twin = copy.copy(self)
        self.twin.device = torch.device("cpu")

    def __repr__(self) -> str:
        return f"node {self.node} {self.name}"

    def is_cuda(self) -> bool:
        return self.index >= 0


def one_session(*places: Place) -> None:
    """Raises DisttensorError for places of two sessions, for a ref of one means nothing in the other."""
    if any(place.session is not places[0].session for place in places):
        for place in places:  # all but the newest have been shut down
            place.session.link.check(place.outbox)


class Places:
    """A session's slots."""

    def __init__(self, session: Owner, devices: list[tuple[str, ...]], most: int = 0) -> None:
        """``devices``: for each node the names of its devices, "cpu" first. ``most``: how many nodes there may be
        later. Raises DisttensorError for too many."""
        most = max(most, len(devices))
        if most > MAX_SLOTS:
            raise DisttensorError(
                f"{most} nodes are more than torch.device can name ({MAX_SLOTS}: its index is an int8)"
            )
        self._session = session
        self._devices = devices
        self.lock = threading.RLock()
        self._by_pair: dict[tuple[int, str], Place] = {}
        self.by_slot: dict[int, Place] = {}
        self._free = count(most)  #: slots of devices that are no node's default
        for node in range(len(devices)):
            self._begin(node)

    def extend(self, devices: tuple[str, ...]) -> None:
        """One more node, with these devices. There were to be so many (``most``)."""
        self._devices.append(devices)
        self._begin(len(self._devices) - 1)

    def _begin(self, node: int) -> None:
        names = self._devices[node]
        self._add(node, names[1] if len(names) > 1 else "cpu", node)

    def _add(self, node: int, name: str, slot: int) -> Place:
        if slot >= MAX_SLOTS:
            raise DisttensorError(
                f"all {MAX_SLOTS} slots of torch.device('node', slot) are in use; none is left for {name}"
            )
        place = Place(self._session, node, name, slot)
        self.by_slot[slot] = place
        self._by_pair[node, name] = place
        return place

    def at(self, node: int | str | torch.device, device: str | int | torch.device | None = None) -> Place:
        """The place of a node's device: "cpu", "cuda", "cuda:1", 1 (cuda:1), -1 (cpu), None (its default, or the one
        that ``node`` itself names: "node:1").

        Raises ValueError or RuntimeError naming what there is.
        """
        if isinstance(node, (str, torch.device)):
            named = self.named(node)
            if device is None:
                return named
            node = named.node
        if isinstance(node, bool) or not isinstance(node, int):
            raise TypeError(f"a node is an integer or a text such as 'node:1', not {node!r}")
        if not 0 <= node < len(self._devices):
            n = len(self._devices)
            raise ValueError(
                f"node {node} does not exist; there {f'are {n} nodes, 0 to {n - 1}' if n > 1 else 'is 1 node, 0'}"
            )
        if device is None:
            return self.by_slot[node]
        name = self._name(device)
        if name not in self._devices[node]:
            raise RuntimeError(f"node {node} has no device {name}; it has {', '.join(self._devices[node])}")
        place = self._by_pair.get((node, name))
        if place is None:
            with self.lock:
                place = self._by_pair.get((node, name)) or self._add(node, name, next(self._free))
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
        """The place that "node:1" names. Raises RuntimeError as ``of`` does, TypeError for what is no device,
        ValueError for a local one."""
        try:
            found = torch.device(device)
        except RuntimeError:
            raise TypeError(f"a node is an integer or a text such as 'node:1', not {device!r}") from None
        if found.type != "node":
            raise ValueError(f"a node is an integer or a text such as 'node:1', not {str(device)!r}")
        return self.of(found)

    def of(self, device: torch.device) -> Place:
        """The place that a device of type "node" names. Raises RuntimeError for a slot that is no place's."""
        slot = device.index
        if slot is None:
            return self.by_slot[current_node.get()]
        place = self.by_slot.get(slot)
        if place is None:
            raise RuntimeError(
                f"device {str(device)!r} does not exist: {self._there()}; "
                "a node's other devices are named by disttensor.device(node, 'cuda:1')"
            )
        return place

    def _there(self) -> str:
        n = len(self._devices)
        return f"the session has {n} nodes, node:0 to node:{n - 1}" if n > 1 else "the session has one node, node:0"
