"""One collective, from the proxies that a user names to a command for each node that takes part."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch

from ..dispatch.call_site import here
from ..dispatch.lazy_views import materialise
from ..futures.work import Work, seconds_of
from ..proxy.proxy import DistributedTensor
from ..runtime.channel.base import Arrival, DataChannel, Transfer
from ..runtime.collective import NATIVE, ReduceOp, Way, check
from ..runtime.collective.algorithm_table import ALGORITHMS
from ..runtime.master.route import waits
from ..runtime.node.streams.lane import when_all
from ..runtime.protocol import codec
from ..runtime.protocol import commands as c
from ..session.current import session as current_session
from ..session.current import session_of
from ..session.places import one_session
from ..session.session import Session
from .groups import Group, Split, new_group

Tensors = Sequence[torch.Tensor]

#: Bytes of a node's part in a collective that leaves with what is issued after it, as an operation does.
SMALL = 64 << 10


@dataclass
class Part:
    """What one node gives and gets."""

    inputs: Sequence[torch.Tensor] = ()
    outs: Sequence[torch.Tensor] = ()


@dataclass
class CollectiveCall:
    """One collective. ``root``: the place in the group of whom it is about. ``parts``: in the group's order."""

    kind: str
    group: Group
    parts: list[Part]
    op: ReduceOp = ReduceOp.SUM
    root: int = 0
    algorithm: str | Way | None = None
    transport: torch.dtype | None = None
    dtype: torch.dtype = torch.uint8
    value: Any = field(default=None)  #: the result of its Work
    shares: tuple[int, ...] = ()  #: where nodes have others than one tensor each: as the command says

    def issue(self, session: Session, async_op: bool) -> CollectiveWork | None:
        """Returns at once. Raises NodeLost, GraphError for an asynchronous one while a graph is recorded."""
        if async_op:
            waits("a collective with async_op=True")
        site = here(3)
        channel = self._channel(session) if session.board.rules or session.board.automatic else 0
        way, number = self._way(session.board.data[channel]), session.transfers.new()
        ended: list[tuple[int, Transfer, int]] = []
        for node in self.group.nodes if async_op else ():
            session.link.check(session.states[node].outbox)
            done = session.transfers.new()
            ended.append((node, session.channel.irecv(torch.empty(0, dtype=torch.uint8), node, done), done))
        commands = []
        hosts = _hosts(session, self.group)
        for i, (node, part) in enumerate(zip(self.group.nodes, self.parts, strict=True)):
            tensors = (*part.inputs, *part.outs)
            command = c.Collective(
                kind=self.kind,
                transfer=number,
                ranks=self.group.nodes,
                inputs=tuple(map(_ref, part.inputs)),
                outs=tuple(map(_ref, part.outs)),
                lengths=tuple(tensor.numel() for tensor in tensors),
                dtype=codec.dtype_id(self.dtype),
                op=int(self.op),
                root=self.root,
                algorithm=way.algorithm,
                base=way.base,
                chunk=way.chunk,
                carry=-1 if self.transport is None else codec.dtype_id(self.transport),
                hosts=hosts,
                done=ended[i][2] if ended else 0,
                channel=channel,
                shares=self.shares,
            )
            commands.append((node, command, site))
        small = not async_op and sum(commands[0][1].lengths) * self.dtype.itemsize <= SMALL
        session.link.together(commands, hurry=not small)
        for part in self.parts:
            for tensor in part.outs:
                torch.autograd.graph.increment_version(tensor)
        return CollectiveWork(session, [(node, transfer) for node, transfer, _ in ended], self) if async_op else None

    def _channel(self, session: Session) -> int:
        """The number of the data channel that was selected; and the algorithm that was, if the call names none."""
        tensors = [tensor for part in self.parts for tensor in (*part.inputs, *part.outs)]
        places = [named(tensor, self.kind)._place for tensor in tensors]
        cuda = places and all([place.is_cuda() for place in places])
        numel = max(max(_numel(part.inputs), _numel(part.outs)) for part in self.parts)
        what = ("sendreceive" if self.kind == "shift" else self.kind, "cuda" if cuda else "cpu")
        if self.algorithm is None:
            self.algorithm = session.board.way(*what, numel * self.dtype.itemsize)
        selected = session.board.selected(*what, numel * self.dtype.itemsize)
        if selected is None and cuda and session.board.automatic and self.algorithm is None:
            best = session.board.best(set(places))
            return best if self._native(session.board.data[best]) else 0
        return selected or 0

    def _way(self, channel: DataChannel) -> Way:
        """Raises ValueError for an algorithm that this collective, or the channel, does not have."""
        way = self.algorithm if isinstance(self.algorithm, Way) else Way(self.algorithm or "")
        if way.algorithm in ("", NATIVE) and self._native(channel):
            return Way(NATIVE)
        if way.algorithm == NATIVE:
            raise ValueError(
                f"the channel {channel.name!r} has no {self.kind} of its own for {self.dtype} and these "
                "operands; leave algorithm= out"
            )
        known = ALGORITHMS.get(self.kind, ())
        if way.algorithm and way.algorithm not in known:
            raise ValueError(f"{self.kind} has no algorithm {way.algorithm!r}; it has {', '.join(known) or 'one only'}")
        return way

    def _native(self, channel: DataChannel) -> bool:
        """Whether the channel does it by itself. That is decided here, as nodes see their own tensors only."""
        if not channel.capabilities.collectives or len(self.group) == 1 or self.transport is not None:
            return False
        if self.shares or self.group.parts:
            return False
        tensors = [tensor for part in self.parts for tensor in (*part.inputs, *part.outs)]
        devices = {named(tensor, self.kind)._place.kernels for tensor in tensors} or {"cpu"}
        return len(devices) == 1 and channel.has_collective(
            self.kind,
            dtype=self.dtype,
            op=self.op.name,
            device=devices.pop(),
            even=len({tensor.numel() for tensor in tensors}) <= 1,
        )


