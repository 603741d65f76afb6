"""Collectives as torch.distributed names them, called once here for all nodes: over a list of tensors, one per node.

    xs = [torch.ones(3, device=f"node:{k}") * k for k in range(4)]
    dt.all_reduce(xs)                     # in place: each is their sum now
    work = dt.all_reduce(xs, async_op=True)
    ...                                   # what does not use xs runs beside it
    work.wait()

All return at once, as every operation does; what uses the tensors later waits on its node. ``src`` and ``dst`` are
numbers of nodes. ``group`` (default: the nodes that the tensors are on) checks that they are where one thinks they are.
``all_reduce``, ``reduce``, ``broadcast`` and ``all_gather`` take any number of tensors per node, on any of its devices.

With ``async_op=True`` they give a Work, and later operations on the nodes don't wait for the collective unless they
use what it writes, by the same tensor (not by a view of it, before ``wait``). A node does one collective at a time.

    algorithm   "ring", "tree", ... or a ``Way`` (its base, its chunks), in place of what fits size and number of nodes
    transport   torch.bfloat16 or torch.float16: floats of more bits travel as these, and lose precision

A node whose tensor is poisoned takes part all the same, and what depends on it is poisoned everywhere. All raise at
once, at the line of the call: TypeError for local tensors, dtypes that differ or that the reduction does not take;
ValueError for shapes that differ, nodes that are named twice or are not in the group; NodeLost. Differentiable ones,
which give new tensors, are in ``dt.functional``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..errors.argument_checks import spelled
from ..futures.work import Work
from ..runtime.collective import ReduceOp, Way
from ..session.current import session as current_session
from .groups import Group, Split, new_group
from .issue import CollectiveCall, Part, alike, group_of, list_of, lists_of, named, op_of, read, same_shape, written
from .multi_tensor import node_tensors_of, rows_of, same_nodes

Tensors = Sequence[torch.Tensor]
Algorithm = str | Way | None


@spelled
def all_reduce(
    tensors: Tensors,
    op: Any = ReduceOp.SUM,
    group: Group | Split | None = None,
    async_op: bool = False,
    *,
    out: Tensors | None = None,
    algorithm: Algorithm = None,
    transport: torch.dtype | None = None,
) -> Work | None:
    """Each of ``tensors`` (or of ``out``, then those stay as they are) becomes the reduction of all; to the same bits.

    ``result()`` of the Work is the list that was written.
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
    parts = [Part([read(tensors[i]) for i in its], [targets[i] for i in its]) for its in all_of.members]
    joint = CollectiveCall(what, all_of.group, parts, op, 0, algorithm, transport, dtype, targets, all_of.shares)
    return joint.issue(all_of.session, async_op)


@spelled
def reduce(
    tensors: Tensors,
    dst: int,
    op: Any = ReduceOp.SUM,
    group: Group | None = None,
    async_op: bool = False,
    *,
    algorithm: Algorithm = None,
    transport: torch.dtype | None = None,
) -> Work | None:
    """The tensor on node ``dst`` (the first there) becomes the reduction of all; the others stay as they are."""
    what = "reduce"
    all_of = node_tensors_of(tensors, group, what)
    dtype, root = alike(tensors, what), all_of.group.rank(dst)
    op = op_of(op, dtype)
    target = tensors[all_of.members[root][0]]
    written(target)
    parts = [
        Part([read(tensors[k]) for k in its], [target] if i == root else []) for i, its in enumerate(all_of.members)
    ]
    joint = CollectiveCall(what, all_of.group, parts, op, root, algorithm, transport, dtype, target, all_of.shares)
    return joint.issue(all_of.session, async_op)


@spelled
def broadcast(
    tensors: Tensors,
    src: int,
    group: Group | Split | None = None,
    async_op: bool = False,
    *,
    algorithm: Algorithm = None,
) -> Work | None:
    """Every tensor becomes that on node ``src`` (the first there)."""
    what = "broadcast"
    all_of = node_tensors_of(tensors, group, what)
    dtype, root = alike(tensors, what), all_of.group.rank(src)
    source = all_of.members[root][0]
    parts = [Part([], [tensors[i] for i in its if i != source]) for its in all_of.members]
    parts[root].inputs = [read(tensors[source])]
    written(*(x for part in parts for x in part.outs))
    joint = CollectiveCall(what, all_of.group, parts, ReduceOp.SUM, root, algorithm, None, dtype, tensors, all_of.shares)
    return joint.issue(all_of.session, async_op)


@spelled
def all_gather(
    tensor_lists: Sequence[Tensors],
    tensors: Tensors,
    group: Group | None = None,
    async_op: bool = False,
    *,
    algorithm: Algorithm = None,
) -> Work | None:
    """``tensor_lists[i][j]``, on the node of ``tensors[i]``, becomes ``tensors[j]``. These may differ in shape."""
    what = "all_gather"
    all_of = node_tensors_of(tensors, group, what)
    dtype = alike(tensors, what, shapes=False)
    rows_of(tensor_lists, tensors, what)
    for outs in tensor_lists:
        written(*outs)
        for j, (one, other) in enumerate(zip(outs, tensors, strict=True)):
            same_shape(one, other, f"{what}: tensor {j} of a list")
    parts = [
        Part([read(tensors[i]) for i in its], [tensor_lists[i][j] for i in its for j in all_of.order])
        for its in all_of.members
    ]
    joint = CollectiveCall(what, all_of.group, parts, ReduceOp.SUM, 0, algorithm, None, dtype, tensor_lists, all_of.shares)
    return joint.issue(all_of.session, async_op)


