"""Batches that are sent ahead of the one that the consumer has."""

from __future__ import annotations

import threading
from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from equal import same
from test_flow import Busy
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader, TensorDataset

import disttensor as dt
from disttensor import testing

#: Seconds for what takes a moment; longer is a hang.
SOON = 20


pytestmark = pytest.mark.usefixtures("calm")


class Pair(NamedTuple):
    frm: torch.Tensor
    to: object


class Loader:
    """Batches of its index, counted as they are taken, with an end that is noticed."""

    def __init__(self, n: int, fails_at: int | None = None) -> None:
        self.n, self.fails_at = n, fails_at
        self.taken = 0
        self.closed = False

    def __iter__(self) -> Iterator[torch.Tensor]:
        try:
            for i in range(self.n):
                if i == self.fails_at:
                    raise OSError(f"batch {i} can't be read")
                self.taken += 1
                yield torch.full((3,), float(i))
        finally:
            self.closed = True


# ---- what it gives ---------------------------------------------------------------------------------------------------


def test_tensors_at_any_depth_and_everything_else() -> None:
    def batch(i: int) -> dict[str, Any]:
        x = torch.arange(12.0).reshape(3, 4) + i
        return {
            "list": [x, (x.t(), x[:2])],
            "pair": Pair(x.int(), {"to": x.bool()}),
            "ordered": OrderedDict(a=x, b=None),
            "default": defaultdict(list, a=[x.to(torch.complex64).conj()]),
            "grad": x.clone().requires_grad_(),
            "text": f"batch {i}",
            "numbers": (i, 1.5, {i}),
        }

    seen = 0
    for i, sent in enumerate(dt.data.prefetch([batch(i) for i in range(5)], "node:1")):
        same(sent, batch(i))
        assert sent["list"][0].device == torch.device("node:1")
        seen += 1
    assert seen == 5


def test_what_has_a_way_of_its_own() -> None:
    packed = [pack_sequence([torch.ones(3) * i, torch.ones(2)]) for i in range(3)]
    for i, sent in enumerate(dt.data.prefetch(packed, "node:0")):
        assert type(sent) is type(packed[0])
        same(sent.data, packed[i].data)
        assert torch.equal(sent.batch_sizes, packed[i].batch_sizes)


def test_tensors_of_another_node() -> None:
    for i, x in enumerate(dt.data.prefetch((torch.full((2,), i, device="node:0") for i in range(4)), "node:1")):
        assert x.device == torch.device("node:1")
        assert x.tolist() == [i, i]


def test_devices() -> None:
    for device in ("node:1", torch.device("node", 1), 1):
        assert [x.device for x in dt.data.prefetch([torch.ones(2)], device)] == [torch.device("node", 1)]
    assert [x.device.type for x in dt.data.prefetch([torch.ones(2)], "cpu")] == ["cpu"]
    with dt.node(1):
        assert [x.device for x in dt.data.prefetch([torch.ones(2)])] == [torch.device("node", 1)]


def test_as_the_loader_itself() -> None:
    data = TensorDataset(torch.randn(50, 3), torch.arange(50))

    def loader(workers: int = 0) -> DataLoader[Any]:
        return DataLoader(
            data, batch_size=8, shuffle=True, num_workers=workers, generator=torch.Generator().manual_seed(3)
        )

    expected = list(loader())
    for workers in (0, 2):
        batches = dt.data.prefetch(loader(workers), "node:0", depth=3)
        assert len(batches) == len(expected)
        for batch, local in zip(batches, expected, strict=True):
            same(batch, local)
    assert list(dt.data.prefetch([], 0)) == []
    batches = dt.data.prefetch([torch.ones(2)], 0)
    assert len(list(batches)) == len(list(batches)) == 1


@pytest.mark.parametrize("device", ["node:1", "cpu"])
def test_breaking_off_closes_a_generator_that_somebody_else_holds(device: str) -> None:
    closed = []

    def batches() -> Iterator[torch.Tensor]:
        try:
            while True:
                yield torch.ones(3)
        finally:
            closed.append(True)

    loader = batches()
    for _ in dt.data.prefetch(loader, device):
        break
    assert closed == [True]


def test_a_loader_without_a_length() -> None:
    with pytest.raises(TypeError):
        len(dt.data.prefetch(iter([1]), 0))
    assert list(dt.data.prefetch(iter([1]), 0)) == [1]


