"""Custom handlers of operations: copies between places, aliases, and operations that read or write tensors'
identity."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any, cast

import torch

from ..proxy.meta import Lazy, meta_like, meta_of
from ..proxy.proxy import DistributedTensor, alias, proxy
from ..runtime.master.route import route
from ..session import current, kernel_choice
from ..session.places import MeshPlace, Place
from . import copies, meta_inference, seen_at
from .asking import make_room
from .copies import copy_strides, fetch, fetch_into, fill, move, upload
from .dispatch import issue, part, run
from .first_call import check_masks, refuse_layout
from .op_plan import VIEW, OpEntry, Plan
from .op_table import enter, handler

aten = torch.ops.aten
_inference = torch.is_inference_mode_enabled


@handler(aten.detach.default, aten.alias.default, aten.lift_fresh.default, aten.lift.default)
def _alias(entry: OpEntry, args: Any, kwargs: Any) -> DistributedTensor:
    """Returns a proxy of the same remote tensor: proxies share the handle, and nothing is sent."""
    base, place = args[0], seen_at.target.place
    handle = base._h if place is None else seen_at.at(base._h, place)
    if _inference():
        return alias(base, handle)
    tensor = handle.meta.make()
    tensor._h = handle
    return tensor  # type: ignore[no-any-return]


@handler(aten._to_copy.default)
def _to_copy(entry: OpEntry, args: Any, kwargs: Any) -> Any:
    """Copies to another device, dtype or memory format. A smaller dtype is converted to before the transfer, a larger
    one after it, so that fewer bytes travel."""
    source: DistributedTensor = args[0]
    kwargs = dict(kwargs)
    device = kwargs.pop("device", None)
    kwargs.pop("non_blocking", None)
    kwargs.pop("pin_memory", None)
    if kwargs.pop("layout", None) not in (None, torch.strided):
        raise RuntimeError("to(options) doesn't support converting to a different layout")  # as torch says it
    if device is not None and device.type == "meta":
        return entry.op(source._h.meta.stand_in, device=device, **kwargs)
    dtype = kwargs.get("dtype") or source.dtype
    place = (
        source._place
        if device in (None, source.device)
        else current.session().places.of(device)
        if device.type == "node"
        else None
    )
    if place is source._place:
        return run(entry, args, kwargs, None)
    # what was copied to a mesh has the sum of its ranks' gradients
    if isinstance(source._place, MeshPlace) and asked_by_autograd():
        source = _gradient_of_a_copy(source, place)
        if place is source._place:
            return run(entry, (source, *args[1:]), {"dtype": dtype}, None) if dtype != source.dtype else source
    shrink = dtype.itemsize < source.dtype.itemsize
    moving = run(entry, (source, *args[1:]), {"dtype": dtype}, None) if shrink and dtype != source.dtype else source
    if place is None:
        local = fetch(moving)
        wanted = copy_strides(source, kwargs.get("memory_format"))
        if wanted != local.stride():
            local = torch.empty_strided(local.shape, wanted, dtype=local.dtype).copy_(local)
        return local.to(device=device, dtype=dtype)
    return arrive(move(moving, place), source, kwargs, dtype)


#: Where our own code lies, and torch's.
_OURS, _TORCHS = str(Path(__file__).parents[1]), str(Path(torch.__file__).parent)


def asked_by_autograd() -> bool:
    """Returns whether autograd's engine has called this thread's operation, and no hook or function of the user's: it
    copies a gradient to where the tensor is. What stands between them is our own, or a mode's of torch's."""
    if torch._C._current_graph_task_id() < 0:  # the engine does not run in this thread, as mostly
        return False
    frame: FrameType | None = sys._getframe(1)
    ours: tuple[str, ...] = (_OURS,)
    others = False
    while frame is not None:
        code = frame.f_code
        if code.co_name == "_engine_run_backward":
            return not others
        if code.co_name == "__torch_dispatch__":
            ours, others = (_OURS, _TORCHS), False  # those above it are the mode's, and torch has wrapped it
        elif not code.co_filename.startswith(ours):
            others = True
        frame = frame.f_back
    return False


def share(source: torch.Tensor, place: Place) -> torch.Tensor:
    """Returns what is to be copied of a local tensor to each rank of a place: where it is the gradient of a value that
    all ranks of a mesh had, a share of it."""
    # the gradient of a value that all ranks of a mesh had is the sum of theirs: each gets a share
    return source / len(place.members) if isinstance(place, MeshPlace) and asked_by_autograd() else source


def _gradient_of_a_copy(grad: DistributedTensor, place: Place | None) -> DistributedTensor:
    """Returns the gradient at ``place`` (None: on a node) of what was copied to ranks of a mesh: the sum of theirs."""
    if torch.is_grad_enabled() and grad.requires_grad:
        way = "disttensor.meshes.replicate(x, mesh)"
        # what is on a mesh can be made of shards, which have second derivatives
        if isinstance(place, MeshPlace):
            way = "disttensor.meshes.from_shards(mesh, [...]) of shards (x.shards())"
        raise NotImplementedError(
            f"the second derivative of a copy to {grad._place}: write {way} in place of x.to(mesh.device)"
        )
    member = grad._place.members[0]
    return copies.gradient_of_a_copy(grad, member if place is None else place)


def arrive(moved: DistributedTensor, source: Any, kwargs: dict[str, Any], dtype: torch.dtype) -> Any:
    """Gives a tensor that arrived contiguous the strides and the dtype of torch's own copy of ``source``."""
    wanted = copy_strides(source, kwargs.get("memory_format"))
    if wanted != moved.stride():
        empty = torch.empty_strided(moved.shape, wanted, dtype=moved.dtype, device=moved.device)
        moved = cast(DistributedTensor, empty.copy_(moved))
    if moved.dtype == dtype:
        return moved
    return run(enter(aten._to_copy.default), (moved,), {"dtype": dtype}, None)


