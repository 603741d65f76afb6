"""DataLoaders whose workers are forked, or started, while nodes live."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

import pytest
from variants import variants

PROGRAM = """
import torch, disttensor as dt
from torch.utils.data import DataLoader, Dataset

class Numbers(Dataset):
    def __init__(self, remote=None):
        self.remote = remote
    def __len__(self):
        return 12
    def __getitem__(self, i):
        return torch.full((3,), float(i)) if self.remote is None else self.remote[i]

def total(**options):
    loader = DataLoader(Numbers(), batch_size=4, **options)
    out = torch.zeros((), device="node:1")
    for _ in range(2):
        for x in loader:
            out += (x.to("node:1") * w).sum()
    return out.item()

if __name__ == "__main__":
    with dt.init_master_worker(nodes=2):
        w = torch.ones(3, device="node:1")
        waiting = [w * k for k in range(100)]  # commands that have not left yet when the workers are made
        {body}
        print(sum(x.sum() for x in waiting).item())
    print("end")
"""


@pytest.mark.fault(21)
@pytest.mark.parametrize("options", variants(["", "persistent_workers=True", "multiprocessing_context='spawn'"]))
def test_workers(options: str, script: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    done = script(PROGRAM.replace("{body}", f"print(total(num_workers=2, {options}))"))
    assert done.stderr == ""
    assert done.stdout.split() == ["396.0", "14850.0", "end"]


@pytest.mark.fault(21)
def test_a_worker_that_uses_a_node(script: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    body = """
        try:
            next(iter(DataLoader(Numbers(torch.arange(12.0, device="node:1")), num_workers=2)))
        except dt.errors.ForkError as e:
            print("only the master" in str(e))"""
    done = script(PROGRAM.replace("{body}", body))
    assert done.stdout.split() == ["True", "14850.0", "end"]
    assert done.returncode == 0
