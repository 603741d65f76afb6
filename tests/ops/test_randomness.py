"""The generator that a script has together with nodes that are threads of its process."""

from __future__ import annotations

import gc
import threading

import pytest
import torch
from torch.utils.checkpoint import get_device_states

import disttensor as dt

#: Set when the script has drawn.
drawn = threading.Event()


def until_drawn() -> None:
    drawn.wait(0.3)


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


@pytest.mark.usefixtures("nodes", "clean")
@pytest.mark.parametrize("of_one_node", [False, True])
def test_what_the_script_draws_behind_a_seed(of_one_node: bool) -> None:
    """No node seeds the generator once more in the midst of it, however late it comes to that."""
    plain = torch.Generator().manual_seed(3)
    drawn.clear()
    dt.submit(until_drawn, node=1)
    if of_one_node:
        with dt.node(1):
            torch.node.manual_seed(3)
    else:
        torch.manual_seed(3)
    first = torch.rand(4)
    drawn.set()
    dt.synchronize()
    assert [*first.tolist(), *torch.rand(4).tolist()] == torch.rand(8, generator=plain).tolist()
