"""Tries a signature's first call on this machine's CPU, with small tensors: meta kernels take much that others refuse.

A trial decides nothing but whether the node is asked. What the kernel here refuses, or makes another geometry of, the
node is asked for, once per signature, and says itself what it does; a mistake is raised at the user's line then. What a
trial takes is issued as ever. So the values that it has (zeros) and what this CPU lacks cost a round trip at most.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves, tree_map

from ..proxy.meta import APART, Meta, contiguous, quietly, set_bits
from ..proxy.proxy import DistributedTensor
from ..runtime.process.heard import heard
from .meta_inference import unwarned

#: The elements, at most, of operands and results that a trial has as they are; larger ones have smaller sizes in it.
_SMALL = 1 << 10
#: The elements that smaller operands, multiplied by all sizes among the arguments, may come to.
_MOST = 1 << 16
#: Operators whose kernels trust the integers that they are given (pivots, lengths, offsets), or do what takes long.
_UNTRIED = (
    "aten::linalg_", "aten::_linalg_", "aten::lu_", "aten::_lu_", "aten::ormqr", "aten::orgqr", "aten::geqrf",
    "aten::cholesky", "aten::triangular_solve", "aten::ctc_", "aten::_ctc_", "aten::embedding_bag",
    "aten::_embedding_bag", "aten::segment_reduce", "aten::_segment_reduce", "aten::mkldnn", "aten::_mkldnn",
    "aten::_fft", "aten::fbgemm", "aten::_nested", "aten::_transform", "aten::_sparse", "aten::sparse", "aten::_thnn",
    "aten::lstm", "aten::gru", "aten::rnn_", "aten::empty.", "aten::empty_strided", "aten::empty_permuted",
    "aten::empty_quantized", "aten::new_empty", "aten::resize", "aten::set_",
    "aten::_native_multi_head", "aten::_transformer_encoder", "aten::_scaled_dot",
)  # fmt: skip
#: The bytes, at most, of memory in which operands are laid that overlap.
_LARGE = 1 << 28
_generator = torch.Generator("cpu")
_always = threading.Lock()


def can_be_tried(op: OpOverload) -> bool:
    """Returns whether an operator can be tried: it is torch's own, its kernel does no harm with zeros for operands, and
    it draws nothing from the user's generator."""
    name = op.name()
    if not name.startswith("aten::") or name.startswith(_UNTRIED) or torch.Tag.inplace_view in op.tags:
        return False
    return torch.Tag.nondeterministic_seeded not in op.tags or _takes_generator(op)


def _takes_generator(op: OpOverload) -> bool:
    return any(a.name == "generator" for a in op._schema.arguments)


class Found(NamedTuple):
    """A trial's findings."""

    #: whether the CPU's kernel refuses a call that the meta kernel has taken, or gives another geometry
    doubtful: bool
    #: the value of the operands with which it has warned; None if it has not, or if that may be for other sizes
    warned: int | None = None


def tried(op: OpOverload, args: Any, kwargs: Any, taken: Any) -> Found:
    """Tries a call that the meta kernel has taken.

    ``taken``: the metas of its results; None for an operator that writes its arguments.
    """
    metas = [t._h.meta for t in tree_leaves((args, kwargs)) if isinstance(t, DistributedTensor)]
    results = [m for m in tree_leaves(taken) if isinstance(m, Meta)]
    if not metas:
        return Found(False)
    small = sum(m.numel for m in metas) + sum(m.numel for m in results) <= _SMALL
    sizes = {} if small else _smaller(metas)
    if not small:
        numel = sum(prod(sizes[n] for n in m.shape) for m in metas)
        if numel * prod(max(abs(n), 1) for n in _integers(args, kwargs)) > _MOST:
            return Found(False)
    for value in (0, 1):  # a division by zero, and an index of one, are the data's business
        try:
            made, warned = heard(partial(_run, op, args, kwargs, sizes, value, "cpu"))
        except Exception:
            continue
        return Found(small and taken is not None and not _alike(made, taken), value if warned and small else None)
    if not small:
        try:  # where these sizes do not go together, nothing is known
            unwarned(partial(_run, op, args, kwargs, sizes, 0, "meta"))
        except Exception:
            return Found(False)
    return Found(True)


def warns_again(op: OpOverload, args: Any, kwargs: Any, value: int) -> bool:
    """Returns whether a call that has warned does so each time, and not once in a process."""
    return heard(partial(_run, op, args, kwargs, {}, value, "cpu"))[1]


def warn(op: OpOverload, args: Any, kwargs: Any, value: int, each: bool) -> None:
    """Has the CPU's kernel warn of a call, within the user's call. ``each``: it does so each time."""
    with suppress(Exception), nullcontext() if each else _warning_always():
        _run(op, args, kwargs, {}, value, "cpu")


@contextmanager
def _warning_always() -> Iterator[None]:
    """Has torch warn, in a ``with`` block, also of what it has warned of and does once in a process."""
    with _always:
        before = torch.is_warn_always_enabled()
        torch._C._set_warnAlways(True)  # torch.set_warn_always would tell the nodes
        try:
            yield
        finally:
            torch._C._set_warnAlways(before)


def is_taken(op: OpOverload, args: Any, kwargs: Any) -> bool:
    """Returns whether the CPU's kernel takes a call of small operands that the meta kernel has refused."""
    metas = [t._h.meta for t in tree_leaves((args, kwargs)) if isinstance(t, DistributedTensor)]
    if sum(m.numel for m in metas) * prod(max(abs(n), 1) for n in _integers(args, kwargs)) > _MOST:
        return False
    try:
        heard(partial(_run, op, args, kwargs, {}, 0, "cpu"))
    except Exception:
        return False
    return True


