"""``dt.tasks.share(obj)``: an object that is sent to a node once, and is an argument of any number of calls there."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

from ..collectives.groups import new_group
from ..dispatch.call_site import here
from ..runtime.master.route import waits
from ..runtime.node import shared_objects
from ..runtime.protocol.errors import DisttensorError
from ..session import current
from ..session.places import NodePlace
from ..session.session import Session
from .calls import FunctionCall, PickledArguments
from .sending import SharedArgument
from .signatures import T
from .submitted import Submitted, issue


class Ref(SharedArgument[T]):
    """An object that nodes keep while this Ref exists: among arguments of functions it stands for the object.

    Each node has one copy: what a function changes there, the next one sees. ``value`` is the script's own.
    """

    def __init__(self, session: Session, value: T) -> None:
        self.value = value
        self._session = session
        self._lock = threading.RLock()
        self._ready = PickledArguments()
        #: by node and incarnation: the Work of what keeps it there
        self._kept: dict[tuple[int, int], Submitted[Any]] = {}

    def reduce_for(self, place: NodePlace, beside: bool = False) -> tuple[Any, tuple[Any, ...]]:
        """Returns a function and its arguments that give the object on a node, which gets it now if it has not yet,
        ``beside`` what the node does otherwise or in its turn."""
        if place.session is not self._session:
            raise DisttensorError("a Ref is of a session that was shut down; dt.tasks.share(ref.value) makes another")
        with self._lock:
            at = place.node, place.incarnation
            kept = self._kept.get(at)
            if kept is None:
                kept = self._kept[at] = self._send(place, beside)
            return shared_objects.get, (kept,)

    def _send(self, place: NodePlace, beside: bool) -> Submitted[Any]:
        session, site = self._session, here()
        call = FunctionCall(session, place, shared_objects.keep, (self.value,), {}, site, self._ready)
        try:
            return issue(session, [call], "share()", site, beside=beside)
        finally:
            call.end()

    def __repr__(self) -> str:
        return f"<Ref to a {type(self.value).__qualname__} on nodes {sorted({node for node, _ in self._kept})}>"


def share(obj: T, nodes: Iterable[int] | None = None) -> Ref[T]:
    """Returns a Ref to an object that is serialised once, and sent once to each node that uses it.

        >>> table = dt.tasks.share({"a": 1, "b": 2})
        >>> [dt.run(dict.get, table, key, node=0) for key in "ab"]
        [1, 2]

    In a call's arguments, at any depth, the Ref is the object, whichever node runs the function. The nodes drop it when
    the Ref is dropped. Tensors in the object are sent once, too.

    ``nodes``: those that get it at once; others get it with the first function that uses it. Raises as ``run`` for what
    can't be sent, of at most 64 MiB without its tensors.
    """
    session = current.session()
    waits("share")
    ref = Ref(session, obj)
    for node in new_group(nodes).nodes if nodes is not None else ():
        ref.reduce_for(session.places.at(node).one)
    return ref
