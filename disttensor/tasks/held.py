"""The part of a session that holds what its script and nodes share, with the service by which nodes reach it."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from ..runtime.process import undertakings
from ..runtime.protocol import shared_objects as s
from ..runtime.protocol.errors import DisttensorError, NodeLost
from ..runtime.shared import handles
from ..runtime.shared.callers import Local
from ..runtime.shared.handles import ServiceRoute
from ..runtime.shared.objects import Objects
from ..runtime.shared.service import Service
from ..runtime.shared.waiting import what_for
from ..session import current
from ..session.places import NodePlace
from ..session.session import Session
from .calls import FunctionCall
from .sending import pickled_alone
from .submitted import issue


class SessionObjects:
    """A part of a session. Nothing is started before a handle is first given to a function."""

    def __init__(self) -> None:
        self.objects = Objects()
        self.caller: Local
        self._session: Session
        self._service: Service | None = None
        self._addresses: tuple[str, ...] = ()
        self._admitted: set[int] = set()
        self._lock = threading.Lock()
        self._began = False
        self.named: dict[tuple[str, str], handles.ObjectHandle] = {}
        self._names: list[handles.ObjectHandle] = []  #: all that have names, in the order in which they were made
        self._told: dict[int, int] = {}  #: by node: how many of these it was told

    def bind_session(self, session: Session) -> None:
        """Ties this part to its session, at first use."""
        with self._lock:
            if not self._began:
                self._began = True
                self._session = session
                link = session.link
                self.caller = Local(self.objects, link.sender.flush_all, link.told_losses.add, self._noting)
                # nodes that are threads: what they wait for issues nothing
                handles.here[session.job] = Local(self.objects, lambda: None)
                session.changes.callback(self.close)

    def where(self, number: int) -> ServiceRoute:
        """Tells functions on nodes how to reach an object. Raises DisttensorError where they can't."""
        session = self._session
        with self._lock:
            if not session.shares_process:
                if session.hub_beside is None:
                    raise DisttensorError(
                        "functions on nodes of this launcher can't use what the script holds for all: these have no "
                        "keys for a second connection"
                    )
                if self._service is None:
                    self._admitted = set(session.link.side.keys)
                    hub = session.hub_beside({rank: session.link.side.keys[rank] for rank in self._admitted})
                    self._addresses = hub.addresses
                    self._service = Service(hub, self.objects, session.link.losses.disconnected)
                self._service.admit(session.link.side.keys, self._admitted, self._incarnation)
        self.objects.share(number)
        return ServiceRoute(session.job, self._addresses)

    def _incarnation(self, rank: int) -> int:
        return self._session.link.nodes[rank].connection.number

    def pickled(self, function: Any, what: str) -> bytes:
        """Pickles a function that is in an item. Raises TypeError."""
        return pickled_alone(function, self._session, what)

    def register_name(self, handle: handles.ObjectHandle, name: str) -> None:
        """Has a handle be found by its name."""
        self.named[type(handle).__name__, name] = handle
        self._names.append(handle)
        self._session.before_functions = self._send_names

    def names(self) -> dict[int, str]:
        """Returns the names of the objects that have one, by their numbers."""
        return {handle._number: name for (_, name), handle in list(self.named.items())}

    def _noting(self, request: s.Asking) -> AbstractContextManager[object]:
        """Returns what a wait of the script's is noted by, while it lasts."""
        return undertakings.mine.during(partial(what_for, request, self._in_words), is_wait=True)

    def _in_words(self, number: int) -> str:
        word = self.objects.word(number) or "queue"
        name = self.names().get(number)
        return f"{word} {name}" if name else f"a {word}"

    def _send_names(self, place: NodePlace, site: Any) -> None:
        """Tells a node the names that it has not been told, before a function that may ask for one."""
        told, self._told[place.node] = self._told.get(place.node, 0), len(self._names)
        new = self._names[told:]
        if new and (self._session.shares_process or self._session.hub_beside is not None):
            call = FunctionCall(self._session, place, handles.learn, (new,), {}, site)
            try:
                issue(self._session, [call], "learn()", site)
            finally:
                call.end()

    def returned(self, rank: int) -> None:
        """Lets in another worker in a lost node's place, which has been told no names."""
        with self._lock:
            self._told.pop(rank, None)
            if rank in self._admitted and self._service is not None:
                self._service.readmit(rank, self._session.link.side.keys[rank], self._incarnation(rank))

    def lost(self, error: NodeLost) -> None:
        """Tells those who wait of a loss."""
        self.objects.lost(error.rank, error.cause)

    def forked(self) -> None:
        """Makes a forked child's copy unusable."""
        self._lock = threading.Lock()
        self.objects.forked()
        if self._service is not None:
            self._service.forked()

    def close(self) -> None:
        """Ends all waits, and the connections."""
        self.objects.close("the session has ended")
        threads = handles.here.pop(self._session.job, None)
        if isinstance(threads, Local):
            threads.close()
        if self._session.shares_process:
            handles.forget_names()
        if self._service is not None:
            self._service.close()


def holder() -> SessionObjects:
    """Returns what the session holds. Raises DisttensorError without a session."""
    session = current.session()
    held = session.part(SessionObjects)
    held.bind_session(session)
    return held
