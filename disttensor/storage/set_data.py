"""Moves a tensor to a node, or back, as the same Python object: ``p.data = q``, ``Module.to``.

Torch changes a tensor's device in place (``set_data``) for its own kinds of tensors only; between a proxy and a local
tensor it refuses, and ``Module.to`` would make new parameters then: ties and optimizers would be lost. So this file
exchanges the C++ tensors below two Python objects, and everything else stays with its object.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, NoReturn

import torch

from ..proxy.meta import set_bits
from ..proxy.proxy import OWN, DistributedTensor, method, where_is
from ..runtime.process.signals import uninterrupted
from .modules import unexchangeable
from .uninitialized import class_of

_data = torch.Tensor.data


def become(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Does ``tensor.data = value`` where one is local and one on a node, or where one is an inference tensor.

    The tensor's gradient follows it. Raises RuntimeError for a result that autograd made.
    """
    uninitialized = class_of(tensor, isinstance(value, DistributedTensor))
    if not tensor.is_leaf:
        raise RuntimeError(
            f"the data of a result can't go from {where_is(tensor) or tensor.device} to "
            f"{where_is(value) or value.device} in place: its gradient would be on another device than what it was "
            "computed from; write y = x.to(...)"
        )
    needs_grad, grad = tensor.requires_grad, tensor.grad
    other = value.detach()
    if isinstance(tensor, torch.nn.Parameter):
        other = torch.nn.Parameter(other, needs_grad)
    else:
        other.requires_grad_(needs_grad)
    if uninitialized is not None:
        other.__class__ = uninitialized
    elif needs_grad and not tensor.is_inference():  # no autograd graph has uninitialized or inference tensors
        with torch.inference_mode(False):
            torch.autograd.graph.get_gradient_edge(tensor).node.register_prehook(_moved)
    _exchange(tensor, other)
    for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        registered = getattr(tensor, hooks)
        if registered is not None:  # C++ has its own list of the hooks, which went with the other tensor
            setattr(tensor, hooks, registered)
    if grad is not None and grad.shape == tensor.shape:
        moved = grad.detach().to(tensor.device, tensor.dtype)
        if grad.layout is torch.strided and not unexchangeable(grad):
            grad.data = moved
            moved = grad
        tensor.grad = moved


@uninterrupted
def _exchange(a: torch.Tensor, b: torch.Tensor) -> None:
    """Exchanges two tensors as ``torch.utils.swap_tensors``, but attributes stay, and other references to ``a`` are
    allowed."""
    ours, theirs = ({k: v for k, v in t.__dict__.items() if k in OWN} for t in (a, b))
    rest = {k: v for k, v in a.__dict__.items() if k not in OWN}
    try:
        torch._C._swap_tensor_impl(a, b)
    except RuntimeError as e:
        e.add_note(
            "a tensor that goes to a node, or back, becomes another one in place, and something refers to its C++ "
            "tensor, as a profile with record_shapes=True does: move it before the profile begins"
        )
        raise
    a.__class__, b.__class__ = b.__class__, a.__class__
    a.__dict__, b.__dict__ = rest | theirs, ours


def _moved(grads: Any) -> NoReturn:
    raise RuntimeError(
        "a backward pass reached a tensor that has gone to another device since the forward pass; "
        "move a module before its forward pass, or after its backward pass"
    )


def _get(tensor: DistributedTensor) -> torch.Tensor:
    """Returns the same remote tensor, outside of autograd and with a version counter of its own."""
    return _data.__get__(tensor)  # type: ignore[attr-defined, no-any-return]


def _set(tensor: DistributedTensor, other: Any) -> None:
    if isinstance(other, DistributedTensor) and tensor.is_inference() == other.is_inference():
        if (tensor.is_conj(), tensor.is_neg()) != (other.is_conj(), other.is_neg()):
            set_bits(tensor, other._h.meta.bits)  # torch does so by itself for its own kinds of tensors
        _data.__set__(tensor, other)  # type: ignore[attr-defined]
        tensor._h = other._h
    else:
        become(tensor, other)


method("data")(property(_get, _set))


def settable(original: Any) -> property:
    """Returns the property ``Tensor.data`` that can be set to remote tensors, too."""

    def set_data(tensor: torch.Tensor, value: torch.Tensor) -> None:
        if isinstance(value, DistributedTensor):
            become(tensor, value)
        else:
            original.__set__(tensor, value)

    return property(original.__get__, set_data, original.__delete__, original.__doc__)


def compatible(original: Callable[[torch.Tensor, torch.Tensor], bool]) -> Callable[[torch.Tensor, torch.Tensor], bool]:
    """Returns the function by which modules ask whether the data of one tensor can be set to another's, for proxies
    too."""

    @wraps(original)
    def can_be_set(a: torch.Tensor, b: torch.Tensor) -> bool:
        if not isinstance(a, DistributedTensor) and not isinstance(b, DistributedTensor):
            return original(a, b)
        if a.layout is not torch.strided or b.layout is not torch.strided:
            return False  # a sparse gradient is replaced by another tensor
        return isinstance(a, DistributedTensor) == isinstance(b, DistributedTensor) or not unexchangeable(a)

    return can_be_set
