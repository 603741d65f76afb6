"""The store of a node: its tensors by ref. An entry is a tensor, or stands for one that failed or is still on its way.

Entries that are not tensors need no check on the hot path: an operator that is given one raises TypeError, and only
then the executor looks.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from heapq import nlargest
from itertools import accumulate
from operator import itemgetter
from typing import Any, Protocol

import torch

from ..channel.base import Arrival, DataChannel, Transfer
from ..channel.ticket import Ticket
from ..protocol.errors import BrokenError, ChannelError, DisttensorError, PoisonedError
from ..protocol.failure_ids import Poison

#: When the store has shrunk by so many tensors, the memory that malloc kept of them goes back to the system.
_MANY = 50_000

#: So many memories whose tensors have outgrown them are kept, whether these are freed or not.
FEW = 1024

resize_storage = torch.ops.inductor.resize_storage_bytes_.default

#: The most bytes of tensors that a node is sending: it keeps them until they have left, though the script has dropped
#: them. Of larger ones there is one.
LEAVING = 256 << 20


def _nothing(pad: int) -> int:
    return 0


trim: Callable[[int], int] = getattr(ctypes.CDLL(None), "malloc_trim", _nothing)


Value = torch.Tensor | Poison
Tell = Callable[[Exception], Poison]  #: reports a failure to the master


class Pending:
    """A placeholder for a tensor that a transfer is filling."""

    def __init__(
        self,
        transfer: Arrival,
        channel: DataChannel,
        peer: int,
        nbytes: int,
        device: str = "cpu",
        form: tuple[torch.dtype, tuple[int, ...]] = (torch.uint8, ()),
    ) -> None:
        self.transfer = transfer
        self.channel = channel
        self.peer = peer
        self.nbytes = nbytes
        self.device = device
        self.dtype, self.shape = form
        self.former = -1  #: the incarnation of the peer that was to send it, once another worker is in its place
        self._value: Value | None = None
        self._lock = threading.Lock()

    def is_completed(self) -> bool:
        return self.transfer.is_completed()

    def result(self, tell: Tell) -> Value:
        """Waits for the transfer; returns its tensor or poison. A failure is reported once, by the first caller."""
        error: ChannelError | None = None
        try:
            tensor = self.transfer.tensor
        except ChannelError as e:
            error = e
            if self.former >= 0 and isinstance(e, BrokenError):
                e.note_former(self.peer, self.former)
            else:
                self.channel.blame(e, self.peer)
        with self._lock:
            if self._value is None:
                if isinstance(error, PoisonedError):
                    self._value = Poison(error.rank, error.seq)
                else:
                    self._value = tensor if error is None else tell(error)
            return self._value

    @property
    def tensor(self) -> torch.Tensor | None:
        """The tensor that has arrived, once somebody has asked for the result."""
        return self._value if isinstance(self._value, torch.Tensor) else None


class Unmade:
    """A placeholder for a tensor that a graph makes and that no replay has made yet."""


class NotReplayed(DisttensorError, RuntimeError):
    """A tensor was used before the graph that makes it was replayed."""

    def __init__(self) -> None:
        super().__init__("this tensor is made by a graph that has not been replayed yet (g.replay())")


class Outgrown:
    """A placeholder for a tensor whose memory has been made too small for it (``Store.resize``).

    A kernel would read and write whatever else lies there; of no memory at all it would end the process.
    """

    __slots__ = ("tensor",)

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def error(self) -> RuntimeError:
        """Returns the error for a use of the tensor."""
        return RuntimeError(
            "this tensor's data is not allocated: its storage has been made smaller (storage.resize_), to "
            f"{self.tensor.untyped_storage().nbytes()} bytes"
        )


class Promise(Ticket):
    """A placeholder for a tensor that a lane will make."""

    def __init__(self) -> None:
        super().__init__()
        self.value: Value | None = None  #: set at its end; None for an output that the operator didn't make

    def keep(self, value: Value | None) -> None:
        self.value = value
        self.finish()

    def result(self, tell: Tell) -> Value | None:
        """Waits for the tensor, and returns it; Poison if it failed, None if the operator didn't make it."""
        self.wait()
        return self.value


