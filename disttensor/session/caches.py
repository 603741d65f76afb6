"""Tables that depend on the session: which nodes and devices it has, its default dtype, its places.

Whoever keeps such a table says here how it is emptied.
"""

from __future__ import annotations

from collections.abc import Callable

_plans: list[Callable[[], object]] = []
_places: list[Callable[[], object]] = []


def plans(empty: Callable[[], object]) -> None:
    """Registers what empties a table of plans, or of choices made for a signature."""
    _plans.append(empty)


def places(empty: Callable[[], object]) -> None:
    """Registers what empties a table that holds on to places, and so to its session."""
    _places.append(empty)


def drop_plans() -> None:
    """Has all plans and choices made anew: for a new session, other devices, a node's full table of templates."""
    for empty in _plans:
        empty()


def forget_session() -> None:
    """Lets go of a session that has ended."""
    for empty in _places:
        empty()