class _All(Arrival):
    """The end of several transfers. What it has brought is ``value``."""

    def __init__(self, transfers: Sequence[Transfer], value: Any) -> None:
        self._transfers, self._brings = transfers, value

    @property
    def tensor(self) -> Any:
        self.wait()
        return self._brings

    def wait(self, timeout: float | None = None) -> None:
        deadline = None if timeout is None else time.monotonic() + timeout
        for transfer in self._transfers:
            transfer.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))

    def is_completed(self) -> bool:
        return all([transfer.is_completed() for transfer in self._transfers])

    def add_done_callback(self, fn: Callable[[], None]) -> None:
        when_all(self._transfers, fn)


class CollectiveWork(Work):
    """A collective under way. ``result()`` gives what it writes."""

    def __init__(self, session: Session, ended: list[tuple[int, Transfer]], joint: CollectiveCall) -> None:
        self._session = session
        self._node = ended[0][0]
        self._text = f"{joint.kind} of {joint.group}"
        self._transfer = _All([transfer for _, transfer in ended], joint.value)
        self._ended = ended

    def wait(self, timeout: float | timedelta | None = None) -> bool:
        """Returns True when all nodes have done their part.

        Raises TimeoutError after ``timeout`` seconds (it goes on), what made it fail, NodeLost.
        """
        seconds = seconds_of(timeout)
        deadline = None if seconds is None else time.monotonic() + seconds
        for node, transfer in self._ended:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            self._session.transfers.end(transfer, node, left)
        return True


def _numel(tensors: Tensors) -> int:
    return sum(tensor.numel() for tensor in tensors)


def _ref(tensor: Any) -> int:
    return tensor._h.ref or materialise(tensor._h)


def _hosts(session: Session, group: Group) -> tuple[int, ...]:
    """Which host (or part, of a split) each node is on, as small numbers; empty if that makes no difference."""
    names: Sequence[object] = group.parts or [session.link.hellos[node].host for node in group.nodes]
    numbers = {name: i for i, name in enumerate(dict.fromkeys(names))}
    return tuple(numbers[name] for name in names) if 1 < len(numbers) < len(names) else ()


# ---- mistakes, at the user's line ----------------------------------------------------------------------------------


def named(tensor: Any, what: str) -> DistributedTensor:
    """Raises TypeError for what is not on a node."""
    if not isinstance(tensor, DistributedTensor):
        kind = f"a local tensor of {tensor.device}" if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        raise TypeError(f"{what} has to be a tensor on a node, not {kind}")
    found: DistributedTensor = tensor
    return found


def group_of(tensors: Tensors, group: Group | Split | None, what: str) -> tuple[Group, Session]:
    """The group that these tensors, one per node, are of. Raises TypeError, ValueError if they are not."""
    nodes = nodes_of(tensors, what)
    if len(set(nodes)) < len(nodes):
        raise ValueError(f"{what} takes one tensor per node; these are on nodes {nodes}")
    not_alone(nodes, group, what)
    return group_at(nodes, group, what), session_of(named(tensors[0], what)._place)


def not_alone(nodes: Sequence[int], group: Group | Split | None, what: str) -> None:
    """Raises ValueError for one tensor where there are several nodes, unless a group says that it is meant so: the
    collective would do nothing."""
    if group is None and len(nodes) == 1 and (count := len(current_session().states)) > 1:
        raise ValueError(
            f"{what} takes a list of one tensor per node; this is one, on node {nodes[0]}, and the session has {count} "
            f"nodes (if it is meant so: group=disttensor.new_group([{nodes[0]}]))"
        )


