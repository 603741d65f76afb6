"""Values on their way to or from a parameter server, and the Works that wait for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...futures import Work, fetch
from ...meshes.shards import at_rank
from ...proxy.proxy import where_is
from ...runtime.channel.ticket import Ticket
from ...runtime.node.streams.lane import when_all
from ...runtime.protocol.errors import ChannelError
from ...session.places import MeshPlace
from ...streams import Stream, stream


class Arriving:
    """Flat parts by shard and dtype: tensors on a node or a mesh, or Works of the script's.

    Attributes:
        worker: the node that they come from or go to; -1 for the script.
        version: that of the server, of what was pulled.
        lanes: for each shard the stream on which its parts arrive.
    """

    def __init__(
        self, parts: list[list[Any]], worker: int, version: int = 0, lanes: Sequence[Stream | None] = ()
    ) -> None:
        self.parts, self.worker, self.version = parts, worker, version
        self.lanes = lanes or [None] * len(parts)

    def tokens(self) -> list[Work[torch.Tensor]]:
        """Returns Works that are done when all parts have arrived, or whose errors say why one did not."""
        found = []
        for parts, lane in zip(self.parts, self.lanes, strict=True):
            for part in parts:
                if isinstance(part, Work):
                    found.append(part)
                elif part.numel():
                    found += [_token(x, lane) for x in _on_nodes(part)]
        return found


def made(flat: Sequence[torch.Tensor]) -> list[Work[torch.Tensor]]:
    """Returns Works that are done when a worker has made these vectors, or has failed to."""
    return [fetch(vector[:1]) for vector in flat if where_is(vector) is not None]


def _on_nodes(part: torch.Tensor) -> Sequence[torch.Tensor]:
    place = where_is(part)
    # a mesh's ranks arrive each by itself
    return [at_rank(part, rank) for rank in range(len(place.members))] if isinstance(place, MeshPlace) else [part]


def _token(part: torch.Tensor, lane: Stream | None) -> Work[torch.Tensor]:
    """Fetches an element, on a stream: on the default one what comes next on the node would wait for it."""
    with stream(Stream(part.device) if lane is None else lane):
        return fetch(part[:1])


class Pull(Work[Any]):
    """A pull: ``result()`` waits for all parts, and is what ``make`` returns, once."""

    def __init__(self, session: Any, pulled: Arriving, make: Callable[[], Any]) -> None:
        self._session, self._works, self._make = session, pulled.tokens(), make
        self._node = self._works[0]._node if self._works else 0
        self._text = f"pull of {sum(map(len, pulled.parts))} parts"
        self._made: list[Any] = []
        self._ended = Ticket()
        self._transfer = self._ended
        when_all([work._transfer for work in self._works], self._ended.finish)

    def _end(self, timeout: float | None) -> None:
        self._await_end(timeout)
        for work in self._works:
            work._end(timeout)

    def _value(self) -> Any:
        if not self._made:
            self._made.append(self._make())
        return self._made[0]


class Pushing(Work[int]):
    """A push that is applied once its values have arrived.

    They are sent when their worker has made them, and applied when they are at the servers: what is on its way from a
    slow worker holds up no transfer of another's, and what a lost one has not sent changes no shard. The steps are done
    in the session's thread of callbacks.
    """

    def __init__(
        self, session: Any, flat: list[torch.Tensor], send: Callable[[], Arriving], apply: Callable[[Arriving], int]
    ) -> None:
        self._session, self._send, self._apply = session, send, apply
        self._works = made(flat)
        self._node = self._works[0]._node if self._works else 0
        self._text = f"push from {f'node {self._node}' if self._works else 'the script'}"
        self._ended = Ticket()
        self._transfer = self._ended
        self._version = 0
        self._error: Exception | None = None
        session.callbacks.start()
        self._when(self._made)

    def _when(self, then: Callable[[], None]) -> None:
        when_all([work._transfer for work in self._works], lambda: self._session.callbacks.put(lambda: self._go(then)))

    def _go(self, then: Callable[[], None]) -> None:
        try:
            for work in self._works:
                work._transfer.wait(0)
            then()
        except ChannelError:
            self._ended.finish()  # who waits learns why; the shards stay as they are
        except Exception as error:
            self._error = error
            self._ended.finish()

    def _made(self) -> None:
        arriving = self._send()
        self._works = arriving.tokens()
        self._when(lambda: self._arrived(arriving))

    def _arrived(self, arriving: Arriving) -> None:
        self._version = self._apply(arriving)
        self._ended.finish()

    def _end(self, timeout: float | None) -> None:
        self._await_end(timeout)
        for work in self._works:
            work._end(timeout)
        if self._error is not None:
            raise self._error

    def _value(self) -> Any:
        return self._version
