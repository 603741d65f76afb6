"""Connections of a node with the script, beside that for commands, that something resets while both ends live."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from limits import HANG
from side_channels import await_side_channels
from transport_kit import Proxy

import disttensor as dt
from disttensor.runtime.launch.starters.local import LocalLauncher
from disttensor.session import current
from disttensor.tasks import Channel, Lock


@pytest.fixture
def between(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Proxy]]:
    """A session whose nodes have their side channels, and their connections for what is shared, by these."""
    start, proxies = LocalLauncher.start, {}

    def by_proxies(self: LocalLauncher, bundles: Any) -> None:
        proxies["side"] = stack.enter_context(closing(Proxy(bundles[0].side_addresses[0])))
        there = (proxies["side"].address,)
        start(self, [msgspec.structs.replace(bundle, side_addresses=there) for bundle in bundles])

    def beside(keys: Any) -> Any:
        hub: Any = more(keys)
        proxies["shared"] = stack.enter_context(closing(Proxy(hub.address)))
        hub.addresses = (proxies["shared"].address,)
        return hub

    monkeypatch.setattr(LocalLauncher, "start", by_proxies)
    with ExitStack() as stack, dt.init_master_worker("tcp", nodes=2, threads=1):
        session = current.session()
        more: Any = session.hub_beside
        session.hub_beside = beside
        await_side_channels()
        yield proxies


def waits(told: Channel) -> None:
    told.put("in it")
    signal.pause()


@pytest.mark.fault(25)
@pytest.mark.parametrize("when", ["not sent", "on its way"])
def test_a_side_channel_comes_back_and_says_all_again(between: dict[str, Proxy], when: str) -> None:
    """What a node was to hear while it had none it hears then, and what had left and did not arrive."""
    told, side = Channel(), between["side"]
    work = dt.submit(waits, told, node=1)
    assert told.get() == "in it"
    if when == "not sent":
        side.reset()
        work.cancel()
    else:
        side.frozen = True
        work.cancel()
        sides = current.session().link.side
        while sides.behind:
            threading.Event().wait(0.01)
        side.reset()
        side.frozen = False
    with pytest.raises(dt.errors.CancelledError):
        work.result(timeout=HANG)
    assert [node["alive"] for node in dt.nodes()] == [True, True]


@pytest.mark.fault(25)
def test_what_observers_note_comes_by_another_side_channel(between: dict[str, Proxy]) -> None:
    looking, side, x = current.session().link.looking, between["side"], torch.ones(4, device="node:1")
    looking.watch([1], ["commands"])
    looking.fetch(1, HANG)  # it has heard of it
    x * 2
    dt.synchronize()
    side.reset()
    x * 3
    dt.synchronize()
    found = looking.fetch(1, HANG)
    assert [each.what for each in found.events if each.kind == "done"].count("aten::mul.Tensor") == 2
    assert found.dropped == 0


def holds(lock: Lock, left: Channel, mark: Path) -> None:
    with lock:
        mark.touch()  # and not by what is shared, whose answer may be on its way then
        signal.pause()


@pytest.mark.fault(25)
def test_a_node_whose_connection_for_what_is_shared_is_reset_is_lost(between: dict[str, Proxy], tmp_path: Path) -> None:
    """Its lock is not given to another one before that, and those who wait for what it puts are told."""
    lock, left, mark = Lock(), Channel(), tmp_path / "has it"
    work = dt.submit(holds, lock, left, mark, node=1)
    while not mark.exists():
        assert not work.is_completed()
        threading.Event().wait(0.01)
    x = torch.ones(3, device="node:0")
    between["shared"].reset()
    with pytest.raises(dt.NodeLost, match="connection for what the script holds for all, such as channels and locks"):
        left.get(timeout=HANG)
    assert lock.acquire(timeout=HANG)
    assert [node["alive"] for node in dt.nodes()][1] is False
    assert lock.abandoned == "holds() on node 1 had it, and that node is gone"
    with pytest.raises(dt.NodeLost):
        work.result(timeout=HANG)
    assert (x + 1).sum().item() == 6
    dt.shutdown()  # raises nothing: the script was told
