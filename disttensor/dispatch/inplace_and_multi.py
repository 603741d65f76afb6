"""Issues calls with several outputs, and calls that write their arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from ..proxy.meta import APART, Handle, Meta, Shared, new_ref
from ..proxy.proxy import DistributedTensor, alias, proxy, set_geometry
from ..runtime.node.geometry import expected
from ..runtime.protocol import codec
from ..runtime.protocol import commands as c
from . import trial
from .call_site import here
from .op_plan import MANY, ONE, RESHAPED, SHARING, WARNS, WRITTEN, OpEntry, Plan, holes_of

Make = Callable[[int, int, tuple[Any, ...]], c.Call]
#: The most bytes in a first call of a tensor, and more for each of its dims.
_DESCRIBED, _PER_DIM = 36, 18


def check_write(tensor: Any) -> None:
    """Raises RuntimeError for writing to a shard of a mesh's tensor whose gradient autograd follows: to autograd it is
    a tensor of its own, and the whole one would not have changed."""
    shared: Shared = tensor._h
    if torch.is_grad_enabled() and tensor.requires_grad and shared.owner.meta.place.ranks != shared.meta.place.ranks:
        raise RuntimeError(
            "a shard of a tensor that requires a gradient can't be written in place: write to it under "
            "torch.no_grad(), or compute a new tensor"
        )


def written(entry: OpEntry, args: Any, kwargs: Any) -> list[DistributedTensor]:
    """Returns the tensors that an operation writes, without those of lists."""
    values: list[Any] = []
    for where in entry.writes:
        values.append(kwargs.get(where) if isinstance(where, str) else args[where] if where < len(args) else None)
    return [v for v in values if isinstance(v, DistributedTensor)]


def may_share(entry: OpEntry, args: Any, kwargs: Any) -> bool:
    """Returns whether operands of this signature, of which one is written, may overlap in a way that torch refuses."""
    targets = written(entry, args, kwargs)
    if not targets or (entry.out and len(targets) != len(entry.writes)):
        return False
    return any(
        t._place is target._place and (t._h.meta is not target._h.meta or not entry.pointwise)
        for target in targets
        for t in _reads(entry, args, kwargs)
    )


def _reads(entry: OpEntry, args: Any, kwargs: Any) -> list[DistributedTensor]:
    """Returns the tensors that an operation does not write, and those that it reads besides."""
    found: list[DistributedTensor] = []
    for where, value in (*enumerate(args), *kwargs.items()):
        if where not in entry.writes:
            values = value if isinstance(value, (list, tuple)) else (value,)
            found += [v for v in values if isinstance(v, DistributedTensor)]
    return found


def check_overlap(entry: OpEntry, plan: Plan, args: Any, kwargs: Any) -> None:
    """Raises local torch's RuntimeError where an operand lies partly in the memory of one that is written.

    Views are known by what torch's autograd notes of them, which is nothing in inference mode.
    """
    reads = [(t, _root(t)) for t in _reads(entry, args, kwargs)]
    targets = [(t, _root(t)) for t in written(entry, args, kwargs)]
    if not any(r is root and trial.overlap(t._h.meta, target._h.meta) for target, root in targets for t, r in reads):
        return
    roots = [id(root) for _, root in (*targets, *reads)]
    pattern = tuple(roots.index(r) for r in roots)
    if pattern not in plan.refusals:
        plan.refusals[pattern] = trial.refusal_of_overlap(entry.op, args, kwargs, lambda t: id(_root(t)))
    refusal = plan.refusals[pattern]
    if refusal is not None:
        raise type(refusal)(*refusal.args)


def _root(tensor: Any) -> Handle:
    base: Any = tensor._base if tensor._is_view() else tensor
    handle: Handle = base._h if isinstance(base, DistributedTensor) else tensor._h
    return handle


def first(entry: OpEntry, plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any], call: list[Any], out: int) -> Any:
    """Issues a new plan's first call, in which the node compares the geometry of its results with the plan's."""
    written: list[Meta] = []
    kind = plan.values[0] if plan.kind == WARNS else plan.kind
    after = dict(plan.shapes) if kind == RESHAPED else {}
    for where in entry.writes:
        value = kwargs.get(where) if isinstance(where, str) else args[where] if where < len(args) else None
        found = value if isinstance(value, (list, tuple)) else [] if value is None else [value]
        written += [after.get(where, v._h.meta) for v in found]
    made = [] if kind in (WRITTEN, SHARING, RESHAPED) else [m for m in tree_leaves(plan.shapes) if isinstance(m, Meta)]
    make = checked(made, written)
    if plan.kind != ONE:
        return rare(entry, plan, args, kwargs, call, out, make)
    box = plan.place.outbox
    result = proxy(Handle(out, plan.shapes))
    commands = box.commands
    commands += (make(plan.template, out, tuple(call)), here())
    if len(box.commands) >= box.limit:
        plan.place.session.flush(box)
    return result


def checked(made: Sequence[Meta], written: Sequence[Meta] = ()) -> Make:
    """Returns a constructor of first calls, which carry the geometry of the tensors that they make and write; of plain
    ones for so many tensors that their geometry may not fit into a message, or at other offsets on each rank: those are
    not compared."""
    if (
        any(m.offset >= APART for m in (*made, *written))
        or sum(_DESCRIBED + _PER_DIM * len(m.shape) for m in (*made, *written)) > codec.MAX_MESSAGE // 2
    ):
        return c.Call
    kinds = {meta: i for i, meta in enumerate(dict.fromkeys([*made, *written]))}
    gives, keeps = tuple(kinds[m] for m in made), tuple(kinds[m] for m in written)
    described = tuple(expected(m.shape, m.stride, m.offset, m.dtype, m.bits) for m in kinds)
    return lambda template, out, args: c.First(template, out, args, described, gives, keeps)


def rare(
    entry: OpEntry,
    plan: Plan,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    call: list[Any],
    out: int,
    make: Make = c.Call,
) -> Any:
    """Issues a call that returns several tensors, or writes some: the kinds that `dispatch` does not issue itself."""
    box, session = plan.place.outbox, plan.place.session
    commands = box.commands
    site = here()
    kind = plan.kind
    if kind == WARNS:
        kind = _warn(entry, plan, args, kwargs)
    if kind == MANY:
        handles: list[Handle] = []

        def one(meta: Any) -> Any:
            if type(meta) is not Meta:
                return meta  # None, or a plain value among the tensors
            handle = Handle(new_ref() if handles else out, meta)
            if handles:
                call.append(out - handle.ref)
            handles.append(handle)
            return alias(args[0], handle) if entry.view else proxy(handle)

        shapes = plan.shapes
        if type(shapes) in (tuple, list) and not any(type(s) in (tuple, list) for s in shapes):
            result = type(shapes)([one(meta) for meta in shapes])  # most are flat, and tree_map is slow
        else:
            result = tree_map(one, shapes)
        if plan.heavy:
            box.free_dead()
        commands += (make(plan.template, out, tuple(call)), site)
    else:
        targets = [args[w] if isinstance(w, int) else kwargs[w] for w in entry.returned]
        for target in targets:
            if type(target) is DistributedTensor and type(target._h) is Shared:
                check_write(target)
        if kind == SHARING:
            check_overlap(entry, plan, args, kwargs)
        if kind == RESHAPED:
            _reshape(entry, plan, args, kwargs, call, out, site, make)
        else:
            commands += (make(plan.template, out, tuple(call)), site)
        result = targets[0] if len(targets) == 1 else tuple(targets) if targets else None
    if len(commands) >= box.limit:
        session.flush(box)
    return result


def _warn(entry: OpEntry, plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Warns of a call, and returns the kind that its plan has otherwise; one tensor is issued as several are."""
    kind, each, value = plan.values
    trial.warn(entry.op, args, kwargs, value, each)
    if not each:
        plan.kind = kind
    return MANY if kind == ONE else int(kind)


def _reshape(
    entry: OpEntry,
    plan: Plan,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    call: list[Any],
    out: int,
    site: Any,
    make: Make,
) -> None:
    """Issues a call that changes its arguments' geometry. Each of these gets a new ref (an alias) first, because a
    handle's geometry is fixed."""
    box = plan.place.outbox
    same = plan.place.define("aten::alias", (c.Hole(True),), (), 1, site)
    changed: list[tuple[DistributedTensor, Handle]] = []
    holes = [*holes_of(plan.specs[1:3])]
    for where, meta in plan.shapes:
        tensor = args[where] if isinstance(where, int) else kwargs[where]
        old = tensor._h.ref
        handle = Handle(new_ref(), meta)
        commands = box.commands
        commands += (c.Call(same, handle.ref, (handle.ref - old,)), site)
        call = [out - handle.ref if hole and v == out - old else v for v, hole in zip(call, holes, strict=True)]
        changed.append((tensor, handle))
    commands = box.commands
    commands += (make(plan.template, out, tuple(call)), site)
    for tensor, handle in changed:
        set_geometry(tensor, handle)
