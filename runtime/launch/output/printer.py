"""Prints the output of nodes: log files, ``[node 1]`` before each line, many nodes' same line once.

    pieces of a node's stdout --> log file (as they are)
                              \\-> Lines --> OutputFolding (20 ms at most) --> "[node 1] ..." --> OutputFd --> stdout
                                         \\-> KeptOutput, for who looks on

Used by the process nearest to the user: the fork server of a local session, the root of one on several hosts.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Iterable, Mapping, Sequence

from ...host.output_options import STREAMS, Output, OutputChoice
from ...host.private_files import lock_file, make_private_folder, open_private_file
from ...process.renamed import old_method
from .folding import FoldedLine, OutputFolding
from .kept import KeptOutput
from .lines import Lines, showable
from .output_fd import OutputFd, Terminal

#: The interval at which a progress bar is shown (seconds); it is also shown when it has ended.
BAR = 5.0

#: What to do where log files are another job's, or another user's.
_ELSEWHERE = "name another folder (log_dir=, dtrun --log-dir)"

#: A colour for each node: the bright ones after the others; no red, which means trouble, and neither black nor white.
_COLOURS = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)


class Printer:
    """Shows and stores the output of nodes. Not for several threads.

    ``push`` is to be called when ``due`` says so and when there is room in ``waiting``.
    """

    begin = old_method("begin", "begin_node")
    take = old_method("take", "feed")
    end = old_method("end", "end_node")

    def __init__(
        self,
        output: Output = Output(),  # noqa: B008 - frozen
        fds: tuple[int, int] = (1, 2),
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        self.kept = KeptOutput()  #: what nodes have printed last, shown or not
        self._folder = OutputFolding()
        self._streams: dict[tuple[int, int], _Stream] = {}
        self._begun: set[int] = set()  #: all nodes that there have been
        self._running: set[int] = set()
        self._bars: dict[_Stream, float] = {}  #: bars that have changed -> when to show them
        self._sinks: dict[int, OutputFd] = {}
        self._coloured: dict[int, bool] = {}
        forced = environment.get("FORCE_COLOR", "") not in ("", "0")
        for stream, fd in zip(STREAMS, fds, strict=True):
            terminal = is_terminal(fd, environment)
            self._sinks[stream] = Terminal(fd) if terminal else OutputFd(fd)
            self._coloured[stream] = forced or (terminal and not environment.get("NO_COLOR"))
        self._set(output)

    def _set(self, output: Output) -> None:
        self._output = output
        self._redirected = OutputChoice(output.redirects)
        # like torchrun's, but that a directory without any choice means all: nobody names one for nothing
        self._teed = OutputChoice(output.tee if output.tee or output.redirects else "3")

    def show(self, output: Output) -> None:
        """Sets how to show the output of nodes that begin after this. Raises ValueError."""
        self._set(output)

    # ---- output of nodes -------------------------------------------------------------------------------------------

    def begin_node(self, rank: int) -> None:
        """Notes that a node may print. Raises OSError when its log files cannot be opened."""
        for stream in STREAMS:
            self._streams[rank, stream] = self._open(rank, stream)
        self._begun.add(rank)
        self._running.add(rank)

    def _open(self, rank: int, stream: int) -> _Stream:
        output, log = self._output, -1
        silent = bool(output.log_dir) and self._redirected.has(rank, stream)
        if output.log_dir and (silent or self._teed.has(rank, stream)):
            log = _open_log(os.path.join(output.log_dir, str(rank), STREAMS[stream]))
        return _Stream(rank, stream, log, silent)

    def feed(self, rank: int, stream: int, piece: bytes) -> None:
        """Takes a piece of a node's output to its stdout (1) or stderr (2)."""
        source = self._streams.get((rank, stream))
        if source is None:  # of a node whose end was noted: a straggler of its host
            source = self._streams[rank, stream] = _Stream(rank, stream, -1, silent=False)
        if trouble := source.keep(piece):
            self._put(2, b"", [trouble])
        lines = source.lines.feed(piece)
        self.kept.add(rank, lines)
        if source.silent:
            return
        now = time.monotonic()
        self._fold(source, lines, now)
        if source.lines.bar:
            self._bars.setdefault(source, max(now, source.shown + BAR))
        else:
            self._bars.pop(source, None)

    def _fold(self, source: _Stream, lines: Iterable[bytes], now: float) -> None:
        alone = self._running == {source.rank} and self._folder.due() is None
        if alone or not self._output.fold:
            self._put(source.stream, self._prefix(source.stream, [source.rank]), lines)
            return
        for line in lines:
            self._folder.add(source.rank, source.stream, line, now)
        self._show(self._folder.take_due(now, len(self._running)))

    def remark(self, host: str, lines: Iterable[bytes]) -> None:
        """Shows output of a host to its stderr, not of one of its nodes."""
        self._put(2, f"[{host}] ".encode(), map(showable, lines))

    def end_node(self, rank: int) -> None:
        """Notes that a node prints nothing more."""
        for stream in STREAMS:
            source = self._streams.pop((rank, stream), None)
            if source is not None:
                self._bars.pop(source, None)
                unfinished = source.lines.take_unfinished()
                self.kept.add(rank, unfinished)
                if not source.silent:
                    self._fold(source, unfinished, time.monotonic())
                source.close()
        self._running.discard(rank)

    # ---- destinations ----------------------------------------------------------------------------------------------

    def _show(self, groups: Sequence[FoldedLine]) -> None:
        for group in groups:
            self._put(group.stream, self._prefix(group.stream, group.ranks), [group.text])

    def _put(self, stream: int, prefix: bytes, lines: Iterable[bytes]) -> None:
        lines = list(lines)
        if self._coloured[stream]:
            lines = [line + b"\x1b[0m" if b"\x1b" in line else line for line in lines]
        if lines:
            self._sinks[stream].put(b"%b%b\n" % (prefix, (b"\n" + prefix).join(lines)))

    def _prefix(self, stream: int, ranks: Sequence[int]) -> bytes:
        if len(ranks) == 1:
            name, style = f"node {ranks[0]}", f"{_COLOURS[ranks[0] % len(_COLOURS)]}"
        elif len(ranks) == len(self._begun):
            name, style = f"{len(ranks)} nodes", "1"
        else:
            name, style = f"nodes {spans(ranks)}", "1"
        return f"\x1b[{style}m[{name}]\x1b[0m ".encode() if self._coloured[stream] else f"[{name}] ".encode()

    @property
    def full(self) -> bool:
        """True when so much is waiting to be written that nodes should wait."""
        return any(sink.full for sink in self._sinks.values())

    @property
    def outputs(self) -> list[int]:
        """The descriptors that it writes to."""
        return [sink.fd for sink in self._sinks.values()]

    @property
    def waiting(self) -> list[int]:
        """The descriptors of ``outputs`` that need room before anything else can be written."""
        return [sink.fd for sink in self._sinks.values() if sink.pending]

    @property
    def due(self) -> float | None:
        """The time when ``push`` has something to do, by ``time.monotonic``; None if nothing waits for a time."""
        times = [t for t in (self._folder.due(), *self._bars.values()) if t is not None]
        return min(times) if times else None

    def push(self, patience: float = 0.0) -> None:
        """Writes what is to be shown by now and fits; waits for room so many seconds in all."""
        now = time.monotonic()
        for source in [s for s, when in self._bars.items() if when <= now]:
            del self._bars[source]
            source.shown = now
            self._fold(source, [source.lines.bar], now)
        self._show(self._folder.take_due(now, len(self._running)))
        for sink in self._sinks.values():
            sink.push(patience)

    def flush(self, patience: float = 0.0) -> None:
        """Does what ``push`` does, with all output that has arrived, finished lines at least."""
        self._show(self._folder.take_due(float("inf"), 0))
        self.push(patience)

    def fds(self) -> list[int]:
        """Returns the descriptors that a child of this process must not keep open."""
        logs = [source.log for source in self._streams.values() if source.log >= 0]
        return [*logs, *(fd for sink in self._sinks.values() for fd in sink.fds)]

    def close(self) -> None:
        """Closes the descriptors that it has opened. Nothing may come after this."""
        for fd in self.fds():
            os.close(fd)