class Other:
    """An entry that is neither a tensor nor a placeholder for one: an event, a stream."""


class Reading(Ticket, Other):
    """Tensors that are read beside the commands that come next; it ends when all were read, as sends do."""

    def free(self, touched: set[int] | None) -> None:
        """Has memory (keys of ``memory``; None: all) be free for who writes it, whoever still is to read it."""
        raise NotImplementedError

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yields what is still to be read."""
        raise NotImplementedError


#: The placeholders of tensors that do not exist yet.
Later = (Pending, Promise)

Entry = torch.Tensor | Poison | Pending | Promise | Unmade | Outgrown | Other


class Tally(Protocol):
    """Counts the memory of a store's tensors (memory_tally.py)."""

    def look(self) -> None: ...

    def count_refs(self, refs: Iterable[int]) -> None: ...

    def remove_refs(self, refs: Iterable[int]) -> None: ...


class Store:
    """The entries of a node, by ref."""

    def __init__(self) -> None:
        #: The executor's runners read and write this dict directly.
        self.entries: dict[int, Entry] = {}
        #: refs whose entries are Pending, in order of arrival
        self.pending: dict[int, Pending] = {}
        #: sends under way, and what functions read beside: who writes this memory has it ``release``d first
        self.sending: list[tuple[Entry, Transfer]] = []
        #: ref of a graph's output -> the dict that keeps it if it is freed while others see its memory
        self.watched: dict[int, dict[int, Entry]] = {}
        #: returns the ids of entries of which tasks of streams have still to make views, and the keys of their memory
        self.viewed: Callable[[], Collection[int]] = tuple
        self.tally: Tally | None = None  #: counts memory, once somebody has asked for its peak
        self._peak = 0  #: the most entries since memory was last given back
        #: by memory, the refs of those that have outgrown it; those that are freed meanwhile stay until ``_prune``
        self.outgrown: dict[int, set[int]] = {}
        self._many_outgrown = FEW

    def __repr__(self) -> str:
        return f"<Store entries={len(self.entries)} arriving={len(self.pending)} leaving={len(self.sending)}>"

    def free(self, first: int, distances: tuple[int, ...]) -> None:
        """Drops entries. A ref that was never written (its command failed to leave the master) is not an error."""
        entries, ref = self.entries, first
        if self.watched:
            self._watch((first, *accumulate(distances, initial=first)))
        if self.tally is not None:
            self.tally.look()
            self.tally.remove_refs(accumulate(distances, initial=first))
        self._peak = max(self._peak, len(entries))
        entries.pop(ref, None)
        for distance in distances:
            ref += distance
            entries.pop(ref, None)
        if self._peak - len(entries) > _MANY and len(entries) < self._peak // 2:
            self._peak = len(entries)
            trim(0)
        if self.pending:
            self.pending = {r: p for r, p in self.pending.items() if r in entries}

    def _watch(self, refs: Iterable[int]) -> None:
        for ref in refs:
            orphans = self.watched.pop(ref, None)
            entry = self.entries.get(ref)
            if orphans is not None and entry is not None and seen(entry, self.viewed()):
                orphans[ref] = entry

    def lent(self, ref: int, value: Any) -> Any:
        """Returns what a function gets as ``value``, the entry under ``ref``: for a graph's output another tensor in
        its memory, for if the function keeps it, the next replay has to see that (``shared``)."""
        return value.detach() if ref in self.watched and isinstance(value, torch.Tensor) else value

    def aliases(self, tensor: torch.Tensor) -> list[int]:
        """Returns all refs that share ``tensor``'s memory. Walks the store: for the failure path only."""
        address = memory(tensor)
        tensors = ((ref, made(entry)) for ref, entry in self.entries.items())
        return [ref for ref, tensor in tensors if tensor is not None and memory(tensor) == address]

    def resize(self, ref: int, nbytes: int) -> None:
        """Makes the memory of the tensor under ``ref`` smaller or larger, for all tensors that share it.

        What does not fit any more is ``Outgrown`` until the memory is large enough again. Raises TypeError for a ref
        of no tensor, torch's RuntimeError for memory that has a fixed size, or that there is not.
        """
        entry = self.entries[ref]
        tensor = entry.tensor if isinstance(entry, Outgrown) else entry
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"a {type(tensor).__name__} has no memory")
        self.wait_for_sends([tensor])
        if self.tally is not None:
            self.tally.look()
        key, before = memory(tensor), tensor.untyped_storage().nbytes()
        sharing = self.outgrown.get(key, set())
        if nbytes < before:
            self._prune()
            sharing = self.outgrown[key] = sharing | self._sharing(tensor)
        within = list(sharing)
        resize_storage(tensor, nbytes)
        for other in within:
            held = self.entries.get(other)
            one = held.tensor if isinstance(held, Outgrown) else None if held is None else made(held)
            if one is None or memory(one) != key or _extent(one) <= nbytes:
                sharing.discard(other)
            if one is not None and memory(one) == key:
                self.entries[other] = one if _extent(one) <= nbytes else Outgrown(one)
        if self.tally is not None:
            self.tally.count_refs({ref, *within, *self._sharing(tensor)})

    def _sharing(self, tensor: torch.Tensor) -> set[int]:
        """Returns the refs of all tensors in this one's memory that have elements there.

        They are known by their addresses, which are asked in a fifth of the time of a storage. It looks no further than
        there are holders of the memory.
        """
        storage, found = tensor.untyped_storage(), set()
        first, most = storage.data_ptr(), torch._C._storage_Use_Count(storage._cdata) - 1  # without this function's own
        end = first + storage.nbytes()
        for ref, entry in self.entries.items():
            one = entry if type(entry) is torch.Tensor else made(entry)
            if one is not None and one.layout is torch.strided and first <= one.data_ptr() < end:
                found.add(ref)
                if len(found) == most:
                    break
        return found

    def _prune(self) -> None:
        """Drops the refs of outgrown tensors that are freed, once there are many."""
        if len(self.outgrown) > self._many_outgrown:
            alive = {key: {r for r in refs if r in self.entries} for key, refs in self.outgrown.items()}
            self.outgrown = {key: refs for key, refs in alive.items() if refs}
            self._many_outgrown = max(FEW, 2 * len(self.outgrown))

    def wait_for_sends(self, tensors: list[torch.Tensor] | None) -> None:
        """Waits for sends that read the memory of ``tensors``, which is about to change. None: waits for all sends."""
        touched = None if tensors is None else set(map(memory, tensors))
        rest = []
        for entry, transfer in self.sending:
            if not transfer.is_completed():
                release(entry, transfer, touched)
            if not transfer.is_completed():
                rest.append((entry, transfer))
        self.sending = rest

    def usage(self, device: str | None = None) -> tuple[int, int]:
        """Returns the number of live tensors, and the bytes of their distinct storages (of sparse ones: 0)."""
        storages: dict[int, int] = {}
        count = 0
        for _, entry in self._on(device):
            count += 1
            key, size = size_of(entry)
            storages[key] = size
        return count, sum(storages.values())

    def usage_by_device(self) -> dict[str, tuple[int, int]]:
        """Returns, by device, what ``usage`` does of one. Any thread may call it."""
        storages: dict[str, dict[int, int]] = {}
        counts = Counter[str]()
        for _, entry in self._on(None):
            device = str(entry.device)
            key, size = size_of(entry)
            storages.setdefault(device, {})[key] = size
            counts[device] += 1
        return {device: (counts[device], sum(found.values())) for device, found in storages.items()}

    def _on(self, device: str | None) -> Iterable[tuple[int, torch.Tensor | Pending]]:
        """Yields what is on a device, or anywhere: tensors, and receives under way; with their refs."""
        for ref, entry in list(self.entries.items()):  # at once: the calling thread may not be the one that writes
            tensor = made(entry)
            if tensor is not None and device in (None, str(tensor.device)):
                yield ref, tensor
            elif tensor is None and isinstance(entry, Pending) and device in (None, entry.device):
                yield ref, entry

    def make_way(self, nbytes: int) -> None:
        """Waits until there is room for a send of so many bytes beside those under way, the oldest first.

        Each transfer is issued at both ends at once, so a send waits for none that is behind it, at whichever node.
        """
        sends = [(entry, transfer) for entry, transfer in self.sending if not isinstance(entry, Reading)]
        under_way = [(made(entry), transfer) for entry, transfer in sends if not transfer.is_completed()]
        left = sum(tensor.nbytes for tensor, _ in under_way if tensor is not None)
        for tensor, transfer in under_way:
            if left + nbytes <= LEAVING:
                return
            wait_quietly(transfer)
            left -= 0 if tensor is None else tensor.nbytes

    def leaving(self) -> dict[int, int]:
        """Returns the bytes of what is being sent and lies on the CPU, by ``memory``: that stays until it has left,
        whether it was freed or not."""
        tensors: list[torch.Tensor | None] = []
        for entry, transfer in list(self.sending):
            if not transfer.is_completed():
                tensors += entry.tensors() if isinstance(entry, Reading) else [made(entry)]
        return dict(size_of(tensor) for tensor in tensors if tensor is not None and tensor.device.type == "cpu")

    def largest(self, most: int, device: str | None = None) -> list[tuple[int, int, torch.Tensor | Pending]]:
        """Returns (ref, bytes, tensor) of the largest storages, ``most`` at most: of each the tensor that came
        first."""
        found: dict[int, tuple[int, int, torch.Tensor | Pending]] = {}
        for ref, entry in self._on(device):
            key, size = size_of(entry)
            found.setdefault(key, (ref, size, entry))
        return nlargest(most, found.values(), key=itemgetter(1))

    def clear(self) -> None:
        self.entries.clear()
        self.pending.clear()
        self.sending.clear()


