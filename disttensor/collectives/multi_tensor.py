"""Several tensors per node in one collective, as on several devices of it, and all_gather into one tensor per node.

torch.distributed once had ``all_reduce_multigpu`` and the like. Here the usual ones take any number per node.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..errors.argument_checks import spelled
from ..futures.work import Work
from ..session.current import session_of
from ..session.session import Session
from .groups import Group, Split
from .issue import CollectiveCall, Part, Tensors, alike, group_at, group_of, named, nodes_of, not_alone, read, written


@dataclass
class NodeTensors:
    """Which tensors of a list are on which node."""

    group: Group
    session: Session
    members: list[list[int]]  #: for each node of the group, the places of its tensors in the list

    @property
    def shares(self) -> tuple[int, ...]:
        """How many tensors each node has; nothing where it is one each."""
        counts = tuple(map(len, self.members))
        return counts if max(counts) > 1 else ()

    @property
    def order(self) -> list[int]:
        """Node by node."""
        return [i for its in self.members for i in its]


def node_tensors_of(tensors: Tensors, group: Group | Split | None, what: str) -> NodeTensors:
    """The nodes of ``tensors``, in the order in which they come first. Raises TypeError, ValueError."""
    nodes = nodes_of(tensors, what)
    not_alone(nodes, group, what)
    distinct = list(dict.fromkeys(nodes))
    group, session = group_at(distinct, group, what), session_of(named(tensors[0], what)._place)
    if len(distinct) == len(nodes):
        return NodeTensors(group, session, [[i] for i in range(len(nodes))])
    for i, tensor in enumerate(tensors):
        if any(tensor is other for other in tensors[:i]):
            raise ValueError(f"{what}: tensor {i} is there twice")
    return NodeTensors(group, session, [[i for i, node in enumerate(nodes) if node == one] for one in group])


def same_nodes(tensors: Tensors, others: Tensors, what: str) -> None:
    """Raises ValueError unless each is on the same node as its like; TypeError."""
    if nodes_of(tensors, what) != nodes_of(others, what):
        raise ValueError(f"{what}: tensors on nodes {nodes_of(tensors, what)}, not {nodes_of(others, what)}")


def rows_of(rows: Sequence[Tensors], tensors: Tensors, what: str) -> None:
    """For each of ``tensors`` a row on its node, of one for each. Raises TypeError, ValueError."""
    if len(rows) != len(tensors):
        raise ValueError(f"{what} takes one list per tensor: {len(rows)} lists for {len(tensors)} tensors")
    for i, (row, tensor) in enumerate(zip(rows, tensors, strict=True)):
        if not isinstance(row, Sequence) or len(row) != len(tensors):
            raise ValueError(f"{what}: list {i} has {len(row)} tensors for {len(tensors)}")
        same_nodes(row, [tensor] * len(row), f"{what}: list {i}")


@spelled
def all_gather_into_tensor(
    outs: Tensors, tensors: Tensors, group: Group | None = None, async_op: bool = False
) -> Work | None:
    """``outs[i]``, on the node of ``tensors[i]``, becomes ``torch.cat(tensors)``: these may differ in their first size.

    An ``out`` of another shape gets this one, and more memory if it needs it (as ``resize_`` does it).
    """
    what = "all_gather_into_tensor"
    group, session = group_of(tensors, group, what)
    dtype = alike(tensors, what, shapes=False)
    same_nodes(outs, tensors, f"{what}: outs")
    rest = tensors[0].shape[1:]
    for i, tensor in enumerate(tensors):
        if not tensor.dim() or tensor.shape[1:] != rest:
            raise ValueError(
                f"{what}: tensor {i} has the shape {tuple(tensor.shape)}, tensor 0 {tuple(tensors[0].shape)}; "
                "all have to have one, but for the first size"
            )
    whole = (sum(tensor.shape[0] for tensor in tensors), *rest)
    for out in outs:
        if out.dtype != dtype:
            raise TypeError(f"{what}: {out.dtype}, but {dtype} arrives")
    written(*outs)
    for out in outs:
        if out.shape != whole:
            out.resize_(whole)
    parts = [Part([read(x)], [out]) for x, out in zip(tensors, outs, strict=True)]
    lengths = tuple(tensor.numel() for tensor in tensors)
    return CollectiveCall("all_gather", group, parts, dtype=dtype, value=outs, shares=lengths).issue(session, async_op)
