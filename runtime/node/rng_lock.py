"""Reads the state of the CPU's default generator so that threads can't lock each other out.

``torch.Generator.get_state`` holds the generator's mutex while it makes its tensor. That may start a collection, in
which torch lets go of the GIL; a thread that wants the mutex then waits for it with the GIL in its hands, and both wait
for ever (CPython 3.11, torch 2.13: `THPVariable_clear` below `THPGenerator_getState`). So no collection may run
meanwhile.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ..process.gc_pause import no_collection

_lock = threading.RLock()


def get_rng_state() -> torch.Tensor:
    """Returns what ``torch.get_rng_state`` does, without that deadlock."""
    with _lock, no_collection():
        return torch.default_generator.get_state()


@contextmanager
def guarded() -> Iterator[None]:
    """Replaces ``torch.get_rng_state`` by ``get_rng_state`` in this process, for nodes that are threads of it."""
    original = torch.get_rng_state
    torch.get_rng_state = torch.random.get_rng_state = get_rng_state
    try:
        yield
    finally:
        torch.get_rng_state = torch.random.get_rng_state = original
