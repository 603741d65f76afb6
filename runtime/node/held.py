"""Tensors that a function reads beside the commands that come next, as they were when it was issued.

    lane of the function    HeldTensor.read --> its tensor, or the copy
    who writes the tensor   store.release   --> Holding.free --> HeldTensor.copy, if the function has not read it yet

So nobody waits while nothing is written, and who writes waits for one tensor and not for all.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

import torch

from ..channel.pool import WarmPool
from .store import Entry, Reading, made, memory

_T = TypeVar("_T")

#: It keeps nothing for later: a save is rare, and as large as all that the node has.
_apart = WarmPool(0, 0)


class HeldTensor:
    """A tensor that a function is going to read."""

    def __init__(self, entry: Entry, then: Callable[[], None] = lambda: None) -> None:
        """``entry`` is made before anybody reads or writes it; ``then`` is called when it is not held any more."""
        self.uses = 0  #: how often it is still going to be read; with the last time it is let go
        self._entry: Entry | None = entry
        self._copy: torch.Tensor | None = None
        self._error: Exception | None = None  #: with which it could not be copied
        self._then = then
        self._reading = threading.Lock()  #: held while the tensor is read or copied

    @property
    def tensor(self) -> torch.Tensor | None:
        """The tensor, where it exists already and who writes it has to have it copied first."""
        entry = self._entry
        return None if entry is None else made(entry)

    def read(self, fn: Callable[[torch.Tensor], _T]) -> _T:
        """Returns ``fn`` of the tensor as it was when the function was issued. Who writes it waits meanwhile.

        Raises what ``fn`` does, and the error with which the tensor could not be copied for who writes it.
        """
        with self._reading:
            try:
                if self._error is not None:
                    raise self._error
                tensor = self.tensor if self._copy is None else self._copy
                if tensor is None:
                    raise RuntimeError("a tensor that is held was read more often than it was given")
                _reach(tensor)
                return fn(tensor)
            finally:
                self.uses -= 1
                if self.uses <= 0:
                    self._let_go()

    def copy(self) -> None:
        """Copies the tensor for the function, if it is still to be read: somebody writes it. Never fails for them."""
        with self._reading:
            if self._entry is None or (tensor := self.tensor) is None:
                return
            try:
                _reach(tensor)
                self._copy = apart(tensor)  # which waits for it
            except Exception as error:  # there may be no memory for it: the function fails then
                self._error = error
            self._entry = None
            self._then()

    def release(self) -> None:
        """Lets go of the tensor: nobody is going to read it any more."""
        with self._reading:
            self._let_go()

    def _let_go(self) -> None:
        if self._entry is not None:
            self._entry = None
            self._then()
        self._copy = None


class Holding(Reading):
    """All that one function holds; it ends when every tensor was read or copied."""

    def __init__(self, entries: Mapping[int, Entry]) -> None:
        super().__init__()
        self._left = itertools.count(len(entries) - 1, -1)  #: whose next() is atomic
        self._held = {ref: HeldTensor(entry, self._one) for ref, entry in entries.items()}
        self._unknown = list(self._held.values())  #: whose memory nobody has asked for, or could not
        self._by_memory: dict[int, list[HeldTensor]] = {}
        self._sorting = threading.Lock()
        if not entries:
            self.finish()

    def _one(self) -> None:
        if next(self._left) == 0:
            self.finish()

    def __getitem__(self, ref: int) -> HeldTensor:
        """Gives a tensor to the function, which reads it once for each time that it gets it."""
        held = self._held[ref]
        held.uses += 1
        return held

    def free(self, touched: set[int] | None) -> None:
        for held in self._held.values() if touched is None else self._of(touched) if touched else ():
            held.copy()

    def _of(self, touched: set[int]) -> list[HeldTensor]:
        with self._sorting:
            unknown = []
            for held in self._unknown:
                tensor = held.tensor
                if tensor is None:
                    unknown.append(held)
                else:
                    self._by_memory.setdefault(memory(tensor), []).append(held)
            self._unknown = unknown
            return [held for key in touched for held in self._by_memory.get(key, ())]

    def tensors(self) -> Iterator[torch.Tensor]:
        return (tensor for held in self._held.values() if (tensor := held.tensor) is not None)

    def release_unread(self) -> None:
        """Lets go of all that was not read: the function has ended, or never begins."""
        for held in self._held.values():
            held.release()


def apart(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a contiguous copy in memory of the CPU; a large one's goes back to the system with it.

    malloc would keep that, and once for each thread that has made a copy: functions run in threads of lanes.
    """
    tensor = tensor.detach().resolve_conj().resolve_neg()
    return _apart.empty(tuple(tensor.shape), tensor.dtype).copy_(tensor)


def _reach(tensor: torch.Tensor) -> None:
    """Waits for what streams of a CUDA device have been given."""
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)
