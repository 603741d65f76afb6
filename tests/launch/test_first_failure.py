"""Of several nodes that fail the first is reported first: what failed after it may have failed because of it."""

from __future__ import annotations

import pytest
import torch

import disttensor as dt
from disttensor import testing


def test_at_the_end() -> None:
    dt.init_master_worker(nodes=3, threads=1)
    for rank in (2, 0):
        testing.kill(rank)
        while dt.nodes()[rank]["alive"]:
            dt.synchronize(1)  # who waits for another node hears of it, too
    assert torch.ones(2, device="node:1").sum().item() == 2
    with pytest.raises(dt.NodeLost, match=r"node 2 .*killed by SIGKILL") as caught:
        dt.shutdown()
    others = [note.split(" (")[0] for note in caught.value.__notes__ if not note.startswith("flight record: ")]
    assert others == ["node 0"]
