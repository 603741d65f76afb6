"""The first call with a signature: finds its place, infers its outputs, and asks the node where that can't be done."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch.utils._pytree import tree_leaves, tree_map

from ..proxy.meta import Meta, contiguous, meta_like, stand_in
from ..proxy.proxy import DistributedTensor, operand_name
from ..runtime.master.route import route
from ..runtime.protocol.errors import DisttensorError
from ..session.places import Place, one_session
from . import meta_inference, trial
from .asking import Reshaped, ask, ask_written, make_room
from .call_site import here
from .inplace_and_multi import may_share
from .op_plan import MANY, ONE, RESHAPED, SHARING, WRITTEN, OpEntry, Plan
from .rehearsal import rehearsed, rehearsed_writes

#: Operators whose tensors must have one dtype; the meta kernels don't look.
_ONE_DTYPE = frozenset(
    f"aten::{name}"
    for name in (
        "mm",
        "addmm",
        "bmm",
        "baddbmm",
        "addbmm",
        "mv",
        "addmv",
        "dot",
        "vdot",
        "addr",
        "linear",
        "convolution",
    )
)
#: Operators that write at masked places; the meta kernels take any mask.
_MASKED = frozenset(
    f"aten::{name}" for name in ("index_put", "index_put_", "_index_put_impl", "_index_put_impl_", "_unsafe_index_put")
)
#: Operators whose results are not strided, where the meta device doesn't say so.
_LAYOUTS = {
    "aten::_to_sparse": "torch.sparse_coo",
    "aten::_to_sparse_csr": "torch.sparse_csr",
    "aten::_to_sparse_csc": "torch.sparse_csc",
    "aten::_to_sparse_bsr": "torch.sparse_bsr",
    "aten::_to_sparse_bsc": "torch.sparse_bsc",
    "aten::to_mkldnn": "torch._mkldnn",
    **{
        f"aten::{name}": "quantized"
        for name in (
            "quantize_per_tensor",
            "quantize_per_tensor_dynamic",
            "quantize_per_channel",
            "_make_per_tensor_quantized_tensor",
            "_make_per_channel_quantized_tensor",
        )
    },
}
#: In-place operators that local torch lets write one element several times.
_OVERLAPS = frozenset(
    f"aten::{name}_"
    for name in (
        "fill",
        "zero",
        "detach",
        "requires_grad",
        "addmv",
        "baddbmm",
        "conj_physical",
        "index_fill",
        "index_put",
        "masked_fill",
        "threshold",
        "tril",
        "triu",
    )
)


def place_of(entry: OpEntry, args: Any, kwargs: Any, place: Place | None) -> Place:
    """Returns the place of the operands. 0-dim CPU operands may be beside operands on other devices of their node.

    Raises RuntimeError that names both operands when they are on two places, DisttensorError if none is on a node.
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
            small = value.dim() == 0 and not where.is_cuda() and where.ranks == place.ranks
            if small:
                continue
            if scalar is not None and first is None and where.ranks == place.ranks:
                place = where
            else:
                other = first if first is not None else scalar
                one_session(where, place)
                there = operand_name(other) if other is not None else str(place)
                raise RuntimeError(
                    f"{entry.name}: expected all tensors to be on the same device, but found {there} and "
                    f"{operand_name(value)}; move one with .to({place.written}) or .to({where.written})"
                )
        if value.dim() == 0 and not where.is_cuda() and first is None:
            scalar = scalar if scalar is not None else value
        elif first is None:
            first = value
    if place is None:
        raise DisttensorError(f"{entry.name}: no operand is on a node")
    return place


