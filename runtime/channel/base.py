"""L2: the DataChannel: how tensor bytes move between two peers. What is best differs between users: it is swappable.

A *peer* is a node (its rank, from 0) or the master (``MASTER``, -1). A *transfer* is one tensor on its way from one
peer to another, named by an integer that the master mints and tells both ends; an id is never used twice. For each
ordered pair of peers, sends and receives are issued in the same order at both ends.

To write a channel: subclass :class:`DataChannel` in one file, fill in what is abstract, register it
(``register_channel`` or the entry point ``disttensor.channels``), and run ``check_data_channel`` on it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

MASTER = -1


@dataclass(frozen=True)
class Capabilities:
    """What a channel can do; the session refuses what it can't before any byte moves."""

    #: device types whose memory it sends from and receives into directly (others are staged through the CPU)
    devices: frozenset[str] = frozenset({"cpu"})
    #: collectives that it has by itself, named as in torch.distributed
    collectives: frozenset[str] = frozenset()
    #: it authenticates its peers; one that doesn't is used between hosts on a trusted network only
    authenticated: bool = False
    #: the payload is encrypted
    encrypted: bool = False
    #: both peers have to be on one host
    same_host: bool = False


@dataclass(frozen=True)
class ChannelContext:
    """What a channel is made with, on every peer."""

    rank: int  #: this peer's rank, or MASTER
    job: str  #: the job's id, a random text
    host: str  #: the address of the interface to listen on ("127.0.0.1" unless the user named one)


@dataclass(frozen=True)
class PeerInfo:
    """How to reach a peer: what its channel's ``address()`` said, and the 32-byte key that only the two peers have."""

    rank: int
    address: str
    key: bytes


class Transfer(ABC):
    """A transfer on its way. ``wait`` may be called by any thread, any number of times."""

    @abstractmethod
    def wait(self, timeout: float | None = None) -> None:
        """Returns when the tensor may be used again (send) or holds the data (receive).

        Raises TimeoutError after ``timeout`` seconds, BrokenError or ClosedError when it failed.
        """

    @abstractmethod
    def is_completed(self) -> bool:
        """Whether ``wait`` would return or raise at once."""

    @abstractmethod
    def add_done_callback(self, fn: Callable[[], None]) -> None:
        """Calls ``fn`` once when the transfer ended (in any thread), or now if it has."""


class DataChannel(ABC):
    """Moves tensors between this peer and others. All methods are thread-safe.

    ``isend`` and ``irecv`` return at once and keep a reference to the tensor until the transfer ended. A tensor may
    have any dtype, any strides and zero elements; the receiver's must have the sender's dtype and number of elements
    (else both transfers fail with BrokenError, naming both sides' values). The memory of a tensor that is being sent
    must not change until the transfer ended.
    """

    name: ClassVar[str]
    capabilities: ClassVar[Capabilities] = Capabilities()

    @abstractmethod
    def __init__(self, context: ChannelContext) -> None: ...

    @abstractmethod
    def address(self) -> str:
        """Where this peer can be reached: told to the others by the master over the control channel."""

    @abstractmethod
    def connect(self, peers: Mapping[int, PeerInfo]) -> None:
        """Learns the other peers. Connections are made at first use. May be called again with more peers."""

    @abstractmethod
    def isend(self, tensor: torch.Tensor, peer: int, transfer: int) -> Transfer:
        """Starts sending ``tensor`` to ``peer``. Raises ValueError for an unknown peer, ClosedError after close."""

    @abstractmethod
    def irecv(self, tensor: torch.Tensor, peer: int, transfer: int) -> Transfer:
        """Starts receiving into ``tensor`` from ``peer``.

        Raises ValueError for an unknown peer, BusyError if ``transfer`` is being received already, ClosedError.
        """

    def send(self, tensor: torch.Tensor, peer: int, transfer: int) -> None:
        """Sends and waits."""
        self.isend(tensor, peer, transfer).wait()

    def recv(self, tensor: torch.Tensor, peer: int, transfer: int) -> None:
        """Receives and waits."""
        self.irecv(tensor, peer, transfer).wait()

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A CPU tensor to receive into. A channel that reuses warm buffers hands out one of those."""
        return torch.empty(shape, dtype=dtype)

    def forget(self, peer: int, why: str) -> None:  # noqa: B027 - a channel without connections has nothing to do
        """``peer`` is lost: transfers with it fail with BrokenError(why), now and later."""

    @abstractmethod
    def close(self) -> None:
        """Ends orderly: waits a short, bounded time for sends under way, then as ``abort``. Closing twice is fine."""

    @abstractmethod
    def abort(self) -> None:
        """Ends now; transfers under way fail with ClosedError. Safe in finalizers, never blocks for long."""
