"""Torch's optimizers over proxies: one command for all parameters of a group (``foreach``), not several for each.

Torch does so by default on devices that gain by it, for its own kinds of tensors only. The node of a proxy gains by it
too, for a command costs more than what it does; so it is the default here wherever the numbers are the same.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from ..proxy.proxy import DistributedTensor
from ..session import kernel_choice

#: Modules (AdamW is in adam) whose two ways over the parameters take the same steps, to the last bit, in float32 and
#: float64. The others reorder a product or a sum; and in half precision the ways round differently.
_SAME = ("adadelta", "adagrad", "adam", "adamax", "rmsprop", "rprop", "sgd")
_OTHERS = ("asgd", "nadam", "radam")


def install() -> None:
    """Lets torch's optimizers choose for proxies. A second call does nothing."""
    for name in (*_SAME, *_OTHERS):
        module = vars(sys.modules[f"torch.optim.{name}"])
        original = module["_default_to_fused_or_foreach"]
        if not hasattr(original, "__wrapped__"):
            module["_default_to_fused_or_foreach"] = _default(original, name in _SAME)


def _default(original: Callable[..., tuple[bool, bool]], same: bool) -> Callable[..., tuple[bool, bool]]:
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

    return default_to_fused_or_foreach
