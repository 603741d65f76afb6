"""The launcher for nodes that mpiexec has started: rank 0 is the master, rank k + 1 is node k.

    mpiexec -n 3 dtrun script.py
      rank 0: runs the script                     rank k + 1: node k (mpi_node.py)
        MpiLauncher  <-- Offer: a public key ------ waits, without a busy loop
                     --- the bundle --------------> serves until the session ends; then another Offer
        leave        --- nothing -----------------> ends what it has started; a last Offer
                     --- nothing -----------------> MPI_Finalize, on all of them

A node makes its key pair itself, so that no secret travels: MPI encrypts nothing. mpiexec ends all processes as soon as
one of them ends without MPI_Finalize, on all hosts: a node that is killed ends the job, as is usual with MPI, and that
is also how stuck nodes are ended. This host's processes are watched; the end of others shows in their connections.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import select
import sys
import time
from collections.abc import Callable, Collection, Sequence
from functools import cache
from typing import Any, NoReturn

import msgspec

from ...host import mpi_env
from ...host.addresses import LOOPBACK
from ...host.affinity import OWN
from ...host.launcher import Exited, Launcher, Started
from ...host.output_options import Output
from ...process.lifetime import adopt_orphans, end_children
from ...protocol.bundle import Bundle
from ...protocol.errors import UNDECODABLE, ForkError, StartError

#: Seconds within which a process of mpiexec has to be ready when a session starts.
ARRIVE = 60.0
#: Seconds at the end for nodes to come back from their last session, and then for processes that the script has left.
_PATIENCE = 3.0
#: The longest pause between two probes (seconds). MPI itself would wait in a busy loop.
_PAUSE = 0.01

OFFER, ORDER = 1, 2  #: tags


class Offer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A process is ready to be a node, for one session."""

    public_key: str
    side_public_key: str = ""
    untidy: bool = False  #: it has given up a transfer: MPI_Finalize would wait for that


def await_true(look: Callable[[], bool], timeout: float | None = None) -> bool:
    """Polls ``look`` until it returns True; returns False after ``timeout`` seconds."""
    deadline, pause = None if timeout is None else time.monotonic() + timeout, 1e-4
    while not look():
        if deadline is not None and time.monotonic() > deadline:
            return False
        time.sleep(pause)
        pause = min(2 * pause, _PAUSE)
    return True


def receive_probed(world: mpi_env.MpiWorld, status: Any) -> bytes:
    """Receives the message that a probe has found."""
    data = bytearray(status.Get_count(world.mpi.BYTE))
    world.comm.Recv([data, world.mpi.BYTE], status.source, status.tag)
    return bytes(data)


def flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # user code closed it or took it away
            stream.flush()


def exit_at_once(code: int) -> NoReturn:
    """Ends this process as ``os._exit`` does, after MPI_Finalize.

    MPICH does the rest of that in a handler of C's ``exit``, without which its mpiexec kills the processes that have
    not ended yet.
    """
    flush()
    ctypes.CDLL(None).exit(code)
    raise AssertionError("exit has returned")


class MpiLauncher(Launcher):
    """Hands bundles to the processes of this mpiexec.

    Raises StartError when there is no mpiexec, or this is not its rank 0.
    """

    def __init__(self) -> None:
        self._processes = mpi_processes()
        self.capacity = self._processes.world.comm.size - 1
        self.listen = self._processes.world.ways_out() or (LOOPBACK,)
        self._running: set[int] = set()
        self._events: list[Started | Exited] = []
        self._epoll = select.epoll()  #: watches the nodes' processes, and the bell
        self._bell = os.eventfd(0)  #: an eventfd, written for events that no process's end tells
        self._epoll.register(self._bell, select.EPOLLIN)
        self._pidfds: dict[int, int] = {}  #: descriptor -> rank

    def __repr__(self) -> str:
        return f"<MpiLauncher nodes={self.capacity} running={sorted(self._running)}>"

    def key_pairs(self, count: int) -> list[tuple[str, str]]:
        self._check_pid()
        if missing := self._processes.gather(range(count), ARRIVE):
            raise StartError(f"nodes {missing} are still busy with the session before this one")
        return [(self._processes.offers[rank].public_key, "") for rank in range(count)]

    def side_key_pairs(self, count: int) -> list[tuple[str, str]]:
        return [(self._processes.offers[rank].side_public_key, "") for rank in range(count)]

    def too_many(self, count: int) -> str:
        return f"mpiexec has started {self.capacity} beside the master (it needs -n {count + 1})"

    def start(self, bundles: Sequence[Bundle]) -> None:
        self._check_pid()
        world = self._processes.world
        hosts = [world.cards[bundle.rank + 1].machine for bundle in bundles]
        for i, bundle in enumerate(bundles):
            card = world.cards[bundle.rank + 1]
            if world.near(bundle.rank + 1):
                self._watch(bundle.rank, card.pid)
            self._running.add(bundle.rank)
            changed = msgspec.structs.replace(
                bundle,
                local_rank=hosts[:i].count(hosts[i]),
                local_size=hosts.count(hosts[i]),
                env=bundle.env | {OWN: "cores" if world.keeps_apart(bundle.rank + 1) else ""},
            )
            self._processes.order(bundle.rank, msgspec.json.encode(changed))
            self._events.append(Started(bundle.rank, card.pid, card.host))
        os.eventfd_write(self._bell, 1)

    def _watch(self, rank: int, pid: int) -> None:
        try:
            pidfd = os.pidfd_open(pid)
        except OSError as e:
            raise StartError(f"the process of node {rank} (pid {pid}) cannot be watched: {e}") from e
        self._pidfds[pidfd] = rank
        self._epoll.register(pidfd, select.EPOLLIN)

    def fileno(self) -> int:
        return self._epoll.fileno()

    def events(self) -> list[Started | Exited]:
        self._check_pid()
        for pidfd, _ in [] if self._epoll.closed else self._epoll.poll(0):
            if pidfd == self._bell:
                os.eventfd_read(self._bell)
                continue
            rank = self._pidfds.pop(pidfd)
            os.close(pidfd)  # and epoll forgets it
            card = self._processes.world.cards[rank + 1]
            cause = "its process has ended (mpiexec knows how)"
            self._events.append(Exited(rank, card.pid, cause, os.EX_SOFTWARE, (), card.host))
        events, self._events = self._events, []
        return events

    def show(self, output: Output) -> None:
        """Raises StartError: nodes show their output themselves, and have begun to."""
        raise StartError("under mpiexec the files of nodes' output are named to dtrun: mpiexec ... dtrun --log-dir DIR")

    def stop(self, grace: float) -> None:
        if os.getpid() != self._processes.pid or self._epoll.closed:
            return
        for fd in (*self._pidfds, self._bell):
            os.close(fd)
        self._epoll.close()
        self._processes.gather(self._running, grace)  # one that is stuck ends with this process: see `leave`

    def leave(self, code: int) -> None:
        self._processes.leave(code)
        exit_at_once(code)

    def _check_pid(self) -> None:
        if os.getpid() != self._processes.pid:
            raise ForkError(f"this launcher belongs to process {self._processes.pid}, which forked this one")


