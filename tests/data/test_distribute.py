"""Batches of ranks, read at the script or on nodes, against torch's DistributedSampler and DataLoader: real nodes."""

from __future__ import annotations

import os
import random
import re
import select
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from equal import same
from limits import HANG
from mesh_kit import connected
from telling import said
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, TensorDataset, get_worker_info
from torch.utils.data.sampler import Sampler

import disttensor as dt
from disttensor import mesh
from disttensor.data import distribute

pytestmark = pytest.mark.usefixtures("settled")

NODES = 4
PLACES = pytest.mark.parametrize("at", ["script", "node"])


@pytest.fixture(scope="module", autouse=True)
def session() -> Iterator[None]:
    with connected(NODES):
        yield


class Drawn(Dataset[torch.Tensor]):
    """Samples with random numbers from all three generators that a dataset may use."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, i: int) -> torch.Tensor:
        return torch.tensor([i, torch.rand(()).item(), random.random(), np.random.rand()], dtype=torch.float64)


class Counting(IterableDataset[torch.Tensor]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = get_worker_info()
        return iter(torch.arange(self.size)[info.id :: info.num_workers] if info else torch.arange(self.size))


def numbers(size: int) -> TensorDataset:
    return TensorDataset(torch.arange(size))


def shards(batch: Any) -> list[list[Any]]:
    return [shard.tolist() for shard in batch.shards()]


def torchs(size: int, rank: int, ranks: int, batch: int, epoch: int, shuffle: bool, uneven: str) -> list[list[int]]:
    """The batches of a rank as a program of torch's own has them."""
    data, drop = numbers(size), uneven == "drop"
    sampler = DistributedSampler(data, ranks, rank, shuffle=shuffle, seed=5, drop_last=drop)
    sampler.set_epoch(epoch)
    return [x.tolist() for (x,) in DataLoader(data, batch // ranks, sampler=sampler, drop_last=drop)]


# ---- each sample once ------------------------------------------------------------------------------------------------


@pytest.mark.row("T57")
@PLACES
@pytest.mark.parametrize(("ranks", "shuffle", "uneven"), [(2, True, "pad"), (3, True, "drop"), (4, False, "pad")])
def test_each_rank_has_the_samples_of_torchs_sampler(at: str, ranks: int, shuffle: bool, uneven: str) -> None:
    there = mesh(dp=ranks, nodes=list(range(ranks)))
    loader = distribute(numbers(41), there, batch_size=12, shuffle=shuffle, seed=5, uneven=uneven, at=at)
    for epoch in (0, 1, 7):
        if epoch == 7:
            loader.set_epoch(7)
        wanted = [torchs(41, rank, ranks, 12, epoch, shuffle, uneven) for rank in range(ranks)]
        batches = [shards(x) for (x,) in loader]
        assert [list(batch) for batch in zip(*wanted, strict=True)] == batches
        assert len(loader) == len(batches)


@PLACES
def test_repeats_are_counted(at: str) -> None:
    loader = distribute(numbers(10), mesh(dp=4), batch_size=8, uneven="pad", at=at)
    assert loader.counts is None
    assert [(shards(x), loader.counts) for (x,) in loader] == [
        ([[0, 4], [1, 5], [2, 6], [3, 7]], (2, 2, 2, 2)),
        ([[8], [9], [0], [1]], (1, 1, 0, 0)),
    ]


@PLACES
def test_nodes_have_different_numbers_of_samples(at: str) -> None:
    loader = distribute(numbers(8), [2, 0, 1], batch_size=6, uneven="none", at=at)
    found = [[part and part[0] for part in batch] for batch in loader]
    assert [[x if x is None else x.tolist() for x in batch] for batch in found] == [
        [[0, 3], [1, 4], [2, 5]],
        [[6], [7], None],
    ]
    assert [x.device for x in found[0]] == [torch.device("node", k) for k in (2, 0, 1)]
    assert [
        (x.tolist(), x.get_node()) for (x,) in distribute(numbers(3), "node:3", batch_size=2, uneven="none", at=at)
    ] == [
        ([0, 1], 3),
        ([2], 3),
    ]


@PLACES
@pytest.mark.parametrize(
    ("uneven", "wanted"),
    [
        ("drop", [[[0, 3], [1, 4], [2, 5]]]),
        ("pad", [[[0, 3], [1, 4], [2, 5]], [[6], [7], [0]]]),
    ],
)
def test_a_stream_of_samples(at: str, uneven: str, wanted: list[Any]) -> None:
    loader = distribute(Counting(8), mesh(dp=3, nodes=[0, 1, 2]), batch_size=6, uneven=uneven, at=at)
    assert [shards(x) for x in loader] == wanted
    with pytest.raises(TypeError, match=r"IterableDataset \(Counting\) has no length"):
        len(loader)


@PLACES
def test_workers_share_a_stream(at: str) -> None:
    loader = distribute(Counting(16), mesh(dp=2, nodes=[0, 1]), batch_size=4, num_workers=2, at=at)
    assert sorted(i for x in loader for shard in shards(x) for i in shard) == list(range(16))


@pytest.mark.row("T57")
def test_ranks_along_other_dims_have_the_same() -> None:
    there = mesh(dp=2, tp=2)
    for at in ("script", "node"):
        for x in distribute(Drawn(8), there, batch_size=4, shuffle=True, at=at):
            assert torch.equal(x.at(dp=0, tp=0).cpu(), x.at(dp=0, tp=1).cpu())
            assert torch.equal(x.at(dp=1, tp=0).cpu(), x.at(dp=1, tp=1).cpu())
            assert not torch.equal(x.at(dp=0, tp=0).cpu(), x.at(dp=1, tp=0).cpu())
    large = TensorDataset(torch.arange(8192.0).view(4, 2048))  # above what goes to each node by itself
    ((x,),) = distribute(large, there, batch_size=4, over=("tp", "dp"))
    assert [shard[0, 0].item() // 2048 for shard in x.shards()] == [0, 2, 1, 3]
    ((x,),) = distribute(large, there, batch_size=4)
    assert [shard[:, 0].tolist() for shard in x.shards()] == [[0, 4096], [0, 4096], [2048, 6144], [2048, 6144]]


def test_both_ways_give_the_same_bits() -> None:
    there = mesh(dp=2, nodes=[0, 1])
    here, on_nodes, workers = (
        [x.shards() for x in distribute(Drawn(12), there, batch_size=4, shuffle=True, seed=3, **how)]
        for how in ({}, {"at": "node"}, {"num_workers": 2})
    )
    for a, b, c in zip(here, on_nodes, workers, strict=True):
        for x, y, z in zip(a, b, c, strict=True):
            assert torch.equal(x.cpu(), y.cpu())
            assert torch.equal(x.cpu(), z.cpu())


# ---- resume ----------------------------------------------------------------------------------------------------------


@pytest.mark.row("T57")
@PLACES
def test_a_loop_goes_on_where_another_was(at: str) -> None:
    def loader(ranks: int) -> Any:
        there = mesh(dp=ranks, nodes=list(range(ranks)))
        return distribute(Drawn(21), there, batch_size=6, shuffle=True, uneven="drop", at=at)

    whole = loader(3)
    list(whole)
    assert whole.state_dict()["epoch"] == 1
    states, batches = [], []
    for x in whole:
        states.append(whole.state_dict())
        batches.append(torch.stack([shard.cpu() for shard in x.shards()]))
    for ranks, at_batch in ((3, 0), (3, 2), (2, 1)):
        resumed = loader(ranks)
        resumed.load_state_dict(states[at_batch])
        assert resumed.state_dict() == states[at_batch]
        resumed.set_epoch(1)  # as a loop over epochs does
        left = [torch.stack([shard.cpu() for shard in x.shards()]) for x in resumed]
        assert len(left) == len(batches) - at_batch - 1
        for x, y in zip(left, batches[at_batch + 1 :], strict=True):
            # rank by rank the samples come in turns: all ranks together have one order
            assert torch.equal(x.transpose(0, 1).reshape(-1, 4), y.transpose(0, 1).reshape(-1, 4))
        assert resumed.state_dict() == whole.state_dict()
    resumed.set_epoch(1)
    assert resumed.state_dict()["position"] == 0


@PLACES
def test_a_stream_is_read_again_up_to_there(at: str) -> None:
    loader = distribute(Counting(12), mesh(dp=2, nodes=[0, 1]), batch_size=4, at=at)
    next(iter(loader))
    again = distribute(Counting(12), mesh(dp=2, nodes=[0, 1]), batch_size=4, at=at)
    again.load_state_dict(loader.state_dict())
    assert [shards(x) for x in again] == [[[4, 6], [5, 7]], [[8, 10], [9, 11]]]


def test_states_that_do_not_fit() -> None:
    loader = distribute(numbers(8), 0, batch_size=4)
    for change in ({"size": 9}, {"seed": 1}, {"shuffle": True}):
        with pytest.raises(ValueError, match=f"{next(iter(change))}=.*its samples come in another order"):
            loader.load_state_dict({**loader.state_dict(), **change})
    with pytest.raises(ValueError, match="has epoch, position, seed, shuffle, size, not"):
        loader.load_state_dict(distribute([torch.ones(2)], 0).state_dict())


class WithState:
    """A loader with a state of its own, as StatefulDataLoader has one: the next batch."""

    def __init__(self) -> None:
        self.next = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.next < 6:
            self.next += 1
            yield torch.full((2,), self.next - 1)
        self.next = 0

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


def test_a_loaders_own_state_is_that_of_the_batch_that_was_given() -> None:
    loader = distribute(WithState(), [0, 1], depth=3)
    batches = iter(loader)
    assert [[x.item() for x in next(batches)] for _ in range(2)] == [[0, 0], [1, 1]]
    state = loader.state_dict()
    assert state == {"epoch": 0, "batches": 2, "loader": {"next": 2}}
    again = distribute(WithState(), [0, 1])
    again.load_state_dict(state)
    assert [x.item() for x, _ in again] == [2, 3, 4, 5]
    with pytest.raises(ValueError, match="list has none"):
        distribute([torch.ones(2)], 0).load_state_dict(state)


# ---- loaders of the script's -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("uneven", "last", "counts"), [("drop", [[8], [9]], (1, 1)), ("pad", [[8, 9], [10, 8]], (2, 1))]
)
def test_a_loader_is_cut_batch_by_batch(uneven: str, last: list[list[int]], counts: tuple[int, ...]) -> None:
    data = DataLoader(numbers(11), batch_size=4, num_workers=2)
    loader = distribute(data, mesh(dp=2, nodes=[0, 1]), uneven=uneven)
    assert len(loader) == 3
    assert [shards(x) for (x,) in loader] == [[[0, 1], [2, 3]], [[4, 5], [6, 7]], last]
    *_, _ = loader
    state = None
    for _ in loader:
        state = loader.counts
    assert state == counts
    loader.load_state_dict({"epoch": 0, "batches": 2, "loader": None})
    assert [shards(x) for (x,) in loader] == [last]


def test_the_rest_of_a_batch_goes_to_the_first_nodes() -> None:
    (batch,) = distribute([{"x": torch.arange(5), "n": ["a", "b", "c", "d", "e"]}], [0, 1, 2], uneven="none")
    same(
        batch,
        [
            {"x": torch.tensor([0, 1]), "n": ["a", "b"]},
            {"x": torch.tensor([2, 3]), "n": ["c", "d"]},
            {"x": torch.tensor([4]), "n": ["e"]},
        ],
    )
    with pytest.raises(ValueError, match=r"a batch of 5 rows does not divide among 2 ranks of Mesh\(dp=2"):
        list(distribute([torch.arange(5)], mesh(dp=2, nodes=[0, 1]), uneven="none"))
    assert list(distribute([torch.arange(1)], [0, 1])) == []


class Epochs(Sampler[int]):
    def __init__(self) -> None:
        self.told: list[int] = []

    def __iter__(self) -> Iterator[int]:
        return iter(range(2))

    def __len__(self) -> int:
        return 2

    def set_epoch(self, epoch: int) -> None:
        self.told.append(epoch)


def test_a_loaders_sampler_is_told_the_epoch() -> None:
    sampler = Epochs()
    loader = distribute(DataLoader(numbers(2), sampler=sampler), 0)
    list(loader), list(loader)
    loader.set_epoch(5)
    list(loader)
    assert sampler.told == [0, 1, 5]


# ---- what a batch is made of -----------------------------------------------------------------------------------------


class Pair(NamedTuple):
    x: torch.Tensor
    rest: Any


def named(samples: list[int]) -> Pair:
    x = torch.tensor(samples)
    names = [f"sample {i}" for i in samples]
    return Pair(
        x.view(-1, 1) * torch.ones(3),
        {"y": (x.bool(), [x.double().t()]), "names": names, "kind": "test", 7: None, "c": 1j},
    )


@PLACES
def test_batches_of_any_form(at: str) -> None:
    first, second = distribute(range(8), mesh(dp=2, nodes=[0, 1]), batch_size=4, collate_fn=named, at=at)
    assert type(first) is Pair
    assert [s.dtype for s in (first.x, first.rest["y"][0], first.rest["y"][1][0])] == [
        torch.float32,
        torch.bool,
        torch.float64,
    ]
    assert shards(second.rest["y"][1][0]) == [[4, 6], [5, 7]]
    assert second.x.at(dp=1).tolist() == [[5] * 3, [7] * 3]
    assert second.rest["names"] == ["sample 4", "sample 6", "sample 5", "sample 7"]
    assert (second.rest["kind"], second.rest[7], second.rest["c"]) == ("test", None, 1j)
    parts = next(iter(distribute(range(8), [0, 1], batch_size=4, collate_fn=named, at=at)))
    assert [part.rest["names"] for part in parts] == [["sample 0", "sample 2"], ["sample 1", "sample 3"]]
    assert (parts[0] + (parts[1].x + 1,))[2].tolist() == [[2] * 3, [4] * 3]


def lengths(samples: list[int]) -> torch.Tensor:
    return torch.ones(len(samples), samples[0] + 1)


def test_shapes_that_differ_are_for_lists_of_nodes() -> None:
    (parts,) = distribute(range(4), [0, 1], batch_size=4, collate_fn=lengths, at="node")
    assert [tuple(x.shape) for x in parts] == [(2, 1), (2, 2)]
    with pytest.raises(
        ValueError, match=r"batch is \(2, 1\) torch.float32 on node 0 \(dp=0\), and \(2, 2\) .* node 1 \(dp=1\)"
    ):
        list(distribute(range(4), mesh(dp=2, nodes=[0, 1]), batch_size=4, collate_fn=lengths, at="node"))


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda s: {"x": np.arange(2)}, r"batch\['x'\] is a numpy.ndarray.*torch.from_numpy"),
        (lambda s: s[0], r"batch is 0 at rank 0 and 1 at rank 1; on a mesh it is one value"),
        (lambda s: [torch.ones(2)] * (s[0] + 1), "ranks have batch of other kinds or lengths: list of 1, list of 2"),
        (lambda s: torch.eye(2).to_sparse(), "batch is a torch.sparse_coo tensor"),
    ],
)
def test_batches_that_cannot_be(made: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        list(distribute(range(4), mesh(dp=2, nodes=[0, 1]), batch_size=4, collate_fn=made, at="node"))


def test_batches_of_the_script_that_cannot_be_cut() -> None:
    two = mesh(dp=2, nodes=[0, 1])
    with pytest.raises(ValueError, match=r"batch\['w'\] has the shape \(3,\), and the batch has 2 rows"):
        list(distribute([{"x": torch.ones(2), "w": torch.ones(3)}], two))
    with pytest.raises(TypeError, match="PackedSequence, which can't be cut"):
        list(distribute([[torch.ones(2), torch.nn.utils.rnn.pack_sequence([torch.ones(2)])]], two))
    with pytest.raises(TypeError, match="its rows are not known"):
        list(distribute([["a", "b"]], two))
    assert list(distribute([["a", "b"]], 0)) == [["a", "b"]]


# ---- bytes and memory ------------------------------------------------------------------------------------------------


def test_the_script_gets_and_sends_no_bytes_of_what_nodes_read() -> None:
    loader = distribute(Drawn(24), mesh(dp=3, nodes=[0, 1, 2]), batch_size=6, at="node")
    dt.channels.reset_stats()
    assert sum(1 for _ in loader) == 4
    dt.synchronize()
    assert dt.channels.stats() == ()


class Gates:
    """Pipes with names, by which processes wait for each other."""

    def __init__(self, folder: Path, *names: str) -> None:
        self._files = {}
        self.paths = {name: str(folder / name) for name in names}
        for name, path in self.paths.items():
            os.mkfifo(path)
            self._files[name] = os.open(path, os.O_RDWR)

    def open(self, name: str) -> None:
        os.write(self._files[name], b".")

    def wait(self, name: str) -> None:
        assert select.select([self._files[name]], [], [], HANG)[0], f"nobody came to {name!r}"
        os.read(self._files[name], 1)

    def close(self) -> None:
        for file in self._files.values():
            os.close(file)


@pytest.fixture
def gates(tmp_path: Path) -> Iterator[Gates]:
    made = Gates(tmp_path, "begun", "go", "reads", "may", "has read")
    yield made
    made.close()


def passes(told: str, waited: str) -> None:
    Path(told).write_bytes(b".")
    with open(waited, "rb") as file:
        file.read(1)


class Gated(Dataset[torch.Tensor]):
    """Samples, and the process that made each; the last one waits at a gate."""

    def __init__(self, paths: dict[str, str]) -> None:
        self.paths = paths

    def __len__(self) -> int:
        return 6

    def __getitem__(self, i: int) -> torch.Tensor:
        if i == 5:
            passes(self.paths["reads"], self.paths["may"])
            Path(self.paths["has read"]).write_bytes(b".")
        return torch.tensor([i, os.getpid()])


@pytest.mark.row("S9")
@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
@pytest.mark.parametrize("workers", [None, 3])
def test_a_node_reads_while_it_computes(gates: Gates, workers: int | None) -> None:
    """Its workers have begun with the last sample before the node runs a function, and are done before it returns.

    Nobody has asked for this sample, nor for the two before it.
    """
    loader = distribute(Gated(gates.paths), 0, batch_size=1, at="node", num_workers=workers)
    batches = iter(loader)
    found = [next(batches)[0].tolist() for _ in range(3)]
    gates.wait("reads")
    with ThreadPoolExecutor(1) as pool:
        work = pool.submit(dt.run, passes, gates.paths["begun"], gates.paths["go"], node=0)
        gates.wait("begun")
        gates.open("may")
        gates.wait("has read")
        assert not work.done()
        gates.open("go")
        work.result()
    found += [x[0].tolist() for x in batches]
    assert [i for i, _ in found] == [0, 1, 2, 3, 4, 5]
    read_by = {pid for _, pid in found}
    assert len(read_by) == (workers or 1)
    assert not read_by & {os.getpid(), dt.nodes()[0]["pid"]}


def test_on_streams_and_in_graphs() -> None:
    stream = dt.Stream(node=1)
    with dt.stream(stream):
        assert [x.tolist() for (x,) in distribute(numbers(4), 1, batch_size=2, at="node")] == [[0, 1], [2, 3]]
    with pytest.raises(dt.errors.GraphError, match="a loader of nodes has to wait"), dt.graph(dt.Graph()):
        list(distribute(numbers(4), 1, batch_size=2, at="node"))


# ---- random numbers of others ----------------------------------------------------------------------------------------


def test_reading_draws_from_nobody_elses_generator() -> None:
    there = mesh(dp=2, nodes=[0, 1])

    def drawn(*loops: Any) -> list[Any]:
        torch.manual_seed(1)
        random.seed(1)
        for loop in loops:
            next(iter(loop))
        return [
            torch.rand(3, device=there.device).cpu(),
            torch.rand(3, device="node:0").cpu(),
            torch.rand(3),
            random.random(),
        ]

    loops = [distribute(Drawn(8), there, batch_size=4, shuffle=True, at=at) for at in ("script", "node")]
    for x, y in zip(drawn(), drawn(*loops), strict=True):
        assert torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y


# ---- loops that end early, and errors --------------------------------------------------------------------------------


@PLACES
def test_a_loop_that_is_left_leaves_nothing(at: str) -> None:
    """Worker processes are looked for after each test; the loader is kept."""
    dt.synchronize()
    before = [dt.testing.usage(node) for node in range(2)]
    loader = distribute(Drawn(40), mesh(dp=2, nodes=[0, 1]), batch_size=4, num_workers=1, at=at)
    for i, _ in enumerate(loader):
        if i == 2:
            break
    del _
    dt.synchronize()
    kept = [] if at == "script" else [1, 1]  # the token of the dataset
    held = [
        after.tensors - was.tensors for was, after in zip(before, [dt.testing.usage(n) for n in range(2)], strict=True)
    ]
    assert held == (kept or [0, 0])
    one, other = iter(loader), iter(loader)  # two at once, each an epoch of its own
    assert torch.equal(next(one).at(dp=0).cpu()[:, 0], next(other).at(dp=0).cpu()[:, 0])
    del one, other, loader
    dt.synchronize()
    assert [dt.testing.usage(node) for node in range(2)] == before


class Broken(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, i: int) -> torch.Tensor:
        if i == 7:
            raise OSError(f"file {i} is damaged")
        return torch.tensor(i)


def test_an_error_of_a_dataset_on_a_node() -> None:
    loader, seen = distribute(Broken(), mesh(dp=2, nodes=[0, 1]), batch_size=4, at="node"), []
    with pytest.raises(OSError, match=r"file 7 is damaged\n  sample 7 of Broken") as caught:  # noqa: PT012
        for x in loader:
            seen.append(shards(x))
    assert seen == [[[0, 2], [1, 3]]]
    told = said(caught.value)
    assert "on node 1" in told
    assert "node 1 is dp=1 of Mesh(dp=2" in told
    assert re.search(r"issued: .*test_distribute.py:\d+ in test_an_error_of_a_dataset_on_a_node", told)
    assert "in __getitem__" in told
    with pytest.raises(OSError, match="file 7 is damaged"):
        list(distribute(Broken(), 0, batch_size=4))


class Stopping(Dataset[torch.Tensor]):
    """A dataset, and functions of a loop over it, one of which raises a StopIteration of the user's own."""

    def __init__(self, where: str) -> None:
        self.where = where

    def __len__(self) -> int:
        return 8

    def __getitem__(self, i: int) -> torch.Tensor:
        if self.where == "sample" and i == 5:
            raise StopIteration("of mine")
        return torch.tensor(i)

    def collate(self, samples: list[torch.Tensor]) -> torch.Tensor:
        if self.where == "collate_fn" and 5 in samples:
            raise StopIteration("of mine")
        return torch.stack(samples)

    def begin(self, worker: int) -> None:
        if self.where == "worker_init_fn":
            raise StopIteration("of mine")


class StoppingAll(Stopping):
    def __getitems__(self, of: list[int]) -> list[torch.Tensor]:
        if 5 in of:
            raise StopIteration("of mine")
        return [torch.tensor(i) for i in of]


@PLACES
@pytest.mark.parametrize("where", ["sample", "one of samples", "collate_fn", "worker_init_fn"])
def test_a_stop_iteration_of_the_users_is_an_error(at: str, where: str) -> None:
    """And not the end of the loop, as which torch's own DataLoader takes it: samples would be missing."""
    dataset = (StoppingAll if where == "one of samples" else Stopping)(where)
    options: dict[str, Any] = {"collate_fn": dataset.collate}
    if where == "worker_init_fn":
        options |= {"worker_init_fn": dataset.begin, "num_workers": 1}
    loader = distribute(dataset, mesh(dp=2, nodes=[0, 1]), batch_size=4, at=at, **options)
    with pytest.raises(RuntimeError, match=rf"{where}.* raised StopIteration, which would end the loop"):
        list(loader)


class Dying(Dataset[torch.Tensor]):
    def __init__(self, how: str) -> None:
        self.how = how

    def __len__(self) -> int:
        return 8

    def __getitem__(self, i: int) -> torch.Tensor:
        if i == 5 and self.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if i == 5 and self.how == "exit":
            os._exit(3)
        if i == 5:
            raise KeyboardInterrupt
        return torch.tensor(i)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("kill", "was killed by SIGKILL"),
        ("exit", "has ended with exit code 3"),
        # torch looks for a worker that has ended so after five seconds
        pytest.param("interrupt", "exit code 0, as after a KeyboardInterrupt", marks=pytest.mark.slow),
    ],
)
def test_a_process_that_reads_and_dies_is_named(how: str, words: str) -> None:
    with pytest.raises(RuntimeError, match=rf"process \d+, which read samples, has died: it .*{words}") as caught:
        list(distribute(Dying(how), mesh(dp=2, nodes=[0, 1]), batch_size=4, at="node"))
    assert "node 1 is dp=1" in said(caught.value)


