"""Opens the socket at which programs of this user ask the script how it is (`dtrun ps`, `status`, ...)."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module

from ..runtime.host.job_sockets import NO_SOCKET, JobAnswer, JobRequest, may_be_asked
from ..runtime.host.job_window import JobWindow
from ..runtime.host.socket_folder import NotOurs
from ..session.session import Session

_log = logging.getLogger("disttensor")


def open_window(session: Session, environment: Mapping[str, str]) -> None:
    """Opens the window of a session, which is closed at its end. Where there can be none the job runs without."""
    if not may_be_asked(environment):
        return
    window, began = session.part(JobWindow), time.monotonic()

    @cache
    def answers() -> Callable[[JobRequest], JobAnswer]:
        made: Callable[[JobRequest], JobAnswer]
        made = import_module("disttensor.seeing.answers").JobAnswers(session, began)  # most jobs are never asked
        return made

    try:
        window.open(lambda request: answers()(request))
    except Exception as e:  # the job does not need it
        level = logging.WARNING if isinstance(e, NotOurs) else logging.INFO
        _log.log(level, "`dtrun ps` and `dtrun status` don't see this job: %s (%s=1 says nothing)", e, NO_SOCKET)
        return
    session.changes.callback(window.close)
