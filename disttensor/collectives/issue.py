"""Issues collectives: from the proxies that a user names to one command for each node that takes part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal, Self, TypeAlias, Union

import torch

from ..dispatch.call_site import here
from ..dispatch.lazy_views import materialise
from ..errors import late_warnings
from ..errors.argument_checks import seconds_of
from ..futures.listening import GroupEnd
from ..futures.work import Work
from ..proxy.proxy import DistributedTensor, local_name
from ..runtime.channel.base import DataChannel
from ..runtime.collective import NATIVE, ReduceOp, Way, check
from ..runtime.master.failures import Site
from ..runtime.master.route import waits
from ..runtime.process.spelling import did_you_mean, shown
from ..runtime.protocol import codec
from ..runtime.protocol import commands as c
from ..runtime.protocol.collective_kinds import KINDS
from ..runtime.protocol.errors import NodeLost
from ..runtime.protocol.rank_lists import group_list, rank_list
from ..session.current import session as current_session
from ..session.current import session_of
from ..session.places import MeshPlace, one_session
from ..session.session import Session
from .groups import Group, Split, given_group
from .unused import Untaken
from .writing import Writing, guard

Tensors = Sequence[torch.Tensor]

#: Bytes of a node's part in a collective up to which it leaves with later commands, as an operation does: at once if
#: the node has nothing queued, else after a few more commands, a wait, or two milliseconds.
SMALL = 64 << 10


@dataclass
class CollectivePart:
    """One node's part in a collective: the tensors that it reads and the tensors that it writes."""

    inputs: Sequence[torch.Tensor] = ()
    outs: Sequence[torch.Tensor] = ()


