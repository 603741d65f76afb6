"""A function's place: the node on which it runs, and its coordinates where that is one of a mesh."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from ..process import role


@dataclass(frozen=True)
class Where:
    """The place of a function."""

    node: int
    device: str  #: the node's default device, by torch's name on that node
    coordinates: dict[str, int] = field(default_factory=dict)  #: by dim of the mesh on which it was run
    world_size: int = 0  #: how many nodes the session had when the function was issued, without those that were lost


class _Now(threading.local):
    where: Where | None = None


_now = _Now()
_own: list[Where] = []  #: this process's place, if it is a node


def set_place(node: int, device: str) -> None:
    """Notes the place of all functions of this process, if it is a node: those that threads of a function call, too."""
    if role.is_node():
        _own[:] = [Where(node, device)]


@contextmanager
def at(where: Where) -> Iterator[None]:
    """Has functions that are called in this thread be at a place."""
    before, _now.where = _now.where, where
    if _own and _own[0].world_size != where.world_size:  # threads of functions know that much
        _own[:] = [replace(_own[0], world_size=where.world_size)]
    try:
        yield
    finally:
        _now.where = before


def found() -> Where | None:
    """Returns the place of the function that this thread runs; None in the script."""
    return _now.where or (_own[0] if _own else None)
