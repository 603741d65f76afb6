"""Spies: a method of one object is replaced for a test, in its class, as the object itself may have slots."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


def spy(monkeypatch: pytest.MonkeyPatch, owner: object, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """Calls of ``owner.name`` come to ``method``, those of other objects of its class to what they came to before.

    Returns the method as it was, for ``method`` to call.
    """
    before = getattr(type(owner), name)

    def called(self: object, *args: Any, **options: Any) -> Any:
        return method(*args, **options) if self is owner else before(self, *args, **options)

    monkeypatch.setattr(type(owner), name, called)
    bound: Callable[..., Any] = before.__get__(owner)
    return bound
