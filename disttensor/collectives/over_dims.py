"""Collectives over dims of a mesh: one command for all of its nodes, each of which does its part in its own group.

They take a tensor on a mesh and names of dims, return a new tensor, and have gradients: those of the sum of all ranks'
results. With ``_`` they write the tensor. With ``async_op`` they give a Work in place of the tensor, and what comes
next on the nodes does not wait. ``algorithm`` is that of the collective itself; its gradient's is chosen as ever.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import forward_ad

from ..dispatch import seen_at
from ..dispatch.call_site import here
from ..dispatch.copies import sums_groups
from ..errors.argument_checks import spelled, whole_number
from ..futures.listening import GroupEnd
from ..futures.work import Work
from ..proxy.proxy import DistributedTensor, refuse_wrapper, where_is
from ..runtime.collective import ReduceOp, Way
from ..runtime.master.route import Route, route
from ..session.current import session_of
from ..session.places import MeshPlace
from .groups import Group
from .issue import (
    CollectiveCall,
    CollectivePart,
    CollectiveWork,
    Reduction,
    check_transport,
    hosts_of,
    op_of,
    read,
    written,
)
from .unused import watch

#: A dim's name, or several: their ranks together are the groups.
Over = str | Sequence[str]
Algorithm = str | Way | None


# ---- groups ----------------------------------------------------------------------------------------------------------


def groups(place: MeshPlace, over: Over | None, what: str) -> tuple[tuple[int, ...], ...]:
    """Returns the groups of ranks (as indices of members) along dims. Raises ValueError for an unknown dim, TypeError
    where none is named."""
    names = (over,) if isinstance(over, str) else tuple(over or ())
    if not names:
        raise TypeError(f"{what} of a tensor on {place} takes over=, a dim of the mesh or several: {_dims(place)}")
    joined = {rank: {rank} for rank in range(len(place.members))}
    for name in names:
        for group in place.groups(name, what):
            union = set().union(*(joined[rank] for rank in group))
            for rank in union:
                joined[rank] = union
    return tuple(sorted({tuple(sorted(group)) for group in joined.values()}))


def _dims(place: MeshPlace) -> str:
    return ", ".join(f"{name}={size}" for name, size in place.dims.items())


def on_mesh(tensor: Any, what: str) -> MeshPlace:
    """Returns the place of a tensor on a mesh. Raises TypeError for anything else."""
    place = where_is(tensor)
    # a node has no dims, and so no groups along them
    if not isinstance(place, MeshPlace):
        refuse_wrapper(tensor, f"{what} with over=")
        where = "a list" if isinstance(tensor, (list, tuple)) else "the script" if place is None else str(place)
        raise TypeError(f"{what} with over= takes a tensor on a mesh, and this is one on {where}")
    return place


def no_options(what: str, **options: object) -> None:
    """Raises TypeError for an option that the form with ``over`` does not have."""
    for name, value in options.items():
        if value is not None:
            raise TypeError(f"{what} of a tensor on a mesh takes no {name}=")


# ---- the command -----------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Call:
    """One collective over dims."""

    groups: tuple[tuple[int, ...], ...]  #: of ranks, as indices of members
    op: ReduceOp = ReduceOp.SUM
    root: int = 0
    async_op: bool = False
    transport: torch.dtype | None = None  #: in which floats of more bits travel
    algorithm: str | Way | None = None  #: None: what dt.channels.select says, else by size
    ended: GroupEnd | None = None  #: of an asynchronous one, once it is issued

    @property
    def size(self) -> int:
        return len(self.groups[0])

    def issue(self, kind: str, inputs: Sequence[Any], outs: Sequence[Any]) -> None:
        """Queues the collective for all nodes of the mesh, once."""
        place: MeshPlace = inputs[0]._place
        session = session_of(place)
        ranks = tuple(tuple(place.ranks[i] for i in group) for group in self.groups)
        # a channel, or an algorithm, is selected for all groups at once: for the one that has most ways to go
        widest = max(ranks, key=lambda nodes: len(set(hosts_of(session, nodes)))) if session.router.rules else ranks[0]
        collective = CollectiveCall(
            kind, Group(widest), [CollectivePart(inputs, outs)], self.op, self.root, self.algorithm, self.transport,
            inputs[0].dtype, place=place, groups=ranks if len(ranks) > 1 else (),
        )  # fmt: skip
        self.ended = collective.queue(session, self.async_op, here(3))

    def ready(self, x: torch.Tensor) -> torch.Tensor:
        """Returns what the nodes send of a tensor: contiguous, and of an asynchronous collective a copy, as what comes
        next on the nodes may write the tensor meanwhile."""
        x = read(x).detach()
        return x.clone(memory_format=torch.contiguous_format) if self.async_op else x.contiguous()

    def result(self, what: str, place: MeshPlace, make: Callable[[], Any], there: bool = False) -> Any:
        """Returns the result that ``make`` gives; of an asynchronous collective a Work, which makes it in the end, in
        the modes of now, unless it is ``there`` already."""
        if self.ended is None:
            return make()
        if there:
            return CollectiveWork(self.ended, (what, "on", place), make, place.outbox.where)
        grads = torch.is_grad_enabled()

        def later() -> Any:
            token = route.set(Route())
            try:
                with torch.inference_mode(False), torch.set_grad_enabled(grads):
                    return make()
            finally:
                route.reset(token)

        return CollectiveWork(self.ended, (what, "on", place), later, place.outbox.where)

    def new(self, what: str, place: MeshPlace, over: Over | None, make: Callable[[], Any]) -> Any:
        """Returns ``result``, a new tensor, which the caller's line is not to throw away."""
        return watch(self.result(what, place, make), what, over, session_of(place))


