"""Local PyTorch is as before: after the import, during a session and after it."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

import pytest
import torch

import disttensor as dt

Script = Callable[..., subprocess.CompletedProcess[str]]

#: What local programs give, as text: collected before disttensor is imported and three times after that.
PROBES = """
import io, sys, warnings, torch

def attempt(program):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            # a session has threads, of which Python 3.12 warns at each fork
            return repr(program()), [str(w.message) for w in said if "is multi-threaded" not in str(w.message)]
        except Exception as e:
            return type(e).__name__, str(e)[:60]

def train():
    torch.manual_seed(0)
    layers = torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1)
    net = torch.nn.Sequential(*layers)
    optimizer, scaler = torch.optim.Adam(net.parameters()), torch.amp.GradScaler("cpu")
    for _ in range(5):
        with torch.autocast("cpu"):
            loss = net(torch.randn(6, 4)).square().mean()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return loss.item(), [p.tolist() for p in net.to(torch.float64).parameters()]

def load(**options):
    data = torch.utils.data.TensorDataset(torch.arange(10.0))
    return [b.tolist() for (b,) in torch.utils.data.DataLoader(data, batch_size=4, **options)]

def scripted():
    @torch.jit.script
    def f(x: torch.Tensor):
        return x.to("cpu").to(torch.float64).to(x)
    return f(torch.ones(2))

def compiled():
    torch._dynamo.reset()
    def f(x):
        return x.to("cpu").to(torch.float64).relu() + 1
    return torch.compile(f, backend="aot_eager", fullgraph=True)(torch.ones(2))

def exported():
    class Module(torch.nn.Module):
        def forward(self, x):
            return x.to(torch.float64) + 1
    return torch.export.export(Module(), (torch.ones(2),)).module()(torch.ones(2))

def seen_by_modes():
    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append((func is torch.Tensor.to, torch.overrides.resolve_name(func)))
            return func(*args, **kwargs or {})
    seen = []
    with Mode():
        torch.ones(2).to(torch.float64)
    return seen

def add_one(queue, x):
    x.add_(1)
    queue.put(x.sum().item())

def processes():
    context = torch.multiprocessing.get_context("fork")
    queue, x = context.SimpleQueue(), torch.ones(3).share_memory_()
    process = context.Process(target=add_one, args=(queue, x))
    process.start()
    said = queue.get()
    process.join()
    return said, process.exitcode, x.tolist()

def threads():
    import threading
    x, seen = torch.ones(100, requires_grad=True), []
    shared = x.exp()
    def run():
        (shared * 2).sum().backward(retain_graph=True)
        seen.append(torch.autograd.is_multithreading_enabled())
    all_of_them = [threading.Thread(target=run) for _ in range(4)]
    for t in all_of_them: t.start()
    for t in all_of_them: t.join()
    return seen, x.grad.sum().item(), torch.is_grad_enabled()

def saved():
    file = io.BytesIO()
    torch.save({"a": torch.ones(2)}, file)
    file.seek(0)
    return torch.load(file)

def grouped():
    import torch.distributed as dist
    dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)  # the backends that this machine is for
    try:
        x = torch.ones(2)
        dist.all_reduce(x)
        dist.barrier()
        return x, dist.get_backend()
    finally:
        dist.destroy_process_group()

def forked_generator():
    before = torch.get_rng_state()
    with torch.random.fork_rng():
        torch.rand(3)
    return torch.equal(before, torch.get_rng_state())

