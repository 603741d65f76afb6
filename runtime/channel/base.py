"""The DataChannel: how tensor bytes move between two peers. It is swappable, as the best way differs between users.

A *peer* is a node (its rank, from 0) or the master (``MASTER``, -1). A *transfer* is one tensor on its way from one
peer to another, named by an integer that the master mints and tells both ends; an id is never used twice. For each
ordered pair of peers, sends and receives are issued in the same order at both ends.

To write a channel: subclass :class:`DataChannel` in one file, implement the abstract methods, register it
(``register_channel`` or the entry point ``disttensor.channels``), and run ``check_data_channel`` on it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ..host.silence import Silence
from ..process.renamed import old_methods
from ..protocol.errors import BrokenError

MASTER = -1


@dataclass(frozen=True)
class Capabilities:
    """The abilities of a channel; the session refuses any other use before any byte moves."""

    #: device types whose memory the channel sends from and receives into directly (others are staged through the CPU)
    devices: frozenset[str] = frozenset({"cpu"})
    #: collectives that the channel does by itself, named as in torch.distributed
    collectives: frozenset[str] = frozenset()
    #: it authenticates its peers; a channel that doesn't is used between hosts on a trusted network only
    authenticated: bool = False
    #: it encrypts payloads where ``ChannelContext.protection`` asks for it, with ``cipher``'s package
    encrypted: bool = False
    #: it compares checksums of payloads where ``ChannelContext.protection`` asks for it
    checksums: bool = False
    #: a receive gives its tensor back while nothing has arrived (``take_back``), so that may be the user's own
    takes_back: bool = False
    #: both peers have to be on one host
    same_host: bool = False
    #: peers on one host may share memory (``segments``): small collectives go through it
    shared_memory: bool = False
    #: both peers have to be threads of one process
    same_process: bool = False


@dataclass(frozen=True)
class Protection:
    """The protection of payloads on their way, as the user has asked for it; the same on all peers of a session.

    Shared memory and copies within a process are as they are: nobody else sees them.
    """

    #: True: every connection is encrypted; None: those between hosts are, unless the network is trusted; False: none
    encrypt: bool | None = None
    #: nobody else can use the network between the hosts
    trusted: bool = False
    #: payloads that are not encrypted are compared with a checksum, against accidents
    checksum: bool = False

    def encrypts(self, apart: bool) -> bool:
        """Returns whether a connection has to be encrypted. ``apart``: it leads to another host."""
        return self.encrypt is True or (self.encrypt is None and apart and not self.trusted)

    def forbids(self, apart: bool) -> bool:
        """Returns whether there may be no such connection: it must not be in clear, and is not to be encrypted."""
        return self.encrypt is False and apart and not self.trusted

    def missing(self, capabilities: Capabilities) -> str:
        """Returns the reason why a channel of these capabilities cannot protect as asked; empty if it can."""
        if self.encrypt and not capabilities.encrypted:
            return "encrypt=True was asked for, and it cannot encrypt what it carries; 'auto' and 'tcp' can"
        if self.checksum and not capabilities.checksums:
            return "checksum=True was asked for, and it compares no checksums; 'auto' and 'tcp' do"
        return ""


def nobodys(peer: int) -> int:
    """Returns 0: the process of a peer is not known."""
    return 0


@dataclass(frozen=True)
class ChannelContext:
    """The arguments that a channel is made with, on every peer."""

    rank: int  #: this peer's rank, or MASTER
    job: str  #: the job's id, a random text
    host: str  #: the address of the interface to listen on ("127.0.0.1" unless the user named one)
    further: tuple[str, ...] = ()  #: addresses of more interfaces, by which some peers reach this one
    protection: Protection = Protection()  #: the protection of payloads that was asked for
    #: seconds after which a connection is given up whose other end's host does not answer, where the channel notices
    silence: float = Silence().data
    #: returns the process of a peer, as this one's launcher has told, which has started it on this host; else 0
    process_of: Callable[[int], int] = nobodys


@dataclass(frozen=True)
class PeerInfo:
    """The way to reach a peer: its channel's ``address()``, and the 32-byte key that only the two peers have."""

    rank: int
    address: str
    key: bytes


class Transfer(ABC):
    """A transfer on its way. ``wait`` may be called by any thread, any number of times."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        old_methods(Transfer, cls, {"note": "add_background_callback"})

    @abstractmethod
    def wait(self, timeout: float | None = None) -> None:
        """Waits until the tensor may be used again (send) or holds the data (receive).

        Raises TimeoutError after ``timeout`` seconds, BrokenError or ClosedError when the transfer failed.
        """

    @abstractmethod
    def is_completed(self) -> bool:
        """Returns whether ``wait`` would return or raise at once."""

    @abstractmethod
    def add_done_callback(self, fn: Callable[[], None]) -> None:
        """Calls ``fn`` once when the transfer has ended (in any thread; it must not block), or now if it has."""

    def add_background_callback(self, fn: Callable[[], None]) -> None:
        """Does what ``add_done_callback`` does, for a caller that is not waiting: a channel need not hurry for it."""
        self.add_done_callback(fn)

    def passed(self) -> tuple[int, float] | None:
        """Returns how many of its bytes have passed, and the seconds since the first of them did; None where the
        channel doesn't count them, or none has passed yet."""
        return None


