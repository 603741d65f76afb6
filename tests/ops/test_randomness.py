"""Reading a generator's state, which torch does with the generator locked."""

from __future__ import annotations

import gc

import pytest
import torch

import disttensor as dt
from disttensor import generators, state


class Cycle:
    def __init__(self) -> None:
        self.me, self.tensor = self, torch.zeros(2)


@pytest.mark.usefixtures("nodes", "clean")
def test_threads_that_read_it_while_tensors_die_in_collections() -> None:
    """In a collection torch lets go of the GIL: without care a thread of a node and this one wait for each other."""
    place = state.session().places.at(0)
    before = gc.get_threshold()
    gc.set_threshold(3)
    try:
        for _ in range(100):
            kept = [generators.keep(place) for _ in range(20)]
            for _ in range(10):
                Cycle()
                torch.get_rng_state()
    finally:
        gc.set_threshold(*before)
    dt.synchronize()
    assert torch.equal(kept[-1].cpu(), torch.get_rng_state())
