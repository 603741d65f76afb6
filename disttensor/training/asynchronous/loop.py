"""The loop of asynchronous training: tasks that wait for works, in the order in which these end.

A task is a generator. It yields a list of Works and Tasks to wait for, or MEET to wait for all other workers.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator
from typing import Any

from ...futures import Work
from ...futures.work import UnderWay
from .workers import Worker

Steps = Generator[Any, None, None]


class Meet:
    """Waits for all workers that are still at work."""


MEET = Meet()


class GeneratorTask:
    """A generator that goes on when what it waits for has ended."""

    def __init__(self, steps: Steps, worker: Worker | None) -> None:
        self.steps, self.worker = steps, worker
        self.done = False
        self.wants: list[Any] = []  #: what it waits for, as it has yielded it
        self.left = 0  #: how many of these have not ended
        self.meets = False


class Loop:
    """Runs tasks until all are done. ``failed(task, error)`` says whether an error is the end of its worker only."""

    def __init__(
        self,
        seed: int | None,
        failed: Callable[[GeneratorTask, Exception], bool],
        meet: Callable[[list[Worker]], Steps],
    ) -> None:
        self._random = None if seed is None else random.Random(seed)
        self._failed, self._meet = failed, meet
        self._tasks: list[GeneratorTask] = []
        self._waiters: dict[Any, list[GeneratorTask]] = {}
        self._under_way = UnderWay[Work[Any]]()
        self._ready: list[GeneratorTask] = []
        self._meeting: GeneratorTask | None = None
        self.gate: Callable[[Worker], bool] = lambda worker: True  #: whether a worker may begin its next step
        self._gated: list[GeneratorTask] = []

    def spawn(self, steps: Steps, worker: Worker | None) -> GeneratorTask:
        """Begins a task."""
        task = GeneratorTask(steps, worker)
        self._tasks.append(task)
        self._ready.append(task)
        return task

    def run(self) -> None:
        """Runs until all tasks are done. Raises what a task raises that ``failed`` does not take."""
        while self._tasks:
            while self._ready:
                self._advance(self._ready.pop(0))
            self._open_gate()
            self._begin_meeting()
            if self._ready:
                continue
            if self._tasks:
                self._wake_waiters(self._next())

    def drop_worker(self, worker: Worker) -> None:
        """Ends all tasks of a worker."""
        for task in [task for task in self._tasks if task.worker is worker]:
            task.steps.close()
            self._end_task(task)

    def _next(self) -> Any:
        if self._random is None:
            return self._under_way.next()
        works = [w for task in self._tasks for w in task.wants if isinstance(w, Work) and w in self._waiters]
        work = self._random.choice(works)
        work._await_end(None)
        return work

    def _wake_waiters(self, thing: Any) -> None:
        for task in self._waiters.pop(thing, []):
            task.left -= 1
            if not task.left and not task.done:
                self._ready.append(task)

    def _end_task(self, task: GeneratorTask) -> None:
        task.done = True
        if task in self._tasks:
            self._tasks.remove(task)
        for there in (self._ready, self._gated):
            if task in there:
                there.remove(task)
        self._wake_waiters(task)

    def _advance(self, task: GeneratorTask) -> None:
        wants, task.wants = task.wants, []
        try:
            try:
                for work in wants:
                    if isinstance(work, Work):
                        work.wait()
            except Exception as error:
                wanted = task.steps.throw(error)
            else:
                wanted = next(task.steps)
        except StopIteration:
            self._end_task(task)
            return
        except Exception as error:
            self._end_task(task)
            if not self._failed(task, error):
                raise
            return
        if isinstance(wanted, Meet):
            task.meets = True
        elif wanted is None:
            self._gated.append(task)
        else:
            self._wait(task, wanted)

    def _wait(self, task: GeneratorTask, wanted: list[Any]) -> None:
        task.wants = wanted
        for thing in wanted:
            if isinstance(thing, GeneratorTask) and thing.done:
                continue
            task.left += 1
            if isinstance(thing, Work) and self._random is None and thing not in self._waiters:
                self._under_way.add(thing)
            self._waiters.setdefault(thing, []).append(task)
        if not task.left:
            self._ready.append(task)

    def _open_gate(self) -> None:
        opened = [task for task in self._gated if task.worker is not None and self.gate(task.worker)]
        self._gated = [task for task in self._gated if task not in opened]
        self._ready += opened

    def _begin_meeting(self) -> None:
        """Has the workers exchange once all that are at work wait for it."""
        there = [task for task in self._tasks if task.meets]
        mains = {id(task.worker) for task in self._tasks if task.worker is not None}
        if not there or self._ready or self._gated or len(there) < len(mains):
            return
        if self._meeting is not None and not self._meeting.done:
            return
        workers = sorted((task.worker for task in there if task.worker is not None), key=lambda w: w.index)

        def meeting() -> Steps:
            yield from self._meet(workers)
            for task in there:
                if not task.done:
                    task.meets = False
                    self._ready.append(task)

        self._meeting = self.spawn(meeting(), None)
