"""Keeps this machine's accelerator as torch's, though "node" is registered; without one, nodes are the accelerator.

To torch the one out-of-tree backend is *the* accelerator, before CUDA even: code that asks for an accelerator
(DataLoader, ``pin_memory``, checkpoints) would get "node". It gets the accelerator that this machine had before
instead. Where there is none, ``torch.accelerator`` stands for the nodes as long as a session runs: programs that pick
their device by it run there as they are. So do ``torch.Event`` and ``torch.Stream``, because torch's own do nothing for
a backend in Python: a wait for such an event returned at once, while memory that it was to guard was still read.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import torch
from torch.utils.checkpoint import DefaultDeviceType

from ..runtime.process import role

#: The C++ function that torch's Python calls for the accelerator -> its name in a device's module.
_CALLS = {
    "_accelerator_getDeviceIndex": "current_device",
    "_accelerator_setDeviceIndex": "set_device",
    "_accelerator_getStream": "current_stream",
    "_accelerator_setStream": "set_stream",
    "_accelerator_synchronizeDevice": "synchronize",
    "_accelerator_exchangeDevice": "_exchange_device",
    "_accelerator_maybeExchangeDevice": "_maybe_exchange_device",
    "_accelerator_getDeviceCapability": "get_device_capability",
    "_accelerator_isAllocatorInitialized": "is_initialized",
    "_accelerator_emptyCache": "empty_cache",
    "_accelerator_emptyHostCache": "_empty_host_cache",
    "_accelerator_getDeviceStats": "memory_stats_as_nested_dict",
    "_accelerator_getMemoryInfo": "mem_get_info",
    "_accelerator_resetAccumulatedStats": "reset_accumulated_memory_stats",
    "_accelerator_resetPeakStats": "reset_peak_memory_stats",
}


#: The accelerator of this machine, if it has one.
_accelerator: list[torch.device] = []


def remember(accelerator: torch.device | None) -> None:
    """Notes the accelerator that this machine had before "node" was named."""
    _accelerator[:] = [] if accelerator is None else [accelerator]


@cache
def there() -> torch.device | None:
    """Returns this machine's accelerator if it can be used. A torch that is built for one names it on machines without,
    too, so this asks; and only when needed, as a question to CUDA affects processes that are forked later."""
    found = bool(_accelerator) and torch.get_device_module(_accelerator[0]).is_available()
    return _accelerator[0] if found else None


def parallel_device_type(original: Callable[[], str | None]) -> Callable[[], str | None]:
    """Returns what tells torch.nn.DataParallel over which kind of device to spread a module: never over nodes."""

    @wraps(original)
    def device_type() -> str | None:
        found = original()
        return None if found == "node" else found

    return device_type


def current() -> torch.device | None:
    """Returns the accelerator that torch is to name: this machine's, or nodes, or None."""
    if role.has_session():
        return there() or torch.device("node")
    return _accelerator[0] if _accelerator else None


def get_accelerator(original: object) -> Callable[[], torch.device | None]:
    return current


def get_local_accelerator(original: object) -> Callable[[], torch.device]:
    return lambda: there() or torch.device("cpu")


def event(original: type) -> type:
    return _of_nodes(original, current, _event)


def stream(original: type) -> type:
    return _of_nodes(original, current, _stream)


def default_device_type(original: object) -> staticmethod[[], str]:
    def default_type() -> str:
        """Returns the device type of checkpoints. Torch's own asks once, and keeps the answer beyond a session."""
        return DefaultDeviceType._default_device_type or (there() or torch.device("cpu")).type

    return staticmethod(default_type)


def accelerator_call(original: Callable[..., Any]) -> Callable[..., Any]:
    name = _CALLS[original.__name__]

    @wraps(original)
    def call(*args: Any) -> Any:
        device = _there()
        function = getattr(torch.get_device_module(device), name, None)
        if function is None and name == "_empty_host_cache":  # CUDA's host allocator pins for the whole process
            return getattr(torch._C, "_host_emptyCache", lambda: None)()
        if function is None:
            said = original.__name__.removeprefix("_accelerator_")
            raise NotImplementedError(f"torch.accelerator's {said} is not there for {device.type!r} devices")
        return function(*args)

    return call


def default_backend(original: Callable[..., None]) -> Callable[..., None]:
    """Returns a BackendConfig.__init__ whose default backend is gloo: torch 2.15 would ask for the accelerator, but a
    process group is one of this process."""

    @wraps(original)
    def init(self: Any, backend: Any) -> None:
        device = current()
        unnamed = str(backend) == "undefined" and device is not None and device.type == "node"
        original(self, "cpu:gloo" if unnamed else backend)

    return init


def pin_memory(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def pinned(self: torch.Tensor, device: Any = None) -> torch.Tensor:
        device = torch.device(device) if device else _there()
        if device.type == "node":  # uploads read memory of any kind, so nothing has to be pinned
            return self
        return original(self, device)  # type: ignore[no-any-return]

    return pinned


def _of_nodes(original: type, current: Callable[[], torch.device | None], make: Callable[..., Any]) -> type:
    """Returns a class that is called as ``original``: for a device of type "node" it makes objects by ``make``."""

    def ours() -> type:
        return getattr(torch.get_device_module("node"), original.__name__)  # type: ignore[no-any-return]

    class ByDevice(type(original)):  # type: ignore[misc]
        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            if cls is not named:  # a user's subclass
                return super().__call__(*args, **kwargs)
            device, of_number = args[0] if args else kwargs.get("device"), kwargs.get("device_type")
            if of_number == torch._C._autograd.DeviceType.PrivateUse1.value:
                raise NotImplementedError("a node's stream is not found by numbers: make a torch.node.Stream(1)")
            if device is None or isinstance(device, int):
                found = current() if of_number is None else None
                device = found if found is None or device is None else torch.device(found.type, device)
            if device is None or torch.device(device).type != "node":
                return original(*args, **kwargs)
            return make(ours(), torch.device(device), *args[1:], **{k: v for k, v in kwargs.items() if k != "device"})

        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, (original, ours())) if cls is named else super().__instancecheck__(instance)

        def __subclasscheck__(cls, subclass: type) -> bool:
            return issubclass(subclass, (original, ours())) if cls is named else super().__subclasscheck__(subclass)

    named = ByDevice(original.__name__, (original,), {"__doc__": original.__doc__, "__module__": original.__module__})
    return named


def _event(
    kind: type, device: torch.device, *, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False
) -> Any:
    if interprocess:
        raise NotImplementedError("an event of nodes can't be given to other processes: leave interprocess=True out")
    return kind(enable_timing, blocking)  # it belongs to the node on which it is recorded, as a local event does


def _stream(kind: type, device: torch.device, *, priority: int = 0) -> Any:
    return kind(device, priority=priority)


def _there() -> torch.device:
    device = current()
    if device is None:
        raise RuntimeError("Cannot access accelerator device when none is available.")  # in torch's words
    return device
