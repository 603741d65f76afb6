"""What is put between local torch and its own functions during a session."""

from __future__ import annotations

import pytest
import torch

import disttensor as dt
from disttensor import engine
from disttensor.local import _pin_memory


@pytest.mark.parametrize("accelerator", [None, torch.device("cuda")])
def test_pinning_is_the_local_accelerators(accelerator: torch.device | None) -> None:
    asked = []

    def original(self: torch.Tensor, device: torch.device) -> torch.Tensor:
        asked.append(device)
        return self

    pin = _pin_memory(original, accelerator)
    if accelerator is None:
        with pytest.raises(RuntimeError, match="when none is available"):
            pin(torch.ones(2))
    else:
        pin(torch.ones(2))
        assert asked == [accelerator]


def test_which_backwards_meet_nodes() -> None:
    """Of those that don't, torch's threads are left as they are."""
    with dt.init_master_worker(nodes=2, launcher="inproc"):
        x = torch.ones(3, requires_grad=True)
        remote = x.to("node:1") * 2
        edge = torch.autograd.graph.get_gradient_edge
        for root in (remote, remote.cpu(), remote.cpu().exp() + x.sin(), remote.detach().requires_grad_()):
            assert engine.reaches_a_node([x, root])
            assert engine.reaches_a_node([edge(root)])
        for root in (x, x.exp(), (x * x).sin(), remote.detach().cpu() * x):
            assert not engine.reaches_a_node([root])
            assert not engine.reaches_a_node([edge(root)])
