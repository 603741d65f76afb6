"""Reading a generator's state, which torch does with the generator locked."""

from __future__ import annotations

import gc

import pytest
import torch
from torch.utils.checkpoint import get_device_states

import disttensor as dt


class Cycle:
    def __init__(self) -> None:
        self.me, self.tensor = self, torch.zeros(2)


@pytest.mark.usefixtures("nodes", "clean")
def test_threads_that_read_it_while_tensors_die_in_collections() -> None:
    """In a collection torch lets go of the GIL: without care a thread of a node and this one wait for each other."""
    x = torch.ones(1, device="node:0")
    before = gc.get_threshold()
    gc.set_threshold(3)
    try:
        for _ in range(100):
            kept = [get_device_states(x)[1][0] for _ in range(20)]  # on the node
            for _ in range(10):
                Cycle()
                torch.get_rng_state()
    finally:
        gc.set_threshold(*before)
    dt.synchronize()
    assert torch.equal(kept[-1].cpu(), torch.get_rng_state())
