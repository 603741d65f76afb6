"""Agents whose wire is their stdin and stdout: the root starts one process per host, such as ssh, that leads there.

    root --socket--> stdin, stdout of a process --...--> agent          its stderr: the reasons, if that fails

Output of a login shell to stdout before the agent's MARK is not a frame; it belongs to the reasons as well.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from abc import abstractmethod
from typing import TYPE_CHECKING

from ...host.launch_spec import Host, LaunchSpec
from ...process.lifetime import describe_exit, die_with_parent
from ...process.renamed import old_names
from ..output.lines import TAIL_LINES, TAIL_WIDTH, shown_in_tail
from ..tree.control import AgentNews, Order
from ..tree.framed import MARK, FramedSocket
from ..tree.host_starter import Branch, HostStarter
from ..tree.spawn import BOOT
from ..tree.stderr_tail import StderrTail

#: Seconds within which a process has to end when its stdout has.
PATIENCE = 1.0


class PipedStarter(HostStarter):
    """Starts one process per host of the launch spec."""

    def begin(self) -> None:
        for host in self.spec.hosts:
            PipedBranch(self, host)

    @abstractmethod
    def command(self, host: Host) -> list[str]:
        """Returns the command line that leads to an agent there. No secrets: everybody can read it."""

    def called(self, host: Host) -> str:
        """Returns the name of that program, for messages."""
        return "the agent"

    def unanswered(self, host: Host) -> str:
        """Returns the message about a host from which nothing has come."""
        return f"{self.called(host)} has not connected yet"

    @classmethod
    def advice(cls, host: str, lines: list[str]) -> str:
        """Returns advice when the process has ended before its agent has come, by its last lines."""
        return ""

    @classmethod
    def differing(cls, spec: LaunchSpec, host: str, lines: list[str]) -> str:
        """Returns the whole reason when that was because of what the host lacks, by the process's last lines."""
        return ""


class PipedBranch(Branch):
    """The branch of one such process. Adds itself to the root."""

    def __init__(self, starter: PipedStarter, host: Host) -> None:
        super().__init__(host.name, host.slots)
        self._starter, self._root, self._loop = starter, starter.root, starter.loop
        self._closed = True  #: also while nothing is open yet
        self._program, self._unanswered = starter.called(host), starter.unanswered(host)
        self._root.add(self)
        me = os.getpid()
        ours, theirs = socket.socketpair()
        err, err_in = os.pipe2(os.O_CLOEXEC)
        try:
            with contextlib.ExitStack() as stack:
                stack.callback(os.close, err_in)
                stack.enter_context(theirs)
                self._process = subprocess.Popen(
                    starter.command(host),
                    stdin=theirs.fileno(),
                    stdout=theirs.fileno(),
                    stderr=err_in,
                    start_new_session=True,
                    preexec_fn=lambda: die_with_parent(me),
                )
        except OSError as e:
            ours.close()
            os.close(err)
            self._root.lost(self, f"{self._program} could not be started: {e}", os.EX_OSERR, ())
            return
        self._reasons = StderrTail(self._loop, err, self._remark)
        self._wire = _Marked(ours.detach())
        self._pidfd = os.pidfd_open(self._process.pid)
        self._closed = False
        self._loop.watch(self._wire.fileno(), self._hear)
        self._loop.watch(self._pidfd, self._reap)
        self._root.report_status(self, self._unanswered)
        self._loop.later(starter.spec.timeout, self._too_late)

    def send_order(self, order: Order) -> None:
        if not self._closed:
            self._wire.send_message(order)
            self._wire.watch_room(self._loop)

    def push(self) -> None:
        if not self._closed and not self._wire.ended:
            self._wire.push()
            self._wire.watch_room(self._loop)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._loop.unwatch(self._wire.fileno())
            self._wire.close()
            self._reasons.close()
            if self._process.poll() is None:
                self._process.terminate()

    def _hear(self) -> None:
        self._root.hear(self, self._wire)
        if self._wire.ended and not self._closed:
            self._loop.unwatch(self._wire.fileno())  # how the process ends says more
            self._loop.later(PATIENCE, self._give_up)

    def _remark(self, lines: list[bytes]) -> None:
        """Shows its stderr as the host's own output, once the agent has come."""
        if self.agent_hello is not None:
            self._root.remark(self.host, lines)

    def _reap(self) -> None:
        code = self._process.poll()
        if code is None:
            return
        self._loop.unwatch(self._pidfd)
        os.close(self._pidfd)
        if self._closed:
            return
        self._hear()
        self._reasons.read()
        if not self._closed:
            how = describe_exit(code)
            tail = self.last_lines()
            if self.agent_hello is None:
                if differing := self._starter.differing(self._starter.spec, self.host, tail):
                    self._root.lost(self, differing, code or 1, ())
                    return
                advice = self._starter.advice(self.host, tail)
                cause = f"{self._program} ended ({how}) before an agent was there{advice and '; ' + advice}"
            else:
                cause = f"the connection with its agent has ended ({self._program}: {how})"
            self._root.lost(self, cause, code or 1, tail)

    def _give_up(self) -> None:
        if not self._closed:
            self._root.lost(self, "the connection with its agent has ended", os.EX_UNAVAILABLE, self.last_lines())

    def _too_late(self) -> None:
        if not self._closed and self.agent_hello is None:
            cause = f"no agent was there within {self._starter.spec.timeout:g} s ({self._unanswered})"
            self._root.lost(self, cause, os.EX_UNAVAILABLE, self.last_lines())

    def last_lines(self) -> list[str]:
        before = map(shown_in_tail, self._wire.preamble.splitlines() if self.agent_hello is None else [])
        return [*before, *self._reasons.lines][-TAIL_LINES:]


class _Marked(FramedSocket[AgentNews]):
    """A framed socket whose frames begin after MARK."""

    def __init__(self, fd: int) -> None:
        super().__init__(AgentNews, fd)
        self.preamble = b""  #: the end of the output before MARK
        self._begun = False

    def _feed(self, piece: bytes) -> None:
        if self._begun:
            self._in += piece
            return
        self.preamble += piece
        before, mark, after = self.preamble.partition(MARK)
        self._begun = bool(mark)
        self.preamble = before[-(TAIL_LINES * TAIL_WIDTH) :]
        self._in += after


class LocalAgentStarter(PipedStarter):
    """Starts agents on this host, under any names: for tests that do not depend on the network."""

    def command(self, host: Host) -> list[str]:
        return agent_here(self.spec)


def agent_here(spec: LaunchSpec) -> list[str]:
    """Returns the command line of an agent on this host, with the Python and the modules of this process."""
    path = json.dumps([p for p in sys.path if isinstance(p, str)])
    return [sys.executable, "-P", BOOT, "agent", path, *spec.options.get("preload", "").split()]


if not TYPE_CHECKING:  # to type checkers, any name would be there
    __getattr__ = old_names(__name__, {"NearbyEngine": "LocalAgentStarter", "PipedEngine": "PipedStarter"})
