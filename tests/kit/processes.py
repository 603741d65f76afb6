"""Processes that have to end."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Iterable


def alive_after(seconds: float, pids: Iterable[int]) -> list[int]:
    """The pids that are still alive after ``seconds``, less when they end sooner. Waits on pidfds, not in steps."""
    deadline, alive = time.monotonic() + seconds, []
    for pid in pids:
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        if not select.select([fd], [], [], max(0.0, deadline - time.monotonic()))[0]:
            alive.append(pid)
        os.close(fd)
    return alive
