"""Small collectives of processes that share memory: each rank has a board that all others of its group can read.

A message costs system calls and a thread's wake at either end. Here a rank writes its contribution where everybody
sees it, then the number of the operation; the others watch for that number and read. (MPI implementations do the same
within a host: MPICH's "release-gather", Open MPI's coll/sm.) A board has two slots, used in turn: who writes the
second next one has seen everybody's next one, and so nobody reads the old one any more.

What fails takes the same way as on a wire: a rank in trouble writes that into the place of a contribution.
"""

from __future__ import annotations

import ctypes
import os
import platform
import time
from _thread import allocate_lock
from collections.abc import Callable, Sequence

import torch

from ..channel.shm.segments import DESCRIPTOR, HEAD, Mapping, Segment
from ..protocol.errors import BrokenError, PoisonedError, ProtocolError
from .exchange import Wire
from .reduction import ReduceOp

#: Bytes of a contribution, at most.
SLOT = 32 << 10
#: SharedPagesOfGroups that a process has, at most; groups beyond that use messages.
MOST = 64
_SIZE = 4096 + 2 * SLOT

#: How often a rank looks before it lets another thread run, and before it sleeps until it is woken.
_LOOKS, _YIELDS = 100, 50
#: Seconds after which a rank that sleeps looks whether another one is lost.
_NAP = 0.01

_FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine(), 0)  #: number of the system call
_WAIT, _WAKE, _ALL = 0, 1, 2**31 - 1
_syscall = ctypes.CDLL(None).syscall
_nap = (ctypes.c_long * 2)(0, int(_NAP * 1e9))

#: An uncontended lock is the one memory fence that Python has. (x86 needs none.)
_fence = allocate_lock()

#: Words of a board's first page: the last operation that was written, whether somebody sleeps until the next one, then
#: of each slot whether there is trouble, and its rank and number.
_SEQ, _SLEEPER, _TROUBLE = 0, 1, (8, 16)
_WORDS = 32


class _Side:
    """One rank's board as this process sees it."""

    def __init__(self, memory: ctypes.Array[ctypes.c_ubyte]) -> None:
        self.words = (ctypes.c_uint64 * _WORDS).from_buffer(memory, HEAD)
        self.seq = ctypes.c_uint64.from_buffer(memory, HEAD + 8 * _SEQ)
        self._address = ctypes.c_void_p(ctypes.addressof(self.seq))
        self._memory = memory
        self._slots: dict[tuple[int, torch.dtype, int], torch.Tensor] = {}

    def wake(self) -> None:
        """Ends the sleep of those who wait for a number that is there now."""
        if self.words[_SLEEPER]:
            self.words[_SLEEPER] = 0
            _syscall(_FUTEX, self._address, _WAKE, _ALL, None, None, 0)

    def sleep(self, seen: int) -> None:
        """Until another number than ``seen`` is there, or for a moment."""
        if not _FUTEX:
            time.sleep(1e-4)
            return
        self.words[_SLEEPER] = 1
        with _fence:
            pass
        _syscall(_FUTEX, self._address, _WAIT, ctypes.c_uint32(seen), _nap, None, 0)

    def slot(self, which: int, like: torch.Tensor) -> torch.Tensor:
        key = which, like.dtype, like.numel()
        found = self._slots.get(key)
        if found is None:
            if len(self._slots) >= 64:
                self._slots.clear()
            start = HEAD + 4096 + which * SLOT
            part = torch.frombuffer(self._memory, dtype=torch.uint8, offset=start, count=SLOT)
            found = self._slots[key] = part[: like.numel() * like.itemsize].view(like.dtype)
        return found