def group_at(nodes: list[int], group: Group | Split | None, what: str) -> Group:
    """The group of these nodes. Raises ValueError if it is not that."""
    if group is None:
        return new_group(nodes)
    if isinstance(group, Split):
        group = group.whole
    if list(group.nodes) != nodes:
        raise ValueError(f"{what}: the tensors are on nodes {nodes}, in this order, but the group is {group}")
    return group


def nodes_of(tensors: Tensors, what: str) -> list[int]:
    """Where these tensors are. Raises TypeError, ValueError."""
    if isinstance(tensors, torch.Tensor) or not isinstance(tensors, Sequence):
        raise TypeError(f"{what} takes a list of tensors, one per node, not {type(tensors).__name__}")
    for i, tensor in enumerate(tensors):
        if not isinstance(tensor, DistributedTensor):
            named(tensor, f"{what}: tensor {i}")  # says what it is
    places = [tensor._place for tensor in tensors]  # type: ignore[attr-defined]
    if not places:
        raise ValueError(f"{what} takes at least one tensor")
    one_session(*places)
    return [place.node for place in places]


def alike(tensors: Tensors, what: str, shapes: bool = True) -> torch.dtype:
    """The dtype of all. Raises TypeError where they differ, ValueError where their shapes do."""
    first = tensors[0]
    for i, tensor in enumerate(tensors):
        if tensor.dtype != first.dtype:
            raise TypeError(f"{what}: tensor {i} is {tensor.dtype}, tensor 0 {first.dtype}; all have to be of one")
        if shapes and tensor.shape != first.shape:
            raise ValueError(
                f"{what}: tensor {i} has the shape {tuple(tensor.shape)}, tensor 0 {tuple(first.shape)}; "
                "all have to have one"
            )
    return first.dtype


def lists_of(lists: Sequence[Tensors], group: Group, what: str) -> list[Tensors]:
    """A list of tensors per node, each on that node and as long as the group. Raises TypeError, ValueError."""
    if len(lists) != len(group):
        raise ValueError(f"{what} takes one list per node: {len(lists)} lists for {len(group)} nodes")
    return [
        list_of(one, node, group, f"{what}: list {i}") for i, (one, node) in enumerate(zip(lists, group, strict=True))
    ]


def list_of(tensors: Any, node: int, group: Group, what: str) -> Tensors:
    """One such list. Raises TypeError, ValueError."""
    if not isinstance(tensors, Sequence):
        raise TypeError(f"{what} has to be a list of tensors, not {type(tensors).__name__}")
    if len(tensors) != len(group):
        raise ValueError(f"{what} has {len(tensors)} tensors, and the group {len(group)} nodes")
    for i, tensor in enumerate(tensors):
        there = named(tensor, f"{what}, tensor {i},")._place.node
        if there != node:
            raise ValueError(f"{what}, tensor {i}, is on node {there}, not on node {node}")
    return tensors


def same_shape(one: torch.Tensor, other: torch.Tensor, what: str) -> None:
    """Raises ValueError or TypeError unless ``one`` can take what ``other`` holds."""
    if one.shape != other.shape:
        raise ValueError(f"{what}: shape {tuple(one.shape)}, but {tuple(other.shape)} arrives")
    if one.dtype != other.dtype:
        raise TypeError(f"{what}: {one.dtype}, but {other.dtype} arrives")


def written(*tensors: torch.Tensor) -> None:
    """Raises RuntimeError for what cannot be written in place."""
    for tensor in tensors:
        if tensor.is_conj() or tensor.is_neg():
            raise RuntimeError("a lazy conjugate or negative cannot be written by a collective; call resolve_conj()")


def read(tensor: torch.Tensor) -> torch.Tensor:
    """What the node has to send."""
    lazy = tensor.is_conj() or tensor.is_neg()
    return tensor.detach().resolve_conj().resolve_neg() if lazy else tensor


def op_of(op: Any, dtype: torch.dtype) -> ReduceOp:
    """``op`` as one of ours; torch.distributed's mean the same. Raises TypeError, also for a dtype it doesn't take."""
    if not isinstance(op, ReduceOp):
        name = getattr(op, "name", None) or str(op).rpartition(".")[2]
        if name not in ReduceOp.__members__:
            raise TypeError(f"{op!r} is no reduction; there are {', '.join(ReduceOp.__members__)}")
        op = ReduceOp[name]
    check(op, dtype)
    return op  # type: ignore[no-any-return]