def make_plan(entry: OpEntry, args: Any, kwargs: Any, place: Place | None, call: list[Any], out: int) -> Any:
    """Returns a new plan; or (plan, result) when the node had to be asked, because asking runs the operation. The plan
    is None where the node has to be asked each time."""
    place = place_of(entry, args, kwargs, place)
    make_room(place)
    layout = _LAYOUTS.get(entry.name.partition(".")[0])
    if layout is not None:
        refuse_layout(entry.name, layout)
    if entry.name in _ONE_DTYPE:
        _check_dtypes(entry, args)
    elif entry.name in _MASKED:
        check_masks(args[0], args[1])
    args_in = meta_inference.stand_ins(args, DistributedTensor)
    kwargs_in = meta_inference.stand_ins(kwargs, DistributedTensor)
    fresh: dict[int | str, Any] = {}  # a meta kernel may give them another geometry, and stand-ins are shared
    for where in entry.writes:
        if isinstance(where, int) and where < len(args_in):
            fresh[where] = _twin(args_in[where])
            args_in = (*args_in[:where], fresh[where], *args_in[where + 1 :])
        elif isinstance(where, str) and where in kwargs_in:
            fresh[where] = _twin(kwargs_in[where])
            kwargs_in = {**kwargs_in, where: fresh[where]}
    site = here()
    in_place = entry.mutable and bool(entry.returned or not entry.op._schema.returns)
    recorded = route.get().recorder is not None
    lie = None if in_place and (recorded or not entry.out) else lying(entry, args, kwargs, place)
    known, refused = True, False
    try:
        result = meta_inference.infer(entry.op, args_in, kwargs_in)
    except NotImplementedError:
        known = False
    except (RuntimeError, IndexError, TypeError, ValueError):
        # some kernels take operands that their meta kernel refuses; and an error of another library's meta kernel may
        # only mean that the shape depends on the data
        asks = lie is not None or (entry.tried and trial.is_taken(entry.op, args, kwargs))
        if not asks and (entry.torchs or in_place):
            raise
        refused = True
    # the node is asked outside of the handlers: its error is shown alone, and not behind the meta kernel's
    if refused and in_place:
        if recorded and (after := rehearsed_writes(entry, args, kwargs)) is not None:
            return _writing(entry, args, kwargs, place, _reshaped(entry, args, kwargs, after), site)
        return _written(entry, args, kwargs, place, call, out, site)
    if refused or not (known or in_place):
        if recorded and (metas := rehearsed(entry, args, kwargs)) is not None:
            return _finish(entry, args, kwargs, place, metas, site)
        return _asked(entry, args, kwargs, place, call, out, site)
    if in_place:
        reshaped = _reshaped(entry, args, kwargs, fresh)
        believed = lie is None or entry.right.get(lie)
        asked = entry.out and not recorded and (not known or reshaped or not believed)
        doubt, warned = _try(entry, args, kwargs, place, None)
        if asked or (doubt is not None and not recorded and not reshaped):
            each = _warn_now(entry, args, kwargs, warned)
            plan, result = _written(entry, args, kwargs, place, call, out, site, warned is not None)
            right = known and plan is not None and plan.shapes == reshaped
            if lie is not None and lie not in entry.right:
                entry.store(entry.right, lie, right)
            if doubt is not None and not (asked or reshaped) and right:
                entry.store(entry.right, doubt, True)
            return plan if plan is None else _warning(plan, warned, each, site), result
        each = warned is not None and trial.warns_again(entry.op, args, kwargs, warned)
        return _warning(_writing(entry, args, kwargs, place, reshaped, site), warned, each, site, first=True)
    for t in tree_leaves(result):
        if isinstance(t, torch.Tensor) and layout_of(t) is not torch.strided:
            refuse_layout(entry.name, layout_of(t))
    # not all results are tensors: attention returns sizes, too
    metas = tree_map(lambda t: meta_like(t, place) if isinstance(t, torch.Tensor) else t, result)
    doubt, warned = _try(entry, args, kwargs, place, metas)
    if recorded:
        if doubt is not None or (lie is not None and entry.right.get(lie) is not True):
            told = rehearsed(entry, args, kwargs)
            metas = metas if told is None else told
        lie = doubt = None
    if lie is not None and entry.right.get(lie) is not True:
        each = _warn_now(entry, args, kwargs, warned)
        plan, result = _asked(entry, args, kwargs, place, call, out, site, None, warned is not None)
        if lie not in entry.right:
            entry.store(entry.right, lie, plan is not None and plan.shapes == metas)
        return plan if plan is None else _warning(plan, warned, each, site), result
    if doubt is not None and lie is None:
        each = _warn_now(entry, args, kwargs, warned)
        length = len(metas) if isinstance(metas, list) else None
        plan, result = _asked(entry, args, kwargs, place, call, out, site, length, warned is not None)
        if plan is not None and plan.shapes == metas:
            entry.store(entry.right, doubt, True)
        return plan if plan is None else _warning(plan, warned, each, site), result
    each = warned is not None and trial.warns_again(entry.op, args, kwargs, warned)
    return _warning(_finish(entry, args, kwargs, place, metas, site), warned, each, site, first=True)