def _empty(x: torch.Tensor, shape: Sequence[int]) -> DistributedTensor:
    return torch.empty(tuple(shape), dtype=x.dtype, device=x.device)  # type: ignore[return-value]


def _divided(what: str, x: torch.Tensor, dim: int, size: int) -> int:
    """Returns a dimension as a number from 0. Raises ValueError where it is none of the tensor's, or ``size`` does not
    divide it."""
    if not -x.dim() <= dim < x.dim():
        raise ValueError(f"{what}: a tensor of shape {tuple(x.shape)} has no dimension {dim}")
    dim %= x.dim()
    if x.shape[dim] % size:
        raise ValueError(f"{what}: {size} ranks do not divide the {x.shape[dim]} entries of dimension {dim}")
    return dim


def _pieces(x: torch.Tensor, dim: int, size: int) -> list[torch.Tensor]:
    step = x.shape[dim] // size
    return [x.narrow(dim, i * step, step) for i in range(size)]


def _apply(function: type[torch.autograd.Function], *args: Any) -> Any:
    """Calls a Function. Where nothing can ask for its gradient, only its forward: torch reads a signature at each
    ``apply``, which costs as much as the collective."""
    wanted = torch.is_grad_enabled() and any([isinstance(x, torch.Tensor) and x.requires_grad for x in args])
    if wanted or torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        return function.apply(*args)
    return function.forward(*args)


def _check_gradient(x: torch.Tensor, op: ReduceOp) -> None:
    if op not in (ReduceOp.SUM, ReduceOp.AVG) and torch.is_grad_enabled() and x.requires_grad:
        raise RuntimeError(f"a reduction by {op.name} has no gradient; detach its input")


# ---- all_reduce ------------------------------------------------------------------------------------------------------


def all_reduce(x: Any, op: Any, over: Over | None, async_op: bool = False, algorithm: Algorithm = None) -> Any:
    """Returns the reduction over dims: on each rank that of its group."""
    place = on_mesh(x, "all_reduce")
    call = _Call(groups(place, over, "all_reduce"), op_of(op, x.dtype), async_op=async_op, algorithm=algorithm)
    _check_gradient(x, call.op)
    out = _apply(_AllReduce, x, call)
    return call.new("all_reduce", place, over, lambda: out)


