"""``dt.map(fn, items)``: a function over any number of items, on nodes that are free."""

from __future__ import annotations

import contextlib
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from functools import partial
from heapq import heappop, heappush
from itertools import repeat
from typing import Any, NamedTuple, overload

from ..collectives.groups import new_group
from ..dispatch.call_site import here
from ..errors.argument_checks import flag
from ..runtime.master.failures import short_line
from ..runtime.master.requests import Request
from ..runtime.master.route import waits
from ..runtime.process import undertakings
from ..runtime.process.spelling import shown
from ..runtime.protocol import commands as c
from ..runtime.protocol.errors import DisttensorError, NodeLost
from ..session import current
from ..session.session import Session
from .announcing import Announcing, announced_by
from .calls import ItemError, name_of
from .sending import pickled_item
from .signatures import A, B, C, R
from .submitted import Submitted, submit_items, submit_on_node

#: The first items go to nodes one by one.
FIRST = 1
#: Seconds that a chunk is to take. A node ends one that takes longer (runtime/node/chunks.py).
TARGET = 0.004
#: The most items of a chunk, and bytes of their arguments.
MOST_ITEMS, MOST = 500, 256 << 10

#: What may be taken from ahead: nobody else has the iterator, and nothing happens.
_CONTAINERS = frozenset(
    {list, tuple, range, str, bytes, dict, set, frozenset, deque, type({}.keys()), type({}.values()), type({}.items())}
)


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
    can have are under way, or have results that were not taken. Of lists, tuples, ranges, sets and the like, whose
    items are plain data (numbers, text, bytes, and lists, tuples and dicts of these), small ones go to a node several
    at a time: so many as it does in some milliseconds, by the time that the last ones took, and two such chunks for
    each place are ahead. Each runs once, and none waits for a slow one. ``itertools.repeat(x)`` may be beside them.

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
    return _Mapping(session, fn, iterables, slots, ordered, retries, back).results()


class _Item(NamedTuple):
    """The arguments of one call. Compared by the number."""

    number: int
    args: tuple[Any, ...]
    data: bytes  #: their pickle, where it may be in a chunk
    left: int  #: how often it may be given to another node


class _Chunk:
    """Items that a node was given by one command."""

    work: Submitted[Any]

    def __init__(self, items: Sequence[_Item], node: int) -> None:
        self.node, self.number, self.size = node, items[0].number, len(items)
        self.due = dict(enumerate(items))  #: the items of which the node is yet to tell, by place
        self.back, self.seconds = 0, 0.0  #: how many it has given back; for how long it was at the others


