"""A replay of asynchronous training: the strategy once more, on local tensors, in the order of recorded events.

Each worker is a generator as in ``drive``. The next event says whose goes on: the worker's own, its oldest push, or a
meeting; it runs until it has come to this event, and on to where it waits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from ...proxy.proxy import where_is
from ...runtime.protocol.errors import NodeLost
from .events import TrainingEvent
from .loop import Meet, Steps
from .server import add
from .strategies import EASGD, Strategy
from .values import Form, Tensors
from .workers import Worker


class LocalWorker(Worker):
    """A worker whose module is a local one."""

    def __init__(self, index: int, module: nn.Module) -> None:
        for name, p in module.named_parameters():
            if where_is(p) is not None:
                raise TypeError(f"replay: parameter {name!r} of module {index} is on {p.device}; a replay is local")
        super().__init__(index, module)

    def lost(self) -> NodeLost | None:
        """Returns None: a local worker is not lost."""
        return None

    def _nodes(self) -> tuple[int, ...]:
        return ()


class _Sent:
    """Values on their way, which are there at once."""

    def __init__(self, flat: Tensors, version: int = 0) -> None:
        self.flat, self.version = list(flat), version

    def tokens(self) -> list[Any]:
        return []


class LocalServer:
    """The values of a server, here."""

    def __init__(self, values: Any, version: int) -> None:
        self._form = Form(values, "replay")
        self._values, self._version = self._flat(values), version

    def _flat(self, values: Any) -> list[torch.Tensor]:
        return self._form.flat(self._form.check(values, "replay"))

    def _begin_pull(self, device: torch.device) -> _Sent:
        return _Sent([vector.clone() for vector in self._values], self._version)

    def _arrived(self, pulled: _Sent) -> list[torch.Tensor]:
        return self._form.unflat(pulled.flat)

    def _send(self, flat: Tensors) -> _Sent:
        return _Sent(flat)

    def _apply(self, sent: _Sent, rule: str, scale: float) -> int:
        for mine, value in zip(self._values, sent.flat, strict=True):
            add(mine, value, scale)
        self._version += 1
        return self._version

    def values(self) -> list[torch.Tensor]:
        """Returns the values as they are now."""
        return self._form.unflat(self._values)


class _Gone(Exception):
    """A worker has come to where it was lost."""


class LocalReplay:
    """One replay.

    Attributes:
        events: those that were come to, and the losses of workers.
        losses: of each worker, by step.
        steps: of each worker.
    """

    def __init__(
        self,
        recorded: Sequence[TrainingEvent],
        steps: Sequence[int],
        strategy: Strategy,
        modules: Sequence[nn.Module],
        step: Callable[[Worker, int], torch.Tensor | None],
        server: Any,
    ) -> None:
        self._recorded, self._wanted, self._step, self._strategy = recorded, steps, step, strategy.bare()
        self._workers = [LocalWorker(index, module) for index, module in enumerate(modules)]
        self.events: list[TrainingEvent] = []
        self.losses: list[list[float]] = [[] for _ in modules]
        self._left = [sum(e.worker == w.index and e.kind != "lost" for e in recorded) for w in self._workers]
        self._lost = {event.worker for event in recorded if event.kind == "lost"}
        self._pushes: dict[int, deque[Steps]] = {w.index: deque() for w in self._workers}
        self._given = None if server is None else Form(server, "replay").check(server, "replay")
        self._at: list[Any] = [None] * len(modules)  #: what each worker waits for
        if server is not None and not self._has_centre():
            raise ValueError(f"replay: {type(strategy).__name__} has no server, and no centre")
        if strategy.served:
            first = next((event.version for event in recorded if event.kind == "pull"), 0)
            values = modules[0] if server is None else server
            self._strategy.server = LocalServer(values, first)

    @property
    def steps(self) -> list[int]:
        return [worker.steps for worker in self._workers]

    def run(self) -> None:
        with torch.no_grad():
            self._strategy.begin_training(self, self._workers, self._on_event)  # type: ignore[arg-type]
            self._mains = [self._work(worker) for worker in self._workers]
            while len(self.events) < len(self._recorded):
                self._go_on(self._recorded[len(self.events)])
            self._finish()
            self._write_values()

    def spawn(self, steps: Steps, worker: Worker) -> Steps:
        """Notes a push: ``Loop.spawn``."""
        self._pushes[worker.index].append(steps)
        return steps

    def _go_on(self, event: TrainingEvent) -> None:
        """Has whoever it was come to an event."""
        count, tasks = len(self.events), self._pushes.get(event.worker)
        if event.kind == "lost":
            self.events.append(event)
        elif event.kind == "meet":
            for i in event.workers:
                while not isinstance(self._at[i], Meet):
                    self._advance(i)
            self._all(self._strategy.together([self._workers[i] for i in event.workers]))
        elif event.kind == "buffers":
            self._all(self._strategy.mean_of_buffers([self._workers[i] for i in event.workers]))
        elif event.kind == "push" and tasks:
            self._all(tasks.popleft())
        else:
            with suppress(_Gone):
                while len(self.events) == count:
                    self._advance(event.worker)
        if len(self.events) == count:
            raise ValueError(f"replay: event {count} is {event}, to which the strategy does not come")

    def _advance(self, index: int) -> None:
        self._at[index] = next(self._mains[index])

    def _all(self, steps: Steps) -> None:
        for _ in steps:
            pass

    def _finish(self) -> None:
        """Has workers end the steps that they have done."""
        for worker, wanted in zip(self._workers, self._wanted, strict=True):
            while worker.steps < wanted:
                self._advance(worker.index)

    def _on_event(self, event: TrainingEvent) -> None:
        """Called for each event that the strategy comes to."""
        count = len(self.events)
        if event.worker in self._lost and not self._left[event.worker]:
            raise _Gone
        wanted = self._recorded[count] if count < len(self._recorded) else None
        if wanted is not None and event.kind == "push":
            event = event._replace(step=wanted.step)  # whichever the worker was at meanwhile
        if event != wanted:
            raise ValueError(
                f"replay: event {count} is {wanted or 'the end'}, and the strategy comes to {event}: are these the "
                "first values and the step of that run, and did nothing else push to its server?"
            )
        self.events.append(event)
        if event.worker >= 0:
            self._left[event.worker] -= 1

    def _work(self, worker: Worker) -> Generator[Any, None, None]:
        strategy = self._strategy
        yield from strategy.start(worker)
        while True:
            yield None
            worker.step = worker.steps + 1
            yield from strategy.before(worker)
            worker.module.zero_grad()
            with torch.enable_grad():
                loss = self._step(worker, worker.step)
            yield from strategy.after(worker)
            if loss is not None:
                self.losses[worker.index].append(float(loss.detach()))
            worker.steps += 1

    def _has_centre(self) -> bool:
        return self._strategy.served or isinstance(self._strategy, EASGD)

    def _write_values(self) -> None:
        """Writes the server's values, or the centre's, into what was given for them."""
        left = [worker for worker in self._workers if worker.index not in self._lost]
        if self._given is not None and left:
            for mine, value in zip(self._given, self._strategy.centre(left[0]) or (), strict=True):
                mine.copy_(value)
