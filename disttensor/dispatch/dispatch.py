"""Turns an operation on proxies into a command. Torch calls `dispatch` below autograd; its precedence:

 1. a custom handler (`@handler(aten.x.default)` in handlers.py): copies, Python values, ...
 2. a local tensor among the operands: 0-dim ones are sent along as values, others are an error at the user's line
 3. a cached plan for (operator, operands' metadata, static arguments): mint a ref, append a Call, return the proxy
 4. no plan yet: compose operations that CPUs lack and CUDA has (`@instead`, composites/wider_dtypes.py), or infer the
    outputs on the meta device; where that can't be done, ask the node, once per signature
 5. outputs that depend on the data: ask the node each time

Only the questions of 4 and 5, and a full window, block.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves, tree_map

from ..proxy.meta import Handle, Meta, Shared, new_ref
from ..proxy.proxy import DistributedTensor, operand_name
from ..runtime.master.home import exact
from ..runtime.protocol import codec
from ..runtime.protocol import commands as c
from ..session import current
from ..session.places import Place, Places
from . import rng_states
from .asking import ask, ask_written, make_room
from .call_site import here, users
from .copies import upload
from .first_call import make_plan, place_of
from .inplace_and_multi import check_write, first, rare
from .lazy_views import materialise
from .left_here import left_here
from .op_plan import GENERATOR, INDEX, LIST, NUMBER, ONE, STATIC, TENSORS, WRITTEN, OpEntry, Plan
from .op_table import enter, enter_front, entries, front, handles, ordinary, surrounded
from .signature_forms import learn

Call = c.Call
_frame = sys._getframe
_EMPTY: dict[str, Any] = {}
_NOTHING = type(None)
_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
_EXPLICIT = torch._C.DispatchKey.CompositeExplicitAutograd
#: Restores the dispatch state in which torch called dispatch. Without it, in inference mode views would forget whether
#: their base requires a gradient, which decides how matmul computes.
as_torch_came: Any = torch._C._RestorePythonTLSSnapshot  # type: ignore[attr-defined]


def dispatch(func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
    """Issues an operation. It is ``DistributedTensor.__torch_dispatch__``, a static method because torch would have a
    bound method made for each call."""
    entry = front.get(id(func)) or enter_front(func)
    if entry.handler is not None:
        return entry.handler(entry, args, kwargs or _EMPTY)
    if not kwargs and type(args[0]) is DistributedTensor:
        # the fast path, for the commonest calls: one or two proxies, or a proxy and a number
        if len(args) == 1:
            h = args[0]._h
            plan = entry.quick.get((h.meta, _NOTHING))
            if plan is not None:
                return issue(plan, h, None)
        elif len(args) == 2:
            a, b = args
            plan = entry.quick.get((a._h.meta, b._h.meta if type(b) is DistributedTensor else type(b)))
            if plan is not None:
                return issue(plan, a._h, b)
        known = entry.forms.get(len(args))
        if known is not None:
            return known(args)
    return run(entry, args, kwargs or _EMPTY, None)


def part(func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
    """Issues an operation that is a part of another one, past what surrounds operations."""
    return handle(entries.get(id(func)) or enter(func), args, kwargs or _EMPTY)


def handle(entry: OpEntry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Issues an operation, past what surrounds operations: as ``dispatch``, which has this written out."""
    if entry.handler is not None:
        return entry.handler(entry, args, kwargs)
    if not kwargs and type(args[0]) is DistributedTensor and len(args) <= 2:
        b: Any = args[1] if len(args) == 2 else None
        plan = entry.quick.get((args[0]._h.meta, b._h.meta if type(b) is DistributedTensor else type(b)))
        if plan is not None:
            return issue(plan, args[0]._h, b)
    return run(entry, args, kwargs, None)


#: Invariant 2: the command that writes a ref is appended before anyone can see the ref.
def issue(plan: Plan, h: Handle, b: Any) -> Any:
    """Issues a call with one of `remember`'s signatures: mints the ref, appends the command, makes the proxy.

    The caller of its caller is torch's or the user's code.
    """
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
    frame = _frame(2)
    code = frame.f_code
    box = meta.place.outbox
    commands = box.commands
    commands += (
        Call(plan.template, out, call),
        (code, frame.f_lasti) if id(code) in users else here(3),
    )
    if len(commands) >= box.limit:
        meta.place.session.flush(box)
    return tensor


def issue_write(plan: Plan, h: Handle, b: Any) -> None:
    """Issues a call that writes the tensor of ``h``, with one of `remember`'s signatures, as ``issue`` does."""
    out = new_ref()
    first = out - (h.ref or materialise(h))
    if b is None:
        call: tuple[Any, ...] = (first,)
    elif type(b) is DistributedTensor:
        other = b._h
        call = (first, out - (other.ref or materialise(other)))
    else:
        call = (first, b)
    frame = _frame(2)
    code = frame.f_code
    box = plan.place.outbox
    commands = box.commands
    commands += (
        Call(plan.template, out, call),
        (code, frame.f_lasti) if id(code) in users else here(3),
    )
    if len(commands) >= box.limit:
        plan.place.session.flush(box)


