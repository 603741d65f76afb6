"""What is put between local torch and its own functions during a session."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Callable

import pytest
import torch
from stream_kit import busy

import disttensor as dt
from disttensor.runtime.protocol import commands as c
from disttensor.testing import MessageLog
from disttensor.torch_backend import backward, keep_local_accelerator

Script = Callable[..., subprocess.CompletedProcess[str]]


@pytest.mark.parametrize("accelerator", [None, torch.device("cuda")])
def test_pinning_is_the_local_accelerators(accelerator: torch.device | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keep_local_accelerator, "current", lambda: accelerator)
    asked = []

    def original(self: torch.Tensor, device: torch.device) -> torch.Tensor:
        asked.append(device)
        return self

    pin = keep_local_accelerator.pin_memory(original)
    if accelerator is None:
        with pytest.raises(RuntimeError, match="when none is available"):
            pin(torch.ones(2))
    else:
        pin(torch.ones(2))
        assert asked == [accelerator]


@pytest.mark.parametrize(
    ("accelerator", "named", "taken"),
    [("node", "undefined", "cpu:gloo"), ("node", "nccl", "nccl"), ("cuda", "undefined", "undefined"), (None, "", "")],
)
def test_process_groups_are_of_this_process(
    accelerator: str | None, named: str, taken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch 2.15 asks for the accelerator where no backend is named."""
    given: list[str] = []
    monkeypatch.setattr(keep_local_accelerator, "current", lambda: accelerator and torch.device(accelerator))
    init = keep_local_accelerator.default_backend(lambda self, backend: given.append(backend))
    init(None, named)
    assert given == [taken]


needs_none = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has an accelerator of its own")


@needs_none
def test_a_program_that_asks_for_the_accelerator_trains_on_a_node() -> None:
    """The device is chosen as in the tutorials of PyTorch."""

    def train() -> list[float]:
        device = torch.accelerator.current_accelerator().type if torch.accelerator.is_available() else "cpu"
        torch.manual_seed(0)
        data = torch.utils.data.TensorDataset(torch.randn(24, 4), torch.randint(3, (24,)))
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3)).to(device)
        optimizer, losses = torch.optim.Adam(model.parameters(), lr=0.1), []
        for x, y in torch.utils.data.DataLoader(data, batch_size=8, pin_memory=device != "cpu"):
            loss = torch.nn.functional.cross_entropy(model(x.to(device)), y.to(device))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            seen.add(loss.device.type)
        return losses

    seen: set[str] = set()
    local = train()
    # Processes: nodes that are threads of this one seed its generator, too, while it draws its data.
    with dt.init_master_worker(nodes=2, threads=1):
        assert train() == pytest.approx(local, rel=1e-5)
    assert train() == local
    assert seen == {"cpu", "node"}


@needs_none
def test_the_accelerator_is_the_nodes() -> None:
    acc = torch.accelerator
    before = acc.current_accelerator()  # of a torch that is built for one it is that, there or not
    assert acc.current_accelerator(check_available=True) is None
    for _ in range(2):  # what one session sets is not the next one's
        with dt.init_master_worker(nodes=3, launcher="inproc"):
            assert acc.current_accelerator(check_available=True) == torch.device("node")
            assert acc.device_count() == 3
            assert acc.current_device_index() == 0
            assert acc.current_stream() == torch.node.default_stream(0)
            assert not acc.current_stream().is_capturing()  # as optimizers ask since torch 2.15
            with acc.device_index(2):
                assert torch.ones(1, device="node").get_node() == dt.session.current_node() == 2
                acc.set_device_index(1)
                assert torch.ones(1).to("node").get_node() == 1
            assert dt.session.current_node() == 0
            acc.set_device_index("node:1")
            assert acc.current_device_index() == 1
            own = torch.node.Stream(2)
            acc.set_stream(own)
            assert acc.current_stream() == acc.current_stream("node:2") == own
            assert torch.ones(1, device="node").get_node() == 2
            with MessageLog() as log:
                assert (torch.ones(2, device="node:2") * 3).tolist() == [3, 3]
            assert any(isinstance(command, c.On) for command in log.issued()[2])
            acc.synchronize()
            acc.synchronize("node:1")
            acc.empty_cache()
            if hasattr(acc, "empty_host_cache"):  # torch 2.12
                acc.empty_host_cache()
            with pytest.raises(ValueError, match="5"):
                acc.set_device_index(5)
            acc.reset_peak_memory_stats(1)
            x = torch.ones(100, device="node:1")
            assert acc.memory_allocated(1) == acc.max_memory_allocated(1) == torch.node.max_memory_allocated(1) >= 400
            assert acc.memory_stats(1).keys() == torch.node.memory_stats(1).keys()
            assert acc.get_memory_info(1)[1] == torch.node.mem_get_info(1)[1]
            acc.reset_accumulated_memory_stats(1)
            del x
    assert acc.current_accelerator() == before
    if before is None:
        with pytest.raises(RuntimeError, match="none is available"):
            acc.synchronize()