class Board:
    """The boards of a group, ours among them. Used by one thread at a time."""

    def __init__(self, me: int, own: Segment, others: dict[int, Mapping]) -> None:
        self._own = own
        maps = {me: own.memory} | {rank: mapping.map for rank, mapping in others.items()}
        self._sides = [_Side(maps[i]) for i in range(len(maps))]
        self._me = me
        self._count = 0
        self._looks = _LOOKS if len(maps) <= len(os.sched_getaffinity(0)) else 1
        self._broken: tuple[int, int] | None = None  #: from then on we say so

    def exchange(
        self, wire: Wire, given: torch.Tensor | None, gets: int
    ) -> Callable[[int, torch.Tensor], torch.Tensor]:
        """Shows the others what we give; we get so many bytes. Returns ``f(i, like)``: what rank i gave, of the form of
        ``like``, to be read until the next exchange. In trouble (``wire.error``) there is anything in it."""
        start = time.perf_counter()
        self._count = count = self._count + 1
        which, own = count & 1, self._sides[self._me]
        if given is not None:
            wire.copy(given, own.slot(which, given))
        trouble, at = self._broken or wire.trouble, _TROUBLE[which]
        own.words[at] = trouble is not None
        if trouble is not None:
            own.words[at + 1], own.words[at + 2] = trouble[0] + 1, trouble[1]
        with _fence:
            own.seq.value = count
        with _fence:
            own.wake()
        for i, side in enumerate(self._sides):
            if side.seq.value < count and not self._await(side, count, wire, i):
                break
        with _fence:
            for side in self._sides:
                if side.words[at]:
                    wire.fail(PoisonedError(side.words[at + 1] - 1, side.words[at + 2]))
        wire.channel.tally(0 if given is None else given.nbytes, gets, start)
        return lambda i, like: self._sides[i].slot(which, like)

    def _await(self, side: _Side, count: int, wire: Wire, source: int) -> bool:
        """False if that rank was lost."""
        seq = side.seq
        for _ in range(self._looks):
            if seq.value >= count:
                return True
        for _ in range(_YIELDS):
            os.sched_yield()
            if seq.value >= count:
                return True
        while (seen := seq.value) < count:
            if why := wire.lost(source):
                if seq.value >= count:  # its last word
                    return True
                wire.fail(BrokenError(why), wire.ranks[source])
                self._broken = wire.trouble
                return False
            side.sleep(seen)
        return True

    def all_reduce(self, wire: Wire, source: torch.Tensor, target: torch.Tensor, op: ReduceOp) -> None:
        """In the order of ranks."""
        given = self.exchange(wire, source, target.nbytes)
        total = given(0, source)
        for i in range(1, wire.size):
            total = wire.combine(op, total, given(i, source), target)
        wire.finish(op, target)

    def reduce(self, wire: Wire, source: torch.Tensor, target: torch.Tensor | None, op: ReduceOp) -> None:
        """For a rank that gets nothing, ``target`` is None."""
        if target is not None:
            self.all_reduce(wire, source, target, op)
        else:
            self.exchange(wire, source, 0)

    def broadcast(self, wire: Wire, tensor: torch.Tensor, root: int) -> None:
        given = self.exchange(wire, tensor if wire.me == root else None, 0 if wire.me == root else tensor.nbytes)
        if wire.me != root:
            wire.copy(given(root, tensor), tensor)

    def all_gather(self, wire: Wire, source: torch.Tensor, targets: Sequence[torch.Tensor]) -> None:
        given = self.exchange(wire, source, sum(target.nbytes for target in targets))
        for i, target in enumerate(targets):
            if i != wire.me:
                wire.copy(given(i, target), target)

    def close(self) -> None:
        """Lets go of ours."""
        self._own.retire()


class SharedPagesOfGroups:
    """The groups' boards of one node, by channel and ranks. All ranks of a group make theirs at the same time."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, tuple[int, ...]], Board | None] = {}

    def of(self, wire: Wire) -> Board | None:
        """None where the ranks don't see the same memory, or one has trouble at this moment."""
        channel = wire.channel
        key = id(channel), wire.ranks
        try:
            return self._known[key]
        except KeyError:
            pass
        if wire.size == 1 or not channel.capabilities.shared_memory:
            board = None
        else:
            board = self._make(wire)
            if wire.error is not None:
                return None  # the same for all: the next collective tries again
        self._known[key] = board
        return board

    def _make(self, wire: Wire) -> Board | None:
        """Everybody tells everybody where its board is, and then whether it sees all others'."""
        own: Segment | None = None
        descriptor = bytes(DESCRIPTOR)
        if sum(board is not None for board in self._known.values()) < MOST:
            try:
                own = Segment(_SIZE)
                descriptor = own.describe()
            except OSError:
                own = None
        told = _exchanged(wire, torch.frombuffer(bytearray(descriptor), dtype=torch.uint8))
        others: dict[int, Mapping] = {}
        try:
            for i, one in enumerate(told):
                if i != wire.me:
                    others[i] = Mapping.of(bytes(one.numpy()), _SIZE)
        except (OSError, ProtocolError):
            others = {}
        fine = own is not None and len(others) == wire.size - 1
        says = _exchanged(wire, torch.tensor([fine], dtype=torch.uint8))
        if own is not None and fine and wire.error is None and all(bool(one) for one in says):
            own.forget_descriptor()
            return Board(wire.me, own, others)
        if own is not None:
            own.retire()
        return None

    def close(self) -> None:
        for board in self._known.values():
            if board is not None:
                board.close()
        self._known.clear()


def _exchanged(wire: Wire, mine: torch.Tensor) -> list[torch.Tensor]:
    coming = {i: wire.take(mine, i) for i in range(wire.size) if i != wire.me}
    for i in coming:
        wire.send(mine, i)
    wire.settle()
    return [mine if i == wire.me else coming[i].get() for i in range(wire.size)]