def test_a_loop_beside_buckets_on_lanes() -> None:
    """Batches come in order where a node does its commands in lanes, as with collectives beside a backward pass."""
    there = mesh(dp=2, nodes=[0, 1])
    losses = []
    for at in ("script", "node"):
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)).double()
        model = dt.DataParallel(net.to(there.device), there, bucket_mb=1e-6)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            for x in distribute(Drawn(24), there, batch_size=4, shuffle=True, at=at):
                optimizer.zero_grad()
                loss = model(x / 24).square().mean()
                loss.backward()
                optimizer.step()
                losses.append([part.item() for part in loss.detach().shards()])
    assert len(losses) == 24
    assert losses[:12] == losses[12:]


def test_what_is_refused() -> None:
    data, there = numbers(8), mesh(dp=2, nodes=[0, 1])
    for error, message, arguments, options in (
        (ValueError, "needs batch_size=", (data, 0), {}),
        (ValueError, "batch_size=3 .* does not divide among 2 ranks of .*; 2 does", (data, there), {"batch_size": 3}),
        (ValueError, "has no dim 'tp'; it has dp", (data, there), {"batch_size": 4, "over": "tp"}),
        (ValueError, "a DataLoader has a batch_size of its own", (DataLoader(data), 0), {"batch_size": 4}),
        (ValueError, "at 'nodes' is unknown", (data, 0), {"batch_size": 4, "at": "nodes"}),
        (ValueError, "uneven 'keep' is unknown", (data, 0), {"batch_size": 4, "uneven": "keep"}),
        (TypeError, "a dataset with batch_size=, or a DataLoader, not list", ([1], 0), {"at": "node"}),
        (ValueError, "num_workers are those of a dataset", ([1], 0), {"num_workers": 2}),
        (ValueError, "a loader has its own order", ([1], 0), {"shuffle": True}),
        (TypeError, "not 3", (3, 0), {}),
        (TypeError, "has __getitem__ and __len__.*a generator", ((i for i in range(3)), 0), {"batch_size": 4}),
        (ValueError, "IterableDataset comes in its own order", (Counting(4), 0), {"batch_size": 4, "shuffle": True}),
        (ValueError, "9 samples do not divide", (numbers(9), there), {"batch_size": 4, "uneven": "none"}),
        (ValueError, "that of its Epochs, which nodes", (DataLoader(data, sampler=Epochs()), 0), {"at": "node"}),
        (ValueError, "has batches of its own", (DataLoader(data, batch_size=None), 0), {"at": "node"}),
        (ValueError, "named twice", (data, [1, 1]), {"batch_size": 4}),
        (ValueError, "no node in", (data, []), {"batch_size": 4}),
        (TypeError, "give the mesh itself", (data, there.device), {"batch_size": 4}),
        (TypeError, "did you mean batch_size=", (data, 0), {"batchsize": 4}),
    ):
        with pytest.raises(error, match=message):
            distribute(*arguments, **options)


def test_a_dataloader_goes_to_the_nodes_in_parts() -> None:
    data = DataLoader(range(8), batch_size=4, shuffle=True, collate_fn=torch.tensor, num_workers=2)
    there = mesh(dp=2, nodes=[0, 1])
    found = [shards(x) for x in distribute(data, there, seed=5, at="node")]
    assert found == [list(batch) for batch in zip(*(torchs(8, r, 2, 4, 0, True, "drop") for r in (0, 1)), strict=True)]
