"""Differentiable collectives, as ``torch.distributed.nn.functional``: they give new tensors that carry gradients.

Each takes a list of tensors, one per node, and gives lists in the same order. The gradients are those of the whole,
which one script computes: of ``ys = all_reduce(xs)`` each ``y`` depends on each ``x``. Reductions other than sums and
averages have none, and raise RuntimeError for tensors that require one; else they raise as ``dt.all_reduce`` and its
like do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..errors.argument_checks import spelled
from ..runtime.collective import ReduceOp
from . import api
from .groups import Group, Split
from .issue import group_of, list_of, lists_of, named, op_of
from .multi_tensor import node_tensors_of

Tensors = Sequence[torch.Tensor]


@spelled
def all_reduce(tensors: Tensors, op: Any = ReduceOp.SUM, group: Group | Split | None = None) -> list[torch.Tensor]:
    """The reduction of all, for every tensor, of which a node may have several."""
    group = node_tensors_of(tensors, group, "all_reduce").group
    return list(_apply(_AllReduce, _linear(op, tensors), group, *tensors))


@spelled
def reduce(tensors: Tensors, dst: int, op: Any = ReduceOp.SUM, group: Group | None = None) -> torch.Tensor:
    """The reduction of all, on node ``dst``."""
    group, _ = group_of(tensors, group, "reduce")
    return _apply(_Reduce, _linear(op, tensors), group, dst, *tensors)[0]


@spelled
def broadcast(tensor: torch.Tensor, group: Group) -> list[torch.Tensor]:
    """A copy on every node of the group, of which the tensor's node is one."""
    return list(_apply(_Broadcast, group, tensor))


@spelled
def all_gather(tensors: Tensors, group: Group | None = None) -> list[list[torch.Tensor]]:
    """All of them on every node: a list per node."""
    group, _ = group_of(tensors, group, "all_gather")
    return _rows(_apply(_AllGather, group, *tensors), len(group))


@spelled
def gather(tensors: Tensors, dst: int, group: Group | None = None) -> list[torch.Tensor]:
    """All of them on node ``dst``."""
    return list(_apply(_Gather, group_of(tensors, group, "gather")[0], dst, *tensors))


@spelled
def scatter(tensors: Tensors, group: Group) -> list[torch.Tensor]:
    """Of a list of tensors on one node of the group, each on the node that it is for."""
    list_of(tensors, named(tensors[0], "scatter: tensor 0")._place.node, group, "scatter: the list")
    return list(_apply(_Scatter, group, *tensors))


@spelled
def reduce_scatter(
    input_lists: Sequence[Tensors], op: Any = ReduceOp.SUM, group: Group | None = None
) -> list[torch.Tensor]:
    """On node j the reduction of all ``input_lists[i][j]``, of which list i is on node i."""
    group, _ = group_of([inputs[0] for inputs in input_lists], group, "reduce_scatter")
    lists_of(input_lists, group, "reduce_scatter")
    flat = [x for inputs in input_lists for x in inputs]
    return list(_apply(_ReduceScatter, _linear(op, flat), group, *flat))


@spelled
def all_to_all(input_lists: Sequence[Tensors], group: Group | None = None) -> list[list[torch.Tensor]]:
    """``outputs[i][j]`` is ``input_lists[j][i]``, on node i."""
    group, _ = group_of([inputs[0] for inputs in input_lists], group, "all_to_all")
    lists_of(input_lists, group, "all_to_all")
    return _rows(_apply(_AllToAll, group, *[x for inputs in input_lists for x in inputs]), len(group))


def _linear(op: Any, tensors: Tensors) -> ReduceOp:
    """The reduction. Raises RuntimeError for one without a gradient, if that is required."""
    found: ReduceOp = op_of(op, tensors[0].dtype)
    if found not in (ReduceOp.SUM, ReduceOp.AVG) and torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        raise RuntimeError(f"a reduction by {found.name} has no gradient; detach its inputs")
    return found


def _apply(function: type[torch.autograd.Function], *args: Any) -> tuple[torch.Tensor, ...]:
    return function.apply(*args)  # type: ignore[no-any-return]


def _rows(flat: Sequence[Any], length: int) -> list[list[Any]]:
    return [list(flat[i : i + length]) for i in range(0, len(flat), length)]


def _empty(like: torch.Tensor, there: torch.Tensor) -> torch.Tensor:
    """For what ``like`` holds, at the place of ``there``."""
    return torch.empty(like.shape, dtype=like.dtype, device=there.device)


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, op: ReduceOp, group: Group, *xs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.op, ctx.group = op, group
        outs = tuple(_empty(x, x) for x in xs)
        api.all_reduce(xs, op, group, out=outs)
        return outs

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return None, None, *all_reduce(grads, ctx.op, ctx.group)


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, op: ReduceOp, group: Group, dst: int, *xs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.average, ctx.group = op is ReduceOp.AVG, group
        out = [x.clone() if node == dst else x for node, x in zip(group, xs, strict=True)]
        api.reduce(out, dst, op, group)
        return (out[group.rank(dst)],)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return None, None, None, *broadcast(grad / len(ctx.group) if ctx.average else grad, ctx.group)


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: Group, x: Any) -> tuple[torch.Tensor, ...]:
        ctx.group, ctx.node, places = group, x._place.node, x._place.session.places
        outs = tuple(
            x.clone(memory_format=torch.contiguous_format)
            if node == ctx.node
            else torch.empty(x.shape, dtype=x.dtype, device=places.at(node, x._place.name).device)
            for node in group
        )
        api.broadcast(outs, ctx.node, group)
        return outs

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return None, reduce(grads, ctx.node, ReduceOp.SUM, ctx.group)


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: Group, *xs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.group = group
        outs = [[_empty(x, there) for x in xs] for there in xs]
        api.all_gather(outs, xs, group)
        return tuple(out for row in outs for out in row)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return None, *reduce_scatter(_rows(grads, len(ctx.group)), ReduceOp.SUM, ctx.group)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: Group, dst: int, *xs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.group = group
        outs = tuple(_empty(x, xs[group.rank(dst)]) for x in xs)
        api.gather(xs, outs, dst, group)
        return outs

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return None, None, *scatter(grads, ctx.group)


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: Group, *xs: Any) -> tuple[torch.Tensor, ...]:
        place = xs[0]._place
        ctx.group, ctx.node = group, place.node
        outs = tuple(
            torch.empty(x.shape, dtype=x.dtype, device=place.session.places.at(node, place.name).device)
            for node, x in zip(group, xs, strict=True)
        )
        api.scatter(outs, xs, place.node, group)
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
        api.reduce_scatter(outs, rows, op, group)
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
        api.all_to_all(outs, rows, group)
        return tuple(out for row in outs for out in row)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return None, *[grad for row in all_to_all(_rows(grads, len(ctx.group)), ctx.group) for grad in row]
