"""The samples of a loop over a dataset: in which order they come, which rank has which of them, and how they are read.

The order is that of torch's DistributedSampler: with ``ranks`` ranks, the one with coordinate r has each ``ranks``-th
sample, from the r-th on. So a global batch is a piece of one order, whatever the number of ranks, and a *position* in
that order is all that a loop needs to go on from.
"""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate, get_worker_info
from torch.utils.data.distributed import DistributedSampler

from ..process.forked_child import EndsForkedChild


class PlannedSample(NamedTuple):
    """A sample that is to be read."""

    number: int
    seed: int  #: of the random numbers that the dataset draws for it
    real: bool  #: False for a repeat, which fills a batch up


@dataclass(frozen=True)
class SamplePlan:
    """One loop over a dataset."""

    ranks: int
    batch: int  #: samples of a global batch
    shuffle: bool
    seed: int
    epoch: int
    uneven: str  #: "drop", "pad" or "none"
    start: int  #: the position of its first sample

    def end_position(self, size: int) -> int:
        """Returns the position behind the last sample, of a dataset of this size."""
        if self.uneven == "drop":
            return self.start + max(0, size - self.start) // self.batch * self.batch
        return -(-size // self.ranks) * self.ranks if self.uneven == "pad" else size

    def batches(self, size: int) -> Iterator[list[range]]:
        """Yields the positions in each batch, by rank."""
        end = self.end_position(size)
        for first in range(self.start, end, self.batch):
            yield [range(first + rank, min(first + self.batch, end), self.ranks) for rank in range(self.ranks)]

    def items(self, size: int, rank: int | None) -> Iterator[list[PlannedSample]]:
        """Yields the samples of each batch that a rank reads; of all ranks in turns, where none is named."""
        order = self._order(size)
        for ranks in self.batches(size):
            mine = ranks[rank] if rank is not None else sorted(at for each in ranks for at in each)
            if mine:
                yield [PlannedSample(order[at % size], _seed(self.seed, self.epoch, at), at < size) for at in mine]

    def _order(self, size: int) -> list[int]:
        if not size:
            return []
        whole: Any = range(size)
        sampler: Any = DistributedSampler(whole, 1, 0, shuffle=self.shuffle, seed=self.seed)
        sampler.set_epoch(self.epoch)
        return list(sampler)


def _seed(*of: int) -> int:
    return int.from_bytes(hashlib.blake2b(repr(of).encode(), digest_size=7).digest())


def loader(
    dataset: Any, plan: SamplePlan, rank: int | None, options: Mapping[str, Any], put: Put | None = None
) -> DataLoader[Any]:
    """Returns a DataLoader of a rank's batches, or (None) of global ones. Each is (rows of each rank, how many of these
    are no repeats, the batch), which ``put`` collates."""
    collate = InTurns(options.get("collate_fn") or default_collate, 1 if rank is not None else plan.ranks, put)
    # what it would draw of the process's own generator is another's: a node's, and so a mesh's
    generator = torch.Generator(device="cpu").manual_seed(_seed(plan.seed, plan.epoch, -1))
    more = {**options, "collate_fn": collate, "generator": generator}
    if (begin := options.get("worker_init_fn")) is not None:
        more["worker_init_fn"] = Begun(begin)
    if isinstance(dataset, IterableDataset):
        size = plan.batch if rank is None else plan.batch // plan.ranks
        stream = SampleStream(dataset, plan.ranks, rank, plan.uneven)
        return DataLoader(stream, size, drop_last=plan.uneven == "drop", **more)
    return DataLoader(Seeded(dataset), batch_sampler=PlannedBatchSampler(plan, len(dataset), rank), **more)


class PlannedBatchSampler:
    """The batch sampler of a loader: batches of ``PlannedSample``, made when they are asked for."""

    def __init__(self, plan: SamplePlan, size: int, rank: int | None) -> None:
        self._of = plan, size, rank

    def __iter__(self) -> Iterator[list[PlannedSample]]:
        plan, size, rank = self._of
        return plan.items(size, rank)


class Seeded(Dataset[Any]):
    """A dataset that reads each sample with random numbers of its own: the same whoever reads it, and after a resume.

    A dataset that reads several samples at once (``__getitems__``) has those of the first of them.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __getitems__(self, items: list[PlannedSample]) -> list[tuple[bool, Any]]:
        alone = get_worker_info() is not None  # a process in which nobody else draws
        before = None if alone else (torch.default_generator.get_state(), random.getstate(), _numpy().get_state())
        try:
            read = self._read_all(items) if hasattr(self._dataset, "__getitems__") else [self._read(i) for i in items]
        finally:
            if before is not None:
                torch.default_generator.set_state(before[0])
                random.setstate(before[1])
                _numpy().set_state(before[2])
        return [(item.real, sample) for item, sample in zip(items, read, strict=True)]

    def _read(self, item: PlannedSample) -> Any:
        _draw_from(item.seed)
        what = f"sample {item.number} of {type(self._dataset).__name__}"
        with EndsForkedChild(what), NotTheEnd(what):
            try:
                return self._dataset[item.number]
            except Exception as error:
                error.add_note(f"  {what}")
                raise

    def _read_all(self, items: list[PlannedSample]) -> Any:
        _draw_from(items[0].seed)
        indices = ", ".join(str(item.number) for item in items[:20]) + ", ..." * (len(items) > 20)
        what = f"one of samples {indices} of {type(self._dataset).__name__}"
        with EndsForkedChild(what), NotTheEnd(what):
            try:
                return self._dataset.__getitems__([item.number for item in items])
            except Exception as error:
                error.add_note(f"  {what}")
                raise


def _numpy() -> Any:
    return sys.modules["numpy"].random


def _draw_from(seed: int) -> None:
    torch.default_generator.manual_seed(seed)  # not torch.manual_seed: it seeds devices, and a session's nodes, as well
    random.seed(seed)
    _numpy().seed(seed & 0xFFFFFFFF)


class SampleStream(IterableDataset[Any]):
    """The samples of an IterableDataset, of one rank or of all, each with whether it is no repeat.

    Each rank goes through all samples and keeps its own. The others need as many, so one is kept only once they have
    come, too, unless uneven ends are wanted.
    """

    def __init__(self, dataset: Any, ranks: int, rank: int | None, uneven: str) -> None:
        self._dataset, self._ranks, self._rank, self._uneven = dataset, ranks, rank, uneven

    def __iter__(self) -> Iterator[tuple[bool, Any]]:
        first: list[Any] = []  #: samples that fill up
        turn: list[Any] = []  #: samples of a turn that not all ranks have had yet
        for sample in self._each():
            if len(first) < self._ranks and self._uneven == "pad":
                first.append(sample)
            turn.append(sample)
            if len(turn) == self._ranks:
                yield from self._mine(turn, self._ranks)
                turn = []
        if self._uneven == "pad" and turn:
            real = len(turn)
            turn += [first[i % len(first)] for i in range(self._ranks - real)]
            yield from self._mine(turn, real)
        elif self._uneven == "none":
            yield from self._mine(turn, len(turn))

    def _each(self) -> Iterator[Any]:
        what = f"a sample of {type(self._dataset).__name__}"
        with EndsForkedChild(what):
            samples = iter(self._dataset)
        while True:
            with EndsForkedChild(what):
                sample = next(samples, _END)
            if sample is _END:
                return
            yield sample

    def _mine(self, turn: list[Any], real: int) -> Iterator[tuple[bool, Any]]:
        for rank, sample in enumerate(turn):
            if self._rank in (None, rank):
                yield rank < real, sample


#: In place of a sample, behind the last one.
_END = object()

#: A function of a collate function, samples, and the rows of each rank, that returns the batch.
Put = Callable[[Callable[[list[Any]], Any], list[Any], list[int]], Any]


class InTurns:
    """A collate function for samples of ranks in turns: a batch has the rows of the first rank first, and so on."""

    def __init__(self, collate: Callable[[list[Any]], Any], ranks: int, put: Put | None) -> None:
        self._collate, self._ranks, self._put = collate, ranks, put

    def __call__(self, samples: list[tuple[bool, Any]]) -> tuple[list[int], list[int], Any]:
        by_rank = [samples[rank :: self._ranks] for rank in range(self._ranks)]
        rows = [len(each) for each in by_rank]
        real = [sum(is_real for is_real, _ in each) for each in by_rank]
        ordered = [sample for each in by_rank for _, sample in each]
        with EndsForkedChild("collate_fn"), NotTheEnd("collate_fn"):
            return rows, real, self._collate(ordered) if self._put is None else self._put(self._collate, ordered, rows)


class Begun:
    """A ``worker_init_fn`` that calls the user's."""

    def __init__(self, begin: Callable[[int], object]) -> None:
        self._begin = begin

    def __call__(self, worker: int) -> None:
        with EndsForkedChild("worker_init_fn"), NotTheEnd("worker_init_fn"):
            self._begin(worker)


class NotTheEnd:
    """A context that raises RuntimeError in place of a StopIteration of the user's code, as Python does in a generator:
    whoever asks a loader for its next batch would take it for the end, and samples would be missing without a word.

    A class: contextlib's generators let a StopIteration through.
    """

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, StopIteration):
            raise RuntimeError(f"{self._what} raised StopIteration, which would end the loop") from error
