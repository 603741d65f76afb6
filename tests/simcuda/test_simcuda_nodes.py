"""Scripts whose nodes have simulated GPUs: what a session does there, compared with local torch on the CPU.

Each program is a process of its own, with a session of its own; those that are not in the smoke are marked slow, whose
rule is in docs/dev/simcuda.md.
"""

from __future__ import annotations

from typing import Any

import pytest
from simcuda_kit import environment, run_script, run_session

pytestmark = [pytest.mark.simcuda, pytest.mark.cold]

#: What the programs have besides ``torch``, ``dt`` and ``session``.
BEGIN = """
import ctypes, os, tempfile
from torch import nn
from torch.nn import functional as F
M = 1 << 20
close = torch.testing.assert_close
def same(remote, local):
    assert remote.device.type == "node", remote.device
    close(remote.cpu(), local, rtol=0, atol=0)
def slowly(*tensors):
    # keeps the current stream busy for longer than delays may be, and gives what it made of the tensors after that
    torch.cuda._sleep(60_000_000)
    return tuple(x * 2 for x in tensors)
"""

PROGRAMS: dict[str, tuple[dict[str, Any], str]] = {}
#: The programs of the smoke.
SMOKE = {"functions", "shm", "streams"}

#: Tensors of all kinds, up, across in both ways and down; the buffers that carry them are used again.
ACROSS = """
tensors = [
    torch.arange(float(1 << 18)), torch.zeros(()), torch.zeros(1), torch.empty(0, 3), torch.arange(10),
    torch.randn(300, 300).t(), torch.randn(5, dtype=torch.complex64).conj(), torch.tensor([True, False]),
    torch.randn(3, 4, 5)[:, ::2], torch.randn(1 << 19).to(torch.bfloat16), torch.full((1 << 18,), 7, dtype=torch.uint8),
]
for turn in range(4):
    for x in tensors:
        x = x + turn if x.dtype != torch.bool else x
        a = x.to("node:0")
        b = (a * 1).to("node:1")
        c = (b * 1).to("node:0")
        same(b, x * 1)
        same(c, x * 1)
big = torch.randn(1 << 19)
pairs = [(big + k).to("node:0") for k in range(6)]
there = [(x * 2).to("node:1") for x in pairs]  # under way together, beside what comes back
back = [(y + 1).to("node:0") for y in there]
for k, y in enumerate(back):
    same(y, (big + k) * 2 + 1)
"""
PROGRAMS["shm"] = (
    {"delay_ms": 1},
    ACROSS
    + """
def buffers():
    import gc
    from disttensor.runtime.channel.shm.cuda_ipc import CudaSharing
    return sum(len(end._theirs) for end in gc.get_objects() if type(end) is CudaSharing)
assert all(count > 0 for count in dt.run(buffers, node=[0, 1], distributed=True)), "nothing went by CUDA IPC"
""",
)
PROGRAMS["tcp"] = (
    {"backend": "tcp", "delay_ms": 1},
    ACROSS
    + """
batches = [(torch.full((1 << 17,), float(k)), k) for k in range(8)]
for (x, k), (local, _) in zip(dt.data.prefetch(batches, "node:1", depth=3), batches):
    same(x * 2, local * 2)
uploads = [local.to("node:0", non_blocking=True) for local, _ in batches]
fetched = [dt.fetch(x + 1) for x in uploads]
for work, (local, _) in zip(fetched, batches):
    close(work.result(), local + 1)
def pinned():
    # torch's pool of pinned memory: a block is used again when the copies from it are done, and not before
    x = torch.zeros(1 << 16, device="cuda")
    totals = []
    for k in range(20):
        block = torch.empty(1 << 16, pin_memory=True).fill_(k)
        totals.append(x + block.to("cuda", non_blocking=True))
        del block
    return [t[0].item() for t in totals], [t[-1].item() for t in totals]
assert dt.run(pinned, node=0) == ([float(k) for k in range(20)],) * 2
""",
)
PROGRAMS["no_peers"] = (
    {"devices": 2, "peers": 0, "visible": "0,1", "delay_ms": 1},
    "assert dt.run(lambda: os.environ['CUDA_VISIBLE_DEVICES'], node=[0, 1], distributed=True) == ['0', '1']\n" + ACROSS,
)

