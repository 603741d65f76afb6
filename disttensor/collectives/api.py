"""The collectives that take several forms: lists of tensors (tensor_collectives.py), a tensor on a mesh with ``over=``
(over_dims.py), and for ``all_reduce`` values that a function reduces (user_reduction.py)."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, Literal, overload

import torch

from ..futures.work import Work
from ..proxy.proxy import DistributedTensor
from ..runtime.collective import ReduceOp
from ..session.places import MeshPlace
from . import over_dims, tensor_collectives
from .groups import Group, Split
from .issue import Reduction
from .tensor_collectives import Algorithm, Tensors
from .user_reduction import Function, IsLeaf, Reduced, reduce_by


@overload
def all_reduce(
    tensors: Sequence[Any],
    op: Function,
    group: Group | None = None,
    *,
    algorithm: Algorithm = None,
    is_leaf: IsLeaf | None = None,
) -> Reduced: ...


@overload
def all_reduce(
    tensors: Tensors,
    op: Reduction = ReduceOp.SUM,
    group: Group | Split | None = None,
    async_op: Literal[False] = False,
    *,
    out: Tensors | None = None,
    algorithm: Algorithm = None,
    transport: torch.dtype | None = None,
) -> None: ...


@overload
def all_reduce(
    tensors: Tensors,
    op: Reduction = ReduceOp.SUM,
    group: Group | Split | None = None,
    *,
    async_op: Literal[True],
    out: Tensors | None = None,
    algorithm: Algorithm = None,
    transport: torch.dtype | None = None,
) -> Work[Tensors]: ...


@overload
def all_reduce(
    tensors: torch.Tensor,
    op: Reduction = ReduceOp.SUM,
    *,
    async_op: Literal[False] = False,
    over: str | Sequence[str],
    algorithm: Algorithm = None,
) -> DistributedTensor: ...


@overload
def all_reduce(
    tensors: torch.Tensor,
    op: Reduction = ReduceOp.SUM,
    *,
    async_op: Literal[True],
    over: str | Sequence[str],
    algorithm: Algorithm = None,
) -> Work[DistributedTensor]: ...


def all_reduce(
    tensors: Any,
    op: Any = ReduceOp.SUM,
    group: Group | Split | None = None,
    async_op: bool = False,
    *,
    is_leaf: IsLeaf | None = None,
    algorithm: Algorithm = None,
    **options: Any,
) -> Work[Any] | Reduced | DistributedTensor | None:
    """Reduces tensors over the nodes: each becomes the reduction of all, with the same bits on every node.

    Returns at once. An operation that uses the tensors later waits for them on its node.

        >>> xs = [torch.full((3,), float(k + 1), device=f"node:{k}") for k in range(2)]
        >>> dt.all_reduce(xs)
        >>> [x.tolist() for x in xs]
        [[3.0, 3.0, 3.0], [3.0, 3.0, 3.0]]

    Args:
        tensors: a list of tensors on nodes, one or more per node, all of one shape and dtype. They are written in
            place, unless ``out`` is given.
        op: the reduction: a ReduceOp, torch.distributed's, or its name. There are SUM, AVG (of floating-point and
            complex numbers), PRODUCT, MIN, MAX, BAND, BOR, BXOR; complex numbers have SUM and AVG only. Or a function
            of two values: see below.
        group: the nodes of the tensors, in their order. Default: the nodes that the tensors are on. A split
            (``group.split(key)``): within its groups first, then between them; without one, so for hosts.
        async_op: return a Work, whose ``result()`` is the list that was written, instead of None. Later operations on
            the nodes then run beside the collective, unless they use a tensor that it writes.
        is_leaf: for a function only: ``is_leaf(x)`` says that ``x``, though nested, is one leaf to it.
        algorithm: "all", "doubling", "halving", "direct", "ring", "tree", or a ``Way``. Default: chosen by size and
            number of nodes. For a function: a tree, such as ``Way("tree", base=4)``, which is wider than the
            default.
        out: a list of tensors to write instead, with the nodes, shapes and dtype of ``tensors``, which then stay as
            they are.
        transport: torch.bfloat16 or torch.float16, as which floats of more bits travel. They lose precision.

    With a function as ``op`` the values may be nested (lists, dicts, ... of tensors, numbers, anything), all in the
    same way. They stay as they are. The result is a ``Reduced``: the new values, and the number of values that
    contributed. A value that is None (of a node, say, that has no data left) does not contribute, and gets the result
    all the same; ``group`` says which node it belongs to, unless there is one value for each node of the session.

        >>> x, y = xs
        >>> sums, contributors = dt.all_reduce([{"w": x, "n": 1}, {"w": y, "n": 2}], lambda a, b: a + b)
        >>> [(s["w"].tolist(), s["n"]) for s in sums], contributors
        ([([6.0, 6.0, 6.0], 3), ([6.0, 6.0, 6.0], 3)], 2)

    ``fn(a, b)`` joins two leaves, that of the lower value first, and may write them; it has to be associative.

    With ``over``, the name of a dim of a mesh or several, it takes one tensor on a mesh, which stays as it is, and
    returns a new one, or with ``async_op`` a Work that gives it: on each rank the reduction of its group, with a
    gradient where ``op`` is SUM or AVG (docs/MESHES.md).

    Raises, at the line of the call, TypeError for local tensors, dtypes that differ, a dtype that ``op`` does not take,
    or ``async_op``, ``out`` or ``transport`` beside a function; ValueError for shapes or nestings that differ, tensors
    that are not on the group's nodes, one tensor where there are several nodes (unless ``group`` says that it is meant
    so), or an algorithm that does not exist; NodeLost. A node whose tensor is poisoned takes part, and the results are
    poisoned on all nodes.
    """
    given: Any = tensors
    # lists name a tensor for each node; on a mesh one tensor is all of them, and its groups are along dims
    if "over" in options or (isinstance(given, DistributedTensor) and isinstance(given._place, MeshPlace)):
        over_dims.no_options("all_reduce", group=group, is_leaf=is_leaf, **{**options, "over": None})
        over = options.get("over")
        return over_dims.all_reduce(given, op, over, async_op, algorithm)  # type: ignore[no-any-return]
    if callable(op) and not isinstance(getattr(op, "name", None), str):  # torch's have a name, and can be called, too
        if async_op or options:
            raise TypeError("all_reduce by a function takes no async_op, out or transport")
        return reduce_by(op, tensors, group, algorithm, is_leaf)
    return tensor_collectives.all_reduce(tensors, op, group, async_op, algorithm=algorithm, **options)


def _also_over(lists: Callable[..., Any], on_mesh: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a collective of lists of tensors that takes a tensor on a mesh, too."""

    @wraps(lists)
    def call(*args: Any, **kwargs: Any) -> Any:
        first: Any = args[0] if args else None
        # lists name a tensor for each node; on a mesh one tensor is all of them, and its groups are along dims
        if "over" in kwargs or (isinstance(first, DistributedTensor) and isinstance(first._place, MeshPlace)):
            return on_mesh(*args, **kwargs)
        return lists(*args, **kwargs)

    called = on_mesh.__name__
    call.__doc__ = (
        f"{lists.__doc__}\n    With ``over`` it is, for a tensor on a mesh: {_form(on_mesh)}\n\n    {on_mesh.__doc__}"
    )
    call.__name__ = call.__qualname__ = called
    return call


def _form(function: Callable[..., Any]) -> str:
    names = ", ".join(inspect.signature(function).parameters)
    return f"``{function.__name__}({names})``"


all_gather = _also_over(tensor_collectives.all_gather, over_dims.all_gather)
all_to_all = _also_over(tensor_collectives.all_to_all, over_dims.all_to_all)
broadcast = _also_over(tensor_collectives.broadcast, over_dims.broadcast)
reduce_scatter = _also_over(tensor_collectives.reduce_scatter, over_dims.reduce_scatter)
