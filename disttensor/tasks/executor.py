"""``dt.tasks.Executor``: the nodes as a ``concurrent.futures.Executor``, for programs and libraries that take one."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor as StandardExecutor
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import Any

from ..dispatch.call_site import here
from ..runtime.protocol.errors import NodeLost
from ..session import current
from ..session.session import Session
from .mapping import Slots, advise_retries
from .submitted import Submitted, begin


class _Item:
    """A call that is due: its future, what is called, and how often it may be given again to another node."""

    def __init__(self, future: Future[Any], call: Callable[..., Submitted], retries: int) -> None:
        self.future, self.call, self.retries = future, call, retries


class _Dispatcher:
    """Gives items to nodes that are free, in a thread of its own, which knows nothing of the Executor: that may be
    dropped."""

    def __init__(self, session: Session, slots: Slots) -> None:
        self._session, self._slots = session, slots
        self.events: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._pending = deque[_Item]()
        self._running = 0
        self._ending = False
        self.thread = threading.Thread(target=self._run, name="disttensor-executor", daemon=True)
        self.thread.start()

    def add(self, item: _Item) -> None:
        self.events.put(partial(self._pending.append, item))

    def end(self, cancel: bool) -> None:
        """Has the thread end when all is done, or has been cancelled. Takes no lock: a finalizer may call it."""
        self.events.put(partial(self._end, cancel))

    def _run(self) -> None:
        while not (self._ending and not self._pending and not self._running):
            self.events.get()()
            self._fill()

    def _end(self, cancel: bool) -> None:
        self._ending = True
        while cancel and self._pending:
            item = self._pending.popleft()
            item.future.cancel()
            item.future.set_running_or_notify_cancel()  # tells those who wait

    def _fill(self) -> None:
        while self._pending:
            try:
                node = self._slots.take(self._session)
            except Exception as error:  # no node is left, or the session has ended
                self._fail_all(error)
                return
            if node is None:
                return
            item = self._pending.popleft()
            if not item.future.running() and not item.future.set_running_or_notify_cancel():
                self._slots.give_back(node)
                continue
            try:
                work = item.call(node=node, beside=self._slots.beside)
            except Exception as error:
                self._slots.give_back(node)
                self._failed(item, error)
                continue
            self._running += 1
            work._transfer.add_done_callback(partial(self.events.put, partial(self._ended, node, item, work)))

    def _ended(self, node: int, item: _Item, work: Submitted) -> None:
        self._running -= 1
        self._slots.give_back(node)
        error = work.exception()
        if error is None:
            item.future.set_result(work.result())
        else:
            self._failed(item, error)

    def _failed(self, item: _Item, error: Exception) -> None:
        if isinstance(error, NodeLost):
            if item.retries > 0:
                item.retries -= 1
                self._pending.appendleft(item)
                return
            advise_retries(error, "Executor")
        item.future.set_exception(error)

    def _fail_all(self, error: Exception) -> None:
        while self._pending:
            item = self._pending.popleft()
            if item.future.running() or item.future.set_running_or_notify_cancel():
                item.future.set_exception(error)


class Executor(StandardExecutor):
    """Runs functions on nodes, ``per_node`` at a time on each, for what takes a ``concurrent.futures.Executor``.

        >>> with dt.tasks.Executor() as executor:
        ...     list(executor.map(pow, [1, 2, 3], [2, 2, 2]))
        [1, 4, 9]

    Its futures are ``concurrent.futures.Future``: one that waits for a free node can be cancelled, one that runs can't.
    Functions, arguments and results are as for ``dt.submit``. asyncio's ``run_in_executor`` takes it.

    Args:
        nodes: the nodes; None: all of the session that are not lost.
        per_node: how many functions run on a node at once; more than one run on streams of their own.
        retries: how often a call whose node is lost is given to another one. By default not at all, as it may have
            done something already: its future raises NodeLost.

    Raises DisttensorError without a session, ValueError for nodes that do not exist and numbers below one.
    """

    def __init__(self, nodes: Iterable[int] | None = None, *, per_node: int = 1, retries: int = 0) -> None:
        self._session = session = current.session()
        self._retries = retries
        self._dispatcher = _Dispatcher(session, Slots(session, nodes, per_node, retries))
        self._closing = threading.Lock()
        self._closed = False

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Has ``fn(*args, **kwargs)`` run on the next node that is free, and returns its Future.

        Raises RuntimeError after ``shutdown``.
        """
        if not callable(fn):
            raise TypeError(f"submit takes a function and its arguments, and {fn!r:.60} can't be called")
        site = here()
        with self._closing:
            if self._closed:
                raise RuntimeError("cannot schedule new futures after shutdown")
            future: Future[Any] = Future()
            call = partial(begin, self._session, fn, args, kwargs, site=site)
            self._dispatcher.add(_Item(future, call, self._retries))
            return future

    def map(
        self, fn: Callable[..., Any], *iterables: Iterable[Any], timeout: float | None = None, chunksize: int = 1
    ) -> Iterator[Any]:
        """Does what ``Executor.map`` does: takes all items at once, and yields the results in their order.

        ``chunksize``: how many items are one call. ``dt.map`` takes items as their turn comes. Raises TimeoutError.
        """
        if chunksize < 1:
            raise ValueError("chunksize must be >= 1.")
        if chunksize == 1:
            return super().map(fn, *iterables, timeout=timeout)
        chunks = _chunks(chunksize, *iterables)
        return itertools.chain.from_iterable(super().map(partial(_each, fn), chunks, timeout=timeout))

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Takes no more functions; those that it has go on, unless ``cancel_futures`` cancels those that have not
        begun. ``wait``: returns when all have ended."""
        with self._closing:
            self._closed = True
        self._dispatcher.end(cancel_futures)
        if wait:
            self._dispatcher.thread.join()

    def __del__(self) -> None:
        if dispatcher := getattr(self, "_dispatcher", None):
            dispatcher.end(False)


def _chunks(size: int, *iterables: Iterable[Any]) -> Iterator[list[tuple[Any, ...]]]:
    items = zip(*iterables, strict=False)
    while chunk := list(itertools.islice(items, size)):
        yield chunk


def _each(fn: Callable[..., Any], chunk: list[tuple[Any, ...]]) -> list[Any]:
    return [fn(*args) for args in chunk]
