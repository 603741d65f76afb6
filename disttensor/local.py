"""Local torch answers as before, though "node" is registered.

To torch the one out-of-tree backend is *the* accelerator, before CUDA even: who asks for an accelerator (DataLoader,
``pin_memory``, checkpoints) would be told "node". What is told instead is what this machine had before.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

#: What torch's Python asks of the accelerator in C++ -> what the module of a local one calls it.
_CALLS = {
    "_accelerator_getDeviceIndex": "current_device",
    "_accelerator_setDeviceIndex": "set_device",
    "_accelerator_getStream": "current_stream",
    "_accelerator_setStream": "set_stream",
    "_accelerator_synchronizeDevice": "synchronize",
    "_accelerator_exchangeDevice": "_exchange_device",
    "_accelerator_maybeExchangeDevice": "_maybe_exchange_device",
    "_accelerator_getDeviceCapability": "get_device_capability",
    "_accelerator_emptyCache": "empty_cache",
}


def keep(accelerator: torch.device | None) -> None:
    """Makes torch answer as on a machine with this ``accelerator``. Called once, after "node" is named."""
    setattr(torch._C, "_accelerator_getAccelerator", lambda: accelerator)  # noqa: B010 - mypy refuses the assignment
    for name, called in _CALLS.items():
        original = getattr(torch._C, name, None)
        if original is not None:
            setattr(torch._C, name, _call(original, accelerator, called))
    setattr(torch.Tensor, "pin_memory", _pin_memory(torch.Tensor.pin_memory, accelerator))  # noqa: B010


def _call(original: Callable[..., Any], accelerator: torch.device | None, name: str) -> Callable[..., Any]:
    @wraps(original)
    def call(*args: Any) -> Any:
        return getattr(torch.get_device_module(_there(accelerator)), name)(*args)

    return call


def _pin_memory(original: Callable[..., Any], accelerator: torch.device | None) -> Callable[..., Any]:
    @wraps(original)
    def pin_memory(self: torch.Tensor, device: Any = None) -> torch.Tensor:
        return original(self, device or _there(accelerator))  # type: ignore[no-any-return]

    return pin_memory


def _there(accelerator: torch.device | None) -> torch.device:
    if accelerator is None:
        raise RuntimeError("Cannot access accelerator device when none is available.")  # in torch's words
    return accelerator
