"""Tickets, the Transfers of the built-in channels: one-shot results without a lock that a finalizer could block on.

A transfer may be ended by any thread, even by a finalizer that the collector runs inside of another call of a ticket.
So there is no mutex: ``_claim`` is only ever tried, and ``_then`` relies on append and popleft being atomic.
"""

from __future__ import annotations

from _thread import allocate_lock
from collections import deque
from collections.abc import Callable
from time import perf_counter

from ..process.callbacks import call_callbacks
from ..protocol.errors import ChannelError, PoisonedError
from .base import Transfer


class Passing:
    """The bytes of a payload that have passed, which one thread counts."""

    __slots__ = ("began", "bytes")

    def __init__(self) -> None:
        self.began, self.bytes = perf_counter(), 0


class Ticket(Transfer):
    """A transfer that ends once, by ``finish`` or by ``fail``; later calls of either change nothing."""

    #: counts the bytes of its payload, while that is on its way, where the channel does
    passing: Passing | None = None

    def __init__(self) -> None:
        self._claim = allocate_lock()  #: taken by the thread that ends the transfer
        self._done = False
        self._failure: tuple[Callable[[str], ChannelError], str] | None = None
        self._then: deque[Callable[[], object]] = deque()

    def finish(self) -> None:
        """Ends the transfer well."""
        self._end_with(None)

    def fail(self, kind: Callable[[str], ChannelError], why: str) -> None:
        """Ends the transfer with an error: ``wait`` raises ``kind(why)``."""
        self._end_with((kind, why))

    def _end_with(self, failure: tuple[Callable[[str], ChannelError], str] | None) -> None:
        if self._claim.acquire(False):
            self._failure = failure
            self._done = True
            call_callbacks(self._then)

    def wait(self, timeout: float | None = None) -> None:
        self._wait(timeout, timeout)

    def _wait(self, left: float | None, timeout: float | None) -> None:
        """Waits for the ``left`` seconds of ``timeout``."""
        if not self._done:
            gate = allocate_lock()
            gate.acquire()
            self._then.append(gate.release)
            # It may have ended between the test above and the append; then nobody else would open the gate.
            if not self._done and not gate.acquire(True, -1 if left is None else min(max(left, 0.0), 1e6)):
                raise TimeoutError(f"the transfer did not end within {timeout:g} s; it is still under way")
        if self._failure is not None:
            kind, why = self._failure
            raise kind(why)  # a fresh one, for several threads may wait

    def is_completed(self) -> bool:
        return self._done

    def add_done_callback(self, fn: Callable[[], None]) -> None:
        self._then.append(fn)
        if self._done:
            call_callbacks(self._then)

    add_background_callback = add_done_callback

    def passed(self) -> tuple[int, float] | None:
        passing = self.passing
        return None if passing is None else (passing.bytes, perf_counter() - passing.began)

    def __repr__(self) -> str:
        state = "under way" if not self._done else "done" if self._failure is None else f"failed: {self._failure[1]}"
        return f"<{type(self).__name__} {state}>"


def done() -> Ticket:
    """Returns a transfer that has ended well already."""
    ticket = Ticket()
    ticket.finish()
    return ticket


def poisoned(rank: int, seq: int) -> Callable[[str], ChannelError]:
    """Returns a ``kind`` for ``Ticket.fail``: the sender has no tensor, for command ``seq`` of node ``rank`` failed."""
    return lambda why: PoisonedError(rank, seq)


def failed(kind: type[ChannelError], why: str) -> Ticket:
    """Returns a transfer that has failed already."""
    ticket = Ticket()
    ticket.fail(kind, why)
    return ticket
