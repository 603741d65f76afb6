"""The history of asynchronous training: what happened, in the order in which it took effect."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from .events import TrainingEvent
from .replaying import LocalReplay
from .strategies import Strategy
from .workers import Worker


@dataclass
class History:
    """The events of one ``drive``, with which an ordinary program in one process comes to the same values.

    Attributes:
        events: in the order in which they took effect.
        losses: of each worker, by step: what ``step`` returned (of a mesh its first rank's).
        steps: how many steps each worker has done.
        lost: workers that were lost, with the error of each.
        strategy: the strategy, with the arguments that it had, and without its server.
    """

    events: list[TrainingEvent] = field(default_factory=list)
    losses: list[list[float]] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    lost: dict[int, Exception] = field(default_factory=dict)
    strategy: Strategy | None = field(default=None, repr=False, compare=False)

    def staleness(self) -> list[int]:
        """Returns for each push of a worker that had pulled how many pushes the server had from others meanwhile."""
        pulled: dict[int, int] = {}
        own: dict[int, int] = {}
        found = []
        for event in self.events:
            if event.kind == "pull":
                pulled[event.worker], own[event.worker] = event.version, 0
            elif event.kind == "push" and event.worker in pulled:
                own[event.worker] += 1
                found.append(event.version - pulled[event.worker] - own[event.worker])
        return found

    def replay(
        self, workers: Sequence[nn.Module], step: Callable[[Worker, int], torch.Tensor | None], *, server: Any = None
    ) -> History:
        """Does the same once more, here: on plain local tensors, in the order of the events. Returns its history.

        Needs no session. What the workers, the losses and the server come to has the bits that it has on nodes which
        compute as this process does (the same kind of CPU, as many threads), unless ``step`` draws at random. A worker
        that was on a mesh is here one module with the whole batch, and as good as equal.

        Args:
            workers: a local module for each worker, with the values that this one had at the beginning; trained.
            step: as for ``drive``: ``worker.module`` is the local module, ``worker.device`` its device.
            server: a local module, dict or tensors, with the values that the server had at the beginning, by default
                those of the first worker. In the end it has the server's; of EASGD without a server, the centre's.

        Raises ValueError for a history without a strategy or with other workers, and for events to which the strategy
        does not come, as when something beside ``drive`` has pushed to the server; TypeError for modules on nodes.

            again = history.replay([copy.deepcopy(model) for _ in workers], step)
            assert again.losses == history.losses
        """
        if self.strategy is None:
            raise ValueError("replay: this history has no strategy; drive returns those that have one")
        if len(workers) != len(self.steps):
            raise ValueError(f"replay: {len(workers)} modules, and there were {len(self.steps)} workers")
        replay = LocalReplay(self.events, self.steps, self.strategy, workers, step, server)
        replay.run()
        return History(replay.events, replay.losses, replay.steps, dict(self.lost), self.strategy)

    def __repr__(self) -> str:
        lost = f", {len(self.lost)} lost" if self.lost else ""
        return f"<History of {len(self.steps)} workers, {sum(self.steps)} steps, {len(self.events)} events{lost}>"
