"""Reads what a node is at from the sight of it: for the lines of those who wait, and for the rows of a status."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ..host.launcher import Sight
from ..host.sights import WAITS
from ..process.page import FUNCTION, IDLE
from .history import Sent

if TYPE_CHECKING:
    from .node import Node


class Activity(NamedTuple):
    """A command that a node is at."""

    kind: int  #: what it does there (process/page.py)
    number: int
    seconds: float  #: for how long
    beside: bool  #: in a thread of its own: on a stream, or as an actor's method
    sent: Sent | None  #: the command, while the script keeps it


def activities(node: Node, sight: Sight) -> list[Activity]:
    """Returns what a node is at: first what its receiving thread does itself, then the functions beside, the oldest
    first. There is at least one."""
    found = [Activity(FUNCTION, it.number, it.seconds, True, node.command(it.number)) for it in sight.beside]
    if sight.kind not in WAITS or not found:
        sent = None if sight.kind == IDLE else node.command(sight.seq)
        found.insert(0, Activity(sight.kind, sight.seq, sight.seconds, False, sent))
    return found
