"""What the session asks of a launcher: start workers from bundles, tell how they end, leave none behind.

A worker is a process that is given its bundle through a pipe, its *life-line* (``write_bundle``), and calls
``disttensor.runtime.node.worker.main`` with the descriptor of the read end. The master holds the other end: the
life-line's end is the master's, and ends the worker. ``spawn.node_command`` is a command line for such a process.

What a worker prints comes out at the master's stdout and stderr, line by line, with ``[node 1] `` before each.

The master's end, even by SIGKILL, ends all that was started, soon. Ctrl-C on its terminal ends nothing of it. No key is
in a command line or in an environment.

``check.check_launcher`` tests all of this.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from ..protocol.bundle import Bundle
from ..protocol.errors import StartError
from ..protocol.keys import curve_pair
from .launch_spec import Plan
from .output_options import Output


@dataclass(frozen=True)
class Started:
    """A worker process runs."""

    rank: int
    pid: int
    host: str = ""  #: empty: this one


@dataclass(frozen=True)
class Exited:
    """A worker process has ended."""

    rank: int
    pid: int
    cause: str  #: one line: "exit code 3", "killed by SIGKILL"
    code: int  #: exit code, or minus the signal's number
    tail: tuple[str, ...]  #: its last output lines (20 at most), without the prefix
    host: str = ""  #: where it ran; empty: on this host


class Launcher(ABC):
    """Starts and ends workers. Used by one session; ``events`` and ``stop`` under the session's care."""

    capacity: int | None = None  #: how many nodes there can be; None: as many as are asked for
    listen: tuple[str, ...] = ("127.0.0.1",)  #: addresses of this host that nodes reach, where the master has to listen

    grows = False  #: more nodes may come when the session has begun
    vacant = 0  #: how many nodes more could be started at once; known by ``events``

    @classmethod
    def of(cls, plan: Plan) -> Launcher:
        """The launcher for a plan of which ``launcher`` is its name. Raises StartError, ValueError for a bad plan."""
        return cls()

    def too_many(self, count: int) -> str:
        """Why there cannot be ``count`` nodes, which is beyond ``capacity``."""
        return f"there is room for {self.capacity} (hosts and slots can be named: b:4 is for four nodes)"

    def missing(self, ranks: Sequence[int]) -> str:
        """What these nodes are waiting for, and on which host: for the error when they have not answered in time."""
        return ""

    def key_pairs(self, count: int) -> list[tuple[str, str]]:
        """The key pair of each node, public key first. The secret one is empty where the node itself has made it.

        Raises StartError when that many nodes cannot be started.
        """
        return [curve_pair() for _ in range(count)]

    def show(self, output: Output) -> None:
        """How to show what nodes print that are started after this. Raises StartError where that can't be chosen."""
        raise StartError(f"{type(self).__name__} can't choose what is done with the output of nodes")

    def flush(self, timeout: float) -> None:  # noqa: B027 - most show at once what there is
        """Has all shown that nodes have printed by now; waits for that, ``timeout`` seconds at most. Raises nothing."""

    @abstractmethod
    def start(self, bundles: Sequence[Bundle]) -> None:
        """Asks for one worker per bundle and returns at once.

        A bundle says nothing of places on hosts yet: the launcher fills in ``local_rank`` and ``local_size`` where
        there are several. Raises StartError when it is impossible, or after ``stop``.
        """

    @abstractmethod
    def fileno(self) -> int:
        """A descriptor that is readable when ``events`` has something."""

    @abstractmethod
    def events(self) -> list[Started | Exited]:
        """What has happened since the last call, of each worker Started before Exited; never blocks.

        A worker that could not be started is Exited too, with the reason as its cause or its last lines. Raises
        StartError if the launcher itself died, and its workers with it.
        """

    def end(self, rank: int) -> None:  # noqa: B027 - a launcher that cannot has nothing to do
        """Ends a worker that is lost to the master, at once: its peers may be waiting for what it would have sent.

        Its process group ends with it; nothing happens if it has ended already.
        """

    @abstractmethod
    def stop(self, grace: float) -> None:
        """Waits ``grace`` seconds for workers to end by themselves, then ends them (TERM, then KILL) and reaps all.

        After it returned no process that it started is alive, nor of a worker's process group, and nothing is open any
        more. It comes at any time, and takes no longer than workers do. Calling it twice is fine.
        """

    def leave(self, code: int) -> None:  # noqa: B027 - most have nothing beyond their sessions
        """This process is about to end by ``os._exit(code)``, without what it has registered for its end."""
