"""``dt.tasks.Executor``: the nodes as a ``concurrent.futures.Executor``, for programs and libraries that take one."""

from __future__ import annotations

import itertools
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor as StandardExecutor
from concurrent.futures import Future
from functools import partial
from typing import Any

from ..dispatch.call_site import here
from ..runtime.process.spelling import shown
from ..session import current
from .announcing import Announcing, announced_by
from .calls import name_of
from .dispatching import Dispatcher, DueCall
from .mapping import Slots
from .signatures import P, R
from .submitted import submit_on_node


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

        returns, raises: as for ``run``: classes of yours whose objects, and exceptions, may come back. They are named
            here, as all arguments of ``submit`` are the function's.

    At the end of the script, and in ``dt.shutdown()``, all calls are finished first; Ctrl-C cancels them then.

    Raises DisttensorError without a session, ValueError for nodes that do not exist and numbers below one, TypeError
    for ``returns`` and ``raises`` that name no such class.
    """

    def __init__(
        self,
        nodes: Iterable[int] | None = None,
        *,
        per_node: int = 1,
        retries: int = 0,
        returns: Any = (),
        raises: Any = (),
    ) -> None:
        self._session = session = current.session()
        self._retries = retries
        self._announcing = Announcing(None, returns, raises, "the Executor")
        announced_by(self._announcing)  # what they can't be is said now
        self._dispatcher = Dispatcher(session, Slots(session, nodes, per_node, retries))
        weakref.finalize(self, self._dispatcher.end_thread, False).atexit = False  # dropped: it ends when all is done

    def submit(self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Has ``fn(*args, **kwargs)`` run on the next node that is free, and returns its Future.

        Raises RuntimeError after ``shutdown``, and at the interpreter's end; DisttensorError after the session's end.
        """
        return self._submit(fn, fn, args, kwargs, here())

    def _submit(self, named: Any, fn: Callable[..., Any], args: Sequence[Any], kwargs: Any, site: Any) -> Future[Any]:
        """``named``: the user's function, which ``fn`` calls."""
        if not callable(named):
            raise TypeError(f"submit takes a function and its arguments, and {shown(named)} can't be called")
        what, announcing = f"{name_of(named)}()", self._announcing._replace(fn=named)
        call = partial(submit_on_node, self._session, fn, args, kwargs, site=site, announcing=announcing, what=what)
        item = DueCall(call, what, site, self._retries)
        self._dispatcher.add(item)
        return item.future

    def map(
        self,
        fn: Callable[..., R],
        *iterables: Iterable[Any],
        timeout: float | None = None,
        chunksize: int = 1,
        buffersize: int | None = None,
    ) -> Iterator[R]:
        """Does what ``Executor.map`` does: takes all items at once, and yields the results in their order.

        The first error, and TimeoutError ``timeout`` seconds after this call, end it, and calls that have not begun are
        cancelled; so they are when the iterator is closed or dropped.

        Args:
            chunksize: how many items are one call.
            buffersize: how many calls are under way at most, or have results that were not taken; None: all at once.
                ``dt.map`` takes items as nodes become free.
        """
        if chunksize < 1:
            raise ValueError("chunksize must be >= 1.")
        if buffersize is not None and not isinstance(buffersize, int):
            raise TypeError("buffersize must be an integer or None")
        if buffersize is not None and buffersize < 1:
            raise ValueError("buffersize must be None or > 0")
        site, until = here(), None if timeout is None else time.monotonic() + timeout
        items: Iterator[tuple[Any, ...]] = zip(*iterables, strict=False)
        each = fn if chunksize == 1 else partial(_each, fn)
        calls = items if chunksize == 1 else _chunks(chunksize, items)
        futures = (self._submit(fn, each, args, {}, site) for args in calls)
        results = _results(deque(itertools.islice(futures, buffersize)), futures, until)
        return results if chunksize == 1 else _flat(results)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Takes no more functions; those that it has go on, unless ``cancel_futures`` cancels those that have not
        begun. ``wait``: returns when all have ended."""
        self._dispatcher.close(cancel_futures, wait)


def _results(due: deque[Future[Any]], more: Iterator[Future[Any]], until: float | None) -> Iterator[Any]:
    """Yields the results of futures, and takes one more for each."""
    try:
        while due:
            due.extend(itertools.islice(more, 1))
            yield _result(due.popleft(), until)  # kept by nobody here
    finally:
        for future in due:
            future.cancel()


def _result(future: Future[Any], until: float | None) -> Any:
    try:
        return future.result(None if until is None else until - time.monotonic())
    finally:
        future.cancel()  # if it has not begun in time
        del future  # whose error has this frame


def _chunks(size: int, items: Iterator[tuple[Any, ...]]) -> Iterator[tuple[list[tuple[Any, ...]]]]:
    while chunk := list(itertools.islice(items, size)):
        yield (chunk,)


def _flat(chunks: Iterator[list[Any]]) -> Iterator[Any]:
    for chunk in chunks:
        chunk.reverse()
        while chunk:
            yield chunk.pop()


def _each(fn: Callable[..., Any], chunk: list[tuple[Any, ...]]) -> list[Any]:
    return [fn(*args) for args in chunk]
