"""``linear``, the commonest operation of training steps, as one autograd operation.

Torch's composite is two autograd operations (``t`` and ``addmm``), and its backward seven, each with a path through
torch and back to Python. Here each direction is one. A node computes the same products and sums for it, and so the same
bits, with fewer commands. Cases that only torch can handle (transforms, modes, forward derivatives, unusual strides)
use torch's composite; a second derivative, too, but it adds the terms of tensors used more than once in another order.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import forward_ad

from ...dispatch.dispatch import dispatch, run
from ...dispatch.op_table import enter
from ...proxy.meta import Meta, contiguous
from ...proxy.proxy import DistributedTensor
from ...session import caches
from .overrides import chosen

aten = torch.ops.aten

_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
_grad = torch.is_grad_enabled
_dispatch_modes = torch._C._len_torch_dispatch_stack
_transforms = torch._C._are_functorch_transforms_active
_linear = enter(aten.linear.default)
_mm, _t, _sum, _view = aten.mm.default, aten.t.default, aten.sum.dim_IntList, aten.view.default

#: (metas of input, weight and bias) -> whether this file computes them
_known: dict[tuple[Meta, Meta, Meta | None], bool] = {}
caches.plans(_known.clear)


def _plain(x: Meta, weight: Meta, bias: Meta | None) -> bool:
    """Returns whether torch computes this as one matrix product, whose derivative is that of `_backward`."""
    if not x.dtype.is_floating_point or len(x.shape) < 2 or len(weight.shape) != 2 or x.shape[-1] != weight.shape[1]:
        return False
    for meta in (x, weight, bias):
        if meta is None:
            continue
        if meta.place is not x.place or meta.dtype is not x.dtype or any(meta.bits) or 0 in meta.shape:
            return False
        if meta.stride != contiguous(meta.shape):
            return False
    # whether a matrix of one element is transposed is hard to tell, and torch's derivative depends on it
    return (bias is None or bias.shape == weight.shape[:1]) and x.shape[-2:] != (1, 1)


@chosen(aten.linear.default)
def linear(input: Any, weight: Any, bias: Any = None) -> torch.Tensor:
    """Computes ``torch.nn.functional.linear``."""
    if (
        type(input) is DistributedTensor
        and type(weight) is DistributedTensor
        and (bias is None or type(bias) is DistributedTensor)
        and not (_dispatch_modes() or _transforms())
        and forward_ad._current_level < 0
    ):
        key = (input._h.meta, weight._h.meta, None if bias is None else bias._h.meta)
        known = _known.get(key)
        if known is None:
            if len(_known) >= 4096:
                _known.clear()
            known = _plain(*key)
            caches.keep(_known, key, known, *(meta.place for meta in key if meta is not None))
        if known:
            if _grad() and (input.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)):
                return _WAYS[len(key[0].shape) > 2, bias is not None](bias, input, weight)  # type: ignore[no-any-return]
            return _whole((input, weight, bias))  # type: ignore[no-any-return]
    return aten.linear.default._op_dk(_COMPOSITE, input, weight, bias)  # type: ignore[no-any-return]


def _whole(operands: tuple[Any, Any, Any]) -> Any:
    """Issues the operator itself, past its handler."""
    known = _linear.forms.get(3)
    return run(_linear, operands, {}, None) if known is None else known(operands)


class _Linear(torch.autograd.Function):
    """The autograd function of linear. Its operands are in the order of addmm's."""

    @staticmethod
    def forward(ctx: Any, bias: Any, input: Any, weight: Any) -> Any:
        _, of_input, of_weight = ctx.needs_input_grad
        # saved as by torch's own derivative: an operand must not be written if it is needed, and may be if it is not
        ctx.save_for_backward(input if of_weight else None, weight if of_input else None)
        ctx.set_materialize_grads(False)
        ctx.shape = input._h.meta.shape
        return _whole((input, weight, bias))

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        if grad is None:
            return None, None, None
        input, weight = ctx.saved_tensors
        shape = ctx.shape
        n = grad.shape[-1]
        wants = ctx.needs_input_grad
        ours = (
            type(grad) is DistributedTensor
            and not (_grad() or _dispatch_modes() or _transforms())
            and (input is None or type(input) is DistributedTensor)
            and (weight is None or type(weight) is DistributedTensor)
        )
        if ours and len(shape) > 2:
            meta = grad._h.meta
            ours = meta.stride == contiguous(meta.shape)
        if not ours:
            return _backward(grad, input, weight, shape, wants)
        of_bias = of_input = of_weight = None
        if len(shape) > 2:
            grad = dispatch(_view, (), (grad, [-1, n]))
        if wants[1]:
            of_input = dispatch(_mm, (), (grad, weight))
            if len(shape) > 2:
                of_input = dispatch(_view, (), (of_input, shape))
        if wants[2]:
            if len(shape) > 2:
                input = dispatch(_view, (), (input, [-1, shape[-1]]))
            of_weight = dispatch(_mm, (), (dispatch(_t, (), (grad,)), input))
        if wants[0]:
            of_bias = dispatch(_sum, (), (grad, [0]))
        return of_bias, of_input, of_weight


def _backward(grad: Any, input: Any, weight: Any, shape: tuple[int, ...], wants: tuple[bool, ...]) -> Any:
    """Computes the gradients by torch's own operations: for a second derivative, and for operands that are no plain
    proxies.

    It keeps the order of torch's derivative, which decides in which order the terms of a second one are added.
    """
    grad = grad.reshape(-1, grad.shape[-1]) if len(shape) > 2 else grad
    of_input = grad.mm(weight) if wants[1] else None
    of_weight = grad.t().mm(input.reshape(-1, shape[-1])) if wants[2] else None
    of_bias = grad.sum(0, keepdim=True).view(-1) if wants[0] else None
    return of_bias, of_input if of_input is None or len(shape) == 2 else of_input.reshape(shape), of_weight


def _named(name: str) -> Any:
    """Returns the ``apply`` of a subclass of `_Linear`, without the checks that users' functions need. The ``grad_fn``
    of its results has the name ``name``, as torch's."""
    function = type(name, (_Linear,), {})
    function._backward_cls.__name__ = name  # type: ignore[attr-defined]
    return torch._C._FunctionBase.__dict__["apply"].__get__(None, function)


@torch.inference_mode(False)
@torch.enable_grad()
def _name(deep: bool, biased: bool) -> str:
    """Returns the name of the ``grad_fn`` of this torch's linear: versions differ in the view that ends the
    composite."""
    x, weight, bias = (torch.empty(s, device="cpu").requires_grad_() for s in ((1,) * (2 + deep), (1, 1), (1,)))
    return type(aten.linear.default(x, weight, bias if biased else None).grad_fn).__name__


#: (more than a matrix, with a bias) -> the function to apply
_WAYS = {(deep, biased): _named(_name(deep, biased)) for deep in (False, True) for biased in (False, True)}
