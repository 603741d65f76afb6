"""What the processes of a test have made and have to give back: processes, threads, sockets, shared memory.

Other programs of this machine come and go meanwhile, other runs of these tests among them; what they make is theirs.
A process is ours that stems from this one by its parents, or that has our mark in its environment: that is inherited by
whatever is started, however often it forks, and whoever its parent is by now. Shared memory is found where this process
has it mapped: disttensor's has no names (``shm/segments.py``), so it ends with the processes that hold it, and a
process of ours that holds it longer than its test is found itself. What lies in /dev/shm tells nobody whose it is.
"""

from __future__ import annotations

import gc
import os
import secrets
import select
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import orphans
import pytest
import warm
from limits import HANG

#: The variable with the marks of the test processes that a process comes from.
MARK = warm.MARK
_OURS = secrets.token_hex(8)
os.environ[MARK] = " ".join([*os.environ.get(MARK, "").split(), _OURS])


def unmarked(environment: Mapping[str, str]) -> dict[str, str]:
    """An environment for a daemon of a fixture, which starts processes for itself that outlive a test."""
    return {name: value for name, value in environment.items() if name != MARK}


@dataclass(frozen=True)
class Held:
    """What there is at a moment. ``processes`` are all of this machine: only new ones are asked whose they are.

    ``memory`` is None where it is not looked at: what two that stay send each other stays warm from test to test.
    """

    processes: frozenset[int]
    threads: frozenset[threading.Thread]
    sockets: frozenset[str]
    memory: frozenset[str] | None
    descriptors: frozenset[str] | None = None  #: of every kind, for tests of what opens them; None as above

    @classmethod
    def now(cls, memory: bool = True, descriptors: bool = False) -> Held:
        opened = _descriptors()
        sockets = frozenset(target for target in opened.values() if target.startswith("socket:"))
        every = frozenset(f"descriptor {number} of {target}" for number, target in opened.items())
        return cls(_processes(), _threads(), sockets, _memory() if memory else None, every if descriptors else None)

    def since(self, before: Held) -> list[str]:
        """What is held now and was not held before, in words."""
        out = [f"process {pid}: {_command_line(pid)}" for pid in self.processes - before.processes if _is_ours(pid)]
        out += [f"thread {t.name!r}" for t in self.threads - before.threads]
        out += [f"open {s}" for s in self.sockets - before.sockets]
        if self.memory is not None and before.memory is not None:
            out += [f"shared memory {m}" for m in self.memory - before.memory]
        if self.descriptors is not None and before.descriptors is not None:
            out += self.descriptors - before.descriptors
        return sorted(out)


def check(before: Held, what: str, limit: float = HANG / 4) -> None:
    """Fails the test if ``what`` has left anything behind; what is just ending may end."""
    deadline, pause = time.monotonic() + limit, 0.01
    look = before.memory is not None, before.descriptors is not None
    while (now := Held.now(*look)).since(before):
        gc.collect()  # each time: what a thread held may be garbage when it has ended
        if not (left := Held.now(*look).since(before)):
            return
        if time.monotonic() > deadline:
            pytest.fail(f"{what} left behind: " + "; ".join(left), pytrace=False)
        for thread in now.threads - before.threads:
            thread.join(pause)
        _await_end([pid for pid in now.processes - before.processes if _is_ours(pid)], pause)
        pause = min(2 * pause, 0.2)


def _processes() -> frozenset[int]:
    orphans.reap()
    return frozenset(orphans.processes() - warm.held()[0])


def _is_ours(pid: int) -> bool:
    """False for one that has ended."""
    me = os.getpid()
    if pid == me:
        return False
    with suppress(OSError, ValueError):
        if _OURS.encode() in Path(f"/proc/{pid}/environ").read_bytes():
            return True
    with suppress(OSError, ValueError):
        while pid > 1:
            # "pid (name) state ppid ...": the name can hold spaces and brackets
            pid = int(Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[1])
            if pid == me:
                return True
    return False


def _threads() -> frozenset[threading.Thread]:
    # a thread of C++ that has called Python once is known as a dummy for the rest of its life
    return frozenset(t for t in threading.enumerate() if not isinstance(t, threading._DummyThread))


def _descriptors() -> dict[int, str]:
    """What is open here, without what this very look opens."""
    found, zygotes = {}, warm.held()[1]
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if int(name) not in zygotes:
                found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
    return found


def _memory() -> frozenset[str]:
    """Name and inode of what is mapped."""
    found = set()
    for line in Path("/proc/self/maps").read_text(errors="replace").splitlines():
        *_, inode, name = line.split(maxsplit=5) if line.count("/") else ("", "")
        if name.startswith(("/memfd:disttensor", "/dev/shm/")):
            found.add(f"{name} ({inode})")
    return frozenset(found)


def _command_line(pid: int) -> str:
    try:
        return (
            Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:200] or "a zombie"
        )
    except OSError:
        return "gone"


def _await_end(pids: list[int], seconds: float) -> None:
    """Returns when one of these has ended, or after so many seconds."""
    fds = []
    for pid in pids:
        with suppress(OSError):
            fds.append(os.pidfd_open(pid))
    select.select(fds, [], [], seconds)
    for fd in fds:
        os.close(fd)
