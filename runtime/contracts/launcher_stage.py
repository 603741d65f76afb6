"""The stage of the launchers' checks: a launcher with workers that obey orders.

    with LauncherStage(make) as stage:               a launcher of make's
        first, second = stage.start(2)               its workers, when they have come (launcher_worker.py)
        first.ask("show", "stdout", "hello\\n")
        stage.exited(0)                              waits for the launcher's event

Workers connect to a ``Door``, as nodes do to a master, so it doesn't matter on which host they are.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import secrets
import signal
import socket
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import msgspec

from ..host import descriptors
from ..host.launcher import Exited, Launcher, Sight, Started
from ..process.lifetime import adopt_orphans, adopts_orphans, children, wait_any
from ..protocol.bundle import Bundle
from .conformance import need

#: Makes a launcher whose workers run this function ("module:function"): it is called with the life-line's descriptor,
#: and returns the exit code.
Make = Callable[[str], Launcher]

#: The function that the workers of most checks run.
ENTRY = "disttensor.runtime.contracts.launcher_worker:main"
#: Seconds: nothing in the checks should take this long, also beside other work: a limit only ends what hangs.
LIMIT = 120.0
#: Seconds until a process that has ended is known to have, where that comes another way.
MOMENT = 1.0


class Puppet:
    """The checker's end of a connection with a worker."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.ended = False
        self.rank = self.pid = -1
        #: the bundle as it has arrived there; the secret key's digest in place of the key
        self.bundle: dict[str, Any] = {}
        self._rest = b""
        self.answers: list[Any] = []
        self._orders = 0
        self._turn: Callable[[float], None] = lambda seconds: None

    def hear(self, job: str) -> None:
        """Reads arrived lines. A connection that isn't a worker's of this job is closed again."""
        try:
            piece = self.sock.recv(1 << 20)
        except OSError:
            piece = b""
        self.ended = self.ended or not piece
        *lines, self._rest = (self._rest + piece).split(b"\n")
        for line in lines:
            said = json.loads(line)
            if "job" in said:
                self.rank, self.pid, self.bundle = said["rank"], said["pid"], said["bundle"]
                self.ended = self.ended or said["job"] != job
            else:
                self.answers.append(said["answer"])

    def send_order(self, order: str, *arguments: object) -> None:
        """Sends an order. Doesn't wait for an answer: the worker may end by it."""
        self._orders += 1
        self.sock.sendall(json.dumps([order, *arguments]).encode() + b"\n")

    def ask(self, order: str, *arguments: object) -> Any:
        """Sends an order, and waits until the worker has done it, and all before; returns its answer.

        Raises ConformanceError if the worker ends.
        """
        self.send_order(order, *arguments)
        deadline = time.monotonic() + LIMIT
        while len(self.answers) < self._orders:
            need(not self.ended, f"the worker of node {self.rank} has ended; it should go on")
            need(time.monotonic() < deadline, f"the worker of node {self.rank} doesn't answer")
            self._turn(0.1)
        return self.answers[-1]


class Door:
    """The port of this host that workers connect to."""

    def __init__(self) -> None:
        self.job = secrets.token_hex(8)
        family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
        self._sock = socket.create_server(("", 0), family=family, dualstack_ipv6=family == socket.AF_INET6)
        self.came: list[Puppet] = []

    def bundles(self, launcher: Launcher, count: int) -> list[Bundle]:
        """Makes bundles as a session does."""
        port = self._sock.getsockname()[1]
        hosts = [f"[{host}]" if ":" in host else host for host in launcher.listen]
        address, *further = [f"tcp://{host}:{port}" for host in hosts]
        plain = Bundle(
            job=self.job, rank=-1, address=address, addresses=tuple(further), nodes=count, local_size=count,
            cwd=os.getcwd(), sys_path=tuple(sys.path), env={"DISTTENSOR_CHECK": self.job},
        )  # fmt: skip
        keys = launcher.key_pairs(count)
        return [
            msgspec.structs.replace(plain, rank=rank, local_rank=rank, public_key=public, secret_key=secret)
            for rank, (public, secret) in enumerate(keys)
        ]

    @property
    def puppets(self) -> list[Puppet]:
        """The workers that have said who they are, by rank."""
        return sorted((one for one in self.came if one.rank >= 0), key=lambda one: one.rank)

    def turn(self, seconds: float, *others: int) -> set[int]:
        """Handles connections and messages, for so long; returns which of these other descriptors are readable."""
        heard = {one.sock.fileno(): one for one in self.came if not one.ended}
        ready = {*descriptors.wait_readable([door := self._sock.fileno(), *heard, *others], seconds)}
        if door in ready:
            self.came.append(Puppet(self._sock.accept()[0]))
        for fd in ready & heard.keys():
            heard[fd].hear(self.job)
        return ready & set(others)

    def close(self) -> None:
        for one in self.came:
            one.sock.close()
        self._sock.close()


