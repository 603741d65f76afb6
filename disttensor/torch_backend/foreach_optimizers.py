"""Torch's optimizers over proxies: one command for all parameters of a group (``foreach``), not several for each.

Torch does so by default on devices that gain by it, for its own kinds of tensors only. A node gains by it too, because
a command costs more than its computation; so it is the default for proxies wherever the numbers are the same.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from ..proxy.proxy import DistributedTensor
from ..session import kernel_choice

Choose = Callable[..., tuple[bool, bool]]


def same_both_ways(original: Choose) -> Choose:
    """Returns the choice of an optimizer whose two implementations take the same steps, to the last bit, in float32 and
    float64. In half precision the two round differently."""
    return _default(original, True)


def other_roundings(original: Choose) -> Choose:
    """Returns the choice of an optimizer that reorders a product or a sum in its foreach implementation."""
    return _default(original, False)


def _default(original: Choose, same: bool) -> Choose:
    def at_once(p: Any) -> bool:
        if type(p) is not DistributedTensor:
            return False
        return kernel_choice.foreach(p._place.record, same, p.dtype)

    @wraps(original)
    def default_to_fused_or_foreach(
        params: list[torch.Tensor], differentiable: bool, use_fused: bool = False
    ) -> tuple[bool, bool]:
        if not differentiable and params and not torch.compiler.is_compiling() and all(map(at_once, params)):
            return False, True
        return original(params, differentiable, use_fused)

    _replaced.append(default_to_fused_or_foreach)
    return default_to_fused_or_foreach


#: The replacements that dynamo does not know yet.
_replaced: list[Choose] = []


def inline_when_compiling() -> None:
    """Has dynamo trace torch's own choices in the place of ours, which leave it to them while they are compiled.

    A call that it can't trace would cut an optimizer's step in two, and the second half would find that the group is
    not capturable, which dynamo takes a group that it compiles for.
    """
    while _replaced:
        ours = _replaced.pop()
        torch.compiler.substitute_in_graph(ours)(ours.__wrapped__)  # type: ignore[attr-defined]
