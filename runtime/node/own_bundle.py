"""The bundle of this node, for connections that are made later than the first ones."""

from __future__ import annotations

import os
from typing import NamedTuple

from ..protocol.bundle import Bundle
from ..protocol.errors import DisttensorError


class Own(NamedTuple):
    """This process's bundle; ``at`` says which one of the master's addresses it uses."""

    bundle: Bundle
    at: int


_own: list[Own] = []
_process: list[int] = []  #: its number


def set_own(bundle: Bundle, at: int) -> None:
    """Notes what this process was told."""
    _own[:], _process[:] = [Own(bundle, at)], [os.getpid()]


def own() -> Own:
    """Returns what this process was told. Raises DisttensorError where it is no node."""
    if not _own or _process != [os.getpid()]:
        raise DisttensorError(
            "this process is no node of a session, nor its script; one that a node has forked is none"
        )
    return _own[0]
