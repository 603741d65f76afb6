"""Models that no node, and not the script, holds as a whole: what passes through the script, and how much it holds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

PROGRAM = '''
import sys
import torch
import torch.nn as nn
import disttensor as dt

depth, width, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]

def megabytes(field):
    """The script's memory now (VmRSS), or the most of it (VmHWM)."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(field)) / 1024

def script():
    """All bytes of tensors that have left the script, or come to it."""
    return sum(row.sent.bytes + row.received.bytes for row in dt.channels.stats() if row.at == "master")

dt.init_master_worker(nodes=4, threads=1)
mesh = dt.mesh(dp=4)
torch.ones(4, device=mesh.device).sum().item()
before, held = megabytes("VmRSS"), [torch.node.memory_allocated(f"node:{k}") for k in range(4)]
with torch.device("meta"):
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(depth)))
for layer in model:
    dt.fully_shard(layer, mesh)
dt.fully_shard(model, mesh).to_empty(device=mesh.device)
dt.channels.reset_stats()
print("loaded:", *dt.training.load_safetensors(model, folder))
print("through the script:", script())
whole = 4 * depth * width * width
shares = [(torch.node.memory_allocated(f"node:{k}") - held[k]) / (whole / 4) for k in range(4)]
print("share of a node:", max(shares))
sums = [p.detach().sum() for p in model.parameters()]
print("sums:", *(dt.all_reduce(s, over="dp").item() for s in sums))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
loss = model(dt.shard(torch.ones(4, width), mesh, dp=0)).square().mean()
loss.backward()
optimizer.step()
dt.synchronize()
shares = [(torch.node.memory_allocated(f"node:{k}") - held[k]) / (whole / 4) for k in range(4)]
print("share with gradients:", max(shares))
print("finite:", dt.all_reduce(loss.detach(), "avg", over="dp").isfinite().item())
print("through the script:", script())
print("grown by:", megabytes("VmHWM") - before)
'''


def fit(tmp_path: Path, depth: int, width: int) -> dict[str, list[str]]:
    """Runs the program with weights of a file a layer, each value a 1000th of the layer's number."""
    folder = tmp_path / "weights"
    folder.mkdir()
    for i in range(depth):
        save_file({f"{i}.weight": torch.full((width, width), (i + 1) / 1000)}, folder / f"{i}.safetensors")
    (tmp_path / "program.py").write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, "program.py", str(depth), str(width), str(folder)],
        cwd=tmp_path, capture_output=True, text=True, check=False, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: dict[str, list[str]] = {}
    for line in done.stdout.splitlines():
        name, _, values = line.partition(": ")
        found.setdefault(name, []).extend(values.split())
    return found


def check(found: dict[str, list[str]], depth: int, width: int) -> None:
    assert found["loaded"] == ["[]", "[]"]
    # of float32, in whatever order
    for i, total in enumerate(map(float, found["sums"])):
        assert abs(total / (width * width) * 1000 / (i + 1) - 1) < 1e-3
    assert [int(count) < 4 * width * 4 + 4096 for count in found["through the script"]] == [True, True]
    assert int(found["through the script"][0]) == 0
    assert 0.99 < float(found["share of a node"][0]) < 1.01
    assert float(found["share with gradients"][0]) < 2.05
    assert found["finite"] == ["True"]


def test_no_byte_of_the_weights_passes_through_the_script(tmp_path: Path) -> None:
    check(fit(tmp_path, 3, 512), 3, 512)


@pytest.mark.slow
def test_a_model_that_is_large_for_this_machine(tmp_path: Path) -> None:
    """768 MiB of parameters over four nodes: the script's memory grows by less than a sixth of it."""
    found = fit(tmp_path, 12, 4096)
    check(found, 12, 4096)
    (grown,) = map(float, found["grown by"])
    assert grown < 768 / 6
