"""The one session of this process. Everything else asks here for it."""

from __future__ import annotations

from typing import cast

from ..runtime.process import role
from ..runtime.protocol.errors import DisttensorError
from .places import Place
from .session import Session

_session: Session | None = None


def session() -> Session:
    """Raises DisttensorError when there is none."""
    if _session is None:
        raise DisttensorError("there is no session; call disttensor.init_master_worker() first")
    return _session


def session_of(place: Place) -> Session:
    """The session that a place belongs to, which may have ended."""
    return cast(Session, place.session)


def current() -> Session | None:
    """The session, or None."""
    return _session


def set_session(new: Session | None) -> None:
    global _session
    _session = new
    role.set_session(new)
