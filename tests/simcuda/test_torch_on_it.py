"""torch.cuda, unmodified, on simulated devices, in one process."""

from __future__ import annotations

import pytest
from simcuda_kit import dies, run

pytestmark = [pytest.mark.simcuda, pytest.mark.cold]

BEGIN = "import torch\nfrom torch.nn import functional as F\n"


def test_the_devices_are_there():
    program = BEGIN + "print(torch.cuda.is_available(), torch.cuda.device_count(), torch.cuda.get_device_name(1))"
    assert run(program, kernels=True, devices=2) == "True 2 simcuda device 1\n"


def test_copies_of_any_layout_and_dtype():
    run(
        BEGIN
        + """
for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool):
    x = torch.arange(24).reshape(2, 3, 4).to(dtype)
    for view in (lambda t: t, lambda t: t.transpose(0, 2), lambda t: t[:, ::2], lambda t: t[1, 2, 3], lambda t: t[:0]):
        up = view(x).cuda()
        assert torch.equal(up.cpu(), view(x)) and torch.equal(view(x.cuda()).cpu(), view(x))
        assert torch.equal(up.to("cuda:1").to("cuda:0").cpu(), view(x))
        assert torch.equal(view(x.cuda()).to("cuda:1", torch.float64).cpu(), view(x).to(torch.float64))
        assert torch.equal(view(x.cuda()).to("cpu", torch.float64), view(x).to(torch.float64))
        target = torch.zeros(3, 4, 2, dtype=torch.float64, device="cuda").permute(2, 0, 1)
        target.copy_(x)
        assert torch.equal(target.cpu(), x.to(torch.float64))
pinned = torch.arange(100.0).pin_memory()
up = pinned.to("cuda", non_blocking=True)
down = torch.empty(100, pin_memory=True).copy_(up, non_blocking=True)
torch.cuda.synchronize()
assert torch.equal(down, pinned)
""",
        kernels=True,
        devices=2,
        delay_ms=1,
    )


def test_a_missing_wait_is_seen_each_time():
    run(
        BEGIN
        + """
seen = 0
for k in range(4):
    torch.cuda._sleep(200_000_000)  # longer than any delay of the other stream's
    x = torch.empty(1000, device="cuda").fill_(k)
    y = torch.empty(1000, pin_memory=True)
    y.copy_(x, non_blocking=True)
    seen += not torch.equal(y, torch.full((1000,), float(k)))
    torch.cuda.synchronize()
    assert torch.equal(y, torch.full((1000,), float(k)))
    side = torch.cuda.Stream()
    torch.cuda._sleep(200_000_000)
    x = torch.empty(1000, device="cuda").fill_(k)
    with torch.cuda.stream(side):
        seen += not torch.equal(x.cpu(), torch.full((1000,), float(k)))
        side.wait_stream(torch.cuda.default_stream())
        assert torch.equal(x.cpu(), torch.full((1000,), float(k)))
assert seen == 8, seen
""",
        kernels=True,
    )


def test_a_missing_record_stream_is_seen():
    run(
        BEGIN
        + """
side = torch.cuda.Stream()
def use(recorded):
    x = torch.full((1000,), 3.0, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)
        y = x + 1
    if recorded:
        x.record_stream(side)
    del x
    other = torch.empty(1000, device="cuda")  # takes the block, unless it is still in use
    torch.cuda.synchronize()
    return torch.equal(y.cpu(), torch.full((1000,), 4.0))
assert use(True) and not use(False)
""",
        kernels=True,
    )


def test_memory_that_nothing_has_written_shows_the_pattern():
    run(
        BEGIN
        + """
for _ in range(2):  # the second time it is a block that was free
    assert torch.empty(99, device="cuda").isnan().all().item()
    assert torch.empty(99, dtype=torch.bfloat16, device="cuda").isnan().all().item()
    assert (torch.empty(99, dtype=torch.uint8, device="cuda") == 0xA5).all().item()
    torch.ones(99, device="cuda")
assert torch.empty(99, pin_memory=True).isnan().all()
""",
        kernels=True,
    )


def test_the_host_does_not_touch_a_tensor():
    program = BEGIN + "import ctypes\nx = torch.ones(4, device='cuda')\ntorch.cuda.synchronize()\n"
    assert "the host reads device memory" in dies(program + "ctypes.string_at(x.data_ptr(), 4)", kernels=True)


def test_a_kernel_of_torch_itself_aborts_by_name():
    said = dies(BEGIN + "torch.ones(4).cuda() + 1")
    assert "a launch of void at::native::" in said
    assert "which nobody has replaced" in said


def test_what_the_cpu_has_no_kernel_for_raises_by_name():
    refused = """
try:
    torch.ops.aten._cudnn_init_dropout_state(0.5, True, 0, dtype=torch.uint8, device="cuda")
except NotImplementedError as error:
    print(error)
try:
    torch.ones(4, 4, device="cuda").to_sparse()
except NotImplementedError as error:
    print(error)
"""
    said = run(BEGIN + refused, kernels=True).splitlines()
    assert "simcuda has no kernel for aten::_cudnn_init_dropout_state" in said[0]
    assert "simcuda has no tensors of layout torch.sparse" in said[1]


