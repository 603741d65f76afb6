"""Channels that know each other."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from typing import TypeVar

from disttensor.runtime.channel import ChannelContext, DataChannel, PeerInfo, get_channel
from disttensor.runtime.channel.base import Protection

C = TypeVar("C", bound=DataChannel)

#: The channels that the tests of all channels take, by name; a new one is one more line.
CHANNELS = (
    "inproc",
    "tcp",
    "shm",
    "gloo",
)
#: Those that also go between processes.
BETWEEN_PROCESSES = tuple(name for name in CHANNELS if name != "inproc")

#: What is asked for beside a channel's name: "tcp encrypted".
PROTECTIONS = {"encrypted": Protection(encrypt=True), "checked": Protection(checksum=True)}

_jobs = itertools.count()


def connected(
    make: Callable[[ChannelContext], C],
    ranks: Sequence[int],
    job: str = "a job",
    protection: Protection = Protection(),  # noqa: B008 - frozen
) -> list[C]:
    """A channel of each rank, with a key of each pair."""
    channels = {rank: make(ChannelContext(rank, job, "127.0.0.1", protection=protection)) for rank in ranks}
    keys = {frozenset(pair): os.urandom(32) for pair in itertools.combinations(ranks, 2)}
    for me, one in channels.items():
        others = {rank: other for rank, other in channels.items() if rank != me}
        one.connect({r: PeerInfo(r, other.address(), keys[frozenset((me, r))]) for r, other in others.items()})
    return list(channels.values())


def ranked(name: str, ranks: Sequence[int]) -> list[DataChannel]:
    """Channels by name, in a job of their own; the name may have a word of PROTECTIONS behind it."""
    channel, _, word = name.partition(" ")
    return connected(get_channel(channel), ranks, f"{name} {next(_jobs)}", PROTECTIONS[word] if word else Protection())
