"""Under torchrun MASTER_PORT is that of torchrun's own store: there the master says where its nodes find it.

Everybody who reaches that store may read and write it, so it gets addresses only. Who is there proves itself by keys.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from ..errors import StartError

if TYPE_CHECKING:
    from .meeting import Meeting


def publish(meeting: Meeting, addresses: Sequence[str], timeout: float) -> None:
    """Says where the root listens. Raises StartError when torchrun's store cannot be reached."""
    with _complaining(meeting):
        _store(meeting, timeout).set(_key(meeting), " ".join(addresses))


def look_up(meeting: Meeting, timeout: float) -> tuple[str, ...]:
    """Waits for what the master says. Raises StartError when it says nothing in time."""
    deadline = time.monotonic() + timeout
    with _complaining(meeting):
        store = _store(meeting, timeout)
        store.wait([_key(meeting)], timedelta(seconds=max(1.0, deadline - time.monotonic())))
        return tuple(store.get(_key(meeting)).decode().split())


def _key(meeting: Meeting) -> str:
    return f"disttensor/{meeting.name}"


def _store(meeting: Meeting, timeout: float) -> Any:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # takes seconds where there is no torch yet

    return TCPStore(
        meeting.host, meeting.port, is_master=False, timeout=timedelta(seconds=timeout), wait_for_workers=False
    )


@contextlib.contextmanager
def _complaining(meeting: Meeting) -> Any:
    try:
        yield
    except RuntimeError as e:  # torch.distributed's errors are
        raise StartError(
            f"nobody has said in torchrun's store at {meeting.host}:{meeting.port} where the master is: "
            f"{str(e).splitlines()[0]}"
        ) from e
