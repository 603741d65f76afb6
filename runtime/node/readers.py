"""Readers: loops over datasets that live on a node. The script runs the functions of this file there (``dt.run``).

What a node keeps for the script has a token (tokens.py). A loop that is left, and a loader that a script forgets, end
with it, and so do their worker processes.
"""

from __future__ import annotations

import multiprocessing
import signal
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from multiprocessing.connection import wait
from typing import Any

import torch
from torch.utils.data import DataLoader, default_collate

from ..protocol.batches import describe
from . import geometry, warned
from .samples import SamplePlan, loader
from .tokens import behind, token_of


class Reader:
    """A loop over a dataset, on the node of one rank. A thread takes batches from the worker processes, ``depth`` ahead
    of what the script has; so they are described, and on their device, when they are asked for."""

    def __init__(
        self, dataset: Any, options: dict[str, Any], plan: SamplePlan, rank: int, skip: int, depth: int, device: str
    ) -> None:
        more = {**options, "num_workers": max(1, options.get("num_workers") or 1)}
        more["worker_init_fn"] = _Started(options.get("worker_init_fn"))
        more["collate_fn"] = _Collated(options.get("collate_fn") or default_collate)
        more["multiprocessing_context"] = multiprocessing.get_context("fork")  # the dataset came by value
        batches, self._workers = _begin_iterator(loader(dataset, plan, rank, more))
        self._skip, self._depth, self._device = skip, depth, device
        self._changed = threading.Condition()
        self._found: deque[tuple[Any, list[torch.Tensor]]] = deque()  #: what was read, and the script does not know
        self._held: deque[list[torch.Tensor]] = deque()  #: tensors of batches that it knows, and has not
        self._warned: deque[warned.Said] = deque(maxlen=_MOST_WARNINGS)  #: by the workers, and not told yet
        self._over = False
        self.error: BaseException | None = None
        threading.Thread(target=self._read, args=([batches],), name="disttensor-reader", daemon=True).start()

    def _read(self, batches: list[Iterator[Any]]) -> None:
        told: Any = True
        while told and not self._over:
            with self._changed:
                self._changed.wait_for(lambda: self._over or len(self._found) + len(self._held) < self._depth)
            tensors: list[torch.Tensor] = []
            said: list[warned.Said] = []
            try:
                while self._skip and next(batches[0], None) is not None:
                    self._skip -= 1
                told = next(batches[0], None) if not self._over else None
                if told is not None:
                    (rows,), (real,), (batch, said) = told
                    described, found = describe(batch)
                    tensors = [_as_ever(tensor.to(self._device)) for tensor in found]
                    told = rows, real, described
                    del batch, found
            except BaseException as error:
                # the traceback of a worker's error is in its text; this one's frames have the loader
                self.error = (_died(error, self._workers) or error).with_traceback(None)
                self.error.__context__ = self.error.__cause__ = None
                told = False
            with self._changed:
                self._warned.extend(said)
                self._found.append((told, tensors))
                self._changed.notify_all()
            del tensors
        batches.clear()  # which ends the workers, and waits for them

    def news(self, wait: bool) -> list[Any]:
        """Returns what was read since this was asked last: for each batch (its rows, how many of these are no repeats,
        the batch in words), None for the end, False for an error. Waits for one, if it is to."""
        with self._changed:
            if wait:
                self._changed.wait_for(lambda: self._found)
            warned.tell_kept(self._warned)
            self._warned.clear()
            told = [told for told, _ in self._found]
            self._held += [tensors for told, tensors in self._found if told]
            self._found.clear()
            return told

    def next_batch(self) -> list[torch.Tensor]:
        """Gives the tensors of the oldest batch that the script knows."""
        with self._changed:
            self._changed.notify_all()
            return self._held.popleft()

    def end(self) -> None:
        """Ends the loop, and its workers, which may be in the middle of a sample. Does not wait."""
        with self._changed:
            self._over = True
            self._changed.notify_all()
        threading.Thread(target=self._end_workers, name="disttensor-reader-end", daemon=True).start()

    def _end_workers(self) -> None:
        for worker in self._workers:
            worker.terminate()
        for worker in self._workers:
            worker.join()


#: The most warnings of workers that wait for the script's next question, of which the oldest are dropped.
_MOST_WARNINGS = 1_000


