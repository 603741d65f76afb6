"""The handle of a queue of work: what a program and its functions on nodes use."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, ClassVar

from ..node import holders
from ..node.holders import Holder
from ..node.user_functions import function_of
from ..protocol import shared_objects as s
from ..protocol.errors import CancelledError, DisttensorError
from ..protocol.shared_objects import Answer
from . import work_queues
from .channel_handles import Channel
from .handles import Handle, ShutDown, checked
from .lock_handles import WORDS, who
from .values import pack, unpack
from .waiting import Caller, check_timeout

_FUNCTIONS = FunctionType, MethodType, BuiltinFunctionType, partial
_NONE: Any = object()


class WorkQueue(Handle):
    """A queue of work for functions on all nodes: each item is done once, and another's if who has it ends.

        >>> files = dt.tasks.WorkQueue()
        >>> def work(files):
        ...     for path in files:
        ...         files.task_done(os.path.getsize(path))
        >>> workers = [dt.submit(work, files, node=k, beside=True) for k in range(4)]
        >>> files.put_many(paths)
        >>> files.close()
        >>> total = sum(files.answers)

    ``put``, ``get``, ``task_done`` and ``join`` are ``queue.Queue``'s; ``task_done`` takes a result, too, which comes
    out of the channel ``answers``. That is closed when the queue is, and all is done.

    Who gets an item *leases* it, a function's call or a thread that runs none, until its ``task_done``. Where it ends
    without, or its node is lost, the item is the next one again. After ``tries`` such ends it is given up, and whoever
    finds no more answers, or joins, is told by ``Dropped``. A function that is interrupted gives back what it has
    leased as if it had not.

    Items and results are as a Channel's; the script's items may have functions in them as well.

    Args:
        maxsize: how many items that nobody has it has room for; 0: no limit.
        name: a name for ``repr``, and by which ``WorkQueue.named`` finds it.
        tries: after how many tries an item is given up.
    """

    _object = work_queues.WorkQueue
    _crosses: ClassVar = {"maxsize": int, "tries": int}

    def __init__(self, maxsize: int = 0, name: str | None = None, tries: int = 3) -> None:
        """Raises DisttensorError without a session, and in a function on a node."""
        for value, what in ((maxsize, "maxsize"), (tries, "tries")):
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"WorkQueue({what}={value!r:.60}) takes a number")
        if tries < 1:
            raise ValueError(f"WorkQueue(tries={tries}): an item is tried once at least")
        answers = self._made_by().caller.objects.make(work_queues.Answers)
        super().__init__(partial(work_queues.WorkQueue, maxsize=maxsize, tries=tries, answers=answers), name)
        self.maxsize, self.tries = maxsize, tries
        self._be_found()

    @property
    def answers(self) -> Channel:
        """The channel of the results."""
        number = self._state().of  # which the script says: a handle may have come from a node
        return self._beside(Channel, number, f"answers of {self.name or self._number}", {"maxsize": 0})

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        """Puts an item in; waits for room, ``timeout`` seconds at most. Raises queue.Full, ShutDown once the queue is
        closed, TypeError and ValueError for what is no item, NodeLost."""
        check_timeout(timeout)
        packed = pack(item, self._refers)
        block = block and timeout != 0
        ask = self._asking()
        self._said(ask.ask(s.Put(ask.number(), (self._number,), packed, block), timeout if block else None))

    def put_nowait(self, item: Any) -> None:
        """Puts an item in if there is room. Raises as ``put``."""
        self.put(item, block=False)

    def put_many(self, items: Iterable[Any], timeout: float | None = None) -> None:
        """Puts items in, one after the other; ``timeout`` is each one's. Raises as ``put``: those before are in."""
        for item in items:
            self.put(item, timeout=timeout)

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """Leases the next item; waits for one, ``timeout`` seconds at most. Raises queue.Empty, ShutDown once the queue
        is closed and all is done or leased no more, NodeLost."""
        check_timeout(timeout)
        block = block and timeout != 0
        ask, holder = self._asking(), holders.current()
        key = ask, self._number
        had = key in holder
        if not had:
            holder.at_end(key, partial(self._ended, ask, holder))
        request = s.Lease(ask.number(), (self._number,), holder.number, who(holder), block)
        try:
            answer = self._said(ask.ask(request, timeout if block else None))
        except Exception:  # after an interrupt its end asks once more: the script has heard of that before it is over
            if not had:
                holder.forget(key)
            raise
        if answer.item is None:
            raise DisttensorError("an item came without a value")
        return unpack(answer.item, partial(self._found, answer.trusted))

    def get_nowait(self) -> Any:
        """Leases the next item if there is one. Raises as ``get``."""
        return self.get(block=False)

    def task_done(self, result: Any = _NONE) -> None:
        """Ends the lease of the item that the caller got first of those that it has, and puts ``result``, if there is
        one, among the answers; waits for room there. Raises ValueError where the caller has none, TypeError and
        ValueError for what is no item, which leave it leased, and ShutDown for a result after ``answers.close()``."""
        packed = None if result is _NONE else pack(result, self._refers)
        ask, holder = self._asking(), holders.current()
        answer = ask.ask(s.Done(ask.number(), (self._number,), holder.number, packed))
        if answer.said == s.EMPTY:
            raise ValueError(f"{self!r}: task_done() called too many times; {who(holder)} has no item of it")
        self._said(answer)
        if not answer.left:
            holder.forget((ask, self._number))

    def join(self, timeout: float | None = None) -> None:
        """Waits until all that was put in is done, ``timeout`` seconds at most. Raises TimeoutError; Dropped for an
        item that was given up, once for each; NodeLost, once, if a node is lost and none is left that has done any."""
        check_timeout(timeout)
        ask = self._asking()
        answer = ask.ask(s.Join(ask.number(), (self._number,)), timeout)
        if answer.said == s.EMPTY:
            raise TimeoutError(f"{self!r}: not all was done within {timeout} s")
        self._said(answer)

    def qsize(self) -> int:
        """Returns the number of items that are in now, and that nobody has."""
        return self._state().count

    def empty(self) -> bool:
        """Returns whether there is no item now."""
        return self.qsize() == 0

    def full(self) -> bool:
        """Returns whether there is no room now."""
        return 0 < self.maxsize <= self.qsize()

    @property
    def unfinished_tasks(self) -> int:
        """The number of items that are not done: those that are in, and those that are leased."""
        return self._state().left

    def close(self, immediate: bool = False) -> None:
        """Lets nothing more in. What is in is done first, unless ``immediate`` drops it; then workers are told by
        ShutDown, and ``answers`` is closed. Closing twice is fine."""
        ask = self._asking()
        self._said(ask.ask(s.Close(ask.number(), (self._number,), immediate)))

    @property
    def closed(self) -> bool:
        """True once the queue was closed."""
        return self._state().closed

    def __iter__(self) -> Iterator[Any]:
        """Leases items until the queue is closed and empty; each needs its ``task_done``."""
        while True:
            try:
                item = self.get()
            except ShutDown:
                return
            yield item

    def __enter__(self) -> WorkQueue:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _said(self, answer: Answer) -> Answer:
        return checked(answer, repr(self), partial(self._found, answer.trusted))

    def _refers(self, value: Any) -> list[Any] | None:
        """Returns what stands for a function of the script's, and for what it holds for all."""
        if self._holder is not None and isinstance(value, _FUNCTIONS):
            return [self._holder.pickled(value, f"a function in an item of {self!r}")]
        return super()._refers(value)

    def _found(self, trusted: bool, told: list[Any]) -> Any:
        if len(told) == 1:
            if not trusted or not isinstance(told[0], bytes):  # nothing that a node sends is unpickled
                raise ValueError("a function that the script has not put in")
            return function_of(told[0])
        return self._referred(told)

    def _ended(self, ask: Caller, holder: Holder, error: BaseException | None) -> None:
        counted = error is None or (isinstance(error, Exception) and not isinstance(error, CancelledError))
        why = f"raised {type(error).__name__}" if error is not None else "ended without task_done()"
        request = s.Return(ask.number(), (self._number,), holder.number, counted=counted, why=why[:WORDS])
        with suppress(DisttensorError):  # the session has ended
            if holder.is_function:  # when the script gets its result, the item is there for others
                ask.ask(request)
            else:  # a thread that is about to be gone, where nothing may wait
                ask.tell(request)
