"""The description of a node: what it has and what is under way there, for who asks by the side channel.

Another thread does the node's work meanwhile, and counting tensors takes the GIL from it. So they are counted again,
and GPUs asked again, only when the last count lies ``REST`` times as far back as it has taken: who asks all the time
slows the node by a twentieth.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import torch

from ..channel.counted import CountedChannel
from ..channel.opened import Channels
from ..process.clock import CLOCK, Clock
from ..protocol import side
from .executor import CommandExecutor
from .gpu_use import gpus
from .memory_tally import MemoryTally

#: How many times as long as a count has taken it is told again.
REST = 20
#: The most devices, and the most rows of transfers, of which one description tells.
MOST = 64


class Description:
    """The description of one node. One thread asks for it."""

    def __init__(self, executor: CommandExecutor, channels: Channels, clock: Clock = CLOCK) -> None:
        self._executor, self._channels, self._clock = executor, channels, clock
        self._held: tuple[side.DeviceTensors, ...] = ()
        self._gpus: tuple[side.GpuUse, ...] = ()
        self._count_again = 0.0  #: when the tensors are to be counted again

    def __repr__(self) -> str:
        return f"<Description of {self._executor!r}>"

    def answer(self, request: int) -> side.Described:
        """Returns the answer to a question."""
        self._count()
        building, since = self._executor.graphs.building
        return side.Described(
            request, self._executor.done, self._held, tuple(islice(self._moving(), MOST)), building, since,
            tuple(islice(self._large(), MOST)), self._gpus,
        )  # fmt: skip

    def _count(self) -> None:
        began = self._clock.now()
        if began >= self._count_again:
            held = sorted(self._executor.store.usage_by_device().items())[:MOST]
            self._held = tuple(side.DeviceTensors(device, *it, self._peak(device, it[1])) for device, it in held)
            self._gpus = gpus()
            ended = self._clock.now()
            self._count_again = ended + REST * (ended - began)

    def _peak(self, device: str, now: int) -> int:
        """Returns the most bytes that the tensors on a device were, which are so many ``now``; -1 where that isn't
        counted."""
        if device.startswith("cuda"):
            return torch.cuda.max_memory_allocated(device)
        tally = self._executor.store.tally
        return max(tally.peak, now) if device == "cpu" and isinstance(tally, MemoryTally) else -1

    def _moving(self) -> Iterator[side.Moving]:
        for channel in self._channels:
            if isinstance(channel, CountedChannel):
                for peer, sent, tally in channel.under_way():
                    yield side.Moving(channel.name, channel.use, peer, sent, *tally)

    def _large(self) -> Iterator[side.LargeMoving]:
        for channel in self._channels:
            if isinstance(channel, CountedChannel):
                for each in channel.large():
                    yield side.LargeMoving(channel.name, channel.use, *each)