@dataclass
class CollectiveCall:
    """One collective to issue: of a group, whose nodes have a part each, or of all groups along dims of a mesh, whose
    nodes have one part in common.

    ``root``: the rank in the group of its source or destination, or the shift of ``sendreceive``. ``parts``: one per
    node, in the group's order; of a mesh one, of tensors there.
    """

    kind: str  #: the name of its row in KINDS
    group: Group  #: of several along dims of a mesh that one which may be on several hosts, where any is
    parts: list[CollectivePart]
    op: ReduceOp = ReduceOp.SUM
    root: int = 0
    algorithm: str | Way | None = None
    transport: torch.dtype | None = None
    dtype: torch.dtype = torch.uint8
    value: Any = field(default=None)  #: the result of its Work
    shares: tuple[int, ...] = ()  #: where not every node has one tensor: the command's field of this name
    place: MeshPlace | None = None  #: the mesh, where it is over dims of one
    groups: tuple[tuple[int, ...], ...] = ()  #: the nodes of all groups along these dims, where there are several
    outs: Tensors = field(default=(), init=False)  #: all tensors that it writes, once it is issued

    def issue(self, session: Session, async_op: bool, checked: bool = False) -> CollectiveWork | None:
        """Queues the commands of all nodes and returns at once: a Work if ``async_op``, else None. ``checked``: what
        compares it with local torch's calls this.

        Raises NodeLost, ValueError for an algorithm that does not exist, GraphError for an asynchronous collective
        while a graph is recorded.
        """
        if session.check is not None and not checked:
            return session.check.collective(self, session, async_op)  # type: ignore[no-any-return]
        site = here(3)
        ended = self.queue(session, async_op, site)
        if ended is None:
            return None
        return CollectiveWork(ended, (self.kind, "of", self.group), lambda: self.value).guarding(self.outs)

    def queue(self, session: Session, async_op: bool, site: Site | None) -> GroupEnd | None:
        """Queues the commands of all nodes; of an asynchronous collective returns its end, of which each node tells.
        Raises as ``issue``."""
        if async_op:
            waits("a collective with async_op=True")
        if self.transport is not None:
            check_transport(self.transport, self.kind)
        if late_warnings.pending:
            late_warnings.show_warnings()
        channel = self._channel(session, async_op) if session.router.rules or session.router.automatic else 0
        way, number = self._way(session.router.data[channel]), session.transfers.new_loose()
        nodes = self.group.nodes if self.place is None else self.place.ranks
        if self.place is not None:
            session.link.check(self.place.outbox)
        hosts = () if self.groups else numbered(self.group.parts or hosts_of(session, self.group.nodes))
        session.router.introduce_groups(
            channel, self.kind, way, self.root, self.groups or (self.group.nodes,), hosts, self.transport is not None
        )
        ended = GroupEnd(session, nodes) if async_op else None
        try:
            commands = self._commands(channel, way, number, hosts, 0 if ended is None else ended.request.id)
            small = sum(commands[0].lengths) * self.dtype.itemsize <= SMALL
            if self.place is None:
                session.link.sender.together(
                    [(node, command, site) for node, command in zip(nodes, commands, strict=True)], hurry=not small
                )
            elif self.place.outbox.add(commands[0], site) or (async_op and not small):
                session.flush(self.place.outbox)
        except BaseException:
            if ended is not None:
                session.link.requests.withdraw(ended.request)
            raise
        outs: Tensors
        if self.place is None:
            self.outs = outs = [tensor for part in self.parts for tensor in part.outs]
        else:
            self.outs = outs = self.parts[0].outs
        torch.autograd.graph.increment_version(outs)
        return ended

    def _commands(
        self, channel: int, way: Way, number: int, hosts: tuple[int, ...], request: int
    ) -> list[c.Collective]:
        """Returns the command of each part."""
        ranks, sizes = group_list(self.groups or (self.group.nodes,))
        told, dtype = rank_list(hosts), codec.dtype_id(self.dtype)
        carry = -1 if self.transport is None else codec.dtype_id(self.transport)
        kind, op, root, shares, algorithm = self.kind, int(self.op), self.root, self.shares, way.algorithm
        commands = []
        for part in self.parts:
            inputs, outs = (*map(_ref, part.inputs),), (*map(_ref, part.outs),)
            lengths = (*[tensor.numel() for tensor in part.inputs], *[tensor.numel() for tensor in part.outs])
            command = c.Collective(
                kind, number, ranks, inputs, outs, lengths, dtype, op, root, algorithm, way.base, way.chunk, carry,
                told, request, channel, shares, sizes,
            )  # fmt: skip
            commands.append(command)
        return commands

    def _channel(self, session: Session, async_op: bool) -> int:
        """Returns the number of the data channel that was selected. Sets the algorithm that was selected, if the call
        names none."""
        tensors = [tensor for part in self.parts for tensor in (*part.inputs, *part.outs)]
        places = [named(tensor, self.kind)._place for tensor in tensors]
        cuda = places and all([place.is_cuda() for place in places])
        numel = max(max(_numel(part.inputs), _numel(part.outs)) for part in self.parts)
        what = (
            KINDS[self.kind].users_name,
            "cuda" if cuda else "cpu",
            numel * self.dtype.itemsize,
            self.group.nodes,
            async_op,
        )
        if self.algorithm is None:
            self.algorithm = session.router.way(*what)
        selected = session.router.selected(*what)
        if selected is None and cuda and session.router.automatic and self.algorithm is None:
            best = session.router.best(set(places), self.groups or (self.group.nodes,))
            return best if self._native(session.router.data[best]) else 0
        return selected or 0

    def _way(self, channel: DataChannel) -> Way:
        """Returns the algorithm as a Way. Raises ValueError for one that this collective, or the channel, does not
        have."""
        way = self.algorithm if isinstance(self.algorithm, Way) else Way(self.algorithm or "")
        if way.algorithm in ("", NATIVE) and self._native(channel):
            return Way(NATIVE)
        if way.algorithm == NATIVE:
            raise ValueError(
                f"the channel {channel.name!r} has no {self.kind} of its own for {self.dtype} and these "
                "operands; leave algorithm= out"
            )
        known = KINDS[self.kind].algorithms
        if way.algorithm and way.algorithm not in known:
            raise ValueError(
                f"{KINDS[self.kind].users_name} has no algorithm {shown(way.algorithm)}; "
                f"it has {', '.join(known) or 'one only'}"
            )
        return way

    def _native(self, channel: DataChannel) -> bool:
        """Returns whether the channel does the collective by itself. The master decides that, as nodes see their own
        tensors only."""
        if not channel.capabilities.collectives or len(self.group) == 1 or self.transport is not None:
            return False
        if self.shares or self.group.parts or len({len(group) for group in self.groups}) > 1:
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


