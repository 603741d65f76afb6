"""Small collectives of processes that share memory: each rank has pages that all others of its group can read.

A message costs system calls and a thread's wake at either end. Here a rank writes its contribution where everybody
sees it, then the number of the operation; the others watch for that number and read. (MPI implementations do the same
within a host: MPICH's "release-gather", Open MPI's coll/sm.) A rank's pages have two slots, used in turn: a rank that
writes the second next contribution has seen everybody's next one, and so nobody reads the old one any more.

Failures take the same way as in messages: a rank in trouble writes that into the place of a contribution.
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
from . import direct, ring
from .algorithm_table import choose
from .exchange import Exchange, pipeline
from .reduction import ReduceOp

#: The most bytes of a contribution.
SLOT = 32 << 10
#: The most groups for which a process has pages; groups beyond that use messages.
MOST = 64
_SIZE = 4096 + 2 * SLOT

#: The number of looks of a rank before it lets another thread run, and of yields before it sleeps until it is woken.
_LOOKS, _YIELDS = 100, 50
#: Seconds after which a sleeping rank checks whether another one is lost.
_NAP = 0.01

_FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine(), 0)  #: number of the system call
_WAIT, _WAKE, _ALL = 0, 1, 2**31 - 1
_syscall = ctypes.CDLL(None).syscall
_nap = (ctypes.c_long * 2)(0, int(_NAP * 1e9))

#: An uncontended lock is the one memory fence that Python has. (x86 needs none.)
_fence = allocate_lock()

#: Words of a rank's first page: the last operation that was written, whether somebody sleeps until the next one, then
#: for each slot whether there is trouble, and its rank and number.
_SEQ, _SLEEPER, _TROUBLE = 0, 1, (8, 16)
_WORDS = 32


class _Side:
    """One rank's pages as this process sees them."""

    def __init__(self, memory: ctypes.Array[ctypes.c_ubyte]) -> None:
        self.words = (ctypes.c_uint64 * _WORDS).from_buffer(memory, HEAD)
        self.seq = ctypes.c_uint64.from_buffer(memory, HEAD + 8 * _SEQ)
        self._address = ctypes.c_void_p(ctypes.addressof(self.seq))
        self._memory = memory
        self._slots: dict[tuple[int, torch.dtype, int], torch.Tensor] = {}

    def wake(self) -> None:
        """Wakes the ranks that wait for a number that has been written now."""
        if self.words[_SLEEPER]:
            self.words[_SLEEPER] = 0
            _syscall(_FUTEX, self._address, _WAKE, _ALL, None, None, 0)

    def sleep(self, seen: int) -> None:
        """Sleeps until the number is another than ``seen``, or for a moment."""
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


class SharedPages:
    """The pages of all ranks of a group, this rank's among them. Used by one thread at a time."""

    def __init__(self, me: int, own: Segment, others: dict[int, Mapping]) -> None:
        self._own = own
        maps = {me: own.memory} | {rank: mapping.map for rank, mapping in others.items()}
        self._sides = [_Side(maps[i]) for i in range(len(maps))]
        self._me = me
        self._count = 0
        self._looks = _LOOKS if len(maps) <= len(os.sched_getaffinity(0)) else 1
        self._broken: tuple[int, int] | None = None  #: the trouble of a lost rank, which every later operation tells

    def exchange(
        self, exchange: Exchange, given: torch.Tensor | None, gets: int
    ) -> Callable[[int, torch.Tensor], torch.Tensor]:
        """Shows the others this rank's contribution, and waits for theirs.

        Returns ``f(i, like)``: the contribution of rank i, in the form of ``like``, to be read until the next exchange.
        In trouble (``exchange.error``) it has arbitrary contents. ``gets`` is the number of bytes that this rank gets,
        for counts.
        """
        start = time.perf_counter()
        self._count = count = self._count + 1
        which, own = count & 1, self._sides[self._me]
        if given is not None:
            exchange.copy(given, own.slot(which, given))
        trouble, at = self._broken or exchange.trouble, _TROUBLE[which]
        own.words[at] = trouble is not None
        if trouble is not None:
            own.words[at + 1], own.words[at + 2] = trouble[0] + 1, trouble[1]
        with _fence:
            own.seq.value = count
        with _fence:
            own.wake()
        for i, side in enumerate(self._sides):
            if side.seq.value < count and not self._await(side, count, exchange, i):
                break
        with _fence:
            for side in self._sides:
                if side.words[at]:
                    exchange.fail(PoisonedError(side.words[at + 1] - 1, side.words[at + 2]))
        exchange.channel.tally(0 if given is None else given.nbytes, gets, start)
        return lambda i, like: self._sides[i].slot(which, like)

    def _await(self, side: _Side, count: int, exchange: Exchange, source: int) -> bool:
        """Waits for a rank's operation ``count``. False if that rank was lost."""
        seq = side.seq
        for _ in range(self._looks):
            if seq.value >= count:
                return True
        for _ in range(_YIELDS):
            os.sched_yield()
            if seq.value >= count:
                return True
        exchange.begin_wait(exchange.ranks[source])
        while (seen := seq.value) < count:
            if why := exchange.lost(source):
                if seq.value >= count:  # it wrote this before its end
                    return True
                exchange.fail(BrokenError(why), exchange.ranks[source])
                self._broken = exchange.trouble
                return False
            side.sleep(seen)
        return True

    def all_reduce(self, exchange: Exchange, source: torch.Tensor, target: torch.Tensor, op: ReduceOp) -> None:
        """Reduces the contributions in the order of ranks."""
        given = self.exchange(exchange, source, target.nbytes)
        total = given(0, source)
        for i in range(1, exchange.size):
            total = exchange.combine(op, total, given(i, source), target)
        exchange.finish(op, target)

    def reduce(self, exchange: Exchange, source: torch.Tensor, target: torch.Tensor | None, op: ReduceOp) -> None:
        """Reduces to ``target``, which is None for a rank that gets nothing."""
        if target is not None:
            self.all_reduce(exchange, source, target, op)
        else:
            self.exchange(exchange, source, 0)

    def broadcast(self, exchange: Exchange, tensor: torch.Tensor, root: int) -> None:
        given = self.exchange(
            exchange, tensor if exchange.me == root else None, 0 if exchange.me == root else tensor.nbytes
        )
        if exchange.me != root:
            exchange.copy(given(root, tensor), tensor)

    def all_gather(self, exchange: Exchange, source: torch.Tensor, targets: Sequence[torch.Tensor]) -> None:
        given = self.exchange(exchange, source, sum(target.nbytes for target in targets))
        for i, target in enumerate(targets):
            if i != exchange.me:
                exchange.copy(given(i, target), target)

    def close(self) -> None:
        """Lets go of this rank's pages."""
        self._own.retire()


