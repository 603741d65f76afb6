"""Differentiable collectives, as ``torch.distributed.nn.functional``: they return new tensors that carry gradients.

Each collective takes a list of tensors, one per node, and returns lists in the same order; it returns at once. The
gradients are those of the one computation that the script does: after ``ys = all_reduce(xs)`` each ``y`` depends on
each ``x``. Reductions other than sums and averages have no gradient, and raise RuntimeError for tensors that require
one; all other errors are those of ``dt.all_reduce`` and its like.

    w = torch.ones(2, device="node:1", requires_grad=True)
    ys = dt.collectives.functional.all_reduce([w.to("node:0") * 2, w * 3])      # [5, 5] on both nodes
    (ys[0].sum().cpu() + ys[1].sum().cpu()).backward()              # w.grad is [10, 10]
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..errors.argument_checks import spelled
from ..runtime.collective import ReduceOp
from . import tensor_collectives
from .groups import Group, Split, given_group
from .issue import Reduction, group_of, list_of, lists_of, named, op_of
from .multi_tensor import node_tensors_of

Tensors = Sequence[torch.Tensor]


@spelled
def all_reduce(
    tensors: Tensors, op: Reduction = ReduceOp.SUM, group: Group | Split | None = None
) -> list[torch.Tensor]:
    """Returns a list with the reduction of all ``tensors``, once for each of them, on its device.

    Args:
        tensors: one or more tensors per node, all of one shape and dtype. They stay as they are.
        op: the reduction: a ReduceOp, torch.distributed's, or its name. Only SUM and AVG have gradients.
        group: the nodes of the tensors, in their order. Default: the nodes that the tensors are on. A split: within its
            groups first, then between them.
    """
    group = node_tensors_of(tensors, group, "all_reduce").group
    return list(_apply(_AllReduce, _linear(op, tensors), group, *tensors))


@spelled
def reduce(tensors: Tensors, dst: int, op: Reduction = ReduceOp.SUM, group: Group | None = None) -> torch.Tensor:
    """Returns the reduction of all ``tensors`` (one per node, of one shape and dtype), a tensor on node ``dst``.

    Args:
        tensors: one tensor per node, all of one shape and dtype. They stay as they are.
        dst: the number of the node that gets the result.
        op: the reduction: a ReduceOp, torch.distributed's, or its name. Only SUM and AVG have gradients.
        group: the nodes of the tensors, in their order. Default: the nodes that the tensors are on.
    """
    group, _ = group_of(tensors, group, "reduce")
    return _apply(_Reduce, _linear(op, tensors), group, dst, *tensors)[0]


@spelled
def broadcast(tensor: torch.Tensor, group: Group) -> list[torch.Tensor]:
    """Returns copies of a tensor, one on each node of the group, on the device of the same name.

    Raises ValueError unless the tensor's node is in the group.
    """
    return list(_apply(_Broadcast, given_group(group, "broadcast"), tensor))


@spelled
def all_gather(tensors: Tensors, group: Group | None = None) -> list[list[torch.Tensor]]:
    """Returns copies of all ``tensors`` on every node: a list per node, in the order of ``tensors``.

    ``tensors`` are one per node, of one dtype; they may differ in shape.
    """
    group, _ = group_of(tensors, group, "all_gather")
    return _rows(_apply(_AllGather, group, *tensors), len(group))


@spelled
def gather(tensors: Tensors, dst: int, group: Group | None = None) -> list[torch.Tensor]:
    """Returns copies of all ``tensors`` (one per node, of one dtype and any shapes) on node ``dst``, in their order."""
    return list(_apply(_Gather, group_of(tensors, group, "gather")[0], dst, *tensors))


@spelled
def scatter(tensors: Tensors, group: Group) -> list[torch.Tensor]:
    """Returns copies of one node's tensors, the i-th on the i-th node of the group.

    ``tensors`` are all on one node of the group, one for each of its nodes, of one dtype; they may differ in shape.
    """
    group = given_group(group, "scatter")
    list_of(tensors, named(tensors[0], "scatter: tensor 0")._place.one.node, group, "scatter: the list")
    return list(_apply(_Scatter, group, *tensors))


@spelled
def reduce_scatter(
    input_lists: Sequence[Tensors], op: Reduction = ReduceOp.SUM, group: Group | None = None
) -> list[torch.Tensor]:
    """Returns a list whose j-th tensor, on the group's j-th node, is the reduction of all ``input_lists[i][j]``.

    ``input_lists`` are one list per node, on the group's i-th node, each as long as there are nodes. All tensors have
    one dtype, and the j-th ones of all lists one shape. Only SUM and AVG have gradients.
    """
    group, _ = group_of([inputs[0] for inputs in input_lists], group, "reduce_scatter")
    lists_of(input_lists, group, "reduce_scatter")
    flat = [x for inputs in input_lists for x in inputs]
    return list(_apply(_ReduceScatter, _linear(op, flat), group, *flat))


@spelled
def all_to_all(input_lists: Sequence[Tensors], group: Group | None = None) -> list[list[torch.Tensor]]:
    """Returns ``outputs``, of which ``outputs[i][j]``, on the group's i-th node, is a copy of ``input_lists[j][i]``.

    ``input_lists`` are one list per node, on that node, each as long as there are nodes. All tensors have one dtype;
    they may differ in shape.
    """
    group, _ = group_of([inputs[0] for inputs in input_lists], group, "all_to_all")
    lists_of(input_lists, group, "all_to_all")
    return _rows(_apply(_AllToAll, group, *[x for inputs in input_lists for x in inputs]), len(group))


def _linear(op: Any, tensors: Tensors) -> ReduceOp:
    """Returns ``op`` as a ReduceOp. Raises RuntimeError for one that has no gradient, if a tensor requires one."""
    found: ReduceOp = op_of(op, tensors[0].dtype)
    if found not in (ReduceOp.SUM, ReduceOp.AVG) and torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        raise RuntimeError(f"a reduction by {found.name} has no gradient; detach its inputs")
    return found


def _apply(function: type[torch.autograd.Function], *args: Any) -> tuple[torch.Tensor, ...]:
    return function.apply(*args)  # type: ignore[no-any-return]


def _rows(flat: Sequence[Any], length: int) -> list[list[Any]]:
    return [list(flat[i : i + length]) for i in range(0, len(flat), length)]


def _empty(like: torch.Tensor, there: torch.Tensor) -> torch.Tensor:
    """Returns an uninitialized tensor with the shape and dtype of ``like`` at the place of ``there``."""
    return torch.empty(like.shape, dtype=like.dtype, device=there.device)


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, op: ReduceOp, group: Group, *xs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.op, ctx.group = op, group
        outs = tuple(_empty(x, x) for x in xs)
        tensor_collectives.all_reduce(xs, op, group, out=outs)
        return outs

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return None, None, *all_reduce(grads, ctx.op, ctx.group)


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, op: ReduceOp, group: Group, dst: int, *xs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.average, ctx.group = op is ReduceOp.AVG, group
        out = [x.clone() if node == dst else x for node, x in zip(group, xs, strict=True)]
        tensor_collectives.reduce(out, dst, op, group)
        return (out[group.rank(dst)],)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return None, None, None, *broadcast(grad / len(ctx.group) if ctx.average else grad, ctx.group)


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: Group, x: Any) -> tuple[torch.Tensor, ...]:
        ctx.group, ctx.node, places = group, x._place.one.node, x._place.session.places
        outs = tuple(
            x.clone(memory_format=torch.contiguous_format)
            if node == ctx.node
            else torch.empty(x.shape, dtype=x.dtype, device=places.at(node, x._place.name).device)
            for node in group
        )
        tensor_collectives.broadcast(outs, ctx.node, group)
        return outs

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return None, reduce(grads, ctx.node, ReduceOp.SUM, ctx.group)


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: Group, *xs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.group = group
        outs = [[_empty(x, there) for x in xs] for there in xs]
        tensor_collectives.all_gather(outs, xs, group)
        return tuple(out for row in outs for out in row)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return None, *reduce_scatter(_rows(grads, len(ctx.group)), ReduceOp.SUM, ctx.group)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: Group, dst: int, *xs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.group = group
        outs = tuple(_empty(x, xs[group.rank(dst)]) for x in xs)
        tensor_collectives.gather(xs, outs, dst, group)
        return outs

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return None, None, *scatter(grads, ctx.group)


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: Group, *xs: Any) -> tuple[torch.Tensor, ...]:
        place = xs[0]._place
        ctx.group, ctx.node = group, place.one.node
        outs = tuple(
            torch.empty(x.shape, dtype=x.dtype, device=place.session.places.at(node, place.name).device)
            for node, x in zip(group, xs, strict=True)
        )
        tensor_collectives.scatter(outs, xs, place.node, group)
        return outs

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return None, *gather(grads, ctx.node, ctx.group)


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, op: ReduceOp, group: Group, *flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.average, ctx.group = op is ReduceOp.AVG, group
        rows = _rows(flat, len(group))
        outs = tuple(_empty(row[j], row[j]) for j, row in enumerate(rows))
        tensor_collectives.reduce_scatter(outs, rows, op, group)
        return outs

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        given = [grad / len(ctx.group) for grad in grads] if ctx.average else grads
        return None, None, *[grad for row in all_gather(given, ctx.group) for grad in row]


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: Group, *flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.group = group
        rows = _rows(flat, len(group))
        outs = [[_empty(rows[j][i], rows[i][0]) for j in range(len(group))] for i in range(len(group))]
        tensor_collectives.all_to_all(outs, rows, group)
        return tuple(out for row in outs for out in row)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return None, *[grad for row in all_to_all(_rows(grads, len(ctx.group)), ctx.group) for grad in row]
