"""MPI as processes that mpiexec has started see it: their rank and size, before MPI is asked and after.

Needs mpi4py (the extra ``mpi``), which is imported when somebody asks for the world. The library that mpi4py loads has
to be that of the mpiexec in use.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import msgspec

from ..protocol.errors import StartError
from .addresses import way_to
from .interfaces import interfaces

#: The variables by which mpiexec tells its processes rank and size: MPICH and its relatives, Open MPI.
_RANK_AND_SIZE = (("PMI_RANK", "PMI_SIZE"), ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"))

#: Seconds for which waiting is busy even where ``busy`` is False.
_SPIN = 1e-4
#: The longest pause between two looks at a request (seconds).
_PAUSE = 0.002

#: The bytes of a process's card.
_CARD = 2048
#: The most addresses on a card.
_ADDRESSES = 16


class Card(msgspec.Struct, frozen=True):
    """A process of the world, as it describes itself."""

    host: str
    machine: str  #: the same for two processes that can see each other's pids
    pid: int
    addresses: tuple[str, ...] = ()  #: addresses at which others may reach its host
    cores: str = ""  #: cores on which it may run, as a number with a bit for each


@dataclass(frozen=True)
class MpiWorld:
    """All processes of this mpiexec. Rank 0 is the master, rank k + 1 node k."""

    mpi: Any  #: the module mpi4py.MPI
    comm: Any  #: a communicator of disttensor's own, over all of them
    data: Any  #: another one, for the data channel
    cards: tuple[Card, ...]
    tags: int  #: messages may have tags below this, and once as many from there on
    #: requests that were given up, and what they use: MPI_Finalize would wait for them
    abandoned: list[tuple[Any, object]] = field(default_factory=list)

    @property
    def rank(self) -> int:
        return int(self.comm.rank)

    @property
    def me(self) -> Card:
        return self.cards[self.rank]

    @property
    def is_open_mpi(self) -> bool:
        return str(self.mpi.get_vendor()[0]) == "Open MPI"

    def finish(self, request: Any, memory: object, check: Callable[[], None], busy: bool = True) -> None:
        """Waits for a request, and keeps the memory that it uses. Not ``busy``: others may take their time.

        Calls ``check`` while there is nothing to do, and raises what it raises; the request is given up then.
        """
        pause, patience = 0.0, time.perf_counter() + _SPIN
        while not request.Test():
            try:
                check()
            except BaseException:
                self.abandoned.append((request, memory))
                raise
            time.sleep(pause)
            if not busy and time.perf_counter() > patience:
                pause = min(pause + _PAUSE / 100, _PAUSE)

    def ways_out(self) -> tuple[str, ...]:
        """Returns the addresses of this host by which it reaches the other hosts, as its routes have it.

        None if all processes are here. Raises StartError when there are other hosts, and no route.
        """
        far = [card for card in self.cards if card.machine != self.me.machine]
        ways: dict[str, None] = {}
        for address in {a: None for card in far for a in card.addresses if a not in self.me.addresses}:
            with contextlib.suppress(OSError):
                ways[way_to(address)] = None
        if far and not ways:
            raise StartError(f"host {self.me.host} has no way to {', '.join(sorted({card.host for card in far}))}")
        return tuple(ways)

    def keeps_apart(self, rank: int) -> bool:
        """Returns whether mpiexec has bound that process to cores that no other one of its host has."""
        card = self.cards[rank]
        others = [c for c in self.cards if c.machine == card.machine and c.pid != card.pid]
        return bool(others) and not any(int(card.cores, 16) & int(other.cores, 16) for other in others)

    def near(self, rank: int) -> bool:
        """Returns whether that process and this one are on one machine."""
        return self.cards[rank].machine == self.me.machine


@cache
def place() -> tuple[int, int] | None:
    """Returns (rank, size) of this process, by the environment; None if no mpiexec has started it."""
    return place_of(os.environ)


def place_of(environ: Mapping[str, str]) -> tuple[int, int] | None:
    """Returns (rank, size) of the process with this environment; None if no mpiexec has started it."""
    for rank, size in _RANK_AND_SIZE:
        with contextlib.suppress(KeyError, ValueError):
            return int(environ[rank]), int(environ[size])
    return None


@cache
def world() -> MpiWorld:
    """Joins all processes of this mpiexec, and waits for them to do the same. The first call takes part in MPI_Init.

    Raises StartError without mpiexec, without mpi4py, or when the two are of different MPIs.
    """
    told = place()
    if told is None:
        raise StartError("this needs MPI processes: start the script by `mpiexec -n 5 dtrun script.py`")
    try:
        import mpi4py

        mpi4py.rc.initialize = mpi4py.rc.finalize = False
        from mpi4py import MPI
    except (ImportError, RuntimeError) as e:  # RuntimeError: there is no library of MPI's
        raise StartError(f"MPI needs mpi4py and an MPI library (pip install mpi4py mpich): {e}") from e
    if not MPI.Is_initialized():
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
    if MPI.COMM_WORLD.size != told[1]:
        library, size = MPI.Get_library_version().partition("\n")[0].strip(), MPI.COMM_WORLD.size
        _forget_names()
        MPI.Finalize()
        raise StartError(
            f"mpiexec has started {told[1]} processes, of which mpi4py sees {size}: its library "
            f"({library}) is not that of this mpiexec; use the mpiexec that belongs to it"
        )
    for name in (name for names in _RANK_AND_SIZE for name in names):
        os.environ.pop(name, None)  # this process's children are none of mpiexec's
    comm = MPI.COMM_WORLD.Dup()
    card = Card(socket.gethostname()[:200], _machine(), os.getpid(), _addresses(), _cores())
    all_cards = bytearray(_CARD * comm.size)
    comm.Allgather([msgspec.json.encode(card).ljust(_CARD), MPI.BYTE], [all_cards, MPI.BYTE])
    cards = (all_cards[i : i + _CARD] for i in range(0, len(all_cards), _CARD))
    tags = MPI.COMM_WORLD.Get_attr(MPI.TAG_UB) // 2
    found = MpiWorld(MPI, comm, comm.Dup(), tuple(msgspec.json.decode(c.rstrip(), type=Card) for c in cards), tags)
    _meet_all(comm)
    _forget_names()
    return found


def joined() -> MpiWorld | None:
    """Returns the world, if this process has joined it already."""
    return world() if world.cache_info().currsize else None


def _machine() -> str:
    """Identifies the running kernel, and the pid namespace that this process sees."""
    with open("/proc/sys/kernel/random/boot_id") as boot:
        return f"{boot.read().strip()} {os.readlink('/proc/self/ns/pid')}"


def _cores() -> str:
    return f"{sum(1 << core for core in os.sched_getaffinity(0)):x}"


def _addresses() -> tuple[str, ...]:
    """Returns the addresses of this host, without those that mean another one elsewhere."""
    found = [address for own in interfaces().values() for address in own]
    return tuple(address for address in found if not ipaddress.ip_address(address).is_loopback)[:_ADDRESSES]


def _meet_all(comm: Any) -> None:
    """Has every process exchange a message with every other: Open MPI maps the memory of others when it first does."""
    byte = bytearray(1)
    for shift in range(1, comm.size):
        comm.Sendrecv(b"\0", (comm.rank + shift) % comm.size, recvbuf=byte, source=(comm.rank - shift) % comm.size)
    comm.Barrier()


def _forget_names() -> None:
    """Unlinks MPI's shared memory: MPI does so at the end only, and leaves it for ever where a process was killed."""
    with open("/proc/self/maps", errors="surrogateescape") as maps:
        lines = [line for line in maps if "/dev/shm/mpich_shm_" in line or "/dev/shm/sm_segment." in line]
    for name in {line.split(maxsplit=5)[5].strip() for line in lines}:
        with contextlib.suppress(OSError):  # another process of this machine was faster
            os.unlink(name)