class Arrival(Transfer):
    """A receive into memory that the channel chooses."""

    def __init__(self, transfer: Transfer, tensor: Callable[[], torch.Tensor | None]) -> None:
        self._transfer, self._tensor = transfer, tensor

    @property
    def tensor(self) -> torch.Tensor:
        """The tensor that arrived, which is not a view; waits for it. Raises as ``wait`` does."""
        self._transfer.wait()
        tensor = self._tensor()
        if tensor is None:
            raise BrokenError("the transfer ended without a tensor")
        return tensor

    def wait(self, timeout: float | None = None) -> None:
        self._transfer.wait(timeout)

    def is_completed(self) -> bool:
        return self._transfer.is_completed()

    def add_done_callback(self, fn: Callable[[], None]) -> None:
        self._transfer.add_done_callback(fn)

    def add_background_callback(self, fn: Callable[[], None]) -> None:
        self._transfer.add_background_callback(fn)

    def passed(self) -> tuple[int, float] | None:
        return self._transfer.passed()


class DataChannel(ABC):
    """Moves tensors between this peer and others. All methods are thread-safe.

    Every peer makes its channel from a ChannelContext, and learns the other peers by ``connect``. ``send``, ``recv``,
    ``collective`` and ``close`` wait; all other methods return at once.

    ``isend`` and ``irecv`` return at once and keep a reference to the tensor until the transfer has ended. A tensor may
    have any dtype, any strides and zero elements. The memory of a tensor that is being sent must not change, and that
    of a tensor that is being received into must not be used, until its transfer has ended.

    The receiver's tensor must have the sender's dtype and number of elements, else its transfer fails with
    BrokenError, naming both sides' values. So does the sender's, unless it has ended by then: a send ends when its
    bytes were handed over (to the kernel, say), which does not mean that they have arrived. Other transfers go on.

    Data that arrives before its ``irecv`` waits, and later data of the same peer waits behind it; so every isend
    needs its irecv at the other end, or the pair stalls and, after a limit of the channel's, breaks.

    After a peer was lost (it closed, died or was forgotten) transfers with it fail with BrokenError, including those
    started later: ``isend`` and ``irecv`` return them, failed.

    Attributes:
        name: the name that users give.
        capabilities: the abilities of the channel.
    """

    name: ClassVar[str]
    capabilities: ClassVar[Capabilities] = Capabilities()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        old_methods(DataChannel, cls, {"forget": "mark_lost"})

    @classmethod
    def unavailable(cls, rank: int) -> str:
        """Returns the reason why the channel can't be used in this process; an empty text if it can.

        ``rank`` is this process's, or MASTER. To be called before a channel is made; it imports nothing large and makes
        no connection.
        """
        return ""

    @abstractmethod
    def __init__(self, context: ChannelContext) -> None: ...

    @abstractmethod
    def address(self) -> str:
        """Returns the address at which this peer can be reached.

        The master tells it to the others over the control channel.
        """

    @abstractmethod
    def connect(self, peers: Mapping[int, PeerInfo]) -> None:
        """Learns peers, each before the first transfer with it. Called again with more of them.

        The other end learns of this one by a command of its own, which it may take much later, having computed
        meanwhile: a transfer with it waits until then, and a call that comes before this method is kept waiting.
        Connections are made at first use.
        """

    @abstractmethod
    def isend(self, tensor: torch.Tensor, peer: int, transfer: int) -> Transfer:
        """Starts sending ``tensor`` to ``peer``; returns at once.

        Raises ValueError for an unknown peer, ClosedError after close, TypeError for a tensor that cannot travel as one
        piece of memory (sparse and quantized tensors).
        """

    @abstractmethod
    def irecv(self, tensor: torch.Tensor, peer: int, transfer: int) -> Transfer:
        """Starts receiving into ``tensor`` from ``peer``; returns at once.

        Raises as ``isend``, and BusyError if ``transfer`` is being received from that peer already.
        """

    def iarrive(self, shape: tuple[int, ...], dtype: torch.dtype, peer: int, transfer: int) -> Arrival:
        """Starts receiving into a CPU tensor that the channel makes; returns at once. Raises as ``irecv``.

        The channel may choose memory in which the data is already.
        """
        tensor = self.empty(shape, dtype)
        return Arrival(self.irecv(tensor, peer, transfer), lambda: tensor)

    def take_back(self, peer: int, transfer: int) -> bool:
        """Has a receive whose data has not begun to arrive go on without its tensor, which nothing writes from then on;
        returns whether it does. False where data is arriving in it, or the transfer has ended.

        Called where ``capabilities.takes_back``.
        """
        return False

    @abstractmethod
    def refuse(self, peer: int, transfer: int, rank: int, seq: int) -> None:
        """Tells the receiver, in place of ``isend``, that there is no tensor: command ``seq`` of node ``rank`` failed.

        The receiver's transfer fails with PoisonedError(rank, seq). Raises as ``isend`` does.
        """

    def send(self, tensor: torch.Tensor, peer: int, transfer: int) -> None:
        """Sends ``tensor`` to ``peer``, and waits until its memory may change.

        Raises as ``isend`` and ``Transfer.wait``.
        """
        self.isend(tensor, peer, transfer).wait()

    def recv(self, tensor: torch.Tensor, peer: int, transfer: int) -> None:
        """Receives into ``tensor`` from ``peer``, and waits for the data. Raises as ``irecv`` and ``Transfer.wait``."""
        self.irecv(tensor, peer, transfer).wait()

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Makes an uninitialised CPU tensor of this shape and dtype to receive into.

        A channel that reuses warm buffers hands out one of those; its storage has a fixed size then, so that
        ``resize_`` to more elements raises RuntimeError.
        """
        return torch.empty(shape, dtype=dtype)

    def staging(self, shape: tuple[int, ...], dtype: torch.dtype, peer: int) -> torch.Tensor:
        """Makes an uninitialised CPU tensor to fill and then ``isend`` to ``peer``, once.

        A channel may choose memory from which the data need not be copied again.
        """
        return self.empty(shape, dtype)

    def has_collective(
        self, kind: str, *, dtype: torch.dtype, op: str = "SUM", device: str = "cpu", even: bool = True
    ) -> bool:
        """Returns whether ``collective`` does a collective of this kind. All peers have to answer the same.

        Args:
            kind: the function's name in torch.distributed, such as "all_reduce".
            dtype: the tensors' dtype.
            op: the name of the ReduceOp.
            device: the type of the tensors' devices.
            even: False if some tensors have other lengths than others.
        """
        return kind in self.capabilities.collectives

    def collective(
        self,
        kind: str,
        ranks: Sequence[int],
        me: int,
        inputs: Sequence[torch.Tensor],
        outs: Sequence[torch.Tensor],
        op: str,
        root: int,
        number: int,
    ) -> None:
        """Does this peer's part of a collective of ``ranks``; returns when the tensors may be used.

        All tensors are one-dimensional, contiguous, of one dtype, and on a device of ``capabilities.devices``, or on
        the CPU where the tensor that should be there could not be made. The number of ``inputs`` -> ``outs``, at the
        root where the kind has one / at the others:

            all_reduce 1 -> 1    reduce 1 -> 1 / 1 -> 0    broadcast 1 -> 0 / 0 -> 1    all_gather 1 -> n    barrier
            gather 1 -> n / 1 -> 0    scatter n -> 1 / 0 -> 1    reduce_scatter n -> 1    all_to_all n -> n

        Called for collectives that ``has_collective`` allows, by one thread at a time, on all ``ranks`` in the same
        order; several sets of ranks overlap in any way.

        Args:
            kind: the function's name in torch.distributed, such as "all_reduce".
            ranks: the peers that take part, in the collective's order.
            me: this peer's place in ``ranks``.
            inputs: tensors that are read and stay as they are; one may be one of ``outs``.
            outs: tensors that are written.
            op: the name of the ReduceOp.
            root: the place in ``ranks`` of the root, where the kind has one.
            number: an id that is the same on all ranks, and not used again.

        When a rank is lost (``mark_lost`` tells of it at last) or fails in it, it raises ChannelError on all ranks that
        would wait for that one (BrokenError(text, rank) if one is known to be lost) and may then be called again;
        ``outs`` have arbitrary contents.
        """
        raise NotImplementedError(f"the channel {self.name} has no collectives")

    def regroup(self, ranks: Sequence[int]) -> None:  # noqa: B027 - most keep nothing
        """Drops state that is kept for the group ``ranks``, which may be out of step.

        Called on all ``ranks`` after a collective in which one of them was in trouble, before their next one.
        """

    def mark_lost(self, peer: int, why: str) -> None:  # noqa: B027 - a channel without connections has nothing to do
        """Marks ``peer`` as lost: transfers with it fail with BrokenError(why), now and later."""

    def expire(self, peer: int, why: str) -> None:  # noqa: B027 - one whose library sees to it has nothing to do
        """Notes that ``peer`` sends nothing any more: what it has sent still arrives, and waiting for more fails.

        Called by another thread than the one that uses the channel, which may be waiting; ``mark_lost`` comes later.
        """

    def failure(self, peer: int) -> str:
        """Returns the reason why ``peer`` is lost, or an empty text."""
        return ""

    def blame(self, error: Exception, peer: int) -> None:
        """Notes in the error of a transfer with ``peer`` that the peer's loss is its reason, where that is known."""
        if isinstance(error, BrokenError) and error.rank is None and self.failure(peer):
            error.rank = peer

    def tally(self, sent: int, received: int, start: float) -> None:  # noqa: B027 - for those that count
        """Counts bytes that a collective moved without transfers of this channel, since ``start`` (perf_counter)."""

    @abstractmethod
    def close(self) -> None:
        """Ends in order: waits a short, bounded time for sends under way, then does as ``abort``.

        Closing twice is fine.
        """

    @abstractmethod
    def abort(self) -> None:
        """Ends now: transfers under way fail with ClosedError. Safe in finalizers, never blocks for long."""
