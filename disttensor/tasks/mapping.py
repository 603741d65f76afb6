"""``dt.map(fn, items)``: a function over any number of items, on nodes that are free."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, overload

from ..collectives.groups import new_group
from ..dispatch.call_site import here
from ..errors.argument_checks import flag
from ..runtime.master.failures import short_line
from ..runtime.master.requests import Request
from ..runtime.master.route import waits
from ..runtime.process import undertakings
from ..runtime.process.spelling import shown
from ..runtime.protocol.errors import DisttensorError, NodeLost
from ..session import current
from ..session.session import Session
from .announcing import Announcing, announced_by
from .calls import name_of
from .signatures import A, B, C, R
from .submitted import Submitted, submit_on_node


class Slots:
    """The room for functions on nodes: ``per_node`` on each."""

    def __init__(self, session: Session, nodes: Iterable[int] | None, per_node: int, retries: int) -> None:
        """Raises ValueError, TypeError as ``new_group`` does, NodeLost where all nodes are lost."""
        for name, value, least in (("per_node", per_node, 1), ("retries", retries, 0)):
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name} is a number, not {shown(value)}")
            if value < least:
                raise ValueError(f"{name} is {value}, and has to be {least} at least")
        chosen = range(len(session.nodes)) if nodes is None else new_group(nodes).nodes
        self._of = dict.fromkeys(chosen, per_node)
        self.total = per_node * len(self._of)
        self.beside = per_node > 1
        self.take_none(session)

    def take_none(self, session: Session) -> None:
        """Forgets nodes that are lost. Raises NodeLost, or what makes the session unusable, where none is left."""
        lost = [node for node in self._of if session.nodes[node].lost is not None]
        if len(lost) == len(self._of) or session.link.closed or session.link.is_forked:
            session.link.check(session.nodes[next(iter(self._of))].outbox)

    def take_slot(self, session: Session) -> int | None:
        """Takes room on a node, where there is most; returns None where there is none. Raises as ``take_none``."""
        self.take_none(session)
        there = [node for node in self._of if session.nodes[node].lost is None]
        best = max(there, key=lambda node: self._of[node])
        if not self._of[best]:
            return None
        self._of[best] -= 1
        return best

    def give_back(self, node: int) -> None:
        self._of[node] += 1


def advise_retries(error: NodeLost, what: str, item: str = "the call") -> None:
    """Notes on a loss what was on the node, and how it could have been done again."""
    note = f"  {item} was there, and may have been done in part; {what}(retries=1) gives such ones to another node"
    if note not in getattr(error, "__notes__", ()):
        error.add_note(note)


@overload
def map(
    fn: Callable[[A], R],
    a: Iterable[A],
    /,
    *,
    nodes: Iterable[int] | None = None,
    per_node: int = 1,
    ordered: bool = True,
    retries: int = 0,
    returns: Any = (),
    raises: Any = (),
) -> Iterator[R]: ...
@overload
def map(
    fn: Callable[[A, B], R],
    a: Iterable[A],
    b: Iterable[B],
    /,
    *,
    nodes: Iterable[int] | None = None,
    per_node: int = 1,
    ordered: bool = True,
    retries: int = 0,
    returns: Any = (),
    raises: Any = (),
) -> Iterator[R]: ...
@overload
def map(
    fn: Callable[[A, B, C], R],
    a: Iterable[A],
    b: Iterable[B],
    c: Iterable[C],
    /,
    *,
    nodes: Iterable[int] | None = None,
    per_node: int = 1,
    ordered: bool = True,
    retries: int = 0,
    returns: Any = (),
    raises: Any = (),
) -> Iterator[R]: ...
@overload
def map(
    fn: Callable[..., R],
    a: Iterable[Any],
    b: Iterable[Any],
    c: Iterable[Any],
    d: Iterable[Any],
    /,
    *iterables: Iterable[Any],
    nodes: Iterable[int] | None = None,
    per_node: int = 1,
    ordered: bool = True,
    retries: int = 0,
    returns: Any = (),
    raises: Any = (),
) -> Iterator[R]: ...
def map(
    fn: Callable[..., Any],
    *iterables: Iterable[Any],
    nodes: Iterable[int] | None = None,
    per_node: int = 1,
    ordered: bool = True,
    retries: int = 0,
    returns: Any = (),
    raises: Any = (),
) -> Iterator[Any]:
    """Yields ``fn(*items)`` for the items of the iterables, computed on nodes that are free.

        >>> list(dt.map(pow, [1, 2, 3], [2, 2, 2]))
        [1, 4, 9]

    Items are taken as nodes become free, so the iterables may be infinite: at most two for each place that a function
    can have are under way, or have results that were not taken.

    Args:
        fn: as for ``run``: it and the results as there. What all calls need is sent once as ``dt.tasks.share(x)``.
        *iterables: the arguments, as for the built-in ``map``: it ends with the shortest.
        nodes: the nodes; None: all that are not lost.
        per_node: how many functions run on a node at once; more than one run on streams of their own.
        ordered: the results come in the order of the items; else as they are there.
        retries: how often an item whose node is lost is given to another one. By default not at all, as it may have
            done something already: NodeLost is raised, with a note that says so.
        returns, raises: as for ``run``: classes of yours whose objects, and exceptions, may come back.

    The first error is raised, of the items in their order or, not ``ordered``, of those that end; then, and when the
    iterator is dropped, what is under way is cancelled, and errors of those items are raised nowhere. Raises at once
    TypeError, ValueError for arguments that can't be, DisttensorError without a session.
    """
    session = current.session()
    if not iterables:
        raise TypeError("map takes a function and at least one iterable")
    if not callable(fn):
        raise TypeError(f"map takes a function and its arguments, and {shown(fn)} can't be called")
    flag("ordered", ordered)
    waits("map")
    announced_by(Announcing(fn, returns, raises))  # what they can't be is said now
    slots = Slots(session, nodes, per_node, retries)
    back = {"returns": returns, "raises": raises}
    return _Mapping(session, fn, zip(*iterables, strict=False), slots, ordered, retries, back).results()


class _Mapping:
    """One call of ``map``."""

    def __init__(
        self,
        session: Session,
        fn: Any,
        items: Iterator[tuple[Any, ...]],
        slots: Slots,
        ordered: bool,
        retries: int,
        back: dict[str, Any],
    ) -> None:
        """``back``: ``returns`` and ``raises``."""
        self._session, self._fn, self._items, self._slots = session, fn, items, slots
        self._ordered, self._retries, self._back, self._site = ordered, retries, back, here(3)
        self._again = deque[tuple[int, tuple[Any, ...], int]]()  #: (number, item, retries left) of nodes that were lost
        self._running: dict[int, tuple[Submitted[Any], int, tuple[Any, ...], int]] = {}  #: by number
        self._ended = deque[int]()  #: numbers, appended in any thread
        self._done: dict[int, Any] = {}  #: results that were not taken
        #: what has failed and was not raised, with its item and the retries that are left. An error that was asked for
        #: counts as raised, so it is asked for in its turn: until then it may be an argument's, which others raise
        self._failed: dict[int, tuple[Submitted[Any], tuple[Any, ...], int]] = {}
        self._next, self._taken, self._all = 0, 0, False
        self._waiting: Request | None = None

    def results(self) -> Iterator[Any]:
        """Yields the results."""
        try:
            with undertakings.mine.during(self._words, short_line(self._site), holds=False):
                while self._feed():
                    number = self._take_result() if not self._ordered else self._take_result(self._taken)
                    self._taken += 1
                    yield self._done.pop(number)
        finally:
            for work in [each[0] for each in self._running.values()] + [each[0] for each in self._failed.values()]:
                work.abandon()

    def _words(self) -> str:
        ended = self._next - len(self._running) - len(self._again)
        what = "" if self._all else " so far"
        return f"map of {name_of(self._fn)}: {ended} of {self._next}{what} done, {len(self._running)} under way"

    def _feed(self) -> bool:
        """Begins items while there is room; returns whether any result is to come."""
        while True:
            if not self._again and (self._all or self._next - self._taken >= 2 * self._slots.total):
                break
            node = self._slots.take_slot(self._session)
            if node is None:
                break
            if self._again:
                number, item, left = self._again.popleft()
            else:
                try:
                    number, item, left = self._next, next(self._items), self._retries
                except BaseException as error:
                    self._slots.give_back(node)
                    if not isinstance(error, StopIteration):
                        raise
                    self._all = True
                    break
                self._next += 1
            try:
                work = submit_on_node(self._session, self._fn, item, self._back, node, self._site, self._slots.beside)
            except NodeLost as error:
                self._slots.give_back(node)
                self._lost(error, number, item, left)
                continue
            self._running[number] = work, node, item, left
            work.call_at_end(partial(self._mark_ended, number))
        return bool(self._running or self._done or self._failed or self._again)

    def _mark_ended(self, number: int) -> None:  # called in any thread
        self._ended.append(number)
        if (waiting := self._waiting) is not None:
            waiting.resolve()

    def _take_result(self, wanted: int | None = None) -> int:
        """Waits until a result is there (``wanted``: that of this number); returns its number, having fed nodes
        meanwhile. Raises the error with which it has ended."""
        while True:
            there = next(iter([*self._failed, *self._done]), None) if wanted is None else wanted
            if there in self._done:
                return there
            if there in self._failed:
                self._fail(there, *self._failed.pop(there))  # before others begin
                self._feed()
            while not self._ended:
                self._wait()
            number = self._ended.popleft()
            if self._end_of(number) or wanted not in (None, number):
                self._feed()

    def _end_of(self, number: int) -> bool:
        """Takes note of the end of an item. Returns False for one whose error is to be raised in its turn."""
        work, node, item, left = self._running.pop(number)
        self._slots.give_back(node)
        if work.returned() and work.exception() is None:
            self._done[number] = work.result()
        elif left > 0 and work.lost():
            self._fail(number, work, item, left)
        else:
            self._failed[number] = work, item, left
            return False
        return True

    def _fail(self, number: int, work: Submitted[Any], item: tuple[Any, ...], left: int) -> None:
        """Raises the error with which an item has ended; or notes a loss that others may make good."""
        error = work.exception()
        assert error is not None
        try:
            if not isinstance(error, NodeLost):
                raise error
            self._lost(error, number, item, left)
        finally:
            del error, work  # its frames would have it, and keep a user's tensors until the collector comes

    def _lost(self, error: NodeLost, number: int, item: tuple[Any, ...], left: int) -> None:
        if left <= 0:
            advise_retries(error, "map", f"item {number}")
            raise error
        self._again.append((number, item, left - 1))

    def _wait(self) -> None:
        link = self._session.link
        link.sender.flush_all()
        for work, node, *_ in list(self._running.values()):
            self._waiting = Request(-1, node)
            with contextlib.suppress(NodeLost), link.unheard():  # its work has ended then, too
                link.waiting.wait(self._waiting, until=lambda: bool(self._ended))
                return
            if not work.is_completed():
                raise DisttensorError(f"node {node} is lost, and its function has not ended")
            return
