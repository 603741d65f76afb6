"""The lanes of a node: they do tasks, and their results are put into the store.

Only the thread that receives writes the store. Lanes post the tensors that they made, and those that they spoiled, on
deques that it drains, so that a Free that came meanwhile wins.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from ...process.observing import CommandBegun, CommandDone
from ...protocol.errors import PoisonedError, ProtocolError
from ...protocol.failure_ids import Poison, earliest
from ..state import NodeState, in_order
from ..store import Later, NotReplayed, Outgrown, Pending, Promise, Unmade, Value, made, memory, release
from ..user_functions import Outcome
from . import cuda_lane
from .lane import Lane, LaneTask, Mark, Values, when_all

#: The number of a lane's tasks between two checks of whether a report to the master is due.
OFTEN = 64


class Lanes:
    """The lanes of one node."""

    def __init__(self, node: NodeState) -> None:
        self.node = node
        self.store = node.store
        self.entries = node.store.entries
        self.store.viewed = self.viewed
        self.closed = False
        self.cuda = node.cuda
        if self.cuda:
            node.take_over = cuda_lane.take_over
        self._all: list[Lane] = []
        #: entries that have got their values since the store was last written
        self._arrived: deque[tuple[int, Pending | Promise]] = deque()
        self._spoiled: deque[tuple[torch.Tensor, Poison]] = deque()
        #: memory that a failed task should have written, while a task may still be about to read it unaware
        self._tainted: dict[int, tuple[Poison, torch.Tensor]] = {}
        self._taints: deque[tuple[int, int]] = deque()  #: (the command after the last unaware one, memory)

    # ---- the receiving thread --------------------------------------------------------------------------------------

    def put(self, lane: Lane, task: LaneTask) -> None:
        """Queues a task, and puts promises of its outputs into the store."""
        for ref, promise in (*task.outs, *task.writes):
            if ref:
                self.entries[ref] = promise
        if task.writes and self.store.sending:
            self.store.wait_for_sends([])
            task.sends = list(self.store.sending)
        lane.put(task)

    def drain(self) -> None:
        """Writes the results of lanes into the store."""
        done = self.done()  # read first: a task that ends from here on finds the taints still there
        entries = self.entries
        while self._arrived:
            ref, later = self._arrived.popleft()
            if entries.get(ref) is later:
                value = later.result(partial(self.node.report_failure, "transfer"))
                if isinstance(value, torch.Tensor) and self._tainted:
                    value = self._tainted.get(memory(value), (value,))[0]
                if value is None:
                    del entries[ref]
                else:
                    entries[ref] = value
                self.store.pending.pop(ref, None)
        while self._spoiled:
            tensor, poison = self._spoiled.popleft()
            for ref in self.store.aliases(tensor):
                entries[ref] = poison
            self._taints.append((self.node.seq, memory(tensor)))
        while self._taints and self._taints[0][0] <= done:
            _, key = self._taints.popleft()
            if not any(key == other for _, other in self._taints):
                self._tainted.pop(key, None)

    def done(self) -> int:
        """Returns how many commands are done for good: any later failure is that of another command."""
        done = self.node.seq  # read first: a command is queued before ``seq`` goes on
        for lane in self._all:
            with contextlib.suppress(IndexError):  # it has become idle
                done = min(done, lane.order[0].seq)
        return done

    def wait_for(self, lanes: Iterable[Lane]) -> None:
        """Waits until these lanes have done all that is queued on them."""
        for mark in [self.mark(lane) for lane in lanes if lane.order]:
            mark.wait()
        self.drain()

    def mark(self, lane: Lane) -> Mark:
        """Queues a mark that is reached when ``lane`` has done all that is queued on it."""
        mark = Mark()
        self.put(
            lane, LaneTask(self.node.seq, "Mark", lambda values: mark.reach(), spoil=lambda _: mark.reach(), over=True)
        )
        return mark

    def when_done(self, then: Callable[[], None]) -> None:
        """Calls ``then`` when all that was issued so far is done, transfers too; scheduling goes on meanwhile."""
        pending = list(self.store.pending.values())
        tell = partial(self.report_failure, self.node.seq, "transfer")

        def finish() -> None:
            for arrived in pending:
                arrived.result(tell)  # reports a failure
            then()

        sends = [transfer for _, transfer in self.store.sending]
        when_all([*map(self.mark, self.busy()), *(p.transfer for p in pending), *sends], finish)

    def close(self) -> None:
        """Drops the queued tasks, and whoever waits for one goes on. Transfers are the channel's to end."""
        self.closed = True
        self.node.take_over = in_order
        for lane in self._all:
            lane.end()

    def join(self, timeout: float) -> None:
        """Waits for the lanes' threads, ``timeout`` seconds for each."""
        for lane in self._all:
            lane.join(timeout)

    def lane(self, name: str) -> Lane:
        """Makes a lane. ``name`` is for its thread."""
        return self._add(Lane(f"{self.node.rank}-{name}", self.perform, self._after))

    def cuda_lane(self, name: str, device: torch.device, priority: int) -> Lane:
        """Makes a lane that issues to a CUDA stream."""
        return self._add(cuda_lane.CudaLane(device, priority, f"{self.node.rank}-{name}", self.perform, self._after))

    def _add(self, lane: Lane) -> Lane:
        self._all = [
            *(old for old in self._all if old.order or not old.ended),
            lane,
        ]  # a new list, for other threads iterate over the old one
        return lane

    def busy(self) -> list[Lane]:
        """Returns the lanes that have something to do."""
        return [lane for lane in self._all if lane.order]

    def viewed(self) -> set[int]:
        """Returns the ids of entries of which tasks have still to make views, and the keys of their memory."""
        tasks = [task for lane in self.busy() for task in list(lane.order) if task.views]
        entries = [entry for task in tasks for entry in task.reads.values()]
        return {*map(id, entries), *[memory(tensor) for tensor in map(made, entries) if tensor is not None]}

    # ---- any thread ------------------------------------------------------------------------------------------------

    def perform(self, lane: Lane, task: LaneTask) -> None:
        """Does a task, and tells those who observe commands of it. Raises nothing."""
        seam = self.node.seam
        if not seam.observed or task.over:
            self._perform(lane, task)
            return
        now, rank, stream = seam.clock.now, self.node.rank, stream_of(lane)
        began = now()
        begun = CommandBegun(began, rank, stream, task.seq, task.name, None)
        seam.commands.notify(begun)
        seam.timed.notify(begun)
        self._perform(lane, task)
        done = CommandDone(now(), began, rank, stream, task.seq, task.name, None)
        seam.commands.notify(done)
        seam.timed.notify(done)

    def _perform(self, lane: Lane, task: LaneTask) -> None:
        """Does a task: waits for its operands, runs it, keeps its promises. Raises nothing."""
        poison: Poison | None = None
        values = lane.values
        tell = partial(self.report_failure, task.seq, task.name)
        results: Sequence[Value | None] = ()
        try:
            if self.closed:
                raise _Closed
            poison = self._gather(task, values, partial(self.report_failure, task.seq, "transfer"))
            for wait in task.waits:
                cuda_lane.wait(lane, wait)
            if poison is None and task.waits and self._tainted:  # meanwhile, by what this task has waited for
                poison = self._spoilt(values)
            if poison is None:
                if task.sends:
                    touched = {memory(values[ref]) for ref, _ in task.writes}
                    for entry, transfer in task.sends:
                        release(entry, transfer, touched)
                results = self._run(lane, task, values)
                if len(results) != len(task.outs):
                    raise ProtocolError(f"{task.name} gave {len(results)} tensors, not the {len(task.outs)} expected")
        except _Closed:
            poison = Poison(self.node.rank, task.seq)
        except PoisonedError as e:
            poison = Poison(e.rank, e.seq)
        except Exception as e:
            poison = tell(e)
        task.over = True  # before anybody hears of it
        if poison is None:
            for (ref, promise), value in zip(task.outs, results, strict=True):
                promise.keep(value)
                self._arrive(ref, promise)
            for ref, promise in task.writes:
                promise.keep(values[ref])
                self._arrive(ref, promise)
        else:
            self._spoil(task, values, poison)
        values.clear()

    def _arrive(self, ref: int, later: Pending | Promise) -> None:
        """Has the store take a value, unless that was freed meanwhile: then it goes as soon as no task needs it. (What
        waits here is taken when the next command comes, and a node may have none for a while.)"""
        if self.entries.get(ref) is later:
            self._arrived.append((ref, later))

    def _run(self, lane: Lane, task: LaneTask, values: Values) -> Sequence[Value | None]:
        if not self.cuda:
            return task.run(values) or ()
        results: Sequence[Value | None] = ()
        with cuda_lane.on(
            lane, _tensors(values.values()), lambda: [*results, *(values[ref] for ref, _ in task.writes)]
        ):
            results = task.run(values) or ()
        return results

    def _gather(self, task: LaneTask, values: Values, tell: Callable[[Exception], Poison]) -> Poison | None:
        """Waits for a task's operands, and puts them into ``values``; returns the poison among them, if any."""
        read: list[Poison] = []
        for ref, entry in task.reads.items():
            value: Any = entry
            if isinstance(entry, Later):
                value = entry.result(tell)
                if isinstance(entry, Pending):
                    self._arrive(ref, entry)
            elif isinstance(entry, Unmade):
                raise NotReplayed
            elif isinstance(entry, Outgrown):
                raise entry.error()
            if isinstance(value, Poison):
                read.append(value)
            values[ref] = value
        found = self._spoilt(values) if self._tainted else None
        return earliest(read if found is None else [*read, found])

    def _spoilt(self, values: Values) -> Poison | None:
        """Replaces the operands that a failed task should have written by its poison; returns it, if there are any."""
        read: list[Poison] = []
        for ref, value in values.items():
            tainted = self._tainted.get(memory(value)) if isinstance(value, torch.Tensor) else None
            if tainted is not None:
                values[ref] = tainted[0]
                read.append(tainted[0])
        return earliest(read)

    def _spoil(self, task: LaneTask, values: Values, poison: Poison) -> None:
        for ref, _ in () if task.keeps else task.writes:
            target = values.get(ref)
            if isinstance(target, torch.Tensor):
                self._tainted[memory(target)] = (poison, target)
                self._spoiled.append((target, poison))
        kept = values if task.keeps else {}
        for ref, promise in (*task.outs, *task.writes):
            promise.keep(kept.get(ref, poison))
            self._arrive(ref, promise)
        if task.spoil is not None:
            try:
                task.spoil(poison)
            except Exception as e:
                if not self.closed:
                    self.report_failure(task.seq, task.name, e)

    def report_failure(self, seq: int, op: str, error: Exception) -> Poison:
        """Reports to the master that command ``seq`` has failed."""
        return self.node.report_failure(op, error, seq)

    def _after(self, lane: Lane) -> None:
        """Counts a task that the lane has done, and lets the node report now and then."""
        lane.count += 1
        if not lane.order or lane.count % OFTEN == 0:
            self.node.progress()


def stream_of(lane: Lane) -> str:
    """Returns what observers are told of as the stream: "default", the ref of a stream of the script's, "collective",
    or "to-1", which sends to node 1."""
    return lane.name.partition("-")[2]


def _tensors(operands: Iterable[Any]) -> Iterator[Any]:
    """Yields the operands of a task, and of what a function has returned its tensors."""
    for operand in operands:
        yield from operand.tensors if isinstance(operand, Outcome) else (operand,)


class _Closed(Exception):
    pass
