"""The fast path into an operator from Python.

``torch.ops`` finds an operator's arguments by its schema, boxed; torch's generated bindings (``Tensor.view``) parse
them in half the time. They take the same arguments, but choose the overload by themselves: only operators of which a
test shows that the choice is the same are listed here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload

METHODS = frozenset(
    {
        *("aten::view", "aten::t", "aten::transpose.int", "aten::permute", "aten::expand", "aten::unsqueeze"),
        *("aten::squeeze.dim", "aten::select.int", "aten::clone", "aten::detach", "aten::copy_", "aten::zero_"),
        *("aten::add.Tensor", "aten::sub.Tensor", "aten::mul.Tensor", "aten::div.Tensor", "aten::neg", "aten::abs"),
        *("aten::add_.Tensor", "aten::sub_.Tensor", "aten::mul_.Tensor", "aten::div_.Tensor", "aten::bernoulli_.float"),
        *("aten::addcmul_", "aten::addcdiv_", "aten::sqrt", "aten::rsqrt", "aten::exp", "aten::log", "aten::tanh"),
        *("aten::sigmoid", "aten::relu", "aten::sum", "aten::sum.dim_IntList", "aten::mean", "aten::mean.dim"),
        *("aten::mm", "aten::bmm", "aten::addmm", "aten::maximum", "aten::minimum", "aten::gather"),
        *("aten::masked_fill.Scalar", "aten::lerp_.Scalar", "aten::as_strided", "aten::baddbmm"),
    }
)
FUNCTIONS = frozenset(
    {
        *("aten::native_layer_norm", "aten::cat", "aten::stack", "aten::where.self", "aten::ones_like"),
        *("aten::_softmax", "aten::_log_softmax", "aten::_softmax_backward_data", "aten::_log_softmax_backward_data"),
        *("aten::embedding", "aten::_foreach_mul_.Scalar", "aten::_foreach_add_.Scalar", "aten::_foreach_add_.List"),
        *("aten::_foreach_lerp_.Scalar", "aten::_foreach_addcmul_.Scalar", "aten::_foreach_addcdiv_.ScalarList"),
        *("aten::_foreach_sqrt", "aten::_foreach_div_.ScalarList"),
    }
)
NETWORKS = frozenset({"aten::linear", "aten::gelu", "aten::silu"})


def fast_path(op: OpOverload, tensor: bool = True) -> Callable[..., Any]:
    """Returns the fastest callable that runs ``op``, for arguments in the order of the schema.

    ``tensor``: whether the first argument is a tensor and not a number, as in ``torch.div(1.0, x)``.
    """
    name = op.name()
    base = name.removeprefix("aten::").partition(".")[0]
    if name in METHODS and tensor:
        return getattr(torch._C.TensorBase, base, op._op)
    if name in FUNCTIONS:
        return getattr(torch._C._VariableFunctions, base, op._op)
    if name in NETWORKS:
        return getattr(torch._C._nn, base, op._op)
    return plain_path(op)


def plain_path(op: OpOverload) -> Callable[..., Any]:
    """Returns a callable that runs ``op`` without one of torch's bindings: those have a handler of warnings of their
    own, so that what the kernel warns of would come at the line of ours that calls."""
    return _rnn_layer if op.name() == "aten::mkldnn_rnn_layer" else op._op


def _rnn_layer(*args: Any) -> Any:
    """Runs oneDNN's RNN layer with the grad mode of the master, which sends it as ``train``.

    By that mode torch decides whether the layer keeps what a backward needs.
    """
    with torch.set_grad_enabled(args[-1]):
        return torch.ops.aten.mkldnn_rnn_layer.default(*args)