def place_of(tensor: Any) -> Place:
    """Returns the place of a proxy."""
    return tensor._h.meta.place  # type: ignore[no-any-return]


@handler(aten.copy_.default)
def _copy(entry: OpEntry, args: Any, kwargs: Any) -> Any:
    """Copies between any two places. A copy of a local tensor into a remote one that is still empty is just an upload.

    A copy to a local tensor waits, ``non_blocking`` or not: nothing would tell when the tensor may be read.
    """
    target: Any = args[0]
    source: Any = args[1]
    non_blocking = bool(args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
    if type(target) is not DistributedTensor:
        fetch_into(target, source)
        return target
    if isinstance(source, torch.Tensor):
        if type(source) is not DistributedTensor:
            where = place_of(target)
            source = share(source, where)
            if fill(target, source, non_blocking):
                return target
            if source.shape != target.shape:
                torch.broadcast_shapes(source.shape, target.shape)
            source = upload(source, place_of(target), non_blocking)
        elif place_of(source) is not place_of(target):
            source = move(cast(DistributedTensor, source), place_of(target))
    return run(entry, (target, source), {}, None)


_EMPTY = (aten.empty.memory_format, aten.empty_strided.default)


@handler(*_EMPTY)
def _empty(entry: OpEntry, args: Any, kwargs: Any) -> Any:
    """Makes an empty tensor lazily: memory that nothing has used costs no command."""
    return lazy_factory(entry, args, kwargs)


def _filled_empty(entry: OpEntry, args: Any, kwargs: Any) -> Any:
    """Makes an empty tensor at once, which the node's torch fills as it makes it."""
    given = {name: value for name, value in kwargs.items() if value is not None}
    return run(entry, args, given, current.session().places.of(kwargs["device"]))


def make_empties_at_once(at_once: bool) -> None:
    """Chooses whether empty tensors are made where the script makes them, or at their first use."""
    for op in _EMPTY:
        enter(op).handler = _filled_empty if at_once else _empty


def lazy_factory(entry: OpEntry, args: Any, kwargs: Any) -> Any:
    place = current.session().places.of(kwargs["device"])
    key = (place, *(tuple(a) for a in args), *kwargs.values())
    plan = entry.plans.get(key)
    if plan is None:
        kwargs = {**kwargs, "dtype": kwargs.get("dtype") or torch.get_default_dtype(), "pin_memory": None}
        if any(n < 0 for a in args for n in a):  # the meta kernel takes steps back
            entry.op(*args, **{**kwargs, "device": "cpu"})
        meta = meta_like(meta_inference.infer(entry.op, args, kwargs), place)
        specs = entry.specs(args, kwargs, DistributedTensor, place.name)
        make_room(place)
        plan = Plan(VIEW, place, (entry.name, *specs), meta, 1, None)
        entry.store(entry.plans, key, plan)
    made = proxy(Lazy(0, plan.shapes, None, plan, ()))
    recorder = route.get().recorder
    if recorder is not None:
        recorder.add_empty(made._h)
    return made


@handler(aten.is_pinned.default)
def _is_pinned(entry: OpEntry, args: Any, kwargs: Any) -> bool:
    return False


@handler(aten.is_same_size.default)
def _is_same_size(entry: OpEntry, args: Any, kwargs: Any) -> bool:
    return bool(args[0].shape == args[1].shape)


@handler(aten.record_stream.default)
def _record_stream(entry: OpEntry, args: Any, kwargs: Any) -> None:
    """Does nothing: memory is freed in the order of commands already."""


_LIKE = (
    *(getattr(aten, f"{name}_like").default for name in ("empty", "zeros", "ones", "full", "rand", "randn")),
    *(getattr(aten, f"new_{name}").default for name in ("empty", "zeros", "ones", "full", "empty_strided")),
)


#: What torch passes of ``torch.zeros_like(x)``.
_UNPINNED = {"pin_memory": False}
_NOTHING = type(None)


@handler(*_LIKE)
def _like(entry: OpEntry, args: Any, kwargs: Any) -> Any:
    """Runs a factory that takes its metadata from a tensor; ``device=`` may name any other place."""
    source: DistributedTensor = args[0]
    if len(args) == 1 and kwargs == _UNPINNED and (plan := entry.quick.get((source._h.meta, _NOTHING))) is not None:
        return issue(plan, source._h, None)
    layout = kwargs.get("layout")
    if layout not in (None, torch.strided):
        refuse_layout(entry.name, layout)
    kwargs = {k: v for k, v in kwargs.items() if k not in ("pin_memory", "layout")}
    device = kwargs.get("device")
    if device in (None, source.device) or (
        device.type == "node" and current.session().places.of(device) is source._place
    ):
        kwargs.pop("device", None)
        return run(entry, args, kwargs, None)
    if device.type == "node":
        place: Place = current.session().places.of(device)
        meta = meta_of(source._h.meta.shape, source._h.meta.stride, 0, source.dtype, place)
        kwargs.pop("device")
        return run(entry, (_nothing(meta), *args[1:]), kwargs, None)
    if device.type == "meta":
        return entry.op(source._h.meta.stand_in, *args[1:], **kwargs)
    local = torch.empty_strided(source.shape, source.stride(), dtype=source.dtype, device=device)
    return entry.op(local, *args[1:], **kwargs)


def _nothing(meta: Any) -> DistributedTensor:
    entry = enter(aten.empty_strided.default)
    return lazy_factory(entry, (meta.shape, meta.stride), {"dtype": meta.dtype, "device": meta.device})  # type: ignore[no-any-return]


@handler(aten.index.Tensor)
def _index(entry: OpEntry, args: Any, kwargs: Any) -> Any:
    """Indexes a tensor. The number of elements that a mask selects depends on the data, so the node turns masks into
    indices first, with one round trip."""
    source, indices = args[0], args[1]
    if any(isinstance(i, torch.Tensor) and i.dtype in (torch.bool, torch.uint8) for i in indices):
        check_masks(source, indices)
        spread: list[torch.Tensor | None] = []
        for i in indices:
            if isinstance(i, torch.Tensor) and i.dtype in (torch.bool, torch.uint8):
                if not isinstance(i, DistributedTensor):
                    i = upload(i, source._place)
                spread.extend(i.nonzero().unbind(1))
            else:
                spread.append(i)
        indices = spread
    return run(entry, (source, list(indices)), kwargs, None)


@handler(aten._pack_padded_sequence.default)
def _pack(entry: OpEntry, args: Any, kwargs: Any) -> Any:
    """Packs a padded sequence. Lengths, and the batch sizes that torch computes from them and reads in C++, stay local
    tensors, as they do for CUDA."""
    return entry.op._op_dk(torch._C.DispatchKey.CompositeExplicitAutograd, *args, **kwargs)


@handler(
    *(getattr(aten, f"{name}_").default for name in ("uniform", "normal", "exponential", "cauchy", "geometric")),
    *(aten.log_normal_.default, aten.random_.to, getattr(aten.random_, "from"), aten.bernoulli_.float),
)
def _drawing(entry: OpEntry, args: Any, kwargs: Any) -> Any:
    """Fills a tensor with random numbers. Whether there are such (``x.uniform_(3, -1)``) depends on numbers, which a
    plan does not know: a local tensor without elements tells, once for the same numbers."""
    numbers = ("numbers", args[0].dtype, *args[1:], *(v for k, v in kwargs.items() if k != "generator"))
    if not entry.right.get(numbers):
        named = {k: v for k, v in kwargs.items() if k != "generator"}
        try:
            entry.op(torch.empty(0, dtype=args[0].dtype, device="cpu"), *args[1:], **named)
        except NotImplementedError:
            return run(entry, args, kwargs, None)  # a dtype that this CPU has no kernel for
        entry.store(entry.right, numbers, True)
    return run(entry, args, kwargs, None)


def dropout(entry: OpEntry, args: Any, kwargs: Any) -> Any:
    """Runs dropout, on a CPU node with exactly the steps of local dropout, so that one seed gives the same numbers."""
    source, p, train = args[0], args[1], args[2] if len(args) > 2 else None
    if kernel_choice.dropout(source._place.record, p, train) == "fused":
        return run(entry, args, kwargs, None)
    noise = part(aten.empty_like.default, (), (source,))
    noise = run(enter(aten.bernoulli_.float), (noise, 1 - p), {}, None)  # p is known to be one
    noise = part(aten.div_.Tensor, (), (noise, 1 - p))
    return part(aten.mul.Tensor, (), (source, noise)), noise


handler(aten.native_dropout.default)(dropout)


@handler(aten.native_dropout_backward.default)
def _dropout_backward(entry: OpEntry, args: Any, kwargs: Any) -> Any:
    grad, mask = args[0], args[1]
    if mask.dtype == torch.bool:
        return run(entry, args, kwargs, None)
    return part(aten.mul.Tensor, (), (grad, mask))
