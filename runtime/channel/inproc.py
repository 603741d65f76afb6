"""The data channel "inproc": peers are threads of one process.

A transfer is one copy, made by the end that comes second. Peers find each other by the job's id in ``_rooms``. It is a
real channel, which the tests use most. Nothing leaves the process, so there is nothing to protect on its way.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from ..protocol.errors import BrokenError, BusyError, ClosedError
from ..protocol.transfer_ids import spoken
from .base import Capabilities, ChannelContext, DataChannel, PeerInfo, Transfer
from .payload import describe, dtype_id, store
from .ticket import Ticket, failed, poisoned

#: source, destination, transfer
_Key = tuple[int, int, int]


@dataclass(eq=False)
class _Half:
    """One end of a transfer, which waits for the other."""

    tensor: torch.Tensor | None  #: None: there is no tensor to send, for command ``seq`` of node ``dtype`` failed
    dtype: int
    ticket: Ticket
    seq: int = 0


class _Room:
    """The state that the channels of one job share. ``lock`` guards it all; copies are made outside of it."""

    def __init__(self) -> None:
        # Re-entrant: the collector may run a finalizer that aborts a channel while the lock is held.
        self.lock = threading.RLock()
        self.members: dict[int, InprocChannel] = {}
        self.sends: dict[_Key, _Half] = {}
        self.receives: dict[_Key, _Half] = {}


_rooms: dict[str, _Room] = {}
_rooms_lock = threading.RLock()
_serial = itertools.count(1)


class InprocChannel(DataChannel):
    """Copies tensors between threads of one process.

    A rank that ends stays broken for the peers that existed then, until ``connect`` tells another key for it.
    """

    name: ClassVar[str] = "inproc"
    capabilities: ClassVar[Capabilities] = Capabilities(
        authenticated=True, encrypted=True, checksums=True, same_host=True, same_process=True
    )

    def __init__(self, context: ChannelContext) -> None:
        self._rank, self._job = context.rank, context.job
        self._address = f"inproc:{context.job}/{context.rank}#{next(_serial)}"
        self._known: dict[int, bytes] = {}  #: the peers' keys, by rank
        self._broken: dict[int, str] = {}  #: rank -> the reason
        self._closed = ""
        with _rooms_lock:
            room = _rooms.get(context.job) or _Room()
            with room.lock:
                if context.rank in room.members:
                    raise ValueError(
                        f"job {context.job!r} has a channel of rank {context.rank} in this process already"
                    )
                room.members[context.rank] = self
            self._room = _rooms[context.job] = room

    def __repr__(self) -> str:
        return f"<InprocChannel rank={self._rank} {self._closed or f'peers={sorted(self._known)}'}>"

    def address(self) -> str:
        """Returns a name that identifies this peer; peers of one process need no address."""
        return self._address

    def connect(self, peers: Mapping[int, PeerInfo]) -> None:
        """Learns ``peers``; this peer's own rank among them is passed over. Another key for a known rank means that the
        rank was started anew."""
        with self._room.lock:
            self._check_open()
            for rank in peers.keys() - {self._rank}:
                if self._known.get(rank) != peers[rank].key:
                    self._known[rank] = peers[rank].key
                    if rank in self._room.members:  # the channel that is there now, whatever was before
                        self._broken.pop(rank, None)

    def isend(self, tensor: torch.Tensor, peer: int, transfer: int) -> Transfer:
        return self._meet((self._rank, peer, transfer), _Half(tensor, dtype_id(tensor), Ticket()), sends=True)

    def irecv(self, tensor: torch.Tensor, peer: int, transfer: int) -> Transfer:
        return self._meet((peer, self._rank, transfer), _Half(tensor, dtype_id(tensor), Ticket()), sends=False)

    def refuse(self, peer: int, transfer: int, rank: int, seq: int) -> None:
        self._meet((self._rank, peer, transfer), _Half(None, rank, Ticket(), seq), sends=True)

    def _meet(self, key: _Key, half: _Half, sends: bool) -> Transfer:
        """Copies if the other half is there, else leaves this half for it. Raises as ``isend`` does."""
        room = self._room
        mine, theirs = (room.sends, room.receives) if sends else (room.receives, room.sends)
        source, destination, transfer = key
        with room.lock:
            if broken := self._check(destination if sends else source):
                return failed(BrokenError, broken)
            if key in mine:
                done = "sent" if sends else "received"
                raise BusyError(
                    f"transfer {spoken(transfer)} from rank {source} to rank {destination} is {done} already"
                )
            other = theirs.pop(key, None)
            if other is None:
                mine[key] = half
        if other is not None:
            _copy(key, half if sends else other, other if sends else half)
        return half.ticket

    def mark_lost(self, peer: int, why: str) -> None:
        text = f"rank {peer} is lost to rank {self._rank}: {why}"
        with self._room.lock:
            if peer not in self._known:
                return
            self._broken.setdefault(peer, text)
            victims = [half for _, half in self._take_halves(peer)]
        for half in victims:
            half.ticket.fail(BrokenError, text)

    def close(self) -> None:
        self._close_as("was closed")

    def abort(self) -> None:
        self._close_as("was aborted")

    def _close_as(self, how: str) -> None:
        with _rooms_lock, self._room.lock:
            if self._closed:
                return
            self._closed = how
            room, gone = self._room, f"rank {self._rank} closed its end"
            room.members.pop(self._rank, None)
            for member in room.members.values():
                member._broken.setdefault(self._rank, f"{gone}; rank {member._rank} cannot reach it any more")
            # Taken out under the lock, ended outside of it: callbacks may call this channel.
            mine = self._take_halves(None)
            if not room.members and _rooms.get(self._job) is room:
                del _rooms[self._job]
        for owner, half in mine:
            if owner == self._rank:
                half.ticket.fail(ClosedError, f"the inproc channel of rank {self._rank} {how}")
            else:
                half.ticket.fail(BrokenError, f"{gone} before its transfer with rank {owner}")

    def _take_halves(self, peer: int | None) -> list[tuple[int, _Half]]:
        """Takes the waiting halves of this rank with ``peer``, as (their owner, half); None: all, the peers' too."""
        found = []
        for side, table in enumerate((self._room.sends, self._room.receives)):
            for key in [key for key in table if self._rank in key[:2]]:
                owner, other = key[side], key[1 - side]
                if peer is None or (owner == self._rank and other == peer):
                    found.append((owner, table.pop(key)))
        return found

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"the inproc channel of rank {self._rank} {self._closed}")

    def _check(self, peer: int) -> str:
        """Returns the reason why ``peer`` is broken, or an empty text. Raises ClosedError, ValueError."""
        self._check_open()
        if peer not in self._known:
            known = ", ".join(map(str, sorted(self._known))) or "none"
            raise ValueError(f"rank {peer} is not a peer of rank {self._rank}; known: {known}")
        return self._broken.get(peer, "")


def _copy(key: _Key, source: _Half, destination: _Half) -> None:
    """Ends a transfer of which both halves are there."""
    if source.tensor is None or destination.tensor is None:
        destination.ticket.fail(poisoned(source.dtype, source.seq), "")
        source.ticket.finish()
        return
    sender, receiver, transfer = key
    what = f"transfer {spoken(transfer)} from rank {sender} to rank {receiver}"
    why = ""
    sent, wanted = (source.dtype, source.tensor.numel()), (destination.dtype, destination.tensor.numel())
    if sent != wanted:
        why = f"{what}: rank {sender} sends {describe(*sent)} but rank {receiver} receives {describe(*wanted)}"
    else:
        try:
            store(destination.tensor, source.tensor)
        except Exception as error:  # such as a destination whose elements overlap
            why = f"{what}: rank {receiver} cannot store it: {error}"
    for half in (source, destination):
        if why:
            half.ticket.fail(BrokenError, why)
        else:
            half.ticket.finish()
