"""Carriers: they move the large payloads of one pair of peers beside the connection, which has all the rest.

A channel that is ``TcpChannel`` and a carrier need not care for order, refusals, mismatches, small tensors,
authentication, and a peer's end: all this is the connection's. A payload of more than ``EAGER`` bytes goes so:

    sender's thread                                              reader's thread at the other end
    stage(tensor) -> descriptor, or None: take the connection
    header and descriptor over the connection               ->   open(descriptor, nbytes) -> Parcel
    carry(tensor): returns when its memory may change            parcel: into, lend, fill, drop, one of them once

Or the descriptor says where the tensor's own memory is (``lent``), which the peer reads: it may change when the peer
has dealt with the header, or ``read_up_to`` says that it has read it.

Carriers of a pair may talk to each other: the words that one ``say``s the other ``hear``s, in order with the headers.
This way they find out whether they can work (while they have not, ``stage`` returns None), and exchange addresses.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar

import torch

from .payload import plain

#: Tells the peer's carrier something, in at most 8 KiB. Never blocks.
Say = Callable[[bytes], None]


class MissedError(Exception):
    """A payload did not come, or not whole, by trouble beside the connection: only its transfer fails."""


class RefusedError(Exception):
    """A payload can't be had in the way in which it was announced: it comes in another one, by a new connection."""


class FullError(Exception):
    """The peer has to take earlier payloads before there is room for this one: ``stage`` is called again."""


class Parcel(ABC):
    """A payload that the peer has announced. Used by the reader's thread."""

    #: the peer keeps the payload's memory until it hears that the announcement was dealt with, so it is told at once
    awaited: ClassVar[bool] = False

    @abstractmethod
    def discard(self) -> None:
        """Discards the payload, which nobody wants."""

    def lend(self) -> torch.Tensor | None:
        """Returns the payload as flat bytes on some device, the receiver's own while they live. None: use ``fill``."""
        return None

    def into(self, tensor: torch.Tensor) -> bool:
        """Brings the payload straight into the waiting tensor; returns whether it did.

        The tensor has the sender's dtype and number of elements, any strides and any device. False, and nothing was
        done: lend or fill it. An exception here is that tensor's fault, and ends the transfer only.
        """
        return False

    def fill(self, memory: memoryview) -> None:
        """Brings the payload to where the receiver wants it."""
        raise NotImplementedError


class Carrier(ABC):
    """Moves large payloads between one pair of peers.

    An exception in ``stage``, ``carry``, ``hear``, ``open`` or a parcel ends the pair's connection. But a MemoryError
    of ``open`` (it had no room, and has dropped the payload) and a MissedError of a parcel (the payload has not come)
    fail that transfer only, and neither a FullError of ``stage`` nor a RefusedError of a parcel fails anything. A
    ``carry`` whose payload does not arrive may return if the parcel raises.
    """

    #: the number of bytes of a descriptor
    size: ClassVar[int] = 0
    #: payloads stay on this host, so that they may be in clear where a connection is encrypted
    local: ClassVar[bool] = False

    def __init__(self, say: Say) -> None:
        self.say = say

    def reserve(self, nbytes: int) -> torch.Tensor | None:
        """Returns memory, as flat bytes, that ``stage`` takes without a copy when it is filled; None if there is none.

        May be called by any thread, and the memory may be dropped.
        """
        return None

    def prepare(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the tensor to give to ``stage`` in place of one that is not on the CPU.

        Called in the thread that sends, whose streams know when the tensor's contents are there.
        """
        return plain(tensor)

    @abstractmethod
    def stage(self, tensor: torch.Tensor) -> bytes | None:
        """Gets a tensor ready, of any strides and device; returns its descriptor.

        None if this tensor has to take the connection; that is not an error. Raises FullError where the peer has to
        take something first. It does not wait for that itself: the thread that calls it is the one that makes a new
        connection where this one breaks, and it alone sees that one has.
        """

    def carry(self, tensor: torch.Tensor) -> None:  # noqa: B027 - there is nothing to do where all is done in stage
        """Moves the payload, whose header was written: returns when the memory may change."""

    def lent(self, descriptor: bytes) -> int:
        """Returns 0 for what ``carry`` moves. Where ``stage`` has described the tensor's own memory, which must not
        change before the peer has read it: a number, each time a larger one."""
        return 0

    def read_up_to(self) -> int:
        """Returns the number of the last one of ``lent`` that the peer has read. It may say so beside the connection,
        where nothing waits for a receive of this end's."""
        return 0

    def stop_lending(self) -> None:  # noqa: B027 - many lend nothing
        """Has ``stage`` lend nothing any more, as the connection has broken: what was lent and not dealt with is staged
        anew. Never blocks."""

    @abstractmethod
    def open(self, descriptor: bytes, nbytes: int) -> Parcel:
        """Returns the payload that the peer has announced."""

    def hear(self, word: bytes) -> None:  # noqa: B027 - many have nothing to say
        """Takes a word of the peer's carrier. Must not block: nothing else is read meanwhile."""

    def fail(self, why: str) -> None:  # noqa: B027 - many never block
        """Ends the waits: the connection is over, and threads in ``carry`` or in a parcel have to come out, raising.

        In any thread, any number of times; never blocks.
        """

    def close(self) -> None:  # noqa: B027
        """Releases the carrier's resources: no thread uses it any more. Tensors that were lent live on."""
