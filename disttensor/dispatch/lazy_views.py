"""Lazy views and empty tensors: they cost no command until something uses them, and most views of a training step are
never used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..proxy.meta import APART, Busy, Handle, Lazy, Meta, meta_like, new_ref
from ..proxy.proxy import DistributedTensor, alias
from ..runtime.master.command_queue import CommandQueue
from ..runtime.master.route import Tap, route
from ..runtime.protocol import commands as c
from ..runtime.protocol.errors import DisttensorError, RanksDiffer
from . import meta_inference
from .asking import make_room
from .call_site import here
from .inplace_and_multi import checked
from .op_plan import VIEW, OpEntry, Plan
from .op_table import handles, run_ordinary

_inference = torch.is_inference_mode_enabled


#: Invariant 2: the command that writes a ref is appended before anyone can see the ref.
def materialise(handle: Handle) -> int:
    """Makes a lazy tensor exist on its node, and returns its ref."""
    if not isinstance(handle, Lazy):
        if not isinstance(handle, Busy):
            raise DisttensorError("this tensor was never made")
        handle.writing.check()
        handle.ref = handle.owner.ref or materialise(handle.owner)
        return handle.ref
    plan: Plan = handle.plan
    with plan.place.home.lock:
        if handle.ref:
            return handle.ref
        if handle.base is not None and not handle.base.ref:
            _materialise_bases(handle.base)
        ref = new_ref()
        base = handle.base
        call = handle.values if base is None else (ref - base.ref, *handle.values)
        commands = past(handle, plan.place.outbox)
        site = here()  # the line that uses the view: one that can't be made was refused when it was written
        template = plan.template if plan.generation == plan.place.home.generation else plan.define(site)
        if plan.new:
            plan.new = False
            commands += (checked([plan.shapes])(template, ref, call), site)
        else:
            commands += (c.Call(template, ref, call), site)
        if plan.place.outbox.shut:  # what comes next may be for another queue
            plan.place.session.link.sender.open(plan.place.outbox)
        handle.ref = ref  # only now, as any thread that sees the ref may use it
        handle.base = None
        return ref


def past(handle: Lazy, box: CommandQueue) -> Any:
    """Returns the queue for the command that makes ``handle``: the node's own, past a recording, unless the recording
    made the view's base, or the empty tensor. Tensors that a graph uses but doesn't make exist for all its replays."""
    commands = box.commands
    if type(commands) is Tap:
        recorder = route.get().recorder
        if recorder is not None and not recorder.made(handle):
            return box.queue
    return commands


def _materialise_bases(handle: Handle | None) -> None:
    """Materialises a chain of lazy views iteratively, base first (recursion would end at a thousand)."""
    chain: list[Handle] = []
    while handle is not None and not handle.ref:
        chain.append(handle)
        handle = handle.base if isinstance(handle, Lazy) else None
    while chain:
        materialise(chain.pop())


#: Makes views at numbers of ranks: set by meshes/, above.
_by_rank: list[Callable[[OpEntry, DistributedTensor, tuple[Any, ...]], Any]] = []


def views_by_rank(
    fn: Callable[[OpEntry, DistributedTensor, tuple[Any, ...]], Any],
) -> Callable[[OpEntry, DistributedTensor, tuple[Any, ...]], Any]:
    """Registers ``fn(entry, base, rest)``, which makes a view for whose operator some arguments are SymInts."""
    _by_rank[:] = [fn]
    return fn


@handles("view")
def view(entry: OpEntry, args: Any, kwargs: Any) -> Any:
    """Makes a lazy view, which costs no command until it is used."""
    base = args[0]
    if kwargs or type(base) is not DistributedTensor:  # a view of a list, or a factory that is tagged as a view
        return run_ordinary(entry, args, kwargs, None)
    h = base._h
    rest = args[1:]
    if entry.lists:
        rest = tuple([tuple(a) if type(a) is list else a for a in rest])
    try:
        plan = entry.plans.get((h.meta, rest))
    except TypeError:
        if any(type(a) is torch.SymInt for a in rest):  # a number of ranks
            return _by_rank[0](entry, base, rest)
        return run_ordinary(entry, args, kwargs, None)
    if plan is None:
        plan = _view_plan(entry, args, kwargs, h.meta, rest)
        if plan is None:
            return run_ordinary(entry, args, kwargs, None)
    meta = plan.shapes
    handle: Handle
    below = h.base if type(h) is Lazy else None
    if below is not None and below.meta is meta:  # x.t().t(), which is x
        handle = below
    elif meta is h.meta:
        handle = h
    else:
        handle = Lazy(0, meta, h, plan, plan.values)
    if _inference():
        return alias(base, handle)
    tensor = meta.make()
    tensor._h = handle
    return tensor


def _view_plan(entry: OpEntry, args: Any, kwargs: Any, meta: Meta, rest: tuple[Any, ...]) -> Plan | None:
    """Returns the plan of a view; None for calls that `run` has to issue: views that give lists, local operands."""
    if any(isinstance(v, torch.Tensor) for v in rest):
        return None
    # where a tensor lies in memory that starts elsewhere on each rank, is known to the ranks
    if entry.name == "aten::as_strided" and len(rest) > 2 and (rest[2] or 0) >= APART:
        raise RanksDiffer(
            f"{entry.name}: each rank of {meta.place} has this tensor at another offset of its memory, and one is "
            "given for all; without a storage_offset it is the tensor's own"
        )
    place = meta.place
    result = meta_inference.infer(entry.op, meta_inference.stand_ins(args, DistributedTensor), kwargs)
    if not isinstance(result, torch.Tensor):
        return None
    positional, named = entry.specs(args, kwargs, DistributedTensor, place.name)
    make_room(place)
    plan = Plan(VIEW, place, (entry.name, positional, named), meta_like(result, place), 1, here(4))
    plan.values = tuple(rest[i] for i, spec in enumerate(positional[1:]) if isinstance(spec, c.Hole))
    entry.store(entry.plans, (meta, rest), plan)
    return plan