PROGRAMS["streams"] = (
    {},
    """
x = torch.arange(float(1 << 14))
a = x.to("node:0")
s, t = dt.Stream(0), dt.Stream(1)
with dt.stream(s):
    y = a
    for _ in range(5):
        y = y + 1
with dt.stream(t):
    z = y.to("node:1") * 2  # made by a stream of another node
same(z, (x + 5) * 2)
same(y - 1, x + 4)
for k in range(3):
    s.synchronize()
    assert s.query(), "it was waited for"
    with dt.stream(s):
        dt.run(slowly, node=0)
        a.add_(1)
        written = s.record_event()
    dt.streams.default_stream(0).wait_event(written)
    with dt.stream(t):
        b = a.to("node:1") + k
        t.wait_event(written)
        c = b * 1
    same(c, x + k + 1 + k)
    t.synchronize()
    assert written.query() and t.query()
start, end = dt.Event(enable_timing=True), dt.Event(enable_timing=True)
with dt.stream(s):
    start.record()
    dt.run(slowly, node=0)
    end.record()
end.synchronize()
assert start.elapsed_time(end) > 50
for k in range(3):  # streams that come and go, and what they have made stays
    one = dt.Stream(0)
    with dt.stream(one):
        dt.run(slowly, node=0)
        made = a * k
    del one
    same(made + 1, (x + 3) * k + 1)
""",
)

PROGRAMS["functions"] = (
    {},
    """
x = torch.arange(1000.0)
a = x.to("node:0")
s = dt.Stream(0)
for k in range(3):
    with dt.stream(s):
        (y,) = dt.run(slowly, a + k, node=0)
    same(y + 1, (x + k) * 2 + 1)
    work = dt.submit(slowly, a, node=0, beside=True)
    (z,) = work.result()
    same(z + k, x * 2 + k)
    ref = dt.submit(slowly, a + k, node=0, beside=True)
    (w,) = dt.run(lambda told: tuple(y + 1 for y in told), ref, node=0)
    same(w, (x + k) * 2 + 1)
    (far,) = dt.submit(slowly, a, node=0, beside=True).result()
    same(far.to("node:1") + k, x * 2 + k)
class Counter:
    def __init__(self, start):
        self.total = start * 1
        self.calls = 0
    def add(self, x):
        torch.cuda._sleep(30_000_000)
        self.total += x
        self.calls += 1
        return self.total, self.calls
    def double(self):
        self.total *= 2
        self.calls += 1
counter = dt.actor(Counter, a, node=0)
for k in range(1, 4):
    total, calls = counter.add(a).result()
    same(total - 1, x * (k + 1) - 1)
    assert calls == k
counter.add(a).result()  # the device is at it still, when a node's call comes, on another stream
dt.run(lambda counter: counter.double().result(), counter, node=1)
total, calls = counter.add(a).result()  # on its own stream again
same(total, x * 11)
assert calls == 6
def trained():
    torch.manual_seed(0)
    layer = nn.Linear(4, 2).cuda()
    layer(torch.ones(3, 4, device="cuda")).square().sum().backward()
    return layer.weight.detach(), layer.weight.grad
_, gradient = dt.run(trained, node=0)
close(gradient.cpu(), dt.run(trained, node=1)[1].cpu())
losses = dt.map(lambda k: (torch.ones(4, device="cuda") * k).sum().item(), range(6))
assert list(losses) == [4.0 * k for k in range(6)]
""",
)