class SharedPagesOfGroups:
    """The shared pages of one node's groups, by channel and ranks. A group's ranks make theirs at the same time."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, tuple[int, ...]], SharedPages | None] = {}

    def of(self, exchange: Exchange) -> SharedPages | None:
        """Returns a group's pages. None where the ranks don't see the same memory, or one is in trouble now."""
        channel = exchange.channel
        key = id(channel), exchange.ranks
        try:
            return self._known[key]
        except KeyError:
            pass
        if exchange.size == 1 or not channel.capabilities.shared_memory:
            pages = None
        else:
            pages = self._make(exchange)
            if exchange.error is not None:
                return None  # the same for all: the next collective tries again
        self._known[key] = pages
        return pages

    def _make(self, exchange: Exchange) -> SharedPages | None:
        """Makes a group's pages: each rank tells the others where its pages are, then whether it sees all of theirs."""
        own: Segment | None = None
        descriptor = bytes(DESCRIPTOR)
        if sum(pages is not None for pages in self._known.values()) < MOST:
            try:
                own = Segment(_SIZE)
                descriptor = own.describe()
            except OSError:
                own = None
        told = _gathered(exchange, torch.frombuffer(bytearray(descriptor), dtype=torch.uint8))
        others: dict[int, Mapping] = {}
        try:
            for i, one in enumerate(told):
                if i != exchange.me:
                    others[i] = Mapping.of(bytes(one.numpy()), _SIZE)
        except (OSError, ProtocolError):
            others = {}
        fine = own is not None and len(others) == exchange.size - 1
        says = _gathered(exchange, torch.tensor([fine], dtype=torch.uint8))
        if own is not None and fine and exchange.error is None and all(bool(one) for one in says):
            own.forget_descriptor()
            return SharedPages(exchange.me, own, others)
        if own is not None:
            own.retire()
        return None

    def forget_rank(self, rank: int) -> None:
        """Forgets the pages of groups with a rank, in whose place another worker is: they are made anew."""
        for key in [key for key in self._known if rank in key[1]]:
            pages = self._known.pop(key)
            if pages is not None:
                pages.close()

    def close(self) -> None:
        for pages in self._known.values():
            if pages is not None:
                pages.close()
        self._known.clear()


def _gathered(exchange: Exchange, mine: torch.Tensor) -> list[torch.Tensor]:
    """Returns all ranks' tensors, by an all_gather between the pairs that one has."""
    told = [mine if i == exchange.me else torch.empty_like(mine) for i in range(exchange.size)]
    steps = ring.all_gather if choose("all_gather", 0, exchange.size).algorithm == "ring" else direct.all_gather
    pipeline([steps(exchange, told)])
    exchange.wait_for_sends()
    return told
