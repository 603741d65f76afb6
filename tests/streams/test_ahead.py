"""Receives that begin before their turn, while the node computes."""

from __future__ import annotations

import random
import threading
from contextlib import suppress
from typing import Any

import cloudpickle
import pytest
import torch

import disttensor as dt
from disttensor.runtime.channel import ChannelContext, PeerInfo, get_channel
from disttensor.runtime.channel.base import MASTER
from disttensor.runtime.node import receive_ahead
from disttensor.runtime.node.receive_ahead import Ahead
from disttensor.runtime.node.store import Pending
from disttensor.runtime.node.user_functions import key_of
from disttensor.runtime.node.worker import NodeWorker
from disttensor.runtime.protocol import codec
from disttensor.runtime.protocol import commands as c
from disttensor.runtime.protocol.bundle import Bundle
from disttensor.runtime.protocol.errors import ClosedError
from disttensor.runtime.transport.base import Spoke

#: Seconds for what takes a moment; longer is a hang.
SOON = 20
FLOAT = codec.dtype_id(torch.float32)


class Script(Spoke):
    """Gives messages one after the other; the replies are dropped."""

    def __init__(self, batches: list[c.Batch]) -> None:
        self.messages = [codec.encode(batch) for batch in batches]

    def recv(self, timeout: float | None = None) -> bytes | None:
        if not self.messages and timeout is None:
            raise ClosedError("the end")
        return self.messages.pop(0) if self.messages else None

    def send(self, message: bytes) -> None: ...

    def close(self) -> None: ...


def batches(*groups: tuple[c.Command, ...]) -> list[c.Batch]:
    out, first = [], 0
    for group in groups:
        out.append(c.Batch(first, group))  # type: ignore[arg-type]
        first += len(group)
    return out


def receive(transfer: int, n: int = 4, peer: int = MASTER) -> c.Recv:
    return c.Recv(transfer, 100 + transfer, peer, (n,), FLOAT, "cpu")


begun, release = threading.Event(), threading.Event()


def hold() -> None:
    begun.set()
    release.wait(SOON)


@pytest.mark.parametrize("last", [MASTER, 1], ids=["of a peer that is known", "of one that is introduced meanwhile"])
def test_bytes_come_while_the_node_is_busy(last: int) -> None:
    job, key = "ahead", bytes(32)
    channels = [get_channel("tcp")(ChannelContext(rank, job, "127.0.0.1")) for rank in (MASTER, 1)]
    channel, other = channels
    sources = (channel, channel if last == MASTER else other)
    begun.clear()
    release.clear()
    code = cloudpickle.dumps(hold)
    run = c.Run(1, key_of(code), cloudpickle.dumps(((), {})), False, "a line")
    script = Script(
        batches(
            (c.Peer(MASTER, c.Addresses(channel.address()), key), receive(1)),
            (c.Piece(key_of(code), code, True), run),
            (c.Peer(last, c.Addresses(sources[1].address()), key), receive(2, peer=last)),
            (c.StopNode(),),
        )
    )
    worker = NodeWorker(Bundle(job=job, rank=0, address="", backend="tcp"), script)
    for each in channels:
        each.connect({0: PeerInfo(0, worker.executor.channel.address(), key)})
    thread = threading.Thread(target=worker.serve)
    try:
        sends = [each.isend(torch.full((4,), float(i)), 0, i) for i, each in enumerate(sources, 1)]
        thread.start()
        assert begun.wait(SOON)
        for send in sends:
            send.wait(SOON)  # both have been taken
        assert not release.is_set()
    finally:
        release.set()
        thread.join(SOON)
        for each in channels:
            each.close()


class Fake:
    """An executor that notes when receives begin."""

    def __init__(self) -> None:
        self.early: dict[int, Pending | Exception] = {}
        self.received = False
        self.begun: list[int] = []

    def receive(self, command: c.Recv) -> Pending:
        self.begun.append(command.transfer)
        if command.shape[0] == 13:
            raise MemoryError("no")
        nbytes = command.shape[0] * 4
        return Pending(None, None, MASTER, nbytes)  # type: ignore[arg-type]

    def apply(self, batch: c.Batch) -> None:
        for command in batch.commands:
            if isinstance(command, c.Recv):
                self.received = True
                if self.early.pop(command.transfer, None) is None:
                    with suppress(MemoryError):
                        self.receive(command)


@pytest.mark.parametrize("seed", range(30))
def test_order_and_limits(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each begins once and in order, none before a command that it must not pass, none over the limit."""
    monkeypatch.setattr(receive_ahead, "AHEAD", 1000)
    rng = random.Random(seed)
    groups: list[tuple[c.Command, ...]] = []
    transfers: list[int] = []
    barrier_before: dict[int, int] = {}  #: transfer -> number of the last barrier before it
    number = barrier = 0
    for _ in range(40):
        group: list[c.Command] = []
        for _ in range(rng.randint(1, 4)):
            kind = rng.random()
            if kind < 0.4:
                transfers.append(len(transfers))
                group.append(receive(transfers[-1], rng.choice([4, 13, 100, 300])))
                barrier_before[transfers[-1]] = barrier
            elif kind < 0.47:
                group.append(c.Default(FLOAT))
                barrier = number + 1
            else:
                group.append(c.Call(1, 2, ()))
            number += 1
        groups.append(tuple(group))
    script, fake = Script(batches(*groups)), Fake()
    source = Ahead(script, fake)  # type: ignore[arg-type]
    messages, script.messages = script.messages, []
    done = 0
    while done < number:
        while messages and (rng.random() < 0.6 or (not source._waiting and not script.messages)):
            script.messages.append(messages.pop(0))
        batch, size = source.next()
        assert size == len(codec.encode(batch))
        assert batch.first == done
        fake.apply(batch)
        done += len(batch.commands)
        if fake.received:
            source.look()
        sizes = [p.nbytes for p in fake.early.values() if isinstance(p, Pending)]
        assert sum(sizes) <= 1000 or len(sizes) == 1
        assert all(barrier_before[t] <= done for t in fake.early)
    assert fake.begun == transfers
    assert fake.early == {}


def test_a_loop_that_never_looks_back() -> None:
    """Batches go up, are computed with, and go on to another node and back, many more than fit at once."""
    with dt.init_master_worker(nodes=2, threads=1):
        results = []
        for i in range(60):
            x = torch.full((1 << 20,), float(i)).to("node:0", non_blocking=True)
            results.append(dt.fetch(((x + 1).to("node:1") * 2)[:2]))
        assert [r.result().tolist() for r in results] == [[2.0 * i + 2] * 2 for i in range(60)]


def test_what_is_not_there_is_told_in_its_turn() -> None:
    """A receive that begins early and fails: by poison, and by a peer's mistake."""
    with dt.init_master_worker(nodes=2, launcher="inproc"):
        good: list[Any] = [torch.ones(3, device="node:0") for _ in range(20)]
        bad = torch.nn.functional.embedding(torch.tensor([9]).to("node:0"), torch.ones(3, 3).to("node:0"))
        moved = [x.to("node:1") for x in (*good, bad, *good)]
        assert sum(x.sum().item() for x in moved[:20] + moved[21:]) == 120
        with pytest.raises(IndexError, match="embedding on node 0"):
            moved[20].sum().item()
