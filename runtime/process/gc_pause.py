"""Pauses Python's garbage collector for a while."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.RLock()
_holders = 0
_before = True


@contextmanager
def no_collection() -> Iterator[None]:
    """Disables the garbage collector until every holder has left; then it is enabled again, if it was before."""
    global _holders, _before
    with _lock:
        if not _holders:
            _before = gc.isenabled()
            gc.disable()
        _holders += 1
    try:
        yield
    finally:
        with _lock:
            _holders -= 1
            if not _holders and _before:
                gc.enable()
