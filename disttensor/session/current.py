"""The one session of this process. All other files ask here for it."""

from __future__ import annotations

from typing import cast

from ..runtime.node import where
from ..runtime.process import role
from ..runtime.protocol.errors import DisttensorError
from .places import Place
from .session import Session

_session: Session | None = None


def session() -> Session:
    """Returns the session. Raises DisttensorError when there is none, as in a function on a node."""
    if _session is None:
        if (found := where.found()) is not None:
            raise DisttensorError(
                f"this function runs on node {found.node}, which has no session: nodes, meshes and tensors on them are "
                "the script's. Return what it is to do next; dt.tasks.here() says where this is"
            )
        raise DisttensorError("there is no session; call disttensor.init_master_worker() first")
    return _session


def session_of(place: Place) -> Session:
    """Returns the session that a place belongs to, which may have ended."""
    return cast(Session, place.session)


def current() -> Session | None:
    """Returns the session, or None."""
    return _session


def set_session(new: Session | None) -> None:
    global _session
    _session = new
    role.set_session(new)


def is_initialized() -> bool:
    """Returns whether a session is running in this process. Does not wait."""
    return _session is not None


def node_count() -> int:
    """Returns how many nodes the session has, lost ones among them. Raises DisttensorError without a session."""
    return len(session().nodes)
