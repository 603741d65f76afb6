"""A parameter server: tensors that are cut among nodes, to which workers push, and from which they pull.

The script issues everything, as ordinary operations on the nodes that have a shard: there is no server's process and
no code on the nodes. What comes from, and goes to, one worker is done on a stream of its own there (a lane), so a
worker that is slow holds up neither another one nor the node.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, overload

import torch

from ...errors.argument_checks import flag
from ...futures import Work, fetch
from ...proxy.proxy import where_is
from ...runtime.process.spelling import did_you_mean, shown
from ...runtime.protocol.errors import DisttensorError
from ...session import current
from ...session.places import Place
from ...streams import Stream, stream
from .arriving import Arriving, Pull, Pushing
from .values import Form, Tensors, on_a_mesh, one_place, sources

#: ``rule(shard, value)`` changes a shard in place, by operations on the two tensors, which are on a node.
Rule = Callable[[torch.Tensor, torch.Tensor], object]
#: Makes another tensor of each that is pushed, of its shape.
Preprocess = Callable[[torch.Tensor], torch.Tensor]
Where = int | str | torch.device

#: The lane on which a shard is read and written, and nothing else: in the order of issue, as streams order no writes.
_OWN = -2

RULES = ("add", "copy", "zero", "none")


class ParameterServer:
    """Tensors that are cut among nodes: shard k, of any size, is on the k-th of ``nodes``.

    Args:
        tensors: a module (its parameters), a dict of tensors, a tensor or several; local, on nodes or on a mesh.
        nodes: the nodes that have a shard each. Default: all.
        init: whose values the shards begin with. "first": those of ``tensors`` (of a mesh those of its first rank).
            "each": shard k has those of node k; ``tensors`` is on a mesh with as many ranks, or a list of values, one
            for each node.
        rules: further rules for ``push``, by name: ``rule(shard, value)`` changes a flat shard in place, by operations
            on these two. It is called here, and issues commands as any line of the script does.

    Nothing waits but ``push(...).wait()``, pulls to the script, and ``state_dict``. Raises TypeError, ValueError for a
    node that does not exist, NodeLost.

        server = dt.training.ParameterServer(model, nodes=[0, 1])
        server.push([p.grad for p in worker.parameters()], scale=-0.1)      # server -= 0.1 * gradients
        server.pull(into=worker)
    """

    def __init__(
        self,
        tensors: Any,
        nodes: Iterable[Where] | None = None,
        *,
        init: Literal["first", "each"] = "first",
        rules: Mapping[str, Rule] | None = None,
    ) -> None:
        what = "ParameterServer"
        places = [_place(node) for node in (range(current.node_count()) if nodes is None else nodes)]
        if not places or len(set(places)) < len(places):
            raise ValueError(f"{what}: nodes are several different ones, not {shown(nodes)}")
        self._rules = dict(rules or {})
        for name, rule in self._rules.items():
            if name in RULES or not callable(rule):
                raise ValueError(f"{what}: rules[{name!r}]: a name that is none of {RULES}, and a function")
        if init not in ("first", "each"):
            raise ValueError(f"{what}: init is 'first' or 'each', not {shown(init)}")
        self._places = places
        self._lock = threading.RLock()  #: pushes are applied one after the other, to all shards
        self._lanes: dict[tuple[int, int], Stream] = {}  #: by shard, and the worker's node (-1: the script; _OWN)
        self._version = 0
        with torch.no_grad():
            each = sources(tensors, len(places), init)
            self._form = Form(tensors if init == "first" or on_a_mesh(tensors) else tensors[0], what)
            self._ranges = self._form.cut(len(places))
            self._shards: list[list[torch.Tensor]] | None = []
            flat = None
            for k, (place, ranges) in enumerate(zip(places, self._ranges, strict=True)):
                if init == "each" or flat is None:
                    flat = self._form.flat(self._form.check(each[k], what))
                with stream(self._lane(k, _OWN)):
                    self._shards.append([v[r].clone().to(place.device) for v, r in zip(flat, ranges, strict=True)])

    # ---- what it is ------------------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """The number of pushes that were applied."""
        return self._version

    @property
    def nodes(self) -> list[int]:
        """The nodes that have a shard, in the order of the shards."""
        return [place.one.node for place in self._places]

    def __repr__(self) -> str:
        state = "closed" if self._shards is None else f"version {self._version}"
        return f"<ParameterServer of {len(self._form.names)} tensors on nodes {self.nodes}, {state}>"

    def shards(self) -> list[list[torch.Tensor]]:
        """Returns each node's shard: flat tensors, one for each dtype. They are the server's own, not copies."""
        return [list(shard) for shard in self._open("shards")]

    # ---- push ------------------------------------------------------------------------------------------------------

    @overload
    def push(
        self,
        values: Any = None,
        rule: str = "add",
        *,
        scale: float = 1.0,
        preprocess: Preprocess | None = None,
        async_op: Literal[True],
    ) -> Work[int]: ...

    @overload
    def push(
        self,
        values: Any = None,
        rule: str = "add",
        *,
        scale: float = 1.0,
        preprocess: Preprocess | None = None,
        async_op: Literal[False] = False,
    ) -> None: ...

    def push(
        self,
        values: Any = None,
        rule: str = "add",
        *,
        scale: float = 1.0,
        preprocess: Preprocess | None = None,
        async_op: bool = False,
    ) -> Work[int] | None:
        """Has the shards changed by a worker's values. Returns at once.

        Args:
            values: tensors of the server's names or order, and shapes, on one node or local; of a model over several
                nodes too. None for "zero" and "none".
            rule: "add" (``scale`` times the values), "copy" (the same in place of the shards), "zero", "none" (the
                values travel, and change nothing), or a name of ``rules``.
            scale: a factor of "add" and "copy".
            preprocess: a function of each tensor, before it travels: to another dtype, for example.
            async_op: the shards change once the values have arrived, whatever was issued meanwhile, and not at all if
                these fail or their node is lost; returns a Work that is done then, with the new version as its result.
                False: in the order of the script, as any in-place operation; what is issued later sees the change.

        Raises ValueError or TypeError for other values, or values on a mesh, or an unknown rule; DisttensorError after
        ``close``; NodeLost.
        """
        self._open("push")
        self._known(rule, scale)
        flag("push: async_op", async_op)
        flat = self._flat(values, rule, preprocess)
        if async_op:
            return Pushing(self._session, flat, lambda: self._send(flat), lambda sent: self._apply(sent, rule, scale))
        self._apply(self._send(flat), rule, scale)
        return None

    def _known(self, rule: str, scale: float) -> None:
        if rule not in RULES and rule not in self._rules:
            known = [*RULES, *self._rules]
            raise ValueError(f"push: rule is one of {known}, not {rule!r}{did_you_mean(str(rule), known)}")
        if scale != 1.0 and rule not in ("add", "copy"):
            raise ValueError(f"push: scale={scale} is for 'add' and 'copy', and rule is {rule!r}")

    @torch.no_grad()
    def _flat(self, values: Any, rule: str = "add", preprocess: Preprocess | None = None) -> list[torch.Tensor]:
        """Returns values as new flat vectors, where they are: [] for none."""
        if values is None:
            if rule not in ("zero", "none"):
                raise TypeError(f"push: rule {rule!r} needs values")
            return []
        tensors = self._form.check(values, "push")
        one_place(tensors, "push")
        if preprocess is not None:
            tensors = self._form.check([preprocess(tensor) for tensor in tensors], "push: preprocess")
        return self._form.flat(tensors)

    @torch.no_grad()
    def _send(self, flat: list[torch.Tensor]) -> Arriving:
        """Sends flat vectors to the nodes of the shards, where nothing uses them yet."""
        if not flat:
            return Arriving([[] for _ in self._places], -1)
        worker = _node_of(flat[0])
        lanes = [self._lane(k, worker) for k in range(len(self._places))]
        parts = []
        for lane, place, ranges in zip(lanes, self._places, self._ranges, strict=True):
            with stream(lane):
                parts.append([vector[r].to(place.device) for vector, r in zip(flat, ranges, strict=True)])
        return Arriving(parts, worker, lanes=lanes)

    @torch.no_grad()
    def _apply(self, staged: Arriving, rule: str, scale: float = 1.0) -> int:
        """Changes the shards by what was sent; returns the version that they have then."""
        with self._lock:
            shards = self._open("push")
            for k, (shard, parts) in enumerate(zip(shards, staged.parts, strict=True)):
                with stream(self._lane(k, _OWN)):
                    for i, mine in enumerate(shard):
                        if rule == "zero":
                            mine.zero_()
                        elif rule == "add":
                            add(mine, parts[i], scale)
                        elif rule == "copy":
                            mine.copy_(parts[i] if scale == 1.0 else parts[i] * scale)
                        elif rule != "none":
                            self._rules[rule](mine, parts[i].to(mine.dtype))
            self._version += 1
            return self._version

    # ---- pull ------------------------------------------------------------------------------------------------------

    def pull(
        self,
        into: Any = None,
        *,
        integrate: Callable[[torch.Tensor, torch.Tensor], object] | None = None,
        node: Where | None = None,
        async_op: bool = False,
    ) -> Any:
        """Returns the values, as what the server was made from: a tensor, a list, a dict (for a module, too).

        Args:
            into: tensors, a dict or a module that get them, in place; returned as they are.
            integrate: ``integrate(own, value)`` in place of ``own.copy_(value)``, for each tensor of ``into``.
            node: the node, or mesh.device, for which new tensors are made. Default: that of ``into``; else the script,
                which waits for them.
            async_op: return a Work, whose result() is that; what it gives is as of now, and ``into`` is written when
                it is asked for its result.

        Raises ValueError or TypeError for ``into`` of other names or shapes; DisttensorError after ``close``; NodeLost.
        """
        self._open("pull")
        flag("pull: async_op", async_op)
        if integrate is not None and into is None:
            raise TypeError("pull: integrate is for values that go into others; into=...")
        own = None if into is None else self._form.check(into, "pull")
        device = _place(node).device if node is not None else None if own is None else own[0].device
        if device is not None and device.type != "node":
            device = None
        parts = self._begin_pull(device)

        def result() -> Any:
            found = self._arrived(parts)
            if own is None:
                return self._form.build([value.clone() for value in found] if len(found) > 1 else found)
            put(own, found, integrate)
            return into

        if async_op or device is None:
            work = Pull(self._session, parts, result)
            return work if async_op else work.result()
        return result()

    @torch.no_grad()
    def _begin_pull(self, device: torch.device | None) -> Arriving:
        """Sends the shards as they are now to a place, None for the script, where nothing uses them yet."""
        with self._lock:
            shards = self._open("pull")
            worker = -1 if device is None else _node_at(_place(device))
            parts: list[list[Any]] = []
            for k, shard in enumerate(shards):
                with stream(self._lane(k, _OWN)):
                    copies = [mine.clone() for mine in shard]
                with stream(self._lane(k, worker)):
                    parts.append([fetch(x) if device is None else x.to(device) for x in copies])
            return Arriving(parts, worker, self._version)

    @torch.no_grad()
    def _arrived(self, pulled: Arriving) -> list[torch.Tensor]:
        """Returns the tensors that were pulled; what comes next on their node waits for them."""
        parts = [[x.result() if isinstance(x, Work) else x for x in shard] for shard in pulled.parts]
        return self._form.unflat([torch.cat([shard[i] for shard in parts]) for i in range(len(self._form.packs))])

    # ---- states, and the end ---------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Returns the values, as local tensors by name, and the version. Waits."""
        with self._lock:
            version, pulled = self._version, self._begin_pull(None)
        values = [value.clone() for value in self._arrived(pulled)]
        return {"values": dict(zip(map(str, self._form.names), values, strict=True)), "version": version}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Has the server go on from a ``state_dict()``, of one on other nodes too. Returns at once.

        Raises KeyError, ValueError for one of other names or shapes.
        """
        with self._lock:
            values, version = state["values"], int(state["version"])
            named = dict(zip(map(str, self._form.names), self._form.names, strict=True))
            if set(values) != set(named):
                odd = sorted(set(values) ^ set(named))
                raise ValueError(
                    f"load_state_dict: the names differ from the server's: {', '.join(map(repr, odd[:5]))}"
                )
            self._apply(self._send(self._flat([values[name] for name in named])), "copy")
            self._version = version

    def close(self) -> None:
        """Gives the shards' memory back, and the streams. A push that is under way is not applied. Again: nothing."""
        with self._lock:
            self._shards = None
            self._lanes.clear()

    def __enter__(self) -> ParameterServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- its own ---------------------------------------------------------------------------------------------------

    @property
    def _session(self) -> Any:
        return self._places[0].session

    def _open(self, what: str) -> list[list[torch.Tensor]]:
        if self._shards is None:
            raise DisttensorError(f"{what}: this parameter server was closed")
        return self._shards

    def _lane(self, k: int, worker: int) -> Stream:
        """Returns the stream on the k-th node on which one worker's values are taken and given."""
        lane = self._lanes.get((k, worker))
        if lane is None:
            lane = self._lanes[k, worker] = Stream(self._places[k].device)
        return lane


def put(own: Tensors, found: Tensors, integrate: Callable[[torch.Tensor, torch.Tensor], object] | None) -> None:
    """Writes pulled values into tensors."""
    with torch.no_grad():
        for mine, value in zip(own, found, strict=True):
            value = value.to(mine.device)
            if integrate is None:
                mine.copy_(value)
            else:
                integrate(mine, value)


def add(shard: torch.Tensor, values: torch.Tensor, scale: float) -> None:
    """Adds ``scale`` times the values to a shard, also of integers where 1.0 is the scale."""
    exact = shard.is_floating_point() or shard.is_complex() or scale != int(scale)
    shard.add_(values, alpha=scale if exact else int(scale))


def _place(where: Any) -> Place:
    """Returns a node's place, by number or device, or that of a mesh's device."""
    places = current.session().places
    if isinstance(where, (str, torch.device)):
        return places.of(torch.device(where))
    found: Place = places.at(where, None)
    return found


def _node_of(tensor: torch.Tensor) -> int:
    place = where_is(tensor)
    return -1 if place is None else _node_at(place)


def _node_at(place: Place) -> int:
    return place.members[0].node