# those that answer otherwise while a session runs, on a machine without an accelerator: it stands for the nodes then
ACCELERATOR = [
    lambda: load(pin_memory=True), lambda: load(pin_memory=True, num_workers=1),
    lambda: torch.accelerator.current_accelerator(), lambda: torch.accelerator.is_available(),
    lambda: torch.accelerator.device_count(), lambda: torch.accelerator.synchronize(),
    lambda: torch.accelerator.current_device_index(), lambda: torch.accelerator.current_stream(),
    lambda: torch.accelerator.set_device_index(0), lambda: torch.accelerator.device_index(0).__enter__(),
    lambda: torch.accelerator.get_device_capability(), lambda: torch.accelerator.get_memory_info(),
    lambda: torch.accelerator.memory_allocated(), lambda: torch.accelerator.max_memory_allocated(),
    lambda: torch.accelerator.empty_cache(), lambda: torch.accelerator.empty_host_cache(),
    lambda: torch.accelerator.reset_peak_memory_stats(), lambda: torch.accelerator.reset_accumulated_memory_stats(),
    lambda: torch.ones(2).pin_memory(), forked_generator,
]
PROBES = [
    train, scripted, compiled, exported, seen_by_modes, processes, threads, saved, grouped,
    load, lambda: load(num_workers=1),
    lambda: torch.get_device_module(), lambda: torch._C._get_accelerator(),
    lambda: torch.ones(2).is_pinned(),
    lambda: torch.utils.checkpoint.DefaultDeviceType.get_device_type(),
    lambda: torch.jit.trace(lambda x: x.to(torch.float64) * 2, torch.ones(2))(torch.ones(2)),
    lambda: torch.fx.symbolic_trace(lambda x: x.to("cpu") + 1).code,
    lambda: torch.vmap(lambda x: x.to(torch.float64))(torch.ones(2)),
    lambda: torch.nn.Parameter(torch.ones(2)).to(torch.float64), lambda: torch.ones(2).to("meta"),
    lambda: torch.ones(2).to(), lambda: torch.ones(2).to(3.5), lambda: torch.ones(2).untyped_storage(),
    lambda: torch.Generator().device, lambda: torch.empty(2, device="cuda"),
] + ACCELERATOR

def probe():
    return [attempt(p) for p in PROBES]
"""


def test_what_local_programs_give(script: Script) -> None:
    done = script(
        PROBES
        + """
before = probe()
import disttensor as dt
def compare(when):
    others = len(ACCELERATOR) if when in ("init", "use") and not torch.cuda.is_available() else 0
    for i, (was, now) in enumerate(zip(before, probe(), strict=True)):
        if now != was and i < len(before) - others:
            print(when, i, was, now)
compare("import")
with dt.init_master_worker(nodes=2):
    compare("init")
    assert torch.ones(2, device="node:1").requires_grad_().exp().sum().cpu().backward() is None
    compare("use")
compare("end")
print("compared", len(before))
""",
        PYTHONWARNINGS="ignore",
    )
    assert done.stdout.startswith("compared"), done.stdout + done.stderr
    assert done.returncode == 0


@pytest.mark.parametrize("when", ["before", "between", "after"])
def test_another_library_with_a_device(script: Script, when: str) -> None:
    """Torch has room for one; the import names ours."""
    rename = "torch.utils.rename_privateuse1_backend('foo')"
    first, second = {
        "before": (f"{rename}\nimport disttensor as dt", "dt.init_master_worker(nodes=1)"),
        "between": ("import disttensor as dt", rename),
        "after": ("import disttensor as dt\ndt.init_master_worker(nodes=1)", rename),
    }[when]
    done = script(f"import torch\n{first}\n{second}")
    text = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1
    assert "'node'" in text
    assert "'foo'" in text
    assert "use two processes" in text


def test_a_local_tensor_follows_the_current_node() -> None:
    with dt.init_master_worker(nodes=2, launcher="inproc"):
        assert torch.ones(2).to("node").get_node() == 0
        with dt.node(1):
            assert torch.ones(2).to("node").get_node() == 1
            assert torch.ones(2).to(device=torch.device("node"), dtype=torch.float64).get_node() == 1
            assert torch.ones(2).to("cpu").device.type == "cpu"
        assert torch.ones(2).to("node").get_node() == 0
