"""The checks of ``check_data_channel`` of how transfers, peers and channels end."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

from ..channel.base import DataChannel
from ..protocol.errors import BrokenError, ClosedError, PoisonedError
from .data_channel_kit import LIMIT, ConformanceError, move, need, raises


def check_refusal(channels: Sequence[DataChannel]) -> None:
    """Checks that a refusal arrives in the tensor's order, and names what failed; the next transfer is fine."""
    early, late, next_one = torch.zeros(3), torch.zeros(3), torch.zeros(3)
    posted = channels[1].irecv(early, 1, 7)
    channels[2].refuse(0, 7, 5, 1 << 40)
    channels[2].refuse(0, 8, 0, 3)
    channels[2].isend(torch.ones(3), 0, 9)
    for receive, rank, seq in ((posted, 5, 1 << 40), (channels[1].irecv(late, 1, 8), 0, 3)):
        try:
            receive.wait(LIMIT)
        except PoisonedError as error:
            need((error.rank, error.seq) == (rank, seq), f"the refusal names {error.rank} {error.seq}")
        else:
            raise ConformanceError("a refused transfer ended well")
    channels[1].irecv(next_one, 1, 9).wait(LIMIT)
    need(next_one.tolist() == [1, 1, 1], "the transfer after a refusal arrived changed")


def check_callbacks(channels: Sequence[DataChannel]) -> None:
    """Checks that callbacks are called once each, when the transfer ended or at once if it has; for failures too."""
    calls: list[str] = []
    ended = threading.Event()
    receive = channels[2].irecv(torch.zeros(3), 0, 0)

    def note() -> None:
        calls.append("late" if receive.is_completed() else "early")

    receive.add_done_callback(note)
    receive.add_done_callback(ended.set)
    channels[1].isend(torch.ones(3), 1, 0).wait(LIMIT)
    need(ended.wait(LIMIT), "the done callback was not called")
    receive.add_done_callback(note)
    need(calls == ["late", "late"], f"done callbacks were called {calls}, not once each after the end")
    failed = threading.Event()
    channels[2].irecv(torch.zeros(3), 0, 1).add_done_callback(failed.set)
    channels[2].mark_lost(0, "a test")
    need(failed.wait(LIMIT), "the done callback of a transfer that failed was not called")


def check_forget(channels: Sequence[DataChannel]) -> None:
    """Checks that a lost peer's transfers fail with the reason, now and later; others go on."""
    lost = channels[2].irecv(torch.zeros(3), 0, 0)
    target = torch.zeros(3)
    kept = channels[2].irecv(target, -1, 0)
    channels[2].mark_lost(0, "its host caught fire")
    channels[2].mark_lost(0, "a second reason")
    channels[2].mark_lost(77, "nobody")
    later = [channels[2].irecv(torch.zeros(3), 0, 1), channels[2].isend(torch.zeros(3), 0, 2)]
    for one in (lost, *later):
        with raises(BrokenError, "0", "1", "its host caught fire"):
            one.wait(LIMIT)
    channels[0].isend(torch.ones(3), 1, 0).wait(LIMIT)
    kept.wait(LIMIT)
    need(torch.equal(target, torch.ones(3)), "the loss of one peer disturbed another")


def check_peer_closes(channels: Sequence[DataChannel]) -> None:
    """Checks that a thread that waits for a peer that closes gets BrokenError, and that the peer stays broken."""
    move(channels, torch.ones(2), torch.zeros(2), 0)
    receive = channels[2].irecv(torch.zeros(2), 0, 1)
    channels[1].close()
    with raises(BrokenError, "0", "1"):
        receive.wait(LIMIT)
    for later in (channels[2].irecv(torch.zeros(2), 0, 2), channels[2].isend(torch.zeros(2), 0, 3)):
        with raises(BrokenError, "0", "1"):
            later.wait(LIMIT)


def check_peer_closes_before_use(channels: Sequence[DataChannel]) -> None:
    """Checks the same for a peer with which nothing was ever exchanged."""
    receive = channels[2].irecv(torch.zeros(2), 0, 1)
    channels[1].close()
    with raises(BrokenError, "0", "1"):
        receive.wait(LIMIT)


def check_close_delivers(channels: Sequence[DataChannel]) -> None:
    """Checks that tensors sent before close arrive, if their receives were announced."""
    source, target = torch.arange(200_000), torch.zeros(200_000, dtype=torch.int64)
    receive = channels[2].irecv(target, 0, 0)
    channels[1].isend(source, 1, 0)
    channels[1].close()
    receive.wait(LIMIT)
    need(torch.equal(source, target), "close cut off what was being sent")


def check_closed(channels: Sequence[DataChannel]) -> None:
    """Checks that closing twice is fine; transfers under way and later ones get ClosedError. The same for abort."""
    for channel, end, other in ((channels[1], channels[1].close, 1), (channels[2], channels[2].abort, -1)):
        receive = channel.irecv(torch.zeros(2), other, 7)
        end()
        end()
        channel.close()
        channel.abort()
        with raises(ClosedError):
            receive.wait(LIMIT)
        for start in (channel.isend, channel.irecv):
            with raises(ClosedError):
                start(torch.zeros(2), other, 8)
