"""Events of asynchronous training: what workers, and a server, have done."""

from __future__ import annotations

from typing import NamedTuple


class TrainingEvent(NamedTuple):
    """An event.

    Attributes:
        kind: "pull" (the worker asked for the server's values, and gets those of now), "take" (it uses what it asked
            for last), "step" (gradients, and what the worker does with them), "send" (it made what it pushes),
            "push" (the oldest of what it sent and is not there yet has changed the server), "meet" (``workers`` have
            exchanged), "buffers" (the buffers of ``workers`` have become their mean), "lost".
        worker: its index; -1 for several.
        step: the worker's step, from 1 on; 0 before the first one.
        version: the server's at a pull, and after a push.
        workers: of a meeting.
    """

    kind: str
    worker: int
    step: int
    version: int = 0
    workers: tuple[int, ...] = ()
