"""The tally of a store: what it counts, whichever way tensors come and go."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from node_kit import ALL, Node

from disttensor.runtime.node.failures import is_shortage
from disttensor.runtime.node.memory_tally import MemoryTally
from disttensor.runtime.node.store import Pending, Promise, Store
from disttensor.runtime.protocol import commands as c
from disttensor.runtime.protocol.errors import NO_MEMORY, BrokenError

BYTES, TENSORS = "allocated_bytes.all.", "allocation.all."


@pytest.fixture
def store() -> Store:
    store = Store()
    store.entries.update({1: torch.zeros(25), 2: torch.zeros(50)})
    store.tally = MemoryTally(store)
    return store


def figures(store: Store) -> dict[str, int]:
    tally: Any = store.tally
    return tally.figures()  # type: ignore[no-any-return]


def test_what_is_there_when_it_begins(store: Store) -> None:
    found = figures(store)
    assert (found[BYTES + "current"], found[BYTES + "peak"], found[BYTES + "allocated"]) == (300, 300, 0)
    assert (found[TENSORS + "current"], found[TENSORS + "peak"], found[TENSORS + "freed"]) == (2, 2, 0)


def test_the_peak_is_before_a_free(store: Store) -> None:
    for ref in range(3, 13):
        store.entries[ref] = torch.zeros(25)
        store.free(ref - 1, ())
    found = figures(store)
    assert found[BYTES + "current"] == 200
    assert found[BYTES + "peak"] == 400
    assert found[BYTES + "allocated"] == 1000
    assert found[BYTES + "freed"] == 1100


def test_tensors_that_share_memory_count_once(store: Store) -> None:
    base: Any = store.entries[2]
    store.entries[3] = base[1:]
    store.free(2, ())
    assert figures(store)[BYTES + "current"] == 300
    store.free(3, ())
    found = figures(store)
    assert (found[BYTES + "current"], found[BYTES + "peak"], found[TENSORS + "peak"]) == (100, 300, 3)


def test_a_storage_that_grows(store: Store) -> None:
    base: Any = store.entries[1]
    store.entries[3] = base.detach()
    base.resize_(100)
    store.free(2, ())
    found = figures(store)
    assert (found[BYTES + "current"], found[BYTES + "peak"]) == (400, 600)


class Arrives:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def test_what_is_on_its_way(store: Store) -> None:
    """A receive counts from its beginning on, a stream's output when it is there."""
    pending = Pending(Arrives(torch.zeros(10)), None, 0, 40, "cpu")  # type: ignore[arg-type]
    promise = Promise()
    store.entries.update({3: pending, 4: promise})
    store.pending[3] = pending
    assert figures(store)[BYTES + "current"] == 340
    promise.keep(torch.zeros(1000))
    store.entries[3] = pending.result(lambda error: None)  # type: ignore[assignment, arg-type, return-value]
    store.free(1, ())
    found = figures(store)
    assert (found[BYTES + "current"], found[BYTES + "peak"]) == (4240, 4340)
    assert found[TENSORS + "current"] == 3


class Leaves:
    def __init__(self) -> None:
        self.left = False

    def is_completed(self) -> bool:
        return self.left


def test_what_is_sent_stays_until_it_has_left(store: Store) -> None:
    sends = [Leaves(), Leaves()]
    store.sending += [(store.entries[1], sends[0]), (store.entries[2], sends[1])]  # type: ignore[list-item]
    store.free(2, ())
    assert figures(store)[BYTES + "current"] == 300
    sends[1].left = True
    assert figures(store)[BYTES + "current"] == 100


def test_what_goes_in_another_way(store: Store) -> None:
    """As a graph's outputs and what a failure spoils: it is counted no more from the next question on."""
    store.entries.pop(1)
    store.watched[7] = {}
    for size in (5, 6, 7):
        store.entries.pop(7, None)
        store.entries[8 + size] = torch.zeros(1)
        store.entries[7] = torch.zeros(size)
        store.free(99, ())
    found = figures(store)
    assert found[BYTES + "current"] == 200 + 3 * 4 + 7 * 4
    assert found[TENSORS + "current"] == 5


def test_only_memory_of_the_cpu_counts(store: Store) -> None:
    store.entries[3] = torch.zeros(1000, device="meta")
    store.entries[4] = torch.ones(3).to_sparse()
    store.free(1, ())
    assert figures(store)[BYTES + "current"] == 200


def test_it_costs_nothing_before_anybody_asks() -> None:
    node = Node()
    try:
        node.do(*ALL, c.Call(1, 1, (2.0,)))
        assert node.executor.store.tally is None
        (told,) = node.do(c.MemoryStats(1, "cpu"))
        assert node.executor.store.tally is None
        assert isinstance(told, c.MemoryFigures)
        assert not told.counted
        assert dict(told.figures).keys() >= {BYTES + "current", "reserved_bytes.all.peak", "num_ooms"}
        assert BYTES + "peak" not in dict(told.figures)
        (told,) = node.do(c.MemoryStats(2, "cpu", "count", 1))
        assert (told.counted, told.holdings.largest) == (False, (c.Held(1, 16, "float32 (2, 2)"),))
        (told,) = node.do(c.MemoryStats(3, "cpu", "reset"))
        assert told.counted
    finally:
        node.channel.close()
        node.master.close()


@pytest.mark.parametrize(
    ("error", "short"),
    [
        (MemoryError(), True),
        (OSError(12, "Cannot allocate memory"), True),
        (OSError(2, "No such file"), False),
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory"), True),
        (RuntimeError("shapes don't match"), False),
        (ValueError("DefaultCPUAllocator"), False),
        (BrokenError(f"transfer 4: rank 1 {NO_MEMORY}: 5 bytes"), True),
        (BrokenError("the connection ended"), False),
    ],
)
def test_what_is_a_shortage_of_memory(error: Exception, short: bool) -> None:
    assert is_shortage(error) == short
    outer = ValueError("no")
    outer.__cause__ = error
    assert is_shortage(outer) == short


def test_torch_says_it_in_these_words() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60)
    assert is_shortage(caught.value)