PROGRAMS["replays"] = (
    {},
    """
base = torch.arange(1000.0)
x, w = torch.zeros(1000, device="node:0"), torch.ones(1000, device="node:0")
with dt.graph(g := dt.Graph()):
    y = x * 2 + w
    total = y.sum()
s = dt.Stream(0)
g.replay()
view = y[:10]  # what others see gets the new values in place
for k in range(4):
    with dt.stream(s):
        dt.run(slowly, node=0)
        x.copy_(base + k)
        g.replay()  # after what its stream was given
        z = y + 1
        v = view + 1
    local = (base + k) * 2 + 1
    same(z, local + 1)
    same(v, local[:10] + 1)
    same(total, local.sum())
    with dt.stream(s):
        dt.run(slowly, node=0)
        fresh = (base + 2 * k).to("node:0") * 1
    x.copy_(fresh)  # made by a stream
    g.replay()  # on the default one
    with dt.stream(s):
        z, v = y * 1, view * 1
    local = (base + 2 * k) * 2 + 1
    same(z, local)
    same(v, local[:10])
with dt.stream(s):
    (late,) = dt.run(slowly, w, node=0)
with dt.graph(h := dt.Graph()):
    sum_of_two = late + x
    far = sum_of_two.to("node:1") + 1
for k in range(3):
    with dt.stream(s):
        dt.run(slowly, node=0)
        late.fill_(k)
        h.replay()
    same(sum_of_two, base + 6 + k)
    same(far, base + 7 + k)
""",
)

PROGRAMS["two_gpus"] = (
    {"nodes": 1, "devices": 2},
    """
def busy():
    x = torch.ones(1000, device="cuda:1")
    torch.cuda._sleep(2_000_000_000)
    import builtins
    torch.cuda.set_device(1)
    event = builtins.event = torch.cuda.Event()
    event.record()
    torch.cuda.set_device(0)
def done():
    import builtins
    return builtins.event.query()
dt.run(busy, node=0)
dt.synchronize(0)
assert dt.run(done, node=0), "a device that only functions have used"
x = torch.arange(1000.0)
a = x.to(dt.device(0, "cuda:0"))
b = (a * 2).to(dt.device(0, "cuda:1"))
s = dt.Stream(0, "cuda:1")
with dt.stream(s):
    c = b + 1
d = c.to(dt.device(0, "cuda:0")) * 2
same(d, (x * 2 + 1) * 2)
assert dt.run(lambda c, d: (str(c.device), str(d.device)), c, d, node=0) == ("cuda:1", "cuda:0")
e = a.to(dt.device(0, "cpu")) + 1
same(e, x + 1)
""",
)

PROGRAMS["shortage"] = (
    {"nodes": 1, "devices": 2, "memory": "128M", "delay_ms": 1},
    """
one, two = dt.device(0, "cuda:0"), dt.device(0, "cuda:1")
x = torch.zeros(20 * M, dtype=torch.uint8, device=one)
y = torch.zeros(30 * M, dtype=torch.uint8, device=two)
assert torch.node.memory_allocated(one) == 20 * M and torch.node.memory_allocated(two) == 30 * M
z = torch.zeros(40 * M, dtype=torch.uint8, device=one)
assert torch.node.max_memory_allocated(one) == 60 * M
del z
assert torch.node.memory_allocated(one) == 20 * M and torch.node.memory_reserved(one) == 60 * M
torch.node.reset_peak_memory_stats(one)
assert torch.node.max_memory_allocated(one) == 20 * M
assert torch.node.memory_stats(one)["allocated_bytes.all.allocated"] == 60 * M
torch.node.reset_accumulated_memory_stats(one)
assert torch.node.memory_stats(one)["allocated_bytes.all.allocated"] == 0
before, total = torch.node.mem_get_info(one)
torch.node.empty_cache(one)
assert torch.node.mem_get_info(one) == (before + 40 * M, total) and total == 128 * M
assert torch.node.memory_reserved(one) == 20 * M
assert "20.00 MiB in 1 tensor" in torch.node.memory_summary(one), torch.node.memory_summary(one)
def short(device):
    try:
        torch.zeros(110 * M, dtype=torch.uint8, device=device).sum().item()
    except torch.OutOfMemoryError as error:
        return str(error) + "".join(error.__notes__)
    raise AssertionError("there was enough")
for device, held, not_held in ((two, "30.00 MiB in 1 tensor", "20971520"), (one, "20.00 MiB in 1 tensor", "31457280")):
    said = short(device)
    assert held in said, said
    assert not_held not in said, said
    same(torch.ones(3, device=device) + 1, torch.full((3,), 2.0))  # it goes on
with dt.stream(dt.Stream(0, "cuda:1")):
    assert "30.00 MiB in 1 tensor" in short(two)
def in_a_function():
    return torch.zeros(110 * M, dtype=torch.uint8, device="cuda:1")
try:
    dt.run(in_a_function, node=0)
except torch.OutOfMemoryError as error:
    assert "30.00 MiB in 1 tensor" in "".join(error.__notes__), error.__notes__
else:
    raise AssertionError
def of_another_library():
    raise torch.OutOfMemoryError("too little")  # which does not say on which GPU: the current one
try:
    dt.run(of_another_library, node=0)
except torch.OutOfMemoryError as error:
    assert "20.00 MiB in 1 tensor" in "".join(error.__notes__), error.__notes__
else:
    raise AssertionError
del y
assert torch.zeros(110 * M, dtype=torch.uint8, device=two)[:3].cpu().tolist() == [0, 0, 0]
""",
)

