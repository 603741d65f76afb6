"""The base of launchers whose workers a process beside the master starts: a fork server, or a root.

It is a plain child process with a socket, no ``multiprocessing``: a script needs no ``__main__`` guard, and notebooks
and ``python -c`` work. Under dtrun there is a warm one already; its socket is inherited.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import socket
import subprocess
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Self

import msgspec

from ...host import descriptors
from ...host.launch_spec import LaunchSpec
from ...host.launcher import Exited, Launcher, ReadLines, Sight, Started
from ...host.output_options import Output
from ...process.lifetime import describe_exit, wait_any
from ...process.renamed import old_names
from ...protocol.bundle import Bundle, names_as_text
from ...protocol.errors import ForkError, StartError
from ..output.printer import spans
from ..tree.control import (
    Began,
    Capacity,
    Ended,
    EndSession,
    Flush,
    Flushed,
    Kill,
    LaunchFailed,
    Listening,
    Look,
    News,
    OutputRead,
    ReadOutput,
    Ready,
    Seen,
    SessionEnded,
    Start,
    Status,
    Stop,
)
from ..tree.framed import FramedSocket, FramedStream

#: The function that a worker runs: it gets its life-line and returns the exit code.
WORKER = "disttensor.runtime.node.worker:main"

#: Seconds between two looks for an answer.
_GLANCE = 0.05

#: Seconds that the server may take beyond the grace to end its workers and itself (TERM, a second, KILL).
_PATIENCE = 4.0

_live: weakref.WeakSet[ServerLauncher] = weakref.WeakSet()

#: Launchers whose server is dtrun's, between sessions.
_resting: list[ServerLauncher] = []


class ServerLauncher(Launcher):
    """A launcher with a server (a fork server or a root) at the other end of ``sock``.

    ``process`` is the server's process, unless that is dtrun's. ``entry`` is the function that workers run.
    """

    #: For messages: the server's name, and the words for a server that is of no use.
    server_name, unfit = "the server", "no node can be started"
    #: The host of nodes whose server does not say it; "" where it does.
    host = ""

    def __init__(self, sock: socket.socket, process: subprocess.Popen[bytes] | None, entry: str = WORKER) -> None:
        self.entry = entry
        self._server = process
        self._wire: FramedStream[News] = FramedSocket(News, sock.detach())
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._server_pid = 0  #: known when it is ready; it has no workers before
        self._running: dict[int, int] = {}  #: rank -> pid, 0 until it began
        self._address = ""  #: the addresses at which nodes have to find the master
        self._events: list[Started | Exited | Sight] = []
        self._doing: dict[int, tuple[str, str]] = {}  #: rank -> host, and the state that it is waiting on
        self._asked = 0  #: the number of workers that were asked for
        self._flushes = self._flushed = 0  #: the ids of the last Flush and of the last that was answered
        self._reads = 0  #: the id of the last ReadOutput
        self._read: dict[int, OutputRead | None] = {}  #: by id: the answers that somebody waits for
        self._shown = self._rested = False
        self._trouble = ""  #: the reason why the server is of no use any more
        self._stopped = False
        _live.add(self)

    def __repr__(self) -> str:
        state = self._trouble or ("stopped" if self._stopped else "ready" if self._server_pid else "importing")
        return f"<{type(self).__name__} {state} workers={sorted(self._running)}>"

    def show(self, output: Output) -> None:
        with self._using():
            self._shown = True
            self._wire.send_message(names_as_text(output))

    def flush(self, timeout: float) -> None:
        with contextlib.suppress(StartError, ForkError), self._using():
            self._flushes += 1
            self._wire.send_message(Flush(self._flushes))
            self._await(lambda: self._flushed == self._flushes or bool(self._trouble), timeout)

    def read_output(self, ranks: Sequence[int], after: int, timeout: float) -> ReadLines | None:
        deadline = time.monotonic() + timeout
        with self._using():
            self._reads += 1
            id = self._reads
            self._read[id] = None
            self._wire.send_message(ReadOutput(id, tuple(ranks), after))
        try:
            while (answer := self._read[id]) is None:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise TimeoutError(f"{self.server_name} has not answered within {timeout:g} s")
                descriptors.wait_readable([self._wire], min(_GLANCE, left))  # another thread may take the answer in
                with self._using():
                    pass
            return ReadLines(answer.lines, answer.more)
        finally:
            del self._read[id]

    def start(self, bundles: Sequence[Bundle]) -> None:
        """Asks for one worker per bundle and returns at once.

        Raises StartError when the server is gone or stopped, ValueError for a rank that runs.
        """
        with self._using():
            for bundle in bundles:
                if bundle.rank in self._running:
                    raise ValueError(f"node {bundle.rank} runs already; nodes that run: {sorted(self._running)}")
                self._running[bundle.rank] = 0
                self._address = " or ".join((bundle.address, *bundle.addresses))
                self._asked += 1
                self.vacant = max(0, self.vacant - 1)
                self._wire.send_message(Start(self.placed(bundle), self.entry))
            self._wire.push(1.0)  # bytes beyond its buffer go with its news, once it has imported torch

    def placed(self, bundle: Bundle) -> Bundle:
        """Returns a bundle with the node's place on its host, where no root deals these."""
        return bundle

    def kill(self, rank: int, number: int = signal.SIGKILL) -> None:
        """Sends a signal to a worker's process group and returns; one that has ended already is left alone.

        Raises StartError when the server is gone or stopped.
        """
        with self._using():
            self._wire.send_message(Kill(rank, number))

    def look(self, rank: int) -> None:
        self._look(Look(rank))

    def glance(self, rank: int) -> None:
        self._look(Look(rank, stacks=False))

    def recall(self, rank: int) -> None:
        self._look(Look(rank, stacks=False, flight=True))

    def _look(self, order: Look) -> None:
        with contextlib.suppress(StartError), self._using():
            self._wire.send_message(order)

    def end_worker(self, rank: int) -> None:
        with contextlib.suppress(StartError):
            self.kill(rank)

    def missing(self, ranks: Sequence[int]) -> str:
        """Returns what these nodes are waiting on, a line per group: "node 3 on b: ssh has not connected yet"."""
        groups: dict[tuple[str, str], list[int]] = {}
        for rank in ranks:
            host, what = self._doing.get(rank, ("", ""))
            if self._running.get(rank):
                what = f"it runs{host and ' there'}, and has not reached the master at {self._address}"
            groups.setdefault((host, what), []).append(rank)
        lines = []
        for (host, what), members in groups.items():
            who = f"node {members[0]}" if len(members) == 1 else f"nodes {spans(members)}"
            lines.append(f"{who}{host and f' on {host}'}: {what}" if what else who)
        return "\n".join(lines)

    def found(self, addresses: Sequence[str]) -> None:
        """Handles the addresses at which agents find the root, once they are known."""

    def fileno(self) -> int:
        return self._wire.fileno()

    def events(self) -> list[Started | Exited | Sight]:
        self._check_pid()
        with self._lock:
            if not self._stopped:
                self._hear()
            events, self._events = self._events, []
            if self._trouble and not events:
                raise StartError(self._trouble)
            return events

    def stop(self, grace: float) -> None:
        if os.getpid() != self._pid:
            return  # a forked child: the nodes are its parent's
        with self._lock:
            if self._stopped:
                return
            self._stopped = True
            self._hear()
            if self._server is None and self._server_pid and self._rest(grace):
                _resting.append(self)
            else:
                self._stop_server(grace)

    def _rest(self, grace: float) -> bool:
        """Ends the workers of a server that is dtrun's, which may be wanted again; False if it is of no use then."""
        self._rested = False
        self._wire.send_message(EndSession(grace))
        self._await(lambda: self._rested, grace + _PATIENCE)
        return self._rested and not self._trouble

    @classmethod
    def reuse_resting(cls, spec: LaunchSpec) -> Self | None:
        """Takes the launcher that rests since the session before this one; None if there is none for this spec."""
        for launcher in _resting:
            if type(launcher) is cls and launcher._pid == os.getpid() and launcher.serves(spec):
                _resting.remove(launcher)
                launcher._stopped = False
                launcher._events.clear()
                launcher._doing.clear()
                if launcher._shown:
                    launcher.show(spec.output)
                return launcher
        return None

    def serves(self, spec: LaunchSpec) -> bool:
        """Returns whether the launcher is the one that this launch spec describes."""
        return True

    def _stop_server(self, grace: float) -> None:
        try:
            if self._server_pid:
                self._wire.send_message(Stop(grace))
                self._await(lambda: False, grace + _PATIENCE)
        finally:
            self._wire.close()  # by itself enough: the server ends its workers when the socket ends
            self._end_server()
            self._trouble = ""

    def _await(self, true: Callable[[], bool], seconds: float) -> None:
        """Handles news until ``true()``, the server has ended, or the time is over."""
        deadline = time.monotonic() + seconds
        self._wire.push(seconds)
        while not (true() or self._wire.ended) and (left := deadline - time.monotonic()) > 0:
            if descriptors.wait_readable([self._wire], left):
                self._hear()

    def _end_server(self) -> None:
        if self._server is None:
            if self._server_pid:
                wait_any([self._server_pid], _PATIENCE)  # dtrun reaps it
            return
        try:
            self._server.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            self._server.kill()  # the kernel kills its workers with it
            self._server.wait()
            for pid in filter(None, self._running.values()):
                wait_any([pid], 1.0)

    @contextlib.contextmanager
    def _using(self) -> Iterator[None]:
        self._check_pid()
        with self._lock:
            if self._stopped:
                raise StartError("the launcher was stopped; make a new one")
            self._hear()
            if self._trouble:
                raise StartError(self._trouble)
            yield

    def _check_pid(self) -> None:
        if os.getpid() != self._pid:
            raise ForkError(f"this launcher belongs to process {self._pid}, which forked this one")

    def _hear(self) -> None:
        """Takes in the server's news, and sends it what has had no room: it tells of each order that it has taken."""
        self._wire.push()
        for news in self._wire.hear():
            match news:
                case Ready():
                    self._server_pid = news.pid
                case Began():
                    self._running[news.rank] = news.pid
                    self._events.append(Started(news.rank, news.pid, news.host))
                case Ended():
                    self._running.pop(news.rank, None)
                    host = news.host or self.host
                    end = news.cause, news.code, news.tail, host, news.running, news.beside, news.flight
                    self._events.append(Exited(news.rank, news.pid, *end))
                case Seen():
                    self._events.append(Sight(*msgspec.structs.astuple(news)))
                case LaunchFailed():
                    self._trouble = "\n  ".join((f"{self.unfit}: {news.why}", *news.tail))
                case SessionEnded():
                    self._rested = True
                case Flushed():
                    self._flushed = max(self._flushed, news.id)
                case OutputRead() if news.id in self._read:
                    self._read[news.id] = news
                case Status():
                    self._doing.update(dict.fromkeys(news.ranks, (news.host, news.what)))
                case Capacity():
                    self.vacant = max(0, news.free - (self._asked - news.asked))
                case Listening():
                    self.found(news.addresses)
        if self._wire.ended and not self._trouble:
            how = ""
            if self._server is not None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    how = f": {describe_exit(self._server.wait(_PATIENCE))}"
            self._trouble = f"{self.server_name} (pid {self._server_pid or '?'}) has ended, and its nodes with it{how}"

    def _let_go(self) -> None:
        """Closes a forked child's copy of the socket, whose end has to mean the master's end, not the child's."""
        self._wire.close()
        if self._server is not None:
            self._server.returncode = 0  # not this process's child: nothing to wait for


@atexit.register
def _end_resting() -> None:
    """Ends resting launchers with a Stop.

    That is another end than when this process dies: the agents' exit codes tell.
    """
    while _resting:
        launcher = _resting.pop()
        if launcher._pid == os.getpid():
            launcher._stop_server(0)


def _after_fork() -> None:
    for launcher in list(_live):
        launcher._let_go()


os.register_at_fork(after_in_child=_after_fork)

if not TYPE_CHECKING:  # to type checkers, any name would be there
    __getattr__ = old_names(__name__, {"ServedLauncher": "ServerLauncher"})
