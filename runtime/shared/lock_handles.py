"""Handles of locks and barriers: what a program and its functions on nodes use."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from types import NoneType
from typing import Any, ClassVar

from ..node import holders
from ..node.holders import Holder
from ..process.spelling import shown
from ..protocol import shared_objects as s
from ..protocol.codec import printable
from ..protocol.errors import DisttensorError
from . import locks
from .ends import WORDS, tell_end, who
from .handles import ObjectHandle
from .waiting import Caller, check_timeout


class Lock(ObjectHandle):
    """A lock of the script and of functions on all nodes, with the names of ``threading.Lock``'s.

        >>> lock = dt.tasks.Lock()
        >>> def work(lock, path):
        ...     with lock:
        ...         with open(path, "a") as f:
        ...             f.write("whole line\\n")
        >>> work_on_each = [dt.submit(work, lock, "/shared/log", node=k) for k in range(4)]

    Who waits gets it in the order in which they came. A function's call has it, or a thread that runs none; only that
    may release it. Where one ends without a release, or its node is lost, the next one gets the lock and is told by
    ``abandoned``, as what the lock guards may be half done.
    """

    _object = locks.LockState
    #: Who had it before and did not release it, in words; None where it was released. Each acquire sets it.
    abandoned: str | None = None

    def __init__(self, name: str | None = None) -> None:
        """``name``: for ``repr`` and ``Lock.named``. Raises DisttensorError without a session, and in a function on a
        node."""
        super().__init__(locks.LockState, name)
        self._be_found()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Acquires the lock; waits for it, ``timeout`` seconds at most, or without an end (-1). Returns whether it has
        it now. Raises DisttensorError where the caller has it already, and would wait for itself."""
        if not blocking and timeout != -1:
            raise ValueError("can't specify a timeout for a non-blocking call")
        if timeout != -1 and not timeout >= 0:
            raise ValueError(f"timeout={timeout!r}: seconds are not negative, but for -1, which is no limit")
        if timeout > threading.TIMEOUT_MAX:
            raise OverflowError(f"timeout={timeout!r}: at most {threading.TIMEOUT_MAX:.0f} seconds")
        ask, holder = self._asking(), holders.current()
        key = ask, self._number
        had = key in holder
        if not had:
            holder.at_end(key, partial(self._release_at_end, ask, holder))
        wait, forever = blocking and timeout != 0, timeout == -1
        request = s.Acquire(ask.number(), (self._number,), holder.number, who(holder), wait, forever)
        answer = ask.ask(request, None if forever or not wait else timeout)
        if answer.said == s.OK:
            self.abandoned = answer.why or None
            return True
        if not had:
            holder.cancel_at_end(key)
        if answer.said != s.EMPTY:
            self._check_answer(answer)
        return False

    def release(self) -> None:
        """Releases the lock. Raises DisttensorError, a RuntimeError, where the caller does not have it."""
        ask, holder = self._asking(), holders.current()
        self._check_answer(ask.ask(s.Release(ask.number(), (self._number,), holder.number)))
        holder.cancel_at_end((ask, self._number))

    def locked(self) -> bool:
        """Returns whether somebody has it now."""
        return self._state().closed

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    def _release_at_end(self, ask: Caller, holder: Holder, error: BaseException | None) -> None:
        request = s.Release(ask.number(), (self._number,), holder.number, ended=True)
        tell_end(ask, holder, request)


class Barrier(ObjectHandle):
    """A barrier of the script and of functions on nodes, with the names of ``threading.Barrier``'s.

        >>> barrier = dt.tasks.Barrier(2)
        >>> def both(barrier):
        ...     return barrier.wait()
        >>> sorted(w.result() for w in [dt.submit(both, barrier, node=k) for k in range(2)])
        [0, 1]

    It breaks for all, and says who it was, when one that waits gives up; when a function that has it raises an
    exception; and when a node is lost, for that may be one that has not come yet. ``reset`` mends it.
    """

    _object = locks.BarrierState
    _crosses: ClassVar = {"parties": int, "_timeout": float | int | None, "_action": NoneType}

    def __init__(
        self,
        parties: int,
        action: Callable[[], object] | None = None,
        timeout: float | None = None,
        name: str | None = None,
    ) -> None:
        """
        Args:
            parties: how many have to come.
            action: called by the last one to come, before all go on.
            timeout: seconds that ``wait`` waits if it is not told otherwise.
            name: for ``repr`` and ``Barrier.named``.

        Raises DisttensorError without a session, and in a function on a node.
        """
        if isinstance(parties, bool) or not isinstance(parties, int):
            raise TypeError(f"Barrier({shown(parties)}) takes a number of parties")
        if parties < 1:
            raise ValueError(f"Barrier({parties}): parties must be > 0")
        if action is not None and not callable(action):
            raise TypeError(f"Barrier(action={shown(action)}) takes a function")
        check_timeout(timeout)
        super().__init__(partial(locks.BarrierState, parties=parties, acts=action is not None), name)
        self.parties, self._action, self._timeout = parties, action, timeout
        self._be_found()

    def __setstate__(self, kept: dict[str, Any]) -> None:
        self.__dict__.update(kept)
        self._watch()

    def wait(self, timeout: float | None = None) -> int:
        """Waits until all have come. Returns which one of them this is, from 0 on, in the order in which they came.

        Raises threading.BrokenBarrierError, a RuntimeError, that says what has broken it; after ``timeout`` seconds
        this does."""
        limit = self._timeout if timeout is None else timeout
        check_timeout(limit)
        self._watch()
        ask = self._asking()
        arrive = s.Arrive(ask.number(), (self._number,), who(holders.current()))
        try:
            answer = ask.ask(arrive, limit)
            if answer.said == s.ACT:
                if self._action is not None:
                    self._action()
                answer = ask.ask(s.Passed(ask.number(), (self._number,)))
        except BaseException as e:
            why = f"did its action, which raised {type(e).__name__}"[:WORDS]
            ask.notify(s.Abort(ask.number(), (self._number,), arrive.who, why, acting=arrive.call))
            raise
        if answer.said == s.BROKEN:
            raise threading.BrokenBarrierError(f"{self!r} is broken: {answer.why}")
        return self._check_answer(answer).count

    def abort(self) -> None:
        """Breaks the barrier: all who wait raise, and whoever comes."""
        ask = self._asking()
        abort = s.Abort(ask.number(), (self._number,), who(holders.current()), "has called abort()")
        self._check_answer(ask.ask(abort))

    def reset(self) -> None:
        """Makes it as new; those who wait raise."""
        ask = self._asking()
        self._check_answer(ask.ask(s.Reset(ask.number(), (self._number,))))

    @property
    def n_waiting(self) -> int:
        """The number of those who wait now."""
        return self._state().count

    @property
    def broken(self) -> bool:
        """True while the barrier is broken."""
        return self._state().closed

    def _watch(self) -> None:
        """Has the barrier break if the function that has it raises an exception: the others would wait in vain."""
        holder = holders.current()
        if holder.is_function:
            holder.at_end((id(self), self._number), partial(self._failed, holder))

    def _failed(self, holder: Holder, error: BaseException | None) -> None:
        if error is not None:
            with suppress(DisttensorError):  # the session has ended
                ask, why = self._asking(), printable(f"has raised {type(error).__name__}"[:WORDS])
                ask.ask(s.Abort(ask.number(), (self._number,), who(holder), why))
