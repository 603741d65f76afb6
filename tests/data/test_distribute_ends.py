"""Loops over batches of nodes that end otherwise: by Ctrl-C, by the loss of a node. Programs of their own."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

import pytest

Script = Callable[..., subprocess.CompletedProcess[str]]

INTERRUPTED = """
import os, signal, threading, time, torch
import disttensor as dt
from disttensor import testing

class Slow:
    def __len__(self): return 12
    def __getitem__(self, i):
        if i == 9: time.sleep(3600)
        return torch.tensor(i)

dt.init_master_worker(nodes=2, threads=1)
loader, seen = dt.data.distribute(Slow(), [0, 1], batch_size=2, at="node"), []
main = threading.main_thread()

def interrupt():
    if threading.current_thread() is main and len(seen) == 4:
        os.kill(os.getpid(), signal.SIGINT)

try:
    with testing.at("wait", interrupt):
        for x, y in loader:
            seen.append((x.item(), y.item()))
except KeyboardInterrupt:
    print("interrupted after", seen)
state = loader.state_dict()
print(state["position"], torch.ones(2, device="node:1").sum().item())
dt.shutdown()
print("over")
"""


def test_an_interrupt_while_a_node_reads(script: Script) -> None:
    """The nodes are free again, and worker processes, which the test looks for, have ended."""
    done = script(INTERRUPTED)
    assert done.stdout.splitlines() == [
        "interrupted after [(0, 1), (2, 3), (4, 5), (6, 7)]",
        "8 2.0",
        "over",
    ], done.stderr


LOST = """
import sys, torch
import disttensor as dt
from torch.utils.data import TensorDataset

dt.init_master_worker(nodes=3, threads=1)

def loader(size, nodes):
    return dt.data.distribute(TensorDataset(torch.arange(size)), dt.mesh(dp=2, nodes=nodes), batch_size=4, at=AT)

try:
    for i, (x,) in enumerate(loader(400, [0, 1])):
        if i == 2:
            dt.kill(1)
except dt.NodeLost as e:
    print(i < 8, "dp=1" in "".join(e.__notes__), x.at(dp=0).tolist() == [4 * i, 4 * i + 2])
print(sum(x.at(dp=0).sum().item() for (x,) in loader(8, [0, 2])))
dt.shutdown()
"""


@pytest.mark.parametrize("at", ["script", "node"])
def test_a_node_that_is_lost(script: Script, at: str) -> None:
    """The loop says which ranks are gone; the other nodes read for another loop."""
    done = script(LOST.replace("AT)", f"{at!r})"))
    assert done.stdout.splitlines() == ["True True True", "12"], done.stderr
