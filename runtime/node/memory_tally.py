"""The tally of a node's memory: what its tensors take on the CPU, now and at their peak.

A node counts only once somebody has asked for a peak (docs/dev/node.md says why, and what it costs). The bytes of a
store grow by commands, and shrink by a Free only, or where a graph is replayed; so their peak is at a Free, or now. The
tally looks there at the entries that have come since it last looked, and is asked by no other command.

What an operator, a function or a graph takes and gives back while it runs is not seen, as it never is in the store; nor
is what a tensor's own bytes do not tell: rounding, and memory that malloc keeps.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass

from .store import Later, Pending, Store, made, size_of


@dataclass
class Figure:
    """One figure of torch.cuda.memory_stats, in its four kinds."""

    current: int = 0
    peak: int = 0
    allocated: int = 0  #: all that was ever added
    freed: int = 0  #: all that was ever taken away

    def add(self, change: int) -> None:
        self.current += change
        if change > 0:
            self.allocated += change
        else:
            self.freed -= change


class MemoryTally:
    """The tally of one store: its tensors on the CPU, and the bytes of their distinct storages."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._bytes, self._tensors = Figure(), Figure()
        self._count()
        self.reset_peaks()
        self.reset_sums()

    @property
    def peak(self) -> int:
        """The most bytes so far, as of the last look. Any thread may ask."""
        return self._bytes.peak

    def reset_peaks(self) -> None:
        """Has the peaks begin anew."""
        self._bytes.peak = self._bytes.current + self._leaving()
        self._tensors.peak = self._tensors.current

    def reset_sums(self) -> None:
        """Has the sums of what was allocated and freed begin anew."""
        for figure in (self._bytes, self._tensors):
            figure.allocated = figure.freed = 0

    def look(self) -> None:
        """Counts what has come since the last look. To be called before anything is freed."""
        watched, new = self._store.watched, []
        for ref in reversed(self._store.entries):
            if ref in self._keys and ref not in watched:  # a graph's outputs: each replay puts them behind all others
                break
            new.append(ref)
        for ref in [*new, *self._coming]:
            self._count_entry(ref)
        self._bytes.peak = max(self._bytes.peak, self._bytes.current + self._leaving())
        self._tensors.peak = max(self._tensors.peak, self._tensors.current)

    def count_refs(self, refs: Iterable[int]) -> None:
        """Counts entries whose memory has another size now, or that have gone from it."""
        for ref in refs:
            self._count_entry(ref)

    def remove_refs(self, refs: Iterable[int]) -> None:
        """Takes away entries that are freed now."""
        for ref in refs:
            self._uncount_entry(ref)

    def figures(self) -> dict[str, int]:
        """Returns the figures by the names of torch.cuda.memory_stats."""
        self.look()
        self._count()
        named = {"allocated_bytes": self._bytes, "allocation": self._tensors}
        figures = {f"{name}.all.{kind}": n for name, figure in named.items() for kind, n in asdict(figure).items()}
        figures["allocated_bytes.all.current"] += self._leaving()
        return figures

    def _leaving(self) -> int:
        """Returns the bytes of what was freed, and is being sent still."""
        return sum(size for key, size in self._store.leaving().items() if key not in self._storages)

    def _count(self) -> None:
        """Counts all anew, as entries may have gone in another way than by a Free: a failure's, a graph's."""
        bytes, tensors = self._bytes, self._tensors
        self._bytes, self._tensors = Figure(), Figure()
        self._keys: dict[int, int] = {}  #: ref -> the key of what it lies in; 0 for what is not on the CPU
        self._storages: dict[int, list[int]] = {}  #: key -> [bytes, refs]
        self._coming: set[int] = set()  #: refs whose tensors are still on their way
        for ref in list(self._store.entries):
            self._count_entry(ref)
        bytes.current, tensors.current = self._bytes.current, self._tensors.current
        self._bytes, self._tensors = bytes, tensors

    def _count_entry(self, ref: int) -> None:
        """Counts an entry as it is now."""
        entry = self._store.entries.get(ref)
        tensor = None if entry is None else made(entry)
        found = entry if tensor is None and isinstance(entry, Pending) else tensor
        key = size = 0
        if found is not None and str(found.device) == "cpu":
            key, size = size_of(found)
        if self._keys.get(ref, -1) != key:
            self._uncount_entry(ref)
            self._keys[ref] = key
            if key:
                self._tensors.add(1)
                self._storages.setdefault(key, [0, 0])[1] += 1
        if tensor is None and isinstance(entry, Later):
            self._coming.add(ref)
        else:
            self._coming.discard(ref)
        if key and self._storages[key][0] != size:  # new, or resized
            self._bytes.add(size - self._storages[key][0])
            self._storages[key][0] = size

    def _uncount_entry(self, ref: int) -> None:
        self._coming.discard(ref)
        key = self._keys.pop(ref, 0)
        if key:
            self._tensors.add(-1)
            storage = self._storages[key]
            storage[1] -= 1
            if not storage[1]:
                del self._storages[key]
                self._bytes.add(-storage[0])
