"""One rank's end of one collective: numbered messages to and from the others, and what happens when something fails.

Every rank runs the same schedule of messages to its end, whatever happens. A rank in *trouble* (its input is poison, a
peer is lost, a kernel failed) goes on with garbage, and sends refusals (``DataChannel.refuse``) in place of tensors.
Who receives a refusal is in the same trouble. So trouble reaches exactly those whose result depends on it; nobody waits
for a message that never comes; and no message is left over that would stand in the way of the pair's next one.

    trouble                      the others are told         and raise
    input is poison              its rank and seq            PoisonedError(rank, seq)
    a peer is lost               its rank, and LOST          BrokenError
    a kernel failed here         our rank and seq            PoisonedError(rank, seq)
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch

from ..channel.base import DataChannel, Transfer
from ..protocol.errors import BrokenError, ChannelError, PoisonedError
from .reduction import ReduceOp, kernel

#: A collective uses at most so many transfer ids, from its base on.
IDS = 1 << 20
#: The ``seq`` of a refusal that says: that rank is lost.
LOST = 1 << 63
#: Sends under way whose tensors are kept, before the oldest is waited for.
_MOST_SENDS = 64

#: A rank's part of a collective on one slab of the data. At each yield it leaves the turn to other slabs.
Steps = Iterator[None]


class Small(Protocol):
    """What small tensors may go by beside the channel (shared_pages.py)."""

    def of(self, wire: Wire) -> Any: ...


class Wire:
    """``ranks`` are the peers that take part, in the group's order; we are ``ranks[me]``. ``base`` is the first of the
    collective's transfer ids. ``blame`` (rank, seq) is what the others are told if we fail by ourselves. ``poison``
    (rank, seq) says that our input is. ``carry``: floats travel in this dtype, which has less precision.
    """

    def __init__(
        self,
        channel: DataChannel,
        ranks: Sequence[int],
        me: int,
        base: int,
        *,
        blame: tuple[int, int] = (0, 0),
        poison: tuple[int, int] | None = None,
        carry: torch.dtype | None = None,
    ) -> None:
        self.size, self.me = len(ranks), me
        self.contributors = self.size  #: over which an average is taken
        self.channel, self.ranks, self._base, self._blame = channel, tuple(ranks), base, blame
        self._carry = carry
        self._sent: defaultdict[int, int] = defaultdict(int)  #: messages by peer
        self._received: defaultdict[int, int] = defaultdict(int)
        self._sends: deque[tuple[Transfer, int]] = deque()  #: under way, and to whom
        self.boards: Small | None = None  #: for what is small
        self._trouble = poison  #: what the others are told
        self.error: Exception | None = PoisonedError(*poison) if poison else None

    def part(self, members: Sequence[int]) -> Wire:
        """The same for some of the group, in that order; we have to be one of them. Trouble is not shared until
        ``join``."""
        one = Wire(
            self.channel, [self.ranks[i] for i in members], members.index(self.me), self._base,
            blame=self._blame, carry=self._carry,
        )  # fmt: skip
        one._sent, one._received, one._sends = self._sent, self._received, self._sends
        one._trouble, one.error = self._trouble, self.error
        return one

    def join(self, part: Wire) -> None:
        """Takes over the trouble of a part."""
        if self._trouble is None:
            self._trouble, self.error = part._trouble, part.error

    @property
    def trouble(self) -> tuple[int, int] | None:
        """(rank, seq): what the others are told."""
        return self._trouble

    def lost(self, source: int) -> str:
        """Why ``ranks[source]`` is lost, or an empty text."""
        return self.channel.failure(self.ranks[source])

    # ***** messages *****

    def send(self, tensor: torch.Tensor, to: int) -> None:
        """To ``ranks[to]``. The tensor must not change until something arrived that depends on it, or ``settle``."""
        peer = self.ranks[to]
        transfer = self._number(self._sent, peer)
        if self._trouble is None:
            try:
                self._sends.append((self.channel.isend(_as(tensor, self.carried(tensor.dtype)), peer, transfer), peer))
                if len(self._sends) > _MOST_SENDS:
                    self._settle(*self._sends.popleft())
                return
            except Exception as error:
                self.fail(error)
        try:
            self.channel.refuse(peer, transfer, *(self._trouble or self._blame))
        except Exception as error:  # our own end is closed
            self.fail(error)

    def take(self, like: torch.Tensor, source: int) -> Incoming:
        """A message of the form of ``like`` from ``ranks[source]``, in memory of the channel's choice, to keep."""
        return Incoming(self, like, source, None)

    def fill(self, target: torch.Tensor, source: int) -> Incoming:
        """A message into ``target``."""
        return Incoming(self, target, source, target)

    def carried(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which tensors of ``dtype`` travel."""
        less = self._carry is not None and dtype.is_floating_point and self._carry.itemsize < dtype.itemsize
        return self._carry if less and self._carry is not None else dtype

    def rounded(self, tensor: torch.Tensor) -> torch.Tensor:
        """What the others get of ``tensor`` when it is sent."""
        return _as(_as(tensor, self.carried(tensor.dtype)), tensor.dtype)

    def _number(self, counter: defaultdict[int, int], peer: int) -> int:
        counter[peer] += 1
        return self._base + counter[peer] - 1

    # ***** work that may fail *****

    def combine(self, op: ReduceOp, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Reduces two tensors, the contribution of the lower rank first, into ``out`` or a new one."""
        if self._trouble is None:
            try:
                return kernel(op)(a, b, out=out)
            except Exception as error:
                self.fail(error)
        return a if out is None else out

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Unless both are the same memory."""
        if self._trouble is None and source.data_ptr() != target.data_ptr():
            try:
                target.copy_(source)
            except Exception as error:
                self.fail(error)

    def finish(self, op: ReduceOp, total: torch.Tensor) -> None:
        """What is left to do once all contributions are in ``total``: it becomes exactly what the others get of it."""
        if self._trouble is None:
            try:
                if op is ReduceOp.AVG:
                    total.div_(self.contributors)
                if self.carried(total.dtype) != total.dtype:
                    total.copy_(self.rounded(total))
            except Exception as error:
                self.fail(error)

    # ***** trouble *****

    def fail(self, error: Exception, peer: int | None = None) -> None:
        """Notes what went wrong, with a peer or by ourselves. Only the first counts."""
        if self._trouble is not None:
            return
        if isinstance(error, PoisonedError):
            self._trouble = error.rank, error.seq
            if error.seq == LOST:
                me = self.ranks[self.me]
                error = BrokenError(
                    f"rank {error.rank} was lost to a rank of a collective that rank {me} takes part in"
                )
        else:
            self._trouble = self._blame if peer is None else (peer, LOST)
        self.error = error

    def _settle(self, send: Transfer, peer: int) -> None:
        try:
            send.wait()
        except ChannelError as error:
            self.fail(error, peer)

    def settle(self) -> None:
        """Waits until memory that was sent may change."""
        while self._sends:
            self._settle(*self._sends.popleft())

    def end(self) -> None:
        """The collective's end. Raises what went wrong."""
        self.settle()
        if self.error is not None:
            raise self.error


def _as(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``tensor.to(dtype)``, which takes its time even where there is nothing to do."""
    return tensor if tensor.dtype is dtype else tensor.to(dtype)


class Incoming:
    """A message that is awaited: announced when it is made."""

    def __init__(self, wire: Wire, like: torch.Tensor, source: int, target: torch.Tensor | None) -> None:
        self._wire, self._like, self._target = wire, like, target
        self._peer = wire.ranks[source]
        transfer = wire._number(wire._received, self._peer)
        dtype = wire.carried(like.dtype)
        self._copied = target is None or dtype != target.dtype
        self._transfer: Transfer | None = None
        try:
            if target is not None and not self._copied:
                self._transfer = wire.channel.irecv(target, self._peer, transfer)
            else:
                self._transfer = wire.channel.iarrive(tuple(like.shape), dtype, self._peer, transfer)
        except Exception as error:
            wire.fail(error)

    def get(self) -> torch.Tensor:
        """Waits for it. In trouble: a tensor of the form with anything in it."""
        wire = self._wire
        if self._transfer is not None:
            try:
                self._transfer.wait()
                if not self._copied:
                    return self._like
                arrived: torch.Tensor = self._transfer.tensor  # type: ignore[attr-defined]
                if self._target is None:
                    return _as(arrived, self._like.dtype)
                wire.copy(arrived, self._target)
                return self._target
            except Exception as error:
                wire.fail(error, self._peer)
        return torch.empty_like(self._like) if self._target is None else self._target


def pipeline(slabs: Iterable[Steps]) -> None:
    """Runs the schedules of many slabs side by side: in each round every one that runs goes on to its next yield, the
    oldest first, and one more is started.

    All ranks must yield at the same places of the schedule (also a rank that has nothing to do there): then both ends
    of each pair see its messages in the same order, and as this is an order of the whole that everybody follows, no
    two can wait for each other.
    """
    running: deque[Steps] = deque()
    waiting = iter(slabs)
    done = object()
    started: Steps | None = None
    while True:
        for _ in range(len(running)):
            one = running.popleft()
            if next(one, done) is not done:
                running.append(one)
        started = next(waiting, None)
        if started is not None:
            if next(started, done) is not done:
                running.append(started)
        elif not running:
            return
