"""The description of a node: what it has and what is under way there, for who asks by the side channel.

Another thread does the node's work meanwhile, and counting tensors takes the GIL from it. So they are counted again
only when the last count lies ``REST`` times as far back as it has taken: who asks all the time slows the node by a
twentieth.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from ..channel.counted import CountedChannel
from ..channel.opened import Channels
from ..process.clock import CLOCK, Clock
from ..protocol import side
from .executor import CommandExecutor

#: How many times as long as a count has taken it is told again.
REST = 20
#: The most devices, and the most rows of transfers, of which one description tells.
MOST = 64


class Description:
    """The description of one node. One thread asks for it."""

    def __init__(self, executor: CommandExecutor, channels: Channels, clock: Clock = CLOCK) -> None:
        self._executor, self._channels, self._clock = executor, channels, clock
        self._held: tuple[side.DeviceTensors, ...] = ()
        self._count_again = 0.0  #: when the tensors are to be counted again

    def __repr__(self) -> str:
        return f"<Description of {self._executor!r}>"

    def answer(self, request: int) -> side.Described:
        """Returns the answer to a question."""
        building, since = self._executor.graphs.building
        return side.Described(
            request, self._executor.done, self._count(), tuple(islice(self._moving(), MOST)), building, since
        )

    def _count(self) -> tuple[side.DeviceTensors, ...]:
        began = self._clock.now()
        if began >= self._count_again:
            held = self._executor.store.usage_by_device()
            self._held = tuple(side.DeviceTensors(device, *figures) for device, figures in sorted(held.items())[:MOST])
            ended = self._clock.now()
            self._count_again = ended + REST * (ended - began)
        return self._held

    def _moving(self) -> Iterator[side.Moving]:
        for channel in self._channels:
            if isinstance(channel, CountedChannel):
                for peer, sent, tally in channel.under_way():
                    yield side.Moving(channel.name, channel.use, peer, sent, *tally)
