"""Views at a number of ranks: ``x.narrow(0, size * coordinate, size)`` is another part of each rank's memory.

Each is one command for all ranks, whatever their number: the number comes from a table, a tensor on the mesh with each
rank's, and ``aten::narrow`` takes it there. So it is a true view on each node, as it is under torchrun.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from ...dispatch import meta_inference
from ...dispatch.asking import make_room
from ...dispatch.call_site import here
from ...dispatch.lazy_views import materialise, view, views_by_rank
from ...dispatch.op_plan import MAX_PLANS, ONE, OpEntry, Plan
from ...dispatch.op_table import enter, run_ordinary
from ...proxy.meta import APART, Handle, meta_of, new_ref
from ...proxy.proxy import DistributedTensor, alias
from ...runtime.master.route import Route, route
from ...runtime.protocol import commands as c
from ...runtime.protocol.errors import DisttensorError, RanksDiffer
from ...session import caches
from ...session.places import MeshPlace
from ..shards import together
from .rank_numbers import Number, RankNode, numbers_of

aten = torch.ops.aten

#: Tables of numbers, by place and numbers: there are few, as parts begin at multiples of the ranks' coordinates.
_tables: dict[tuple[MeshPlace, tuple[Number, ...]], torch.Tensor] = {}
#: How views are made, by operator, metadata and numbers.
_parts: dict[tuple[Any, ...], _Part] = {}
for _cache in (_tables, _parts):
    caches.plans(_cache.clear)
    caches.places(_cache.clear)


def table(place: MeshPlace, numbers: Sequence[Number]) -> Any:
    """Returns an int64 tensor of no dimension at a mesh's place that has each rank's number."""
    key = place, tuple(numbers)
    found = _tables.get(key)
    if found is None:
        token = route.set(Route(route.get().streams))  # outside of a graph that is recorded, as it stays
        try:
            found = together(place, [torch.tensor(number, device="cpu") for number in numbers])
        finally:
            route.reset(token)
        caches.keep(_tables, key, found, place)
    return found


class _Part(NamedTuple):
    """How a view at numbers of ranks is made."""

    plan: Plan
    starts: Any  #: the table of where the ranks' parts start
    then: tuple[Any, ...] | None  #: the view of what the plan makes that is the view; None for all of it


@views_by_rank
def part(entry: OpEntry, base: DistributedTensor, rest: tuple[Any, ...]) -> Any:
    """Makes a view for whose operator some arguments are numbers of ranks: a part of another place of each rank's
    memory, of one shape.

    Raises RanksDiffer for parts of several sizes, and for another view than ``slice`` and ``select``; IndexError for a
    part that some rank does not have; DisttensorError for numbers of another mesh's ranks than the tensor is on.
    """
    handle = base._h
    key = (entry.op, handle.meta, *[(v.node.place, v.node.values) if numbers_of(v) is not None else v for v in rest])
    found = _parts.get(key) or _planned(entry, base, rest, key)
    if found is None:
        return view(entry, (base, *[int(v) if type(v) is torch.SymInt else v for v in rest]), {})
    plan, starts, then = found
    out = new_ref()
    call = c.Call(plan.template, out, (out - (handle.ref or materialise(handle)), out - starts._h.ref))
    box = plan.place.outbox
    commands = box.commands
    commands += (call, here(3))
    if len(commands) >= box.limit:
        plan.place.session.flush(box)
    made = alias(base, Handle(out, plan.shapes))
    return made if then is None else view(entry, (made, *then), {})


def _planned(entry: OpEntry, base: DistributedTensor, rest: tuple[Any, ...], key: tuple[Any, ...]) -> _Part | None:
    """Returns how a view is made, and remembers it; None for what is none at numbers that differ."""
    node = next((v.node for v in rest if numbers_of(v) is not None), None)
    meta = base._h.meta
    place = meta.place
    # a node has one number, and each rank of a mesh its own
    if node is None or node.is_constant() or entry.op not in _STARTS or not isinstance(place, MeshPlace):
        return None
    if place.origin is not node.place:
        raise DisttensorError(f"this is a number of the ranks of {node.place}, and the tensor is on {place}")
    if not _begun:
        _begin_backward()
    each = list(zip(*[numbers_of(v) or (v,) * len(node.values) for v in rest], strict=True))
    dim = each[0][0]
    size = meta.shape[dim]
    starts, lengths, step = _STARTS[entry.op](each, size, node)
    if len(set(lengths)) > 1:
        raise RanksDiffer(uneven(place, size, lengths))
    length = (lengths[0] - 1) * step + 1 if lengths[0] else 0
    numbers = table(place.origin.host, starts)  # a node reads it, without a wait for its GPU
    there = meta_inference.infer(aten.slice.Tensor, (meta.stand_in, dim, 0, length), {})
    offset = max(int(there.storage_offset()), APART)
    shapes = meta_of(tuple(there.shape), there.stride(), offset, meta.dtype, place, meta.bits)
    narrow = enter(aten.narrow.Tensor)
    make_room(place)
    specs = narrow.specs((base, dim, numbers, length), {}, DistributedTensor, place.name)
    plan = Plan(ONE, place, (narrow.name, *specs), shapes, 1, here(4))
    then = (dim, 0) if entry.op is aten.select.int else (dim, 0, None, step) if step > 1 else None
    found = _Part(plan, numbers, then)
    if len(_parts) >= MAX_PLANS:
        _parts.clear()
    caches.keep(_parts, key, found, place)
    return found


def uneven(place: MeshPlace, size: int, lengths: Sequence[int]) -> str:
    """Returns what is wrong with parts of several sizes, and what to write."""
    return (
        f"the ranks of {place} would have parts of {', '.join(map(str, sorted(set(lengths))))} of {size} entries, and "
        "a tensor on a mesh has one shape on all ranks: sizes that the ranks divide do, as "
        "torch.nn.functional.pad(x, ...) makes them"
    )


def _slices(each: list[Any], size: int, node: RankNode) -> tuple[list[int], list[int], int]:
    """Returns where each rank's slice starts, how long it is, and its step."""
    found = [slice(*of_rank[1:]).indices(size) for of_rank in each]
    return [start for start, _, _ in found], [len(range(*where)) for where in found], found[0][2]


def _selects(each: list[Any], size: int, node: RankNode) -> tuple[list[int], list[int], int]:
    """Returns the index that each rank selects, as a slice of one."""
    for rank, (_, index) in enumerate(each):
        if not -size <= index < size:
            raise IndexError(
                f"select(): index {index} out of range for a dimension of size {size}, at {node.place.where(rank)}"
            )
    return [index % size for _, index in each], [1] * len(each), 1


_STARTS = {aten.slice.Tensor: _slices, aten.select.int: _selects}


# ---- gradients -------------------------------------------------------------------------------------------------------

_begun: list[bool] = []


def _begin_backward() -> None:
    """Has the gradients of such views taken: from the first one on, so that other programs' backward passes are as
    without."""
    _begun.append(True)
    for op, forward in (
        (aten.slice_backward.default, aten.slice.Tensor),
        (aten.select_backward.default, aten.select.int),
    ):
        enter(op).handler = partial(_backward, enter(forward))


def _backward(forward: OpEntry, entry: OpEntry, args: Any, kwargs: Any) -> Any:
    """Returns the gradient of a view's base: zero except in the view."""
    grad, sizes, *where = args
    if all(numbers_of(value) is None for value in where):
        return run_ordinary(entry, args, kwargs, None)
    whole = grad.new_zeros(sizes)
    part(forward, whole, tuple(where)).copy_(grad)
    return whole