class CollectiveWork(Work[Any]):
    """A collective under way. ``result()`` waits, and returns the tensor or lists that the collective writes."""

    # of the class until there is something, as most have no such thing
    _made: list[Any] | None = None
    _writing: Writing | None = None
    untaken: Untaken | None = None  #: says that nobody took the result, where that is a new tensor

    def __init__(
        self,
        ended: GroupEnd,
        words: tuple[object, ...],
        make: Callable[[], Any],
        where: Callable[[int], str] = lambda node: "",
    ) -> None:
        """``ended``: tells that each node has done its part; ``words`` say what it is; ``make`` gives the result, once,
        ``where`` says for a loss what is gone with a node."""
        self.ended, self._words, self._make, self._where = ended, words, make, where

    # what is looked up or made when it is asked for, which it mostly is not

    @property
    def _text(self) -> str:  # type: ignore[override]
        return " ".join(map(str, self._words))

    @property
    def _session(self) -> Session:  # type: ignore[override]
        return self.ended.session

    @property
    def _node(self) -> int:  # type: ignore[override]
        return self.ended.nodes[0]

    @property
    def _transfer(self) -> GroupEnd:  # type: ignore[override]
        return self.ended

    def guarding(self, written: Tensors) -> CollectiveWork:
        """Has other views of what the collective writes not be used until its end was waited for. Returns itself."""
        writing = guard(written, self, self.ended)
        if writing is not None:
            self._writing = writing
        return self

    def _waited(self) -> None:
        if self._writing is not None:
            self._writing.end()
            self._writing = None

    def is_completed(self) -> bool:
        """Returns whether ``wait`` would return, or raise, at once. Does not wait."""
        if done := self.ended.has_ended():
            self._waited()
        return done

    def add_done_callback(self, fn: Callable[[Self], object]) -> None:
        """Has ``fn(self)`` called once the collective has ended, as any Work."""

        def call(work: Self) -> None:
            self._waited()
            fn(work)

        super().add_done_callback(call)

    def _value(self) -> Any:
        self._waited()  # which ``await`` has not called ``wait`` for
        if self.untaken is not None:
            self.untaken.taken = True
        if self._made is None:
            self._made = [self._make()]
        return self._made[0]

    def _await_end(self, timeout: float | None) -> None:
        self.ended.wait_for_all(timeout)

    def wait(self, timeout: float | timedelta | None = None) -> bool:
        """Returns True when all nodes have done their part.

        Raises TimeoutError after ``timeout`` seconds (the collective goes on), the error that made it fail, NodeLost.
        """
        seconds = None if timeout is None else seconds_of(timeout)
        if not self.ended.request.well:
            self._wait_for_each(seconds)
        if late_warnings.pending:
            late_warnings.show_warnings()
        if self._writing is not None:
            self._waited()
        if self.untaken is not None:
            self.untaken.waited = True
        return True

    def _wait_for_each(self, seconds: float | None) -> None:
        try:
            cause = self.ended.wait_for_each(seconds)
            if cause is not None:
                self._waited()
                raise self._session.questions.failure(cause.rank, cause.seq)
        except NodeLost as error:
            if (note := self._where(error.rank)) and note not in getattr(error, "__notes__", ()):
                error.add_note(note)
            raise


