"""The role of this process in disttensor: whether it is a node, and whether it is the master of a session."""

from __future__ import annotations

_started: list[int] = []  #: this process's rank, if it is a node
_session: list[object] = []


def become_node(rank: int) -> None:
    """Makes this process a node from now on, and nothing else."""
    _started.append(rank)


def is_node() -> bool:
    """Returns whether this process is a node, and nothing else."""
    return bool(_started)


def set_session(session: object | None) -> None:
    """Sets the session that this process is the master of; None when it is the master of none."""
    _session[:] = [] if session is None else [session]


def has_session() -> bool:
    """Returns whether this process is the master of a session."""
    return bool(_session)
