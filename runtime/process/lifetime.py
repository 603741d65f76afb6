"""Lifetimes of processes on Linux: a process that ends with its parent, the end of all descendants, an end in words."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import time
from collections.abc import Collection

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
_PR_GET_CHILD_SUBREAPER = 37

# Loaded at import and not on use: a freshly forked child should take no lock of the loader's.
_libc = ctypes.CDLL(None, use_errno=True)
_libc.prctl.argtypes = [ctypes.c_int, *[ctypes.c_ulong] * 4]
_libc.prctl.restype = ctypes.c_int


def die_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Has the kernel signal this process when the thread that made it ends; at once when ``parent`` is gone already.

    Meant for children of a main thread: a child that a helper thread starts would die with that thread.
    """
    _libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    if os.getppid() != parent:  # the parent ended before the line above took effect
        os.kill(os.getpid(), number)


def adopt_orphans(yes: bool = True) -> None:
    """Makes this process the parent of every descendant whose own parent ends, so that ``end_children`` finds it."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, int(yes), 0, 0, 0)


def adopts_orphans() -> bool:
    """Returns whether ``adopt_orphans`` is in effect."""
    found = ctypes.c_int()
    _libc.prctl(_PR_GET_CHILD_SUBREAPER, ctypes.addressof(found), 0, 0, 0)
    return bool(found.value)


def name_process(name: str) -> None:
    """Sets the name that ``top`` shows for this process (15 characters); its command line stays as it is."""
    buffer = ctypes.create_string_buffer(name.encode()[:15])
    _libc.prctl(_PR_SET_NAME, ctypes.addressof(buffer), 0, 0, 0)


def describe_exit(code: int) -> str:
    """Puts a return code, as ``subprocess`` counts it, into words: ``exit code 3``, ``killed by SIGKILL``."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


def children() -> list[int]:
    """Returns the pids of this process's children, zombies included. (/proc/*/children is missing on some kernels.)"""
    me, found = str(os.getpid()), []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                if process_stat(entry)[1] == me:
                    found.append(int(entry))
    return found


def process_stat(pid: int | str) -> list[str]:
    """Returns the fields of ``/proc/<pid>/stat`` behind the name: the state, the parent's pid, and so on.

    Raises OSError for a process that has ended.
    """
    with open(f"/proc/{pid}/stat", "rb") as stat:
        # "pid (name) state ppid ...": the name can hold spaces, brackets, and bytes that are not text
        return stat.read().rpartition(b")")[2].decode(errors="replace").split()


def end_children(patience: float, limit: float = 5.0, but: Collection[int] = ()) -> None:
    """Ends and reaps all children ``but`` these, and orphans that they leave to this process: TERM, KILL after
    ``patience`` seconds.

    Gives up ``limit`` seconds after that (a process in uninterruptible sleep cannot be ended).
    """
    start, told = time.monotonic(), set[int]()
    while pids := [pid for pid in children() if pid not in but]:
        waited = time.monotonic() - start
        if waited > patience + limit:
            return
        for pid in pids:
            with contextlib.suppress(PermissionError):  # it has become another user's (sudo)
                if waited >= patience:
                    os.kill(pid, signal.SIGKILL)  # a child that was not waited for cannot have lost its pid to another
                elif pid not in told:
                    told.add(pid)
                    os.kill(pid, signal.SIGTERM)
        wait_any(pids, 0.05 if waited >= patience else min(0.2, patience - waited))
        for pid in pids:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)


def wait_any(pids: list[int], timeout: float) -> None:
    """Returns when one of these processes has ended or after ``timeout`` seconds."""
    poller, fds = select.poll(), []
    try:
        for pid in pids:
            try:
                fds.append(os.pidfd_open(pid))
            except ProcessLookupError:
                return
            poller.register(fds[-1], select.POLLIN)
        poller.poll(timeout * 1000)
    finally:
        for fd in fds:
            os.close(fd)
