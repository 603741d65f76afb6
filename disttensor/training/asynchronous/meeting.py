"""The exchanges of workers that meet: first values, sums, means of their buffers."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch

from ...runtime.protocol.errors import NodeLost
from .arriving import made
from .loop import Steps
from .server import put
from .values import Form
from .workers import Worker, of_first, ordered_sum


def begin_alike(workers: Sequence[Worker]) -> None:
    """Gives all workers the values of the first, or of the first that is not lost meanwhile. Waits for them."""
    form = Form(of_first(workers[0].values()), "drive")
    for worker in workers:
        form.check(worker.values(), f"drive: worker {worker.index}")
    for source in workers:
        arriving: dict[Worker, list[torch.Tensor]] = {}
        with suppress(NodeLost):
            first = form.flat(of_first(source.values()))
            for worker in workers:
                if worker is not source and not worker.lost():
                    there = of_first(worker.values())[0].device
                    arriving[worker] = [vector.to(there) for vector in first]
        errors = {worker: _error(vectors) for worker, vectors in arriving.items()}
        if source.lost():
            continue
        for worker, error in errors.items():
            if error is None:
                put(worker.values(), form.unflat(arriving[worker]), None)
            elif not worker.lost():
                raise error
        return


def _error(vectors: Sequence[torch.Tensor]) -> Exception | None:
    """Waits for vectors; returns the error of one that did not come."""
    try:
        for work in made(vectors):
            work.wait()
    except Exception as error:
        return error
    return None


def summed(workers: Sequence[Worker], values: Sequence[Sequence[torch.Tensor]]) -> Any:
    """Returns for each worker the sums of the workers' tensors, in their order; once they are there."""
    form = Form(of_first(values[0]), "drive")
    flats = [form.flat(of_first(each)) for each in values]
    sums = [ordered_sum(vectors) for vectors in zip(*flats, strict=True)]
    yield [work for total in sums for work in made(total)]
    return [form.unflat([total[i] for total in sums]) for i in range(len(workers))]


def mean_of_buffers(workers: Sequence[Worker]) -> Steps:
    """Gives workers the mean of their buffers, and of whole numbers those of the first."""
    fractions, others = zip(*(worker.statistics() for worker in workers), strict=True)
    if fractions[0]:
        totals = yield from summed(workers, fractions)
        for worker, mine, total in zip(workers, fractions, totals, strict=True):
            with suppress(NodeLost):  # its own task finds that out
                put(mine, [(t / len(workers)).to(worker.device) for t in total], None)
    if others[0]:
        form = Form(of_first(others[0]), "drive")
        first = form.flat(of_first(others[0]))
        yield made(first)
        for mine in others[1:]:
            with suppress(NodeLost):
                put(mine, form.unflat([vector.to(of_first(mine)[0].device) for vector in first]), None)
