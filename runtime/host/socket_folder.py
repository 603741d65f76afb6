"""The folder with the sockets of this user's jobs (job_sockets.py), which is this user's alone.

A job removes its socket when it ends. Of one that is killed the processes that outlive it for a moment do so, its fork
server and its root; what is left all the same goes when somebody looks for jobs.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from pathlib import Path

#: What stands behind the number in the name of a socket for nodes whose script is on another host.
NODES = "-nodes"
#: Where a user without a folder of its own has one: all of its processes have to agree, so TMPDIR does not count.
_TMP = "/tmp"


class NotOurs(OSError):
    """A folder for sockets that somebody else has made, or can get at."""


def folders() -> list[str]:
    """Returns the folders where sockets of this user's jobs may be, whether they are there or not; the best first."""
    found = [f"{_TMP}/disttensor-{os.getuid()}"]
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if os.path.isabs(runtime):
        with contextlib.suppress(OSError):
            if os.stat(runtime).st_uid == os.getuid():  # after su it may be that of another user
                found.insert(0, os.path.join(runtime, "disttensor"))
    return found


def check_folder(folder: str) -> None:
    """Raises NotOurs for a folder that is not this user's alone, FileNotFoundError for none."""
    found = os.lstat(folder)
    if stat.S_ISLNK(found.st_mode) or not stat.S_ISDIR(found.st_mode):
        raise NotOurs(f"{folder} is not a folder")
    if found.st_uid != os.getuid():
        raise NotOurs(f"{folder} is that of user {found.st_uid}, and this process is user {os.getuid()}'s")
    if found.st_mode & 0o077:
        raise NotOurs(f"others may use {folder}: its mode is {stat.S_IMODE(found.st_mode):o}, and has to be 700")


def make_folder() -> str:
    """Makes the folder for sockets, unless it is there, and returns it. Raises OSError, and NotOurs for one that is not
    this user's alone."""
    failed: OSError | None = None
    for folder in folders():
        try:
            with contextlib.suppress(FileExistsError):
                os.mkdir(folder, 0o700)
            check_folder(folder)
        except NotOurs:
            raise
        except OSError as e:
            failed = failed or e
        else:
            return folder
    raise failed or OSError("there is no folder for sockets")


def remove_folder(folder: str) -> None:
    """Removes the folder, unless something is in it or it is gone."""
    with contextlib.suppress(OSError):
        os.rmdir(folder)


def remove_dead(path: str) -> bool:
    """Removes a socket at which nobody listens any more; returns whether there is none now."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except (ConnectionRefusedError, FileNotFoundError):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            return True
        except BlockingIOError:  # it has no room for one more, and so lives
            return False
    return False


def bind_in_folder(listener: socket.socket, name: str) -> str:
    """Binds a socket to a name in the folder, and returns the path. Raises OSError, also for a name that is taken, and
    NotOurs."""
    while True:
        path = os.path.join(make_folder(), name)
        if not remove_dead(path):
            raise OSError(f"{path} is another job's, in another space of process numbers")
        with contextlib.suppress(FileNotFoundError):  # the last job there has removed the folder meanwhile
            listener.bind(path)
            return path


def living_sockets() -> list[Path]:
    """Returns the sockets of this user's jobs on this host, and removes those of jobs that have ended."""
    found: list[Path] = []
    for folder in folders():
        with contextlib.suppress(OSError):
            check_folder(folder)
            paths = [path for path in Path(folder).glob("*.sock") if path.stem.removesuffix(NODES).isdecimal()]
            found += [path for path in paths if not remove_dead(str(path))]
            remove_folder(folder)
    return found