class _Mapping:
    """One call of ``map``."""

    def __init__(
        self,
        session: Session,
        fn: Any,
        iterables: Sequence[Iterable[Any]],
        slots: Slots,
        ordered: bool,
        retries: int,
        back: dict[str, Any],
    ) -> None:
        """``back``: ``returns`` and ``raises``."""
        self._session, self._fn, self._items, self._slots = session, fn, zip(*iterables, strict=False), slots
        self._ordered, self._retries, self._back, self._site = ordered, retries, back, here(3)
        #: how many items there are, where to take some means nothing: a generator may wait for the results of those
        #: that it has given, and an iterator of the user's is taken from as their turn comes. None: such ones
        self._length = _length(iterables)
        self._chunks = self._length is not None  #: whether more than one item may go to a node at once
        self._size = self._largest = FIRST  #: of the next chunk, and the largest one so far
        self._again: list[_Item] = []  #: a heap: items of nodes that were lost, and those that were given back
        self._running: dict[int, _Chunk] = {}  #: by its number
        self._ended = deque[_Chunk]()  #: of which there is news, appended in any thread
        self._done = OrderedDict[int, Any]()  #: results that were not taken, by number
        #: what has failed and was not raised, with the items that it is of. An error that was asked for counts as
        #: raised, so it is asked for in its turn: until then it may be an argument's, which others raise
        self._failed: dict[int, tuple[Submitted[Any], list[_Item]]] = {}
        self._next, self._taken, self._all = 0, 0, False
        self._waiting: Request | None = None

    def results(self) -> Iterator[Any]:
        """Yields the results."""
        try:
            with undertakings.mine.during(self._words, short_line(self._site), holds=False):
                while self._feed():
                    number = self._take_result() if not self._ordered else self._take_result(self._taken)
                    self._taken += 1
                    if type(found := self._done.pop(number)) is ItemError:
                        raise found.error
                    yield found
        finally:
            for work in [chunk.work for chunk in self._running.values()] + [each[0] for each in self._failed.values()]:
                work.abandon()

    def _words(self) -> str:
        under_way = sum(len(chunk.due) for chunk in list(self._running.values()))
        ended = self._next - under_way - len(self._again)
        what = "" if self._all else " so far"
        return f"map of {name_of(self._fn)}: {ended} of {self._next}{what} done, {under_way} under way"

    def _feed(self) -> bool:
        """Begins items while there is room; returns whether any result is to come."""
        most = 2 * self._slots.total * self._largest
        while len(self._running) < self._slots.total and (
            self._again or not (self._all or self._next - self._taken + self._size > most)
        ):
            try:
                node = self._slots.take_slot(self._session)
            except NodeLost:
                if self._running or self._is_next_there():  # what these had comes first, in its turn
                    break
                raise
            if node is None:
                break
            try:
                items = self._take_items()
            except BaseException:
                self._slots.give_back(node)
                raise
            if not items:
                self._slots.give_back(node)
                break
            try:
                self._send_items(items, node)
            except NodeLost as error:
                self._slots.give_back(node)
                self._lost(error, items)
        return bool(self._running or self._done or self._failed or self._again)

    def _is_next_there(self) -> bool:
        """Returns whether the next result, or its error, can be taken without a wait."""
        if self._ordered:
            return self._taken in self._done or self._taken in self._failed
        return bool(self._done or self._failed)

    def _take_items(self) -> list[_Item]:
        """Returns the items of the next chunk, and an empty list at the end."""
        size, items, nbytes = 1, list[_Item](), 0
        if self._chunks and self._length is not None:
            rest = len(self._again) + self._length - self._next
            size = max(1, min(self._size, rest // self._slots.total))  # at the end each node has some
        while len(items) < size and (item := self._take_item()) is not None:
            alone = not item.data or item.left < self._retries  # a node may be lost by one: it loses no others
            if alone and items:
                heappush(self._again, item)
                break
            items.append(item)
            nbytes += len(item.data)
            if alone or nbytes > MOST:
                break
        return items

    def _take_item(self) -> _Item | None:
        if self._again:
            return heappop(self._again)
        try:
            args = next(self._items)
        except StopIteration:
            self._all = True
            return None
        self._next += 1
        return _Item(self._next - 1, args, pickled_item(args) if self._chunks else b"", self._retries)

    def _send_items(self, items: list[_Item], node: int) -> None:
        chunk, beside = _Chunk(items, node), self._slots.beside
        if items[0].data:
            data = [item.data for item in items]
            told = partial(self._mark, chunk)
            chunk.work = submit_items(self._session, self._fn, data, self._back, node, self._site, beside, told)
            # a function that holds tensors is sent anew for each call, as these may change
            if chunk.work.parts[0].call.holds_tensors:
                self._chunks = False
        else:
            args = items[0].args
            chunk.work = submit_on_node(self._session, self._fn, args, self._back, node, self._site, beside)
        self._running[chunk.number] = chunk
        chunk.work.call_at_end(partial(self._mark, chunk))

    def _mark(self, chunk: _Chunk) -> None:  # called in any thread
        self._ended.append(chunk)
        if (waiting := self._waiting) is not None:
            waiting.resolve()

    def _take_result(self, wanted: int | None = None) -> int:
        """Waits until a result is there (``wanted``: that of this number); returns its number, having fed nodes
        meanwhile. Raises the error with which it has ended."""
        while True:
            there = next(iter(self._failed or self._done), -1) if wanted is None else wanted
            if there in self._done:
                return there
            if there in self._failed:
                self._fail(*self._failed.pop(there))  # before others begin
                self._feed()
            while not self._ended:
                self._wait()
            failed = self._take_in(self._ended.popleft())
            if failed is None or wanted not in (None, failed):
                self._feed()

    def _take_in(self, chunk: _Chunk) -> int | None:
        """Takes in what a node has told of a chunk. Returns the number of an item whose error is to be raised in its
        turn."""
        work = chunk.work
        part, ended = work.parts[0], work.parts[0].request.done  # read first: all that was told is there then
        while (told := part.take_told()) is not None:
            for place in told.back:
                heappush(self._again, chunk.due.pop(place))
            numbers = [chunk.due.pop(place).number for place in told.done]
            self._done.update(zip(numbers, part.call.item_results(told.results), strict=True))
            chunk.back, chunk.seconds = chunk.back + len(told.back), told.seconds
        if not ended or self._running.pop(chunk.number, None) is None:
            return None
        self._slots.give_back(chunk.node)
        due = [chunk.due[place] for place in sorted(chunk.due)]
        first = due[0]
        if work.returned() and work.exception() is None:
            self._done[first.number] = work.result()
            self._choose_size(chunk)
        elif first.left > 0 and work.lost():
            self._fail(work, due)
        else:
            self._failed[first.number] = work, due
            return first.number
        return None

    def _choose_size(self, chunk: _Chunk) -> None:
        """Has the next chunk take as long as one is to take, by the time of this one's items."""
        reply = chunk.work.parts[0].request.reply
        if isinstance(reply, c.Result) and reply.tensors:  # which the script may move, or drop, one by one
            self._chunks = False
        elif chunk.seconds > 0:
            each = chunk.seconds / (chunk.size - chunk.back)
            self._size = max(1, min(2 * chunk.size, int(TARGET / each), MOST_ITEMS))
            self._largest = max(self._largest, self._size)

    def _fail(self, work: Submitted[Any], items: list[_Item]) -> None:
        """Raises the error with which items have ended; or notes a loss that others may make good."""
        error = work.exception()
        assert error is not None
        try:
            if not isinstance(error, NodeLost):
                raise error
            self._lost(error, items)
        finally:
            del error, work  # its frames would have it, and keep a user's tensors until the collector comes

    def _lost(self, error: NodeLost, items: list[_Item]) -> None:
        first = items[0]
        if first.left <= 0:
            beside = f", or one of {len(items) - 1} beside it," if len(items) > 1 else ""
            advise_retries(error, "map", f"item {first.number}{beside}")
            raise error
        for item in items:
            heappush(self._again, item._replace(left=item.left - 1))

    def _wait(self) -> None:
        link = self._session.link
        link.sender.flush_all()
        for chunk in list(self._running.values()):
            self._waiting = Request(-1, chunk.node)
            with contextlib.suppress(NodeLost), link.unheard():  # its work has ended then, too
                link.waiting.wait(self._waiting, until=lambda: bool(self._ended))
                return
            if not chunk.work.is_completed():
                raise DisttensorError(f"node {chunk.node} is lost, and its function has not ended")
            return


def _length(iterables: Sequence[Iterable[Any]]) -> int | None:
    """Returns how many items there are; None where it is not known, or where taking one may do something."""
    if not all(type(each) in _CONTAINERS or type(each) is repeat for each in iterables):
        return None
    return min([len(each) for each in iterables if isinstance(each, Sized)], default=None)
