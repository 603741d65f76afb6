"""Remote tensors that are seen at another place than their own: ``detach`` returns them while ``target`` names one."""

from __future__ import annotations

import threading
from typing import Any

from ..proxy.meta import Handle, Shared, meta_of
from ..session.places import Place
from .lazy_views import materialise


class _Target(threading.local):
    place: Place | None = None


#: The place of the results of this thread's ``detach``; None for the place of its operand.
target = _Target()


def at(handle: Handle, place: Place) -> Handle:
    """Returns a handle of the same remote tensor, seen at ``place``."""
    if handle.meta.place is place:
        return handle
    if type(handle) is Shared and handle.owner.meta.place is place:
        return handle.owner
    if not handle.ref:
        materialise(handle)
    meta = handle.meta
    return Shared(handle.ref, meta_of(meta.shape, meta.stride, meta.offset, meta.dtype, place, meta.bits), handle)


def alias(tensor: Any, place: Place) -> Any:
    """Returns the same remote tensor, seen at ``place``, as ``detach`` does: writes count for both."""
    before, target.place = target.place, place
    try:
        return tensor.detach()
    finally:
        target.place = before
