"""What moves the large payloads of one pair of peers beside the connection that has all else.

A channel that is ``TcpChannel`` and a carrier need not care for order, refusals, mismatches, small tensors, who may
talk, and a peer's end: all this is the connection's. A payload of more than ``EAGER`` bytes goes so:

    sender's thread                                              reader's thread at the other end
    stage(tensor) -> descriptor, or None: take the connection
    header and descriptor over the connection               ->   open(descriptor, nbytes) -> Parcel
    carry(tensor): returns when its memory may change            parcel: into, lend, fill, drop, one of them once

Carriers of a pair may talk to each other: what one ``say``s the other ``hear``s, in order with the headers. This way
they find out whether they can work (while they have not, ``stage`` gives None), and exchange addresses.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar

import torch

from .payload import plain

#: Tells the peer's carrier something, in at most 8 KiB. Never blocks.
Say = Callable[[bytes], None]


class Parcel(ABC):
    """A payload that the peer has announced. Used by the reader's thread."""

    @abstractmethod
    def drop(self) -> None:
        """Nobody wants it."""

    def lend(self) -> torch.Tensor | None:
        """The payload as flat bytes on some device, the receiver's own while it lives. None: ``fill`` it is."""
        return None

    def into(self, tensor: torch.Tensor) -> bool:
        """Brings it straight into the tensor that waits, of the sender's dtype and number of elements, any strides and
        any device. False, and nothing was done: lend or fill it. What it raises is that tensor's fault, and ends the
        transfer only."""
        return False

    def fill(self, memory: memoryview) -> None:
        """Brings it to where the receiver wants it."""
        raise NotImplementedError


class Carrier(ABC):
    """See above. What ``stage``, ``carry``, ``hear``, ``open`` and a parcel raise ends the pair's connection."""

    #: the bytes of a descriptor
    size: ClassVar[int] = 0

    def __init__(self, say: Say) -> None:
        self.say = say

    def reserve(self, nbytes: int) -> torch.Tensor | None:
        """Memory, as flat bytes, that ``stage`` takes without a copy when it is filled; None if there is no such. May
        be called by any thread, and what it gives may be dropped."""
        return None

    def prepare(self, tensor: torch.Tensor) -> torch.Tensor:
        """What is given to ``stage`` of a tensor that is not on the CPU. In the thread that sends, whose streams know
        when its contents are there."""
        return plain(tensor)

    @abstractmethod
    def stage(self, tensor: torch.Tensor) -> bytes | None:
        """Gets a tensor ready, of any strides and device. None if this one has to go another way; that is no error."""

    def carry(self, tensor: torch.Tensor) -> None:  # noqa: B027 - there is nothing to do where all is done in stage
        """Its header was written: returns when the memory may change."""

    @abstractmethod
    def open(self, descriptor: bytes, nbytes: int) -> Parcel:
        """What the peer has announced."""

    def hear(self, word: bytes) -> None:  # noqa: B027 - many have nothing to say
        """What the peer's carrier said. Must not block: nothing else is read meanwhile."""

    def fail(self, why: str) -> None:  # noqa: B027 - many never block
        """The connection is over: whoever is in ``carry`` or in a parcel has to come out, raising. In any thread, any
        number of times; never blocks."""

    def close(self) -> None:  # noqa: B027
        """No thread uses it any more. Tensors that were lent live on."""
