"""Batches of a DataLoader's workers on their way to nodes of this host: what a worker has written is the tensor there.

    worker   Placing: collates into segments of the channel's shared memory, one for the rows of each rank
    script   Parts: maps them, and sends each to its rank, which takes the segment as it is

So the bytes of a batch are written once, in the worker. Small tensors, those that do not divide, and those for nodes
behind a network come as DataLoader has them.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, default_collate
from torch.utils.data._utils.collate import collate, default_collate_fn_map

from ..runtime.channel.shm.adopted import Adoption, Pools
from ..runtime.channel.shm.segments import FREE, Segment
from ..runtime.channel.tcp.frames import EAGER
from ..session.current import session_of
from ..session.places import Place
from .parts import Parts, is_leaf, rows_of

#: Who takes over the segments of workers, by the number that these know.
_adoptions: weakref.WeakValueDictionary[int, Adoption] = weakref.WeakValueDictionary()


class Placing:
    """A worker's batches, each put where nodes of this host can use it. Goes to workers with their collate function."""

    def __init__(self, ranks: int, adoption: Adoption) -> None:
        self._ranks, self._number = ranks, secrets.randbits(64)
        _adoptions[self._number] = adoption
        self._pools: Pools | None = None  #: the worker's own

    def __call__(self, collate_fn: Callable[[list[Any]], Any], samples: Any, rows: list[int] | None) -> Any:
        """Returns the batch of some samples. ``rows``: those of each rank; None: as many for each."""
        if self._pools is None:
            self._pools = Pools()
        batch = _Batch(self._pools, self._number, self._ranks, rows)
        try:
            if collate_fn is default_collate:
                found = collate(samples, collate_fn_map={**default_collate_fn_map, torch.Tensor: batch.stacked})
            else:
                found = collate_fn(samples)
            batch.whole(found)
            return tree_map(batch.copied, found, is_leaf=is_leaf)
        except BaseException:
            batch.free()
            raise


class Collating:
    """A loader's collate function, whose batches are put so."""

    def __init__(self, collate_fn: Callable[[Any], Any], placing: Placing) -> None:
        self._collate, self._placing = collate_fn, placing

    def __call__(self, samples: Any) -> Any:
        return self._placing(self._collate, samples, None)


class _Batch:
    """One batch that is collated."""

    def __init__(self, pools: Pools, number: int, ranks: int, rows: list[int] | None) -> None:
        self._pools, self._number, self._ranks, self._rows = pools, number, ranks, rows
        self._taken: list[Segment] = []

    def whole(self, batch: Any) -> None:
        """Learns from its first tensor how many rows a batch has, if that is not known."""
        if self._rows is None:
            self._rows = _even(rows_of(batch) or 0, self._ranks)

    def stacked(self, tensors: Sequence[torch.Tensor], *, collate_fn_map: Any = None) -> Any:
        """Stacks samples' tensors, as torch's default collate function does."""
        rows = self._rows or _even(len(tensors), self._ranks)
        first = tensors[0]
        alike = all(_is_plain(x) and x.shape == first.shape and x.dtype is first.dtype for x in tensors)
        parts = self._parts(rows, first.shape, first.dtype) if alike and sum(rows) == len(tensors) else None
        if parts is None:
            return default_collate_fn_map[torch.Tensor](tensors, collate_fn_map=collate_fn_map)
        for part, mine in zip(parts.tensors, _split(tensors, rows), strict=True):
            torch.stack(list(mine), out=part)
        return parts

    def copied(self, leaf: Any) -> Any:
        """Copies a tensor that lies elsewhere; returns all else as it is."""
        rows = self._rows or []
        if not _is_plain(leaf) or not leaf.dim() or leaf.shape[0] != sum(rows):
            return leaf
        parts = self._parts(rows, leaf.shape[1:], leaf.dtype)
        if parts is None:
            return leaf
        for part, mine in zip(parts.tensors, leaf.split(rows), strict=True):
            part.copy_(mine)
        return parts

    def _parts(self, rows: list[int], shape: Iterable[int], dtype: torch.dtype) -> _Filled | None:
        """Returns uninitialised tensors for the rows of each rank; None where they are small, or there is no memory."""
        shapes = [(n, *shape) for n in rows]
        if not rows or min(torch.Size(shape).numel() for shape in shapes) * dtype.itemsize <= EAGER:
            return None
        made: list[tuple[Segment, torch.Tensor]] = []
        try:
            for rank, each in enumerate(shapes):
                made.append(self._pools.take_segment(rank, each, dtype))
        except OSError:
            for segment, _ in made:
                segment.state = FREE
            return None
        self._taken += [segment for segment, _ in made]
        return _Filled([tensor for _, tensor in made], [segment for segment, _ in made], self._number)

    def free(self) -> None:
        """Frees what the batch has taken: it does not come to be."""
        for segment in self._taken:
            segment.state = FREE


