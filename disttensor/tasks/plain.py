"""Plain data: numbers, text and bytes, and tuples, lists and dicts of them, which any pickler makes the same of."""

from __future__ import annotations

from types import NoneType
from typing import Any

_ATOMS = frozenset({NoneType, bool, int, float, complex, str, bytes})
#: How deep plain data may be (a list that has itself has no end), and how many values may lie beside each other at a
#: depth, where there are containers among them; each counts as often as it is met.
DEEPEST, WIDEST = 8, 10_000


def is_plain(value: Any) -> bool:
    """Returns whether a value is plain data. Objects of classes that inherit from its classes are not, and what is very
    deep or wide does not count as such."""
    kind = type(value)
    if kind in _ATOMS or (kind is tuple and _ATOMS.issuperset(map(type, value))) or (kind is dict and not value):
        return True  # most arguments
    level: list[Any] = [value]
    for _ in range(DEEPEST):
        below: list[Any] = []
        for each in level:
            kind = type(each)
            if kind is tuple or kind is list:
                parts: tuple[Any, ...] = (each,)
            elif kind is dict:
                parts = each, each.values()
            elif kind in _ATOMS:
                continue
            else:
                return False
            for part in parts:
                if not _ATOMS.issuperset(map(type, part)):  # without a loop of bytecodes: there may be many
                    below += part
            if len(below) > WIDEST:
                return False
        if not below:
            return True
        level = below
    return False
