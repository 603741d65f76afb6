"""Variants of a test that cost seconds each: which are in every run, by one rule."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

#: Of the variants behind the first, one in so many is in every run.
EVERY = 4


def variants(values: Iterable[Any]) -> list[Any]:
    """Values for parametrize (tuples for several names): the first, which is the ordinary case, is in every run, and so
    is every fourth of the others, by a hash of its name; the rest is in ``make slow``, or an engine's ``CASES=``."""
    first, *others = values
    return [first, *(pytest.param(*_tuple(v), marks=[] if chosen(v) else pytest.mark.slow) for v in others)]


def chosen(value: Any) -> bool:
    """Whether a variant is in every run."""
    return hashlib.sha256(_name(value).encode()).digest()[0] % EVERY == 0


def _tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def _name(value: Any) -> str:
    """What stays the same from run to run."""
    if isinstance(value, (tuple, list)):
        return " ".join(map(_name, value))
    if isinstance(value, Path):
        return value.name
    return str(getattr(value, "__name__", value))
