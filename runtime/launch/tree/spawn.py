"""Starts a fork server or a root, and finds the one that dtrun has started."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import stat
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence

from ...host.launch_spec import LaunchSpec
from ...host.output_options import Output
from ...protocol.bundle import names_as_text
from ...protocol.errors import StartError
from .framed import frame

#: The environment variable by which dtrun tells the script the descriptor of its server's socket.
LAUNCHER_FD = "DISTTENSOR_LAUNCHER_FD"

#: An option that changes nothing on such a socket, and is seen by all who hold it.
_TAKEN = socket.SO_KEEPALIVE

#: The script that these processes run.
BOOT = os.path.join(os.path.dirname(os.path.dirname(__file__)), "entry.py")

#: Modules that a worker imports, and some that it would otherwise import after the fork, each for itself.
PRELOAD = (
    "disttensor.runtime.node.worker",
    "disttensor.runtime.transport.zmq",
    "disttensor.runtime.channel.tcp.channel",
)


def spawn_server(
    preload: Sequence[str] = PRELOAD,
    tied: bool = False,
    output: Output | None = None,
    environment: Mapping[str, str] | None = None,
) -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """Starts a fork server; returns its control socket and its process.

    Args:
        preload: modules that it imports before the first fork.
        tied: it dies with the calling thread, which must be the main thread.
        output: how it shows the output of nodes, until another order.
        environment: its environment, and that of the nodes; None for this process's.

    Raises StartError.
    """
    sock, process = _spawn("server", "the fork server", tied, environment, *preload)
    if output is not None:
        _first(sock, output)
    return sock, process


def spawn_root(spec: LaunchSpec, tied: bool = False) -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """Starts a root and sends it its launch spec. Otherwise as ``spawn_server``."""
    sock, process = _spawn("root", "the root", tied, None)
    _first(sock, spec)
    os.environ.pop("DISTTENSOR_SECRET", None)  # the root has it now (credentials.py), and nobody else needs it
    return sock, process


def node_command(entry: str) -> list[str]:
    """Returns the command line of a worker, for launchers that start each by itself.

    Its stdin is its life-line: the bundle (``write_bundle``), and then nothing until the master ends. ``entry`` is the
    function that it runs, "module:function".
    """
    path = json.dumps([p for p in sys.path if isinstance(p, str)])
    return [sys.executable, "-u", "-P", BOOT, "node", path, entry]


def _first(sock: socket.socket, word: Output | LaunchSpec) -> None:
    with contextlib.suppress(OSError):  # it has ended already, which the socket's end will tell
        sock.sendall(frame(names_as_text(word)))


def _spawn(
    role: str, name: str, tied: bool, environment: Mapping[str, str] | None, *arguments: str
) -> tuple[socket.socket, subprocess.Popen[bytes]]:
    try:
        ours, theirs = _socketpair()
    except OSError as e:  # no descriptors left
        raise StartError(f"{name} could not be started: {e}") from e
    try:
        flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
        path = json.dumps([p for p in sys.path if isinstance(p, str)])
        parent = str(os.getpid() if tied else 0)
        process = subprocess.Popen(
            [sys.executable, *flags, "-P", BOOT, role, path, str(theirs.fileno()), parent, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=None if _is_open(1) else subprocess.DEVNULL,
            stderr=None if _is_open(2) else subprocess.DEVNULL,
            env=environment,
            pass_fds=(theirs.fileno(),),
            start_new_session=True,  # Ctrl-C on the terminal is the master's
        )
    except (OSError, ValueError) as e:
        ours.close()
        raise StartError(f"{name} could not be started ({sys.executable!r}): {e}") from e
    finally:
        theirs.close()
    return ours, process


def _socketpair() -> tuple[socket.socket, socket.socket]:
    """Makes two sockets that are not 0, 1 or 2: a daemon may have closed those, and they stand for something else."""
    with contextlib.ExitStack() as stack:
        pair = [stack.enter_context(s) for s in socket.socketpair()]
        first, second = (socket.socket(fileno=fcntl.fcntl(s.fileno(), fcntl.F_DUPFD_CLOEXEC, 3)) for s in pair)
    return first, second


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def inherited_server() -> socket.socket | None:
    """Returns the control socket of dtrun's server, once, and only in the script that dtrun started.

    Not in that script's children.
    """
    text = os.environ.pop(LAUNCHER_FD, "")
    try:
        fd = int(text)
        if not stat.S_ISSOCK(os.fstat(fd).st_mode):
            return None
        sock = socket.socket(fileno=fd)
    except (ValueError, OSError):
        return None
    maker = 0
    if sock.family == socket.AF_UNIX:
        maker = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
    if maker != os.getppid():  # a child of the script inherited the variable; this descriptor is something else
        sock.detach()
        return None
    sock.set_inheritable(False)
    sock.setsockopt(socket.SOL_SOCKET, _TAKEN, 1)
    return sock


def was_taken(sock: socket.socket) -> bool:
    """Returns whether the script has asked for its nodes by this socket."""
    return bool(sock.getsockopt(socket.SOL_SOCKET, _TAKEN))
