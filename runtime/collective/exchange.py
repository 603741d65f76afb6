"""One rank's end of one collective: numbered messages to and from the others, and what happens when something fails.

Every rank runs the same schedule of messages to its end, whatever happens. A rank in *trouble* (its input is poison, a
peer is lost, a kernel failed) keeps the schedule with arbitrary data, and sends refusals (``DataChannel.refuse``),
which are error markers in place of tensors. The receiver of a refusal is in the same trouble. So trouble reaches
exactly the ranks whose result depends on it; nobody waits for a message that never comes; and no message is left over
that would stand in the way of the pair's next one.

    trouble                      the others are told         and raise
    input is poison              its rank and seq            PoisonedError(rank, seq)
    a peer is lost               its rank, and LOST          BrokenError
    a kernel failed here         this rank and its seq       PoisonedError(rank, seq)
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch

from ..channel.base import DataChannel, Transfer
from ..process import page
from ..protocol.errors import BrokenError, ChannelError, PoisonedError
from ..protocol.transfer_ids import BLOCK
from .reduction import ReduceOp, kernel

#: The most transfer ids of a collective, from its base on.
IDS = BLOCK
#: The ``seq`` of a refusal that says that the rank is lost.
LOST = 1 << 63
#: The most sends under way whose tensors are kept, before the oldest is waited for.
_MOST_SENDS = 64

#: A rank's part of a collective on one slab of the data. At each yield other slabs have their turn.
Steps = Iterator[None]


class SmallTensorPath(Protocol):
    """The fast path of small tensors, beside the channel (shared_pages.py)."""

    def of(self, exchange: Exchange) -> Any: ...


class Exchange:
    """One rank's end of one collective.

    Args:
        channel: carries the messages.
        ranks: the peers that take part, in the group's order.
        me: this rank's place in ``ranks``.
        base: the first of the collective's transfer ids.
        blame: (rank, seq), what the others are told if this rank fails by itself.
        poison: (rank, seq), if this rank's input is poison.
        carry: the dtype in which floats travel, if it has less precision.
        before_wait: is called before this rank waits for another one, which may take as long as the other likes.
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
        before_wait: Callable[[], None] | None = None,
    ) -> None:
        self.size, self.me = len(ranks), me
        self.contributors = self.size  #: the number over which an average is taken
        self.channel, self.ranks, self._base, self._blame = channel, tuple(ranks), base, blame
        self._carry, self._before_wait = carry, before_wait
        self._sent: defaultdict[int, int] = defaultdict(int)  #: number of messages by peer
        self._received: defaultdict[int, int] = defaultdict(int)
        self._sends: deque[tuple[Transfer, int]] = deque()  #: sends under way, and their peers
        self.shared_pages: SmallTensorPath | None = None  #: the fast path of small tensors
        self._trouble = poison  #: (rank, seq) that the others are told
        self.error: Exception | None = PoisonedError(*poison) if poison else None

    def part(self, members: Sequence[int]) -> Exchange:
        """Returns an exchange for some ranks of the group, in that order, this rank among them.

        Trouble is not shared until ``join``.
        """
        one = Exchange(
            self.channel, [self.ranks[i] for i in members], members.index(self.me), self._base,
            blame=self._blame, carry=self._carry, before_wait=self._before_wait,
        )  # fmt: skip
        one._sent, one._received, one._sends = self._sent, self._received, self._sends
        one._trouble, one.error = self._trouble, self.error
        return one

    def join(self, part: Exchange) -> None:
        """Takes over the trouble of a part."""
        if self._trouble is None:
            self._trouble, self.error = part._trouble, part.error

    @property
    def trouble(self) -> tuple[int, int] | None:
        """The trouble that the others are told, as (rank, seq)."""
        return self._trouble

    def lost(self, source: int) -> str:
        """Returns the reason why ``ranks[source]`` is lost, or an empty text."""
        return self.channel.failure(self.ranks[source])

    # ***** messages *****

    def send(self, tensor: torch.Tensor, to: int) -> None:
        """Sends to ``ranks[to]``.

        The tensor must not change until a message that depends on it arrived, or until ``wait_for_sends``.
        """
        peer = self.ranks[to]
        transfer = self._number(self._sent, peer)
        if self._trouble is None:
            try:
                self._sends.append((self.channel.isend(_as(tensor, self.carried(tensor.dtype)), peer, transfer), peer))
                if len(self._sends) > _MOST_SENDS:
                    self._finish_send(*self._sends.popleft())
                return
            except Exception as error:
                self.fail(error)
        try:
            self.channel.refuse(peer, transfer, *(self._trouble or self._blame))
        except Exception as error:  # this end is closed
            self.fail(error)

    def recv(self, like: torch.Tensor, source: int) -> Incoming:
        """Announces a message in the form of ``like`` from ``ranks[source]``; it may be kept.

        The channel chooses its memory.
        """
        return Incoming(self, like, source, None)

    def recv_into(self, target: torch.Tensor, source: int) -> Incoming:
        """Announces a message from ``ranks[source]`` into ``target``."""
        return Incoming(self, target, source, target)

    def carried(self, dtype: torch.dtype) -> torch.dtype:
        """Returns the dtype in which tensors of ``dtype`` travel."""
        less = self._carry is not None and dtype.is_floating_point and self._carry.itemsize < dtype.itemsize
        return self._carry if less and self._carry is not None else dtype

    def rounded(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns ``tensor`` as the others get it when it is sent."""
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
        """Copies a tensor, unless both are the same memory."""
        if self._trouble is None and source.data_ptr() != target.data_ptr():
            try:
                target.copy_(source)
            except Exception as error:
                self.fail(error)

    def finish(self, op: ReduceOp, total: torch.Tensor) -> None:
        """Completes ``total`` once all contributions are in it: averages it, and rounds it as it travels.

        So it is exactly what the others get of it.
        """
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
        """Notes an error, with a peer or of this rank itself. Only the first counts."""
        if self._trouble is not None:
            return
        if isinstance(error, PoisonedError):
            self._trouble = error.rank, error.seq
            if error.seq == LOST:
                me = self.ranks[self.me]
                error = BrokenError(
                    f"rank {error.rank} was lost to a rank of a collective that rank {me} takes part in", error.rank
                )
        else:
            if peer is not None:
                self.channel.blame(error, peer)
            self._trouble = self._blame if peer is None else (peer, LOST)
        self.error = error

    def begin_wait(self, peer: int) -> None:
        """Notes that this rank waits for the rank ``peer``."""
        if self._before_wait is not None:
            self._before_wait()
        page.mine.await_peer(peer)

    def _finish_send(self, send: Transfer, peer: int) -> None:
        if self._before_wait is not None and not send.is_completed():
            self._before_wait()
        try:
            send.wait()
        except ChannelError as error:
            self.fail(error, peer)

    def wait_for_sends(self) -> None:
        """Waits until memory that was sent may change."""
        while self._sends:
            self._finish_send(*self._sends.popleft())

    def close(self) -> None:
        """Ends the collective. Raises the error of this rank's trouble, if any."""
        self.wait_for_sends()
        if self.error is not None:
            raise self.error


def _as(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns ``tensor.to(dtype)``, but skips that call, which is slow even where there is nothing to do."""
    return tensor if tensor.dtype is dtype else tensor.to(dtype)


class Incoming:
    """An expected message: announced to the channel when it is made."""

    def __init__(self, exchange: Exchange, like: torch.Tensor, source: int, target: torch.Tensor | None) -> None:
        self._wire, self._like, self._target = exchange, like, target
        self._peer = exchange.ranks[source]
        transfer = exchange._number(exchange._received, self._peer)
        dtype = exchange.carried(like.dtype)
        self._copied = target is None or dtype != target.dtype
        self._transfer: Transfer | None = None
        try:
            if target is not None and not self._copied:
                self._transfer = exchange.channel.irecv(target, self._peer, transfer)
            else:
                self._transfer = exchange.channel.iarrive(tuple(like.shape), dtype, self._peer, transfer)
        except Exception as error:
            exchange.fail(error)

    def get(self) -> torch.Tensor:
        """Waits for the message. In trouble: a tensor of the right form with arbitrary contents."""
        exchange = self._wire
        if self._transfer is not None:
            exchange.begin_wait(self._peer)
            try:
                self._transfer.wait()
                if not self._copied:
                    return self._like
                arrived: torch.Tensor = self._transfer.tensor  # type: ignore[attr-defined]
                if self._target is None:
                    return _as(arrived, self._like.dtype)
                exchange.copy(arrived, self._target)
                return self._target
            except Exception as error:
                exchange.fail(error, self._peer)
        return torch.empty_like(self._like) if self._target is None else self._target


def pipeline(slabs: Iterable[Steps]) -> None:
    """Runs the schedules of many slabs side by side.

    In each round every running one goes on to its next yield, the oldest first, and one more is started. All ranks must
    yield at the same places of the schedule (also a rank that has nothing to do there): then both ends of each pair see
    its messages in the same order, and as this is one order that everybody follows, no two can wait for each other.
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
