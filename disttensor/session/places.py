"""Places of tensors: a place is one (node, device) pair; a slot is its index as ``torch.device("node", slot)``.

Torch keeps a device's index in an int8 that wraps silently, so a proxy carries its place itself, and slots are only a
small table of names for places: slot k < N is node k's default device, higher ones are given out on demand. N counts
the nodes that may still join, too.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from itertools import count
from typing import Protocol, TypeVar

import torch

from ..runtime.master.failures import Site
from ..runtime.master.link import Link
from ..runtime.master.node import Node
from ..runtime.master.outbox import Outbox
from ..runtime.master.route import route
from ..runtime.protocol import commands as c
from ..runtime.protocol.allow_list import BASE, AllowList
from ..runtime.protocol.errors import DisttensorError
from . import kernel_choice

#: The type of the reply to a request.
R = TypeVar("R", bound=c.Message)

#: The node that factories use now, by thread and asyncio task.
current_node: ContextVar[int] = ContextVar("disttensor_node", default=0)

#: Slots that torch.device can name.
MAX_SLOTS = 128


class Owner(Protocol):
    """The part of a session that its places use."""

    link: Link
    allow: AllowList  #: the operators that nodes may run
    places: Places

    @property
    def nodes(self) -> list[Node]: ...

    def ask(
        self, place: Place, kind: type[R], command: Callable[[int], c.Command], site: Site | None, due: int = 0
    ) -> R: ...

    def flush(self, outbox: Outbox) -> None: ...


class Place:
    """One device of one node. One object per session and pair."""

    __slots__ = (
        "dead",
        "device",
        "home",
        "index",
        "kernels",
        "name",
        "node",
        "outbox",
        "record",
        "session",
        "slot",
        "twin",
    )

    def __init__(self, session: Owner, node: int, name: str, slot: int) -> None:
        self.session = session
        self.node = node
        self.name = name  #: "cpu" or "cuda:1", as the node calls it
        self.index = -1 if name == "cpu" else int(name.partition(":")[2])  #: the result of get_device(): -1 for the CPU
        self.home = session.nodes[node]  #: the node that has it
        hello = self.home.said_hello
        self.record = kernel_choice.here() if hello is None else kernel_choice.record(hello, name)
        #: the kind of kernels that run there: a simulated CUDA device computes as a CPU does
        self.kernels = self.record.kind
        self.slot = slot
        self.device = torch.device("node", slot)
        self.outbox = self.home.outbox
        # finalizers append to this list directly; it is the outbox's own for its whole life
        self.dead = self.outbox.dead
        #: the same place for tensors that torch is to take for local ones (composites/as_cpu.py)
        self.twin = copy.copy(self)
        self.twin.device = torch.device("cpu")

    def __repr__(self) -> str:
        return f"node {self.node} {self.name}"

    def is_cuda(self) -> bool:
        return self.index >= 0

    def define(
        self, op: str, args: tuple[c.Spec, ...], kwargs: tuple[tuple[str, c.Spec], ...], outs: int, site: Site | None
    ) -> int:
        """Returns the number of a template, which is defined on the node at its first use.

        Raises NotImplementedError for an operator that the node would refuse: the node itself could report that only
        long after the call.
        """
        if op not in self.home.permitted:
            self._permit(op, site)
        return self.home.define(op, args, kwargs, outs, site)

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


def one_session(*places: Place) -> None:
    """Raises DisttensorError for places of two sessions: a ref of one session means nothing in the other."""
    if any(place.session is not places[0].session for place in places):
        for place in places:  # all sessions but the newest have been shut down
            place.session.link.check(place.outbox)


class Places:
    """A session's places, by slot and by (node, device name)."""

    def __init__(self, session: Owner, nodes: Sequence[Node], most: int = 0) -> None:
        """Makes the nodes' default places, and keeps slots for up to ``most`` nodes. Raises DisttensorError if that is
        more than MAX_SLOTS."""
        most = max(most, len(nodes))
        if most > MAX_SLOTS:
            raise DisttensorError(
                f"{most} nodes are more than torch.device can name ({MAX_SLOTS}: its index is an int8)"
            )
        self._session = session
        self._nodes: list[Node] = []
        self.lock = threading.RLock()
        self._by_pair: dict[tuple[int, str], Place] = {}
        self.by_slot: dict[int, Place] = {}
        self._free = count(most)  #: slots of devices that are no node's default
        for node in nodes:
            self.extend(node)

    def extend(self, node: Node) -> None:
        """Adds a node's default device, in the slot of its rank, which ``most`` has kept free."""
        self._nodes.append(node)
        self._add(node.rank, node.devices[1] if len(node.devices) > 1 else "cpu", node.rank)

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
        """Returns the place of a node's device.

        ``device`` is "cpu", "cuda", "cuda:1", 1 (cuda:1), -1 (cpu), or None: the node's default device, or the one that
        ``node`` itself names ("node:1"). Raises TypeError for a ``node`` of another type, ValueError for a node that
        does not exist, RuntimeError for a device that the node doesn't have; the message names what there is.
        """
        if isinstance(node, (str, torch.device)):
            named = self.named(node)
            if device is None:
                return named
            node = named.node
        if isinstance(node, bool) or not isinstance(node, int):
            raise TypeError(f"a node is an integer or a text such as 'node:1', not {node!r}")
        if not 0 <= node < len(self._nodes):
            n = len(self._nodes)
            raise ValueError(
                f"node {node} does not exist; there {f'are {n} nodes, 0 to {n - 1}' if n > 1 else 'is 1 node, 0'}"
            )
        if device is None:
            return self.by_slot[node]
        name = self._name(device)
        if name not in (names := self._nodes[node].devices):
            raise RuntimeError(f"node {node} has no device {name}; it has {', '.join(names)}")
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
        """Returns the place that "node:1" names.

        Raises RuntimeError as ``of`` does, TypeError for a text that names no device, ValueError for a local device.
        """
        try:
            found = torch.device(device)
        except RuntimeError:
            raise TypeError(f"a node is an integer or a text such as 'node:1', not {device!r}") from None
        if found.type != "node":
            raise ValueError(f"a node is an integer or a text such as 'node:1', not {str(device)!r}")
        return self.of(found)

    def of(self, device: torch.device) -> Place:
        """Returns the place of a device of type "node"; without an index that of the current node's default device.

        Raises RuntimeError for a slot that no place has.
        """
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
        n = len(self._nodes)
        return f"the session has {n} nodes, node:0 to node:{n - 1}" if n > 1 else "the session has one node, node:0"