PROGRAMS["generators"] = (
    {"devices": 2},
    """
def drawn(seed, offset, n=50):
    return torch.randn(n, generator=torch.Generator().manual_seed((seed * 6364136223846793005 + offset) % (1 << 63)))
for place in ("node:0", dt.device(1, "cuda:1")):
    torch.manual_seed(5)
    a, b = torch.randn(50, device=place), torch.randn(50, device=place)
    same(a, drawn(5, 0))
    same(b, drawn(5, 4))
    state = torch.node.get_rng_state(place)
    c = F.dropout(torch.ones(50, device=place))
    torch.node.set_rng_state(state, place)
    same(F.dropout(torch.ones(50, device=place)), c.cpu())
    assert not torch.equal(F.dropout(torch.ones(50, device=place)).cpu(), c.cpu())
torch.manual_seed(5)
net, x = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)), torch.randn(6, 8)
with torch.autocast("cpu", dtype=torch.bfloat16):
    local = net(x)
net.to("node:1")
with torch.autocast("node", dtype=torch.bfloat16):
    remote = net(x.to("node:1"))
assert remote.dtype == local.dtype == torch.bfloat16
close(remote.detach().cpu(), local.detach(), rtol=0.02, atol=0.02)
remote.float().square().mean().backward()
assert all(p.grad.isfinite().all().item() for p in net.parameters())
""",
)

PROGRAMS["verified"] = (
    {"nodes": 1, "verify": 1.0, "delay_ms": 1},
    """
from disttensor import verify
model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)).to("node:0")
x, y = torch.randn(12, 8).to("node:0"), torch.randint(4, (12,)).to("node:0")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
assert verify.counts().compared["aten::linear"] == 4, verify.counts()
def off(factor):
    import builtins, warnings
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is replaced
        library = builtins.library = torch.library.Library("aten", "IMPL")
        library.impl("tanh", lambda x: torch.sigmoid(x * 2) * (2 * factor) - factor, "CUDA")
dt.run(off, 1.001, node=0)
assert 5e-4 < (x.tanh().cpu() / x.cpu().tanh() - 1).abs().max() < 2e-3  # as a GPU's kernel may be, and a CPU's may not
dt.run(off, 1.05, node=0)
try:
    x.tanh()
except verify.VerifyError as error:
    assert "aten::tanh" in str(error) and "on node 0 cuda:0" in str(error), error
else:
    raise AssertionError
""",
)

