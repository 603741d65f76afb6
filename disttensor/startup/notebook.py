"""Shows the output of nodes in the cell of IPython or of a notebook that has caused it.

This output takes another path than the cell's own: node -> fork server -> the kernel's stdout, which ipykernel has made
a pipe that one of its threads reads. So at the end of a cell, before the kernel reports that the cell is done, this
process waits until all output so far has gone through that pipe.
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

#: The most seconds that a cell waits at its end for the output of nodes.
PATIENCE = 5.0
#: The number of looks, a millisecond apart, that find as many unread bytes as before, after which the pipe is taken for
#: one that another program reads. No seconds: this process may be kept from running, and its reader with it.
STILL = 100


def attach() -> None:
    """Has each cell wait for the output of nodes, if this process runs IPython."""
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
        time.sleep(0.002)  # the thread has read the output, and needs the GIL to pass it on


def _unread(fd: int) -> int:
    """Returns the number of bytes in this pipe that nobody has read yet; 0 for a descriptor of another kind."""
    if not _is_pipe(fd):
        return 0
    return int(struct.unpack("i", fcntl.ioctl(fd, termios.FIONREAD, b"\0" * 4))[0])


def _is_pipe(fd: int) -> bool:
    try:
        return stat.S_ISFIFO(os.fstat(fd).st_mode)
    except OSError:
        return False
