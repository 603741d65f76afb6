"""A pool of warm buffers to receive into.

A page that was never touched costs the kernel a fault and a zeroing: receiving a large tensor into fresh memory is half
as fast as into memory that was used before.

A block is the pool's own anonymous memory. A tensor over it holds a *lease* (an array, whose only purpose is to die
with the tensor's storage); the lease's weak reference puts the block back. That callback may run inside of a collection
in any thread, so it takes no lock and does nothing but append (or let go, when enough blocks are idle). The pool holds
the blocks that are in use, too: a weak reference that only garbage refers to is never called.
"""

from __future__ import annotations

import math
import mmap
import threading
import weakref
from contextlib import suppress

import numpy as np
import torch

from .payload import of_its_own

#: Smaller tensors are left to torch's allocator, whose memory is warm enough.
SMALLEST = 1 << 20


class _Block:
    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        # Private, not the default: a forked child must not write into its parent's tensors.
        self.memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # a kernel without them
                self.memory.madvise(mmap.MADV_HUGEPAGE)  # 512 times fewer faults at first use
        self.lease: weakref.ref[np.ndarray[tuple[int], np.dtype[np.uint8]]] | None = None


class WarmPool:
    """Keeps at most ``most_blocks`` idle blocks of ``most_bytes`` together; blocks in use are not counted."""

    def __init__(self, most_bytes: int = 512 << 20, most_blocks: int = 8) -> None:
        self._most_bytes, self._most_blocks = most_bytes, most_blocks
        self._idle: list[_Block] = []  #: oldest first; appended to without the lock
        self._used: set[_Block] = set()
        self._lock = threading.Lock()  #: held by take only, never by the callback

    def idle_bytes(self) -> int:
        """Returns the number of bytes that are kept for later."""
        return sum(block.nbytes for block in self._idle.copy())

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Makes an uninitialised CPU tensor.

        The storage of a large one has a fixed size: ``resize_`` cannot enlarge it.
        """
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes < SMALLEST:
            return torch.empty(shape, dtype=dtype)
        block = self._take_block(nbytes)
        lease = np.frombuffer(block.memory, dtype=np.uint8, count=nbytes)
        pool = weakref.ref(self)  # no cycle: idle blocks go with the pool at once
        block.lease = weakref.ref(lease, lambda _: _give_back(pool(), block))
        self._used.add(block)
        return of_its_own(torch.frombuffer(lease, dtype=torch.uint8).view(dtype).view(shape))

    def _take_block(self, nbytes: int) -> _Block:
        with self._lock:
            fit = [block for block in self._idle.copy() if nbytes <= block.nbytes <= 2 * nbytes]
            if fit:
                best = min(fit, key=lambda block: block.nbytes)
                self._idle.remove(best)
                return best
        # Sizes in steps of an eighth, so that similar tensors share blocks; pages that nobody touches cost nothing.
        step = 1 << max(12, nbytes.bit_length() - 4)
        return _Block(-(-nbytes // step) * step)

    def give_back(self, block: _Block) -> None:
        """Takes a block back, whose tensor is gone."""
        self._used.discard(block)
        if len(self._idle) < self._most_blocks and self.idle_bytes() + block.nbytes <= self._most_bytes:
            self._idle.append(block)


def _give_back(pool: WarmPool | None, block: _Block) -> None:
    if pool is not None:
        pool.give_back(block)
