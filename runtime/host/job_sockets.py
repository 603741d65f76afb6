"""The sockets by which other programs of this user, such as `dtrun status`, ask the scripts of this host how they are.

    a script: JobWindow (job_window.py) --> $XDG_RUNTIME_DIR/disttensor/PID.sock, else /tmp/disttensor-UID/PID.sock
    an agent: the same, on a host where nodes run and their script does not --> .../PID-nodes.sock
    dtrun:    find_jobs, ask            --> connects there: a request, a line of JSON; the answer, until the end

Whose a socket is, the kernel says of each connection, to both ends; the folder is this user's alone.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Mapping
from typing import Literal, NamedTuple

import msgspec

from .socket_folder import NODES, living_sockets

#: The variable that leaves the socket out.
NO_SOCKET = "DISTTENSOR_NO_SOCKET"
#: The most bytes of a request, and of an answer.
MOST_REQUEST, MOST_ANSWER = 64 << 10, 64 << 20
#: Seconds in which a job answers. Its script may hold the GIL, or be stopped.
PATIENCE = 5.0

#: Seconds between two tries to connect where many do.
_AGAIN = 0.02
_PEER = struct.Struct("3i")  # pid, uid and gid of a peer, as the kernel tells them


class JobRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A question to a job, or an order."""

    what: Literal["summary", "status", "stack", "output", "kill", "trace", "traced"]
    nodes: tuple[int, ...] = ()  #: none: all
    after: int = 0  #: the number of the last line of output that is known; the number of a timeline
    record: bool = False  #: with stacks: the whole flight record as well
    seconds: float = 0.0  #: how long a timeline is recorded
    page: bool = False  #: a page is written of what is recorded, and no timeline


class Refusal(msgspec.Struct, frozen=True, tag=True):
    """The answer of a job that does not do what it is asked."""

    why: str


class JobSummary(msgspec.Struct, frozen=True, tag=True):
    """A job in a line."""

    pid: int
    name: str
    nodes: int
    lost: int
    hosts: tuple[str, ...]
    seconds: float  #: since its begin
    state: str  #: such as "runs" or "waits 3.2 s for node 1 at train.py:12"


class StatusAnswer(msgspec.Struct, frozen=True, tag=True):
    """The status of a job, as values and as text."""

    status: msgspec.Raw  #: what ``JobStatus.to_dict()`` has
    text: str
    lost: int
    seconds: float  #: since the job's begin


class ProcessStack(msgspec.Struct, frozen=True):
    """The stacks of the threads of a process."""

    rank: int  #: of a node; -1: the script
    host: str
    pid: int
    is_here: bool  #: it runs on the script's host
    title: str  #: the process, and what it is at
    text: str
    messages: str = ""  #: the last lines of a node's flight record


class StackAnswer(msgspec.Struct, frozen=True, tag=True):
    """The stacks of processes of a job."""

    processes: tuple[ProcessStack, ...]
    record: msgspec.Raw = msgspec.Raw(b"null")  #: the flight record, where it was asked for


class OutputLine(msgspec.Struct, frozen=True, array_like=True):
    """A line that a node has printed."""

    number: int  #: of all lines of the job's
    rank: int
    text: str


class OutputAnswer(msgspec.Struct, frozen=True, tag=True):
    """Lines of output of nodes, the oldest first."""

    lines: tuple[OutputLine, ...]
    more: bool  #: whether there are further ones


class Killed(msgspec.Struct, frozen=True, tag=True):
    """The nodes that were killed."""

    nodes: tuple[int, ...]


class TraceBegun(msgspec.Struct, frozen=True, tag=True):
    """A timeline that is recorded now."""

    number: int


class TraceAnswer(msgspec.Struct, frozen=True, tag=True):
    """A timeline, as JSON that is compressed."""

    ready: bool  #: whether it is there; else it is still recorded
    data: bytes


JobAnswer = Refusal | JobSummary | StatusAnswer | StackAnswer | OutputAnswer | Killed | TraceBegun | TraceAnswer


class JobSocketError(Exception):
    """A job's socket that can't be used: the job is gone, does not answer, or is not this user's."""


class FoundJob(NamedTuple):
    """A job of this user on this host, by its socket."""

    pid: int  #: of the script; of the agent above its nodes, where the script is on another host
    path: str
    has_script: bool = True  #: the script is on this host


# ---- jobs ------------------------------------------------------------------------------------------------------------


def find_jobs() -> list[FoundJob]:
    """Returns the jobs of this user on this host, by pid, and removes the sockets of those that have ended."""
    found = ((path.stem.removesuffix(NODES), path) for path in living_sockets())
    return sorted(FoundJob(int(pid), str(path), pid == path.stem) for pid, path in found)


def may_be_asked(environment: Mapping[str, str]) -> bool:
    """Returns whether a process with this environment makes sockets."""
    return environment.get(NO_SOCKET, "") in ("", "0")


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """Returns the pid and the user of the process at the other end of a connection, as the kernel tells them."""
    pid, uid, _ = _PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return pid, uid


def may_ask(uid: int) -> bool:
    """Returns whether a user may ask jobs of this one: this one, and root."""
    return uid in (os.getuid(), 0)


def _connect(connection: socket.socket, path: str, timeout: float) -> None:
    connection.settimeout(timeout)
    deadline = time.monotonic() + timeout
    while True:
        try:
            return connection.connect(path)
        except BlockingIOError:  # more call than there is room for
            if time.monotonic() > deadline:
                raise TimeoutError from None
            time.sleep(_AGAIN)


def pid_of(job: FoundJob) -> int:
    """Returns the pid of the process that answers for a job, as the kernel tells it. Raises JobSocketError."""
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            _connect(connection, job.path, PATIENCE)
            pid, uid = peer_of(connection)
    except OSError as e:
        raise JobSocketError(f"job {job.pid} can't be reached: {e}") from None
    if not may_ask(uid):
        raise JobSocketError(f"{job.path} is not this user's")
    return pid


def ask(job: FoundJob, request: JobRequest, timeout: float = PATIENCE) -> JobAnswer:
    """Asks a job, and returns its answer. Raises JobSocketError."""
    deadline, answer = time.monotonic() + timeout, bytearray()
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            _connect(connection, job.path, timeout)
            if not may_ask(peer_of(connection)[1]):
                raise JobSocketError(f"{job.path} is not this user's")
            connection.sendall(msgspec.json.encode(request) + b"\n")
            while piece := connection.recv(1 << 16):
                answer += piece
                if len(answer) > MOST_ANSWER:
                    raise JobSocketError(f"job {job.pid} answers without end")
                connection.settimeout(max(0.01, deadline - time.monotonic()))
        return decode_answer(job, answer)
    except TimeoutError:
        script = "its script is stopped, or holds the GIL in C code"
        why = script if job.has_script else "the agent of this host is stopped"
        raise JobSocketError(f"job {job.pid} has not answered within {timeout:g} s: {why}") from None
    except (ConnectionError, FileNotFoundError):
        raise JobSocketError(f"job {job.pid} has ended") from None
    except OSError as e:
        raise JobSocketError(f"job {job.pid} can't be asked: {e}") from None


def decode_answer(job: FoundJob, data: bytes | bytearray) -> JobAnswer:
    """Returns what a job has answered. Raises JobSocketError, and nothing else, for bytes that are no answer."""
    try:
        return msgspec.json.decode(data, type=JobAnswer)
    except (ValueError, RecursionError):
        what = "has ended meanwhile" if not data else "is of another version of disttensor: its answer is not known"
        raise JobSocketError(f"job {job.pid} {what}") from None