def _numel(tensors: Tensors) -> int:
    return sum(tensor.numel() for tensor in tensors)


def _ref(tensor: Any) -> int:
    return tensor._h.ref or materialise(tensor._h)


def hosts_of(session: Session, nodes: Sequence[int]) -> list[str]:
    """Returns the host of each node."""
    return [session.nodes[node].hello.host for node in nodes]


def numbered(names: Sequence[object]) -> tuple[int, ...]:
    """Returns hosts, or parts of a split, as small numbers; an empty tuple if they make no difference."""
    numbers = {name: i for i, name in enumerate(dict.fromkeys(names))}
    return tuple(numbers[name] for name in names) if 1 < len(numbers) < len(names) else ()


# ---- mistakes, at the user's line ----------------------------------------------------------------------------------


def named(tensor: Any, what: str) -> DistributedTensor:
    """Returns ``tensor``. Raises TypeError for an object that is not a tensor on a node."""
    if not isinstance(tensor, DistributedTensor):
        raise TypeError(f"{what} has to be a tensor on a node, not {local_name(tensor)}")
    found: DistributedTensor = tensor
    return found


def group_of(tensors: Tensors, group: Group | Split | None, what: str) -> tuple[Group, Session]:
    """Returns the group of these tensors, one per node, and their session. Raises TypeError or ValueError if they are
    not of ``group``, or several are on one node."""
    nodes = nodes_of(tensors, what)
    if len(set(nodes)) < len(nodes):
        raise ValueError(f"{what} takes one tensor per node; these are on nodes {nodes}")
    not_alone(nodes, group, what)
    return group_at(nodes, group, what), session_of(named(tensors[0], what)._place)


def not_alone(nodes: Sequence[int], group: Group | Split | None, what: str) -> None:
    """Raises ValueError for one tensor where there are several nodes, since the collective would do nothing; unless a
    group says that it is meant so."""
    if group is None and len(nodes) == 1 and (count := len(current_session().nodes)) > 1:
        raise ValueError(
            f"{what} takes a list of one tensor per node; this is one, on node {nodes[0]}, and the session has {count} "
            f"nodes (if it is meant so: group=disttensor.collectives.new_group([{nodes[0]}]))"
        )


def group_at(nodes: list[int], group: Group | Split | None, what: str) -> Group:
    """Returns ``group``, by default a new group of these nodes. Raises ValueError if ``group`` has other nodes."""
    if group is None:
        return Group(tuple(nodes))
    group = group.whole if isinstance(group, Split) else given_group(group, what)
    if list(group.nodes) != nodes:
        raise ValueError(f"{what}: the tensors are on nodes {nodes}, in this order, but the group is {group}")
    return group


def nodes_of(tensors: Tensors, what: str) -> list[int]:
    """Returns the numbers of the nodes that these tensors are on. Raises TypeError for what is no list of tensors on
    nodes, ValueError for an empty one."""
    if isinstance(tensors, torch.Tensor) or not isinstance(tensors, Sequence):
        raise TypeError(f"{what} takes a list of tensors, one per node, not {type(tensors).__name__}")
    for i, tensor in enumerate(tensors):
        if not isinstance(tensor, DistributedTensor):
            named(tensor, f"{what}: tensor {i}")  # says what it is
    places = [tensor._place for tensor in tensors]  # type: ignore[attr-defined]
    if not places:
        raise ValueError(f"{what} takes at least one tensor")
    one_session(*places)
    return [place.one.node for place in places]


def alike(tensors: Tensors, what: str, shapes: bool = True) -> torch.dtype:
    """Returns the dtype of all tensors. Raises TypeError where dtypes differ, ValueError where shapes do."""
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
    """Returns ``lists`` after a check: one list of tensors per node, on that node and as long as the group.

    Raises TypeError or ValueError otherwise.
    """
    if len(lists) != len(group):
        raise ValueError(f"{what} takes one list per node: {len(lists)} lists for {len(group)} nodes")
    return [
        list_of(one, node, group, f"{what}: list {i}") for i, (one, node) in enumerate(zip(lists, group, strict=True))
    ]


