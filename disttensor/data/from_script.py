"""Batches that the script reads: each is cut and sent ahead, from the memory in which the loader has put it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

from ..runtime.node.samples import SamplePlan, loader
from .cutting import picked, sent
from .from_workers import placing, taken_over
from .parts import rows_of
from .positions import Positions
from .prefetching import sent_ahead
from .ranks import Ranks


class DatasetHere(Positions):
    """Batches of a dataset, read by a DataLoader of the script's."""

    def batches(self, state: Mapping[str, Any]) -> Iterator[list[Any]]:
        plan, skip = self.planned(state)
        return sent_ahead(self._read(plan, state["position"], skip), self._sent, self.depth)

    def _read(self, plan: SamplePlan, position: int, skip: int) -> Iterator[tuple[dict[str, Any], list[int], Any]]:
        with placing(self.ranks.places, self.ranks.size, self.options.get("num_workers", 0)) as put:
            yield from self._of(loader(self.dataset, plan, None, self.options, put), position, skip)

    def _of(self, loader: Iterable[Any], position: int, skip: int) -> Iterator[tuple[dict[str, Any], list[int], Any]]:
        for rows, real, batch in islice(loader, skip, None):
            position = self.after(position)
            yield {"position": position, "counts": tuple(real)}, rows, batch

    def _sent(self, read: tuple[dict[str, Any], list[int], Any]) -> list[Any]:
        changed, rows, batch = read
        if self.ranks.mesh is not None and min(rows) != max(rows):
            raise ValueError(
                f"distribute(uneven='none'): the last batch has {rows} samples for {self.ranks}, which have one "
                "shape; uneven='drop' or 'pad'"
            )
        return [changed, sent(batch, rows, self.ranks)]


class LoaderHere:
    """Batches of a loader that the script has. A loop's state is their number, or the loader's own state."""

    ending: Mapping[str, Any] = {"batches": 0}

    def __init__(self, given: Any, ranks: Ranks, depth: int, uneven: str) -> None:
        self._loader, self._ranks, self._depth, self._uneven = given, ranks, depth, uneven
        self._has_state = hasattr(given, "state_dict") and hasattr(given, "load_state_dict")
        self.beginning: Mapping[str, Any] = {"batches": 0, "loader": None}

    def __len__(self) -> int:
        return len(self._loader)

    def check(self, state: Mapping[str, Any]) -> None:
        if (state["loader"] is not None) and not self._has_state:
            raise ValueError(
                "load_state_dict: the state is one of a loader with a state_dict, and "
                f"{type(self._loader).__name__} has none"
            )

    def batches(self, state: Mapping[str, Any]) -> Iterator[list[Any]]:
        return sent_ahead(self._read(state), self._sent, self._depth)

    def _read(self, state: Mapping[str, Any]) -> Iterator[tuple[dict[str, Any], list[int], Any]]:
        for one in (self._loader, getattr(self._loader, "sampler", None), getattr(self._loader, "batch_sampler", None)):
            if callable(set_epoch := getattr(one, "set_epoch", None)):
                set_epoch(state["epoch"])
        count = state["batches"]
        if state["loader"] is not None:
            self._loader.load_state_dict(state["loader"])
        found = taken_over(self._loader, self._ranks.places, self._ranks.size)
        try:
            for _ in range(count if state["loader"] is None else 0):
                next(found, None)
            for batch in found:
                count += 1
                own = self._loader.state_dict() if self._has_state else None
                if (cut := self._cut(batch)) is not None:
                    rows, real, whole = cut
                    yield {"batches": count, "loader": own, "counts": tuple(real)}, rows, whole
        finally:
            found.close()

    def _sent(self, read: tuple[dict[str, Any], list[int], Any]) -> list[Any]:
        changed, rows, batch = read
        return [changed, sent(batch, rows, self._ranks)]

    def _cut(self, batch: Any) -> tuple[list[int], list[int], Any] | None:
        """Returns the rows of each rank, how many of them are no repeats, and the batch; None for one that is left
        out."""
        size, rows = self._ranks.size, rows_of(batch)
        if rows is None:
            if self._ranks.many:
                raise TypeError(
                    "distribute: a batch has no tensor with a dimension, so that its rows are not known, and it "
                    f"can't be cut for {self._ranks}: {type(batch).__name__}"
                )
            return [0], [], batch
        left = rows % size
        if not left:
            return [rows // size] * size, [rows // size] * size, batch
        if self._uneven == "drop":
            each = rows // size
            return ([each] * size, [each] * size, picked(batch, rows, slice(0, rows - left))) if each else None
        if self._uneven == "pad":
            each = -(-rows // size)
            real = [min(each, max(0, rows - rank * each)) for rank in range(size)]
            return [each] * size, real, picked(batch, rows, [i % rows for i in range(each * size)])
        if self._ranks.mesh is not None:
            raise ValueError(
                f"distribute(uneven='none'): a batch of {rows} rows does not divide among {self._ranks}, which have "
                "one shape; uneven='drop' leaves rows out, 'pad' repeats some and says how many (counts)"
            )
        uneven = [rows // size + (rank < left) for rank in range(size)]
        return uneven, uneven, batch
