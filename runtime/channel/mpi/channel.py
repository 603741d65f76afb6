"""The data channel "mpi": like "tcp", but MPI carries large payloads, by point-to-point messages, and does collectives.

For processes that mpiexec has started (``launch/starters/mpi.py``), and networks that MPI knows how to use. MPI neither
authenticates nor encrypts. A payload's message is posted when its header has come over the connection, so nobody waits
in MPI for a peer that computes; and all waiting polls now and then, instead of spinning as MPI itself does.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

import torch

from ...host import mpi_env
from ...protocol.errors import BrokenError, ClosedError, ProtocolError
from ..base import Capabilities, ChannelContext
from ..carrier import Carrier, Parcel, Say
from ..payload import byte_view, plain
from ..tcp.channel import TcpChannel
from .group import KINDS, REDUCES, MpiGroup

#: Words between carriers: where do you receive? (and this side's place); I receive there; a collective broke off.
_ASK, _HERE, _BROKE = b"?", b"!", b"x"
#: The place where a carrier receives: its process's rank in MPI, and a tag that no other one of that process has.
_PLACE = struct.Struct("<iq")

#: The most bytes of one message: a count of MPI's is an int.
_CHUNK = 1 << 30

_tags = itertools.count()


class MpiChannel(TcpChannel):
    """TCP whose large payloads and collectives go by MPI. Raises StartError where ``unavailable`` says why."""

    name: ClassVar[str] = "mpi"
    capabilities: ClassVar[Capabilities] = Capabilities(collectives=KINDS)

    @classmethod
    def unavailable(cls, rank: int) -> str:
        if mpi_env.joined() is None:
            return "no mpiexec has started its processes: `mpiexec -n 5 dtrun --backend mpi script.py` does"
        return ""

    def __init__(self, context: ChannelContext) -> None:
        self.world = mpi_env.world()
        self.rank = context.rank
        self.broken: dict[int, str] = {}  #: collective, by its number -> the rank that could not take part, and why
        self._groups: dict[tuple[int, ...], MpiGroup] = {}
        super().__init__(context)

    def has_collective(
        self, kind: str, *, dtype: torch.dtype, op: str = "SUM", device: str = "cpu", even: bool = True
    ) -> bool:
        """Returns whether MPI does it: on the CPU; reductions of the dtypes that MPI knows."""
        fits = "reduce" not in kind or op in REDUCES.get(dtype, ())
        return kind in KINDS and device == "cpu" and fits

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
        ranks = tuple(ranks)
        try:
            check = partial(self._check, ranks, number)
            group = self._groups.get(ranks)
            if group is None:
                for carrier in self._others(ranks):
                    carrier.ask()  # so that there are connections, which tell of an end
                group = self._groups[ranks] = MpiGroup(self.world, ranks, me, number, check)
            group.check = check
            group.run(kind, inputs, outs, op, root)
        except Exception as error:
            self._groups.pop(ranks, None)
            if isinstance(error, ClosedError):
                raise
            if not isinstance(error, BrokenError) or error.rank is not None:  # else another rank has told this one
                why = f"rank {self.rank} could not take part: {type(error).__name__}: {error}".encode()[:500]
                for carrier in self._others(ranks):
                    carrier.say(_BROKE + number.to_bytes(8, "little") + why)
            if isinstance(error, BrokenError):
                raise
            raise BrokenError(f"{kind} of ranks {list(ranks)} by MPI broke off: {error}") from error

    def _others(self, ranks: Sequence[int]) -> list[MpiCarrier]:
        carriers = [self._peer(rank, 0).carrier for rank in ranks if rank != self.rank]
        return [carrier for carrier in carriers if isinstance(carrier, MpiCarrier)]

    def _check(self, ranks: Sequence[int], number: int) -> None:
        """Raises the error that makes a collective of these ranks hopeless, if there is one."""
        self._check_open()
        for rank in ranks:
            if rank != self.rank and (why := self.failure(rank)):
                raise BrokenError(why, rank)
        if number in self.broken:
            raise BrokenError(self.broken[number])

    def _carrier(self, peer: int) -> partial[MpiCarrier]:
        return partial(MpiCarrier, self, peer)


class _Payload(Parcel):
    """A payload that the peer sends at this moment."""

    def __init__(self, carrier: MpiCarrier, source: int, nbytes: int) -> None:
        self._carrier, self._source, self._nbytes = carrier, source, nbytes

    def discard(self) -> None:
        self.fill(memoryview(bytearray(self._nbytes)))

    def fill(self, memory: memoryview) -> None:
        self._carrier.receive_into(memory, self._source)


class MpiCarrier(Carrier):
    """The MPI messages of one pair of peers. A descriptor is the sender's rank in MPI."""

    size: ClassVar[int] = 4

    def __init__(self, channel: MpiChannel, peer: int, say: Say) -> None:
        super().__init__(say)
        self._channel, self._peer = channel, peer
        self._world = channel.world
        # late messages for an earlier carrier are long over when tags repeat
        self._tag = next(_tags) % self._world.tags
        self._there: tuple[int, int] | None = None  #: the peer's place, once it has told it
        self._asked = False
        self._failed = ""

    def ask(self) -> None:
        if not self._asked:
            self._asked = True
            self.say(_ASK + self._place())

    def _place(self) -> bytes:
        return _PLACE.pack(self._world.rank, self._tag)

    def hear(self, word: bytes) -> None:
        kind, rest = word[:1], word[1:]
        if kind == _BROKE:
            self._channel.broken[int.from_bytes(rest[:8], "little")] = rest[8:].decode(errors="replace")
            return
        if kind not in (_ASK, _HERE) or len(rest) != _PLACE.size:
            raise ProtocolError(f"{word[:20]!r} is no word between carriers of MPI")
        self._there = _PLACE.unpack(rest)
        if kind == _ASK:
            self._asked = True
            self.say(_HERE + self._place())

    def stage(self, tensor: torch.Tensor) -> bytes | None:
        self.ask()
        return None if self._there is None else self._world.rank.to_bytes(self.size, "little")

    def carry(self, tensor: torch.Tensor) -> None:
        assert self._there is not None  # stage saw it
        rank, tag = self._there
        source = plain(tensor)
        memory = byte_view(source)
        for start in range(0, len(memory), _CHUNK):
            piece = memory[start : start + _CHUNK]
            self._finish(self._world.data.Isend([piece, self._world.mpi.BYTE], rank, tag), (piece, source))

    def open(self, descriptor: bytes, nbytes: int) -> _Payload:
        return _Payload(self, int.from_bytes(descriptor, "little"), nbytes)

    def receive_into(self, memory: memoryview, source: int) -> None:
        for start in range(0, len(memory), _CHUNK):
            piece = memory[start : start + _CHUNK]
            request = self._world.data.Irecv([piece, self._world.mpi.BYTE], source, self._tag)
            self._finish(request, piece)

    def _finish(self, request: Any, memory: object) -> None:
        self._world.finish(request, memory, self._check)

    def _check(self) -> None:
        if self._failed:
            raise BrokenError(self._failed, self._peer)

    def fail(self, why: str) -> None:
        self._failed = self._failed or why
