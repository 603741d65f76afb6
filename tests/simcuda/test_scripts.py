"""A script on a machine with GPUs, beside its nodes."""

from __future__ import annotations

import pytest
from simcuda_kit import run

pytestmark = [pytest.mark.simcuda, pytest.mark.cold]


def test_a_backward_on_the_script_s_own_gpu():
    """torch refuses it beside the device "node" (docs/DIFFERENT.md), before a session and in it. A node does it."""
    run(
        """
import torch
import disttensor as dt

def trained(x):
    (x @ x.t()).tanh().square().mean().backward()
    return x.grad.cpu()

def refused(words):
    x = torch.ones(4, 3, device="cuda")
    torch.testing.assert_close((x @ x.t()).cpu(), torch.full((4, 4), 3.0))
    try:
        trained(x.requires_grad_())
    except RuntimeError as error:
        assert words in str(error), error
    else:
        raise AssertionError("torch does it: docs/DIFFERENT.md may lose a line")

x = torch.arange(12.0).view(4, 3)
refused("PyTorch is not linked with support for node devices")
with dt.init_master_worker(nodes=1, launcher="local", threads=1):
    refused("opt_ready_stream")
    there = trained(x.to(dt.device(0, "cuda:0")).requires_grad_())
    torch.testing.assert_close(there, trained(x.clone().requires_grad_()))
""",
        kernels=True,
        visible="0",
        delay_ms=1,
    )
