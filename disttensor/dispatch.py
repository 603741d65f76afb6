"""An operation on proxies becomes a command. `dispatch` is what torch calls below autograd; its precedence:

 1. a handler (`@handler(aten.x.default)` in handlers.py): copies, values, what has its own way
 2. a local tensor among the operands: 0-dim ones are sent along as values, others are an error at the user's line
 3. a cached plan for (operator, operands' metadata, static arguments): mint a ref, append a Call, return the proxy
 4. no plan yet: infer the outputs on the meta device; where that can't be done, ask the node, once per signature
 5. outputs that depend on the data: ask the node each time

Nothing here blocks but 4 and 5's questions and a full window.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves, tree_map

from . import infer
from .meta import Handle, Lazy, Meta, meta_like, meta_of, new_ref
from .placement import Place
from .plan import INDEX, LIST, MANY, MAX_PLANS, NUMBER, ONE, RESHAPED, STATIC, TENSOR, TENSORS, VIEW, WRITTEN, Entry, Plan
from .runtime import codec
from .runtime import command as c
from .runtime.errors import DisttensorError
from .site import codes as site_codes
from .site import here
from .tensor import DistributedTensor, operand_name, proxy, set_geometry

Handler = Callable[..., Any]

#: id of an operator -> its entry. The entry holds the operator, so the id stays its own.
_entries: dict[int, Entry] = {}
_handlers: dict[OpOverload, Handler] = {}
_EMPTY: dict[str, Any] = {}


def handler(*ops: OpOverload) -> Callable[[Handler], Handler]:
    """Registers ``fn(entry, args, kwargs)`` for operators that don't go the ordinary way."""

    def register(fn: Handler) -> Handler:
        for op in ops:
            _handlers[op] = fn
        return fn

    return register


def enter(op: OpOverload) -> Entry:
    """The entry of an operator."""
    entry = _entries.get(id(op))
    if entry is None:
        entry = Entry(op)
        entry.handler = _handlers.get(op) or (_view if entry.view else _value if entry.value else None)
        _entries[id(op)] = entry
    return entry


def drop_plans() -> None:
    """All plans are made anew (a new session, or a node's full table of templates)."""
    for entry in list(_entries.values()):
        entry.plans.clear()
        entry.quick.clear()


def dispatch(cls: type, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
    """``DistributedTensor.__torch_dispatch__``."""
    entry = _entries.get(id(func)) or enter(func)
    if entry.handler is not None:
        return entry.handler(entry, args, kwargs or _EMPTY)
    if not kwargs and len(args) <= 2 and type(args[0]) is DistributedTensor:
        # the commonest shapes of a call, by the shortest way: one or two proxies, or a proxy and a number
        a, b = args if len(args) == 2 else (args[0], None)
        plan = entry.quick.get((a._h.meta, b._h.meta if type(b) is DistributedTensor else type(b)))
        if plan is not None:
            return issue(plan, a._h, b)
    return run(entry, args, kwargs or _EMPTY, None)


def issue(plan: Plan, h: Handle, b: Any) -> Any:
    """Mints, appends and makes the proxy for one of `remember`'s signatures. Called straight from torch or the user."""
    meta: Meta = plan.shapes
    out = new_ref()
    first = out - (h.ref or materialise(h))
    if b is None:
        call: tuple[Any, ...] = (first,)
    elif type(b) is DistributedTensor:
        h = b._h
        call = (first, out - (h.ref or materialise(h)))
    else:
        call = (first, b)
    tensor = meta.make()
    tensor._h = Handle(out, meta)
    frame = sys._getframe(2)
    code = frame.f_code
    known = site_codes.get(id(code))
    box = meta.place.outbox
    commands = box.commands
    commands += (
        c.Call(plan.template, out, call),
        (code, frame.f_lasti) if known is not None and known[1] else here(),
    )
    if len(commands) >= box.limit:
        meta.place.session.flush(box)
    return tensor


def run(entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any], place: Place | None) -> Any:
    """Steps 2 to 5 of the precedence. ``place`` is for factories, whose arguments name none."""
    key: list[Any] = [place]
    call: list[Any] = []
    out = new_ref()
    for value, kind in zip(args, entry.kinds):  # noqa: B905 - trailing defaults are not passed
        if type(value) is DistributedTensor:
            h = value._h
            key.append(h.meta)
            call.append(out - (h.ref or materialise(h)))
        elif not _other(value, kind, key, call, out):
            return _mixed(entry, args, kwargs, place)
    for name, value in kwargs.items():
        key.append(name)
        if type(value) is DistributedTensor:
            h = value._h
            key.append(h.meta)
            call.append(out - (h.ref or materialise(h)))
        elif not _other(value, entry.kwkinds[name], key, call, out):
            return _mixed(entry, args, kwargs, place)
    plan = entry.plans.get(tuple(key))
    if plan is None:
        if entry.asks:
            return _ask(entry, args, kwargs, _place_of(entry, args, kwargs, place), call, out)[0]
        made = _plan(entry, args, kwargs, place, call, out)
        if type(made) is not Plan:
            plan, result = made
            entry.plans[tuple(key)] = plan
            return result
        plan = entry.plans[tuple(key)] = made
        remember(entry, plan, args, kwargs)
    if plan.kind == ONE:
        meta: Meta = plan.shapes
        tensor = proxy(Handle(out, meta))
        box = meta.place.outbox
        commands = box.commands
        commands += (c.Call(plan.template, out, tuple(call)), here())
        if len(commands) >= box.limit:
            meta.place.session.flush(box)
        return tensor
    return _rare(entry, plan, args, kwargs, call, out)


