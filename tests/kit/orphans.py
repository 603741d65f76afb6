"""A process is the parent of another's child for a moment (warm.py), and waits for the orphans that come with it."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator

_GET_CHILD_SUBREAPER, _SET_CHILD_SUBREAPER = 37, 36
_libc = ctypes.CDLL(None, use_errno=True)
#: Children of this process that others started, and which lost their parents.
_orphans: set[int] = set()


@contextlib.contextmanager
def adopting() -> Iterator[None]:
    """What loses its parent meanwhile becomes this process's child: the program, and whatever else does just then.

    Elsewhere the machine's first process waits for orphans; of those that come here nobody knows, so `reap` does.
    """
    were, alive, before = _children(), processes(), ctypes.c_int()
    _libc.prctl(_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0)
    _libc.prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        _libc.prctl(_SET_CHILD_SUBREAPER, before.value, 0, 0, 0)
        _orphans.update((_children() - were) & alive)  # what another thread starts meanwhile was not there before
        reap()


def reap() -> None:
    """Waits for what came here as an orphan and has ended."""
    for pid in list(_orphans):
        with contextlib.suppress(ChildProcessError):
            if os.waitpid(pid, os.WNOHANG)[0] == 0:
                continue
        _orphans.discard(pid)


def _children() -> set[int]:
    found: set[int] = set()
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError), open(f"/proc/self/task/{thread}/children") as file:
            found.update(map(int, file.read().split()))
    return found


def processes() -> set[int]:
    """All of this machine."""
    return {int(name) for name in os.listdir("/proc") if name.isdigit()}
