"""CUDA tensors between processes of one host. Without a device, another CPU tensor stands for the device's memory."""

from __future__ import annotations

import itertools
from contextlib import closing

import channel_kit
import pytest
import torch

import disttensor as dt
from disttensor.runtime.channel.base import Protection
from disttensor.runtime.channel.payload import store
from disttensor.runtime.channel.shm import cuda_ipc
from disttensor.runtime.channel.shm.channel import ShmChannel
from disttensor.runtime.channel.shm.cuda_ipc import CudaSharing
from disttensor.runtime.channel.shm.segments import FREE
from disttensor.runtime.channel.tcp.frames import EAGER
from disttensor.runtime.contracts.data_channel import check_data_channel
from disttensor.runtime.contracts.data_channel_kit import LIMIT
from disttensor.runtime.protocol.errors import BrokenError

LARGE = EAGER


class IpcChannel(ShmChannel):
    def isend(self, tensor, peer, transfer):
        if peer in self._peers and tensor.numel() * tensor.element_size() > EAGER:
            self._peers[peer].carrier.prepare(tensor)  # what the connection does for what is on a device
        return super().isend(tensor, peer, transfer)

    def _carrier(self, peer):
        return CudaSharing


@pytest.fixture
def stand_in(monkeypatch):
    """All CPU tensors are on the device. Gives what was exported."""
    exported = {}

    def export(buffer):
        exported[str(len(exported)).encode()] = buffer
        return str(len(exported) - 1).encode()

    monkeypatch.setattr(cuda_ipc, "is_cuda", lambda tensor: True)
    monkeypatch.setattr(cuda_ipc, "export", export)
    monkeypatch.setattr(cuda_ipc, "imported", lambda name: exported[name])
    return exported


def connected(n, protection=Protection()):  # noqa: B008 - frozen
    return channel_kit.connected(IpcChannel, range(-1, n - 1), protection=protection)


def warm(n, protection=Protection()):  # noqa: B008
    """Every pair has a buffer."""
    channels = connected(n, protection)
    serial = itertools.count(1 << 40)
    for (a, sender), (b, receiver) in itertools.permutations(enumerate(channels, -1), 2):
        carrier = sender._peers[b].carrier
        while not any(buffer.mapped() for buffer in carrier._buffers):
            number = next(serial)
            receive = receiver.irecv(torch.zeros(LARGE), a, number)
            sender.isend(torch.zeros(LARGE), b, number)
            receive.wait(LIMIT)
    return channels


@pytest.mark.parametrize("make", [connected, warm])
def test_conformance(make, stand_in):
    check_data_channel(make)
    assert stand_in


def test_what_is_altered_on_a_device_is_an_error(stand_in, monkeypatch):
    pair = warm(2, Protection(checksum=True))
    with closing(pair[0]), closing(pair[1]):
        pair[0].isend(torch.ones(LARGE), 0, 0)
        pair[1].recv(torch.zeros(LARGE), -1, 0)
        monkeypatch.setattr(cuda_ipc, "store", lambda out, tensor: store(out, tensor + 1))
        pair[0].isend(torch.ones(LARGE), 0, 1)
        with pytest.raises(BrokenError, match=r"transfer 1 from rank -1 to rank 0 .*its checksum is not"):
            pair[1].recv(torch.zeros(LARGE), -1, 1)


@pytest.fixture
def pair(stand_in):
    channels = warm(2)
    yield channels
    for channel in channels:
        channel.close()


@pytest.mark.row("T24")
def test_a_tensor_goes_by_a_buffer_which_is_free_then(pair, stand_in, monkeypatch):
    monkeypatch.setattr("disttensor.runtime.channel.shm.segments.Segment.fill", None)  # nothing by the CPU's memory
    for k in range(5):
        for target in (torch.zeros(LARGE), torch.zeros(2 * LARGE)[::2]):
            receive = pair[1].irecv(target, -1, 10 * k + target.stride(0))
            pair[0].isend(torch.full((LARGE,), float(k)), 0, 10 * k + target.stride(0))
            receive.wait(LIMIT)
            assert (target == k).all()
    assert len(stand_in) == 2, "one of each direction"
    assert all(buffer.page.state == FREE for buffer in pair[0]._peers[0].carrier._buffers)


@pytest.mark.row("T30")
def test_who_cannot_map_it_gets_it_by_the_cpu(stand_in, monkeypatch):
    def imported(name):
        raise ValueError("a device that is not visible here")

    monkeypatch.setattr(cuda_ipc, "imported", imported)
    channels = connected(2)
    for k in range(4):
        target = torch.zeros(LARGE)
        receive = channels[1].irecv(target, -1, k)
        channels[0].isend(torch.full((LARGE,), float(k)), 0, k)
        receive.wait(LIMIT)
        assert (target == k).all()
    assert len(stand_in) == 1, "offered once"
    for channel in channels:
        channel.close()


def test_buffers_are_bounded(pair, monkeypatch):
    monkeypatch.setattr(cuda_ipc, "MOST", 8 << 20)
    carrier = pair[0]._peers[0].carrier
    for k, numel in enumerate([1 << 19, 1 << 20, 1 << 20, 1 << 20, 1 << 22, 1 << 19]):
        target = torch.zeros(numel)
        receive = pair[1].irecv(target, -1, k)
        pair[0].isend(torch.full((numel,), float(k)), 0, k)
        receive.wait(LIMIT)
        assert (target == k).all()
        assert sum(buffer.nbytes for buffer in carrier._buffers) <= 8 << 20


@pytest.mark.gpu
def test_between_two_nodes_on_one_device():
    with dt.init_master_worker(nodes=2, backend="shm"):
        local = torch.randn(1 << 22)
        x = local.to(dt.device(0, "cuda:0"))
        for _ in range(4):  # from the second or third on by a buffer
            y = (x * 2).to(dt.device(1, "cuda:0"))
            assert torch.equal(y.cpu(), local * 2)
            assert torch.equal((y + 1).to(dt.device(0, "cuda:0")).cpu(), local * 2 + 1)