def list_of(tensors: Any, node: int, group: Group, what: str) -> Tensors:
    """Returns ``tensors`` after a check: a list of tensors on one node, as long as the group. Raises TypeError or
    ValueError otherwise."""
    if not isinstance(tensors, Sequence):
        raise TypeError(f"{what} has to be a list of tensors, not {type(tensors).__name__}")
    if len(tensors) != len(group):
        raise ValueError(f"{what} has {len(tensors)} tensors, and the group {len(group)} nodes")
    for i, tensor in enumerate(tensors):
        there = named(tensor, f"{what}, tensor {i},")._place.one.node
        if there != node:
            raise ValueError(f"{what}, tensor {i}, is on node {there}, not on node {node}")
    return tensors


def same_shape(one: torch.Tensor, other: torch.Tensor, what: str) -> None:
    """Raises ValueError or TypeError unless ``one`` has the shape and dtype of ``other``, so that it can become it."""
    if one.shape != other.shape:
        raise ValueError(f"{what}: shape {tuple(one.shape)}, but {tuple(other.shape)} arrives")
    if one.dtype != other.dtype:
        raise TypeError(f"{what}: {one.dtype}, but {other.dtype} arrives")


def written(*tensors: torch.Tensor) -> None:
    """Raises RuntimeError for a tensor that cannot be written in place: a lazy conjugate or negative, or expanded."""
    for tensor in tensors:
        if tensor.is_conj() or tensor.is_neg():
            raise RuntimeError("a lazy conjugate or negative cannot be written by a collective; call resolve_conj()")
        if tensor.numel() and any(n > 1 and not s for n, s in zip(tensor.shape, tensor.stride(), strict=True)):
            raise RuntimeError(
                f"a tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()} cannot be written by a "
                "collective: several of its elements are in one place of memory; call clone()"
            )


def read(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor that the node has to send: ``tensor``, with a lazy conjugate or negative resolved."""
    lazy = tensor.is_conj() or tensor.is_neg()
    return tensor.detach().resolve_conj().resolve_neg() if lazy else tensor


def check_transport(transport: Any, what: str) -> None:
    """Raises TypeError for what is no dtype of floats: values would be cut to whole numbers on their way."""
    if not isinstance(transport, torch.dtype) or not transport.is_floating_point:
        raise TypeError(f"{what}: transport is a dtype of floats, such as torch.bfloat16, not {shown(transport)}")


#: Other libraries' names of reductions.
_MEANT = {"MEAN": "avg", "AVERAGE": "avg", "ADD": "sum", "PROD": "product", "MUL": "product"}
#: What names a reduction: a ReduceOp, torch.distributed's, or its name in small or capital letters.
Reduction: TypeAlias = Union[
    ReduceOp,
    Literal["sum", "avg", "product", "min", "max", "band", "bor", "bxor"],
    Literal["SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"],
    "torch.distributed.ReduceOp",
    "torch.distributed.ReduceOp.RedOpType",
]


def op_of(op: Any, dtype: torch.dtype) -> ReduceOp:
    """Returns ``op`` as a ReduceOp; torch.distributed's and names are taken by name.

    Raises TypeError for what is no reduction, and for a dtype that the reduction does not take.
    """
    if not isinstance(op, ReduceOp):
        name = (getattr(op, "name", None) or str(op).rpartition(".")[2]).upper()
        if name not in ReduceOp.__members__:
            meant = _MEANT.get(name)
            raise TypeError(
                f"{shown(op)} is not a reduction; there are {', '.join(ReduceOp.__members__)}"
                + (f"; did you mean {meant!r}?" if meant else did_you_mean(op, map(str.lower, ReduceOp.__members__)))
            )
        op = ReduceOp[name]
    check(op, dtype)
    return op  # type: ignore[no-any-return]