def made(entry: Entry) -> torch.Tensor | None:
    """Returns the tensor that an entry is, or stands for, if that exists already."""
    tensor = entry.tensor if isinstance(entry, Pending) else entry.value if isinstance(entry, Promise) else entry
    return tensor if isinstance(tensor, torch.Tensor) else None


def size_of(entry: torch.Tensor | Pending) -> tuple[int, int]:
    """Returns the key of what a tensor lies in (``memory``), and its bytes: of a sparse one 0."""
    if isinstance(entry, Pending):
        return id(entry), entry.nbytes
    return memory(entry), entry.untyped_storage().nbytes() if torch._C._has_storage(entry) else 0


def memory(tensor: torch.Tensor) -> int:
    """Returns a key: equal for tensors that share memory. A tensor without storage (a sparse one) shares with none."""
    return tensor.untyped_storage()._cdata if torch._C._has_storage(tensor) else id(tensor)


def _extent(tensor: torch.Tensor) -> int:
    """Returns the bytes that the memory of a strided tensor has at least."""
    if not tensor.numel():
        return 0
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (int(tensor.storage_offset()) + last + 1) * tensor.itemsize


def shared(tensor: torch.Tensor) -> bool:
    """Returns whether another tensor that somebody holds has the same memory."""
    if not torch._C._has_storage(tensor):
        return False
    uses = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) - 2  # the tensor's and this function's own
    if uses == 1 and tensor._base is not None:
        return _holder_count(tensor) > _HELD
    return uses > 0


def seen(entry: Entry, viewed: Collection[int]) -> bool:
    """Returns whether others have the memory of an entry, or are going to (``Store.viewed``, asked before)."""
    tensor = made(entry)
    return id(entry) in viewed or (tensor is not None and (memory(tensor) in viewed or shared(tensor)))


def _holder_count(view: torch.Tensor) -> int:
    """Counts the holders of the tensor that ``view`` is a view of: views hold it, and so do names in Python."""
    base: Any = view._base
    return int(base._use_count()) + sys.getrefcount(base)


#: The count where only that view holds it.
_HELD = _holder_count(torch.empty(1)[:])


def release(entry: Entry, transfer: Transfer, touched: set[int] | None) -> None:
    """Has memory that is about to change (keys of ``memory``; None: all) not be read by what is in ``sending``."""
    if isinstance(entry, Reading):
        entry.free(touched)
        return
    tensor = made(entry)
    if touched is None or (tensor is not None and memory(tensor) in touched):
        wait_quietly(transfer)


def wait_quietly(transfer: Transfer) -> None:
    """Waits for the end of a send. A failure is not raised: the receiver reports it."""
    try:
        transfer.wait()
    except ChannelError:
        return
