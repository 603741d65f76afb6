"""``dt.data.prefetch(loader, device)``: sends batches to a node while it computes with earlier ones."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from torch.utils._pytree import tree_map

from ..errors.argument_checks import whole_number
from ..runtime.channel.base import Transfer
from ..session import current
from ..session.transfers import lent
from .from_workers import taken_over
from .parts import has_to

T = TypeVar("T")


class prefetch(Generic[T]):
    """An iterable over a loader's batches with their tensors on ``device``, which sends ``depth`` batches ahead.

    Args:
        loader: any iterable (a DataLoader, a generator); a ``for`` over this object makes one over the loader. Tensors
            are found at any depth of a batch's lists, tuples, dicts; an object with a ``to`` of its own (a
            PackedSequence) is sent by that. All else stays as it is. The bytes are read from the loader's own tensors,
            which it must not change once it has yielded them.
        device: where tensors go: a device of type "node", or a node's number. Default: the current node's.
        depth: the number of batches that are sent ahead of the one that the consumer has.

    The loader runs in the consumer's thread, ``depth`` batches early: an error of the loader is raised after the
    batches before it. A loader that computes much should have workers (``num_workers=``). Once more than ``depth``
    batches have not left, the consumer waits. Raises TypeError for a depth that is no whole number, ValueError for one
    below 1, RuntimeError for a node that does not exist.

        for batch in dt.data.prefetch(loader, "node:1"):
            loss = step(batch["x"])         # a tensor on node 1; the next two batches are on their way
    """

    def __init__(self, loader: Iterable[T], device: torch.device | str | int = "node", depth: int = 2) -> None:
        self.loader = loader
        session = current.current()
        if isinstance(device, int):
            there = session is not None and 0 <= device < len(session.nodes)
            device = session.places.at(device).device if session and there else torch.device("node", device)
        self.device = torch.device(device)
        if self.device.type == "node" and session is not None:
            session.places.of(self.device)  # a node that does not exist is an error of this line
        self.depth = whole_number("depth", depth, 1)

    def __len__(self) -> int:
        """Returns the loader's length. Raises TypeError if the loader has none."""
        return len(self.loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[T]:
        session = current.current()
        places = [session.places.of(self.device)] if session is not None and self.device.type == "node" else []
        batches = taken_over(self.loader, places, 1) if places else iter(self.loader)
        return sent_ahead(batches, partial(moved, device=self.device), self.depth)


def moved(batch: Any, device: torch.device) -> Any:
    """Returns a batch with what has a ``to`` sent to a device."""
    return tree_map(lambda x: x.to(device, non_blocking=True) if has_to(x) else x, batch, is_leaf=has_to)


def sent_ahead(batches: Iterator[Any], send: Callable[[Any], Any], depth: int) -> Iterator[Any]:
    """Yields what ``send`` makes of each batch, which it does ``depth`` batches ahead: it begins transfers from the
    batch's own memory, and waits for none. Closes ``batches`` at the end."""
    ahead: deque[_Sent | Exception] = deque()
    try:
        more = True
        while more or ahead:
            while more and len(ahead) <= depth:
                try:
                    ahead.append(_Sent(next(batches), send))
                except StopIteration:
                    more = False
                except Exception as e:  # raised when the consumer gets there
                    ahead.append(e)
                    more = False
            if ahead:
                yield _due(ahead.popleft())  # no name here keeps the batch alive
    finally:
        ahead.clear()
        if hasattr(batches, "close"):
            batches.close()


class _Sent:
    """A batch on its way."""

    def __init__(self, batch: Any, send: Callable[[Any], Any]) -> None:
        self.transfers: list[tuple[int, Transfer]] = []
        token = lent.set(self.transfers)
        try:
            self.batch = send(batch)
        finally:
            lent.reset(token)


def _due(sent: _Sent | Exception) -> Any:
    """Returns the batch once its bytes have left, so that the script gets no further ahead of the node than
    ``depth``."""
    if isinstance(sent, Exception):
        raise sent
    if sent.transfers and (session := current.current()) is not None:
        for node, transfer in sent.transfers:
            session.transfers.wait(transfer, node)
    return sent.batch