class MpiProcesses:
    """All processes that can be nodes, as rank 0 sees them, until its end."""

    def __init__(self, world: mpi_env.MpiWorld) -> None:
        if world.rank != 0:
            raise StartError("only rank 0 of mpiexec is the master; start the script by `mpiexec -n 5 dtrun script.py`")
        self.world = world
        self.pid = os.getpid()
        self.offers: dict[int, Offer] = {}
        self.used = False  #: a session has been started
        self.code = 1  #: the exit code that this process is going to have; 1 as long as nobody knows
        self.adopts = False  #: the processes that the script leaves behind are to be ended
        self._left = False
        atexit.register(self._at_exit)

    def gather(self, ranks: Collection[int], timeout: float) -> list[int]:
        """Waits for offers of these nodes, so long after the last one that came; returns those that have made none."""
        comm, status = self.world.comm, self.world.mpi.Status()
        missing = list(ranks)

        def one_came() -> bool:
            while comm.Iprobe(tag=OFFER, status=status):
                rank, said = status.source - 1, receive_probed(self.world, status)
                try:
                    self.offers[rank] = msgspec.json.decode(said, type=Offer)
                except UNDECODABLE as e:  # it is as one that is stuck
                    print(
                        f"disttensor: node {rank} has said {len(said)} bytes that are no offer: {str(e)!a:.300}",
                        file=sys.stderr,
                    )
            return any(rank in self.offers for rank in missing)

        while missing and await_true(one_came, timeout):
            missing = [rank for rank in missing if rank not in self.offers]
        return missing

    def order(self, rank: int, data: bytes) -> None:
        """Takes up a node's offer, so that it is waiting for this order.

        Empty data means that there is nothing more to do.
        """
        del self.offers[rank]
        self.used = self.used or bool(data)
        self.world.comm.Send([data, self.world.mpi.BYTE], rank + 1, ORDER)

    def leave(self, code: int) -> None:
        """Ends all nodes, and MPI, as this process is about to end with that exit code. It may end the process."""
        if self._left or os.getpid() != self.pid:
            return
        self._left = True
        nodes = range(self.world.comm.size - 1)
        stuck = self.gather(nodes, _PATIENCE)
        if not stuck:
            for rank in nodes:
                self.order(rank, b"")
            stuck = self.gather(nodes, _PATIENCE) or [rank for rank, offer in self.offers.items() if offer.untidy]
        if self.adopts:
            end_children(_PATIENCE)
        if stuck or self.world.abandoned:
            self._abort(code)
        for rank in nodes:
            self.order(rank, b"")
        self.world.mpi.Finalize()

    def _abort(self, code: int) -> NoReturn:
        """Ends this process, and by that all of them."""
        flush()
        if not self.world.is_open_mpi:  # Open MPI's mpiexec prints more about an abort than about an exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # nobody needs to read that this was an abort
            self.world.comm.Abort(code)
        os._exit(code)

    def _at_exit(self) -> None:
        self.leave(self.code)


@cache
def mpi_processes() -> MpiProcesses:
    """Returns the nodes of this process, the master. Raises StartError as ``mpi_env.world``, and on other ranks."""
    return MpiProcesses(mpi_env.world())


def lead(program: Callable[[], int]) -> tuple[int, bool]:
    """Runs ``program`` on rank 0; returns its exit code, and whether it used nodes.

    At the end of the process all that was started is ended.
    """
    adopt_orphans()
    mine = mpi_processes()
    mine.adopts = True
    mine.code = program()
    return mine.code, mine.used
