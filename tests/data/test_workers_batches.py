"""Batches that workers of the script's DataLoader read: each is written once, where the node has its tensor."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mesh_kit import connected
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate

import disttensor as dt
from disttensor.data import distribute, prefetch

pytestmark = [
    pytest.mark.usefixtures("settled"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create 4 worker processes"),
]


@pytest.fixture(scope="module", autouse=True)
def session() -> Iterator[None]:
    with connected(2):
        yield


class Copies(TorchDispatchMode):
    """Counts the bytes that operations of this thread write."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {x.untyped_storage().data_ptr() for x in args if type(x) is torch.Tensor}
        out = op(*args, **(kwargs or {}))
        if type(out) is torch.Tensor and out.device.type == "cpu":
            written = op is torch.ops.aten.copy_.default or out.untyped_storage().data_ptr() not in before
            self.bytes += out.nbytes if written else 0
        return out


def resident(kind: str) -> int:
    """The bytes of this process in memory: Anon, in no file and shared with nobody; Shmem, in shared memory."""
    return 1024 * int(Path("/proc/self/status").read_text().partition(f"Rss{kind}:")[2].split()[0])


class Large(Dataset[torch.Tensor]):
    """Samples of 4 MiB."""

    def __len__(self) -> int:
        return 48

    def __getitem__(self, i: int) -> torch.Tensor:
        return torch.full((1 << 20,), i, dtype=torch.float32)


BATCH = 8 * 4 << 20


def of_dataset() -> Any:
    return distribute(Large(), dt.mesh(dp=2), batch_size=8, num_workers=4)


def of_loader() -> Any:
    return distribute(DataLoader(Large(), 8, num_workers=4), dt.mesh(dp=2))


def own_collate(samples: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(samples)


def of_own_collate() -> Any:
    return distribute(DataLoader(Large(), 8, num_workers=4, collate_fn=own_collate), [0, 1])


def prefetched() -> Any:
    return prefetch(DataLoader(Large(), 8, num_workers=4), "node:1")


def parts_of(batch: Any) -> list[torch.Tensor]:
    """Its parts on the nodes, in the order of the nodes."""
    if isinstance(batch, list):
        return batch
    return list(batch.shards()) if batch.device.index >= 2 else [batch]


@pytest.mark.parametrize("made", [of_dataset, of_loader, of_own_collate, prefetched])
def test_the_script_touches_no_byte(made: Any) -> None:
    """The kernel counts the pages of shared memory that a process has touched, the source's as well as the target's."""
    loader = made()
    warm = iter(loader)
    next(warm), warm.close()
    dt.synchronize()
    dt.channels.reset_stats()
    gc.collect()
    before, most = (resident("Anon"), resident("Shmem")), [0, 0]
    with Copies() as copies:
        for i, x in enumerate(loader):
            now = resident("Anon"), resident("Shmem")
            most = [max(m, a - b) for m, a, b in zip(most, now, before, strict=True)]
            found = sorted(n for part in parts_of(x) for n in part[:, 0].tolist())
            assert found == [8 * i + k for k in range(8)]
    assert copies.bytes < BATCH / 100
    assert most[0] < BATCH / 2
    assert most[1] < BATCH / 10, "a page of each segment is its state's, and the kernel maps up to 16 around it"
    sent = [row.sent.bytes for row in dt.channels.stats() if row.at == "master"]
    assert sum(sent) == 6 * BATCH, "that many bytes have gone to nodes"


class Kinds(Dataset[Any]):
    """Samples with all that torch's default collate function takes, large and small."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, i: int) -> Any:
        return {
            "x": torch.full((200, 200), i + 0.5),
            "n": np.full((300, 100), i, dtype=np.int16),
            "pair": (i, torch.full((3,), i)),
            "many": [torch.full((40_000,), i, dtype=torch.bfloat16), torch.arange(60_000).view(200, 300).t() + i],
            "complex": torch.full((90, 100), complex(i, -i)),
            "flags": torch.full((100_000,), i % 2 == 0),
            "text": f"sample {i}",
            "number": float(i),
        }


def mixed(samples: list[Any]) -> Any:
    """A collate function that makes strided, shared and repeated tensors."""
    whole = torch.stack([sample["x"] for sample in samples])
    return {"t": whole.transpose(1, 2), "same": [whole, whole], "some": whole[:, 0], "one": torch.tensor(3.0)}


def identical(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=0)


def tensors(batch: Any) -> list[torch.Tensor]:
    return [x for x in tree_flatten(batch)[0] if isinstance(x, torch.Tensor) and x.dim()]


@pytest.mark.parametrize("collate", [None, mixed])
@pytest.mark.parametrize("size", [8, 7])
def test_batches_are_dataloaders(collate: Any, size: int) -> None:
    """The same to the bit, also where the last batch is smaller, and where rows do not divide."""
    there = DataLoader(Kinds(), size, num_workers=2, collate_fn=collate)
    found = list(prefetch(there, "node:0"))
    expected = list(DataLoader(Kinds(), size, collate_fn=collate))
    assert there.collate_fn is (collate or default_collate)
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        leaves, spec = tree_flatten(a)
        wanted, its = tree_flatten(b)
        assert spec == its
        for x, y in zip(leaves, wanted, strict=True):
            if isinstance(y, torch.Tensor):
                assert x.device == torch.device("node:0")
                identical(x.cpu(), y)
            else:
                assert x == y
    halves = list(distribute(there, [0, 1], uneven="none"))
    for (a, b), whole in zip(halves, expected, strict=True):
        for x, y, z in zip(*map(tensors, (a, b, whole)), strict=True):
            identical(torch.cat([x.cpu(), y.cpu()]), z)


def test_a_batch_stays_as_long_as_somebody_has_it() -> None:
    """Workers write later batches elsewhere; the memory of those that are gone is used again."""
    kept = list(of_dataset())
    assert [part[:, 0].tolist() for x in kept for part in x.shards()] == [
        [8 * i + k for k in range(rank, 8, 2)] for i in range(6) for rank in range(2)
    ]
    kept[0].shards()[0].fill_(-1)
    assert kept[1].shards()[0][:, 0].tolist() == [8, 10, 12, 14]


def test_nodes_keep_nothing_of_loops_that_are_over() -> None:
    """Each loop has workers, and so memory, of its own; a node lets go of what an earlier one had."""
    held = []
    for _ in range(4):
        for x in of_dataset():
            x.sum()
        del x
        dt.synchronize()
        held.append(dt.run(resident, "Shmem", node=0))
    assert held[-1] < held[0] + BATCH


def test_a_loop_that_is_left_leaves_no_descriptor() -> None:
    """Whatever has been read ahead."""
    held = []
    for _ in range(4):  # the first one connects to nodes
        loop = iter(of_loader())
        next(loop), loop.close()
        del loop
        dt.synchronize()
        held.append(len(os.listdir("/proc/self/fd")))
    assert held[-1] <= held[0] + 2


def test_a_loader_that_keeps_its_workers_stays_the_users() -> None:
    loader = DataLoader(Large(), 8, num_workers=2, persistent_workers=True)
    first = [x[:, 0].tolist() for x in prefetch(loader, 0)]
    assert first == [x[:, 0].tolist() for x in loader]


def test_small_tensors_come_as_ever() -> None:
    loader = DataLoader(TensorDataset(torch.arange(8.0)), 4, num_workers=1)
    assert [x.tolist() for (x,) in prefetch(loader, 1)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