def _warn_now(entry: OpEntry, args: Any, kwargs: Any, warned: int | None) -> bool:
    """Warns of a call if a trial has, before the node is asked to do it. Returns whether it warns each time."""
    if warned is None:
        return False
    each = trial.warns_again(entry.op, args, kwargs, warned)
    trial.warn(entry.op, args, kwargs, warned, each)
    return each


def _warning(plan: Plan, warned: int | None, each: bool, site: Any, first: bool = False) -> Plan:
    """Returns a plan whose calls are warned of where a trial has warned: each of them, or, where that is once in a
    process, the ``first``, which is still to come."""
    if warned is not None and (each or first):
        plan.warn(each, warned, site)
    return plan


def _try(entry: OpEntry, args: Any, kwargs: Any, place: Place, taken: Any) -> tuple[Any, int | None]:
    """Tries a call here. Returns a key of ``entry.right`` if the node is to be asked what it does, because the trial is
    not sure of it, else None; and the value with which a kernel has warned, else None.

    Where a node has done such a call as the meta kernel says, others of the same dtypes are not doubted.
    """
    if not entry.tried:
        return None, None
    leaves = tree_leaves((args, kwargs))
    key = ("tried", place.is_cuda(), *(v.dtype if isinstance(v, torch.Tensor) else type(v) for v in leaves))
    found = trial.tried(entry.op, args, kwargs, taken)
    return key if found.doubtful and key not in entry.right else None, found.warned


def lying(entry: OpEntry, args: Any, kwargs: Any, place: Place) -> Any:
    """Returns the layout of non-contiguous operands, as a key of ``entry.right``, which says whether the meta kernel
    was right for it; None where it needs no check.

    Many meta kernels choose other strides than the device's kernel where operands are not contiguous, each in its own
    way: some for permuted operands, most for dimensions of one element whose step is odd, or without elements. So the
    node is asked once per layout of the operands; for an operator that was wrong, once per signature.
    """
    if not entry.single:
        return None
    lie: list[Any] = []
    odd = False
    for value in (*args, *kwargs.values()):
        for v in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(v, DistributedTensor):
                meta = v._h.meta
                odd = odd or 0 in meta.shape or meta.stride != contiguous(meta.shape)
                lie += (meta.dtype, meta.bits, _order(meta))
            elif type(v) is int:
                lie.append(max(-_SIZE, min(v, _SIZE)))  # tells dimensions apart; all sizes count as one
            else:
                lie.append(v if type(v) in (bool, str) else type(v))
        lie.append(None)
    return (place.device.type, place.is_cuda(), *lie) if odd else None


#: Integers from this one on are taken for sizes, not for dimensions.
_SIZE = 8


def _order(meta: Meta) -> tuple[Any, ...]:
    """Returns a tensor's layout: whether it is dense, and per dimension whether it has no element, one or more, whether
    its step is 0, the rank of the step, and whether it is that of a contiguous tensor."""
    ranks = {step: i for i, step in enumerate(sorted(set(meta.stride)))}
    dense = bool(torch._prims_common.is_non_overlapping_and_dense_or_false(meta.stand_in))
    steps = zip(meta.shape, meta.stride, contiguous(meta.shape), strict=True)
    return (dense, *((min(n, 2), bool(s), ranks[s], n > 1 or s == plain) for n, s, plain in steps))


def _reshaped(entry: OpEntry, args: Any, kwargs: Any, after: dict[int | str, Any]) -> Reshaped:
    """Returns the written arguments that have another geometry ``after`` the meta kernel has run, with that.

    Raises local torch's RuntimeError for one whose elements share memory.
    """
    found: list[tuple[int | str, Meta]] = []
    for where, stands in after.items():
        value = args[where] if isinstance(where, int) else kwargs[where]
        for tensor, stand in zip(*((v if isinstance(v, (list, tuple)) else [v]) for v in (value, stands)), strict=True):
            if isinstance(tensor, DistributedTensor):
                before = tensor._h.meta
                meta = meta_like(stand, before.place)
                if meta is not before:
                    found.append((where, meta))
                else:
                    _check_overlap(entry, before)
    return tuple(found)


def _writing(entry: OpEntry, args: Any, kwargs: Any, place: Place, reshaped: Reshaped, site: Any) -> Plan:
    """Returns the plan of an operation that writes its arguments, of which those of ``reshaped`` get another
    geometry."""
    specs = entry.specs(args, kwargs, DistributedTensor, place.name)
    kind = RESHAPED if reshaped else SHARING if may_share(entry, args, kwargs) else WRITTEN
    return Plan(kind, place, (entry.name, *specs), reshaped, 0, site)


