"""Sessions begun and ended many times in one process leave nothing in it."""

from __future__ import annotations

import gc
import os
import resource
import threading
from collections import Counter
from pathlib import Path

import pytest
import torch

import disttensor as dt

#: Sessions after which nothing grows any more: caches are filled, what torch makes once is made.
WARM = 5
#: Bytes that 200 sessions may add to a process.
GROWTH = 20 << 20


def descriptors() -> dict[str, str]:
    """What is open, by number; a descriptor of this listing itself is left out."""
    found = {}
    for entry in os.listdir("/proc/self/fd"):
        try:
            found[entry] = os.readlink(f"/proc/self/fd/{entry}")
        except FileNotFoundError:
            continue
    return found


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def cycle(number: int, launcher: str) -> None:
    with dt.init_master_worker(nodes=2, launcher=launcher):
        x = torch.full((64, 64), float(number)).to("node:0")
        y = (x + 1).to("node:1")
        assert y.sum().item() == 64 * 64 * (number + 1)
        dt.all_reduce([x, y])
        assert dt.run(torch.add, 1, number, node=1).item() == number + 1


def check(cycles: int, launcher: str) -> None:
    for number in range(WARM):
        cycle(number, launcher)
    gc.collect()
    fds, threads, size = descriptors(), threading.enumerate(), resident()
    for number in range(cycles):
        cycle(number, launcher)
    gc.collect()
    # what earlier tests had held until then may have been closed since
    assert not Counter(descriptors().values()) - Counter(fds.values())
    assert threading.enumerate() == threads
    assert resident() - size < GROWTH


def test_two_hundred_sessions_with_nodes_as_threads() -> None:
    check(200, "inproc")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_two_hundred_sessions() -> None:
    check(200, "local")
