"""The current node, which ``with dt.node(1):`` sets. Each thread and asyncio task has its own (a contextvar)."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar, Token
from functools import wraps
from types import TracebackType
from typing import Any

import torch
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]

from .. import torch_patches
from ..runtime.process.spelling import shown
from ..runtime.protocol.errors import DisttensorError
from . import current
from .places import MeshPlace, Place, Places
from .places import current_node as _current

#: Whether a block or ``set_device`` has made the current node that: torch itself exchanges devices, too.
_chosen: ContextVar[bool] = ContextVar("disttensor_node_chosen", default=False)


class node:
    """Makes node ``k`` the current one inside of a ``with`` block: factories make their tensors there.

    An operation runs where its operands live, whatever node is current. ``k`` is a number, a text such as "node:1", a
    device, or a mesh (or its device): factories make their tensors on all of its nodes then. Blocks nest; the same
    object can be entered again. Raises ValueError or RuntimeError for a node that does not exist, TypeError for another
    kind of ``k``, DisttensorError without a session.
    """

    def __init__(self, k: Any) -> None:
        self._target = target(k)
        #: the number of the node; of a mesh the index of its device
        # a node is known by its number, a mesh by its device only
        self.index = self._target.slot if isinstance(self._target, MeshPlace) else self._target
        self._tokens: list[tuple[Token[int | MeshPlace], Token[bool]]] = []

    def __enter__(self) -> node:
        self._tokens.append(choose_place(self._target))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        restore_place(self._tokens.pop())

    def __repr__(self) -> str:
        return f"node({self._target})"


def choose_place(target: int | MeshPlace) -> tuple[Token[int | MeshPlace], Token[bool]]:
    """Makes a node, by its number, or a mesh's place the current one. Returns what restores the one before."""
    if target != 0:
        _follow()
    return _current.set(target), _chosen.set(True)


def restore_place(tokens: tuple[Token[int | MeshPlace], Token[bool]]) -> None:
    """Undoes ``choose_place``."""
    current_token, chosen_token = tokens
    _current.reset(current_token)
    _chosen.reset(chosen_token)


def target(k: Any) -> int | MeshPlace:
    """Returns what a node's number, a device or a mesh means as the current place. Raises as ``node``."""
    return current.session().places.current(_device_of(k))


def _device_of(k: Any) -> Any:
    """Returns the device of a mesh; anything else as it is."""
    place = None if isinstance(k, torch.Tensor) else getattr(k, "_place", None)  # a mesh has one, and so have tensors
    # a mesh stands for its device; a node's number, or its device, is said as it is
    return place.device if isinstance(place, MeshPlace) else k


def destination(places: Places, node: Any, device: str | int | torch.device | None, kind: str) -> Place:
    """Returns the place that the arguments of ``dist_send`` name.

    A text such as "node:1", a device of type node and a mesh name a place as for ``to``, in either argument. A number
    is a node's, and what is sent stays on its ``kind`` of device unless ``device`` names one. Raises as
    ``Tensor.dist_send``.
    """
    node = _device_of(node)
    if isinstance(device, str | torch.device) and torch.device(device).type == "node":
        place = places.named(device)
        if node is not None and destination(places, node, None, "cpu").ranks != place.ranks:
            raise ValueError(f"dist_send(node={shown(node)}, device={shown(device)}): these are two places; name one")
        return place
    if device is None and isinstance(node, str | torch.device):
        return places.named(node)
    return places.at(current_node() if node is None else node, kind if device is None else device)


def use(place: int | MeshPlace, chosen: bool = True) -> None:
    """Makes a node that exists, or a mesh, the current place, until another call changes it. ``chosen``: by the user's
    own word."""
    if place != 0:
        _follow()
    _current.set(place)
    if chosen:
        _chosen.set(True)


def reset_current_node() -> None:
    """Makes node 0 the current one again, which nobody has chosen: at a session's end."""
    _current.set(0)
    _chosen.set(False)


def current_index() -> int:
    """Returns the number of the current node; of a mesh the index of its device."""
    found = _current.get()
    # a node is known by its number, a mesh by its device only
    return found.slot if isinstance(found, MeshPlace) else found


def current_node() -> int:
    """Returns the number of the node that factories use now: 0 unless inside of a ``node(k)`` block.

    Raises DisttensorError where the current place is a mesh, which is several nodes.
    """
    found = _current.get()
    # several nodes have no one number
    if isinstance(found, MeshPlace):
        raise DisttensorError(
            f"this is for one node, and the current device is {found}: name a node in the call (node=0), or make one "
            "current (with dt.node(0):)"
        )
    return found


def chosen_node() -> int | None:
    """Returns the number of the node that a ``node(k)`` block or ``set_device`` has made the current one, or None."""
    return current_node() if _chosen.get() else None


def _follow() -> None:
    """Has ``local.to("node")`` follow the current node. As long as that is 0, ``Tensor.to`` stays torch's own."""
    torch_patches.install(torch_patches.ELSEWHERE)


def following(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        # "node" has no index; torch would ask the device guard for one, and a guard in Python can't be asked
        if _current.get() != 0:
            if args and _names_no_node(args[0]):
                args = (_here(), *args[1:])
            elif _names_no_node(kwargs.get("device")):
                kwargs["device"] = _here()
        return original(self, *args, **kwargs)

    UninitializedTensorMixin._allowed_methods.append(to)  # the methods that uninitialized tensors allow, by identity
    return to


def _here() -> torch.device:
    return current.session().places.here().device


def _names_no_node(device: Any) -> bool:
    if isinstance(device, str):
        return device == "node"
    return isinstance(device, torch.device) and device.type == "node" and device.index is None
