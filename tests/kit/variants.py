"""Variants of a test: which are in every run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def mostly_slow(values: Iterable[Any], fast: int) -> list[Any]:
    """Values for parametrize (tuples for several names): the first ones in every run; the others, which take seconds
    each and differ little, in ``make slow``."""
    first, others = (values := list(values))[:fast], values[fast:]
    sets = [other if isinstance(other, tuple) else (other,) for other in others]
    return [*first, *(pytest.param(*each, marks=pytest.mark.slow) for each in sets)]
