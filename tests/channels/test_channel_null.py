"""The null channel: all but the payload."""

from __future__ import annotations

import channel_kit
import pytest
import torch

import disttensor as dt
from disttensor.runtime.channel.null import NullChannel
from disttensor.runtime.channel.tcp.frames import EAGER
from disttensor.runtime.channel.tcp.inbound import Inbound
from disttensor.runtime.contracts import data_channel_ends
from disttensor.runtime.contracts.data_channel_kit import LIMIT
from disttensor.runtime.protocol.errors import BrokenError, PoisonedError


@pytest.fixture
def channels():
    made = channel_kit.connected(NullChannel, range(-1, 2))
    yield made
    for channel in made:
        channel.close()


@pytest.mark.parametrize("numel", [1, EAGER], ids=["small", "large"])
def test_nothing_is_moved_and_all_ends(channels, numel, monkeypatch):
    monkeypatch.setattr(Inbound, "read_into", None)
    for k, target in enumerate((torch.zeros(numel), torch.zeros(2 * numel)[::2])):
        receive = channels[2].irecv(target, 0, k)
        arrival = channels[2].iarrive((numel,), torch.float32, -1, k)
        for sender in channels[:2]:
            sender.isend(torch.ones(numel), 1, k).wait(LIMIT)
        receive.wait(LIMIT)
        assert arrival.tensor.shape == (numel,)
        assert not target.any()


@pytest.mark.parametrize("name", ["check_peer_closes", "check_peer_closes_before_use", "check_closed"])
def test_what_is_not_about_bytes(channels, name):
    getattr(data_channel_ends, name)(channels)


def test_refusals_and_mismatches(channels):
    channels[1].refuse(1, 1, 5, 77)
    with pytest.raises(PoisonedError, match="command 77 of node 5"):
        channels[2].irecv(torch.zeros(3), 0, 1).wait(LIMIT)
    channels[1].isend(torch.ones(3), 1, 2)
    with pytest.raises(BrokenError, match=r"float32 x 3 .*int32 x 4"):
        channels[2].irecv(torch.zeros(4, dtype=torch.int32), 0, 2).wait(LIMIT)


def test_a_script_runs_and_says_nothing():
    with dt.init_master_worker(nodes=2, launcher="inproc", backend="null"):
        xs = [torch.ones(1000, 100, device=f"node:{k}") for k in range(2)]
        dt.all_reduce(xs)
        assert xs[0].to("node:1").cpu().shape == (1000, 100)
