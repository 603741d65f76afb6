"""Which accelerator torch speaks of: this machine's as before, though "node" is registered; nodes where it has none.

To torch the one out-of-tree backend is *the* accelerator, before CUDA even: who asks for an accelerator (DataLoader,
``pin_memory``, checkpoints) would be told "node". What is told instead is what this machine had before. Where that is
none, ``torch.accelerator`` stands for the nodes as long as a session runs: programs that pick their device by it run
there as they are. So do ``torch.Event`` and ``torch.Stream``, whose own do nothing for a backend that is Python: a wait
for such an event returned at once, while memory that it was to guard was still read.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import torch
from torch.utils.checkpoint import DefaultDeviceType

from ..runtime.process import role

#: What torch's Python asks of the accelerator in C++ -> what the module of a device calls it.
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


def keep(accelerator: torch.device | None) -> None:
    """Makes torch answer as on a machine with this ``accelerator``. Called once, after "node" is named.

    A torch that is built for one has it on a machine without, too: what is there is asked when it is needed, as a
    question to CUDA is felt by processes that are forked later.
    """

    @cache
    def there() -> torch.device | None:
        found = accelerator is not None and torch.get_device_module(accelerator).is_available()
        return accelerator if found else None

    def current() -> torch.device | None:
        return (there() or torch.device("node")) if role.has_session() else accelerator

    setattr(torch._C, "_accelerator_getAccelerator", current)  # noqa: B010 - mypy refuses the assignment
    # process groups and FSDP ask so, for tensors of this process; and an answer is kept beyond a session
    setattr(torch._C, "_get_accelerator", lambda: there() or torch.device("cpu"))  # noqa: B010
    for name, called in _CALLS.items():
        original = getattr(torch._C, name, None)
        if original is not None:
            setattr(torch._C, name, _call(original, current, called))
    setattr(torch.Tensor, "pin_memory", _pin_memory(torch.Tensor.pin_memory, current))  # noqa: B010
    setattr(torch, "Event", _of_nodes(torch.Event, current, _event))  # noqa: B010
    setattr(torch, "Stream", _of_nodes(torch.Stream, current, _stream))  # noqa: B010
    if torch.distributed.is_available():
        config = importlib.import_module("torch.distributed.distributed_c10d").BackendConfig
        setattr(config, "__init__", _default_backend(config.__init__, current))  # noqa: B010

    def default_type() -> str:
        """Torch's own would ask once, and keep the answer beyond a session."""
        return DefaultDeviceType._default_device_type or (there() or torch.device("cpu")).type

    setattr(DefaultDeviceType, "get_device_type", staticmethod(default_type))  # noqa: B010


def _call(original: Callable[..., Any], current: Callable[[], torch.device | None], name: str) -> Callable[..., Any]:
    @wraps(original)
    def call(*args: Any) -> Any:
        device = _there(current)
        function = getattr(torch.get_device_module(device), name, None)
        if function is None and name == "_empty_host_cache":  # CUDA's is the one that pins for all of this process
            return getattr(torch._C, "_host_emptyCache", lambda: None)()
        if function is None:
            said = original.__name__.removeprefix("_accelerator_")
            raise NotImplementedError(f"torch.accelerator's {said} is not there for {device.type!r} devices")
        return function(*args)

    return call


def _default_backend(original: Callable[..., None], current: Callable[[], torch.device | None]) -> Callable[..., None]:
    """What process groups take that name no backend: torch 2.15 asks for the accelerator; they are of this process."""

    @wraps(original)
    def init(self: Any, backend: Any) -> None:
        device = current()
        unnamed = str(backend) == "undefined" and device is not None and device.type == "node"
        original(self, "cpu:gloo" if unnamed else backend)

    return init


def _pin_memory(original: Callable[..., Any], current: Callable[[], torch.device | None]) -> Callable[..., Any]:
    @wraps(original)
    def pin_memory(self: torch.Tensor, device: Any = None) -> torch.Tensor:
        device = torch.device(device) if device else _there(current)
        if device.type == "node":  # what is sent to a node is read as it is: memory of any kind will do
            return self
        return original(self, device)  # type: ignore[no-any-return]

    return pin_memory


def _of_nodes(original: type, current: Callable[[], torch.device | None], make: Callable[..., Any]) -> type:
    """A class that is called as ``original`` is: for a device that is a node it gives what ``make`` does."""

    def ours() -> type:
        return getattr(torch.get_device_module("node"), original.__name__)  # type: ignore[no-any-return]

    class Kind(type(original)):  # type: ignore[misc]
        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            if cls is not named:  # a class of somebody's that is derived from it
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

    named = Kind(original.__name__, (original,), {"__doc__": original.__doc__, "__module__": original.__module__})
    return named


def _event(
    kind: type, device: torch.device, *, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False
) -> Any:
    if interprocess:
        raise NotImplementedError("an event of nodes can't be given to other processes: leave interprocess=True out")
    return kind(enable_timing, blocking)  # of whatever node it is recorded on, as a local one is


def _stream(kind: type, device: torch.device, *, priority: int = 0) -> Any:
    return kind(device, priority=priority)


def _there(current: Callable[[], torch.device | None]) -> torch.device:
    device = current()
    if device is None:
        raise RuntimeError("Cannot access accelerator device when none is available.")  # in torch's words
    return device