class _Started:
    """A ``worker_init_fn`` that has a worker keep its warnings, and calls the user's, if there is one."""

    def __init__(self, begin: Callable[[int], object] | None) -> None:
        self._begin = begin

    def __call__(self, worker: int) -> None:
        warned.keep_warnings()
        if self._begin is not None:
            self._begin(worker)


class _Collated:
    """A collate function that gives what the worker has warned of along with each batch."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self._collate = collate

    def __call__(self, samples: list[Any]) -> tuple[Any, list[warned.Said]]:
        return self._collate(samples), warned.take_kept()


#: Seconds in which a process that has died is seen to have.
_DEAD = 2.0


def _died(error: BaseException, workers: list[Any]) -> RuntimeError | None:
    """Returns the error for a worker that has died, of which ``error`` only says what this process has met in place of
    a batch; None for another error, such as one that a worker has met, and lives."""
    if not isinstance(error, (OSError, EOFError, RuntimeError)) or str(error).startswith("Caught "):
        return None
    gone = [w for w in workers if w.sentinel in wait([worker.sentinel for worker in workers], _DEAD)]
    if not gone:
        return None
    gone[0].join()
    return RuntimeError(
        f"process {gone[0].pid}, which read samples, has died: it {_words_of_end(gone[0].exitcode)}. If nothing of the "
        "dataset's did that, memory may have run out, of which fewer workers take less (num_workers=). It was seen as "
        f"{type(error).__name__}: {error}"
    )


def _words_of_end(code: int) -> str:
    """Returns the words for the end of a process that nobody has ended."""
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}" if -code in set(signal.Signals) else f"got signal {-code}"
    return f"has ended with exit code {code}" + ("" if code else ", as after a KeyboardInterrupt in a sample")


#: Held while workers are made, so that it is known whose they are, where nodes are threads.
_making = threading.Lock()


def _begin_iterator(made: DataLoader[Any]) -> tuple[Iterator[Any], list[Any]]:
    """Returns a loader's iterator, and its workers, which it has started."""
    before = signal.getsignal(signal.SIGCHLD)
    with _making, warnings.catch_warnings():
        # Python 3.12 on: a process with threads is forked, as by each loader with workers
        warnings.simplefilter("ignore", DeprecationWarning)
        others = multiprocessing.active_children()
        try:
            batches = iter(made)
        finally:
            # torch's handler raises where a worker was killed, whatever this thread is at; the iterator sees it as well
            if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGCHLD) != before:
                signal.signal(signal.SIGCHLD, before)
        return batches, [child for child in multiprocessing.active_children() if child not in others]


def _as_ever(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor as the script takes it to be: contiguous, and the only one in its memory."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    whole = plain.untyped_storage().nbytes() == plain.numel() * plain.element_size()
    return plain if geometry.plain(plain) and whole else plain.clone(memory_format=torch.contiguous_format)


# ---- what the script runs --------------------------------------------------------------------------------------------


def keep_dataset(dataset: Any, options: dict[str, Any]) -> torch.Tensor:
    """Keeps a dataset, and the options of its loaders. Returns its token."""
    return token_of((dataset, options))


def begin_loop(kept: torch.Tensor, plan: SamplePlan, rank: int, skip: int, depth: int, device: str) -> torch.Tensor:
    """Begins a loop over a dataset that is kept, of whose batches the first ``skip`` are read and dropped. Returns its
    token."""
    dataset, options = behind(kept)
    reader = Reader(dataset, options, plan, rank, skip, depth, device)
    return token_of(reader, reader)


def take_batch(token: torch.Tensor, give: bool, wait: bool) -> tuple[list[Any], list[torch.Tensor]]:
    """Gives the tensors of the oldest batch that the script knows, if it is to, and tells of those that it does not
    know."""
    reader: Reader = behind(token)
    given = reader.next_batch() if give else []
    return reader.news(wait), given


def read_batch(token: torch.Tensor) -> None:
    """Raises the error that the loop has met, if it has: named as what has failed."""
    reader: Reader = behind(token)
    error, reader.error = reader.error, None  # what holds it would hold these frames, which have the token
    try:
        if error is not None:
            raise error
    finally:
        del error
