"""Files and folders that this user alone can read, whatever the umask: what nodes print, keys, compiled code."""

from __future__ import annotations

import contextlib
import fcntl
import os


def make_private_folder(path: str | os.PathLike[str]) -> None:
    """Makes a folder of mode 0700, and those above it that are missing. One that is there stays as it is.

    Raises OSError.
    """
    path = os.path.abspath(path)
    above = os.path.dirname(path)
    if not os.path.lexists(above):
        make_private_folder(above)
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        if not os.path.isdir(path):
            raise
        return
    if os.stat(path).st_mode & 0o700 != 0o700:  # the umask has taken even this user's rights
        os.chmod(path, 0o700)


def open_private_file(path: str | os.PathLike[str], flags: int) -> int:
    """Opens a file with ``os.O_...`` flags and returns its descriptor; one that is not there yet gets the mode 0600.

    Raises OSError.
    """
    try:
        fd = os.open(path, flags | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        return os.open(path, flags | os.O_CREAT | os.O_CLOEXEC, 0o600)
    os.fchmod(fd, 0o600)  # the umask may have taken even this user's rights
    return fd


def lock_file(fd: int) -> bool:
    """Locks an open file for this process and returns True; False if another one has it locked.

    The lock ends with the descriptor, so with the process, however that ends. File systems without locks lock nothing.
    """
    with contextlib.suppress(OSError):
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True
