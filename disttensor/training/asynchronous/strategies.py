"""Strategies: what workers take from each other, or from a server, and when.

A strategy is asked before and after each step of each worker. It issues operations, and yields what the worker has to
wait for: a list of Works and tasks, or MEET.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Literal, Self

import torch

from ...runtime.process.renamed import old_methods
from ...runtime.process.spelling import shown
from ...runtime.protocol.errors import NodeLost
from .arriving import made
from .events import TrainingEvent
from .loop import MEET, GeneratorTask, Loop, Steps
from .meeting import begin_alike, mean_of_buffers, summed
from .schedule import EVERY_TEN, Schedule
from .server import ParameterServer, put
from .workers import Local, Update, Worker, local_of, of_first

Buffers = Literal["own", "mean"]


class Strategy:
    """Workers that have nothing to do with each other: what other strategies begin from.

    ``start``, ``before`` and ``after`` are generators, which yield lists of Works to wait for, ``self.meet`` to wait
    for the other workers, after which ``together`` is called once for all, or nothing. ``self.log`` records an event.

    Attributes:
        buffers: what becomes of the buffers of modules, such as BatchNorm's statistics. "own": each worker keeps its
            own. "mean": they become the mean of all workers', of integers those of the first, where workers meet, and
            at the end of ``drive``.
        server: the server, None without.
        served: whether it has one.
    """

    meet = MEET
    server: Any = None
    served = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        old_methods(Strategy, cls, {"begin": "begin_training", "forget": "drop_workers"})

    def __init__(self, schedule: Schedule, local: Local, buffers: Buffers = "own") -> None:
        what = type(self).__name__
        self.schedule, self._local = Schedule(*schedule).checked(what), local_of(local, what)
        if buffers not in ("own", "mean"):
            raise ValueError(f"{what}: buffers is 'own' or 'mean', not {shown(buffers)}")
        self.buffers: Buffers = buffers
        self.drop_workers()

    def drop_workers(self) -> None:
        """Drops what it knows of workers: each ``drive`` begins anew."""
        self._updates: dict[int, Update] = {}

    def bare(self) -> Self:
        """Returns a copy that knows no workers and no server."""
        found = copy.copy(self)
        found.server = found._loop = found._log = None  # type: ignore[assignment]
        found.drop_workers()
        return found

    def begin_training(self, loop: Loop, workers: Sequence[Worker], log: Callable[[TrainingEvent], None]) -> None:
        """Called once, before the first step."""
        self.drop_workers()
        self._loop, self._log, self._count = loop, log, len(workers)
        self._updates = {worker.index: Update(worker, self._local) for worker in workers}

    def log(self, kind: str, worker: Worker | None, version: int = 0, workers: Sequence[Worker] = ()) -> None:
        """Records an event of a worker at its current step."""
        index, step = (-1, 0) if worker is None else (worker.index, worker.step)
        self._log(TrainingEvent(kind, index, step, version, tuple(each.index for each in workers)))

    def start(self, worker: Worker) -> Steps:
        """Gives a worker its first values."""
        yield []

    def before(self, worker: Worker) -> Steps:
        """Called before a worker's step."""
        yield []

    def after(self, worker: Worker) -> Steps:
        """Called when a worker's step has been issued: its gradients are there."""
        self._updates[worker.index]()
        self.log("step", worker)
        yield []

    def together(self, workers: Sequence[Worker]) -> Steps:
        """Called for workers that have met."""
        yield []

    def centre(self, worker: Worker) -> list[torch.Tensor] | None:
        """Returns the values that a worker has in common with others; None where there are none but its own."""
        found: list[torch.Tensor] | None = self.server.values() if self.served else None
        return found

    def mean_of_buffers(self, workers: Sequence[Worker]) -> Steps:
        """Gives workers the mean of their buffers, and of integers those of the first."""
        if next(workers[0].module.buffers(), None) is not None:
            yield from mean_of_buffers(workers)
            self.log("buffers", None, workers=workers)


