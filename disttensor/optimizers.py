"""Torch's optimizers over proxies: one command for all parameters of a group (``foreach``), not several for each.

Torch does so by default on devices that gain by it, for its own kinds of tensors only. The node of a proxy gains by it
too, for a command costs more than what it does; so it is the default here wherever the numbers are the same.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps

import torch

from .tensor import DistributedTensor

#: Modules (AdamW is in adam) whose two ways over the parameters take the same steps, to the last bit, for the dtypes
#: below. The others of torch's reorder a product or a sum; and in half precision the ways round differently.
_SAME = ("adadelta", "adagrad", "adam", "adamax", "rmsprop", "rprop", "sgd")
_DTYPES = frozenset({torch.float32, torch.float64})


def install() -> None:
    """Lets these optimizers choose for proxies. A second call does nothing."""
    for module in (sys.modules[f"torch.optim.{name}"] for name in _SAME):
        original = vars(module)["_default_to_fused_or_foreach"]
        if not hasattr(original, "__wrapped__"):
            vars(module)["_default_to_fused_or_foreach"] = _default(original)


def _default(original: Callable[..., tuple[bool, bool]]) -> Callable[..., tuple[bool, bool]]:
    @wraps(original)
    def default_to_fused_or_foreach(
        params: list[torch.Tensor], differentiable: bool, use_fused: bool = False
    ) -> tuple[bool, bool]:
        if differentiable or torch.compiler.is_compiling() or not params:
            return original(params, differentiable, use_fused)
        if all(type(p) is DistributedTensor and p.dtype in _DTYPES for p in params):
            return False, True
        return original(params, differentiable, use_fused)

    return default_to_fused_or_foreach
