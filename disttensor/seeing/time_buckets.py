"""Time cut into equal buckets, by which a report tells of a million commands in as many bytes as of a hundred."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from .shares import Spans

Floats: TypeAlias = NDArray[np.float64]
Whole: TypeAlias = NDArray[np.int64]


class TimeBuckets:
    """The buckets of a stretch of time."""

    def __init__(self, began: float, ended: float, count: int) -> None:
        self.count = count
        self.edges: Floats = np.linspace(began, max(ended, began + 1e-9), count + 1)
        self._width = float(self.edges[-1] - self.edges[0]) / count

    def filled(self, spans: Spans) -> Floats:
        """Returns the share of each bucket that spans take, which are in order and do not meet."""
        if not spans:
            return np.zeros(self.count)
        bounds = np.asarray(spans, np.float64).ravel()
        until = np.zeros(len(bounds))  # at each bound: how long they were together by then
        until[1::2] = np.cumsum(bounds[1::2] - bounds[0::2])
        until[2::2] = until[1:-1:2]
        filled: Floats = np.diff(np.interp(self.edges, bounds, until)) / self._width
        return filled

    def longest(self, began: Sequence[float], ended: Sequence[float], names: Sequence[int]) -> Whole:
        """Returns the name that has taken most of each bucket, of events that may overlap; -1 where none has."""
        found: Whole = np.full(self.count, -1, np.int64)
        first, last = (np.asarray(each, np.float64).clip(self.edges[0], self.edges[-1]) for each in (began, ended))
        name = np.asarray(names, np.int64)
        there = last > first
        first, last, name = first[there], last[there], name[there]
        if not len(name):
            return found
        begins, ends = self._place(first), self._place(last)
        counts = ends - begins + 1
        event = np.repeat(np.arange(len(name)), counts)  # a piece of an event for each bucket that it is in
        bucket = np.arange(len(event)) - np.repeat(np.cumsum(counts) - counts, counts) + begins[event]
        seconds = np.minimum(last[event], self.edges[bucket + 1]) - np.maximum(first[event], self.edges[bucket])
        known = int(name.max()) + 1
        cells, cell = np.unique(bucket * known + name[event], return_inverse=True)
        sums = np.bincount(cell, seconds)
        order = np.lexsort((sums, cells // known))  # by bucket, what took longest last
        found[cells[order] // known] = cells[order] % known
        return found

    def _place(self, at: Floats) -> Whole:
        place: Whole = np.searchsorted(self.edges, at, side="right") - 1
        return place.clip(0, self.count - 1)


def in_bytes(shares: Floats) -> str:
    """Returns shares, from 0 to 1, as text: a byte for each, of which 255 is all. One that is not 0 is 1 at least."""
    return _text(np.where(shares > 0, np.clip(np.rint(shares * 255), 1, 255), 0).astype(np.uint8))


def in_words(numbers: Whole) -> str:
    """Returns numbers from -1 to 65,534 as text: two bytes for each, the lower one first, of the number plus one."""
    return _text((numbers + 1).clip(0, 65535).astype("<u2"))


def _text(values: NDArray[Any]) -> str:
    return b64encode(values.tobytes()).decode()
