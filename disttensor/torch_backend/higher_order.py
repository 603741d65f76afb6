"""Operators of torch that call functions: ``torch.cond``, ``while_loop``, ``scan``, ``map``.

Torch asks a tensor subclass for a rule of its own for each. Proxies take the one that local tensors have: the function
is called here, its operations become commands, and a predicate is asked for as ``.item()`` is.
"""

from __future__ import annotations

from typing import Any

import torch

from ..proxy.proxy import DistributedTensor

_DENSE = torch._C.DispatchKey.CompositeExplicitAutograd


def register() -> None:
    """Gives proxies the rules of all these operators that have one for any device."""
    operators: dict[str, Any] = torch._ops._higher_order_ops
    for operator in operators.values():
        dense = operator.py_kernels.get(_DENSE)
        if dense is not None and DistributedTensor not in operator.python_key_table:
            operator.py_impl(DistributedTensor)(dense)
