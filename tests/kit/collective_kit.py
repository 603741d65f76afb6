"""Ranks as threads of this process, which take part in collectives over real channels."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from channel_kit import CHANNELS, ranked
from limits import HANG

from disttensor.runtime.channel.gloo.channel import GlooChannel
from disttensor.runtime.channel.tcp.frames import EAGER
from disttensor.runtime.collective import IDS, Exchange, ReduceOp, all_to_all
from disttensor.runtime.collective.shared_pages import SharedPagesOfGroups

__all__ = ["CHANNELS", "LIMIT", "Ranks", "contribution", "reduced"]

LIMIT = HANG

_bases = itertools.count(0, IDS)


class Ranks:
    """Runs a function as every rank of a group. All connections are there from the start."""

    def __init__(self, name: str, n: int, shared_pages: bool = False) -> None:
        self.channels = ranked(name, range(n))
        self.shared_pages: list[SharedPagesOfGroups] = []  #: what is small goes by these, as on nodes
        self.size = n
        large = [torch.zeros(EAGER) for _ in range(n)]  # what is small is written by its caller, without a thread
        self.results(lambda wire: all_to_all(wire, large, [torch.empty(EAGER) for _ in range(n)]))
        for channel in self.channels:
            for carrier in channel._carriers() if isinstance(channel, GlooChannel) else ():
                carrier.join(LIMIT)  # it connects beside all else
        if shared_pages:
            self.shared_pages = [SharedPagesOfGroups() for _ in range(n)]

    def close(self) -> None:
        for pages in self.shared_pages:
            pages.close()
        for channel in self.channels:
            channel.close()

    def outcomes(
        self,
        fn: Callable[[Exchange], Any],
        members: Sequence[int] | None = None,
        poison: dict[int, tuple[int, int]] | None = None,
        carry: torch.dtype | None = None,
    ) -> list[Any]:
        """What ``fn(wire)`` returned or raised on each rank, in the order of ``members``."""
        members = list(range(self.size)) if members is None else members
        base = next(_bases)
        results: list[Any] = [TimeoutError("this rank hangs")] * len(members)

        def rank(me: int) -> None:
            try:
                wire = Exchange(
                    self.channels[members[me]], members, me, base,
                    blame=(members[me], 7), poison=(poison or {}).get(members[me]), carry=carry,
                )  # fmt: skip
                if self.shared_pages:
                    wire.shared_pages = self.shared_pages[members[me]]
                results[me] = fn(wire)
            except Exception as error:
                results[me] = error

        threads = [threading.Thread(target=rank, args=(me,), daemon=True) for me in range(len(members))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT)
        return results

    def results(self, fn: Callable[[Exchange], Any], **kwargs: Any) -> list[Any]:
        """The same where all succeed."""
        results = self.outcomes(fn, **kwargs)
        for result in results:
            if isinstance(result, Exception):
                raise result
        return results


def contribution(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Small integers: sums of them are exact in every dtype."""
    values = (torch.arange(numel) * 7 + rank * 3) % 5 + (0 if dtype is torch.bool else 1)
    if dtype is torch.bool:
        return values > 2
    if dtype.is_complex:
        return torch.complex(values.float(), values.float() - 3).to(dtype)
    return values.to(dtype)


def reduced(tensors: Sequence[torch.Tensor], op: ReduceOp) -> torch.Tensor:
    """What torch makes of them in one process, in the order of ranks."""
    stack = torch.stack(list(tensors))
    match op:
        case ReduceOp.SUM:
            return stack.any(0) if stack.dtype is torch.bool else stack.sum(0, dtype=stack.dtype)
        case ReduceOp.AVG:
            return stack.mean(0)
        case ReduceOp.PRODUCT:
            return stack.all(0) if stack.dtype is torch.bool else stack.prod(0, dtype=stack.dtype)
        case ReduceOp.MIN:
            return stack.amin(0)
        case ReduceOp.MAX:
            return stack.amax(0)
    total = stack[0].clone()
    for tensor in stack[1:]:
        match op:
            case ReduceOp.BAND:
                total &= tensor
            case ReduceOp.BOR:
                total |= tensor
            case ReduceOp.BXOR:
                total ^= tensor
    return total
