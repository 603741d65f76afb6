"""How many inputs tests of one rule try: all of them in `make test`, some in `make unit`, which is for every edit."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TypeVar

#: `make unit` sets it.
QUICK = bool(os.environ.get("DISTTENSOR_TESTS_QUICK"))

T = TypeVar("T")


def inputs(count: int) -> int:
    """``count``, and a fifth of it in ``make unit``."""
    return max(1, count // 5) if QUICK else count


def some(values: Sequence[T]) -> Sequence[T]:
    """All of these values for parametrize, and the first one in ``make unit``."""
    return values[:1] if QUICK else values