class _Filled(Parts):
    """A tensor that a worker has put into segments. In the script it is made of their descriptions."""

    def __init__(self, tensors: Sequence[torch.Tensor], segments: Sequence[Segment], number: int) -> None:
        super().__init__(tensors)
        self._segments, self._number = segments, number

    def __reduce__(self) -> Any:
        told = [(s.describe(), tuple(x.shape), x.dtype) for s, x in zip(self._segments, self.tensors, strict=True)]
        return _adopt_batch, (self._number, told)


def _adopt_batch(number: int, told: list[tuple[bytes, tuple[int, ...], torch.dtype]]) -> Parts:
    adoption = _adoptions.get(number)
    if adoption is None:
        raise RuntimeError("a worker's batch has come after the end of the loop that reads it")
    return Parts([adoption.adopt_segment(*one) for one in told])


@contextlib.contextmanager
def placing(places: Sequence[Place], ranks: int, workers: int) -> Iterator[Placing | None]:
    """Makes a ``Placing`` for a loader's worker processes; None where there are none, or nodes are behind a network."""
    if not workers or not is_near(places):
        yield None
        return
    adoption = Adoption()
    try:
        yield Placing(ranks, adoption)
    finally:
        adoption.end()


def taken_over(loader: Any, places: Sequence[Place], ranks: int) -> Generator[Any]:
    """Yields a loader's batches; those of worker processes for nodes of this host have ``Parts`` for tensors."""
    with placing(places, ranks, _workers(loader)) as put:
        found = iter(loader) if put is None else _with(loader, put)
        try:
            yield from found
        finally:
            if hasattr(found, "close"):
                found.close()


def _with(loader: DataLoader[Any], put: Placing) -> Iterator[Any]:
    """Begins a loop over a loader, whose workers get ``put``, and nobody else."""
    before = loader.collate_fn
    loader.collate_fn = Collating(before, put)
    try:
        return iter(loader)
    finally:
        loader.collate_fn = before


def _workers(loader: Any) -> int:
    """Returns the number of worker processes of each loop over a loader; 0 where they are not that loop's alone, or
    where their batches do not come as they are."""
    if not isinstance(loader, DataLoader) or loader.persistent_workers or loader.pin_memory:
        return 0
    return loader.num_workers


def is_near(places: Sequence[Place]) -> bool:
    """Returns whether all of these are on nodes of this host to which tensors go by shared memory."""
    host = socket.gethostname()
    return all(
        place.hello.host == host and session_of(place).router.data[0].capabilities.shared_memory for place in places
    )


def _is_plain(x: Any) -> bool:
    return type(x) is torch.Tensor and x.layout is torch.strided and x.device.type == "cpu" and not x.requires_grad


def _even(rows: int, ranks: int) -> list[int]:
    return [rows // ranks] * ranks if rows % ranks == 0 else []


def _split(tensors: Sequence[torch.Tensor], rows: list[int]) -> Iterator[Sequence[torch.Tensor]]:
    start = 0
    for n in rows:
        yield tensors[start : start + n]
        start += n