class _Served(Strategy):
    """A strategy with a server."""

    served = True

    def __init__(self, server: ParameterServer, schedule: Schedule, local: Local, buffers: Buffers) -> None:
        super().__init__(schedule, local, buffers)
        if not isinstance(server, ParameterServer):
            raise TypeError(f"{type(self).__name__}: server is a ParameterServer, not {type(server).__name__}")
        self.server = server

    def start(self, worker: Worker) -> Steps:
        """Gives a worker its first values."""
        self._form = self.server._form
        self._form.check(worker.values(), f"worker {worker.index}")
        yield from self._pull(worker)
        self._write_pulled(worker)

    def _write_pulled(self, worker: Worker) -> None:
        put(worker.values(), self._pulled_values(worker), None)

    def _pull(self, worker: Worker) -> Steps:
        """Asks for the server's values, which have all that this worker has pushed."""
        if worker.pushing is not None:
            yield [worker.pushing]
        worker.pulled = self.server._begin_pull(worker.device)
        self.log("pull", worker, worker.pulled.version)

    def _pulled_values(self, worker: Worker) -> list[torch.Tensor]:
        pulled, worker.pulled = worker.pulled, None
        self.log("take", worker)
        values: list[torch.Tensor] = self.server._arrived(pulled)
        return values

    def _push(self, worker: Worker, values: Sequence[torch.Tensor], scale: float) -> None:
        """Pushes values in a task beside the worker, after its earlier ones."""
        flat = self.server._flat(of_first(values))
        self.log("send", worker)
        worker.pushing = self._loop.spawn(self._pushed(worker, worker.pushing, flat, scale), worker)

    def _pushed(self, worker: Worker, last: GeneratorTask | None, flat: list[torch.Tensor], scale: float) -> Steps:
        yield made(flat)
        sent = self.server._send(flat)
        yield sent.tokens()
        if last is not None:
            yield [last]
        self.log("push", worker, self.server._apply(sent, "add", scale))


class Downpour(_Served):
    """Downpour SGD (Dean et al. 2012): workers push what they have gathered, and take the server's values now and then.

    Args:
        server: begins with the values of all.
        schedule: at which steps a worker takes the server's values, before it computes.
        send_every: after how many steps a worker pushes.
        local: a learning rate: the worker pushes the sum of its gradients, by which the server goes ``-local`` times,
            as the worker does itself meanwhile. Or what makes an optimizer of parameters (Nesterov's momentum, for
            example), or None where ``step`` has one: the worker pushes the change of its values, and what it has not
            pushed yet when it takes the server's is put on top of these.
        buffers: "own", or "mean": at the end of ``drive`` workers have the mean of their buffers. A server has none.

    With one worker, ``every=1`` and ``send_every=1`` it is SGD, to the bit.
    """

    def __init__(
        self,
        server: ParameterServer,
        schedule: Schedule = EVERY_TEN,
        *,
        send_every: int = 1,
        local: Local,
        buffers: Buffers = "own",
    ) -> None:
        super().__init__(server, schedule, local, buffers)
        if isinstance(send_every, bool) or not isinstance(send_every, int) or send_every < 1:
            raise ValueError(f"Downpour: send_every is a number of steps from 1 on, not {shown(send_every)}")
        self.send_every = send_every

    def drop_workers(self) -> None:
        """Drops what it knows of workers."""
        super().drop_workers()
        self._sums: dict[int, list[torch.Tensor]] = {}
        self._from: dict[int, list[torch.Tensor]] = {}

    def start(self, worker: Worker) -> Steps:
        """Gives a worker its first values."""
        yield from super().start(worker)
        self._mark(worker)

    def before(self, worker: Worker) -> Steps:
        """Does what comes before a worker's step."""
        if self.schedule.asks(worker.step):
            yield from self._pull(worker)
        if self.schedule.takes(worker.step):
            if worker.pulled is None:  # a schedule whose first prefetch lies before the first step
                yield from self._pull(worker)
            changed: list[torch.Tensor] = []
            if self._rate is None:
                changed = [x - old for x, old in zip(worker.values(), self._from[worker.index], strict=True)]
            self._write_pulled(worker)
            self._mark(worker)
            for x, change in zip(worker.values(), changed, strict=False):
                x.add_(change)

    def after(self, worker: Worker) -> Steps:
        """Does what comes after a worker's step."""
        rate, index = self._rate, worker.index
        if rate is not None:
            gradients = worker.gradients()
            if index not in self._sums:
                self._sums[index] = [g.clone() for g in gradients]
            else:
                for total, gradient in zip(self._sums[index], gradients, strict=True):
                    total.add_(gradient)
        self._updates[index]()
        self.log("step", worker)
        if worker.step % self.send_every == 0:
            if rate is not None:
                self._push(worker, self._sums.pop(index), -rate)
            else:
                self._push(worker, [x - old for x, old in zip(worker.values(), self._from[index], strict=True)], 1.0)
                self._mark(worker)
        yield []

    @property
    def _rate(self) -> float | None:
        return float(self._local) if isinstance(self._local, (int, float)) else None

    def _mark(self, worker: Worker) -> None:
        """Remembers the values from which a change counts."""
        if self._rate is None:
            self._from[worker.index] = [x.clone() for x in worker.values()]


