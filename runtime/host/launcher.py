"""The interface of launchers: start workers from bundles, tell how they end, leave none behind.

A worker is a process that is given its bundle through a pipe, its *life-line* (``write_bundle``), and calls
``disttensor.runtime.node.worker.main`` with the descriptor of the read end. The master holds the other end: the
life-line's end is the master's, and ends the worker. ``spawn.node_command`` is a command line for such a process.

The output of a worker comes out at the master's stdout and stderr, line by line, with ``[node 1] `` before each.

The master's end, even by SIGKILL, ends all that was started, soon. Ctrl-C on its terminal ends nothing of it. No key is
in a command line or in an environment.

``check_launcher`` (contracts/launcher.py) tests all of this.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..process.page import Beside
from ..process.renamed import old_methods
from ..protocol.bundle import Bundle
from ..protocol.errors import StartError
from ..protocol.keys import curve_pair
from .launch_spec import LaunchSpec
from .output_options import Output
from .process_use import UNKNOWN, ProcessUse


@dataclass(frozen=True)
class Started:
    """An event: a worker process runs."""

    rank: int
    pid: int
    host: str = ""  #: empty: this one


@dataclass(frozen=True)
class Exited:
    """An event: a worker process has ended."""

    rank: int
    pid: int
    cause: str  #: one line: "exit code 3", "killed by SIGKILL (likely out of memory: 21.3 GB at its peak)"
    code: int  #: exit code, or minus the signal's number
    tail: tuple[str, ...]  #: its last output lines (20 at most), without the prefix
    host: str = ""  #: the host where it ran; empty: this one
    running: int = -1  #: the number of the command whose function it was running, where the launcher knows that
    beside: tuple[int, ...] = ()  #: those of the functions that ran on its streams
    flight: bytes = b""  #: its flight record (process/flight.py), where the launcher has it


@dataclass(frozen=True)
class Sight:
    """An event: what a worker process looks like from outside, as ``look`` has asked for."""

    rank: int
    state: str  #: of its process, as in /proc: "R", "S", "T", ...
    paused: bool  #: its host hears nothing of this one, so it was stopped
    seq: int  #: the number of the command that it was at last
    kind: int  #: what it is at (process/page.py)
    peer: int  #: the peer that it waits for there; ``page.NOBODY``: none
    seconds: float  #: for how long
    deaf: float  #: for how many seconds its own threads have not run
    rss: int  #: bytes of memory
    stack: str  #: the stacks of its threads; empty for a stopped process
    beside: tuple[Beside, ...] = ()  #: the functions that run on its streams, oldest first
    stacks: bool = True  #: whether its stacks were asked for
    cpu: float = 0.0  #: seconds for which it has run on cores
    lived: float = 0.0  #: seconds since its start
    peak: int = 0  #: the most bytes of memory that it had; 0 where that isn't known
    last_line: str = ""  #: the last line of its output
    flight: bytes = b""  #: its flight record, as ``recall`` has asked for
    use: ProcessUse = UNKNOWN  #: what it has used, and waited for


class ReadLines(NamedTuple):
    """Lines that workers have printed, the oldest first."""

    lines: Sequence[tuple[int, int, str]]  #: each with its number, from 1 on for all workers together, and its rank
    more: bool  #: whether there are further ones


class Launcher(ABC):
    """Starts and ends workers. Used by one session, which takes care of ``events`` and ``stop``.

    ``start``, ``events`` and ``end_worker`` return at once; ``flush``, ``read_output`` and ``stop`` wait.

    Attributes:
        capacity: the most nodes that it can start; None: as many as are asked for.
        listen: the addresses of this host that nodes reach; the master has to listen there.
        grows: more nodes may come after the session has begun.
        watches: its own processes on other hosts tell when nothing is heard of one, and stop nodes that hear nothing.
        vacant: the number of further nodes that could be started at once; ``events`` updates it.
        starts_children: its workers are processes of this host, and their pids come from who has forked them, not from
            a message of theirs or of another host's: the script may read their memory.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        old_methods(Launcher, cls, {"end": "end_worker"})

    capacity: int | None = None  #: the most nodes; None: as many as are asked for
    listen: tuple[str, ...] = ("127.0.0.1",)  #: addresses of this host that nodes reach, where the master has to listen

    watches = False  #: its own processes tell of silent hosts
    grows = False  #: more nodes may come when the session has begun
    starts_children = False  #: its workers' pids come from who has forked them, on this host
    vacant = 0  #: the number of further nodes that could be started at once; ``events`` updates it

    @classmethod
    def of(cls, spec: LaunchSpec) -> Launcher:
        """Makes the launcher for a launch spec that names it in ``launcher``.

        Raises StartError, ValueError for a bad spec.
        """
        return cls()

    def too_many(self, count: int) -> str:
        """Returns the reason why there cannot be ``count`` nodes, which is beyond ``capacity``."""
        return f"there is room for {self.capacity} (hosts and slots can be named: b:4 is for four nodes)"

    def missing(self, ranks: Sequence[int]) -> str:
        """Returns the state that these nodes are waiting on, and the host: for the error when they are late."""
        return ""

    def key_pairs(self, count: int) -> list[tuple[str, str]]:
        """Returns the key pair of each node, public key first.

        The secret one is empty where the node itself has made it. Raises StartError when that many nodes cannot be
        started.
        """
        return [curve_pair() for _ in range(count)]

    def side_key_pairs(self, count: int) -> list[tuple[str, str]]:
        """Returns a second key pair of each node, as ``key_pairs`` does: that of its side channel.

        Empty where nodes can have no side channels, as with a launcher whose ``key_pairs`` is its own and which has no
        method of this name: a secret key might not be allowed to travel.
        """
        return [curve_pair() for _ in range(count)] if type(self).key_pairs is Launcher.key_pairs else []

    def show(self, output: Output) -> None:
        """Sets how to show the output of nodes that are started after this.

        Raises StartError where that can't be chosen.
        """
        raise StartError(f"{type(self).__name__} can't choose what is done with the output of nodes")

    def flush(self, timeout: float) -> None:  # noqa: B027 - most show at once what there is
        """Shows all output of nodes until now; waits for that, ``timeout`` seconds at most. Raises nothing."""

    def read_output(self, ranks: Sequence[int], after: int, timeout: float) -> ReadLines | None:
        """Returns the last lines that these workers have printed: those behind line ``after``; -10: the last ten. None
        where that is not kept.

        Callable by any thread. Waits for them. Raises TimeoutError, StartError after ``stop``.
        """
        return None

    @abstractmethod
    def start(self, bundles: Sequence[Bundle]) -> None:
        """Asks for one worker per bundle and returns at once.

        A bundle says nothing of places on hosts yet: the launcher fills in ``local_rank`` and ``local_size`` where
        there are several. Raises StartError when it is impossible, or after ``stop``.
        """

    @abstractmethod
    def fileno(self) -> int:
        """Returns a descriptor that is readable when ``events`` has something."""

    @abstractmethod
    def events(self) -> Sequence[Started | Exited | Sight]:
        """Returns the events since the last call, of each worker Started before Exited; never blocks.

        A worker that could not be started is Exited too, with the reason as its cause or its last lines. Raises
        StartError if the launcher itself died, and its workers with it.
        """

    def look(self, rank: int) -> None:  # noqa: B027 - a launcher that cannot has nothing to do
        """Asks for a Sight of a worker, which ``events`` brings soon; none comes for one that has ended."""

    def glance(self, rank: int) -> None:
        """Asks for a Sight without the stacks of the worker's threads, which costs the worker nothing."""
        self.look(rank)

    def recall(self, rank: int) -> None:  # noqa: B027 - a launcher that cannot has nothing to do
        """Asks for a Sight without stacks and with the worker's flight record, which costs the worker nothing."""

    def end_worker(self, rank: int) -> None:  # noqa: B027 - a launcher that cannot has nothing to do
        """Ends a worker that is lost to the master, at once: its peers may be waiting for its messages.

        Its process group ends with it; nothing happens if it has ended already.
        """

    @abstractmethod
    def stop(self, grace: float) -> None:
        """Waits ``grace`` seconds for workers to end by themselves, then ends them (TERM, then KILL) and reaps all.

        When it has returned, no process that it started is alive, nor of a worker's process group, and nothing is open
        any more. It may be called at any time, and takes no longer than workers do. Calling it twice is fine.
        """

    def leave(self, code: int) -> None:  # noqa: B027 - most have nothing beyond their sessions
        """Prepares for ``os._exit(code)`` of this process, which skips what it has registered for its end."""
