"""The name of the device "node", its module ``torch.node``, and ``dist_send`` of tensors and modules, which torch has
before init.

This module imports torch and nothing else of the front end, because it may run in the middle of the front end's import.
``torch.node``'s own module is loaded at the first use of an attribute.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, NoReturn

import torch
from torch.utils.backend_registration import rename_privateuse1_backend

from .. import torch_patches
from ..runtime.process import role
from ..runtime.protocol.errors import DisttensorError
from . import keep_local_accelerator

#: The reason why two libraries that each have a device of their own can't be used in one process.
_ONE = "torch has one device of this kind in a process (torch.utils.rename_privateuse1_backend); use two processes"
_named: list[str] = []


def name_device() -> None:
    """Gives the device its name and its module; a second call does nothing. Raises DisttensorError where another
    library has named its own."""
    if _named:
        return
    other = torch._C._get_privateuse1_backend_name()
    if other != "privateuseone":
        raise DisttensorError(f"disttensor can't have the device 'node' beside {other!r}: {_ONE}")
    torch_patches.check(torch_patches.IMPORT)  # before anything is changed
    accelerator = torch.accelerator.current_accelerator()
    rename_privateuse1_backend("node")
    torch._register_device_module("node", _Later("torch.node"))
    keep_local_accelerator.remember(accelerator)
    torch_patches.install(torch_patches.IMPORT)
    _named.append("node")


def at_import() -> None:
    """Calls ``name_device``, unless this process has no use for the name: as a node, or with another backend."""
    if not role.is_node() and torch._C._get_privateuse1_backend_name() == "privateuseone":
        name_device()


class _Later(ModuleType):
    """A stand-in for ``torch.node`` until the first use of an attribute, which takes a second for imports."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # asked of every module, by code that looks through all of them
            raise AttributeError(name)
        return getattr(_there(), name)

    def __dir__(self) -> list[str]:
        return dir(_there())

    def __reduce__(self) -> tuple[type, tuple[str]]:
        """Goes along with any function that uses torch and has a ``.node`` in it, such as that of ``dt.tasks.here()``:
        so cloudpickle takes modules that a function may mean. It stays a stand-in there."""
        return type(self), (self.__name__,)


def _there() -> ModuleType:
    from . import device_module

    setattr(torch, "node", device_module)  # noqa: B010
    sys.modules["torch.node"] = device_module
    return device_module


def _dist_send(
    self: torch.Tensor, node: Any = None, device: int | str | torch.device | None = None, non_blocking: bool = False
) -> Any:
    """Returns a local tensor's copy on a node (the current one by default), with the tensor's shape and dtype.

    ``node`` is a node's number: the copy is on the same kind of device, so a CPU tensor stays on a CPU unless
    ``device`` ("cpu", "cuda:1", 1, -1) says else. A text such as "node:1", a device of type node or a mesh, in the
    place of either, is the place itself, as for ``to``. The copy is differentiable.

    Returns when the tensor may be changed: at once, having copied it, unless 64 MiB of earlier uploads are on their
    way; with ``non_blocking=True`` at once, and the tensor is read later. Raises ValueError for a node that doesn't
    exist, or two places, RuntimeError for a device that it doesn't have, TypeError for what is not a node, NodeLost,
    DisttensorError without a session.
    """
    from ..proxy.factories import dist_send

    return dist_send(self, node, device, non_blocking)


def dist_send(original: object) -> Callable[..., Any]:
    """Returns ``Tensor.dist_send``, which torch does not have."""
    return _dist_send


def _send_module(
    self: torch.nn.Module, node: Any = None, device: int | str | torch.device | None = None, non_blocking: bool = False
) -> torch.nn.Module:
    """Moves a module's parameters and buffers to a node (the current one by default), and returns the module.

    It is ``to`` with the arguments of ``Tensor.dist_send``, and goes where such a tensor goes. Parameters stay the
    objects that they are, so that optimizers that have them need not be told. Returns as ``to`` does: when the
    module's tensors may be changed. Raises as ``Tensor.dist_send``, and ValueError for a module on several kinds of
    devices.
    """
    from ..proxy.factories import send_module

    return send_module(self, node, device, non_blocking)


def module_dist_send(original: object) -> Callable[..., torch.nn.Module]:
    """Returns ``Module.dist_send``, which torch does not have."""
    return _send_module


def refuse_another(original: object) -> Callable[[str], NoReturn]:
    """Returns the function that a second library calls to name its device: it raises RuntimeError."""

    def refuse(name: str) -> NoReturn:
        raise RuntimeError(f"there can't be a device {name!r} beside disttensor's 'node': {_ONE}")

    return refuse
