"""A session whose timeline is recorded from its begin to its end (`dtrun --trace FILE`, DISTTENSOR_TRACE)."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ..runtime.host.precedence import TRACE
from ..runtime.protocol.errors import DisttensorError
from ..session.session import Session

if TYPE_CHECKING:
    from ..seeing.profile import Profile

_log = logging.getLogger("disttensor")


class WholeTrace:
    """The profile of a whole session, if one is recorded."""

    def __init__(self) -> None:
        self.profile: Profile | None = None


def begin_trace(session: Session, environment: Mapping[str, str]) -> None:
    """Begins the timeline of a session where the environment names a file. Where it can't be recorded the job runs
    without."""
    path = environment.get(TRACE, "")
    if not path:
        return
    from ..seeing.profile import Profile  # few sessions need it

    profile = Profile(path)
    try:
        profile.begin_recording(f"by {TRACE}")
    except (DisttensorError, OSError) as e:
        _log.warning("no timeline is recorded in %s=%s: %s", TRACE, path, e)
    else:
        session.part(WholeTrace).profile = profile


def end_trace(session: Session, wait: bool) -> None:
    """Writes the timeline of a session that is about to end. ``wait``: for what is under way, first."""
    whole = session.part(WholeTrace)
    profile, whole.profile = whole.profile, None
    if profile is not None:
        try:
            profile.end_recording(wait)
        except OSError as e:
            _log.warning("the timeline was not written: %s", e)
