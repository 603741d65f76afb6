"""``drive``: workers that do their steps beside each other, each as fast as it can."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from ...errors.argument_checks import seconds as check_seconds
from ...futures import fetch
from ...runtime.process.spelling import shown
from ...runtime.protocol.errors import ChannelError, NodeLost
from ...session import current
from .events import TrainingEvent
from .history import History
from .loop import GeneratorTask, Loop, Steps
from .strategies import Strategy
from .workers import Worker, of_first

_log = logging.getLogger("disttensor")

#: The most errors for which a node is asked after a loss.
ERRORS = 1000


def drive(
    workers: Sequence[nn.Module],
    step: Callable[[Worker, int], torch.Tensor | None],
    strategy: Strategy,
    *,
    steps: int | None = None,
    seconds: float | None = None,
    max_staleness: int | None = None,
    seed: int | None = None,
) -> History:
    """Trains workers that do not wait for each other, and returns what happened. Waits for the end.

    Args:
        workers: modules of one architecture, each on a node, over several, or on a mesh (``dt.DataParallel``, of any
            number of nodes), which is one worker.
        step: ``step(worker, t)`` has ``worker.module`` compute the gradients of this worker's t-th step, from 1 on, and
            returns the loss. It is called here, for one worker after the other, and had better not wait.
            Gradients are zeroed before.
        strategy: what workers take from each other: Downpour, EASGD, LocalSGD.
        steps: the steps of each worker.
        seconds: no worker begins a step after so many seconds. One of the two is needed.
        max_staleness: a worker begins no step while it is more than so many steps ahead of the slowest, whose steps
            count once what it has pushed has changed the server. 0: lock step.
        seed: the order is drawn from this seed, and not the one in which workers are ready: the same values each time,
            but workers wait for each other.

    A worker that loses a node is left out from then on: it is in ``history.lost``, and a warning of the log
    ``disttensor`` tells. The others go on; if none is left, or a node of the server is lost, it raises NodeLost. What
    an operation raises on a worker is raised here. Raises TypeError, ValueError for other arguments.

        server = dt.training.ParameterServer(model)
        workers = [copy.deepcopy(model).to(f"node:{k}") for k in range(3)]
        history = dt.training.drive(workers, step, Downpour(server, Schedule(every=5), local=0.1), steps=100)
    """
    if steps is None and seconds is None:
        raise TypeError("drive: how long? steps=, seconds=, or both")
    for name, number in (("steps", steps), ("max_staleness", max_staleness)):
        if number is not None and (isinstance(number, bool) or not isinstance(number, int) or number < 0):
            raise ValueError(f"drive: {name} is a number from 0 on, not {shown(number)}")
    if seconds is not None:
        check_seconds("seconds", seconds)
    if not isinstance(strategy, Strategy):
        raise TypeError(f"drive: strategy is a Strategy, not {type(strategy).__name__}")
    those = [Worker(index, module) for index, module in enumerate(workers)]
    if not those:
        raise ValueError("drive: there are no workers")
    return _Drive(those, step, strategy, steps, seconds, max_staleness, seed).run()


class _Drive:
    def __init__(
        self,
        workers: list[Worker],
        step: Callable[[Worker, int], torch.Tensor | None],
        strategy: Strategy,
        steps: int | None,
        seconds: float | None,
        max_staleness: int | None,
        seed: int | None,
    ) -> None:
        self._workers, self._step, self._strategy, self._most = workers, step, strategy, steps
        self._deadline = None if seconds is None else time.monotonic() + seconds
        self._ahead = max_staleness
        self._at_work = list(workers)
        self._history = History(losses=[[] for _ in workers], steps=[0] * len(workers), strategy=strategy.bare())
        self._loop = Loop(seed, self._failed, self._meet)
        self._session: Any = current.session()
        if max_staleness is not None:
            self._loop.gate = self._may_begin

    def run(self) -> History:
        with torch.no_grad():
            self._strategy.begin_training(self._loop, self._workers, self._history.events.append)
            for worker in self._workers:
                self._loop.spawn(self._work(worker), worker)
            self._loop.run()
            self._loop.spawn(self._settle_buffers(self._workers), None)
            self._loop.run()
            self._ask_the_left()
        if len(self._history.lost) == len(self._workers):
            raise next(iter(self._history.lost.values()))
        return self._history

    def _ask_the_left(self) -> None:
        """Asks nodes for the errors that losses have given them, such as transfers: the losses are told already."""
        lost = [error.rank for error in self._history.lost.values() if isinstance(error, NodeLost)]
        for node in range(current.node_count()) if lost else ():
            for _ in range(ERRORS):
                try:
                    self._session.synchronize(node, None)
                    break
                except NodeLost as error:
                    if error.rank == node:
                        break
                    if error.rank not in lost:
                        raise
                except ChannelError:
                    continue  # a transfer with a lost one

    def _may_begin(self, worker: Worker) -> bool:
        assert self._ahead is not None
        return worker.steps - min(each.steps for each in self._at_work) <= self._ahead

    def _work(self, worker: Worker) -> Steps:
        strategy, history = self._strategy, self._history
        yield from strategy.start(worker)
        while self._most is None or worker.steps < self._most:
            yield None  # the gate
            if self._deadline is not None and time.monotonic() >= self._deadline:
                break
            worker.step = worker.steps + 1
            yield from strategy.before(worker)
            worker.module.zero_grad()
            with torch.enable_grad():
                loss = self._step(worker, worker.step)
            yield from strategy.after(worker)
            token = worker.values()[0].reshape(-1)[:1] if loss is None else loss.detach()
            work = fetch(of_first([token])[0])
            yield [work]
            if loss is not None:
                history.losses[worker.index].append(float(work.result()))
            if self._ahead is not None and worker.pushing is not None:
                yield [worker.pushing]
            worker.steps += 1
            history.steps[worker.index] = worker.steps
        self._at_work.remove(worker)

    def _meet(self, workers: list[Worker]) -> Steps:
        yield from self._exchange(self._strategy.together, workers)
        yield from self._settle_buffers(workers)

    def _settle_buffers(self, workers: list[Worker]) -> Steps:
        if self._strategy.buffers == "mean":
            left = [worker for worker in workers if worker.index not in self._history.lost]
            yield from self._exchange(self._strategy.mean_of_buffers, left)

    def _exchange(self, together: Callable[[list[Worker]], Steps], workers: list[Worker]) -> Steps:
        """Has workers exchange; once more without those that are lost meanwhile."""
        while workers:
            try:
                yield from together(workers)
                return
            except Exception as error:
                lost = [worker for worker in workers if self._loss(worker, error) is not None]
                if not lost:
                    raise
                for worker in lost:
                    self._lose(worker, error)
                workers = [worker for worker in workers if worker not in lost]

    def _failed(self, task: GeneratorTask, error: Exception) -> bool:
        if task.worker is None or self._loss(task.worker, error) is None:
            return False
        self._lose(task.worker, error)
        return True

    def _loss(self, worker: Worker, error: Exception) -> Exception | None:
        """Returns the loss of a worker's node, if that may be why something has failed."""
        if isinstance(error, NodeLost) and error.rank in worker.nodes:
            return error
        return worker.lost()

    def _lose(self, worker: Worker, error: Exception) -> None:
        found = self._loss(worker, error) or error
        if worker.index in self._history.lost:
            return
        self._history.lost[worker.index] = found
        self._history.events.append(TrainingEvent("lost", worker.index, worker.step))
        _log.warning("drive: worker %d is lost in step %d, the others go on: %s", worker.index, worker.step, found)
        if worker in self._at_work:
            self._at_work.remove(worker)
        self._loop.drop_worker(worker)