def test_memory_statistics_peaks_and_out_of_memory():
    run(
        BEGIN
        + """
M = 1 << 20
assert torch.cuda.mem_get_info()[1] == 64 * M
x = torch.empty(20 * M, dtype=torch.uint8, device="cuda")
y = torch.empty(20 * M, dtype=torch.uint8, device="cuda")
assert torch.cuda.memory_allocated() == 40 * M and torch.cuda.mem_get_info()[0] == 24 * M
del y
assert torch.cuda.memory_allocated() == 20 * M and torch.cuda.max_memory_allocated() == 40 * M
assert torch.cuda.memory_reserved() == 40 * M
torch.cuda.empty_cache()
assert torch.cuda.mem_get_info()[0] == 44 * M
try:
    torch.empty(50 * M, dtype=torch.uint8, device="cuda")
except torch.OutOfMemoryError as error:
    assert "total capacity of 64.00 MiB of which 44.00 MiB is free" in str(error), error
else:
    raise AssertionError
assert x.fill_(1).sum().item() == 20 * M
""",
        kernels=True,
        memory="64M",
    )


def test_an_error_sticks():
    run(
        BEGIN
        + """
x = torch.zeros(3, device="cuda")
y = x + 1
for _ in range(2):
    try:
        torch.cuda.synchronize()
    except torch.AcceleratorError as error:
        assert "an illegal memory access was encountered" in str(error)
    else:
        raise AssertionError
""",
        kernels=True,
        fail_task=2,
    )


def test_generators_of_devices_draw_by_their_seed_and_state():
    run(
        BEGIN
        + """
torch.manual_seed(5)
a, b = torch.randn(50, device="cuda"), torch.randn(50, device="cuda")
other = torch.randn(50, device="cuda:1")
assert not torch.equal(a.cpu(), b.cpu()) and torch.equal(a.cpu(), other.cpu())
torch.cuda.manual_seed(5)
assert torch.equal(torch.randn(50, device="cuda").cpu(), a.cpu())
state = torch.cuda.get_rng_state()
c = F.dropout(torch.ones(50, device="cuda"))
torch.cuda.set_rng_state(state)
assert torch.equal(F.dropout(torch.ones(50, device="cuda")).cpu(), c.cpu())
own = torch.Generator("cuda").manual_seed(5)
assert torch.equal(torch.randn(50, generator=own, device="cuda").cpu(), a.cpu())
before = torch.get_rng_state()
torch.rand(5, device="cuda"); torch.cuda.synchronize()
assert torch.equal(torch.get_rng_state(), before), "the CPU's own is left alone"
""",
        kernels=True,
        devices=2,
    )


def test_models_train_to_the_same_numbers():
    run(
        BEGIN
        + """
import copy
from torch import nn
torch.manual_seed(0)
class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(6, 4)
    def forward(self, x):
        return self.lstm(x)[0]
class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q = nn.Linear(6, 6)
    def forward(self, x):
        return F.scaled_dot_product_attention(self.q(x), x, x, is_causal=True)
images, rows, series = torch.randn(2, 3, 8, 8), torch.randn(8, 6), torch.randn(3, 2, 6)
cases = [
    (nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 3)),
     images),
    (nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.GELU(), nn.Linear(5, 3)), rows),
    (Recurrent(), series),
    (Attention(), series),
]
for model, x in cases:
    for kind in (torch.optim.SGD, torch.optim.AdamW):
        ends = []
        for device in ("cpu", "cuda"):
            own = copy.deepcopy(model).to(device)
            optimizer = kind(own.parameters(), lr=0.1)
            for _ in range(2):
                optimizer.zero_grad()
                loss = own(x.to(device)).square().mean()
                loss.backward()
                optimizer.step()
            ends.append([loss.detach().cpu(), *(p.detach().cpu() for p in own.parameters())])
        torch.testing.assert_close(ends[0], ends[1])
with torch.autocast("cuda", dtype=torch.bfloat16):
    assert (torch.ones(3, 3, device="cuda") @ torch.ones(3, 3, device="cuda")).dtype == torch.bfloat16
""",
        kernels=True,
        delay_ms=0,
    )


def test_a_graph_is_captured_and_replayed():
    run(
        BEGIN
        + """
x = torch.arange(4.0, device="cuda")
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    y = (x * 2 + 1).sin()
for k in range(3):
    x.fill_(k)
    graph.replay()
    torch.testing.assert_close(y.cpu(), torch.full((4,), k * 2.0 + 1).sin())
try:
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        x.sum().item()
except torch.AcceleratorError as error:
    assert "captur" in str(error)
else:
    raise AssertionError
""",
        kernels=True,
    )


def test_other_streams_and_events():
    run(
        BEGIN
        + """
a, b = torch.cuda.Stream(), torch.cuda.Stream()
begun, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
begun.record()
with torch.cuda.stream(a):
    x = torch.ones(100, device="cuda")
    for _ in range(10):
        x = x + 1
    done = a.record_event()
with torch.cuda.stream(b):
    b.wait_event(done)
    y = x * 2
    x.record_stream(b)
torch.cuda.current_stream().wait_stream(b)
ended.record()
assert torch.equal(y.cpu(), torch.full((100,), 22.0))
ended.synchronize()
assert begun.elapsed_time(ended) > 0 and done.query()
""",
        kernels=True,
    )


def test_after_an_error_nobody_writes_what_was_given_back():
    """A copy to the host is under way when another stream fails: who waits for it raises, and its memory goes."""
    said = run(
        BEGIN
        + """
side = torch.cuda.Stream()
x = torch.ones(64 << 20, device="cuda")
bad = torch.tensor([7], device="cuda")
torch.cuda.synchronize()
with torch.cuda.stream(side):
    torch.cuda._sleep(20_000_000)
    torch.ones(3, device="cuda")[bad]
try:
    for _ in range(100):
        x.cpu()
except torch.AcceleratorError as error:
    print("unspecified launch failure" in str(error))
try:
    torch.ones(3, device="cuda")
except torch.AcceleratorError as error:
    print("unspecified launch failure (719)" in str(error))
""",
        kernels=True,
        delay_ms=0,
    )
    assert said == "True\nTrue\n"
