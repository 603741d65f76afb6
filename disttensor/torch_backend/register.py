"""Makes "node" a device of torch's: its factories, its guard, its kernels.

This is done at the first init and not at import, because it changes some answers of local torch. The device's name is
there as soon as torch is imported (naming.py), so that a use of a node before init raises an error that says what is
missing (``device_module._lazy_init``).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any, NoReturn

import torch
from torch._ops import OpOverload
from torch.utils.backend_registration import generate_methods_for_privateuse1_backend

from .. import torch_patches
from ..dispatch import copies, handlers, method_shortcuts, whole_batches
from ..dispatch.dispatch import dispatch
from ..dispatch.first_call import layout_of, refuse_layout
from ..dispatch.op_table import enter, factory
from ..proxy.proxy import DistributedTensor
from ..session import current
from ..storage import set_data, storages, uninitialized
from . import (
    at_import,
    autocast,
    backward,
    higher_order,
    sparse_gradients,
    switches,
    torch_compile,
)
from .composites import linear, overrides, sdpa, wider_dtypes
from .naming import name_device

#: Composites that have a kernel of their own on the CPU, or call one directly: torch would decompose them otherwise.
#: And the operator that ``torch.tensor([x, y])`` calls, for which torch asks neither subclasses nor the fallback.
_OWN_KERNELS = (
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.kaiser_window.default,
    torch.ops.aten.kaiser_window.periodic,
    torch.ops.aten.kaiser_window.beta,
    torch.ops.aten.silu_backward.default,
    torch.ops.aten.mish_backward.default,
    torch.ops.aten.native_channel_shuffle.default,
)
_library: list[torch.library.Library] = []


def register() -> None:
    """Registers the device type; a second call does nothing."""
    if _library:
        return
    torch_patches.check(torch_patches.SESSION)  # before anything is changed
    setattr(DistributedTensor, "__torch_dispatch__", staticmethod(dispatch))  # noqa: B010 - mypy can't see the method
    name_device()
    generate_methods_for_privateuse1_backend()
    torch._C._acc.register_python_privateuseone_hook(backward.Hooks())
    torch._C._acc.register_python_privateuseone_device_guard(backward.Guard())
    fallback = torch.library.Library("_", "IMPL")
    fallback.fallback(_factory, "PrivateUse1")
    kernels = torch.library.Library("aten", "IMPL")
    sdpa.register(kernels)
    overrides.register(kernels)
    kernels.impl("_to_copy", _to_copy, "PrivateUse1")
    for layout in ("SparseCsr", "Quantized", "NestedTensor"):
        kernels.impl("_to_copy", _refuse_copy, f"{layout}PrivateUse1")
    for op in _OWN_KERNELS:
        kernels.impl(op.name().removeprefix("aten::"), partial(_factory, op), "PrivateUse1")
    _library.extend((fallback, kernels, *autocast.register()))
    method_shortcuts.install()
    higher_order.register()
    torch_compile.install()
    torch.serialization.register_package(9, *storages.LOADING)  # type: ignore[arg-type]  # 9: before torch's own
    torch_patches.install(torch_patches.SESSION)
    at_import.after("torch.distributed.fsdp", partial(torch_patches.install, torch_patches.SHARDING))
    at_import.after(whole_batches.SENDER, whole_batches.watch)
    switches.follow_fill()


def set_default(original: Callable[[Any], None]) -> Callable[[Any], None]:
    @wraps(original)
    def set_and_tell(value: Any) -> None:
        """Sets torch's default; the nodes and all plans follow at once."""
        session = current.current()
        if session is not None:
            session.settle_threads()  # commands that were issued under the old default are computed under it
        original(value)
        if session is not None:
            session.check_default_dtype()

    return set_and_tell


def _factory(op: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Runs an operator that reaches the device without a proxy among its arguments: a factory."""
    entry = enter(op)
    device = kwargs.get("device")
    if device is None:
        if any(isinstance(v, DistributedTensor) for v in (*args, *kwargs.values())):
            return dispatch(op, (), args, kwargs)
        raise NotImplementedError(f"{entry.name} can't make a tensor on a node")
    places = current.session().places
    place = places.of(device)
    if device.index is None:
        kwargs["device"] = places.here().device
    if kwargs.get("pin_memory"):
        raise RuntimeError("pin_memory=True is for local tensors; a node's memory can't be pinned from here")
    kwargs.pop("pin_memory", None)
    if entry.handler is not None:
        return entry.handler(entry, args, kwargs)
    if "dtype" in kwargs and kwargs["dtype"] is None:
        del kwargs["dtype"]
    return factory[0](entry, args, kwargs, place)


def _to_copy(
    source: torch.Tensor,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
    non_blocking: bool = False,
    memory_format: torch.memory_format | None = None,
) -> Any:
    """Copies a local tensor to a node (``x.to("node:1")``), converted on the side where fewer bytes have to move."""
    if isinstance(source, DistributedTensor):
        options = {"dtype": dtype, "device": device, "memory_format": memory_format}
        given = {k: v for k, v in options.items() if v is not None}
        return dispatch(torch.ops.aten._to_copy.default, (), (source,), given)
    if type(source) is not torch.Tensor or source.requires_grad:
        source = source.detach()  # no subclass any more: that may refuse the next steps
    place = current.session().places.of(device or torch.device("node"))
    source, has = handlers.share(source, place), source.dtype
    dtype = dtype or has
    first = source.to(dtype) if dtype is not has and dtype.itemsize <= has.itemsize else source
    remote = copies.upload(first, place, non_blocking)
    return handlers.arrive(remote, source, {"memory_format": memory_format}, dtype)


def _refuse_copy(source: torch.Tensor, **options: Any) -> NoReturn:
    """Raises NotImplementedError for a layout that nodes don't have.

    Torch's own kernel would take the parts to a node and call that a tensor there.
    """
    refuse_layout("aten::_to_copy", layout_of(source))


__all__ = ["handlers", "linear", "register", "set_data", "sparse_gradients", "uninitialized", "wider_dtypes"]
