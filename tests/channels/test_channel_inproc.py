"""The inproc channel, and the registry of channels."""

from __future__ import annotations

import importlib.metadata
import itertools
from typing import ClassVar

import channel_kit
import pytest
import torch

from disttensor.runtime.channel import ChannelContext, DataChannel, PeerInfo, get_channel, register_channel
from disttensor.runtime.channel import registry as registry_module
from disttensor.runtime.channel.inproc import InprocChannel, _rooms
from disttensor.runtime.contracts.data_channel import CHECKS, CHECKS_OF_GROUPS, ConformanceError, check_data_channel

_jobs = (f"test-{n}" for n in itertools.count())


def make(n: int) -> list[InprocChannel]:
    job = next(_jobs)
    channels = [InprocChannel(ChannelContext(rank, job, "127.0.0.1")) for rank in range(-1, n - 1)]
    peers = {rank: PeerInfo(rank, channel.address(), bytes(32)) for rank, channel in enumerate(channels, -1)}
    for channel in channels:
        channel.connect(peers)
    return channels


def test_the_last_one_that_closes_leaves_nothing():
    for channel in make(3):
        assert _rooms
        channel.close()
    assert not _rooms


@pytest.mark.row("M25")
def test_the_suite_finds_what_is_wrong(monkeypatch):
    """Each of these mistakes, the first of its kind that comes to mind, is caught by some check."""

    class Forgetful(InprocChannel):
        def mark_lost(self, peer, why):
            pass

    class Deaf(InprocChannel):
        def irecv(self, tensor, peer, transfer):
            return super().irecv(torch.empty_like(tensor), peer, transfer)

    class Unending(InprocChannel):
        def close(self):
            pass

        abort = close

    def maker(cls):
        def make(n):
            job = next(_jobs)
            channels = [cls(ChannelContext(rank, job, "127.0.0.1")) for rank in range(-1, n - 1)]
            for channel in channels:
                channel.connect({rank: PeerInfo(rank, "", bytes(32)) for rank in range(-1, n - 1)})
            return channels

        return make

    for part in ("", "_ends", "_kit", "_peers"):
        monkeypatch.setattr(f"disttensor.runtime.contracts.data_channel{part}.LIMIT", 0.05)
    for cls in (Deaf, Forgetful, Unending):
        with pytest.raises(ConformanceError) as caught:
            check_data_channel(maker(cls))
        assert any(check.__name__ in str(caught.value) for check in CHECKS)
    _rooms.clear()  # of the unending


class Lossy(InprocChannel):
    """Says that things have arrived which have not."""

    def irecv(self, tensor, peer, transfer):
        return super().irecv(torch.full_like(tensor, 77), peer, transfer)


@pytest.mark.parametrize("check", CHECKS_OF_GROUPS)
@pytest.mark.parametrize("n", [2, 5])
def test_every_check_of_groups_sees_what_arrives(check, n):
    channels = channel_kit.connected(Lossy, range(-1, n - 1), next(_jobs))
    with pytest.raises(ConformanceError):
        check(channels)
    for channel in channels:
        channel.close()


def test_one_channel_a_rank():
    master, first = make(2)
    with pytest.raises(ValueError, match="has a channel of rank 0"):
        InprocChannel(ChannelContext(0, first._job, "127.0.0.1"))
    first.close()
    again = InprocChannel(ChannelContext(0, first._job, "127.0.0.1"))
    again.close()
    master.close()


class TestRegistry:
    def test_known(self):
        assert get_channel("inproc") is InprocChannel
        assert get_channel("tcp").name == "tcp"

    def test_unknown_lists_the_known(self):
        with pytest.raises(ValueError, match=r"unknown data channel 'pigeon'; known channels: .*inproc.*tcp"):
            get_channel("pigeon")

    def test_register(self, monkeypatch):
        monkeypatch.setattr(registry_module, "_registered", {})

        class Mine(InprocChannel):
            name: ClassVar[str] = "mine"

        register_channel("mine", Mine)
        register_channel("mine", Mine)
        assert get_channel("mine") is Mine
        with pytest.raises(ValueError, match="taken"):
            register_channel("mine", InprocChannel)
        with pytest.raises(ValueError, match="taken"):
            register_channel("tcp", Mine)
        with pytest.raises(TypeError, match="subclass of DataChannel"):
            register_channel("other", dict)  # type: ignore[arg-type]

    def test_entry_points(self, monkeypatch):
        class Point:
            def __init__(self, name: str, value: object) -> None:
                self.name, self.value = name, value

            def load(self) -> object:
                return self.value

        points = [Point("theirs", InprocChannel), Point("odd", dict)]
        for module in (registry_module, importlib.metadata):
            monkeypatch.setattr(
                module, "entry_points", lambda group, name=None: [p for p in points if name in (None, p.name)]
            )
        assert issubclass(get_channel("theirs"), DataChannel)
        with pytest.raises(TypeError, match="odd"):
            get_channel("odd")
        with pytest.raises(ValueError, match="theirs"):
            get_channel("pigeon")
