"""The registry of tables that depend on the session: on its nodes and devices, its default dtype, its places.

A file that keeps such a table registers here how it is emptied.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from .places import Place

K = TypeVar("K")
V = TypeVar("V")

_plans: list[Callable[[], object]] = []
_places: list[Callable[[], object]] = []


def plans(empty: Callable[[], object]) -> None:
    """Registers the function that empties a table of plans, or of choices made for a signature."""
    _plans.append(empty)


def places(empty: Callable[[], object]) -> None:
    """Registers the function that empties a table that keeps places alive, and so its session."""
    _places.append(empty)


def keep(table: dict[K, V], key: K, value: V, *places: Place) -> None:
    """Enters a value that holds these places, or whose key does, in a table that is emptied when their session ends.

    Nothing is kept for a session that has ended: proxies of it may be left, which can still be looked at, and what was
    kept for them would keep the session.
    """
    table[key] = value
    # After the entry, as who ends a session first says so and then empties the tables.
    if any(place.session.link.closed for place in places):
        table.pop(key, None)


def drop_plans() -> None:
    """Empties the tables of plans and choices: for a new session, other devices, a node's full table of templates."""
    for empty in _plans:
        empty()


def forget_session() -> None:
    """Empties the tables that keep a session alive, after its end."""
    for empty in _places:
        empty()
