"""In IPython and notebooks: what nodes print belongs to the cell that has made them print it.

It comes by another way than the cell's own output: node -> fork server -> the kernel's stdout, which ipykernel has made
a pipe that one of its threads reads. So at the end of a cell, before the kernel says that it is done, somebody has to
wait until all that has come so far is through.
"""

from __future__ import annotations

import fcntl
import os
import stat
import struct
import sys
import termios
import time
from typing import Any

from ..session import current

#: Seconds that a cell waits at its end for nodes' output, at most.
PATIENCE = 5.0
#: Looks, a millisecond apart, after which nobody is reading what nobody has begun to read: it is the pipe of somebody
#: else. Not seconds: this process may be kept from running, and its reader with it.
STILL = 100


def attach() -> None:
    """Has each cell wait, if this is an IPython."""
    if (ipython := sys.modules.get("IPython")) is not None and (shell := ipython.get_ipython()) is not None:
        shell.events.register("post_execute", _after_cell)


def _after_cell(*_: Any) -> None:
    session = current.current()
    if session is not None and session.launcher is not None:
        session.launcher.flush(PATIENCE)
    looks, before = STILL, 0
    while (unread := sum(map(_unread, (1, 2)))) and looks:
        looks, before = (looks - 1 if unread == before else STILL), unread
        time.sleep(0.001)
    if any(map(_is_pipe, (1, 2))):
        time.sleep(0.002)  # the thread has read it, and needs the GIL to pass it on


def _unread(fd: int) -> int:
    """How many bytes nobody has read yet of what was written here."""
    if not _is_pipe(fd):
        return 0
    return int(struct.unpack("i", fcntl.ioctl(fd, termios.FIONREAD, b"\0" * 4))[0])


def _is_pipe(fd: int) -> bool:
    try:
        return stat.S_ISFIFO(os.fstat(fd).st_mode)
    except OSError:
        return False
