"""The history of asynchronous training: what happened, in the order in which it took effect."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple


class Event(NamedTuple):
    """An event.

    Attributes:
        kind: "pull" (the worker asked for the server's values, and gets those of now), "take" (it uses what it asked
            for last), "step" (gradients, and what the worker does with them), "send" (it made what it pushes),
            "push" (the oldest of what it sent and is not there yet has changed the server), "meet" (``workers`` have
            exchanged), "lost".
        worker: its index; -1 for a meeting.
        step: the worker's step, from 1 on; 0 before the first one.
        version: the server's at a pull, and after a push.
        workers: of a meeting.
    """

    kind: str
    worker: int
    step: int
    version: int = 0
    workers: tuple[int, ...] = ()


@dataclass
class History:
    """The events of one ``drive``, with which an ordinary program in one process comes to the same values.

    Attributes:
        events: in the order in which they took effect.
        losses: of each worker, by step: what ``step`` returned (of a mesh its first rank's).
        steps: how many steps each worker has done.
        lost: workers that were lost, with the error of each.
    """

    events: list[Event] = field(default_factory=list)
    losses: list[list[float]] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    lost: dict[int, Exception] = field(default_factory=dict)

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

    def __repr__(self) -> str:
        lost = f", {len(self.lost)} lost" if self.lost else ""
        return f"<History of {len(self.steps)} workers, {sum(self.steps)} steps, {len(self.events)} events{lost}>"
