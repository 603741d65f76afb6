"""The file descriptors that this process may still open: sockets, pipes and events take one each."""

from __future__ import annotations

import errno
import os
import resource
from contextlib import suppress

#: The descriptors that a script's process takes at least for a session, and for each of its nodes, until these answer.
_SESSION, _NODE = 32, 2.5
#: Those that a context of ZeroMQ takes, with its sockets; libzmq ends a process that has none left in the middle of it.
_CONTEXT = 14
#: The limit that a process gives itself that has too few, if it may.
_ENOUGH = 4096


def left() -> int:
    """Returns how many descriptors this process may still open."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most == resource.RLIM_INFINITY:
        return 1 << 30
    try:
        return most - len(os.listdir("/proc/self/fd")) + 1  # without the one that has looked
    except OSError as e:
        return 0 if is_shortage(e) else most


def shortage(nodes: int) -> str:
    """Returns why a session of so many nodes can't begin, for want of descriptors; "" where it may."""
    need = int(_SESSION + _NODE * nodes)
    if _has(need):
        return ""
    return f"Too many open files: a session of {nodes} nodes takes {need} file descriptors at least; {limit()}"


def check_context() -> None:
    """Raises OSError (EMFILE) where a context of ZeroMQ can't be had for want of descriptors."""
    if not _has(_CONTEXT):
        why = f"Too many open files: another connection of ZeroMQ takes {_CONTEXT} file descriptors; {limit()}"
        raise OSError(errno.EMFILE, why)


def _has(need: int) -> bool:
    """Returns whether this process may open so many more; raises its own limit where it may, and has to."""
    missing = need - left()
    if missing <= 0:
        return True
    most, highest = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = max(most + missing, _ENOUGH)
    if highest != resource.RLIM_INFINITY:
        wanted = min(wanted, highest)
    if wanted > most:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, highest))
    return left() >= need


def limit() -> str:
    """Returns the limit of this process in words, and what to do about it."""
    most, highest = resource.getrlimit(resource.RLIMIT_NOFILE)
    hard = "there is no hard limit" if highest == resource.RLIM_INFINITY else f"the hard limit is {highest}"
    return (
        f"process {os.getpid()} may have {most} open at once (RLIMIT_NOFILE), and {max(0, left())} are left: raise "
        f"that with `ulimit -n 4096` ({hard})"
    )


def is_shortage(error: BaseException) -> bool:
    """Returns whether an error says that there are no descriptors left, of this process or of this machine."""
    return getattr(error, "errno", None) in (errno.EMFILE, errno.ENFILE)
