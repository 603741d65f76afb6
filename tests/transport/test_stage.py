"""Uploads that are on their way: how many bytes of copies there are at most."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from limits import HANG

from disttensor import testing
from disttensor.runtime.channel.ticket import Ticket
from disttensor.session import current

pytestmark = pytest.mark.usefixtures("clean")


def test_an_upload_beyond_the_stage_waits_until_its_bytes_have_left(monkeypatch: pytest.MonkeyPatch) -> None:
    channel, sends, second = current.session().channel, list[Callable[[], None]](), threading.Event()
    isend, returned = channel.isend, threading.Event()

    def later(tensor: torch.Tensor, peer: int, transfer: int) -> Ticket:
        ticket = Ticket()
        sends.append(lambda: isend(tensor, peer, transfer).add_done_callback(ticket.finish))
        if len(sends) == 2:
            second.set()
        return ticket

    def upload() -> torch.Tensor:
        remote = large.to("node:1")
        large.fill_(7)
        returned.set()
        return remote

    monkeypatch.setattr(channel, "isend", later)
    small, large = torch.zeros(1 << 17), torch.zeros(1 << 18)
    with testing.limits(staged=1 << 20), ThreadPoolExecutor(1) as pool:
        copied = small.to("node:1")  # half of the stage
        small.fill_(7)
        waited = pool.submit(upload)
        assert second.wait(HANG)
        early = returned.wait(0.3)
        for send in sends:
            send()
        remote = waited.result(HANG)
    assert copied.amax().item() == 0
    assert remote.amax().item() == 0
    assert not early
