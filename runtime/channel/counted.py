"""A data channel that wraps another one and counts its transfers: calls, bytes and seconds, by peer and direction.

Counting is for everybody and always on, so it costs about a microsecond a transfer: no callback for a transfer that has
ended when it has begun (small sends), one otherwise. The flight record (process/flight.py) has each transfer that has
ended, but for those of collectives: these have a record of their own.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from time import perf_counter
from typing import NamedTuple, TypeAlias

import torch

from ..process import page
from ..process.flight import COUNT, SENDING
from ..process.observing import Seam, TransferDone
from ..process.page import RECEIVE
from .base import MASTER, Arrival, DataChannel, PeerInfo, Transfer

#: The number, in place of a peer's, of collectives that the channel does itself.
GROUP = -2
#: The name, in place of a channel's, of uploads that travel with the commands.
BY_COMMANDS = "commands"
#: The bytes from which on a transfer is known by itself while it is under way, and not only as one more.
LARGE = 1 << 20

#: The most that the number of a transfer is in the flight record.
_NUMBER = (1 << 63) - 1

#: Calls, bytes, seconds.
Figures: TypeAlias = tuple[int, int, float]
#: Name of the channel, its use, peer, sent, received.
Row: TypeAlias = tuple[str, str, int, Figures, Figures]


class TransferTally:
    """The counts of transfers with one peer in one direction.

    Its seconds are those in which at least one was under way. It has been tuned: ``with`` would take twice as long as
    the lock, and ``max`` as long as all the rest.
    """

    __slots__ = ("_lock", "_running", "_since", "_until", "bytes", "calls", "seconds")

    def __init__(self) -> None:
        # Re-entrant: a signal's handler that uses tensors may come in the middle of one of these steps.
        self._lock = threading.RLock()
        self._running = 0
        self._since = self._until = 0.0  #: when the first transfer under way began; when the last one ended
        self.calls, self.bytes, self.seconds = 0, 0, 0.0

    def add(self, nbytes: int, start: float) -> None:
        """Counts a transfer that began at ``start`` (perf_counter) and has ended."""
        now = perf_counter()
        self._lock.acquire()
        try:
            self.calls += 1
            self.bytes += nbytes
            if not self._running:
                self.seconds += now - (start if start > self._until else self._until)
                self._until = now
        finally:
            self._lock.release()

    def add_ended(self, nbytes: int, start: float, ended: float) -> None:
        """Counts a transfer that began and ended then, which is told of later: perhaps behind one that ended later."""
        self._lock.acquire()
        try:
            self.calls += 1
            self.bytes += nbytes
            if not self._running and ended > self._until:
                self.seconds += ended - (start if start > self._until else self._until)
                self._until = ended
        finally:
            self._lock.release()

    def begin_transfer(self, nbytes: int, start: float) -> None:
        """Counts a transfer that began at ``start`` and is under way until ``end_transfer``."""
        self._lock.acquire()
        try:
            self.calls += 1
            self.bytes += nbytes
            if not self._running:
                self._since = start if start > self._until else self._until
            self._running += 1
        finally:
            self._lock.release()

    def end_transfer(self) -> None:
        now = perf_counter()
        self._lock.acquire()
        try:
            self._running -= 1
            if not self._running:
                self._until = now
                self.seconds += now - self._since
        finally:
            self._lock.release()

    def under_way(self) -> tuple[int, float, int, int, float] | None:
        """Returns how many transfers are under way, and for how many seconds at least one has been; with ``figures``.
        None where none is."""
        with self._lock:
            if not self._running:
                return None
            since = max(0.0, perf_counter() - self._since)
            return self._running, since, self.calls, self.bytes, self.seconds + since

    def figures(self) -> Figures:
        """Returns calls, bytes, seconds; for transfers under way, the seconds until now."""
        with self._lock:
            running = perf_counter() - self._since if self._running else 0.0
            return self.calls, self.bytes, self.seconds + running


class LargeUnderWay(NamedTuple):
    """A large transfer that is under way."""

    peer: int
    sent: bool  #: or received
    transfer: int  #: its number
    bytes: int
    seconds: float  #: since it began
    passed: int  #: bytes; -1 where that isn't known
    passing: float  #: for how many seconds they have


class _Tallies(dict[int, TransferTally]):
    """The tallies by peer, made at first use."""

    def __missing__(self, peer: int) -> TransferTally:
        return self.setdefault(peer, TransferTally())


class CountedChannel(DataChannel):
    """Wraps a channel and counts its transfers. ``use`` names their purpose.

    Transfers are counted as they begin, refusals not. Observers at the seam are told of each when it has ended.
    """

    name = "counted"

    def __init__(self, inner: DataChannel, use: str = "", seam: Seam | None = None) -> None:
        self.inner, self.use = inner, use
        self._seam = Seam(MASTER) if seam is None else seam
        self._transferred = self._seam.transferred
        self.name, self.capabilities = inner.name, inner.capabilities  # type: ignore[misc]  # in place of the class's
        self._sent, self._received = _Tallies(), _Tallies()
        #: (peer, sent, number) -> (bytes, when it began, itself), of large transfers under way
        self._large: dict[tuple[int, bool, int], tuple[int, float, Transfer]] = {}
        self._recorded = use == "transfers"  #: whether the flight record has its transfers
        self._forgotten: dict[int, str] = {}  #: why peers are lost, for channels that do not keep it

    def __repr__(self) -> str:
        return f"<CountedChannel {self.inner!r}>"

    def isend(self, tensor: torch.Tensor, peer: int, transfer: int) -> Transfer:
        start = perf_counter()
        sending = self.inner.isend(tensor, peer, transfer)
        if sending.is_completed():
            self._sent[peer].add(tensor.nbytes, start)
            if self._recorded:
                _record(peer, SENDING, transfer, tensor.nbytes, start)
        else:
            tally = self._sent[peer]
            tally.begin_transfer(tensor.nbytes, start)
            sending.add_background_callback(self._ending(tally, peer, SENDING, transfer, tensor.nbytes, start))
            if tensor.nbytes >= LARGE:
                self._note_large((peer, True, transfer), tensor.nbytes, start, sending)
        if self._transferred.listeners:
            sending.add_background_callback(self._end_reporter(peer, True, transfer, tensor.nbytes, start))
        return sending

    def irecv(self, tensor: torch.Tensor, peer: int, transfer: int) -> Transfer:
        start = perf_counter()
        receiving = self.inner.irecv(tensor, peer, transfer)
        tally = self._received[peer]
        tally.begin_transfer(tensor.nbytes, start)
        # not ``is_completed``: the channel would take that for a caller that waits
        receiving.add_background_callback(self._ending(tally, peer, RECEIVE, transfer, tensor.nbytes, start))
        if tensor.nbytes >= LARGE:
            self._note_large((peer, False, transfer), tensor.nbytes, start, receiving)
        if self._transferred.listeners:
            receiving.add_background_callback(self._end_reporter(peer, False, transfer, tensor.nbytes, start))
        return receiving

    def iarrive(self, shape: tuple[int, ...], dtype: torch.dtype, peer: int, transfer: int) -> Arrival:
        start = perf_counter()
        arriving = self.inner.iarrive(shape, dtype, peer, transfer)
        tally, nbytes = self._received[peer], math.prod(shape) * dtype.itemsize
        tally.begin_transfer(nbytes, start)
        arriving.add_background_callback(self._ending(tally, peer, RECEIVE, transfer, nbytes, start))
        if nbytes >= LARGE:
            self._note_large((peer, False, transfer), nbytes, start, arriving)
        if self._transferred.listeners:
            arriving.add_background_callback(self._end_reporter(peer, False, transfer, nbytes, start))
        return arriving

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
        """Counts the bytes of the inputs and outputs once, for GROUP: how often they travel is the channel's secret."""
        start = perf_counter()
        self.inner.collective(kind, ranks, me, inputs, outs, op, root, number)
        self.tally(sum(x.nbytes for x in inputs), sum(x.nbytes for x in outs), start, number)

    def tally(self, sent: int, received: int, start: float, number: int = 0) -> None:
        self._sent[GROUP].add(sent, start)
        self._received[GROUP].add(received, start)
        if self._transferred.listeners:
            self._end_reporter(GROUP, True, number, sent, start)()
            self._end_reporter(GROUP, False, number, received, start)()

    def _ending(
        self, tally: TransferTally, peer: int, kind: int, transfer: int, nbytes: int, start: float
    ) -> Callable[[], None]:
        """Returns what counts the end of a transfer, and records it."""
        if not self._recorded:
            return tally.end_transfer
        return partial(_end_transfer, tally, peer, kind, transfer, nbytes, start)

    def _note_large(self, key: tuple[int, bool, int], nbytes: int, start: float, transfer: Transfer) -> None:
        """Keeps a large transfer until its end."""
        self._large[key] = nbytes, start, transfer
        transfer.add_background_callback(partial(self._forget_large, key))

    def _forget_large(self, key: tuple[int, bool, int]) -> None:
        self._large.pop(key, None)

    def _end_reporter(self, peer: int, sent: bool, transfer: int, nbytes: int, start: float) -> Callable[[], None]:
        """Returns what tells observers that a transfer has ended, which began at ``start`` (perf_counter)."""
        began = self._seam.clock.now() - (perf_counter() - start)
        return partial(self._report_end, began, peer, sent, transfer, nbytes)

    def _report_end(self, began: float, peer: int, sent: bool, transfer: int, nbytes: int) -> None:
        seam = self._seam
        self._transferred.notify(
            TransferDone(seam.clock.now(), began, seam.node, peer, sent, transfer, nbytes, self.name, self.use)
        )

    def take_back(self, peer: int, transfer: int) -> bool:
        return self.inner.take_back(peer, transfer)

    def regroup(self, ranks: Sequence[int]) -> None:
        self.inner.regroup(ranks)

    def rows(self) -> list[Row]:
        """Returns a row for each peer that something was sent to or received from."""
        sent, received = dict(self._sent), dict(self._received)
        none = TransferTally()
        return [
            (self.name, self.use, peer, sent.get(peer, none).figures(), received.get(peer, none).figures())
            for peer in sorted({*sent, *received})
        ]

    def under_way(self) -> Iterator[tuple[int, bool, tuple[int, float, int, int, float]]]:
        """Yields, for each peer and direction in which something is under way: the peer, whether it is sent, and what
        ``TransferTally.under_way`` returns."""
        for tallies, sent in ((self._sent, True), (self._received, False)):
            for peer, tally in sorted(dict(tallies).items()):
                if (found := tally.under_way()) is not None:
                    yield peer, sent, found

    def large(self) -> list[LargeUnderWay]:
        """Returns the large transfers that are under way, the oldest first."""
        now, found = perf_counter(), []
        for (peer, sent, number), (nbytes, start, transfer) in self._large.copy().items():
            passed, passing = transfer.passed() or (-1, 0.0)
            found.append(LargeUnderWay(peer, sent, number, nbytes, max(0.0, now - start), min(passed, nbytes), passing))
        return sorted(found, key=lambda each: -each.seconds)

    # ***** as it is *****

    def has_collective(
        self, kind: str, *, dtype: torch.dtype, op: str = "SUM", device: str = "cpu", even: bool = True
    ) -> bool:
        return self.inner.has_collective(kind, dtype=dtype, op=op, device=device, even=even)

    def address(self) -> str:
        return self.inner.address()

    def connect(self, peers: Mapping[int, PeerInfo]) -> None:
        for peer in peers:
            self._forgotten.pop(peer, None)
        self.inner.connect(peers)

    def refuse(self, peer: int, transfer: int, rank: int, seq: int) -> None:
        self.inner.refuse(peer, transfer, rank, seq)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return self.inner.empty(shape, dtype)

    def failure(self, peer: int) -> str:
        return self.inner.failure(peer) or self._forgotten.get(peer, "")

    def staging(self, shape: tuple[int, ...], dtype: torch.dtype, peer: int) -> torch.Tensor:
        return self.inner.staging(shape, dtype, peer)

    def mark_lost(self, peer: int, why: str) -> None:
        self._forgotten[peer] = why
        self.inner.mark_lost(peer, why)

    def expire(self, peer: int, why: str) -> None:
        self.inner.expire(peer, why)

    def close(self) -> None:
        self.inner.close()

    def abort(self) -> None:
        self.inner.abort()


