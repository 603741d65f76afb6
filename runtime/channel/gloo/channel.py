"""The data channel "gloo": like "tcp", but large payloads go through torch's gloo, and collectives are gloo's.

For comparison, and for users who have gloo tuned for a network. Gloo's connections (from random ports of the channel's
own address) neither authenticate nor encrypt: between hosts it belongs on a trusted network. The members of a group
are told over the authenticated connections (``store.py``), which also tell of a peer's end.

    groups      one of each pair that has sent something large, made in the background; till then the connection does,
                and again when gloo's own connection was ended by something between the two (a reset): that transfer
                fails, as gloo can't resume it
                one of each set of ranks, at its first collective
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import ClassVar

import torch

from ...protocol.errors import BrokenError, ProtocolError
from ...protocol.flat import as_bytes
from ..base import Capabilities
from ..carrier import Carrier, MissedError, Parcel, Say
from ..library_groups import GroupedChannel, entry
from ..payload import plain
from ..tcp.dial import split_address
from .group import GlooGroup

#: Seconds in which members connect once they are known. A pair that fails has the connection; and gloo's wait cannot
#: be broken off where a peer is lost in the meantime.
_CONNECT, _CONNECT_PAIR = 60.0, 3.0
#: Reductions that gloo does as this project does; its minimum and maximum of floats treat NaN differently.
_REDUCES = {
    **dict.fromkeys((torch.float16, torch.bfloat16, torch.float32, torch.float64), ("SUM", "AVG", "PRODUCT")),
    **dict.fromkeys(
        (torch.uint8, torch.int8, torch.int32, torch.int64), ("SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
    ),
}

_MET, _BROKE = b"met", b"broke"

_log = logging.getLogger("disttensor.channel")


class GlooChannel(GroupedChannel):
    """TCP whose large payloads and collectives go through torch's gloo."""

    name: ClassVar[str] = "gloo"
    library: ClassVar[str] = "gloo"
    capabilities: ClassVar[Capabilities] = Capabilities(
        collectives=frozenset(
            ("all_reduce", "reduce", "broadcast", "all_gather", "gather", "scatter", "reduce_scatter", "all_to_all")
        )
    )

    @classmethod
    def unavailable(cls, rank: int) -> str:
        there = torch.distributed.is_available() and torch.distributed.is_gloo_available()
        return "" if there else "this torch was built without gloo"

    def has_collective(
        self, kind: str, *, dtype: torch.dtype, op: str = "SUM", device: str = "cpu", even: bool = True
    ) -> bool:
        """Returns whether gloo does it: of equal lengths, on the CPU; reductions of the usual dtypes."""
        fits = "reduce" not in kind or op in _REDUCES.get(dtype, ())
        return kind in self.capabilities.collectives and device == "cpu" and even and fits

    def _group(self, name: str, ranks: Sequence[int]) -> GlooGroup:
        return self.meet(name, ranks, lambda: self.given_up(ranks) or self.hung_up(ranks), _CONNECT)

    def meet(self, name: str, ranks: Sequence[int], over: Callable[[], BrokenError | None], limit: float) -> GlooGroup:
        """Makes a group with the others. Raises as GlooGroup does."""
        hosts, tell = [self.host_of(rank) for rank in ranks], self.teller(ranks)
        return GlooGroup(name, hosts, list(ranks).index(self.rank), self.mailbox, tell, over, limit)

    def hung_up(self, ranks: Sequence[int]) -> BrokenError | None:
        """Returns the error for a rank that has hung up, which readers do not see while they wait for gloo; or None."""
        for rank in ranks:
            if rank != self.rank and (peer := self._peers.get(rank)) is not None and peer.hung_up():
                return BrokenError(peer.lost(EOFError("it hung up")), rank)
        return None

    def host_of(self, rank: int) -> str:
        """Returns a rank's IP address."""
        return split_address(self.address() if rank == self.rank else self._peer(rank, 0).info.address)[0]

    def _carrier(self, peer: int) -> partial[GlooCarrier]:
        return partial(GlooCarrier, self, peer)

    def _carriers(self) -> list[GlooCarrier]:
        carriers = [peer.carrier for peer in [*self._peers.values(), *self._replaced]]
        return [carrier for carrier in carriers if isinstance(carrier, GlooCarrier)]

    def _end_threads(self, join: float) -> None:
        super()._end_threads(join)
        for carrier in self._carriers():
            carrier.join(join)

    def _disown(self) -> None:
        """Keeps gloo's groups alive in a forked child.

        Gloo's threads are not there, and destroying a group would wait for them.
        """
        for group in [*self._groups.values(), *(carrier.group for carrier in self._carriers())]:
            if isinstance(group, GlooGroup):
                group.leave_alone()
        super()._disown()


