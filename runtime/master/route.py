"""Routes: a thread's commands go to a stream, or into a recording, instead of to default streams.

The hot path appends to ``Outbox.commands``. That is the queue itself, as long as no thread has a route; while one has,
it is a Tap, which looks the issuing thread's route up. So a program without streams and graphs pays nothing for them.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from ..protocol import commands as c
from ..protocol.errors import GraphError
from ..protocol.traits import kinds
from .failures import Site


class Recorder(Protocol):
    """Takes commands in place of a node, for a graph."""

    def record(self, ranks: tuple[int, ...], stream: int, command: c.Command, site: Site | None) -> None:
        """Takes a command that ``ranks`` would have been sent, for one of their streams (0 is the default one)."""

    def draw(self, place: Any) -> None:
        """Notes that what comes next draws from a place's generator."""

    def switch(self, command: c.Switch) -> None:
        """Notes that the thread has set switches of torch's."""

    def add_empty(self, handle: Any) -> None:
        """Notes a lazy empty tensor that is new in this recording."""

    def made(self, handle: Any) -> bool:
        """Returns whether a lazy tensor is made in this recording, and is to be recorded at its first use."""


class Route(NamedTuple):
    """The route of one thread or asyncio task."""

    streams: Mapping[int, int] = MappingProxyType({})  #: rank -> stream, where that is not the default one
    recorder: Recorder | None = None


route: ContextVar[Route] = ContextVar("disttensor_route", default=Route())  # noqa: B039 - it is immutable

_ROUTED = kinds("routed")


def waits(what: str) -> None:
    """Raises GraphError while this thread records a graph: nothing runs then, so that nothing can be waited for.

    ``what`` is the operation, for the message.
    """
    if route.get().recorder is not None:
        raise GraphError(
            f"{what} has to wait for a node, and nothing runs while a graph is recorded: end the recording first, and "
            "read values after g.replay()"
        )


class Tap:
    """Takes the place of an outbox's queue for issuing threads, and routes each appended command."""

    __slots__ = ("_queue", "_ranks")

    def __init__(self, ranks: tuple[int, ...], queue: Any) -> None:
        self._ranks = ranks
        self._queue = queue

    def __iadd__(self, items: tuple[Any, ...]) -> Tap:
        here = route.get()
        # what goes to several nodes is for their default streams
        stream = here.streams.get(self._ranks[0], 0) if len(self._ranks) == 1 else 0
        for command, site in [items] if len(items) == 2 else zip(items[::2], items[1::2], strict=True):
            queue = self._queue
            if type(command) not in _ROUTED:
                queue += (command, site)
            elif here.recorder is not None:
                here.recorder.record(self._ranks, stream, command, site)
            else:
                queue += (c.On(stream, command) if stream else command, site)
        return self

    extend = __iadd__

    def __len__(self) -> int:
        return len(self._queue)