def _end_transfer(tally: TransferTally, peer: int, kind: int, transfer: int, nbytes: int, start: float) -> None:
    tally.end_transfer()
    _record(peer, kind, transfer, nbytes, start)


def _record(peer: int, kind: int, transfer: int, nbytes: int, start: float) -> None:
    """Notes a transfer that has ended in the flight record. ``start``: by perf_counter, whose clock is the record's."""
    ring = page.mine.ring
    ring.write(ring.slot(), start, transfer & _NUMBER, nbytes, perf_counter() - start, peer & COUNT, kind)


def count(channels: Iterable[DataChannel]) -> tuple[Row, ...]:
    """Returns the rows of those channels that count."""
    return tuple(row for channel in channels if isinstance(channel, CountedChannel) for row in channel.rows())


def sent_over_network(channels: Iterable[DataChannel]) -> tuple[int, float]:
    """Returns the bytes that were sent to other nodes, and the seconds in which some were under way, added up over the
    nodes, by those channels that reach other hosts."""
    found = [
        sent
        for channel in channels
        if isinstance(channel, CountedChannel) and not channel.capabilities.same_host
        for _, _, peer, sent, _ in channel.rows()
        if peer >= 0
    ]
    return sum(nbytes for _, nbytes, _ in found), sum(seconds for _, _, seconds in found)