class _Payload(Parcel):
    """A payload that the peer sends by gloo at this moment."""

    def __init__(self, carrier: GlooCarrier, nbytes: int) -> None:
        self._carrier, self._nbytes = carrier, nbytes

    def discard(self) -> None:
        self._carrier.receive_into(torch.empty(self._nbytes, dtype=torch.uint8))

    def fill(self, memory: memoryview) -> None:
        self._carrier.receive_into(torch.frombuffer(memory, dtype=torch.uint8))


class GlooCarrier(Carrier):
    """The gloo group of one pair of peers, for large payloads."""

    def __init__(self, channel: GlooChannel, peer: int, say: Say) -> None:
        super().__init__(say)
        self._channel, self._peer = channel, peer
        self.pair = tuple(sorted((channel.rank, peer)))
        self._name = f"pair {self.pair}"
        self.group: GlooGroup | None = None
        self._last: GlooGroup | None = None  #: the group, once this carrier is closed
        self._lock = threading.RLock()
        self._meeting: threading.Thread | None = None
        self._met = False  #: the peer has its end of the group
        self._closed = False
        self._broken = ""  #: why the group was given up, while the peer is there

    def stage(self, tensor: torch.Tensor) -> bytes | None:
        self._begin_group()
        return b"" if self._met and self.group is not None else None

    def carry(self, tensor: torch.Tensor) -> None:
        """Sends a payload. If it does not arrive, that is for the peer to say: the group ends there, too."""
        if (group := self.group) is None:
            return
        try:
            group.send(as_bytes(plain(tensor)), self.pair.index(self._peer))
        except Exception as error:
            if self._closed or self._channel.lost([self._peer]) is not None:
                raise
            self._give_up(str(error))

    def open(self, descriptor: bytes, nbytes: int) -> _Payload:
        return _Payload(self, nbytes)

    def receive_into(self, memory: torch.Tensor) -> None:
        """Receives a payload. Raises ProtocolError where no group was made, by which it could come.

        Raises MissedError where gloo's connection has ended, and not the peer.
        """
        if self._broken:
            raise MissedError(f"gloo's connection was ended: {self._broken}")
        group = self.group
        if group is None:  # no honest peer sends by gloo what this side has not told it that it can take
            me = self._channel.rank
            raise ProtocolError(f"it is to come by gloo, and rank {me} has no group with rank {self._peer}")
        try:
            group.recv(memory, self.pair.index(self._peer))
        except Exception as error:
            if self._closed or self._channel.lost([self._peer]) is not None:
                raise
            self._give_up(str(error))
            raise MissedError(f"gloo's connection was ended: {error}") from None

    def _give_up(self, why: str, tell: bool = True) -> None:
        """Has large tensors take the connection from now on: the group's own has ended, and both ends see that."""
        with self._lock:
            if self._broken or self._closed:
                return
            self._broken = why or "without a word"
            self.group, self._last = None, self.group or self._last
        if self._last is not None:
            self._last.cut()
            self._last.close()
        if self._over() is None:
            _log.warning("large tensors take the connection with rank %s from now on, not gloo: %s", self._peer, why)
        if tell:
            self.say(_BROKE)

    def put_in_mailbox(self, key: str, value: bytes) -> None:
        """Puts a value into the peer's mailbox."""
        self.say(key.encode() + b"\0" + value)

    def hear(self, word: bytes) -> None:
        if word == _MET:
            self._met = True
            return
        if word == _BROKE:
            self._give_up("the other end of gloo's has found it ended", tell=False)
            return
        key, value = entry(word)
        self._channel.mailbox.put(key, value)
        if key.startswith(self._name):
            self._begin_group()

    def _begin_group(self) -> None:
        """Makes the pair's group, once, in the background."""
        with self._lock:
            if self._meeting is None and not self._closed:
                name = f"disttensor-gloo-{self._channel.rank}-{self._peer}-meet"
                meeting = threading.Thread(target=self._meet, name=name, daemon=True)
                meeting.start()
                self._meeting = meeting

    def _over(self) -> BrokenError | None:
        return self._channel.lost([self._peer]) or self._channel.hung_up([self._peer])

    def _meet(self) -> None:
        try:
            group = self._channel.meet(self._name, self.pair, self._over, _CONNECT_PAIR)
        except Exception as error:
            if not self._closed and self._over() is None:
                _log.warning("large tensors take the connection with rank %s, not gloo: %s", self._peer, str(error))
            return
        with self._lock:
            if self._closed or self._broken:
                self._last = group
                group.close()
            else:
                self.group = group
        # One end may be done while the other still waits for a word that stands behind a tensor in the queue.
        self.say(_MET)

    def join(self, seconds: float) -> None:
        """Waits for the thread, and for the end of the group if this carrier is closed."""
        if self._meeting is not None and self._meeting is not threading.current_thread():
            self._meeting.join(seconds)
        if self._last is not None:
            self._last.join(seconds)

    def fail(self, why: str) -> None:
        self._closed = True
        self._channel.over(self._peer)
        if self.group is not None:
            self.group.cut()

    def close(self) -> None:
        with self._lock:
            self._closed, self.group, self._last = True, None, self.group or self._last
        if self._last is not None:
            self._last.close()