@spelled
def all_reduce_(
    x: DistributedTensor,
    op: Reduction = ReduceOp.SUM,
    over: Over | None = None,
    async_op: bool = False,
    transport: torch.dtype | None = None,
    *,
    algorithm: Algorithm = None,
) -> DistributedTensor | Work[DistributedTensor]:
    """Writes the reduction over dims of a mesh into a tensor there, and returns it. Returns at once.

    Args:
        x: a tensor on a mesh, contiguous if ``async_op``.
        op: the reduction, as for ``all_reduce``.
        over: the name of a dim, or several.
        async_op: return a Work, whose ``result()`` is the tensor. Later operations on the nodes then run beside the
            collective, unless they use the tensor.
        transport: torch.bfloat16 or torch.float16, as which floats of more bits travel. They lose precision.
        algorithm: as for ``all_reduce``.

    Raises TypeError for another tensor, a dtype that ``op`` does not take, a ``transport`` that is no dtype of floats,
    or no dim; ValueError for an unknown dim, or a tensor that is not contiguous with ``async_op``; RuntimeError for a
    tensor that requires a gradient, or another view of what a collective is writing (with ``async_op`` a later use of
    another view of ``x`` before ``wait()`` raises that); GraphError for an asynchronous one while a graph is recorded.
    """
    work = reduced_in_place(x, op, over, async_op, transport, algorithm)
    return work.guarding([x]) if async_op else work  # type: ignore[no-any-return]


def reduced_in_place(
    x: DistributedTensor,
    op: Any,
    over: Over | None,
    async_op: bool = False,
    transport: torch.dtype | None = None,
    algorithm: Algorithm = None,
) -> Any:
    """Does what ``all_reduce_`` does, for callers that use no other view of ``x`` before they have waited."""
    place = on_mesh(x, "all_reduce_")
    if transport is not None:
        check_transport(transport, "all_reduce_")
    call = _Call(
        groups(place, over, "all_reduce_"), op_of(op, x.dtype), async_op=async_op, transport=transport,
        algorithm=algorithm,
    )  # fmt: skip
    if torch.is_grad_enabled() and x.requires_grad:
        raise RuntimeError("all_reduce_ writes its tensor, which requires a gradient; all_reduce gives a new one")
    written(x)
    if x.is_contiguous():
        call.issue("all_reduce", [x], [x])
        return call.result("all_reduce_", place, lambda: x, True)
    if async_op:
        raise ValueError(
            f"all_reduce_ with async_op takes a contiguous tensor, and this one of shape {tuple(x.shape)} has strides "
            f"{x.stride()}: its sums would be copied into it before anything else runs"
        )
    return x.copy_(_reduce(x, call))


@sums_groups
def _sum(x: DistributedTensor, found: tuple[tuple[int, ...], ...]) -> DistributedTensor:
    return _reduce(x.detach(), _Call(found))


def _reduce(x: Any, call: _Call) -> DistributedTensor:
    if call.async_op:
        out: Any = call.ready(x)
        call.issue("all_reduce", [out], [out])
        return out  # type: ignore[no-any-return]
    out = _empty(x, x.shape)
    call.issue("all_reduce", [call.ready(x)], [out])
    return out  # type: ignore[no-any-return]


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(x: Any, call: _Call) -> torch.Tensor:
        return _reduce(x, call)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.call = inputs[1]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _apply(_AllReduce, grads[0], _Call(ctx.call.groups, ctx.call.op)), None


# ---- the others ------------------------------------------------------------------------------------------------------


@spelled
def all_gather(
    x: DistributedTensor, over: str, dim: int = 0, async_op: bool = False, *, algorithm: Algorithm = None
) -> DistributedTensor | Work[DistributedTensor]:
    """Returns the tensors of all ranks along a dim of the mesh, joined in dimension ``dim``, on each of them. Returns
    at once, with ``async_op`` a Work that gives the tensor; the gradient is a reduce_scatter.

    Raises TypeError for a tensor that is not on a mesh; ValueError for an unknown dim, or no such dimension; GraphError
    for an asynchronous one while a graph is recorded.
    """
    place = on_mesh(x, "all_gather")
    call = _Call(groups(place, over, "all_gather"), async_op=async_op, algorithm=algorithm)
    dim = _divided("all_gather", x, dim, 1)
    parts = _apply(_Gather, x, call)
    return call.new("all_gather", place, over, lambda: torch.cat(parts, dim))  # type: ignore[no-any-return]


