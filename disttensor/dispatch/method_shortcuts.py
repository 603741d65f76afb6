"""The fast path of everyday methods: ``x + y``, ``x * 0.5``, ``x @ y``, ``x.sum()``, ``x.cpu()``,
``x.to("cpu")``.

Torch's path from a method to `dispatch` costs more than dispatch itself. Where no mode is active above dispatch (no
gradient to record, no mode, no autocast, no transform) a method here looks its plan up and issues at once. All other
calls, and every signature's first one, take torch's path.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload
from torch.autograd import forward_ad

from ..proxy.proxy import DistributedTensor
from .call_site import here
from .dispatch import issue
from .op_table import enter

aten = torch.ops.aten

_grad = torch.is_grad_enabled
_modes = torch._C._len_torch_function_stack
_dispatch_modes = torch._C._len_torch_dispatch_stack
_inference = torch.is_inference_mode_enabled
_autocast = torch._C._is_any_autocast_enabled
_transforms = torch._C._are_functorch_transforms_active

#: The bound of integers that can be sent; torch raises the error for larger ones.
_WIDE = 1 << 63
_NOTHING = type(None)
_PRESERVE = torch.preserve_format
_CPU = torch.device("cpu")


# The six checks for active modes between a method and dispatch (gradients aside) are written out below. They cost a
# fifth of the whole call, and as a function they would cost half as much again.


def _unary(op: OpOverload, original: Callable[..., Any]) -> Callable[..., Any]:
    quick = enter(op).shortcuts

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not args and not kwargs and type(self) is DistributedTensor:
            h = self._h
            plan = quick.get((h.meta, _NOTHING))
            if (
                plan is not None
                and not (_modes() or _dispatch_modes() or _inference() or _transforms() or _autocast())
                and forward_ad._current_level < 0
                and not (_grad() and self.requires_grad)
            ):
                return issue(plan, h, None)
        return original(self, *args, **kwargs)

    return method


def _binary(op: OpOverload, original: Callable[..., Any]) -> Callable[..., Any]:
    quick = enter(op).shortcuts

    def method(self: Any, other: Any, *args: Any, **kwargs: Any) -> Any:
        if not args and not kwargs and type(self) is DistributedTensor:
            h = self._h
            if type(other) is DistributedTensor:
                plan = quick.get((h.meta, other._h.meta))
                if (
                    plan is not None
                    and not (_modes() or _dispatch_modes() or _inference() or _transforms() or _autocast())
                    and forward_ad._current_level < 0
                    and not (_grad() and (self.requires_grad or other.requires_grad))
                ):
                    return issue(plan, h, other)
            elif other is not None and (type(other) is not int or -_WIDE <= other < _WIDE):
                plan = quick.get((h.meta, type(other)))
                if (
                    plan is not None
                    and not (_modes() or _dispatch_modes() or _inference() or _transforms() or _autocast())
                    and forward_ad._current_level < 0
                    and not (_grad() and self.requires_grad)
                ):
                    return issue(plan, h, other)
        return original(self, other, *args, **kwargs)

    return method


def _cpu(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the method ``cpu``, which needs no plan. Neither inference mode nor autocast changes what it does."""

    def method(self: Any, *, memory_format: torch.memory_format = _PRESERVE) -> Any:
        if (
            memory_format is _PRESERVE
            and type(self) is DistributedTensor
            and (h := self._h).ref
            and h.meta.in_order
            and not (_modes() or _dispatch_modes() or _transforms())
            and forward_ad._current_level < 0
            and not (self.requires_grad and _grad())
        ):
            place = h.meta.place
            return place.session.transfers.download(self, place, h.ref, here())
        return original(self, memory_format=memory_format)

    return method


def _to(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Does what ``cpu`` does where ``to`` is given that device and nothing else."""
    if len(args) + len(kwargs) == 1 and not _modes():  # which are told of the method
        device = args[0] if args else kwargs.get("device")
        if device == "cpu" if type(device) is str else type(device) is torch.device and device == _CPU:
            return self.cpu()
    return torch.Tensor.to(self, *args, **kwargs)  # looked up here: a session may replace it (node_context.following)


_BINARY: dict[str, tuple[str, ...]] = {
    "add.Tensor": ("add", "__add__", "__radd__"),
    "sub.Tensor": ("sub", "__sub__"),
    "mul.Tensor": ("mul", "__mul__", "__rmul__"),
    "div.Tensor": ("div", "__truediv__"),
    "mm.default": ("mm", "__matmul__", "matmul"),
    "maximum.default": ("maximum",),
    "minimum.default": ("minimum",),
}
_UNARY: dict[str, tuple[str, ...]] = {
    "sum.default": ("sum",),
    "mean.default": ("mean",),
    "relu.default": ("relu",),
    "exp.default": ("exp",),
    "log.default": ("log",),
    "sqrt.default": ("sqrt",),
    "tanh.default": ("tanh",),
    "sigmoid.default": ("sigmoid",),
    "neg.default": ("neg", "__neg__"),
    "abs.default": ("abs",),
}


def install() -> None:
    """Gives DistributedTensor the methods of this file. A second call does nothing."""
    if "add" in vars(DistributedTensor):
        return
    made = {"cpu": _cpu(torch.Tensor.cpu), "to": _to}
    for table, make in ((_BINARY, _binary), (_UNARY, _unary)):
        for name, methods in table.items():
            packet, overload = name.split(".")
            op = getattr(getattr(aten, packet), overload)
            made |= {method: make(op, getattr(torch.Tensor, method)) for method in methods}
    for method, wrapped in made.items():
        wrapped.__name__ = method
        wrapped.__doc__ = getattr(torch.Tensor, method).__doc__
        setattr(DistributedTensor, method, wrapped)