def _written(
    entry: OpEntry, args: Any, kwargs: Any, place: Place, call: list[Any], out: int, site: Any, warned: bool = False
) -> tuple[Plan | None, Any]:
    """Has the node run an operation that writes its arguments, and returns the plan for the next call (None where the
    node has to be asked again) and the result."""
    result, reshaped = ask_written(entry, args, kwargs, place, call, out, warned)
    return None if reshaped is None else _writing(entry, args, kwargs, place, reshaped, site), result


def _asked(
    entry: OpEntry,
    args: Any,
    kwargs: Any,
    place: Place,
    call: list[Any],
    out: int,
    site: Any,
    length: int | None = None,
    warned: bool = False,
) -> tuple[Plan | None, Any]:
    """Asks the node, and returns the plan for the next call (None for an operator whose shapes may depend on the data)
    and the result."""
    result, metas = ask(entry, args, kwargs, place, call, out, length, warned)
    return _finish(entry, args, kwargs, place, metas, site) if entry.torchs else None, result


def layout_of(tensor: torch.Tensor) -> object:
    """Returns ``torch.strided`` for a tensor that shape and strides describe, else its layout's name for errors."""
    return "quantized" if tensor.is_quantized else "nested" if tensor.is_nested else tensor.layout


def refuse_layout(name: str, layout: object) -> NoReturn:
    """Raises NotImplementedError for a layout other than strided: a proxy's metadata are shape and strides, and other
    layouts have more."""
    dense = {"quantized": "x.dequantize()", "nested": "x.to_padded_tensor(0.0)"}.get(str(layout), "x.to_dense()")
    raise NotImplementedError(
        f"{name}: a tensor of layout {layout} can't be on a node, only strided ones can, and gradients of embeddings: "
        f"write {dense}"
    )


def _twin(stand: Any) -> Any:
    if isinstance(stand, (list, tuple)):
        return [_twin(s) for s in stand]
    if not isinstance(stand, torch.Tensor):
        return stand
    return stand_in(tuple(stand.shape), stand.stride(), int(stand.storage_offset()), stand.dtype)


def _check_dtypes(entry: OpEntry, args: Any) -> None:
    tensors = [v for v in args if isinstance(v, torch.Tensor)]
    if len({t.dtype for t in tensors}) > 1:
        found = " and ".join(operand_name(t) for t in tensors)
        raise RuntimeError(f"{entry.name}: expected the operands to have the same dtype, but got {found}")


def check_masks(source: torch.Tensor, indices: Any) -> None:
    """Raises the IndexError of local torch for a mask whose shape is not that of the dimensions that it indexes."""
    at = 0
    for index in indices:
        if not isinstance(index, torch.Tensor) or index.dtype not in (torch.bool, torch.uint8):
            at += 1
            continue
        for j, n in enumerate(index.shape):
            if at + j >= source.dim():
                raise IndexError(f"too many indices for tensor of dimension {source.dim()}")
            if n != source.shape[at + j]:
                raise IndexError(
                    f"The shape of the mask {list(index.shape)} at index {j} does not match "
                    f"the shape of the indexed tensor {list(source.shape)} at index {at + j}"
                )
        at += index.dim()


def _check_overlap(entry: OpEntry, meta: Meta) -> None:
    """Raises local torch's RuntimeError for writing to an expanded tensor, which meta kernels don't raise."""
    if entry.name.partition(".")[0] in _OVERLAPS or torch.Tag.inplace_view in entry.op.tags:
        return
    if 0 not in meta.shape and any(s == 0 and n > 1 for n, s in zip(meta.shape, meta.stride, strict=True)):
        raise RuntimeError(
            "unsupported operation: more than one element of the written-to tensor refers to a single memory location. "
            f"Please clone() the tensor before performing the operation. ({entry.name} on {meta})"
        )


def _finish(entry: OpEntry, args: Any, kwargs: Any, place: Place, metas: Any, site: Any) -> Plan:
    specs = entry.specs(args, kwargs, DistributedTensor, place.name)
    outs = sum(isinstance(m, Meta) for m in tree_leaves(metas))
    single = isinstance(metas, Meta)
    return Plan(ONE if single else MANY, place, (entry.name, *specs), metas, outs, site)