PROGRAMS["meshes"] = (
    {"delay_ms": 1},
    """
import copy
x, y = torch.randn(12, 8), torch.randint(4, (12,))
def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
def trained(model, forward=None):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    for _ in range(3):
        optimizer.zero_grad()
        if forward is None:
            loss = F.cross_entropy(model(x), y)
            loss.backward()
        else:
            loss = forward(model)
        optimizer.step()
    return loss.detach()
local = network()
expected = trained(local).item()
mesh = dt.mesh(dp=2)
parts = dt.shard(x, mesh, dp=0)
placed = dt.run(lambda part: (str(part.device), part.shape[0]), parts, node=mesh, distributed=True)
assert [tuple(one) for one in placed] == [("cuda:0", 6)] * 2
close(dt.meshes.full_tensor(parts * 2, dp=0).cpu(), x * 2)
close(dt.all_reduce(parts.sum(0), over="dp").cpu(), x.sum(0), rtol=1e-5, atol=1e-5)
targets = dt.shard(y, mesh, dp=0)
def on_mesh(model):
    loss = F.cross_entropy(model(x), targets)
    loss.backward()
    return dt.all_reduce(loss.detach(), "avg", over="dp")
replicas = dt.DataParallel(network().to(mesh.device), mesh)
assert abs(trained(replicas, on_mesh).item() - expected) < 1e-4
cut = network()
for layer in cut[::2]:
    dt.fully_shard(layer, mesh)
dt.fully_shard(cut, mesh)
assert abs(trained(cut, on_mesh).item() - expected) < 1e-4
pipeline = dt.training.Pipeline(network(), ["node:0"] * 3 + ["node:1"] * 2, microbatches=3)
assert abs(trained(pipeline, lambda model: model.step(x, y, F.cross_entropy)).item() - expected) < 1e-4
for name, value in pipeline.state_dict().items():
    close(value.cpu(), local.state_dict()[name], rtol=1e-4, atol=1e-5)
xs = [torch.randn(1 << 16) for _ in range(2)]
there = [x.to(f"node:{k}") for k, x in enumerate(xs)]
(there[0],) = dt.submit(slowly, there[0], node=0, beside=True).result()
dt.all_reduce(there)
for total in there:
    close(total.cpu(), xs[0] * 2 + xs[1])
""",
)

PROGRAMS["meshes_by_nccl"] = (
    {"backend": "auto", "devices": 2, "visible": "0,1", "delay_ms": 1},
    """
dt.all_reduce(torch.ones(1 << 10, device=dt.mesh(dp=2).device), over="dp")
counts = dt.run(lambda: ctypes.CDLL(None).simcuda_communicators(), node=[0, 1], distributed=True)
assert counts == [1, 1], "nothing went by NCCL"
"""
    + PROGRAMS["meshes"][1],
)

PROGRAMS["checkpoints"] = (
    {},
    """
path = tempfile.mkdtemp()
torch.manual_seed(0)
model = nn.Linear(64, 64).to("node:0")
other = torch.randn(1 << 16)
there, s = other.to("node:1"), dt.Stream(0)
state = {"model": model, "other": there, "step": 3}
kept = {name: p.detach().cpu() for name, p in model.named_parameters()}
dt.checkpoint.save(state, path + "/one")
with torch.no_grad(), dt.stream(s):
    dt.run(slowly, node=0)
    model.weight.mul_(2)  # what a save that comes next has to wait for
    s.record_event().wait(dt.streams.default_stream(0))
work = dt.checkpoint.async_save(state, path + "/two")
with torch.no_grad():
    model.weight.zero_()  # while it is being saved
    there.zero_()
work.wait()
for name, factor in (("/one", 1), ("/two", 2)):
    dt.checkpoint.load(state, path + name)
    close(model.weight.detach().cpu(), kept["weight"] * factor, rtol=0, atol=0)
    close(model.bias.detach().cpu(), kept["bias"], rtol=0, atol=0)
    same(there, other)
    there.zero_()
""",
)

