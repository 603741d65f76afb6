"""Runs scaled dot product attention by the kernel that the node itself would choose.

Torch picks the fused kernel by device type and knows none for "node", so it would take the slow, decomposed path.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.nn.functional import pad

from ...dispatch import op_table
from ...dispatch.op_plan import MAX_PLANS, OpEntry
from ...proxy.proxy import DistributedTensor
from ...session import caches, current, kernel_choice
from ...session.kernel_choice import CUDNN, EFFICIENT, FLASH, MATH
from ...session.places import Place

aten = torch.ops.aten

#: The tensors with which ``torch.compile`` traces: they have a node's device, and no memory anywhere.
TRACED = (FakeTensor, FunctionalTensor)

_choices: dict[tuple[Any, ...], int] = {}
caches.plans(_choices.clear)


def register(library: torch.library.Library) -> None:
    """Puts ``attention`` in the place of torch's composite for device type "node"."""
    library.impl("scaled_dot_product_attention", attention, "AutogradPrivateUse1")


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Computes ``torch.nn.functional.scaled_dot_product_attention``. Source: torch's composite, attention.cpp."""
    training = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
    backend = _choose(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa, training)
    mask = attn_mask
    if mask is not None and mask.dtype == torch.bool:  # first of all, as every kernel adds its mask
        never = -65504.0 if backend == CUDNN else float("-inf")
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), never)
    if backend == MATH:
        return aten._scaled_dot_product_attention_math(  # type: ignore[no-any-return]
            query, key, value, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )[0]
    if query.dim() == 3:  # fused kernels take 3 dimensions since torch 2.15
        while mask is not None and mask.dim() < 4:
            mask = mask.unsqueeze(0)
        query, key, value = query.unsqueeze(0), key.unsqueeze(0), value.unsqueeze(0)
        return _fused(backend, query, key, value, mask, dropout_p, is_causal, scale, training).squeeze(0)
    return _fused(backend, query, key, value, mask, dropout_p, is_causal, scale, training)


def _fused(
    backend: int,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    training: bool,
) -> torch.Tensor:
    if place_of(query).kernels == "cpu":
        return aten._scaled_dot_product_flash_attention_for_cpu(  # type: ignore[no-any-return]
            query, key, value, dropout_p, is_causal, attn_mask=mask, scale=scale
        )[0]
    if backend == FLASH:
        width = query.shape[-1]
        query, key, value = (pad(t, (0, -width % 8)) if width % 8 else t for t in (query, key, value))
        out = aten._scaled_dot_product_flash_attention(
            query, key, value, dropout_p, is_causal, False, scale=1 / math.sqrt(width) if scale is None else scale
        )[0]
        return out[..., :width] if width % 8 else out  # type: ignore[no-any-return]
    if backend == EFFICIENT:
        return aten._scaled_dot_product_efficient_attention(  # type: ignore[no-any-return]
            query, key, value, _aligned(mask, query, key), training, dropout_p, is_causal, scale=scale
        )[0]
    # always with the sums that only a backward needs, because torch's meta kernel returns them
    return aten._scaled_dot_product_cudnn_attention(  # type: ignore[no-any-return]
        query, key, value, mask, True, dropout_p, is_causal, False, scale=scale
    )[0]


def _aligned(mask: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor | None:
    """Returns the mask in the layout of the memory-efficient kernel: rows that begin at multiples of 8 elements."""
    if mask is None:
        return None
    if mask.stride(-1) != 1 or any(s % 8 for s in mask.stride()[:-1]):
        keys = mask.shape[-1]
        mask = pad(mask, (0, 8 - keys % 8))[..., :keys]
    return mask.expand(*query.shape[:3], key.shape[2])


@op_table.handler(aten.scaled_dot_product_attention.default)
def _without_autograd(entry: OpEntry, args: Any, kwargs: Any) -> Any:
    return attention(*args, **kwargs)


def place_of(tensor: Any) -> Place:
    """Returns the place of a proxy, or of what stands for one while ``torch.compile`` traces."""
    return tensor._place if isinstance(tensor, DistributedTensor) else current.session().places.of(tensor.device)


def _seen(traced: torch.Tensor) -> kernel_choice.SeenOperand:
    """Returns the facts of a traced tensor, of which numbers may be symbols."""
    offset: Any = traced.storage_offset()
    return kernel_choice.SeenOperand(tuple(traced.shape), traced.stride(), offset, traced.dtype)


def _asked(query: Any, key: Any, value: Any, mask: Any = None, *, facts: tuple[Any, ...]) -> kernel_choice.Attention:
    return kernel_choice.Attention(query, key, value, mask, *facts)


def _choose(
    query: Any, key: Any, value: Any, mask: Any, dropout: float, causal: bool, gqa: bool, training: bool
) -> int:
    operands = (query, key, value) if mask is None else (query, key, value, mask)
    facts = (dropout, causal, gqa, training, mask is not None and mask.requires_grad)
    if not all(isinstance(t, DistributedTensor) for t in operands):
        if not all(isinstance(t, TRACED) and t.device.type == "node" for t in operands):
            return MATH  # its first operation raises the error
        return kernel_choice.attention(place_of(query).record, _asked(*map(_seen, operands), facts=facts))
    metas = [t._h.meta for t in operands]
    signature = (*metas, mask is None, *facts, kernel_choice.switches())
    choice = _choices.get(signature)
    if choice is None:
        if len(_choices) >= MAX_PLANS:
            _choices.clear()
        choice = kernel_choice.attention(query._place.record, _asked(*metas, facts=facts))
        caches.keep(_choices, signature, choice, *(meta.place for meta in metas))
    return choice
