"""``dt.fetch(x)``: a tensor on its way to the script, as a ``Work`` to wait for, to await, or to look at later."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any, Generic, Self, TypeVar

import torch

from ..dispatch.call_site import here
from ..dispatch.copies import copy_strides
from ..dispatch.lazy_views import materialise
from ..errors.argument_checks import seconds_of, spelled
from ..proxy.meta import contiguous
from ..proxy.proxy import DistributedTensor
from ..runtime.channel.base import Arrival, Transfer
from ..runtime.master.requests import Request
from ..runtime.protocol.errors import ChannelError, DisttensorError, NodeLost
from ..session.current import session_of
from ..session.places import Place
from ..session.session import Session
from ..session.transfers import when_done
from .listening import Listened
from .not_yet import NotYet

T_co = TypeVar("T_co", covariant=True)
W = TypeVar("W", bound="Work[Any]")


class Work(NotYet, Generic[T_co]):
    """A transfer, collective or function under way, as torch.distributed's Work and Future. A ``Work[T]`` gives a T.

    Any thread may use a Work, any number of times. A Work that is dropped goes on, and is freed at its end; if it fails
    then, ``dt.synchronize()`` or the end of the session raises the error.

        >>> work = dt.fetch(torch.arange(4.0, device="node:0"))     # returns at once
        >>> work.result()                                           # waits
        tensor([0., 1., 2., 3.])
    """

    def __init__(self, session: Session, source: DistributedTensor, transfer: Arrival) -> None:
        self._session = session
        self._node = source._place.one.node
        self._text = f"{tuple(source.shape)} {source.dtype} from node {self._node}"
        self._transfer: Transfer = transfer

    def is_completed(self) -> bool:
        """Returns whether ``wait`` would return, or raise, at once. Does not wait."""
        return self._session.transfers.has_ended(self._transfer)

    def wait(self, timeout: float | timedelta | None = None) -> bool:
        """Waits for the end, and returns True if it was a success.

        Raises TimeoutError after ``timeout`` seconds (the work goes on), the error that made the tensor fail, NodeLost,
        DisttensorError if the session was shut down before the end.
        """
        try:
            self._end(seconds_of(timeout))
        finally:
            del self  # which may have the error, whose frames have this one: a circle that keeps a user's tensors
        return True

    def result(self, timeout: float | timedelta | None = None) -> T_co:
        """Waits, and returns the result: the same object each time. Raises as ``wait``."""
        try:
            self.wait(timeout)
            return self._value()
        finally:
            del self  # as in ``wait``

    def exception(self, timeout: float | timedelta | None = None) -> Exception | None:
        """Waits, and returns the error that ``wait`` would raise, or None.

        Raises TimeoutError after ``timeout`` seconds.
        """
        try:
            self._await_end(seconds_of(timeout))
        except DisttensorError as e:  # the node, or the session, is gone
            return e
        try:
            self.wait()
        except Exception as e:
            return e
        finally:
            del self  # as in ``wait``
        return None

    def add_done_callback(self, fn: Callable[[Self], object]) -> None:
        """Has ``fn(self)`` called once the work has ended, well or not; soon if it has ended already. Returns at once.

        The callbacks of a session run one after the other, in a thread of their own. An error of a callback is logged.
        """
        callbacks = self._session.callbacks
        callbacks.start()
        when_done(self._transfer, partial(callbacks.put, partial(fn, self)))

    def __await__(self) -> Generator[Any, None, T_co]:
        """``await work`` is ``work.result()`` without blocking the event loop. Cancelling the task ends the waiting."""
        return self._awaited().__await__()

    async def _awaited(self) -> T_co:
        if not self.is_completed():
            loop = asyncio.get_running_loop()
            ended: asyncio.Future[None] = loop.create_future()

            def end() -> None:
                if not ended.done():
                    ended.set_result(None)

            def tell() -> None:
                with suppress(RuntimeError):  # the loop is closed: nobody waits any more
                    loop.call_soon_threadsafe(end)

            when_done(self._transfer, tell)
            await ended
        try:
            self._transfer.wait(0)
        except ChannelError:  # to find out why may take a round trip
            error = await asyncio.to_thread(self.exception)
            if error is not None:
                raise error from None
        return self._value()

    # ---- what works of other kinds do otherwise ---------------------------------------------------------------------

    def _await_end(self, timeout: float | None) -> None:
        self._session.transfers.wait(self._transfer, self._node, timeout)

    def _end(self, timeout: float | None) -> None:
        self._session.transfers.wait_for_transfer(self._transfer, self._node, timeout)

    def _value(self) -> T_co:
        return self._transfer.tensor  # type: ignore[attr-defined, no-any-return]

    def __repr__(self) -> str:
        state = "done" if self.is_completed() else "under way"
        return f"<Work {state}: {self._text}>"


@spelled
def fetch(tensor: torch.Tensor) -> Work[torch.Tensor]:
    """Begins to copy a tensor from its node, and returns a Work at once. Its ``result()`` is the local tensor.

    The local tensor has the shape and dtype of ``tensor``, its values at the time of this call whatever is written to
    it later, and no gradient. Any number of fetches may be under way. Those of one node arrive in order, except that
    small ones (32 KiB), which come as the answers to questions do, may pass larger ones. Raises TypeError for a local
    tensor, GraphError while a graph is recorded, NodeLost.
    """
    if not isinstance(tensor, DistributedTensor):
        raise TypeError(f"fetch takes a tensor on a node, not a {type(tensor).__name__}")
    source: Any = tensor
    strides: tuple[int, ...] | None = None
    if tensor.requires_grad or not source._h.meta.in_order:
        source = tensor.detach().resolve_conj().resolve_neg()
        strides = copy_strides(source)
        if strides == contiguous(tuple(source.shape)):
            strides = None
    place: Place = source._place
    session = session_of(place)
    session.transfers.may_begin(place)
    ref = source._h.ref or materialise(source._h)
    transfers, one = session.transfers, place.one
    ended = Listened(session, one.node) if transfers.by_reply(source._h.meta.nbytes, one) else None
    return Work(session, source, transfers.fetch(source, one, ref, strides, here(), ended))


@spelled
def as_completed(works: Iterable[W], timeout: float | timedelta | None = None) -> Iterator[W]:
    """Yields the works in the order in which they end, well or not, from whichever node. Waits for the next one.

    Raises TimeoutError when some have not ended ``timeout`` seconds after the first is asked for (they go on).

        senders = {dt.fetch(x): k for k, x in enumerate(xs)}
        for work in dt.futures.as_completed(senders):
            use(senders[work], work.result())
    """
    seconds = seconds_of(timeout)
    deadline = None if seconds is None else time.monotonic() + seconds
    under_way = UnderWay[W]()
    for work in dict.fromkeys(works):
        under_way.add(work)
    while under_way:
        yield under_way.next(deadline)


class UnderWay(Generic[W]):
    """Works of which the next one to end is waited for; more may come at any time. Used by one thread."""

    def __init__(self) -> None:
        self._left: dict[W, None] = {}
        self._ended = deque[W]()
        self._waiting: list[Request] = []

    def __len__(self) -> int:
        return len(self._left)

    def add(self, work: W) -> None:
        self._left[work] = None
        when_done(work._transfer, partial(self._mark_ended, work))

    def next(self, deadline: float | None = None) -> W:
        """Waits for the next work to end, well or not, and returns it. Raises TimeoutError at ``deadline``."""
        while True:
            if not self._ended:
                _wait_for_any(self._left, self._ended, self._waiting, deadline)
            work = self._ended.popleft()
            if work in self._left:
                del self._left[work]
                return work

    def _mark_ended(self, work: W) -> None:  # called in any thread
        self._ended.append(work)
        for request in self._waiting:
            request.resolve()


def _wait_for_any(works: Iterable[W], ended: deque[W], waiting: list[Request], deadline: float | None) -> None:
    """Waits until ``ended`` is not empty. ``waiting`` gets the request that is resolved when a work is put there."""
    for work in works:
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        work._session.link.sender.flush_all()
        waiting[:] = [Request(-1, work._node)]
        with suppress(NodeLost), work._session.link.unheard():  # then wait by a work of another node
            work._session.link.waiting.wait(waiting[0], left, until=lambda: bool(ended))
            return
    ended.extend(works)  # all nodes are lost, and with them the tensors that they had to send