class EASGD(_Served):
    """Elastic averaging SGD (Zhang, Choromanska, LeCun 2015): workers and a centre pull at each other.

    At the steps of ``schedule`` a worker x and the centre c come nearer to each other, x by alpha * (c - x), c by
    alpha * (x - c), and the gradient is that at the x before. With ``alpha=None`` it is ``beta`` over the number of
    workers.

    Args:
        server: has the centre. None: each worker has a copy of it, and all meet at these steps (an all_reduce).
        schedule: the paper's period is ``every``.
        local: a learning rate, what makes an optimizer of parameters, or None where ``step`` has one.
        momentum: Nesterov's, of the paper's EAMSGD; ``local`` is a learning rate then.
        buffers: "own", or "mean": where all meet, and at the end of ``drive``, workers have the mean of their buffers.
    """

    def __init__(
        self,
        server: ParameterServer | None,
        schedule: Schedule = EVERY_TEN,
        *,
        beta: float = 0.9,
        alpha: float | None = None,
        momentum: float = 0.0,
        local: Local = None,
        buffers: Buffers = "own",
    ) -> None:
        if server is None:
            Strategy.__init__(self, schedule, local, buffers)
            self.served = False
            if self.schedule.prefetch:
                raise ValueError("EASGD: prefetch is for a server, and there is none")
        else:
            super().__init__(server, schedule, local, buffers)
        if momentum and not isinstance(local, (int, float)):
            raise ValueError(f"EASGD: with momentum={momentum} local is a learning rate, not {shown(local)}")
        self.beta, self._alpha, self.momentum = beta, alpha, momentum

    def drop_workers(self) -> None:
        """Drops what it knows of workers."""
        super().drop_workers()
        self.centres: dict[int, list[torch.Tensor]] = {}  #: without a server: each worker's copy of the centre
        self._pull_by: dict[int, list[torch.Tensor]] = {}
        self._speed: dict[int, list[torch.Tensor]] = {}
        self._plain: dict[int, list[torch.Tensor]] = {}

    @property
    def alpha(self) -> float:
        """The share of the difference by which both move."""
        return self.beta / self._count if self._alpha is None else self._alpha

    def begin_training(self, loop: Loop, workers: Sequence[Worker], log: Callable[[TrainingEvent], None]) -> None:
        """Gives all workers the same first values."""
        super().begin_training(loop, workers, log)
        if not self.served:
            begin_alike(workers)
            for worker in workers:
                with suppress(NodeLost):
                    self.centres[worker.index] = [x.clone() for x in worker.values()]

    def start(self, worker: Worker) -> Steps:
        """Gives a worker its first values."""
        if self.served:
            yield from super().start(worker)

    def before(self, worker: Worker) -> Steps:
        """Does what comes before a worker's step."""
        schedule, index = self.schedule, worker.index
        if self.served and schedule.asks(worker.step):
            yield from self._pull(worker)
        if schedule.takes(worker.step):
            if not self.served:
                yield self.meet
            else:
                if worker.pulled is None:
                    yield from self._pull(worker)
                self._pull_by[index] = self._apart(worker, self._pulled_values(worker))
                self._push(worker, self._pull_by[index], 1.0)
        if self.momentum:
            values = worker.values()
            self._plain[index] = [x.clone() for x in values]
            speed = self._speed.setdefault(index, [torch.zeros_like(x) for x in values])
            for x, v in zip(values, speed, strict=True):
                x.add_(v, alpha=self.momentum)

    def after(self, worker: Worker) -> Steps:
        """Does what comes after a worker's step."""
        index, values = worker.index, worker.values()
        if self.momentum:
            for x, plain in zip(values, self._plain.pop(index), strict=True):
                x.copy_(plain)
        for x, apart in zip(values, self._pull_by.pop(index, ()), strict=False):
            x.sub_(apart)
        if self.momentum:
            for x, v, gradient in zip(values, self._speed[index], worker.gradients(), strict=True):
                v.mul_(self.momentum).add_(gradient, alpha=-float(self._local))
                x.add_(v)
        else:
            self._updates[index]()
        self.log("step", worker)
        yield []

    def _apart(self, worker: Worker, centre: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [(x - c) * self.alpha for x, c in zip(worker.values(), centre, strict=True)]

    def together(self, workers: Sequence[Worker]) -> Steps:
        """Exchanges between workers that have met."""
        apart = [self._apart(worker, self.centres[worker.index]) for worker in workers]
        totals = yield from summed(workers, apart)
        for worker, mine, total in zip(workers, apart, totals, strict=True):
            self._pull_by[worker.index] = mine
            with suppress(NodeLost):  # its own task finds that out
                for c, change in zip(self.centres[worker.index], total, strict=True):
                    c.add_(change.to(c.device))
        self.log("meet", None, workers=workers)

    def centre(self, worker: Worker) -> list[torch.Tensor] | None:
        """Returns the centre's values, of a worker's copy where there is no server."""
        return super().centre(worker) if self.served else self.centres[worker.index]


class LocalSGD(Strategy):
    """Local SGD (Stich 2018): workers meet at the steps of ``schedule``, after these, and take the mean of their
    values.

    Args:
        schedule: ``every`` is the number of local steps.
        local: a learning rate, what makes an optimizer of parameters, or None where ``step`` has one.
        outer: what makes an optimizer of parameters. Then it is DiLoCo (Douillard et al. 2023): the values before less
            the mean are the gradient of a step of that optimizer, which each worker has, in the same state.
        buffers: "own", or "mean": where they meet, and at the end of ``drive``, workers have the mean of their buffers.
    """

    def __init__(
        self, schedule: Schedule = EVERY_TEN, *, local: Local = None, outer: Local = None, buffers: Buffers = "own"
    ) -> None:
        super().__init__(schedule, local, buffers)
        if self.schedule.prefetch:
            raise ValueError("LocalSGD: prefetch is for a server, and there is none")
        self._outer = local_of(outer, "LocalSGD: outer, as")

    def drop_workers(self) -> None:
        """Drops what it knows of workers."""
        super().drop_workers()
        self._shared: dict[int, list[torch.nn.Parameter]] = {}
        self._optimizers: dict[int, torch.optim.Optimizer] = {}

    def begin_training(self, loop: Loop, workers: Sequence[Worker], log: Callable[[TrainingEvent], None]) -> None:
        """Gives all workers the same first values."""
        super().begin_training(loop, workers, log)
        begin_alike(workers)
        if self._outer is not None:
            for worker in workers:
                make = self._outer if callable(self._outer) else _sgd(self._outer)
                with suppress(NodeLost):
                    shared = [torch.nn.Parameter(x.clone()) for x in worker.values()]
                    self._shared[worker.index], self._optimizers[worker.index] = shared, make(shared)

    def after(self, worker: Worker) -> Steps:
        """Does what comes after a worker's step."""
        self._updates[worker.index]()
        self.log("step", worker)
        if self.schedule.takes(worker.step):
            yield self.meet

    def together(self, workers: Sequence[Worker]) -> Steps:
        """Exchanges between workers that have met."""
        totals = yield from summed(workers, [worker.values() for worker in workers])
        for worker, total in zip(workers, totals, strict=True):
            with suppress(NodeLost):  # its own task finds that out
                self._apply_means(worker, [(t / len(workers)).to(worker.device) for t in total])
        self.log("meet", None, workers=workers)

    def _apply_means(self, worker: Worker, means: list[torch.Tensor]) -> None:
        if self._outer is not None:
            shared = self._shared[worker.index]
            for p, mean in zip(shared, means, strict=True):
                p.grad = p.detach() - mean
            self._optimizers[worker.index].step()
            means = [p.detach() for p in shared]
        put(worker.values(), means, None)


def _sgd(rate: float) -> Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]:
    return lambda parameters: torch.optim.SGD(parameters, lr=rate)