@ordinary
def run(entry: OpEntry, args: tuple[Any, ...], kwargs: dict[str, Any], place: Place | None) -> Any:
    """Runs steps 2 to 5 of the precedence. ``place`` is for factories, whose arguments name none."""
    taken = None
    if entry.draws and Places.meshes_made:
        where = place_of(entry, args, kwargs, place)
        taken = where.session.places
        taken.lock.acquire()  # until the command is queued no other thread puts another generator in use
    try:
        if taken is not None:
            taken.draw(where)
        key: list[Any] = [place]
        call: list[Any] = []
        out = new_ref()
        for value, kind in zip(args, entry.kinds):  # noqa: B905 - trailing defaults are not passed
            t = type(value)
            if t is DistributedTensor:
                h = value._h
                key.append(h.meta)
                call.append(out - (h.ref or materialise(h)))
            elif kind <= NUMBER and (t is float or t is int):
                key.append(t)
                call.append(value)
            elif not _other(value, kind, key, call, out):
                return _mixed(entry, args, kwargs, place)
        if kwargs:
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
            if entry.fallback is not None and (composed := entry.fallback(entry, args, kwargs)) is not NotImplemented:
                return composed
            if entry.asks:
                question = ask_written if entry.mutable else ask
                return question(entry, args, kwargs, place_of(entry, args, kwargs, place), call, out)[0]
            made = make_plan(entry, args, kwargs, place, call, out)
            if type(made) is not Plan:
                plan, result = made
                if plan is not None:
                    entry.store(entry.plans, tuple(key), plan)
                    remember(entry, plan, args, kwargs)
                return result
            plan = made
            entry.store(entry.plans, tuple(key), plan)
            remember(entry, plan, args, kwargs)
            return first(entry, plan, args, kwargs, call, out)
        if plan.kind == ONE:
            meta = plan.shapes
            result = meta.make()
            result._h = Handle(out, meta)
        elif plan.kind == WRITTEN and entry.returned == (0,):
            result = args[0]
            if type(result._h) is Shared:
                check_write(result)
        else:
            return rare(entry, plan, args, kwargs, call, out)
        box = plan.place.outbox
        commands = box.commands
        commands += (c.Call(plan.template, out, tuple(call)), here())
        if len(commands) >= box.limit:
            plan.place.session.flush(box)
        return result
    except TypeError:
        for value in tree_leaves((args, kwargs)):
            if type(value) is torch.SymInt:  # it has no hash: one that differs between ranks raises
                int(value)
        raise
    finally:
        if taken is not None:
            taken.lock.release()


