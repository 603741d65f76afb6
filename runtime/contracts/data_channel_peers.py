"""The checks of ``check_data_channel`` that are made with any number of peers."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Sequence

import torch

from ..channel.base import DataChannel, Transfer
from ..protocol.errors import BrokenError, ClosedError
from .data_channel_kit import LIMIT, need, raises

#: Numbers of elements: none, one, odd, a size that goes in one piece, a size that does not.
SIZES = (0, 1, 1023, 1 << 8, 1 << 12, 70_001)


def check_many_at_once(channels: Sequence[DataChannel]) -> None:
    """Checks small and big transfers of all pairs, in both directions, started before any is waited for."""
    started: list[Transfer] = []
    expected = []
    sizes = [1, 100, 300_000, 0, 17, 70_000, 3]
    for transfer in range(21 if len(channels) < 4 else 7):
        for a, b in itertools.permutations(range(len(channels)), 2):
            source = torch.full((sizes[transfer % len(sizes)],), float(100 * transfer + 10 * a + b))
            target = torch.empty_like(source)
            started.append(channels[a].isend(source, b - 1, transfer))
            started.append(channels[b].irecv(target, a - 1, transfer))
            expected.append((source, target))
    for one in started:
        one.wait(LIMIT)
    need(all(torch.equal(source, target) for source, target in expected), "of many at once, some arrived changed")


def check_sums(channels: Sequence[DataChannel]) -> None:
    """Checks that every peer can add up all peers' tensors: 0 + 1 + ... + (n - 1) = n (n - 1) / 2."""
    n = len(channels)
    for transfer, size in enumerate(SIZES):
        given = [torch.full((size,), float(k)) for k in range(n)]
        got = {(a, b): torch.empty(size) for a, b in itertools.permutations(range(n), 2)}
        receives = [channels[b].irecv(target, a - 1, transfer) for (a, b), target in got.items()]
        sends = [channels[a].isend(given[a], b - 1, transfer) for a, b in got]
        for one in (*receives, *sends):
            one.wait(LIMIT)
        for b in range(n):
            total = given[b] + sum(got[a, b] for a in range(n) if a != b)
            need(bool((total == n * (n - 1) / 2).all()), f"the sum of {n} peers' {size} elements is wrong")


def check_ring(channels: Sequence[DataChannel]) -> None:
    """Checks a tensor that goes round, to which every peer adds its number."""
    n = len(channels)
    for lap, size in enumerate(SIZES):
        x = torch.zeros(size)
        for k in range(n):
            to = (k + 1) % n
            there = channels[to].empty((size,), torch.float32)
            receive = channels[to].irecv(there, k - 1, lap)
            channels[k].isend(x + k, to - 1, lap).wait(LIMIT)
            receive.wait(LIMIT)
            x = there
        need(bool((x == n * (n - 1) / 2).all()), f"{size} elements came back from a ring of {n} changed")


def check_interlaced(channels: Sequence[DataChannel]) -> None:
    """Checks peers that are threads: each starts transfers with all others, and waits for earlier ones in any order."""
    n, dice = len(channels), random.Random(len(channels))
    plan = [(*dice.sample(range(n), 2), dice.choice(SIZES)) for _ in range(30 * n)]
    wrong: list[str] = []

    def peer(me: int) -> None:
        mine, under_way = random.Random(me), list[tuple[Transfer, torch.Tensor, int]]()

        def finish(one: int) -> None:
            transfer, tensor, value = under_way.pop(one)
            transfer.wait(LIMIT)
            if not bool((tensor == value).all()):
                wrong.append(f"transfer {value} arrived changed")

        try:
            for number, (source, target, size) in enumerate(plan):
                if source == me:
                    tensor = torch.full((size,), number, dtype=torch.int32)
                    under_way.append((channels[me].isend(tensor, target - 1, number), tensor, number))
                elif target == me:
                    tensor = torch.empty(size, dtype=torch.int32)
                    under_way.append((channels[me].irecv(tensor, source - 1, number), tensor, number))
                if under_way and mine.random() < 0.3:
                    finish(mine.randrange(len(under_way)))  # the peer has come to its other half, or will
            while under_way:
                finish(mine.randrange(len(under_way)))
        except Exception as error:
            wrong.append(f"rank {me - 1}: {type(error).__name__}: {error}")

    threads = [threading.Thread(target=peer, args=(me,), daemon=True) for me in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * LIMIT)
    need(not any(thread.is_alive() for thread in threads), "interlaced transfers hang")
    need(not wrong, "; ".join(wrong))


def check_peer_dies(channels: Sequence[DataChannel]) -> None:
    """Checks a peer that dies in the middle of its sends.

    Tensors that arrived complete may be used; all others break, and name both; other peers go on.
    """
    dying, still_referenced, rank = channels[-1], channels[0], len(channels) - 2
    sources = [torch.full((1 << 20,), float(k)) for k in range(8)]
    targets = [torch.full((1 << 20,), -1.0) for _ in sources]
    first = still_referenced.irecv(targets[0], rank, 0)
    dyings = [dying.isend(source, -1, k) for k, source in enumerate(sources)]
    livings = [still_referenced.isend(source, rank, k) for k, source in enumerate(sources)]
    first.wait(LIMIT)
    dying.abort()
    received = [first, *(still_referenced.irecv(target, rank, k) for k, target in enumerate(targets) if k)]
    arrived = [_ends(receive, BrokenError, "-1", str(rank)) for receive in received]
    need(arrived == sorted(arrived, reverse=True), "something arrived after a transfer that broke")
    for k, whole in enumerate(arrived):
        need(not whole or torch.equal(targets[k], sources[k]), "a transfer that did not arrive whole ended well")
    with raises(BrokenError, "-1", str(rank)):
        still_referenced.irecv(torch.zeros(1), rank, len(sources)).wait(LIMIT)
    for kind, sends in ((ClosedError, dyings), (BrokenError, livings)):
        for send in sends:
            _ends(send, kind)
    need(all(bool((source == k).all()) for k, source in enumerate(sources)), "a source was changed")
    if len(channels) > 2:
        target = torch.zeros(9)
        receive = still_referenced.irecv(target, 0, 99)
        channels[1].isend(torch.ones(9), -1, 99).wait(LIMIT)
        receive.wait(LIMIT)
        need(bool(target.all()), "the loss of one peer disturbed another")


def _ends(transfer: Transfer, kind: type[Exception], *words: str) -> bool:
    """Returns whether a transfer ends well; else it has to fail with this exception, and these words in it."""
    try:
        transfer.wait(LIMIT)
    except kind as error:
        need(all(word in str(error) for word in words), f"the error should name {words}: {error}")
        return False
    return True