class _Theatre:
    """A door, and other events to wait for."""

    def __init__(self) -> None:
        self.door = Door()

    def turn(self, seconds: float) -> None:
        """Handles events, for so long at most."""
        self.door.turn(seconds)

    def until(self, true: Callable[[], bool], what: str, seconds: float | None = None) -> None:
        """Waits until ``true()``. Raises ConformanceError, after so many seconds, with ``what`` should have been."""
        limit = LIMIT if seconds is None else seconds
        deadline = time.monotonic() + limit
        while not true():
            need(time.monotonic() < deadline, f"{what}; it isn't so after {limit:g} s{self.state()}")
            self.turn(0.1)

    def state(self) -> str:
        """Returns more text for an error."""
        return ""

    def workers(self, count: int) -> list[Puppet]:
        """Returns all workers, when they have come."""
        self.until(lambda: len(self.door.puppets) >= count, f"{count} workers should start")
        for one in self.door.puppets:
            one._turn = self.turn
        return self.door.puppets

    def gone(self, puppets: Sequence[Puppet], why: str, seconds: float | None = None) -> None:
        """Waits for the end of these workers, and of those children of theirs that have the connection."""
        names = [one.rank for one in puppets]
        self.until(lambda: all(one.ended for one in puppets), f"nodes {names} should have ended: {why}", seconds)


class LauncherStage(_Theatre):
    """A launcher, for the length of a block; its events; its workers."""

    def __init__(self, make: Make, entry: str = ENTRY) -> None:
        super().__init__()
        try:
            self.launcher = make(entry)
        except BaseException:
            self.door.close()
            raise
        self.events: list[Started | Exited] = []
        self.bundles: list[Bundle] = []
        self.over = False  #: the launcher is not asked for events any more

    def ask(self, count: int) -> list[Bundle]:
        """Asks for workers, and doesn't wait for them."""
        self.bundles = self.door.bundles(self.launcher, count)
        self.launcher.start(self.bundles)
        return self.bundles

    def start(self, count: int) -> list[Puppet]:
        """Asks for workers; returns them when they have come and the launcher has reported all."""
        self.ask(count)
        workers = self.workers(count)
        self.until(lambda: self._started() >= count, f"events() should tell of {count} workers that have started")
        return workers

    def _started(self) -> int:
        return sum(isinstance(event, Started) for event in self.events)

    def turn(self, seconds: float) -> None:
        if self.over:
            self.door.turn(seconds)
        elif self.door.turn(seconds, self.launcher.fileno()):
            self.events += [event for event in self.launcher.events() if not isinstance(event, Sight)]

    def state(self) -> str:
        return f" (events() has told {self.events})"

    def exited(self, rank: int) -> Exited:
        """Returns the launcher's event of a worker's end, as soon as it comes."""
        found: list[Exited] = []

        def told() -> bool:
            found[:] = [event for event in self.events if isinstance(event, Exited) and event.rank == rank]
            return bool(found)

        self.until(told, f"events() should tell that node {rank} has ended")
        return found[0]

    def stop(self, grace: float) -> float:
        """Stops the launcher; returns the seconds that it took."""
        self.over = True
        begin = time.monotonic()
        self.launcher.stop(grace)
        return time.monotonic() - begin

    def __enter__(self) -> LauncherStage:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.stop(0)
        finally:
            self.door.close()


