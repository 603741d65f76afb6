"""Many nodes on one machine: each is a fork of a process that has imported torch once."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

STARTING = """
import subprocess, sys, time

def seconds(work):
    begin = time.monotonic()
    work()
    return time.monotonic() - begin

alone = min(seconds(lambda: subprocess.run([sys.executable, "-c", "import torch"], check=True)) for _ in range(3))
import torch
import disttensor as dt

def start():
    dt.init_master_worker(nodes=64, threads=1)
    xs = [torch.full((2,), float(k), device=f"node:{k}") for k in range(64)]
    assert sum(x.sum().item() for x in xs) == 64 * 63

print(seconds(start) / alone)
dt.shutdown()
"""


def test_64_nodes_start_in_three_times_an_import_of_torch() -> None:
    """Ratios of times that were measured side by side; the best of three, as other programs run beside this one."""
    ratios = []
    while not ratios or (min(ratios) > 3 and len(ratios) < 3):
        done = subprocess.run([sys.executable, "-c", STARTING], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        ratios.append(float(done.stdout))
    assert min(ratios) <= 3, ratios
