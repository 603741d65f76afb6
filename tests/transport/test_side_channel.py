"""The side channel: a node hears of a loss whatever it is at; nobody depends on it, and it takes nothing else."""

from __future__ import annotations

import os
import signal

import pytest
import torch

import disttensor as dt
from disttensor import testing
from disttensor.runtime.protocol import side
from disttensor.runtime.protocol.errors import ProtocolError
from disttensor.session import current


def test_words_are_of_known_kinds() -> None:
    for word in (
        side.Gone(3, "its host is gone"), side.Cancel(7), side.Watch(("graph", "commands"), 5), side.Watch((), 0),
        side.Gather(3, 1 << 40), side.Describe(5),
    ):  # fmt: skip
        assert side.decode(side.encode(word)) == word
    for wrong in (
        b"",
        b"\xc1",
        side.encode([9, 3, "x"]),
        side.encode([1, 3]),
        side.encode([1, "3", 4]),
        side.encode([2, "7"]),
        side.encode([3, ["no such point"], 5]),
        b"\x91" * 9999,
    ):
        with pytest.raises(ProtocolError):
            side.decode(wrong)


@pytest.mark.parametrize("beside", [True, False], ids=["told beside", "told in turn only"])
def test_a_loss_reaches_a_node_that_waits_for_the_lost_one(beside: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lost node is only silent: nothing of it ends. What the others are told in turn stands behind the waiting."""
    with dt.init_master_worker("tcp", nodes=2, threads=1):
        link = current.session().link
        x, y = torch.ones(3, device="node:1"), torch.ones(3, device="node:0")
        assert (x.to("node:0") + y).sum().item() == 6
        pid = int(dt.nodes()[1]["pid"])
        testing.stop(1)
        waiting = x.to("node:0") * 2
        launcher, channel = link.losses.launcher, link.side.hub
        link.losses.launcher = None  # nobody ends it
        link.side.hub = channel if beside else None
        link.losses.lose(1, "for a test")
        if beside:
            assert (y + 1).sum().item() == 6
            with pytest.raises(dt.NodeLost, match=r"node 1 .* is lost: for a test"):
                waiting.sum().item()
        else:
            with pytest.raises(TimeoutError):
                dt.synchronize(0, timeout=1)
        link.losses.launcher, link.side.hub = launcher, channel
        os.kill(pid, signal.SIGKILL)
        assert (y + 2).sum().item() == 9
        with pytest.raises(dt.NodeLost, match="for a test"):
            x.sum().item()
        if not beside:  # by the end of its connection, or beside after all
            with pytest.raises(dt.NodeLost, match=r"node 1 .* is lost: for a test"):
                waiting.sum().item()
        dt.synchronize(0)  # the loss was told