def remember(entry: Entry, plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Notes a plan for the shortest way, if its signature is one of those that it serves."""
    if plan.kind != ONE or kwargs or len(args) > 2 or type(args[0]) is not DistributedTensor:
        return
    b = args[1] if len(args) == 2 else None
    if type(b) is DistributedTensor:
        entry.quick[args[0]._h.meta, b._h.meta] = plan
    elif b is None or (type(b) in (float, int) and entry.kinds[1] <= NUMBER):
        entry.quick[args[0]._h.meta, type(b)] = plan


def _other(value: Any, kind: int, key: list[Any], call: list[Any], out: int) -> bool:
    """Sorts an argument that is no proxy into ``key`` and ``call``; False for a local tensor."""
    if value is None or kind == STATIC:
        key.append(value)
    elif kind <= NUMBER:
        t = type(value)
        if t is float or t is int or t is bool:
            key.append(t)
            call.append(value)
        elif isinstance(value, torch.Tensor):
            return False
        else:
            key.append((t, value))
    elif kind == LIST:
        key.append(tuple(value))
    elif kind == INDEX:
        key.append((type(value), value))
        call.append(value)
    elif kind == TENSORS:
        key.append(len(value))
        for v in value:
            if type(v) is DistributedTensor:
                h = v._h
                key.append(h.meta)
                call.append(out - (h.ref or materialise(h)))
            elif v is None:
                key.append(None)
            else:
                return False
    else:  # NUMBERS
        key.append((len(value), *map(type, value)))
        if any(type(v) is complex for v in value):
            key.append(tuple(value))
        else:
            call.extend(value)
    return True


def _rare(entry: Entry, plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any], call: list[Any], out: int) -> Any:
    box, session = plan.state.outbox, plan.state.session
    site = here()
    if plan.kind == MANY:
        handles: list[Handle] = []

        def one(meta: Meta | None) -> DistributedTensor | None:
            if meta is None:
                return None
            handles.append(Handle(new_ref() if handles else out, meta))
            return proxy(handles[-1])

        result = tree_map(one, plan.shapes)
        call.extend(out - h.ref for h in handles[1:])
        box.commands += (c.Call(plan.template, out, tuple(call)), site)
    else:
        targets = [args[w] if isinstance(w, int) else kwargs[w] for w in entry.returned]
        if plan.kind == RESHAPED:
            _reshape(entry, plan, args, kwargs, call, out, site)
        else:
            box.commands += (c.Call(plan.template, out, tuple(call)), site)
        result = targets[0] if len(targets) == 1 else tuple(targets) if targets else None
    if len(box.commands) >= box.limit:
        session.flush(box)
    return result


def _reshape(
    entry: Entry, plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any], call: list[Any], out: int, site: Any
) -> None:
    """Writes arguments whose geometry changes: each gets a new ref, an alias, first, because a handle's geometry is fixed."""
    box = plan.state.outbox
    alias = plan.state.define("aten::alias", (c.Hole(True),), (), 1, site)
    changed: list[tuple[DistributedTensor, Handle]] = []
    for where, meta in plan.shapes:
        tensor = args[where] if isinstance(where, int) else kwargs[where]
        old = tensor._h.ref
        handle = Handle(new_ref(), meta)
        box.commands += (c.Call(alias, handle.ref, (handle.ref - old,)), site)
        call = [out - handle.ref if type(v) is int and v == out - old and _is_hole(plan, i) else v for i, v in enumerate(call)]
        changed.append((tensor, handle))
    box.commands += (c.Call(plan.template, out, tuple(call)), site)
    for tensor, handle in changed:
        set_geometry(tensor, handle)


def _is_hole(plan: Plan, index: int) -> bool:
    holes: list[bool] = []

    def walk(spec: c.Spec) -> None:
        if isinstance(spec, c.Hole):
            holes.append(spec.tensor)
        elif isinstance(spec, c.Items):
            for s in spec.items:
                walk(s)

    for spec in plan.specs[1]:
        walk(spec)
    for _, spec in plan.specs[2]:
        walk(spec)
    return holes[index]


# ---- plans -------------------------------------------------------------------------------------------------------------


def _place_of(entry: Entry, args: Any, kwargs: Any, place: Place | None) -> Place:
    """The place where the operands are. 0-dim CPU operands may stand beside others of their node.

    Raises RuntimeError naming both operands when they are on two places.
    """
    first: DistributedTensor | None = None
    scalar: DistributedTensor | None = None
    for value in tree_leaves((args, kwargs)):
        if not isinstance(value, DistributedTensor):
            continue
        where = value._place
        if place is None or (first is None and scalar is None):
            if place is not None and place is not where:
                break
            place = where
        if where is not place:
            small = value.dim() == 0 and not where.is_cuda() and where.node == place.node
            if small:
                continue
            if scalar is not None and first is None and where.node == place.node:
                place = where
            else:
                other = first if first is not None else scalar
                there = operand_name(other) if other is not None else str(place)
                raise RuntimeError(
                    f"{entry.name}: expected all tensors to be on the same device, but found {there} and "
                    f"{operand_name(value)}; move one with .to({str(place.device)!r}) or .to({str(where.device)!r})"
                )
        if value.dim() == 0 and not where.is_cuda() and first is None:
            scalar = scalar if scalar is not None else value
        elif first is None:
            first = value
    if place is None:
        raise DisttensorError(f"{entry.name}: no operand is on a node")
    return place


def _plan(entry: Entry, args: Any, kwargs: Any, place: Place | None, call: list[Any], out: int) -> Any:
    """A new plan; or (plan, result) when the node had to be asked, for the asking ran the operation."""
    place = _place_of(entry, args, kwargs, place)
    if place.state.full:
        drop_plans()
        place.state.turn()
    args_in = infer.stand_ins(args, DistributedTensor)
    kwargs_in = infer.stand_ins(kwargs, DistributedTensor)
    fresh: dict[int | str, torch.Tensor] = {}
    for where in entry.writes:
        holder: Any = args_in if isinstance(where, int) else kwargs_in
        if isinstance(holder, tuple) and isinstance(where, int) and where < len(holder):
            if isinstance(holder[where], torch.Tensor):
                fresh[where] = _twin(holder[where])
                args_in = (*args_in[:where], fresh[where], *args_in[where + 1 :])
        elif isinstance(where, str) and isinstance(kwargs_in.get(where), torch.Tensor):
            fresh[where] = _twin(kwargs_in[where])
            kwargs_in = {**kwargs_in, where: fresh[where]}
    site = here(3)
    try:
        result = infer.infer(entry.op, args_in, kwargs_in)
    except NotImplementedError:
        if entry.mutable and entry.returned:
            result = None  # written in place; the node will say if it can't be
        else:
            result, metas = _ask(entry, args, kwargs, place, call, out)
            return _finish(entry, args, kwargs, place, metas, site), result
    if entry.mutable and (entry.returned or not entry.op._schema.returns):
        specs = entry.specs(args, kwargs, DistributedTensor, place.name)
        reshaped = []
        for where, stand in fresh.items():
            before = args[where]._h.meta if isinstance(where, int) else kwargs[where]._h.meta
            after = meta_like(stand, before.place)
            if after is not before:
                reshaped.append((where, after))
        kind = RESHAPED if reshaped else WRITTEN
        return Plan(kind, place.state, (entry.name, *specs), tuple(reshaped), 0, site)
    metas = tree_map(lambda t: meta_like(t, place) if isinstance(t, torch.Tensor) else None, result)
    return _finish(entry, args, kwargs, place, metas, site)


def _twin(stand: torch.Tensor) -> torch.Tensor:
    twin = torch.empty_strided(stand.shape, stand.stride(), dtype=stand.dtype, device="meta")
    return twin.as_strided(stand.shape, stand.stride(), stand.storage_offset()) if stand.storage_offset() else twin


def _finish(entry: Entry, args: Any, kwargs: Any, place: Place, metas: Any, site: Any) -> Plan:
    specs = entry.specs(args, kwargs, DistributedTensor, place.name)
    outs = sum(isinstance(m, Meta) for m in tree_leaves(metas))
    if len(entry.plans) >= MAX_PLANS:
        entry.plans.clear()
        entry.quick.clear()
    single = isinstance(metas, Meta)
    return Plan(ONE if single else MANY, place.state, (entry.name, *specs), metas, outs, site)


def _ask(entry: Entry, args: Any, kwargs: Any, place: Place, call: list[Any], out: int) -> tuple[Any, Any]:
    """Runs the operation on the node and waits for its outputs' geometry: (proxies, their metas)."""
    returns = entry.op._schema.returns
    if any(str(r.type) != "Tensor" for r in returns):
        raise NotImplementedError(f"{entry.name}: a list of tensors whose shapes depend on the data is not supported")
    refs = [out, *(new_ref() for _ in returns[1:])]
    specs = entry.specs(args, kwargs, DistributedTensor, place.name)
    site = here(3)
    template = place.state.define(entry.name, *specs, len(refs), site)
    call = [*call, *(out - r for r in refs[1:])]
    reply = place.session.ask(place, lambda id: c.Ask(id, c.Call(template, out, tuple(call))), site)
    if not isinstance(reply, c.Shapes) or len(reply.outs) != len(refs):
        raise DisttensorError(f"{entry.name}: node {place.node} answered {reply} where {len(refs)} shapes were due")
    metas = [meta_of(g.shape, g.stride, g.offset, codec.dtype_of(g.dtype), place) for g in reply.outs]
    proxies = [proxy(Handle(ref, meta)) for ref, meta in zip(refs, metas, strict=True)]
    return (proxies[0], metas[0]) if len(refs) == 1 else (tuple(proxies), tuple(metas))


def _value(entry: Entry, args: Any, kwargs: Any) -> Any:
    """An operation that gives a Python value: one round trip."""
    place = _place_of(entry, args, kwargs, None)
    out = new_ref()
    call: list[Any] = []
    pairs = [*zip(args, entry.kinds), *((v, entry.kwkinds[k]) for k, v in kwargs.items())]  # noqa: B905
    for value, kind in pairs:
        if type(value) is DistributedTensor:
            call.append(out - (value._h.ref or materialise(value._h)))
        elif not _other(value, kind, [], call, out):
            return _mixed(entry, args, kwargs, place)
    site = here(3)
    specs = entry.specs(args, kwargs, DistributedTensor, place.name)
    template = place.state.define(entry.name, *specs, 0, site)
    reply = place.session.ask(place, lambda id: c.Ask(id, c.Call(template, out, tuple(call))), site)
    return codec.from_value(reply.value)


# ---- views -------------------------------------------------------------------------------------------------------------


def _view(entry: Entry, args: Any, kwargs: Any) -> Any:
    """A view makes no command until it is used: most in a training step never are."""
    base = args[0]
    if type(base) is not DistributedTensor:  # a view of a list, or a factory that is tagged as one
        return run(entry, args, kwargs, None)
    h = base._h
    rest = args[1:]
    if kwargs:
        rest = (*rest, *kwargs.items())
    try:
        plan = entry.plans.get((h.meta, rest))
    except TypeError:
        rest = tuple(tuple(a) if type(a) is list else a for a in rest)
        try:
            plan = entry.plans.get((h.meta, rest))
        except TypeError:
            return run(entry, args, kwargs, None)
    if plan is None:
        plan = _view_plan(entry, args, kwargs, h.meta, rest)
        if plan is None:
            return run(entry, args, kwargs, None)
    tensor = plan.shapes.make()
    tensor._h = Lazy(0, plan.shapes, h, plan, tuple([rest[i] for i in plan.holes]), here(3))
    return tensor


def _view_plan(entry: Entry, args: Any, kwargs: Any, meta: Meta, rest: tuple[Any, ...]) -> Plan | None:
    """None for what must take the ordinary way: views that give lists, operands that are local."""
    if any(isinstance(v, torch.Tensor) for v in rest):
        return None
    place = meta.place
    result = infer.infer(entry.op, infer.stand_ins(args, DistributedTensor), kwargs)
    if not isinstance(result, torch.Tensor):
        return None
    positional, named = entry.specs(args, kwargs, DistributedTensor, place.name)
    if len(entry.plans) >= MAX_PLANS:
        entry.plans.clear()
    if place.state.full:
        drop_plans()
        place.state.turn()
    plan = Plan(VIEW, place.state, (entry.name, positional, named), meta_like(result, place), 1, here(4))
    plan.holes = tuple(i for i, spec in enumerate(positional[1:]) if isinstance(spec, c.Hole))
    entry.plans[meta, rest] = plan
    return plan


def materialise(handle: Handle) -> int:
    """Makes a lazy tensor exist on its node; gives its ref."""
    if not isinstance(handle, Lazy):
        raise DisttensorError("this tensor was never made")
    plan: Plan = handle.plan  # type: ignore[assignment]
    with plan.state.lock:
        if handle.ref:
            return handle.ref
        ref = new_ref()
        base = handle.base
        call = handle.values if base is None else (ref - (base.ref or materialise(base)), *handle.values)
        commands = plan.state.outbox.commands
        template = plan.define(handle.site)
        commands += (c.Call(template, ref, call), handle.site)
        handle.ref = ref  # only now: whoever sees it may use it
        handle.base = None
        return ref


# ---- local tensors among the operands ----------------------------------------------------------------------------------


def _mixed(entry: Entry, args: Any, kwargs: Any, place: Place | None) -> Any:
    """Local operands: 0-dim CPU tensors travel as values; index tensors are sent; others are a mistake of the user's."""
    place = _place_of(entry, args, kwargs, place)
    index = entry.name.startswith(("aten::index", "aten::_index_put", "aten::_unsafe_index"))

    def local(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or type(value) is DistributedTensor:
            return value
        if value.device.type == "cpu" and value.dim() == 0 and value.layout is torch.strided:
            return scalar(value, place)
        if index and value.device.type == "cpu" and value.dtype in (torch.int64, torch.int32, torch.bool, torch.uint8):
            from .transfer import upload

            return upload(value, place)
        raise RuntimeError(
            f"{entry.name}: expected all tensors to be on the same device, but found {operand_name(value)} and "
            f"a tensor on {place}; send it with .to({str(place.device)!r}) or .dist_send()"
        )

    args, kwargs = tree_map(local, (args, kwargs))
    if entry.handler is not None:
        return entry.handler(entry, args, kwargs)
    return run(entry, args, kwargs, None)


def scalar(value: torch.Tensor, place: Place) -> DistributedTensor:
    """A local 0-dim tensor on a node's CPU, without a transfer."""
    home = place.session.places.at(place.node, "cpu")
    number = value.detach().item()
    kwargs = {"dtype": value.dtype, "device": home.device}
    return run(enter(torch.ops.aten.scalar_tensor.default), (number,), kwargs, home)  # type: ignore[no-any-return]


__all__ = ["TENSOR", "dispatch", "enter", "handler", "materialise", "run", "scalar"]
