"""Ctrl-C at random moments of a training loop, with nodes as processes and as threads."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

import pytest
from variants import variants

PROGRAM = """
import os, random, signal, sys, threading, torch, disttensor as dt
import aftermath

launcher, times, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
dt.init_master_worker(nodes=2, threads=1, launcher=launcher)
net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)).to("node:1")
optimizer = torch.optim.Adam(net.parameters())
batch = torch.randn(4, 8)
count = torch.zeros(2, device="node:1")

def step(recompute):
    x = batch.to("node:0").to("node:1").requires_grad_()
    optimizer.zero_grad()
    y = torch.utils.checkpoint.checkpoint(net, x, use_reentrant=False) if recompute else net(x)
    y.square().mean().backward()
    optimizer.step()
    return x.grad.sum().item()

for recompute in (True, False):
    step(recompute)

pressed = []
armed, rng = threading.Semaphore(0), random.Random(seed)

def interrupt():
    for _ in range(times):
        armed.acquire()
        threading.Event().wait(rng.uniform(0, 0.02))
        pressed.append(aftermath.Clock())
        os.kill(os.getpid(), signal.SIGINT)

threading.Thread(target=interrupt, daemon=True).start()
hits = 0
for i in range(times):
    try:
        armed.release()
        while True:
            step(i % 2)
    except KeyboardInterrupt:
        hits += 1
        pressed[-1].check(0.5, "Ctrl-C")
    torch.set_grad_enabled(True)  # an exception in the __exit__ of torch.no_grad() leaves it off, locally too
    assert torch.autograd.is_multithreading_enabled()
    leaf = torch.ones(3, device="node:0", requires_grad=True)
    (leaf * leaf).sum().backward()
    assert leaf.grad.tolist() == [2, 2, 2]
    count.add_(1)
assert count.tolist() == [times] * 2
print(hits, "of", times)
dt.shutdown()
"""


@pytest.mark.fault(18)
@pytest.mark.parametrize("launcher", variants(["local", "inproc"]))
@pytest.mark.parametrize(
    ("times", "seed"), [(40, 0), *(pytest.param(200, seed, marks=pytest.mark.slow) for seed in range(1, 4))]
)
def test_none_is_swallowed_and_none_ends_the_process(
    script: Callable[..., subprocess.CompletedProcess[str]], launcher: str, times: int, seed: int
) -> None:
    done = script(f"import sys\nsys.argv = ['', {launcher!r}, {times}, {seed}]\n" + PROGRAM)
    assert (done.returncode, done.stdout) == (0, f"{times} of {times}\n"), done.stderr[-3000:]
    assert done.stderr == ""