PROGRAMS["binding"] = (
    {"nodes": 3, "devices": 2, "visible": "0,1", "delay_ms": 1},
    """
see = lambda: (os.environ["CUDA_VISIBLE_DEVICES"], torch.cuda.get_device_name(0))
seen = dt.run(see, node=[0, 1, 2], distributed=True)
assert [tuple(one) for one in seen] == [(str(gpu), f"simcuda device {gpu}") for gpu in (0, 0, 1)], seen
x = torch.randn(1 << 18)
a = x.to("node:0")
for k in range(4):  # on one GPU, and between two
    b = (a + k).to("node:1")
    c = (b * 2).to("node:2")
    same(c.to("node:0"), (x + k) * 2)
xs = [x.to(f"node:{k}") for k in range(3)]
dt.all_reduce(xs)
for total in xs:
    close(total.cpu(), x * 3)
""",
)
PROGRAMS["without_a_gpu"] = (
    {"visible": "", "delay_ms": 1},
    """
assert dt.run(torch.cuda.is_available, node=[0, 1], distributed=True) == [False, False]
x = torch.randn(1 << 18)
y = (x.to("node:0") + 1).to("node:1")
same(y, x + 1)
try:
    x.to(dt.device(0, "cuda:0")).cpu()
except (RuntimeError, ValueError) as error:
    assert "cuda" in str(error).lower(), error
else:
    raise AssertionError
""",
)
PROGRAMS["a_launch_that_fails"] = (
    {},
    """
x, wrong = torch.arange(3.0).to("node:0"), torch.tensor([7]).to("node:0")
for ask in (lambda: x[wrong], lambda: x + 1):  # an error sticks: whatever comes next fails, and the node lives
    try:
        ask().cpu()
    except RuntimeError as error:
        assert "unspecified launch failure" in str(error), error
    else:
        raise AssertionError
assert dt.nodes()[0].alive
same((torch.ones(3).to(dt.device(0, "cpu")) + 1), torch.full((3,), 2.0))
same(torch.ones(3).to("node:1") + 1, torch.full((3,), 2.0))
try:
    dt.shutdown()
except RuntimeError as error:
    assert "unspecified launch failure" in str(error), error
else:
    raise AssertionError
""",
)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in SMOKE else [pytest.mark.slow]) for name in PROGRAMS]
)
def test_program(name: str) -> None:
    settings, source = PROGRAMS[name]
    run_session(BEGIN + source, **settings)


@pytest.mark.slow
def test_a_node_with_a_gpu_beside_one_without() -> None:
    run_script(
        f"with_gpu = {environment(True)!r}"
        + """
import os, subprocess, sys, tempfile
path = tempfile.mkdtemp() + "/job"
command = [sys.executable, "-m", "disttensor.run", "worker", "--connection-file", path, "--rank"]
workers = [
    subprocess.Popen([*command, str(k)], env={**os.environ, **more}) for k, more in enumerate((with_gpu, {}))
]
import torch, disttensor as dt
dt.init_master_worker(init_method="file://" + path, nodes=2)
x = torch.randn(1 << 18)
a = x.to("node:0")
for k in range(3):
    b = (a * 2).to("node:1")
    c = (b + k).to("node:0") + 1
    assert torch.equal(b.cpu(), x * 2) and torch.equal(c.cpu(), x * 2 + k + 1)
where = [dt.run(lambda tensor: str(tensor.device), tensor, node=k) for k, tensor in enumerate((c, b))]
assert where == ["cuda:0", "cpu"], where
xs = [x.to("node:0"), x.to("node:1")]
dt.all_reduce(xs)
for total in xs:
    assert torch.equal(total.cpu(), x * 2)
with dt.stream(dt.Stream(0)):
    late = dt.run(lambda x: (torch.cuda._sleep(50_000_000), x * 3)[1], a, node=0)
assert torch.equal((late.to("node:1") + 1).cpu(), x * 3 + 1)
dt.shutdown()
assert [worker.wait(60) for worker in workers] == [0, 0]
"""
    )