def refusal_of_overlap(op: OpOverload, args: Any, kwargs: Any, root: Callable[[Any], int]) -> RuntimeError | None:
    """Returns the error of the CPU's kernel for operands of which one is written and lies in memory of another; None
    where it takes them. ``root``: a number for the memory in which a proxy lies."""
    extents: dict[int, int] = {}
    for t in tree_leaves((args, kwargs)):
        if isinstance(t, DistributedTensor):
            extents[root(t)] = max(extents.get(root(t), 0), end_of_memory(t._h.meta) * t.dtype.itemsize)
    if sum(extents.values()) > _LARGE:
        return None
    # nothing touches this memory where the kernel refuses; indices have memory of their own, which is of zeros
    memories = {key: torch.empty(size + 16, dtype=torch.uint8, device="cpu") for key, size in extents.items()}

    def laid(v: Any) -> Any:
        if not isinstance(v, DistributedTensor):
            return v
        meta, memory = v._h.meta, memories[root(v)]
        if not meta.dtype.is_floating_point and not meta.dtype.is_complex:
            memory.zero_()
        memory = memory[: memory.numel() // meta.dtype.itemsize * meta.dtype.itemsize].view(meta.dtype)
        return set_bits(memory.as_strided(meta.shape, meta.stride, start_of_memory(meta)), meta.bits)

    args, kwargs = tree_map(laid, (args, kwargs))
    try:
        with torch.no_grad():
            op(*args, **kwargs)
    except RuntimeError as e:
        return e.with_traceback(None) if str(e).startswith("unsupported operation: ") else None
    except Exception:
        return None
    return None


def overlap(a: Meta, b: Meta) -> bool:
    """Returns whether two tensors in the same memory have elements in common, as far as torch looks: dense ones."""
    if max(a.offset, b.offset) >= APART:  # each rank looks at its own
        return False
    if any(m.numel == 0 or not torch._prims_common.is_non_overlapping_and_dense_or_false(m.stand_in) for m in (a, b)):
        return False
    ranges = [(start_of_memory(m) * m.dtype.itemsize, end_of_memory(m) * m.dtype.itemsize) for m in (a, b)]
    return ranges[0][0] < ranges[1][1] and ranges[1][0] < ranges[0][1]


def start_of_memory(meta: Meta) -> int:
    """Returns how many elements the memory has before a tensor's first one; of one that starts elsewhere on each rank
    of a mesh, from where it starts."""
    return meta.offset % APART


def end_of_memory(meta: Meta) -> int:
    """Returns how many elements the memory has up to a tensor's last one."""
    if not meta.numel:
        return start_of_memory(meta)
    return start_of_memory(meta) + 1 + sum((n - 1) * step for n, step in zip(meta.shape, meta.stride, strict=True))


def _run(op: OpOverload, args: Any, kwargs: Any, sizes: dict[int, int], value: int, device: str) -> Any:
    def like(v: Any) -> Any:
        return _tensor(v._h.meta, sizes, value, device) if isinstance(v, DistributedTensor) else v

    args, kwargs = tree_map(like, (args, kwargs))
    if "device" in kwargs:
        kwargs["device"] = torch.device(device)
    if torch.Tag.nondeterministic_seeded in op.tags and _takes_generator(op):
        kwargs["generator"] = _generator if device == "cpu" else None
    with torch.no_grad():
        return op(*args, **kwargs)


def _tensor(meta: Meta, sizes: dict[int, int], value: int, device: str) -> torch.Tensor:
    """Returns a tensor with the geometry of ``meta``, or with its sizes replaced, in the same order in memory."""
    shape = tuple(sizes.get(n, n) for n in meta.shape)
    if sizes or end_of_memory(meta) > _MOST:
        order = sorted(range(len(shape)), key=lambda i: -meta.stride[i])
        steps = dict(zip(order, contiguous(tuple(shape[i] if meta.stride[i] else 1 for i in order)), strict=True))
        stride = tuple(steps[i] if meta.stride[i] else 0 for i in range(len(shape)))
        made = quietly("empty_strided", shape, stride, dtype=meta.dtype, device=device).fill_(value)
    else:
        memory = quietly("full", (end_of_memory(meta),), value, dtype=meta.dtype, device=device)
        made = memory.as_strided(shape, meta.stride, start_of_memory(meta))
    return set_bits(made, meta.bits) if any(meta.bits) else made


def _smaller(metas: list[Meta]) -> dict[int, int]:
    """Returns smaller sizes, different ones for different ones; 0 and 1 stay."""
    return {n: i for i, n in enumerate(sorted({0, 1, *(n for meta in metas for n in meta.shape)}))}


def _integers(args: Any, kwargs: Any) -> Iterator[int]:
    return (v for v in tree_leaves((args, kwargs)) if type(v) is int)


def _alike(made: Any, taken: Any) -> bool:
    """Returns whether the kernel's results have the geometry of the meta kernel's."""
    found = [v for v in tree_leaves(made) if isinstance(v, torch.Tensor)]
    known = [v for v in tree_leaves(taken) if isinstance(v, Meta)]
    return len(found) == len(known) and all(
        (tuple(m.shape), m.stride(), m.storage_offset(), m.dtype, m.is_conj(), m.is_neg())
        == (t.shape, t.stride, start_of_memory(t), t.dtype, *t.bits)
        for m, t in zip(found, known, strict=True)
    )