@pytest.mark.parametrize(("there", "said"), [(True, "cuda cuda cuda cuda"), (False, "cuda cpu node cpu")])
def test_an_accelerator_of_this_machine_stays_the_accelerator(script: Script, there: bool, said: str) -> None:
    """Not one that torch is built for, and that is not there."""
    done = script(
        f"""
import torch
torch.cuda.is_available = lambda: {there}
torch.accelerator.current_accelerator = lambda: torch.device("cuda")  # as seen by the import
import disttensor as dt
print(torch._C._accelerator_getAccelerator(), torch._C._get_accelerator())
with dt.init_master_worker(nodes=1, launcher="inproc"):
    print(torch._C._accelerator_getAccelerator(), torch._C._get_accelerator())
"""
    )
    assert done.stdout.split() == said.split(), done.stderr


def test_which_backwards_meet_nodes() -> None:
    """Of those that don't, torch's threads are left as they are."""
    with dt.init_master_worker(nodes=2, launcher="inproc"):
        x = torch.ones(3, requires_grad=True)
        remote = x.to("node:1") * 2
        edge = torch.autograd.graph.get_gradient_edge
        for root in (remote, remote.cpu(), remote.cpu().exp() + x.sin(), remote.detach().requires_grad_()):
            assert backward.reaches_a_node([x, root])
            assert backward.reaches_a_node([edge(root)])
        for root in (x, x.exp(), (x * x).sin(), remote.detach().cpu() * x):
            assert not backward.reaches_a_node([root])
            assert not backward.reaches_a_node([edge(root)])


# ---- torch.Event and torch.Stream ------------------------------------------------------------------------------------


@pytest.mark.parametrize("named", [True, pytest.param(False, marks=needs_none)])
def test_torchs_event_waits_for_a_node(named: bool) -> None:
    """Torch's own does nothing for it: what is written to memory after the wait was read by the node."""
    at = {"device": "node:1"} if named else {}
    with dt.init_master_worker(nodes=2, launcher="inproc"), dt.node(1):
        stream, event = torch.Stream(**at), torch.Event(**at, enable_timing=True)
        assert stream.device == torch.device("node:1")
        with stream as entered:
            assert torch.node.current_stream() == stream == entered
            first = stream.record_event(torch.Event(**at, enable_timing=True))
            with busy(stream):
                event.record()
                assert not event.query()
                assert not stream.query()
        assert torch.node.current_stream() != stream
        event.synchronize()
        assert event.query()
        assert first.elapsed_time(event) > 0
        stream.synchronize()
        for made, kind, own in (event, torch.Event, torch.node.Event), (stream, torch.Stream, torch.node.Stream):
            assert type(made) is own
            assert isinstance(made, kind)
            assert issubclass(own, kind)


def test_torchs_streams_nest_and_end_where_an_error_passes() -> None:
    with dt.init_master_worker(nodes=2, launcher="inproc"):
        first, second = torch.Stream("node:0"), torch.Stream(torch.device("node:0"), priority=-1)
        assert second.priority == -1
        with first:
            with contextlib.suppress(KeyError), second, first:
                assert torch.node.current_stream() == first
                raise KeyError
            assert torch.node.current_stream() == first
        assert torch.node.current_stream() == torch.node.default_stream(0)
        with pytest.raises(NotImplementedError, match="interprocess"):
            torch.Event("node:0", interprocess=True)
        with pytest.raises(NotImplementedError, match=r"torch\.node\.Stream"):
            torch.Stream(stream_id=0, device_index=1, device_type=torch._C._autograd.DeviceType.PrivateUse1.value)
        with pytest.raises((ValueError, RuntimeError), match="5"):
            torch.Stream("node:5")
    with pytest.raises(dt.DisttensorError, match="init_master_worker"):
        torch.Stream("node:0")


class MyEvent(torch.Event):
    """A library's, as torch's own for CUDA is."""


def test_torchs_events_of_other_devices_are_torchs() -> None:
    assert isinstance(MyEvent("meta"), torch.Event)
    assert not isinstance(torch.Event("meta"), MyEvent)
    assert not isinstance(object(), (torch.Event, torch.Stream))
    assert type(torch.Event("meta")) is torch._C.Event
    assert issubclass(torch._C.Stream, torch.Stream)
    assert torch.Stream(stream_id=0, device_index=0, device_type=0).device.type == "cpu"
    with pytest.raises((RuntimeError, TypeError)):
        torch.Event("no such device")
    with pytest.raises(TypeError):
        torch.Event(of="nothing")