# ---- a master that can be killed -------------------------------------------------------------------------------------


class Master(_Theatre):
    """A fork of this process that has a launcher with so many workers, and is the first of a process group."""

    def __init__(self, make: Make, count: int) -> None:
        super().__init__()
        self.exited: list[int] = []  #: the ranks whose ends its launcher has reported
        self._ours, theirs = socket.socketpair()
        with theirs, warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # the warning that this process has threads
            self.pid = os.fork()
            if self.pid == 0:
                _be_master(make, self.door, count, theirs)

    def turn(self, seconds: float) -> None:
        if self.door.turn(seconds, self._ours.fileno()):
            said = self._ours.recv(1 << 16).decode()
            need("Traceback" not in said, f"the master has failed: {said}")
            self.exited += map(int, said.split())
            if not said:  # it has ended
                self.door.turn(seconds)

    def signal(self, number: int) -> None:
        """Signals its process group, as a terminal does."""
        os.killpg(self.pid, number)

    def __enter__(self) -> Master:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)
        self._ours.close()
        self.door.close()


def _be_master(make: Make, door: Door, count: int, teller: socket.socket) -> NoReturn:
    try:
        os.setpgid(0, 0)
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, lambda *_: None)  # not SIG_IGN, which its children would inherit
        launcher = make(ENTRY)
        launcher.start(door.bundles(launcher, count))
        while True:
            ready = descriptors.wait_readable([launcher.fileno(), teller.fileno()])
            if launcher.fileno() in ready:
                for event in launcher.events():
                    if isinstance(event, Exited):
                        teller.sendall(f"{event.rank}\n".encode())
            if teller.fileno() in ready:
                break  # the checker is gone
    except BaseException:
        teller.sendall(traceback.format_exc().encode())
    finally:
        os._exit(1)


# ---- leftovers -------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def nothing_left(seconds: float = 0.0) -> Iterator[None]:
    """Raises ConformanceError if this process has a child more at the end of the block, or so many seconds later.

    A process that loses its parent meanwhile becomes this one's child.
    """
    before, adopting = set(children()), adopts_orphans()
    adopt_orphans()
    try:
        yield
        left, deadline = set(children()) - before, time.monotonic() + seconds
        while left and time.monotonic() < deadline:
            wait_any(list(left), 0.1)
            for pid in left:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
            left = set(children()) - before
        need(not left, f"these processes should have ended, and been waited for: {list(map(_named, left))}")
    finally:
        adopt_orphans(adopting)


def _named(pid: int) -> str:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
        return f"{pid} ({file.read().replace(bytes(1), b' ').decode(errors='replace')[:100].strip() or 'a zombie'})"
    return str(pid)


def open_resources() -> tuple[set[str], set[threading.Thread]]:
    """Returns the descriptors that this process has open, and its threads, without those of garbage: what is collected
    between two looks would hide what is left open."""
    gc.collect()
    return set(os.listdir("/proc/self/fd")), set(threading.enumerate())


class Shown:
    """Captures this process's stdout and stderr in files, for the length of a block."""

    def __enter__(self) -> Shown:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        self._real = [os.dup(fd) for fd in (1, 2)]
        self._files = [os.memfd_create(name) for name in ("stdout", "stderr")]
        for fd, file in enumerate(self._files, 1):
            os.dup2(file, fd)
        return self

    def __exit__(self, *_: object) -> None:
        for fd, real in enumerate(self._real, 1):
            os.dup2(real, fd)
        for each in (*self._real, *self._files):
            os.close(each)

    def lines(self, fd: int) -> list[str]:
        """Returns the lines so far."""
        size = os.fstat(self._files[fd - 1]).st_size
        return os.pread(self._files[fd - 1], size, 0).decode(errors="replace").splitlines()


__all__ = [
    *("ENTRY", "LIMIT", "MOMENT", "LauncherStage", "Make", "Master", "Puppet", "Shown"),
    *("held", "nothing_left"),
]
