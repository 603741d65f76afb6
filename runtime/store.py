"""L3: a node's tensors by ref. An entry is a tensor, or stands for one that failed or is still on its way.

Entries that are no tensors need no check on the hot path: an operator that is given one raises TypeError, and only
then the executor looks.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass

import torch

from .channel.base import Transfer
from .errors import ChannelError

#: After so many tensors fewer, what malloc kept of them goes back to the system.
_MANY = 50_000


def _nothing(pad: int) -> int:
    return 0


_trim: Callable[[int], int] = getattr(ctypes.CDLL(None), "malloc_trim", _nothing)


@dataclass(frozen=True)
class Poison:
    """Stands for a tensor that could not be made: the failure ``seq`` on node ``rank`` caused it."""

    rank: int
    seq: int


@dataclass(frozen=True, eq=False)
class Pending:
    """Stands for a tensor that a transfer is filling."""

    tensor: torch.Tensor
    transfer: Transfer
    peer: int


class Unmade:
    """Stands for a tensor that a graph makes, which nobody has replayed yet."""


Entry = torch.Tensor | Poison | Pending | Unmade


class Store:
    """ref -> entry."""

    def __init__(self) -> None:
        #: The executor's runners read and write this dict directly.
        self.entries: dict[int, Entry] = {}
        #: refs whose entries are Pending, in order of arrival
        self.pending: dict[int, Pending] = {}
        #: sends under way: an in-place operation on their memory has to wait
        self.sending: list[tuple[torch.Tensor, Transfer]] = []
        self._peak = 0  #: entries, since memory was last given back

    def free(self, first: int, distances: tuple[int, ...]) -> None:
        """Drops entries. A ref that was never written (its command failed to leave the master) is no error."""
        entries, ref = self.entries, first
        self._peak = max(self._peak, len(entries))
        entries.pop(ref, None)
        for distance in distances:
            ref += distance
            entries.pop(ref, None)
        if self._peak - len(entries) > _MANY and len(entries) < self._peak // 2:
            self._peak = len(entries)
            _trim(0)
        if self.pending:
            self.pending = {r: p for r, p in self.pending.items() if r in entries}

    def aliases(self, tensor: torch.Tensor) -> list[int]:
        """All refs that share ``tensor``'s memory. Walks the store: for the failure path only."""
        address = memory(tensor)
        return [r for r, e in self.entries.items() if isinstance(e, torch.Tensor) and memory(e) == address]

    def settle(self, tensors: list[torch.Tensor]) -> None:
        """Waits for sends that read the memory of ``tensors``, which is about to change."""
        touched = set(map(memory, tensors))
        rest = []
        for tensor, transfer in self.sending:
            if transfer.is_completed():
                continue
            if memory(tensor) in touched:
                wait_quietly(transfer)
            else:
                rest.append((tensor, transfer))
        self.sending = rest

    def usage(self, device: str | None = None) -> tuple[int, int]:
        """Live tensors, and the bytes of their distinct storages (of sparse ones: 0)."""
        storages: dict[int, int] = {}
        count = 0
        for entry in self.entries.values():
            tensor = entry.tensor if isinstance(entry, Pending) else entry
            if isinstance(tensor, (Poison, Unmade)) or (device is not None and str(tensor.device) != device):
                continue
            count += 1
            storages[memory(tensor)] = tensor.untyped_storage().nbytes() if torch._C._has_storage(tensor) else 0
        return count, sum(storages.values())

    def clear(self) -> None:
        self.entries.clear()
        self.pending.clear()
        self.sending.clear()


def memory(tensor: torch.Tensor) -> int:
    """Equal for tensors that share memory. What has no storage (a sparse tensor) shares with itself only."""
    return tensor.untyped_storage()._cdata if torch._C._has_storage(tensor) else id(tensor)


def wait_quietly(transfer: Transfer) -> None:
    """Waits for the end of a send. That it failed is the receiver's to tell."""
    try:
        transfer.wait()
    except ChannelError:
        return
