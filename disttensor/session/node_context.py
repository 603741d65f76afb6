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
from . import current
from .places import current_node as _current

#: Whether a block or ``set_device`` has made the current node that: torch itself exchanges devices, too.
_chosen: ContextVar[bool] = ContextVar("disttensor_node_chosen", default=False)


class node:
    """Makes node ``k`` the current one inside of a ``with`` block: factories make their tensors there.

    An operation runs where its operands live, whatever node is current. ``k`` is a number, a text such as "node:1", or
    a device. Blocks nest; the same object can be entered again. Raises ValueError or RuntimeError for a node that does
    not exist, TypeError for another kind of ``k``, DisttensorError without a session.
    """

    def __init__(self, k: int | str | torch.device) -> None:
        self.index = current.session().places.at(k).node
        self._tokens: list[tuple[Token[int], Token[bool]]] = []

    def __enter__(self) -> node:
        if self.index:
            _follow()
        self._tokens.append((_current.set(self.index), _chosen.set(True)))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        current_token, chosen_token = self._tokens.pop()
        _current.reset(current_token)
        _chosen.reset(chosen_token)

    def __repr__(self) -> str:
        return f"node({self.index})"


def use(index: int, chosen: bool = True) -> None:
    """Makes a node that exists the current one, until another call changes it. ``chosen``: by the user's own word."""
    if index:
        _follow()
    _current.set(index)
    if chosen:
        _chosen.set(True)


def forget() -> None:
    """Makes node 0 the current one again, which nobody has chosen: at a session's end."""
    _current.set(0)
    _chosen.set(False)


def current_node() -> int:
    """Returns the number of the node that factories use now: 0 unless inside of a ``node(k)`` block."""
    return _current.get()


def chosen_node() -> int | None:
    """Returns the number of the node that a ``node(k)`` block or ``set_device`` has made the current one, or None."""
    return _current.get() if _chosen.get() else None


def _follow() -> None:
    """Has ``local.to("node")`` follow the current node. As long as that is 0, ``Tensor.to`` stays torch's own."""
    torch_patches.install(torch_patches.ELSEWHERE)


def following(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        # "node" has no index; torch would ask the device guard for one, and a guard in Python can't be asked
        if current_node():
            if args and _names_no_node(args[0]):
                args = (_here(), *args[1:])
            elif _names_no_node(kwargs.get("device")):
                kwargs["device"] = _here()
        return original(self, *args, **kwargs)

    UninitializedTensorMixin._allowed_methods.append(to)  # the methods that uninitialized tensors allow, by identity
    return to


def _here() -> torch.device:
    return current.session().places.at(current_node()).device


def _names_no_node(device: Any) -> bool:
    if isinstance(device, str):
        return device == "node"
    return isinstance(device, torch.device) and device.type == "node" and device.index is None
