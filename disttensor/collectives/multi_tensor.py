"""Collectives with several tensors per node (such as one per device), and all_gather into one tensor per node.

torch.distributed once had ``all_reduce_multigpu`` and the like for that. Here the usual collectives take any number of
tensors per node.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..errors.argument_checks import spelled
from ..futures.work import Work
from ..session.current import session_of
from ..session.session import Session
from .groups import Group, Split
from .issue import (
    CollectiveCall,
    CollectivePart,
    Tensors,
    alike,
    group_at,
    group_of,
    named,
    nodes_of,
    not_alone,
    read,
    written,
)


@dataclass
class NodeTensors:
    """The tensors of a list by node."""

    group: Group
    session: Session
    members: list[list[int]]  #: for each node of the group, the indices of its tensors in the list

    @property
    def shares(self) -> tuple[int, ...]:
        """The number of tensors of each node; empty where every node has one."""
        counts = tuple(map(len, self.members))
        return counts if max(counts) > 1 else ()

    @property
    def order(self) -> list[int]:
        """The indices of all tensors in the list, node by node."""
        return [i for its in self.members for i in its]


def node_tensors_of(tensors: Tensors, group: Group | Split | None, what: str) -> NodeTensors:
    """Groups ``tensors`` by node, with the nodes in the order in which they come first. Raises TypeError for what is no
    list of tensors on nodes, ValueError if they are not on the nodes of ``group`` or one is there twice."""
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
    """Raises ValueError unless ``tensors[i]`` is on the node of ``others[i]`` for all i; TypeError for local
    tensors."""
    if nodes_of(tensors, what) != nodes_of(others, what):
        raise ValueError(f"{what}: tensors on nodes {nodes_of(tensors, what)}, not {nodes_of(others, what)}")


def rows_of(rows: Sequence[Tensors], tensors: Tensors, what: str) -> None:
    """Raises TypeError or ValueError unless ``rows`` has, for each of ``tensors``, a list on its node that is as long
    as ``tensors``."""
    if len(rows) != len(tensors):
        raise ValueError(f"{what} takes one list per tensor: {len(rows)} lists for {len(tensors)} tensors")
    for i, (row, tensor) in enumerate(zip(rows, tensors, strict=True)):
        if not isinstance(row, Sequence) or len(row) != len(tensors):
            raise ValueError(f"{what}: list {i} has {len(row)} tensors for {len(tensors)}")
        same_nodes(row, [tensor] * len(row), f"{what}: list {i}")


@spelled
def all_gather_into_tensor(
    outs: Tensors, tensors: Tensors, group: Group | None = None, async_op: bool = False
) -> Work[Tensors] | None:
    """Gathers all tensors on every node as one: each of ``outs`` becomes ``torch.cat(tensors)``. Returns at once.

    Args:
        outs: the tensors to write, one per node, ``outs[i]`` on the node of ``tensors[i]``, of their dtype. One of
            another shape gets the shape of the result, and more memory if it needs that (as ``resize_`` does it).
        tensors: one tensor per node, of one dtype and at least one dimension. They may differ in their first size only.
        group: the nodes of the tensors, in their order. Default: the nodes that the tensors are on.
        async_op: return a Work, whose ``result()`` is ``outs``, instead of None.

    Raises TypeError for local tensors or dtypes that differ; ValueError for shapes that differ in more than the first
    size, or tensors that are not on the group's nodes; NodeLost.

        >>> rows = [torch.full((k + 1, 2), k, device=f"node:{k}") for k in range(2)]
        >>> outs = [torch.empty(0, dtype=torch.int64, device=f"node:{k}") for k in range(2)]
        >>> dt.collectives.all_gather_into_tensor(outs, rows)
        >>> outs[1].tolist()
        [[0, 0], [1, 1], [1, 1]]
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
    parts = [CollectivePart([read(x)], [out]) for x, out in zip(tensors, outs, strict=True)]
    lengths = tuple(tensor.numel() for tensor in tensors)
    return CollectiveCall("all_gather", group, parts, dtype=dtype, value=outs, shares=lengths).issue(session, async_op)