def _open_log(path: str) -> int:
    """Opens a node's log file for this process alone. Raises OSError, with another one's files as well."""
    try:
        make_private_folder(os.path.dirname(path))  # nodes print what only their user may see
        log = open_private_file(path, os.O_WRONLY | os.O_APPEND)
    except PermissionError as e:
        raise PermissionError(e.errno, f"{e.strerror}: {_ELSEWHERE}", e.filename) from e
    if not lock_file(log):
        os.close(log)
        raise BlockingIOError(errno.EBUSY, f"Another job writes to this file now: {_ELSEWHERE}", path)
    return log


class _Stream:
    """The stdout or stderr of a node."""

    def __init__(self, rank: int, stream: int, log: int, silent: bool) -> None:
        self.rank = rank
        self.stream = stream
        self.log = log  #: its log file or -1
        self.silent = silent  #: its output goes to the log file only
        self.lines = Lines()
        self.shown = float("-inf")  #: when its progress bar was shown last

    def keep(self, piece: bytes) -> bytes:
        """Writes a piece to the log file; returns the message if that has failed, once."""
        if self.log < 0:
            return b""
        try:
            while piece:
                piece = piece[os.write(self.log, piece) :]
        except OSError as e:
            self.close()
            self.silent = False
            return f"disttensor: no more output of node {self.rank} goes to its {STREAMS[self.stream]}: {e}".encode()
        return b""

    def close(self) -> None:
        if self.log >= 0:
            os.close(self.log)
            self.log = -1


def spans(ranks: Iterable[int]) -> str:
    """Formats ranks as ranges: ``0,2-4``."""
    out: list[list[int]] = []
    for rank in sorted(ranks):
        if out and rank == out[-1][-1] + 1:
            out[-1][1:] = [rank]
        else:
            out.append([rank])
    return ",".join("-".join(map(str, span)) for span in out)


def is_terminal(fd: int, environment: Mapping[str, str]) -> bool:
    """Returns whether ``fd`` is a terminal that moves a cursor as it is told.

    Notebooks (``!dtrun``), builders of software and containers also give terminals to what they run, and show
    everything that is written there.
    """
    with contextlib.suppress(OSError):
        plain = (
            environment.get("TERM", "") in ("", "dumb") or environment.get("JPY_PARENT_PID") or environment.get("CI")
        )
        return os.isatty(fd) and not plain and os.get_terminal_size(fd).columns > 0
    return False
