"""The lanes of a node, its streams: a lane is a thread that does tasks in order; an event is a mark that it reaches.

A task is a function of tensors that may not be there yet. Its outputs are promised when it is queued, so that
later commands, on any lane, can name them. Tasks wait only for what was issued before them: a program without a
deadlock stays one.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from queue import Empty, SimpleQueue
from typing import Any

import torch

from ...channel.base import Transfer
from ...channel.ticket import Ticket
from ...process.torch_threads import compute_as_told
from ...protocol.failure_ids import Poison
from ..store import Entry, Other, Promise, Value

#: Seconds for which an idle thread waits for its lane's next task before it ends.
LINGER = 0.2

Values = dict[int, Any]  #: the tensors that a task reads, by ref
Results = Sequence[Value | None] | None
Run = Callable[[Values], Results]


class Mark(Ticket, Other):
    """An event: done once everything is done that was issued to its stream before it."""

    def __init__(self) -> None:
        super().__init__()
        self.time = 0  #: when the mark was reached, in nanoseconds of this process's monotonic clock

    def reach(self) -> None:
        self.time = time.perf_counter_ns()
        self.finish()

    def since(self, first: Mark) -> float:
        """Returns the milliseconds between ``first`` and this mark."""
        return (self.time - first.time) / 1e6


class LaneTask:
    """A unit of a lane's work.

    Attributes:
        seq: the number of the command that asked for it; failures are told with it.
        name: the operator's, for failures.
        reads: the entries that it reads, by ref, as they were when it was queued.
        run: gets the tensors of ``reads`` by ref, and returns the values of ``outs``, in order: a tensor, None where
            the operator gave none, or Poison. Raises to fail.
        outs: the promises of its outputs, by ref; a ref of 0 is nobody's.
        writes: refs, of those in ``reads``, whose memory it writes. Each stands for a promise of the same tensor from
            then on, so that later uses of it wait. If the task fails, all tensors that share the memory are poisoned.
        keeps: whether these stay as they are if it fails (``NodeState.give_up``).
        waits: events and transfers that it waits for besides. If one of them fails, the task fails with its error.
        spoil: called with the cause when the task could not be done.
        sends: sends under way when it was queued; it waits for those that read memory that it writes.
        views: whether it may make, or keep, views of what it reads.
        over: whether it has nothing left to do that takes time: its thread only has to note that it is done.
        brief: whether it takes a moment only, once it has begun, except in waits, before which it says so (Exchange).
    """

    __slots__ = (
        "brief", "keeps", "name", "outs", "over", "reads", "run", "sends", "seq", "spoil", "views", "waits", "writes"
    )  # fmt: skip

    def __init__(
        self,
        seq: int,
        name: str,
        run: Run,
        reads: Mapping[int, Entry] | None = None,
        outs: Iterable[tuple[int, Promise]] = (),
        writes: Sequence[int] = (),
        keeps: bool = False,
        waits: Sequence[Transfer] = (),
        spoil: Callable[[Poison], None] | None = None,
        views: bool = False,
        over: bool = False,
    ) -> None:
        self.seq = seq
        self.name = name
        self.run = run
        self.reads = reads or {}
        self.outs = tuple(outs)
        self.writes = tuple((ref, Promise()) for ref in writes)
        self.keeps = keeps
        self.waits = waits
        self.spoil = spoil
        self.sends: list[tuple[Entry, Transfer]] = []
        self.views = views
        self.over = over
        self.brief = False


class Lane(Other):
    """A stream, or the queue of sends to one peer. It has a thread while it has work, and a little longer."""

    def __init__(self, name: str, perform: Callable[[Lane, LaneTask], None], done: Callable[[Lane], None]) -> None:
        self.name = name
        #: queued tasks, the first of them being done; the queueing thread appends, the lane's thread removes done ones
        self.order: deque[LaneTask] = deque()
        #: the operands of the task that is being done; templates' closures for this lane read them
        self.values: Values = {}
        self.twins: dict[Any, Any] = {}  #: those closures, by template
        self.count = 0  #: tasks done
        self.ended = False
        self._perform = perform
        self._done = done
        self._queue: SimpleQueue[LaneTask | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()  #: held while a thread is started, or decides to end

    def __repr__(self) -> str:
        return f"<Lane {self.name} queued={len(self.order)}>"

    def put(self, task: LaneTask) -> None:
        """Queues a task. Called by one thread only. Raises RuntimeError where the system has no thread for it."""
        self.order.append(task)
        with self._starting:
            self._queue.put(
                task
            )  # before the start, which returns when the thread runs: an idle lane is as quick as can be
            if self._thread is None:
                thread = threading.Thread(target=self._work, name=f"disttensor-lane-{self.name}", daemon=True)
                try:
                    thread.start()
                except RuntimeError:
                    self.order.pop()
                    while not self._queue.empty():  # of ``end``, too, which only wakes the thread
                        self._queue.get_nowait()
                    raise
                self._thread = thread

    def is_over(self) -> bool:
        """Returns whether nothing of what is queued is left to do. The thread may be at noting that."""
        at = 1
        try:
            while self.order[-at].over:  # the last ones decide nearly always: thousands may wait
                at += 1
        except IndexError:  # the thread takes them out at the other end
            return True
        return False

    def end(self) -> None:
        """Has the thread end as soon as everything is done: nobody will use the lane any more."""
        self.ended = True
        self._queue.put(None)

    def join(self, timeout: float) -> None:
        """Waits for the end of the lane's thread."""
        thread = self._thread
        if thread is not None:
            thread.join(timeout)

    def _work(self) -> None:
        compute_as_told()
        torch.set_grad_enabled(False)
        while (task := self._next()) is not None:
            try:
                self._perform(self, task)
            finally:
                del task  # a reference would keep tensors alive
                self.order.popleft()
                self._done(self)

    def _next(self) -> LaneTask | None:
        while True:
            try:
                # None, from ``end``, only wakes the thread: a mark may follow it, while there is something to do
                if (task := self._queue.get(timeout=0 if self.ended else LINGER)) is not None:
                    return task
            except Empty:
                with self._starting:
                    if self._queue.empty():
                        self._thread = None
                        return None


def when_all(tickets: Iterable[Transfer], then: Callable[[], None]) -> None:
    """Calls ``then`` once, when all ``tickets`` have ended: now, or in the thread that ends the last."""
    waiting = list(tickets)
    if not waiting:
        then()
        return
    ended, last = itertools.count(1), len(waiting)  # whose next() is atomic

    def one() -> None:
        if next(ended) == last:
            then()

    for ticket in waiting:
        ticket.add_done_callback(one)