def test_a_depth_of_none_is_refused() -> None:
    with pytest.raises(ValueError, match="depth=0: at least 1 is needed"):
        dt.data.prefetch([], 0, depth=0)


# ---- ahead -----------------------------------------------------------------------------------------------------------


@pytest.mark.row("T37")
@pytest.mark.parametrize("depth", [1, 2, 7])
def test_so_many_are_sent_ahead(depth: int) -> None:
    loader = Loader(10)
    taken = [(x[0].item(), loader.taken) for x in dt.data.prefetch(loader, "node:1", depth)]
    assert taken == [(i, min(10, i + depth + 1)) for i in range(10)]


@pytest.mark.row("T37")
def test_they_come_while_the_node_computes(tmp_path: Path) -> None:
    """What the node was told to expect before its long work has come after it without anything of the script's."""
    batches = iter(dt.data.prefetch((torch.full((1 << 20,), float(i)) for i in range(4)), "node:1"))
    x = next(batches)
    dt.synchronize(0)
    with Busy(1, tmp_path) as busy:
        y, z = next(batches), next(batches)  # these were on their way before, and this waits until they have left
        assert busy.running
        assert testing.queued().uploads == 0
    assert [t[-1].item() for t in (x, y, z, *batches)] == [0, 1, 2, 3]


def test_the_script_does_not_run_ahead_of_the_node(tmp_path: Path) -> None:
    waits = threading.Event()
    taken, seen = [], []

    def load() -> Iterator[torch.Tensor]:
        for i in range(30):
            taken.append(i)
            yield torch.full((1 << 21,), float(i))

    def consume() -> None:
        for x in dt.data.prefetch(load(), "node:1"):
            seen.append(x[-1])

    def note() -> None:
        if threading.current_thread() is thread:
            waits.set()

    thread = threading.Thread(target=consume)
    with testing.at("wait", note), Busy(1, tmp_path):
        room = torch.zeros(int(testing.limit("room")) // 4).to(
            "node:1", non_blocking=True
        )  # which the channel has for what leaves early
        thread.start()
        assert waits.wait(SOON)
        assert (len(taken), len(seen)) == (3, 0)
    assert not room.any()
    thread.join(SOON)
    assert [x.item() for x in seen] == list(range(30))


# ---- the end ---------------------------------------------------------------------------------------------------------


def test_breaking_off_closes_the_loader_and_frees_what_was_sent() -> None:
    loader, before = Loader(10), testing.usage(1)
    for x in dt.data.prefetch(loader, "node:1", depth=4):
        if x[0].item() == 2:
            break
    assert loader.closed
    assert loader.taken == 7
    del x
    dt.synchronize()
    assert testing.usage(1) == before


def test_an_error_of_the_loader_comes_after_the_batches_before_it() -> None:
    loader, seen = Loader(10, fails_at=5), []
    with pytest.raises(OSError, match="batch 5 can't be read"):  # noqa: PT012
        for x in dt.data.prefetch(loader, "node:1", depth=3):
            seen.append(x[0].item())
    assert seen == [0, 1, 2, 3, 4]
    assert loader.closed


def test_an_error_of_the_consumer_ends_it() -> None:
    loader = Loader(10)
    with pytest.raises(ZeroDivisionError):  # noqa: PT012
        for _ in dt.data.prefetch(loader, "node:1"):
            1 // 0  # noqa: B018
    assert loader.closed


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_a_batch_that_cannot_be_sent() -> None:
    batches = iter(dt.data.prefetch([torch.ones(2), torch.eye(2).to_sparse_csr(), torch.ones(2)], "node:1"))
    assert next(batches).sum().item() == 2
    with pytest.raises(NotImplementedError, match="sparse_csr can't be on a node"):
        next(batches)


def test_an_operation_on_a_batch_that_fails_is_told_as_ever() -> None:
    table = torch.ones(3, 2, device="node:1")
    works = [
        dt.fetch(torch.nn.functional.embedding(i, table)) for i in dt.data.prefetch(torch.tensor([[1], [7]]), "node:1")
    ]
    assert works[0].result().tolist() == [[1, 1]]
    with pytest.raises(IndexError, match=r"issued: .*test_prefetch.py"):
        works[1].result()
