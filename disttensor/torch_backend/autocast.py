"""``torch.autocast("node", dtype=...)``: the casts that torch makes on the node's own kind of device.

The operators that take part are read from torch's registrations for CPU and CUDA. This file names only how they are
cast; an operator that it does not name is computed in float32. Casts happen above autograd, as torch's do.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import torch
from torch._ops import OpOverload

from ..session import current, kernel_choice
from ..session.places import Places

#: Operators that are computed in the dtype of the ``with`` statement.
_LOWER = {
    "cpu": """_addmm_activation _convolution.deprecated _native_multi_head_attention addbmm addmm baddbmm bmm conv1d
        conv1d.padding conv2d conv2d.padding conv3d conv3d.padding conv_tbc conv_transpose1d conv_transpose2d.input
        conv_transpose3d.input linalg_vecdot linear matmul mkldnn_rnn_layer mm prelu scaled_dot_product_attention""",
    "cuda": """_convolution _convolution.deprecated _scaled_dot_product_flash_attention _thnn_fused_gru_cell
        _thnn_fused_lstm_cell addbmm addmm addmv addr baddbmm bmm chain_matmul conv1d conv2d conv3d conv_tbc
        conv_transpose1d conv_transpose2d.input conv_transpose3d.input convolution cudnn_convolution
        cudnn_convolution_transpose einsum gru_cell linalg_multi_dot linalg_vecdot linear lstm_cell matmul mm mv prelu
        rnn_relu_cell rnn_tanh_cell scaled_dot_product_attention""",
}
#: Operators that are computed in the widest of that dtype and the operands' own.
_PROMOTE = {
    "cpu": "cat index_copy stack",
    "cuda": "addcdiv addcmul atan2 bilinear cross dot grid_sampler index_put scatter_add tensordot vdot",
}
#: Overloads without an argument for the result's dtype -> those with one, which are called instead.
_NAMING = {"aten::norm.Scalar": "ScalarOpt_dtype", "aten::norm.ScalarOpt_dim": "ScalarOpt_dim_dtype"}
#: Operators that raise an error, in torch's words, because their results would be bad.
_BANNED = {"cpu": "", "cuda": "binary_cross_entropy"}

_KEY = "AutocastPrivateUse1"
_KEYS = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA"}
_BELOW = torch._C._dispatch_keyset_full_after(getattr(torch._C.DispatchKey, _KEY))

Rule = Callable[[OpOverload, Any, Any], Any]
#: Parameters cast to the lower dtype, kept as long as in torch's own cache: to the end of the outermost ``with``.
_casts: dict[tuple[int, torch.dtype, bool], tuple[torch.Tensor, torch.Tensor]] = {}


def register() -> tuple[torch.library.Library, ...]:
    """Registers the rules of device type "node". They last as long as the libraries that this returns."""
    others, kernels = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    others.fallback(torch.library.fallthrough_kernel, _KEY)
    for name, kinds in operators().items():
        packet, _, overload = name.removeprefix("aten::").partition(".")
        op = getattr(getattr(torch.ops.aten, packet), overload or "default")
        rules = {kind: _rule(op, kind) for kind in kinds}
        kernels.impl(name.removeprefix("aten::"), partial(_kernel, op, rules), _KEY, with_keyset=True)
    return others, kernels


def operators() -> dict[str, list[str]]:
    """Returns torch's own operators with casts: name -> kinds of device. Operators of other libraries are left out:
    their casts are in kernels of their own, and libraries that are imported later would be missing."""
    found: dict[str, list[str]] = {}
    for kind, key in _KEYS.items():
        for name in torch._C._dispatch_get_registrations_for_dispatch_key(key):
            if name.startswith("aten::"):
                found.setdefault(name, []).append(kind)
    return found


def choose_default(places: Places) -> None:
    """Sets the default dtype of ``torch.autocast("node")`` in this thread to that of node 0's own kind of device."""
    kind = kernel_choice.casts(places.at(0).record)
    torch.set_autocast_dtype("node", torch.get_autocast_dtype(kind))


def clearing(original: Callable[[], None]) -> Callable[[], None]:
    @wraps(original)
    def clear_autocast_cache() -> None:
        _casts.clear()
        original()

    return clear_autocast_cache


