"""The fast path of everyday methods: ``x + y``, ``x * 0.5``, ``x @ y``, ``x.sum()``, ``x += y``, ``x.cpu()``,
``x.to("cpu")``.

Torch's path from a method to `dispatch` costs more than dispatch itself. Where no mode is active above dispatch (no
gradient to record, no mode, no autocast, no transform) a method here looks its plan up and issues at once. All other
calls, and every signature's first one, take torch's path.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch._ops import OpOverload
from torch.autograd import forward_ad

from ..proxy.proxy import DistributedTensor
from ..runtime.process.generated_code import function
from .call_site import here
from .dispatch import issue, issue_write
from .op_table import enter

aten = torch.ops.aten

_grad = torch.is_grad_enabled
_modes = torch._C._len_torch_function_stack
_dispatch_modes = torch._C._len_torch_dispatch_stack
_autocast = torch._C._is_any_autocast_enabled
_transforms = torch._C._are_functorch_transforms_active

#: The bound of integers that can be sent; torch raises the error for larger ones.
_WIDE = 1 << 63
_NOTHING = type(None)
_PRESERVE = torch.preserve_format
_CPU = torch.device("cpu")


# The methods are written out of one text: the six checks for active modes between a method and dispatch cost a fifth of
# the whole call, and as a function they would cost half as much again. A mode of functions sees attributes as well, so
# that it is looked for first.
_METHOD = """
def method(self, {other}*args, **kwargs):
    if not args and not kwargs and type(self) is T:
        h = self._h
{ways}
    return original(self, {other}*args, **kwargs)
"""
_WAY = """
        {given}
            if (
                not (_modes() or (_grad() and ({recorded})))
                and (plan := quick.get((h.meta, {key}))) is not None
                and not (_dispatch_modes() or _inference() or _transforms() or _autocast())
                and forward_ad._current_level < 0
                {writable}
            ):
                {issue}
"""


#: What both texts name.
_NAMES: dict[str, Any] = {
    "T": DistributedTensor, "_COUNTS": torch._C.DispatchKey.ADInplaceOrView, "_NOTHING": _NOTHING, "_WIDE": _WIDE,
    "_autocast": _autocast, "_dispatch_modes": _dispatch_modes,
    "_excluded": torch._C._dispatch_tls_is_dispatch_key_excluded, "_grad": _grad,
    "_increment": torch._C._increment_version, "_inference": torch.is_inference_mode_enabled, "_modes": _modes,
    "_transforms": _transforms, "forward_ad": forward_ad, "issue": issue, "issue_write": issue_write,
}  # fmt: skip


class _Way(NamedTuple):
    """How a method is called: what it is given beside the tensor itself."""

    given: str  #: the condition for it
    recorded: str  #: whether a gradient is to be recorded, where that is on
    key: str  #: what the plan's key has of it
    operand: str  #: what the call has of it


_ALONE = _Way("if True:", "self.requires_grad", "_NOTHING", "None")
_TENSOR = _Way("if type(other) is T:", "self.requires_grad or other.requires_grad", "other._h.meta", "other")
_NUMBER = _Way(
    "elif other is not None and (type(other) is not int or -_WIDE <= other < _WIDE):",
    "self.requires_grad", "type(other)", "other",
)  # fmt: skip
#: Torch refuses to write an inference tensor outside of that mode. What else may not be written requires a gradient.
#: Below the key that counts writes, such as in a composite operator, torch counts none.
_WRITABLE = "and not self.is_inference() and not _excluded(_COUNTS)"
_WRITES = "issue_write(plan, h, {}); _increment((self,)); return self"


def _source(ways: tuple[_Way, ...], written: bool) -> str:
    """Returns the text of a method; ``written``: it writes the tensor, and returns that."""
    issues, writable = (_WRITES, _WRITABLE) if written else ("return issue(plan, h, {})", "")
    parts = [_WAY.format(**way._asdict(), issue=issues.format(way.operand), writable=writable) for way in ways]
    return _METHOD.format(other="other, " if ways != (_ALONE,) else "", ways="".join(parts))


def _method(op: OpOverload, ways: tuple[_Way, ...], original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the method that issues an operator's calls of these ways, and leaves all others to ``original``."""
    entry = enter(op)
    names = {**_NAMES, "quick": entry.shortcuts, "original": original}
    made: Callable[..., Any] = function("method", _source(ways, entry.mutable), names)
    return made


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


#: The table: operators, and the methods that are shortcuts to them. A line more is a method more.
BINARY: dict[str, tuple[str, ...]] = {
    "add.Tensor": ("add", "__add__", "__radd__"),
    "sub.Tensor": ("sub", "__sub__"),
    "mul.Tensor": ("mul", "__mul__", "__rmul__"),
    "div.Tensor": ("div", "__truediv__"),
    "mm.default": ("mm", "__matmul__", "matmul"),
    "maximum.default": ("maximum",),
    "minimum.default": ("minimum",),
    "add_.Tensor": ("add_", "__iadd__"),
    "sub_.Tensor": ("sub_", "__isub__"),
    "mul_.Tensor": ("mul_", "__imul__"),
    "div_.Tensor": ("div_", "__itruediv__"),
}
UNARY: dict[str, tuple[str, ...]] = {
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
    "zero_.default": ("zero_",),
    "relu_.default": ("relu_",),
    "sqrt_.default": ("sqrt_",),
}


def install() -> None:
    """Gives DistributedTensor the methods of this file. A second call does nothing."""
    if "add" in vars(DistributedTensor):
        return
    made = {"cpu": _cpu(torch.Tensor.cpu), "to": _to}
    for table, ways in ((BINARY, (_TENSOR, _NUMBER)), (UNARY, (_ALONE,))):
        for name, methods in table.items():
            packet, overload = name.split(".")
            op = getattr(getattr(aten, packet), overload)
            made |= {method: _method(op, ways, getattr(torch.Tensor, method)) for method in methods}
    for method, wrapped in made.items():
        wrapped.__name__ = method
        wrapped.__doc__ = getattr(torch.Tensor, method).__doc__
        setattr(DistributedTensor, method, wrapped)
