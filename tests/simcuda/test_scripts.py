"""A script on a machine with GPUs, beside its nodes."""

from __future__ import annotations

import pytest
from simcuda_kit import run

pytestmark = [pytest.mark.simcuda, pytest.mark.cold]


@pytest.mark.slow
def test_a_session_has_a_node_for_each_gpu():
    """Where the script does not say how many. Before it, channels are said to have GPUs."""
    run(
        """
import disttensor as dt
table = dt.channels.available()
assert table["all_reduce", "cuda", "nccl"].state == "native", table
assert table["send", "cuda", "tcp"].state == "available", table
with dt.init_master_worker(launcher="inproc"):
    assert len(dt.nodes()) == 3
""",
        kernels=True,
        devices=3,
    )


@pytest.mark.slow
def test_the_accelerator_of_a_script_with_a_gpu_is_that():
    """Before a session, in it and after it, with ``torch.Event`` and ``torch.Stream``: nodes are in addition to it."""
    run(
        """
import torch
import disttensor as dt

def asked():
    accelerator = torch.accelerator
    assert accelerator.current_accelerator() == torch.device("cuda")
    assert accelerator.is_available() and accelerator.device_count() == 2
    x = torch.zeros(1000, device="cuda:1")
    accelerator.set_device_index(1)
    assert accelerator.current_device_index() == torch.cuda.current_device() == 1
    assert accelerator.memory_allocated() == torch.cuda.memory_allocated(1) > 0
    accelerator.synchronize()
    stream, default, event = torch.Stream("cuda:1"), accelerator.current_stream(), torch.Event("cuda:1")
    for one in (stream, torch.cuda.Stream(1)):  # docs/DIFFERENT.md
        try:
            with one:
                pass
        except RuntimeError as error:
            assert "node devices" in str(error) or "accelerator NODE" in str(error), error
        else:
            raise AssertionError("torch does it: docs/DIFFERENT.md may lose some words")
    accelerator.set_stream(stream)
    torch.cuda._sleep(100_000_000)
    x.fill_(7)
    done = stream.record_event()
    assert not done.query()
    torch.cuda._sleep(100_000_000)
    x.add_(1)
    event.record(stream)
    accelerator.set_stream(default)
    default.wait_event(event)
    torch.testing.assert_close((x * 2).cpu(), torch.full((1000,), 16.0))
    assert event.query() and done.query()
    accelerator.set_device_index(0)
    assert torch.cuda.current_device() == 0

asked()
with dt.init_master_worker(nodes=1, launcher="local", threads=1):
    asked()
    torch.testing.assert_close((torch.ones(3).to("node:0") + 1).cpu(), torch.full((3,), 2.0))
asked()
""",
        kernels=True,
        devices=2,
        delay_ms=1,
    )


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
