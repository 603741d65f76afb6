"""Parameters and buffers of torch's lazy modules (``nn.LazyLinear``) on a node, before their shape is known.

Torch recognises them by their class, which refuses all operations that need a shape; with the shape they get another
class. On a node such a tensor is a proxy without elements, whose class is the local one and DistributedTensor at once.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch.nn.parameter import (  # type: ignore[attr-defined]
    UninitializedParameter,
    UninitializedTensorMixin,
)
from torch.utils._pytree import tree_map_only

from ..dispatch.dispatch import part
from ..proxy.proxy import DistributedTensor, method, proxy

_proxies: Any = DistributedTensor


class _OnNode:
    """The methods of uninitialized tensors on a node: a base class before the local class."""

    at_home: type
    cls_to_become = DistributedTensor

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return cls.at_home(*args, **kwargs)

    @staticmethod
    def __torch_dispatch__(func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def plain(x: torch.Tensor) -> torch.Tensor:
            return proxy(x._h) if isinstance(x, _OnNode) else x.detach() if is_kind(type(x)) else x

        args, kwargs = tree_map_only(torch.Tensor, plain, (args, kwargs or {}))
        return part(func, types, args, kwargs)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = super().__torch_function__(func, types, args, kwargs)  # type: ignore[misc]
        if not isinstance(made, torch.Tensor) or isinstance(made, cls) or issubclass(cls, UninitializedParameter):
            return made
        return made.as_subclass(cls.at_home)  # results of a buffer are buffers, as in torch

    @property
    def data(self) -> torch.Tensor:
        return _proxies.data.__get__(self)  # type: ignore[no-any-return]

    @data.setter
    def data(self, other: Any) -> None:
        with torch._C.DisableTorchFunctionSubclass():  # it would refuse the questions that this asks
            _proxies.data.__set__(self, other)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # torch's own keeps no device either
        return self.at_home, (self.requires_grad,)  # type: ignore[attr-defined]


def is_kind(kind: type) -> bool:
    """Returns whether tensors of this class are uninitialized."""
    return issubclass(kind, UninitializedTensorMixin)


@functools.cache
def on_node(kind: type) -> type:
    """Returns the class on nodes for a local class of uninitialized tensors."""
    metaclass = _metaclass(type(kind), type(DistributedTensor))
    made: type = metaclass(kind.__name__, (_OnNode, kind, DistributedTensor), {"at_home": kind})
    return made


def _metaclass(theirs: type, ours: type) -> Any:
    """Returns the metaclass of a class that stems from classes of both."""
    if issubclass(ours, theirs):
        return ours
    return theirs if issubclass(theirs, ours) else type(theirs.__name__, (theirs, ours), {})


def class_of(tensor: torch.Tensor, remote: bool) -> type | None:
    """Returns the class of an uninitialized tensor on a node (``remote``) or in the script; None for other tensors."""
    kind = type(tensor)
    if not is_kind(kind):
        return None
    kind = getattr(kind, "at_home", kind)
    return on_node(kind) if remote else kind


def new(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a constructor that makes uninitialized tensors on nodes, too (``nn.LazyLinear(5, device="node:1")``)."""
    signature = inspect.signature(original)

    @wraps(original)
    def make(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        values = torch.empty(0, device=given.arguments.get("device"), dtype=given.arguments.get("dtype"))
        if not isinstance(values, DistributedTensor):
            return original(*args, **kwargs)
        given.arguments["device"] = "cpu"
        made = original(*given.args, **given.kwargs)
        made.data = values
        return made

    return make


@method("as_subclass")
def as_subclass(tensor: DistributedTensor, cls: Any) -> Any:
    """``x.as_subclass``: calls torch's own, except for uninitialized tensors, which a proxy becomes by its class."""
    if is_kind(cls):
        made = tensor.detach()
        made.__class__ = on_node(cls)
        return made
    return torch.Tensor.as_subclass(tensor, cls)
