"""Channels that know each other."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from typing import TypeVar

from disttensor.runtime.channel import ChannelContext, DataChannel, PeerInfo

C = TypeVar("C", bound=DataChannel)


def connected(make: Callable[[ChannelContext], C], ranks: Sequence[int], job: str = "a job") -> list[C]:
    """A channel of each rank, with a key of each pair."""
    channels = {rank: make(ChannelContext(rank, job, "127.0.0.1")) for rank in ranks}
    keys = {frozenset(pair): os.urandom(32) for pair in itertools.combinations(ranks, 2)}
    for me, one in channels.items():
        others = {rank: other for rank, other in channels.items() if rank != me}
        one.connect({r: PeerInfo(r, other.address(), keys[frozenset((me, r))]) for r, other in others.items()})
    return list(channels.values())