def remember(entry: OpEntry, plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Notes a plan for the fast paths, if its signature is one that they serve."""
    written = plan.kind == WRITTEN and entry.returned == (0,)
    if kwargs or entry.draws or not (written or plan.kind == ONE) or type(args[0]) is not DistributedTensor:
        return
    learn(entry, args, written, run)
    if len(args) > 2:
        return
    b: Any = args[1] if len(args) == 2 else None
    if type(b) is DistributedTensor:
        key: tuple[Any, Any] = (args[0]._h.meta, b._h.meta)
    elif b is None or (type(b) in (float, int) and entry.kinds[1] <= NUMBER):
        key = (args[0]._h.meta, type(b))
    else:
        return
    if not written:  # what it returns is new
        entry.store(entry.quick, key, plan)
    if not surrounded():
        entry.store(entry.shortcuts, key, plan)


def _other(value: Any, kind: int, key: list[Any], call: list[Any], out: int) -> bool:
    """Sorts an argument that is no proxy into ``key`` and ``call``; False for a local tensor, or a generator."""
    if value is None or kind == STATIC:
        key.append(value)
    elif kind <= NUMBER:
        t = type(value)
        if t is float or t is int or t is bool:
            key.append(t)
            call.append(value)
        elif isinstance(value, torch.Tensor):
            return False
        elif t is torch.SymInt:
            return _other(int(value), kind, key, call, out)  # one that differs between ranks raises
        else:
            key.append(exact(value))  # a complex number is a static argument
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
    elif kind == GENERATOR:
        return False
    else:  # NUMBERS
        key.append((len(value), *map(type, value)))
        if any(type(v) is complex for v in value):
            key.append(exact(tuple(value)))
        else:
            call.extend(value)
    return True


@handles("composite")
def _composite(entry: OpEntry, args: Any, kwargs: Any) -> Any:
    """Runs a composite's parts. Torch takes composites apart above dispatch, but not in inference mode; a node is sent
    the parts in any mode."""
    op = entry.op._op_dk  # not .decompose(): it prefers Python decompositions, which give other numbers
    if torch._C._dispatch_has_kernel_for_dispatch_key(entry.name, "ADInplaceOrView"):
        return op(_COMPOSITE, *args, **kwargs)  # torch will make views of the result
    with as_torch_came():
        return op(_COMPOSITE, *args, **kwargs)


@handles("python")
def _python(entry: OpEntry, args: Any, kwargs: Any) -> Any:
    """Runs a library's operator for any device: on the node if ``allow_ops`` names it, else part by part."""
    if current.session().allow.added(entry.name):
        return run(entry, args, kwargs, None)
    return entry.op._op_dk(_EXPLICIT, *args, **kwargs)


def whole(entry: OpEntry, args: tuple[Any, ...], asked: bool = False) -> Any:
    """Runs a composite in one piece on its node, where torch takes it apart as it does locally. ``asked``: its shape
    depends on the data."""
    if not asked:
        return run(entry, args, {}, None)
    place = place_of(entry, args, {}, None)
    out, call = new_ref(), list[Any]()
    for value, kind in zip(args, entry.kinds, strict=False):
        if type(value) is DistributedTensor:
            call.append(out - (value._h.ref or materialise(value._h)))
        else:
            _other(value, kind, [], call, out)
    return ask(entry, args, {}, place, call, out)[0]


@handles("value")
def _value(entry: OpEntry, args: Any, kwargs: Any) -> Any:
    """Runs an operation that returns a Python value. Waits for one round trip."""
    a: Any = args[0] if len(args) == 1 and not kwargs else None
    if type(a) is DistributedTensor:  # mostly .item()
        h, out = a._h, new_ref()
        plan = entry.quick.get((h.meta, None))
        if plan is None:
            specs = entry.specs(args, kwargs, DistributedTensor, "")
            make_room(h.meta.place)
            plan = Plan(ONE, h.meta.place, (entry.name, *specs), None, 0, here(3))
            entry.store(entry.quick, (h.meta, None), plan)
        call_one = c.Call(plan.template, out, (out - (h.ref or materialise(h)),))
        place = h.meta.place
        return codec.from_value(place.session.ask(place, c.Answer, lambda id: c.Ask(id, call_one), here(3)).value)
    place = place_of(entry, args, kwargs, None)
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
    make_room(place)
    template = place.define(entry.name, *specs, 0, site)
    reply = place.session.ask(place, c.Answer, lambda id: c.Ask(id, c.Call(template, out, tuple(call))), site)
    return codec.from_value(reply.value)


def _mixed(entry: OpEntry, args: Any, kwargs: Any, place: Place | None) -> Any:
    """Runs an operation with local operands: 0-dim CPU tensors travel as values, index tensors are sent, others are the
    user's mistake. A generator of the user's draws in place of the node's."""
    if with_others(args, kwargs):
        return NotImplemented
    if any(isinstance(value, torch._C.Generator) for value in (*args, *kwargs.values())):
        return rng_states.drawn(run, entry, args, kwargs, place)
    for where in entry.writes:
        target = kwargs.get(where) if isinstance(where, str) else args[where] if where < len(args) else None
        if isinstance(target, torch.Tensor) and type(target) is not DistributedTensor:
            raise RuntimeError(
                f"{entry.name}: can't write the result into {operand_name(target)}, because an operand is on a node; "
                "bring the operand here with .cpu()"
            )
    place = place_of(entry, args, kwargs, place)
    index = entry.name.startswith(("aten::index", "aten::_index_put", "aten::_unsafe_index"))

    def local(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or type(value) is DistributedTensor:
            return value
        if value.device.type == "cpu" and value.dim() == 0 and value.layout is torch.strided:
            return scalar(value, place)
        mask = index and value.dtype in (torch.int64, torch.int32, torch.bool, torch.uint8)
        if value.device.type == "cpu" and (mask or place.device.type == "cpu"):  # torch made it beside a CPU twin
            return upload(value, place)
        raise left_here(entry.name, value, place)

    args, kwargs = tree_map(local, (args, kwargs))
    if entry.handler is not None:
        return entry.handler(entry, args, kwargs)
    return run(entry, args, kwargs, None)


def with_others(args: Any, kwargs: Any) -> bool:
    """Returns whether there is a tensor of a class that says itself what operations on it do (``__torch_dispatch__``):
    torch asks that class where ours returns NotImplemented."""
    return any(
        isinstance(value, torch.Tensor)
        and type(value) is not DistributedTensor
        and type(value).__torch_dispatch__ != torch.Tensor.__torch_dispatch__
        for value in tree_leaves((args, kwargs))
    )


def scalar(value: torch.Tensor, place: Place) -> DistributedTensor:
    """Returns a local 0-dim tensor as one on a node's CPU, without a transfer."""
    home = place.host
    number = value.detach().item()
    kwargs = {"dtype": value.dtype, "device": home.device}
    return run(enter(torch.ops.aten.scalar_tensor.default), (number,), kwargs, home)  # type: ignore[no-any-return]
