"""Factories on the current node, and the legacy type names of PyTorch 0.x (``dt.FloatTensor(20, 20)``)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..runtime.process.spelling import shown
from ..session import current
from ..session.node_context import current_node, destination
from ..session.places import MeshPlace, Place
from .proxy import DistributedTensor, refuse_wrapper

_LEGACY = {
    "FloatTensor": torch.float32,
    "DoubleTensor": torch.float64,
    "HalfTensor": torch.float16,
    "BFloat16Tensor": torch.bfloat16,
    "ByteTensor": torch.uint8,
    "CharTensor": torch.int8,
    "ShortTensor": torch.int16,
    "IntTensor": torch.int32,
    "LongTensor": torch.int64,
    "BoolTensor": torch.bool,
    "ComplexFloatTensor": torch.complex64,
    "ComplexDoubleTensor": torch.complex128,
}


def _place(device: Any) -> Place:
    """Returns the place of a factory's tensor: a device of the current node; its CPU by default, as in issue 241."""
    places = current.session().places
    if isinstance(device, torch.device) and device.type == "node":
        return places.of(device)
    if isinstance(device, str) and device.startswith("node"):
        return places.of(torch.device(device))
    # a node's default device may be a GPU, and its name gives the CPU; a mesh is one kind of device
    if device is None and isinstance(here := places.here(), MeshPlace):
        return here
    return places.at(current_node(), "cpu" if device is None else device)


def _factory(name: str) -> Callable[..., DistributedTensor]:
    local = getattr(torch, name)

    def make(*args: Any, device: Any = None, **kwargs: Any) -> DistributedTensor:
        return local(*args, device=_place(device).device, **kwargs)  # type: ignore[no-any-return]

    make.__name__ = make.__qualname__ = name
    make.__doc__ = (
        f"Makes a tensor on the current node, from the arguments of ``torch.{name}``. Returns at once; ``tensor`` "
        'waits as ``from_numpy`` does. ``device``: one of the node\'s devices ("cpu", the default; "cuda:1"; 1), or '
        "any ``torch.device`` of type node.\n\n"
        f"Raises the errors of torch.{name}, NodeLost, DisttensorError without a session."
    )
    return make


empty = _factory("empty")
zeros = _factory("zeros")
ones = _factory("ones")
full = _factory("full")
rand = _factory("rand")
randn = _factory("randn")
randint = _factory("randint")
randperm = _factory("randperm")
arange = _factory("arange")
eye = _factory("eye")
linspace = _factory("linspace")
logspace = _factory("logspace")
tensor = _factory("tensor")


def from_numpy(array: Any, device: Any = None) -> DistributedTensor:
    """Returns a copy of a numpy array on the current node, with the array's shape and dtype.

    ``device`` is one of the node's devices ("cpu", the default; "cuda:1"; 1), or any ``torch.device`` of type node.
    Returns when the array may be changed: at once, having copied it, unless 64 MiB of earlier uploads are on their way.
    Raises TypeError for dtypes that torch doesn't have, RuntimeError for a device that the node doesn't have, NodeLost,
    DisttensorError without a session.
    """
    return torch.from_numpy(array).to(_place(device).device)  # type: ignore[return-value]


def _legacy(name: str, dtype: torch.dtype) -> Callable[..., DistributedTensor]:
    def make(*args: Any, device: Any = None) -> DistributedTensor:
        place = _place(device)
        if len(args) == 1 and not isinstance(args[0], (int, torch.Size)):
            return torch.as_tensor(args[0], dtype=dtype).to(place.device)  # type: ignore[return-value]
        sizes = args[0] if len(args) == 1 and isinstance(args[0], torch.Size) else args
        if not all(isinstance(n, int) for n in sizes):
            raise TypeError(f"{name} takes sizes, or one sequence of values, not {shown(args)}")
        return torch.empty(tuple(sizes) or (0,), dtype=dtype, device=place.device)  # type: ignore[return-value]

    make.__name__ = make.__qualname__ = name
    make.__doc__ = (
        f"Makes a tensor of {dtype} on the current node: ``{name}(2, 3)`` an uninitialised one of this shape, "
        f'``{name}([1, 2])`` one with these values. ``device``: -1 or "cpu" (default), k or "cuda:k".\n\n'
        "Raises TypeError for other arguments, NodeLost, DisttensorError without a session."
    )
    return make


LEGACY = {name: _legacy(name, dtype) for name, dtype in _LEGACY.items()}


def device(node: int | str | torch.device, dev: str | int | torch.device | None = None) -> torch.device:
    """Returns any device of any node as a ``torch.device``: ``device(1, "cuda:1")``, ``device(0, "cpu")``,
    ``device(0)``.

    ``dev`` defaults to the node's default device: its first GPU, else its CPU. Does not wait. Raises TypeError for a
    ``node`` that is no integer, text or device, ValueError for a node that doesn't exist, RuntimeError for a device
    that it doesn't have, DisttensorError without a session.
    """
    return current.session().places.at(node, dev).device


def dist_send(
    self: torch.Tensor, node: Any = None, device: str | int | torch.device | None = None, non_blocking: bool = False
) -> DistributedTensor:
    """Returns a local tensor's copy on a node. Installed as ``Tensor.dist_send``: torch_backend/naming.py says more."""
    refuse_wrapper(self, "dist_send")
    place = destination(current.session().places, node, device, _kind(self))
    return self.to(place.device, non_blocking=non_blocking)  # type: ignore[return-value]


def _kind(tensor: Any) -> str:
    """Returns the device of a node on which a tensor stays when it is sent there."""
    if isinstance(tensor, DistributedTensor):
        return "cuda" if tensor._place.is_cuda() else "cpu"
    return "cpu" if tensor.device.type == "cpu" else f"cuda:{tensor.device.index or 0}"


def send_module(
    self: torch.nn.Module,
    node: Any = None,
    device: str | int | torch.device | None = None,
    non_blocking: bool = False,
) -> torch.nn.Module:
    """Moves a module to a node. Installed as ``Module.dist_send``: torch_backend/naming.py says more."""
    kinds = {_kind(tensor) for tensor in (*self.parameters(), *self.buffers())} or {"cpu"}
    places = {destination(current.session().places, node, device, kind) for kind in kinds}
    if len(places) > 1:
        raise ValueError(
            f"dist_send: tensors of this {type(self).__name__} are on {' and '.join(sorted(kinds))}; device= names one "
            "for all"
        )
    return self.to(places.pop().device, non_blocking=non_blocking)
