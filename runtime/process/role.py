"""What this process is to disttensor: a node, or something else; whether it has a session."""

from __future__ import annotations

_started: list[int] = []  #: this process's rank, if it is a node
_session: list[object] = []


def become_node(rank: int) -> None:
    """This process is a node from now on, and nothing else."""
    _started.append(rank)


def is_node() -> bool:
    """Whether this process is a node, and nothing else."""
    return bool(_started)


def set_session(session: object | None) -> None:
    """Says which session this process is the master of."""
    _session[:] = [] if session is None else [session]


def has_session() -> bool:
    """Whether this process is the master of a session."""
    return bool(_session)