@spelled
def reduce_scatter(
    x: DistributedTensor,
    op: Reduction = ReduceOp.SUM,
    over: str = "",
    dim: int = 0,
    async_op: bool = False,
    *,
    algorithm: Algorithm = None,
) -> DistributedTensor | Work[DistributedTensor]:
    """Returns a part of the reduction over a dim of the mesh: dimension ``dim`` is cut among its ranks. Returns at
    once, with ``async_op`` a Work that gives the tensor; the gradient is an all_gather.

    Raises TypeError for a tensor that is not on a mesh, or a dtype that ``op`` does not take; ValueError for an unknown
    dim, or sizes that do not divide; RuntimeError for a gradient of another reduction than SUM and AVG; GraphError for
    an asynchronous one while a graph is recorded.
    """
    place = on_mesh(x, "reduce_scatter")
    call = _Call(groups(place, over, "reduce_scatter"), op_of(op, x.dtype), async_op=async_op, algorithm=algorithm)
    _check_gradient(x, call.op)
    dim = _divided("reduce_scatter", x, dim, call.size)
    part = _apply(_Scatter, call, *_pieces(x, dim, call.size))
    return call.new("reduce_scatter", place, over, lambda: part)  # type: ignore[no-any-return]


@spelled
def all_to_all(
    x: DistributedTensor, over: str, split: int = 0, cat: int = 0, async_op: bool = False
) -> DistributedTensor | Work[DistributedTensor]:
    """Returns the parts of all ranks along a dim of the mesh that are this rank's: dimension ``split`` is cut among the
    ranks, and what comes is joined in dimension ``cat``. Returns at once, with ``async_op`` a Work that gives the
    tensor; the gradient goes the way back.

    Raises as ``reduce_scatter``.
    """
    place = on_mesh(x, "all_to_all")
    call = _Call(groups(place, over, "all_to_all"), async_op=async_op)
    split, cat = _divided("all_to_all", x, split, call.size), _divided("all_to_all", x, cat, 1)
    parts = _apply(_Exchange, call, *_pieces(x, split, call.size))
    return call.new("all_to_all", place, over, lambda: torch.cat(parts, cat))  # type: ignore[no-any-return]


@spelled
def permute_ranks(
    x: DistributedTensor, over: str, by: int = 1, async_op: bool = False
) -> DistributedTensor | Work[DistributedTensor]:
    """Returns the tensor of the rank ``by`` places before, along a dim of the mesh, around its end. Returns at once,
    with ``async_op`` a Work that gives the tensor; the gradient goes the way back.

    Raises TypeError for a tensor that is not on a mesh, ValueError for an unknown dim; GraphError for an asynchronous
    one while a graph is recorded.
    """
    place = on_mesh(x, "permute_ranks")
    found = groups(place, over, "permute_ranks")
    call = _Call(found, root=whole_number("permute_ranks: by", by, None) % len(found[0]), async_op=async_op)
    out = _apply(_Permute, x, call)
    return call.new("permute_ranks", place, over, lambda: out)  # type: ignore[no-any-return]


@spelled
def broadcast(
    x: DistributedTensor, over: str, src: int = 0, async_op: bool = False, *, algorithm: Algorithm = None
) -> DistributedTensor | Work[DistributedTensor]:
    """Returns the tensor of one rank along a dim of the mesh, on all of them. Returns at once, with ``async_op`` a Work
    that gives the tensor; the gradient is the sum of theirs, on that rank, and zero on the others.

    ``src``: the coordinate of the rank. Raises TypeError for a tensor that is not on a mesh; ValueError for an unknown
    dim, or a coordinate out of range; GraphError for an asynchronous one while a graph is recorded.
    """
    place = on_mesh(x, "broadcast")
    found = groups(place, over, "broadcast")
    if not 0 <= src < len(found[0]):
        raise ValueError(f"broadcast: src={src} is not along {over!r} of {place}: it has 0 to {len(found[0]) - 1}")
    call = _Call(found, root=src, async_op=async_op, algorithm=algorithm)
    out = _apply(_Broadcast, x, call)
    return call.new("broadcast", place, over, lambda: out)  # type: ignore[no-any-return]