@spelled
def gather(
    tensors: Tensors, gather_list: Tensors, dst: int, group: Group | None = None, async_op: bool = False
) -> Work | None:
    """``gather_list[j]``, on node ``dst``, becomes ``tensors[j]``. These may differ in shape."""
    what = "gather"
    group, session = group_of(tensors, group, what)
    dtype, root = alike(tensors, what, shapes=False), group.rank(dst)
    list_of(gather_list, dst, group, f"{what}: gather_list")
    written(*gather_list)
    for j, (one, other) in enumerate(zip(gather_list, tensors, strict=True)):
        same_shape(one, other, f"{what}: gather_list[{j}]")
    parts = [Part([read(x)], gather_list if i == root else []) for i, x in enumerate(tensors)]
    return CollectiveCall(what, group, parts, root=root, dtype=dtype, value=gather_list).issue(session, async_op)


@spelled
def scatter(
    tensors: Tensors, scatter_list: Tensors, src: int, group: Group | None = None, async_op: bool = False
) -> Work | None:
    """``tensors[j]`` becomes ``scatter_list[j]``, which is on node ``src``. These may differ in shape."""
    what = "scatter"
    group, session = group_of(tensors, group, what)
    dtype, root = alike(tensors, what, shapes=False), group.rank(src)
    list_of(scatter_list, src, group, f"{what}: scatter_list")
    written(*tensors)
    for j, (one, other) in enumerate(zip(tensors, scatter_list, strict=True)):
        same_shape(one, other, f"{what}: tensor {j}")
    parts = [Part(list(map(read, scatter_list)) if i == root else [], [x]) for i, x in enumerate(tensors)]
    return CollectiveCall(what, group, parts, root=root, dtype=dtype, value=tensors).issue(session, async_op)


@spelled
def reduce_scatter(
    tensors: Tensors,
    input_lists: Sequence[Tensors],
    op: Any = ReduceOp.SUM,
    group: Group | None = None,
    async_op: bool = False,
    *,
    algorithm: Algorithm = None,
    transport: torch.dtype | None = None,
) -> Work | None:
    """``tensors[j]`` becomes the reduction of all ``input_lists[i][j]``, of which list i is on the node of
    ``tensors[i]``."""
    what = "reduce_scatter"
    group, session = group_of(tensors, group, what)
    dtype = alike(tensors, what, shapes=False)
    op = op_of(op, dtype)
    written(*tensors)
    for inputs in lists_of(input_lists, group, what):
        for j, (one, other) in enumerate(zip(tensors, inputs, strict=True)):
            same_shape(one, other, f"{what}: tensor {j}")
    parts = [Part(list(map(read, inputs)), [x]) for x, inputs in zip(tensors, input_lists, strict=True)]
    return CollectiveCall(what, group, parts, op, 0, algorithm, transport, dtype, tensors).issue(session, async_op)


@spelled
def all_to_all(
    output_lists: Sequence[Tensors], input_lists: Sequence[Tensors], group: Group | None = None, async_op: bool = False
) -> Work | None:
    """``output_lists[i][j]`` becomes ``input_lists[j][i]``; lists i are on the group's node i."""
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
    parts = [Part(list(map(read, inputs)), outs) for inputs, outs in zip(input_lists, output_lists, strict=True)]
    return CollectiveCall(what, group, parts, dtype=dtype, value=output_lists).issue(session, async_op)


@spelled
def sendreceive(tensors: Tensors, shift: int = 1, group: Group | None = None, async_op: bool = False) -> Work | None:
    """A shift around the ring: the tensor of each node becomes that of the node ``shift`` places before it."""
    what = "sendreceive"
    group, session = group_of(tensors, group, what)
    dtype = alike(tensors, what)
    written(*tensors)
    parts = [Part([read(x)], [x]) for x in tensors]
    joint = CollectiveCall("shift", group, parts, root=shift % len(group), dtype=dtype, value=tensors)
    return joint.issue(session, async_op)


@spelled
def send(tensor: torch.Tensor, target: torch.Tensor, async_op: bool = False) -> Work | None:
    """``target``, a tensor on another node, becomes ``tensor``. (``tensor.to("node:1")`` makes a new one.)"""
    what = "send"
    group, session = group_of([tensor, target], None, what)
    same_shape(target, tensor, what)
    written(target)
    parts = [Part([read(tensor)], []), Part([], [target])]
    return CollectiveCall("broadcast", group, parts, dtype=tensor.dtype, value=target).issue(session, async_op)


@spelled
def recv(target: torch.Tensor, tensor: torch.Tensor, async_op: bool = False) -> Work | None:
    """``target`` becomes ``tensor``, which is on another node: ``send`` the other way around."""
    return send(tensor, named(target, "recv: the target"), async_op)


@spelled
def barrier(group: Group | None = None, async_op: bool = False) -> Work | None:
    """No node of the group (default: all) goes on before each has done what was issued to it before.

    That is among nodes, and returns at once; ``synchronize`` waits for them here.
    """
    group = new_group() if group is None else group
    return CollectiveCall("barrier", group, [Part() for _ in group]).issue(current_session(), async_op)
