"""The script and functions on nodes, from where what the script holds for all is used with the same meaning."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

import disttensor as dt


def here(fn: Callable[..., Any], *args: Any) -> Any:
    return fn(*args)


def on_node(fn: Callable[..., Any], *args: Any) -> Any:
    return dt.run(fn, *args, node=1)


FROM = pytest.mark.parametrize("at", [here, on_node])


def await_waits(handle: Any, count: int = 1) -> None:
    """Waits until so many wait for what the script holds for all, which nobody is told."""
    while len(handle._holder.caller.objects._waits) < count:
        time.sleep(0.001)