# ---- for those who gather and reduce many tensors as one -------------------------------------------------------------


def gather_parts(x: Any, over: str, beside: bool) -> tuple[list[DistributedTensor], Work[Any] | None]:
    """Returns the tensors of all ranks along a dim, at once and without gradients. What comes next on the nodes runs
    ``beside`` the collective, unless it uses them; ``x`` must not be written then."""
    place = on_mesh(x, "all_gather")
    call = _Call(groups(place, over, "all_gather"), async_op=beside)
    outs = [_empty(x, x.shape) for _ in range(call.size)]
    call.issue("all_gather", [x], outs)
    return outs, call.result("all_gather", place, lambda: outs) if beside else None


def reduce_parts(pieces: Sequence[Any], op: str, over: str, beside: bool) -> tuple[DistributedTensor, Work[Any] | None]:
    """Returns the reduction of what all ranks along a dim have for this one, ``pieces`` in their order; as
    ``gather_parts``."""
    x = pieces[0]
    place = on_mesh(x, "reduce_scatter")
    call = _Call(groups(place, over, "reduce_scatter"), op_of(op, x.dtype), async_op=beside)
    out = _empty(x, x.shape)
    call.issue("reduce_scatter", pieces, [out])
    return out, call.result("reduce_scatter", place, lambda: out) if beside else None


class _Gather(torch.autograd.Function):
    """A tensor to the tensors of all ranks."""

    @staticmethod
    def forward(x: Any, call: _Call) -> tuple[torch.Tensor, ...]:
        outs = [_empty(x, x.shape) for _ in range(call.size)]
        call.issue("all_gather", [call.ready(x)], outs)
        return tuple(outs)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.groups = inputs[1].groups

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _apply(_Scatter, _Call(ctx.groups), *grads), None


class _Scatter(torch.autograd.Function):
    """A tensor for each rank to the reduction of those for this one."""

    @staticmethod
    def forward(call: _Call, *pieces: Any) -> torch.Tensor:
        out = _empty(pieces[0], pieces[0].shape)
        call.issue("reduce_scatter", list(map(call.ready, pieces)), [out])
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        call: _Call = inputs[0]
        ctx.groups, ctx.share = call.groups, call.size if call.op is ReduceOp.AVG else 1

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        parts = _apply(_Gather, grads[0], _Call(ctx.groups))
        return None, *(part / ctx.share if ctx.share > 1 else part for part in parts)


class _Exchange(torch.autograd.Function):
    """A tensor for each rank to the tensors from each."""

    @staticmethod
    def forward(call: _Call, *pieces: Any) -> tuple[torch.Tensor, ...]:
        outs = [_empty(piece, piece.shape) for piece in pieces]
        call.issue("all_to_all", list(map(call.ready, pieces)), outs)
        return tuple(outs)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.groups = inputs[0].groups

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return None, *_apply(_Exchange, _Call(ctx.groups), *grads)


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(x: Any, call: _Call) -> torch.Tensor:
        out = _empty(x, x.shape)
        call.issue("shift", [call.ready(x)], [out])
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.call = inputs[1]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        call: _Call = ctx.call
        return _apply(_Permute, grads[0], _Call(call.groups, root=-call.root % call.size)), None


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(x: Any, call: _Call) -> torch.Tensor:
        out: torch.Tensor = x.detach().clone(memory_format=torch.contiguous_format)
        call.issue("broadcast", [out], [out])
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.call = inputs[1]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        call: _Call = ctx.call
        total: Any = _apply(_AllReduce, grads[0], _Call(call.groups))
        return _apply(_Only, total, tuple(group[call.root] for group in call.groups)), None


class _Only(torch.autograd.Function):
    """The tensor as it is on some ranks, and zero on the others."""

    @staticmethod
    def forward(x: Any, ranks: tuple[int, ...]) -> torch.Tensor:
        kept = torch.zeros_like(x)
        for rank in ranks:
            member = x._place.members[rank]
            seen_at.alias(kept, member).copy_(seen_at.alias(x, member))
        return kept

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.ranks = inputs[1]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _apply(_Only, grads[0], ctx.ranks), None
