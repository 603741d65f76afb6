"""Of several nodes that fail the first is reported first: what failed after it may have failed because of it."""

from __future__ import annotations

import os
import signal

import pytest
import torch

import disttensor as dt
from disttensor import state


def test_at_the_end() -> None:
    dt.init_master_worker(nodes=3, threads=1)
    link = state.session().link
    pids = {rank: hello.pid for rank, hello in link.hellos.items()}
    for count, rank in enumerate((2, 0), 1):
        os.kill(pids[rank], signal.SIGKILL)
        while len(link.losses) < count:
            link.drain()
            link.pause(0.1)
    assert torch.ones(2, device="node:1").sum().item() == 2
    with pytest.raises(dt.NodeLost, match=r"node 2 .*killed by SIGKILL") as caught:
        dt.shutdown()
    assert [note.split(" (")[0] for note in caught.value.__notes__] == ["node 0"]
