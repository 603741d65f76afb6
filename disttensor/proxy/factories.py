"""Factories on the current node, and the legacy type names of PyTorch 0.x (``dt.FloatTensor(20, 20)``)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..session import current
from ..session.current_node import current_node
from ..session.places import Place
from .proxy import DistributedTensor

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
    """Where a factory's tensor goes: a device of the current node; its CPU by default, as issue 241 has it."""
    places = current.session().places
    if isinstance(device, torch.device) and device.type == "node":
        return places.of(device)
    if isinstance(device, str) and device.startswith("node"):
        return places.of(torch.device(device))
    return places.at(current_node(), "cpu" if device is None else device)


def _factory(name: str) -> Callable[..., DistributedTensor]:
    local = getattr(torch, name)

    def make(*args: Any, device: Any = None, **kwargs: Any) -> DistributedTensor:
        return local(*args, device=_place(device).device, **kwargs)  # type: ignore[no-any-return]

    make.__name__ = make.__qualname__ = name
    make.__doc__ = (
        f'As ``torch.{name}``, on the current node. ``device``: one of its devices ("cpu", the default; "cuda:1"; 1), '
        f"or any ``torch.device`` of type node.\n\nRaises what torch.{name} raises, DisttensorError without a session."
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
    """A copy of a numpy array on the current node. Raises TypeError for dtypes that torch doesn't have."""
    return torch.from_numpy(array).to(_place(device).device)  # type: ignore[return-value]


def _legacy(name: str, dtype: torch.dtype) -> Callable[..., DistributedTensor]:
    def make(*args: Any, device: Any = None) -> DistributedTensor:
        place = _place(device)
        if len(args) == 1 and not isinstance(args[0], (int, torch.Size)):
            return torch.as_tensor(args[0], dtype=dtype).to(place.device)  # type: ignore[return-value]
        sizes = args[0] if len(args) == 1 and isinstance(args[0], torch.Size) else args
        if not all(isinstance(n, int) for n in sizes):
            raise TypeError(f"{name} takes sizes, or one sequence of values, not {args!r}")
        return torch.empty(tuple(sizes) or (0,), dtype=dtype, device=place.device)  # type: ignore[return-value]

    make.__name__ = make.__qualname__ = name
    make.__doc__ = (
        f"``{name}(2, 3)``: an uninitialised tensor of {dtype} on the current node; ``{name}([1, 2])``: one with these "
        'values. ``device``: -1 or "cpu" (default), k or "cuda:k".\n\nRaises TypeError for other arguments.'
    )
    return make


LEGACY = {name: _legacy(name, dtype) for name, dtype in _LEGACY.items()}


def device(node: int | str | torch.device, dev: str | int | torch.device | None = None) -> torch.device:
    """Any device of any node as a ``torch.device``: ``device(1, "cuda:1")``, ``device(0, "cpu")``, ``device(0)``.

    Raises ValueError for a node that doesn't exist, RuntimeError for a device that it doesn't have.
    """
    return current.session().places.at(node, dev).device


def dist_send(
    self: torch.Tensor, node: int | None = None, device: str | int | torch.device | None = None
) -> DistributedTensor:
    """``Tensor.dist_send``: a local tensor's copy on a node (the current one by default), on the same kind of device:
    a CPU tensor stays on a CPU unless ``device`` says else. Differentiable."""
    places = current.session().places
    kind = "cpu" if self.device.type == "cpu" else f"cuda:{self.device.index or 0}"
    place = places.at(current_node() if node is None else node, kind if device is None else device)
    return self.to(place.device)  # type: ignore[return-value]
