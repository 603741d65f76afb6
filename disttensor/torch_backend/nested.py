"""Nested tensors of tensors on nodes: there are none, and whatever would make one says so."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from ..dispatch.first_call import refuse_layout
from ..proxy.proxy import DistributedTensor


def refusing(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that makes nested tensors, of local ones only."""

    @wraps(original)
    def local_only(*args: Any, **kwargs: Any) -> Any:
        """Does as torch's own. Raises NotImplementedError for a tensor on a node, or for a node as the device."""
        device = kwargs.get("device")
        there = device is not None and torch.device(device).type == "node"
        if there or any(isinstance(leaf, DistributedTensor) for leaf in tree_leaves((args, kwargs))):
            refuse_layout(original.__name__, "nested")
        return original(*args, **kwargs)

    return local_only


def new(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the constructor of jagged tensors, of local ones only."""

    @wraps(original)
    def __new__(cls: type, values: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(values, DistributedTensor):
            refuse_layout("a jagged tensor", "nested")
        return original(cls, values, *args, **kwargs)

    return __new__