def _rule(op: OpOverload, kind: str) -> Rule:
    name = op.name().removeprefix("aten::")
    if name in _LOWER[kind].split():
        return _lower
    if name in _PROMOTE[kind].split():
        return _promote
    if name in _BANNED[kind].split():
        return _refuse
    if op.name() in _NAMING and kind == "cuda":
        return _name_dtype
    if kind == "cuda" and any(a.name == "dtype" for a in op._schema.arguments):
        return _set_dtype
    return _full


def _kernel(op: OpOverload, rules: dict[str, Rule], keys: Any, *args: Any, **kwargs: Any) -> Any:
    """Runs an operator in an autocast region. Torch calls this."""
    device = next(t.device for t in _tensors((*args, *kwargs.values())) if t.device.type == "node")
    rule = rules.get(kernel_choice.casts(current.session().places.of(device).record))
    if rule is None:  # on that kind of device it falls through, and its parts are cast
        return op.redispatch(keys & _BELOW, *args, **kwargs)
    with torch._C._DisableAutocast():
        return rule(op, args, kwargs)


def _lower(op: OpOverload, args: Any, kwargs: Any) -> Any:
    return _cast(op, args, kwargs, torch.get_autocast_dtype("node"))


def _full(op: OpOverload, args: Any, kwargs: Any) -> Any:
    return _cast(op, args, kwargs, torch.float32)


def _promote(op: OpOverload, args: Any, kwargs: Any) -> Any:
    lower = torch.get_autocast_dtype("node")
    dtypes = {t.dtype for t in _tensors((*args, *kwargs.values())) if _eligible(t)}
    if not dtypes <= {lower, torch.float32}:
        raise RuntimeError(f"{op.name()}: autocast to {lower} can't join operands of {dtypes - {lower, torch.float32}}")
    return _cast(op, args, kwargs, torch.float32 if torch.float32 in dtypes else lower)


def _set_dtype(op: OpOverload, args: Any, kwargs: Any) -> Any:
    """Runs an operator that sums in the dtype of its result, which is float32 unless the caller names one."""
    at = next(i for i, a in enumerate(op._schema.arguments) if a.name == "dtype")
    if _eligible(args[0]) and len(args) <= at and kwargs.get("dtype") is None:
        kwargs = {**kwargs, "dtype": torch.float32}
    return op(*args, **kwargs)


def _name_dtype(op: OpOverload, args: Any, kwargs: Any) -> Any:
    schema = op._schema.arguments
    args = (*args, *(kwargs.get(a.name, a.default_value) for a in schema[len(args) :]))
    dtype = torch.float32 if _eligible(args[0]) else args[0].dtype
    return getattr(torch.ops.aten.norm, _NAMING[op.name()])(*args, dtype=dtype)


def _refuse(op: OpOverload, args: Any, kwargs: Any) -> Any:
    return op._op_dk(torch._C.DispatchKey.AutocastCUDA, *args, **kwargs)


# ---- casts -----------------------------------------------------------------------------------------------------------


def _cast(op: OpOverload, args: Any, kwargs: Any, to: torch.dtype) -> Any:
    def cast(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return cached(value, to) if _eligible(value) and value.dtype != to else value
        return [cast(v) for v in value] if isinstance(value, (list, tuple)) else value

    return op(*map(cast, args), **{name: cast(value) for name, value in kwargs.items()})


def cached(tensor: torch.Tensor, to: torch.dtype) -> torch.Tensor:
    """Casts a tensor; a parameter only once, so that its gradient is summed in the lower dtype, as in torch."""
    keep = (
        to == torch.get_autocast_dtype("node")
        and tensor.dtype == torch.float32
        and tensor.requires_grad
        and tensor.is_leaf
        and not tensor._is_view()
        and torch.is_autocast_cache_enabled()
    )
    if not keep:
        return tensor.to(to)
    key = (id(tensor), to, torch.is_grad_enabled())
    if key not in _casts:
        _casts[key] = (tensor, tensor.to(to))
    return _casts[key][1]


def _eligible(value: Any) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.device.type == "node"
        and value.is_floating_point()
        and value.dtype != torch.float64
    )


def _tensors(values: Any) -> list[torch.Tensor]:
    found = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found.extend(v for v in value if isinstance(v, torch.Tensor))
    return found
