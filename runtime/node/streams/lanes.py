"""The lanes of a node: their tasks done, what they made put into the store.

Only the thread that receives writes the store. Lanes post what they made, and what they spoiled, on deques that it
drains, so that a Free that came meanwhile wins.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch

from ...channel.base import Transfer
from ...protocol.errors import PoisonedError, ProtocolError
from ...protocol.failure_ids import Poison, earliest
from ..state import NodeState
from ..store import Entry, Later, NotReplayed, Pending, Promise, Unmade, Value, made, memory, wait_quietly
from . import cuda_lane as cuda
from .lane import Lane, Mark, Task, Values, when_all

#: Tasks of a lane between two looks at whether the master should hear of it.
OFTEN = 64


class Lanes:
    """The lanes of one node."""

    def __init__(self, node: NodeState) -> None:
        self.node = node
        self.store = node.store
        self.entries = node.store.entries
        self.closed = False
        self.cuda = node.cuda
        self._all: list[Lane] = []
        #: what has come to be since the store was last written
        self._arrived: deque[tuple[int, Pending | Promise]] = deque()
        self._spoiled: deque[tuple[torch.Tensor, Poison]] = deque()
        #: memory that a failed task should have written, while a task may still be about to read it unaware
        self._tainted: dict[int, tuple[Poison, torch.Tensor]] = {}
        self._taints: deque[tuple[int, int]] = deque()  #: (the command after the last unaware one, memory)

    # ---- the receiving thread --------------------------------------------------------------------------------------

    def put(self, lane: Lane, task: Task) -> None:
        """Queues a task and promises what it will put out."""
        for ref, promise in (*task.outs, *task.writes):
            if ref:
                self.entries[ref] = promise
        if task.writes and self.store.sending:
            self.store.settle([])
            task.sends = list(self.store.sending)
        lane.put(task)

    def drain(self) -> None:
        """Writes what lanes have done into the store."""
        done = self.done()  # first: what ends from here on finds the taints still there
        entries = self.entries
        while self._arrived:
            ref, later = self._arrived.popleft()
            if entries.get(ref) is later:
                value = later.result(partial(self.node.tell, "transfer"))
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
        """How many commands are done for good: whatever fails later is one of the others."""
        done = self.node.seq  # first: a command is queued before that goes on
        for lane in self._all:
            with contextlib.suppress(IndexError):  # it has become idle
                done = min(done, lane.order[0].seq)
        return done

    def wait_for(self, lanes: Iterable[Lane]) -> None:
        """Waits until these have done what they have got."""
        for mark in [self.mark(lane) for lane in lanes if lane.order]:
            mark.wait()
        self.drain()

    def mark(self, lane: Lane) -> Mark:
        """Reached when ``lane`` has done what it has got."""
        mark = Mark()
        self.put(lane, Task(self.node.seq, "Mark", lambda values: mark.reach(), spoil=lambda _: mark.reach()))
        return mark

    def when_done(self, then: Callable[[], None]) -> None:
        """Calls ``then`` when all that was issued so far is done, transfers too; dealing out goes on."""
        pending = list(self.store.pending.values())
        tell = partial(self.tell, self.node.seq, "transfer")

        def finish() -> None:
            for arrived in pending:
                arrived.result(tell)  # that it failed, perhaps
            then()

        sends = [transfer for _, transfer in self.store.sending]
        when_all([*map(self.mark, self.busy()), *(p.transfer for p in pending), *sends], finish)

    def close(self) -> None:
        """What is queued is not done any more; whoever waits for it goes on. Transfers are the channel's to end."""
        self.closed = True
        for lane in self._all:
            lane.end()

    def join(self, timeout: float) -> None:
        """Waits for the threads, as long for each."""
        for lane in self._all:
            lane.join(timeout)

    def lane(self, name: str) -> Lane:
        """A new lane. ``name`` is for its thread."""
        return self._add(Lane(f"{self.node.rank}-{name}", self.perform, self._after))

    def cuda_lane(self, name: str, device: torch.device, priority: int) -> Lane:
        """A new lane that issues to a CUDA stream."""
        return self._add(cuda.CudaLane(device, priority, f"{self.node.rank}-{name}", self.perform, self._after))

    def _add(self, lane: Lane) -> Lane:
        self._all = [
            *(old for old in self._all if old.order or not old.ended),
            lane,
        ]  # anew, for other threads look through it
        return lane

    def busy(self) -> list[Lane]:
        """Those that have something to do."""
        return [lane for lane in self._all if lane.order]

    # ---- any thread ------------------------------------------------------------------------------------------------

    def perform(self, lane: Lane, task: Task) -> None:
        """Does a task: waits for what it reads, runs it, keeps its promises. Raises nothing."""
        poison: Poison | None = None
        values = lane.values
        tell = partial(self.tell, task.seq, task.name)
        results: Sequence[Value | None] = ()
        try:
            if self.closed:
                raise _Closed
            poison = self._gather(task, values, partial(self.tell, task.seq, "transfer"))
            for wait in task.waits:
                cuda.wait(lane, wait)
            if poison is None:
                for entry, transfer in task.sends:
                    self.settle(entry, transfer, [values[ref] for ref, _ in task.writes])
                results = self._run(lane, task, values)
                if len(results) != len(task.outs):
                    raise ProtocolError(f"{task.name} gave {len(results)} tensors, not the {len(task.outs)} expected")
        except _Closed:
            poison = Poison(self.node.rank, task.seq)
        except PoisonedError as e:
            poison = Poison(e.rank, e.seq)
        except Exception as e:
            poison = tell(e)
        if poison is None:
            for (ref, promise), value in zip(task.outs, results, strict=True):
                promise.keep(value)
                self._arrived.append((ref, promise))
            for ref, promise in task.writes:
                promise.keep(values[ref])
                self._arrived.append((ref, promise))
        else:
            self._spoil(task, values, poison)
        values.clear()

    def _run(self, lane: Lane, task: Task, values: Values) -> Sequence[Value | None]:
        if not self.cuda:
            return task.run(values) or ()
        results: Sequence[Value | None] = ()
        with cuda.on(lane, iter(values.values()), lambda: [*results, *(values[ref] for ref, _ in task.writes)]):
            results = task.run(values) or ()
        return results

    def _gather(self, task: Task, values: Values, tell: Callable[[Exception], Poison]) -> Poison | None:
        """Waits for what a task reads; gives the poison that is among it."""
        read: list[Poison] = []
        for ref, entry in task.reads.items():
            value: Any = entry
            if isinstance(entry, Later):
                value = entry.result(tell)
                if isinstance(entry, Pending):
                    self._arrived.append((ref, entry))
            elif isinstance(entry, Unmade):
                raise NotReplayed
            if self._tainted and isinstance(value, torch.Tensor):
                value = self._tainted.get(memory(value), (value,))[0]
            if isinstance(value, Poison):
                read.append(value)
            values[ref] = value
        return earliest(read)

    @staticmethod
    def settle(entry: Entry, transfer: Transfer, targets: Sequence[torch.Tensor]) -> None:
        """Waits for a send, if it is of memory that is about to change."""
        tensor = made(entry)
        if tensor is not None and memory(tensor) in set(map(memory, targets)):
            wait_quietly(transfer)

    def _spoil(self, task: Task, values: Values, poison: Poison) -> None:
        for ref, _ in task.writes:
            target = values.get(ref)
            if isinstance(target, torch.Tensor):
                self._tainted[memory(target)] = (poison, target)
                self._spoiled.append((target, poison))
        for ref, promise in (*task.outs, *task.writes):
            promise.keep(poison)
            self._arrived.append((ref, promise))
        if task.spoil is not None:
            try:
                task.spoil(poison)
            except Exception as e:
                if not self.closed:
                    self.tell(task.seq, task.name, e)

    def tell(self, seq: int, op: str, error: Exception) -> Poison:
        """Tells the master that command ``seq`` has failed."""
        return self.node.tell(op, error, seq)

    def _after(self, lane: Lane) -> None:
        """A lane has done a task."""
        lane.count += 1
        if not lane.order or lane.count % OFTEN == 0:
            self.node.progress()


class _Closed(Exception):
    pass
