"""Collectives with the names of torch.distributed. The script calls each once, with a list of tensors, one per node.

    xs = [torch.ones(3, device=f"node:{k}") * k for k in range(4)]
    dt.all_reduce(xs)                     # in place: each is their sum now
    work = dt.all_reduce(xs, async_op=True)
    ...                                   # operations that do not use xs run beside the collective
    work.wait()

All collectives return at once, as every operation does; an operation that uses the tensors later waits on its node.
``src`` and ``dst`` are numbers of nodes. ``group`` (default: the nodes that the tensors are on) checks that the tensors
are on the expected nodes, in that order. ``all_reduce``, ``reduce``, ``broadcast`` and ``all_gather`` take any number
of tensors per node, on any of its devices.

With ``async_op=True`` collectives return a Work, and later operations on the nodes don't wait for the collective unless
they use a tensor that it writes, by the same Python tensor (not by a view of it, before ``wait``). A node does one
collective at a time. A small one leaves as an operation does: at once, or with those that follow it in the next
milliseconds.

    algorithm   "ring", "tree", ... or a ``Way`` (with base and chunk size), in place of one chosen by size and nodes
    transport   torch.bfloat16 or torch.float16: floats of more bits travel as these, and lose precision

A node whose tensor is poisoned takes part all the same, and every tensor that depends on the poisoned one is poisoned,
on all nodes. All collectives raise at once, at the line of the call: TypeError for local tensors, dtypes that differ or
that the reduction does not take; ValueError for shapes that differ, nodes that are named twice or are not in the group;
NodeLost. Differentiable collectives, which return new tensors, are in ``dt.collectives.functional``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..errors.argument_checks import spelled, whole_number
from ..futures.work import Work
from ..runtime.collective import ReduceOp, Way
from ..session.current import session as current_session
from .groups import Group, Split, given_group
from .issue import (
    CollectiveCall,
    CollectivePart,
    Reduction,
    alike,
    group_of,
    list_of,
    lists_of,
    named,
    op_of,
    read,
    same_shape,
    written,
)
from .multi_tensor import node_tensors_of, rows_of, same_nodes

Tensors = Sequence[torch.Tensor]
Algorithm = str | Way | None


@spelled
def all_reduce(
    tensors: Tensors,
    op: Reduction = ReduceOp.SUM,
    group: Group | Split | None = None,
    async_op: bool = False,
    *,
    out: Tensors | None = None,
    algorithm: Algorithm = None,
    transport: torch.dtype | None = None,
) -> Work[Tensors] | None:
    """Reduces tensors over the nodes: each becomes the reduction of all, with the same bits on every node.

    ``disttensor.all_reduce`` calls this function unless ``op`` is a function, and describes the arguments. ``result()``
    of the Work is the list that was written: ``tensors``, or ``out``.
    """
    what = "all_reduce"
    all_of = node_tensors_of(tensors, group, what)
    dtype = alike(tensors, what)
    op = op_of(op, dtype)
    targets = tensors if out is None else out
    written(*targets)
    if out is not None:
        same_nodes(out, tensors, f"{what}: out")
        for one in out:
            same_shape(one, tensors[0], f"{what}: out")
    inputs = tensors if out is None else list(map(read, tensors))
    parts = [CollectivePart([inputs[i] for i in its], [targets[i] for i in its]) for its in all_of.members]
    collective = CollectiveCall(what, all_of.group, parts, op, 0, algorithm, transport, dtype, targets, all_of.shares)
    return collective.issue(all_of.session, async_op)


@spelled
def reduce(
    tensors: Tensors,
    dst: int,
    op: Reduction = ReduceOp.SUM,
    group: Group | None = None,
    async_op: bool = False,
    *,
    algorithm: Algorithm = None,
    transport: torch.dtype | None = None,
) -> Work[torch.Tensor] | None:
    """Reduces tensors onto one node: the tensor on node ``dst`` becomes the reduction of all. Returns at once.

    Args:
        tensors: one or more tensors per node, all of one shape and dtype. Only the first one on ``dst`` is written; the
            others stay as they are.
        dst: the number of the node that gets the result.
        op: the reduction: a ReduceOp, torch.distributed's, or its name, as for ``all_reduce``.
        group: the nodes of the tensors, in their order. Default: the nodes that the tensors are on.
        async_op: return a Work, whose ``result()`` is the tensor that was written, instead of None.
        algorithm: "tree", "scatter", or a ``Way``. Default: chosen by size and number of nodes.
        transport: torch.bfloat16 or torch.float16, as which floats of more bits travel.

    Raises TypeError for local tensors, dtypes that differ, or a dtype that ``op`` does not take; ValueError for shapes
    that differ, tensors that are not on the group's nodes, or a ``dst`` outside of the group; NodeLost.
    """
    what = "reduce"
    all_of = node_tensors_of(tensors, group, what)
    dtype, root = alike(tensors, what), all_of.group.rank(dst)
    op = op_of(op, dtype)
    target = tensors[all_of.members[root][0]]
    written(target)
    parts = [
        CollectivePart([read(tensors[k]) for k in its], [target] if i == root else [])
        for i, its in enumerate(all_of.members)
    ]
    collective = CollectiveCall(what, all_of.group, parts, op, root, algorithm, transport, dtype, target, all_of.shares)
    return collective.issue(all_of.session, async_op)


@spelled
def broadcast(
    tensors: Tensors,
    src: int,
    group: Group | Split | None = None,
    async_op: bool = False,
    *,
    algorithm: Algorithm = None,
) -> Work[Tensors] | None:
    """Copies one node's tensor into the tensors of all others. Returns at once.

    Args:
        tensors: one or more tensors per node, all of one shape and dtype. The first one on ``src`` is read; all others,
            also those on ``src``, are written.
        src: the number of the node whose tensor is copied.
        group: the nodes of the tensors, in their order. Default: the nodes that the tensors are on. A split
            (``group.split(key)``): across its groups first, then within them; without one, so for hosts.
        async_op: return a Work, whose ``result()`` is ``tensors``, instead of None.
        algorithm: "tree", or a ``Way``. Default: chosen by size and number of nodes.

    Raises TypeError for local tensors or dtypes that differ; ValueError for shapes that differ, tensors that are not on
    the group's nodes, or a ``src`` outside of the group; NodeLost.
    """
    what = "broadcast"
    all_of = node_tensors_of(tensors, group, what)
    dtype, root = alike(tensors, what), all_of.group.rank(src)
    source = all_of.members[root][0]
    parts = [CollectivePart([], [tensors[i] for i in its if i != source]) for its in all_of.members]
    parts[root].inputs = [read(tensors[source])]
    written(*(x for part in parts for x in part.outs))
    collective = CollectiveCall(
        what, all_of.group, parts, ReduceOp.SUM, root, algorithm, None, dtype, tensors, all_of.shares
    )
    return collective.issue(all_of.session, async_op)


@spelled
def all_gather(
    tensor_lists: Sequence[Tensors],
    tensors: Tensors,
    group: Group | None = None,
    async_op: bool = False,
    *,
    algorithm: Algorithm = None,
) -> Work[Sequence[Tensors]] | None:
    """Gathers all tensors on every node: ``tensor_lists[i][j]`` becomes ``tensors[j]``. Returns at once.

    Args:
        tensor_lists: a list of tensors to write for each of ``tensors``, on its node. The j-th tensor of each list has
            the shape and dtype of ``tensors[j]``.
        tensors: one or more tensors per node, of one dtype. They may differ in shape.
        group: the nodes of the tensors, in their order. Default: the nodes that the tensors are on.
        async_op: return a Work, whose ``result()`` is ``tensor_lists``, instead of None.
        algorithm: "direct", "ring", or a ``Way``. Default: chosen by size and number of nodes.

    Raises TypeError for local tensors or dtypes that differ; ValueError for lists of another length or on another node,
    and shapes that do not fit; NodeLost.

        >>> rows = [[torch.empty(1, device=f"node:{i}") for j in range(2)] for i in range(2)]
        >>> dt.all_gather(rows, [torch.tensor([12.0], device="node:0"), torch.tensor([14.0], device="node:1")])
        >>> [[x.item() for x in row] for row in rows]
        [[12.0, 14.0], [12.0, 14.0]]
    """
    what = "all_gather"
    all_of = node_tensors_of(tensors, group, what)
    dtype = alike(tensors, what, shapes=False)
    rows_of(tensor_lists, tensors, what)
    for outs in tensor_lists:
        written(*outs)
        for j, (one, other) in enumerate(zip(outs, tensors, strict=True)):
            same_shape(one, other, f"{what}: tensor {j} of a list")
    parts = [
        CollectivePart([read(tensors[i]) for i in its], [tensor_lists[i][j] for i in its for j in all_of.order])
        for its in all_of.members
    ]
    collective = CollectiveCall(
        what, all_of.group, parts, ReduceOp.SUM, 0, algorithm, None, dtype, tensor_lists, all_of.shares
    )
    return collective.issue(all_of.session, async_op)


@spelled
def gather(
    tensors: Tensors, gather_list: Tensors, dst: int, group: Group | None = None, async_op: bool = False
) -> Work[Tensors] | None:
    """Gathers all tensors on one node: ``gather_list[j]`` becomes ``tensors[j]``. Returns at once.

    Args:
        tensors: one tensor per node, of one dtype. They may differ in shape.
        gather_list: the tensors to write, all on node ``dst``; the j-th has the shape and dtype of ``tensors[j]``.
        dst: the number of the node that gets the tensors.
        group: the nodes of the tensors, in their order. Default: the nodes that the tensors are on.
        async_op: return a Work, whose ``result()`` is ``gather_list``, instead of None.

    Raises TypeError for local tensors or dtypes that differ; ValueError for a list of another length or on another
    node, shapes that do not fit, or a ``dst`` outside of the group; NodeLost.
    """
    what = "gather"
    group, session = group_of(tensors, group, what)
    dtype, root = alike(tensors, what, shapes=False), group.rank(dst)
    list_of(gather_list, dst, group, f"{what}: gather_list")
    written(*gather_list)
    for j, (one, other) in enumerate(zip(gather_list, tensors, strict=True)):
        same_shape(one, other, f"{what}: gather_list[{j}]")
    parts = [CollectivePart([read(x)], gather_list if i == root else []) for i, x in enumerate(tensors)]
    return CollectiveCall(what, group, parts, root=root, dtype=dtype, value=gather_list).issue(session, async_op)


@spelled
def scatter(
    tensors: Tensors, scatter_list: Tensors, src: int, group: Group | None = None, async_op: bool = False
) -> Work[Tensors] | None:
    """Scatters one node's tensors over all nodes: ``tensors[j]`` becomes ``scatter_list[j]``. Returns at once.

    Args:
        tensors: the tensors to write, one per node, of one dtype. They may differ in shape.
        scatter_list: the tensors to read, all on node ``src``; the j-th has the shape and dtype of ``tensors[j]``.
        src: the number of the node that has the list.
        group: the nodes of the tensors, in their order. Default: the nodes that the tensors are on.
        async_op: return a Work, whose ``result()`` is ``tensors``, instead of None.

    Raises TypeError for local tensors or dtypes that differ; ValueError for a list of another length or on another
    node, shapes that do not fit, or a ``src`` outside of the group; NodeLost.
    """
    what = "scatter"
    group, session = group_of(tensors, group, what)
    dtype, root = alike(tensors, what, shapes=False), group.rank(src)
    list_of(scatter_list, src, group, f"{what}: scatter_list")
    written(*tensors)
    for j, (one, other) in enumerate(zip(tensors, scatter_list, strict=True)):
        same_shape(one, other, f"{what}: tensor {j}")
    parts = [CollectivePart(list(map(read, scatter_list)) if i == root else [], [x]) for i, x in enumerate(tensors)]
    return CollectiveCall(what, group, parts, root=root, dtype=dtype, value=tensors).issue(session, async_op)


@spelled
def reduce_scatter(
    tensors: Tensors,
    input_lists: Sequence[Tensors],
    op: Reduction = ReduceOp.SUM,
    group: Group | None = None,
    async_op: bool = False,
    *,
    algorithm: Algorithm = None,
    transport: torch.dtype | None = None,
) -> Work[Tensors] | None:
    """Reduces lists of tensors over the nodes and scatters the results: ``tensors[j]`` becomes the reduction of all
    ``input_lists[i][j]``. Returns at once.

    Args:
        tensors: the tensors to write, one per node, of one dtype. They may differ in shape.
        input_lists: one list per node, on the node of ``tensors[i]``, each as long as there are nodes. The j-th tensor
            of each list has the shape and dtype of ``tensors[j]``.
        op: the reduction: a ReduceOp, torch.distributed's, or its name, as for ``all_reduce``.
        group: the nodes of ``tensors``, in their order. Default: the nodes that they are on.
        async_op: return a Work, whose ``result()`` is ``tensors``, instead of None.
        algorithm: "direct", "ring", or a ``Way``. Default: chosen by size and number of nodes.
        transport: torch.bfloat16 or torch.float16, as which floats of more bits travel.

    Raises TypeError for local tensors, dtypes that differ, or a dtype that ``op`` does not take; ValueError for lists
    of another length or on another node, and shapes that do not fit; NodeLost.

        >>> inputs = [[torch.tensor([1.0 + 10 * i + j], device=f"node:{i}") for j in range(2)] for i in range(2)]
        >>> outs = [torch.empty(1, device=f"node:{i}") for i in range(2)]
        >>> dt.collectives.reduce_scatter(outs, inputs)
        >>> [[x.item() for x in row] for row in inputs], [out.item() for out in outs]
        ([[1.0, 2.0], [11.0, 12.0]], [12.0, 14.0])
    """
    what = "reduce_scatter"
    group, session = group_of(tensors, group, what)
    dtype = alike(tensors, what, shapes=False)
    op = op_of(op, dtype)
    written(*tensors)
    for inputs in lists_of(input_lists, group, what):
        for j, (one, other) in enumerate(zip(tensors, inputs, strict=True)):
            same_shape(one, other, f"{what}: tensor {j}")
    parts = [CollectivePart(list(map(read, inputs)), [x]) for x, inputs in zip(tensors, input_lists, strict=True)]
    return CollectiveCall(what, group, parts, op, 0, algorithm, transport, dtype, tensors).issue(session, async_op)


@spelled
def all_to_all(
    output_lists: Sequence[Tensors], input_lists: Sequence[Tensors], group: Group | None = None, async_op: bool = False
) -> Work[Sequence[Tensors]] | None:
    """Transposes lists of tensors: ``output_lists[i][j]`` becomes ``input_lists[j][i]``. Returns at once.

    Args:
        output_lists: the tensors to write: one list per node, on the group's i-th node, each as long as there are
        nodes.
        input_lists: the tensors to read: lists of the same lengths, on the same nodes. All tensors have one dtype; they
            may differ in shape, and each output has the shape of the input that it becomes.
        group: the nodes of the lists, in their order. Default: the nodes of the first tensors of ``output_lists``.
        async_op: return a Work, whose ``result()`` is ``output_lists``, instead of None.

    Raises TypeError for local tensors or dtypes that differ; ValueError for lists of another length or on another node,
    and shapes that do not fit; NodeLost.

        >>> inputs = [[torch.tensor([1.0 + 10 * i + j], device=f"node:{i}") for j in range(2)] for i in range(2)]
        >>> outputs = [[torch.empty(1, device=f"node:{i}") for j in range(2)] for i in range(2)]
        >>> dt.collectives.all_to_all(outputs, inputs)
        >>> [[x.item() for x in row] for row in outputs]
        [[1.0, 11.0], [2.0, 12.0]]
    """
    what = "all_to_all"
    for lists in (output_lists, input_lists):
        if not lists or not all(lists):
            raise ValueError(f"{what} takes a list of tensors per node")
    group, session = group_of([outs[0] for outs in output_lists], group, what)
    lists_of(output_lists, group, f"{what}: outputs")
    lists_of(input_lists, group, f"{what}: inputs")
    dtype = alike([x for inputs in input_lists for x in inputs], what, shapes=False)
    for i, outs in enumerate(output_lists):
        written(*outs)
        for j, one in enumerate(outs):
            same_shape(one, input_lists[j][i], f"{what}: output {j} of list {i}")
    parts = [
        CollectivePart(list(map(read, inputs)), outs) for inputs, outs in zip(input_lists, output_lists, strict=True)
    ]
    return CollectiveCall(what, group, parts, dtype=dtype, value=output_lists).issue(session, async_op)


@spelled
def sendreceive(
    tensors: Tensors, shift: int = 1, group: Group | None = None, async_op: bool = False
) -> Work[Tensors] | None:
    """Shifts tensors around the ring of nodes: each becomes the tensor of the node ``shift`` places before its own.
    Returns at once.

    Args:
        tensors: one tensor per node, all of one shape and dtype, written in place.
        shift: a number of places in the group; it may be negative.
        group: the nodes of the tensors, in their order. Default: the nodes that the tensors are on.
        async_op: return a Work, whose ``result()`` is ``tensors``, instead of None.

    Raises TypeError for local tensors, dtypes that differ, a shift that is not a number; ValueError for shapes that
    differ, or tensors that are not on the group's nodes; NodeLost.
    """
    what = "sendreceive"
    by = whole_number(f"{what}: shift", shift, None)
    group, session = group_of(tensors, group, what)
    dtype = alike(tensors, what)
    written(*tensors)
    parts = [CollectivePart([read(x)], [x]) for x in tensors]
    collective = CollectiveCall("shift", group, parts, root=by % len(group), dtype=dtype, value=tensors)
    return collective.issue(session, async_op)


@spelled
def send(tensor: torch.Tensor, target: torch.Tensor, async_op: bool = False) -> Work[torch.Tensor] | None:
    """Copies ``tensor`` into ``target``, a tensor of the same shape and dtype on another node. Returns at once.

    (``tensor.to("node:1")`` makes a new tensor.) With ``async_op=True`` returns a Work, whose ``result()`` is
    ``target``. Raises TypeError for local tensors or another dtype; ValueError for another shape, or tensors on one
    node; NodeLost.
    """
    what = "send"
    group, session = group_of([tensor, target], None, what)
    same_shape(target, tensor, what)
    written(target)
    parts = [CollectivePart([read(tensor)], []), CollectivePart([], [target])]
    return CollectiveCall("broadcast", group, parts, dtype=tensor.dtype, value=target).issue(session, async_op)


@spelled
def recv(target: torch.Tensor, tensor: torch.Tensor, async_op: bool = False) -> Work[torch.Tensor] | None:
    """Copies ``tensor``, which is on another node, into ``target``: ``send`` with its operands the other way around."""
    return send(tensor, named(target, "recv: the target"), async_op)


@spelled
def barrier(group: Group | None = None, async_op: bool = False) -> Work[None] | None:
    """Has the nodes of the group (default: all) wait until each has done everything that was issued to it before.

    The nodes wait for each other and the script for none: this returns at once (with ``async_op=True`` a Work);
    ``synchronize`` has the script wait for the nodes. Raises NodeLost.
    """
    group = given_group(group, "barrier")
    return CollectiveCall("barrier", group, [CollectivePart() for _ in group]).issue(current_session(), async_op)
