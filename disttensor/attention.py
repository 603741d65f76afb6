"""Scaled dot product attention through the kernel that the node itself would choose.

Torch picks the fused kernel by device type and knows none for ours, so it would take the slow, decomposed path. The
node's own choice is asked once per signature.
"""

from __future__ import annotations

from typing import Any

import torch

from . import registry
from .plan import MAX_PLANS, Entry
from .tensor import DistributedTensor

aten = torch.ops.aten

#: torch.nn.attention.SDPBackend
_MATH, _FLASH, _EFFICIENT = 0, 1, 2
_choices: dict[tuple[Any, ...], int] = {}
registry.caches.append(_choices)


def register(library: torch.library.Library) -> None:
    """Puts ``attention`` in the place of torch's composite for our device."""
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
    """As ``torch.nn.functional.scaled_dot_product_attention``. Source: torch's composite, attention.cpp."""
    choice = _choose(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if attn_mask is not None and attn_mask.requires_grad:
        choice = _MATH  # the fused kernels have no gradient for the mask
    mask = attn_mask
    if mask is not None and mask.dtype == torch.bool:  # first of all: to every kernel a mask is what is added
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), float("-inf"))
    if choice != _MATH and query._place.kernels == "cpu":  # type: ignore[attr-defined]
        return aten._scaled_dot_product_flash_attention_for_cpu(  # type: ignore[no-any-return]
            query, key, value, dropout_p, is_causal, attn_mask=mask, scale=scale
        )[0]
    if choice == _FLASH and mask is None and query.shape[-1] % 8 == 0 and not enable_gqa:
        return aten._scaled_dot_product_flash_attention(  # type: ignore[no-any-return]
            query, key, value, dropout_p, is_causal, False, scale=scale
        )[0]
    if choice == _EFFICIENT and mask is None and not enable_gqa:
        training = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
        return aten._scaled_dot_product_efficient_attention(  # type: ignore[no-any-return]
            query, key, value, None, training, dropout_p, is_causal, scale=scale
        )[0]
    return aten._scaled_dot_product_attention_math(  # type: ignore[no-any-return]
        query, key, value, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )[0]


@registry.handler(aten.scaled_dot_product_attention.default)
def _without_autograd(entry: Entry, args: Any, kwargs: Any) -> Any:
    return attention(*args, **kwargs)


def _choose(query: Any, key: Any, value: Any, mask: Any, dropout_p: float, *rest: Any) -> int:
    operands = (query, key, value) if mask is None else (query, key, value, mask)
    if not all(isinstance(t, DistributedTensor) for t in operands):
        return _MATH  # whose first operation says what is wrong
    signature = (*(t._h.meta for t in operands), mask is None, dropout_p > 0, *rest)
    choice = _choices.get(signature)
    if choice is None:
        if len(_choices) >= MAX_PLANS:
            _choices.clear()
        causal, scale, gqa = rest
        with torch._C._AutoDispatchBelowAutograd():
            query, key, value = query.detach(), key.detach(), value.detach()
            mask = None if mask is None else mask.detach()
            choice = int(
                aten._fused_sdp_choice(query, key, value, mask, dropout_p, causal, scale=scale, enable_gqa=gqa)
            )
        _choices[signature] = choice
    return choice
