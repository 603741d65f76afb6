"""The file descriptors that this process may still open: sockets, pipes and events take one each."""

from __future__ import annotations

import errno
import os
import resource
import select
from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol, TypeVar

from ..process.clock import CLOCK, Clock

#: The descriptors that a script's process takes at least for a session, and for each of its nodes, until these answer.
_SESSION, _NODE = 32, 2.5
#: Those that a fork server has open while it starts a node, and for each node that runs.
_SERVER, _SERVED = 9, 5
#: Those that a root has, with a tunnel server, and for each agent.
_ROOT, _BRANCH = 30, 5
#: Those that a process has open when dtrun has started it: the standard ones, and the socket to its fork server.
_GIVEN = 4
#: Those that a process takes which joins a job as an agent, and starts its fork server.
_AGENT = 21
#: Those that a context of ZeroMQ takes, with its sockets; libzmq ends a process that has none left in the middle of it.
_CONTEXT = 14
#: The limit that a process gives itself that has too few, if it may.
_ENOUGH = 4096


class HasFileno(Protocol):
    """An object that has a file descriptor."""

    def fileno(self) -> int: ...


End = TypeVar("End", bound="int | HasFileno")


def wait_readable(ends: Sequence[End], seconds: float | None = None, clock: Clock = CLOCK) -> list[End]:
    """Returns the ends that can be read, or have ended; empty after ``seconds`` of the clock. Waits as
    ``select.select``, which refuses descriptors from 1,024 on. Raises OSError for one that is closed."""
    poller = select.poll()
    by_number = {end if isinstance(end, int) else end.fileno(): end for end in ends}
    for number in by_number:
        poller.register(number, select.POLLIN)
    ready = clock.poll(poller, seconds)
    if any(event & select.POLLNVAL for _, event in ready):
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))
    return [by_number[number] for number, _ in ready]


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
    need = _script(nodes)
    return "" if _has(need) else f"{_lacking(f'a session of {_many(nodes)}', need)}; {limit()}"


def shortage_below(nodes: int, here: int) -> str:
    """Returns why what this process is about to start will lack descriptors; "" where it won't.

    That is a script with a session of ``nodes`` nodes (0: there is none), and a fork server that starts ``here`` nodes
    (0: there is none). Each raises its own soft limit, and inherits next to nothing of what this process has open.
    """
    _, highest = resource.getrlimit(resource.RLIMIT_NOFILE)
    if highest == resource.RLIM_INFINITY:
        return ""
    if nodes and (need := _script(nodes) + _GIVEN) > highest:
        return f"{_lacking(f'a session of {_many(nodes)}', need)}; {_limit()}: {_advice()}"
    if here and (need := _server(here)) > highest:
        return f"{_lacking(f'the fork server of {_many(here)}', need)}; {_limit()}: {_advice()}"
    return ""


def shortage_of_agent(nodes: int) -> str:
    """Returns why this process can't join a job with so many nodes, for want of descriptors; "" where it may."""
    if not _has(_AGENT):
        return f"{_lacking('an agent', _AGENT)}; {limit()}"
    return shortage_below(0, nodes)


def make_room_for_nodes(nodes: int) -> None:
    """Has a fork server, which this process is, raise its own soft limit if it is too low for so many nodes."""
    _make_room(_server(nodes))


def make_room_for_agents(agents: int) -> None:
    """Does so for a root, which this process is, and so many agents."""
    _make_room(_ROOT + _BRANCH * agents)


def check_context() -> None:
    """Raises OSError (EMFILE) where a context of ZeroMQ can't be had for want of descriptors."""
    if not _has(_CONTEXT):
        why = f"Too many open files: another connection of ZeroMQ takes {_CONTEXT} file descriptors; {limit()}"
        raise OSError(errno.EMFILE, why)


def limit() -> str:
    """Returns the limit of this process in words, and what to do about it."""
    return f"{_limit()}, and {max(0, left())} are left: {_advice()}"


def is_shortage(error: BaseException) -> bool:
    """Returns whether an error says that this process, or this machine, has used up its descriptors."""
    return getattr(error, "errno", None) in (errno.EMFILE, errno.ENFILE)


def _has(need: int) -> bool:
    """Returns whether this process may open so many more; raises its own limit where it may, and has to."""
    missing = need - left()
    if missing <= 0:
        return True
    _raise_to(resource.getrlimit(resource.RLIMIT_NOFILE)[0] + missing)
    return left() >= need


def _make_room(need: int) -> None:
    if need > resource.getrlimit(resource.RLIMIT_NOFILE)[0]:
        _raise_to(2 * need)  # files for output are not counted


def _raise_to(wanted: int) -> None:
    """Raises the soft limit of this process to ``wanted``, or as far as it may."""
    most, highest = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = max(wanted, _ENOUGH)
    if highest != resource.RLIM_INFINITY:
        wanted = min(wanted, highest)
    if resource.RLIM_INFINITY != most < wanted:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, highest))


def _script(nodes: int) -> int:
    """Returns the number of descriptors that a session of so many nodes takes in the script's process."""
    return int(_SESSION + _NODE * nodes)


def _server(nodes: int) -> int:
    """Returns the number that a fork server has open when it starts the last of so many nodes."""
    return _SERVER + _SERVED * nodes


def _lacking(what: str, need: int) -> str:
    return f"Too many open files: {what} takes {need} file descriptors at least"


def _many(nodes: int) -> str:
    return "1 node" if nodes == 1 else f"{nodes} nodes"


def _limit() -> str:
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return f"process {os.getpid()} may have {most} open at once (RLIMIT_NOFILE)"


def _advice() -> str:
    _, highest = resource.getrlimit(resource.RLIMIT_NOFILE)
    hard = "there is no hard limit" if highest == resource.RLIM_INFINITY else f"the hard limit is {highest}"
    return f"raise that with `ulimit -n 4096` ({hard})"
