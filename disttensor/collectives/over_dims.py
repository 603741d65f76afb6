"""Collectives over dims of a mesh: one command for all of its nodes, each of which does its part in its own group.

They take a tensor on a mesh and names of dims, return a new tensor, and have gradients: those of the sum of all ranks'
results. With ``_`` they write the tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..dispatch import seen_at
from ..dispatch.call_site import here
from ..dispatch.copies import sums_ranks
from ..dispatch.lazy_views import materialise
from ..errors.argument_checks import spelled
from ..proxy.proxy import DistributedTensor
from ..runtime.collective import ReduceOp
from ..runtime.protocol import codec
from ..runtime.protocol import commands as c
from ..session.current import session_of
from ..session.places import MeshPlace
from .issue import op_of, read, written

#: A dim's name, or several: their ranks together are the groups.
Over = str | Sequence[str]


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
    place = tensor._place if isinstance(tensor, DistributedTensor) else None
    if not isinstance(place, MeshPlace):
        where = "a list" if isinstance(tensor, (list, tuple)) else "the script" if place is None else str(place)
        raise TypeError(f"{what} with over= takes a tensor on a mesh, and this is one on {where}")
    return place


def no_options(what: str, **options: object) -> None:
    """Raises TypeError for an option that the form with ``over`` does not have."""
    for name, value in options.items():
        if value is not None:
            raise TypeError(f"{what} of a tensor on a mesh takes no {name}=")


# ---- the command -----------------------------------------------------------------------------------------------------


def _issue(
    kind: str,
    place: MeshPlace,
    found: tuple[tuple[int, ...], ...],
    inputs: Sequence[Any],
    outs: Sequence[Any],
    op: ReduceOp = ReduceOp.SUM,
    root: int = 0,
) -> None:
    """Queues a collective for all nodes of a mesh."""
    site, session = here(3), session_of(place)
    session.link.check(place.outbox)
    ranks = tuple(tuple(place.ranks[i] for i in group) for group in found)
    tensors = (*inputs, *outs)
    command = c.Collective(
        kind=kind,
        transfer=session.transfers.new_loose(),
        ranks=ranks[0],
        inputs=tuple(x._h.ref or materialise(x._h) for x in inputs),
        outs=tuple(x._h.ref or materialise(x._h) for x in outs),
        lengths=tuple(x.numel() for x in tensors),
        dtype=codec.dtype_id(tensors[0].dtype),
        op=int(op),
        root=root,
        algorithm="",
        base=0,
        chunk=0,
        carry=-1,
        hosts=_hosts(place, ranks[0]) if len(ranks) == 1 else (),
        done=0,
        groups=ranks if len(ranks) > 1 else (),
    )
    if place.outbox.add(command, site):
        session.flush(place.outbox)
    for x in outs:
        torch.autograd.graph.increment_version(x)


def _hosts(place: MeshPlace, ranks: tuple[int, ...]) -> tuple[int, ...]:
    names = [place.session.nodes[rank].hello.host for rank in ranks]
    known = {name: i for i, name in enumerate(dict.fromkeys(names))}
    return tuple(known[name] for name in names) if 1 < len(known) < len(names) else ()


def _empty(x: torch.Tensor, shape: Sequence[int]) -> DistributedTensor:
    return torch.empty(tuple(shape), dtype=x.dtype, device=x.device)  # type: ignore[return-value]


def _ready(x: torch.Tensor) -> torch.Tensor:
    return read(x).detach().contiguous()


def _divided(what: str, x: torch.Tensor, dim: int, size: int) -> int:
    """Returns a dimension as a number from 0. Raises ValueError where it is none of the tensor's, or ``size`` does not
    divide it."""
    if not -x.dim() <= dim < x.dim():
        raise ValueError(f"{what}: a tensor of shape {tuple(x.shape)} has no dimension {dim}")
    dim %= x.dim()
    if x.shape[dim] % size:
        raise ValueError(f"{what}: {size} ranks do not divide the {x.shape[dim]} entries of dimension {dim}")
    return dim


def _apply(function: type[torch.autograd.Function], *args: Any) -> DistributedTensor:
    return function.apply(*args)  # type: ignore[no-any-return]


# ---- all_reduce ------------------------------------------------------------------------------------------------------


def all_reduce(x: Any, op: Any, over: Over | None, async_op: bool = False) -> DistributedTensor:
    """Returns the reduction over dims: on each rank that of its group."""
    place = on_mesh(x, "all_reduce")
    if async_op:
        raise NotImplementedError("all_reduce over dims of a mesh has no async_op yet; it returns at once as it is")
    found, op = groups(place, over, "all_reduce"), op_of(op, x.dtype)
    if op not in (ReduceOp.SUM, ReduceOp.AVG) and torch.is_grad_enabled() and x.requires_grad:
        raise RuntimeError(f"a reduction by {op.name} has no gradient; detach its input")
    return _apply(_AllReduce, x, op, found)


@spelled
def all_reduce_(x: DistributedTensor, op: Any = ReduceOp.SUM, over: Over | None = None) -> DistributedTensor:
    """Writes the reduction over dims of a mesh into a tensor there, and returns it. Returns at once.

    Args:
        x: a tensor on a mesh.
        op: the reduction, as for ``all_reduce``.
        over: the name of a dim, or several.

    Raises TypeError for another tensor, a dtype that ``op`` does not take, or no dim; ValueError for an unknown dim;
    RuntimeError for a tensor that requires a gradient.
    """
    place = on_mesh(x, "all_reduce_")
    found, op = groups(place, over, "all_reduce_"), op_of(op, x.dtype)
    if torch.is_grad_enabled() and x.requires_grad:
        raise RuntimeError("all_reduce_ writes its tensor, which requires a gradient; all_reduce gives a new one")
    written(x)
    if not x.is_contiguous():
        return x.copy_(_reduce(x, op, found))  # type: ignore[return-value]
    _issue("all_reduce", place, found, [x], [x], op)
    return x


@sums_ranks
def _total(x: DistributedTensor) -> DistributedTensor:
    place = on_mesh(x, "a gradient")
    total = _reduce(x.detach(), ReduceOp.SUM, (tuple(range(len(place.members))),))
    return seen_at.alias(total, place.members[0])  # type: ignore[no-any-return]


def _reduce(x: Any, op: ReduceOp, found: tuple[tuple[int, ...], ...]) -> DistributedTensor:
    out = _empty(x, x.shape)
    _issue("all_reduce", x._place, found, [_ready(x)], [out], op)
    return out


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, op: ReduceOp, found: Any) -> torch.Tensor:
        ctx.op, ctx.found = op, found
        return _reduce(x, op, found)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _apply(_AllReduce, grads[0], ctx.op, ctx.found), None, None


# ---- the others ------------------------------------------------------------------------------------------------------


@spelled
def all_gather(x: DistributedTensor, over: str, dim: int = 0) -> DistributedTensor:
    """Returns the tensors of all ranks along a dim of the mesh, joined in dimension ``dim``, on each of them. Returns
    at once; the gradient is a reduce_scatter.

    Raises TypeError for a tensor that is not on a mesh; ValueError for an unknown dim, or no such dimension.
    """
    place = on_mesh(x, "all_gather")
    found = groups(place, over, "all_gather")
    return _apply(_AllGather, x, found, _divided("all_gather", x, dim, 1))


@spelled
def reduce_scatter(x: DistributedTensor, op: Any = ReduceOp.SUM, over: str = "", dim: int = 0) -> DistributedTensor:
    """Returns a part of the reduction over a dim of the mesh: dimension ``dim`` is cut among its ranks. Returns at
    once; the gradient is an all_gather.

    Raises TypeError for a tensor that is not on a mesh, or a dtype that ``op`` does not take; ValueError for an unknown
    dim, or sizes that do not divide; RuntimeError for a gradient of another reduction than SUM and AVG.
    """
    place = on_mesh(x, "reduce_scatter")
    found, op = groups(place, over, "reduce_scatter"), op_of(op, x.dtype)
    if op not in (ReduceOp.SUM, ReduceOp.AVG) and torch.is_grad_enabled() and x.requires_grad:
        raise RuntimeError(f"a reduction by {op.name} has no gradient; detach its input")
    return _apply(_ReduceScatter, x, op, found, _divided("reduce_scatter", x, dim, len(found[0])))


@spelled
def all_to_all(x: DistributedTensor, over: str, split: int = 0, cat: int = 0) -> DistributedTensor:
    """Returns the parts of all ranks along a dim of the mesh that are this rank's: dimension ``split`` is cut among the
    ranks, and what comes is joined in dimension ``cat``. Returns at once; the gradient goes the way back.

    Raises as ``reduce_scatter``.
    """
    place = on_mesh(x, "all_to_all")
    found = groups(place, over, "all_to_all")
    return _apply(
        _AllToAll, x, found, _divided("all_to_all", x, split, len(found[0])), _divided("all_to_all", x, cat, 1)
    )


@spelled
def permute_ranks(x: DistributedTensor, over: str, by: int = 1) -> DistributedTensor:
    """Returns the tensor of the rank ``by`` places before, along a dim of the mesh, around its end. Returns at once;
    the gradient goes the way back.

    Raises TypeError for a tensor that is not on a mesh, ValueError for an unknown dim.
    """
    place = on_mesh(x, "permute_ranks")
    found = groups(place, over, "permute_ranks")
    return _apply(_Permute, x, found, by)


@spelled
def broadcast(x: DistributedTensor, over: str, src: int = 0) -> DistributedTensor:
    """Returns the tensor of one rank along a dim of the mesh, on all of them. Returns at once; the gradient is the sum
    of theirs, on that rank, and zero on the others.

    ``src``: the coordinate of the rank. Raises TypeError for a tensor that is not on a mesh; ValueError for an unknown
    dim, or a coordinate out of range.
    """
    place = on_mesh(x, "broadcast")
    found = groups(place, over, "broadcast")
    if not 0 <= src < len(found[0]):
        raise ValueError(f"broadcast: src={src} is not along {over!r} of {place}: it has 0 to {len(found[0]) - 1}")
    return _apply(_Broadcast, x, found, src)


def _pieces(x: torch.Tensor, dim: int, size: int) -> list[Any]:
    step = x.shape[dim] // size
    return [_ready(x.detach().narrow(dim, i * step, step)) for i in range(size)]


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, found: Any, dim: int) -> torch.Tensor:
        ctx.found, ctx.dim = found, dim
        outs: list[torch.Tensor] = [_empty(x, x.shape) for _ in found[0]]
        _issue("all_gather", x._place, found, [_ready(x)], outs)
        return torch.cat(outs, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _apply(_ReduceScatter, grads[0], ReduceOp.SUM, ctx.found, ctx.dim), None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, op: ReduceOp, found: Any, dim: int) -> torch.Tensor:
        ctx.found, ctx.dim, ctx.share = found, dim, len(found[0]) if op is ReduceOp.AVG else 1
        pieces = _pieces(x, dim, len(found[0]))
        out = _empty(x, pieces[0].shape)
        _issue("reduce_scatter", x._place, found, pieces, [out], op)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        whole = _apply(_AllGather, grads[0], ctx.found, ctx.dim)
        return whole / ctx.share if ctx.share > 1 else whole, None, None, None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, found: Any, split: int, cat: int) -> torch.Tensor:
        ctx.found, ctx.split, ctx.cat = found, split, cat
        pieces = _pieces(x, split, len(found[0]))
        outs: list[torch.Tensor] = [_empty(x, piece.shape) for piece in pieces]
        _issue("all_to_all", x._place, found, pieces, outs)
        return torch.cat(outs, cat)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _apply(_AllToAll, grads[0], ctx.found, ctx.cat, ctx.split), None, None, None


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, found: Any, by: int) -> torch.Tensor:
        ctx.found, ctx.by = found, by
        out = _empty(x, x.shape)
        _issue("shift", x._place, found, [_ready(x)], [out], root=by % len(found[0]))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _apply(_Permute, grads[0], ctx.found, -ctx.by), None, None


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, found: Any, src: int) -> torch.Tensor:
        ctx.found, ctx.src = found, src
        out: torch.Tensor = x.detach().clone(memory_format=torch.contiguous_format)
        _issue("broadcast", x._place, found, [out], [out], root=src)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        total: Any = _apply(_AllReduce, grads[0], ReduceOp.SUM, ctx.found)
        return _apply(_Only, total, tuple(group[ctx.src] for group in ctx.found)), None, None


class _Only(torch.autograd.Function):
    """The tensor as it is on some ranks, and zero on the others."""

    @staticmethod
    def forward(ctx: Any, x: Any, ranks: tuple[int, ...]) -> torch.Tensor:
        ctx.ranks = ranks
        kept = torch.zeros_like(x)
        for rank in ranks:
            member = x._place.members[rank]
            seen_at.alias(kept, member).copy_(seen_at.alias(x, member))
        return kept

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _apply(_Only, grads[0], ctx.ranks), None
