"""The handle of a queue of work: what a program and its functions on nodes use."""

from __future__ import annotations

from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, ClassVar

from ..node import holders
from ..node.holders import Holder
from ..node.user_functions import function_of
from ..process.spelling import shown
from ..protocol import shared_objects as s
from ..protocol.codec import printable
from ..protocol.errors import CancelledError, DisttensorError
from ..protocol.shared_objects import ObjectAnswer
from . import work_queues
from .channel_handles import Channel, Queue
from .ends import WORDS, tell_end, who
from .handles import checked
from .values import pack, unpack
from .waiting import Caller, check_timeout

_FUNCTIONS = FunctionType, MethodType, BuiltinFunctionType, partial
_NONE: Any = object()


class WorkQueue(Queue):
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

    _object = work_queues.WorkQueueState
    _crosses: ClassVar = {"maxsize": int, "tries": int}

    def __init__(self, maxsize: int = 0, name: str | None = None, tries: int = 3) -> None:
        """Raises DisttensorError without a session, and in a function on a node."""
        for value, what in ((maxsize, "maxsize"), (tries, "tries")):
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"WorkQueue({what}={shown(value)}) takes a number")
        if tries < 1:
            raise ValueError(f"WorkQueue(tries={tries}): an item is tried once at least")
        answers = self._made_by().caller.objects.make(work_queues.Answers)
        super().__init__(partial(work_queues.WorkQueueState, maxsize=maxsize, tries=tries, answers=answers), name)
        self.maxsize, self.tries = maxsize, tries
        self._be_found()

    @property
    def answers(self) -> Channel:
        """The channel of the results."""
        number = self._state().of  # which the script says: a handle may have come from a node
        return self._beside(Channel, number, f"answers of {self.name or self._number}", {"maxsize": 0})

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """Leases the next item; waits for one, ``timeout`` seconds at most. Raises queue.Empty, ShutDown once the queue
        is closed and all is done or leased no more, NodeLost."""
        check_timeout(timeout)
        block = block and timeout != 0
        ask, holder = self._asking(), holders.current()
        key = ask, self._number
        had = key in holder
        if not had:
            holder.at_end(key, partial(self._return_at_end, ask, holder))
        request = s.Lease(ask.number(), (self._number,), holder.number, who(holder), block)
        try:
            answer = self._check_answer(ask.ask(request, timeout if block else None))
        except Exception:  # after an interrupt its end asks once more: the script has heard of that before it is over
            if not had:
                holder.cancel_at_end(key)
            raise
        if answer.item is None:
            raise DisttensorError("an item came without a value")
        return unpack(answer.item, partial(self._found, answer.trusted))

    def task_done(self, result: Any = _NONE) -> None:
        """Ends the lease of the item that the caller got first of those that it has, and puts ``result``, if there is
        one, among the answers; waits for room there. Raises ValueError where the caller has none, TypeError and
        ValueError for what is no item, which leave it leased, and ShutDown for a result after ``answers.close()``."""
        packed = None if result is _NONE else pack(result, self._refers)
        ask, holder = self._asking(), holders.current()
        answer = ask.ask(s.TaskDone(ask.number(), (self._number,), holder.number, packed))
        if answer.said == s.EMPTY:
            raise ValueError(f"{self!r}: task_done() called too many times; {who(holder)} has no item of it")
        self._check_answer(answer)
        if not answer.left:
            holder.cancel_at_end((ask, self._number))

    def join(self, timeout: float | None = None) -> None:
        """Waits until all that was put in is done, ``timeout`` seconds at most. Raises TimeoutError; Dropped for an
        item that was given up, once for each; NodeLost, once, if a node is lost and none is left that has done any."""
        check_timeout(timeout)
        ask = self._asking()
        answer = ask.ask(s.JoinQueue(ask.number(), (self._number,)), timeout)
        if answer.said == s.EMPTY:
            raise TimeoutError(f"{self!r}: not all was done within {timeout} s")
        self._check_answer(answer)

    @property
    def unfinished_tasks(self) -> int:
        """The number of items that are not done: those that are in, and those that are leased."""
        return self._state().left

    def _check_answer(self, answer: ObjectAnswer) -> ObjectAnswer:
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

    def _return_at_end(self, ask: Caller, holder: Holder, error: BaseException | None) -> None:
        counted = error is None or (isinstance(error, Exception) and not isinstance(error, CancelledError))
        why = f"raised {type(error).__name__}" if error is not None else "ended without task_done()"
        request = s.Return(ask.number(), (self._number,), holder.number, counted=counted, why=printable(why[:WORDS]))
        tell_end(ask, holder, request)
