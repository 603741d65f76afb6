"""Breaks a node's connections or its process, for tests of failures. Part of ``disttensor.testing``."""

from __future__ import annotations

import os
import signal
import socket
import time
from contextlib import suppress

from ..runtime.channel.base import MASTER
from ..runtime.host import descriptors
from ..runtime.process.lifetime import process_stat
from ..runtime.protocol import commands as c
from ..runtime.protocol.errors import DisttensorError
from ..session import current

_WHY = "its connection was cut by disttensor.testing.cut"
#: States of a thread that computes nothing: stopped, ended, or in the kernel, which stops it as it comes out.
_STILL = "TtXZD"
#: Seconds in which a process has stopped, unless somebody has it go on; and between two looks.
_STOPPED, _LOOK = 5.0, 0.001


def cut(node: int, *, control: bool = True, data: bool = False) -> None:
    """Breaks a node's connections with the script, as a failing network does. Returns at once.

    ``control`` is the connection that carries commands and replies. The node is lost with it: its process (or thread)
    ends, waiting for it and later uses of its tensors raise NodeLost, other nodes go on. ``data`` is the connection
    that carries tensors between the node and the script, in both directions. Without ``control`` only these copies are
    lost, those under way and all later ones: they raise a ChannelError, and the node goes on.

    Works for nodes of every kind, in-process ones too. Raises ValueError for a node that does not exist, NodeLost for
    one that is lost already, DisttensorError without a session.
    """
    session = current.session()
    outbox = session.places.at(node).outbox
    session.link.check(outbox)
    if data:
        session.router.mark_lost(node, _WHY)  # first, or errors would name the node's end as the reason
        outbox.add(c.Lost(MASTER, _WHY))
        session.link.sender.flush(outbox, wait=False)
    if control:
        with session.link.lock:
            session.link.hub.cut(node)


def stop(node: int) -> None:
    """Stops a node's process (SIGSTOP): it computes and answers nothing, as a machine that hangs. ``resume`` ends that.

    Waits until each of its threads has stopped, which takes a while on a busy machine.

    Raises ValueError for a node that does not exist, NodeLost for one that is lost, DisttensorError for one that is a
    thread of this process (``launcher="inproc"``) or runs on another host, and without a session.
    """
    pid = _pid(node)
    os.kill(pid, signal.SIGSTOP)
    until = time.monotonic() + _STOPPED
    while not _has_stopped(pid) and time.monotonic() < until:
        time.sleep(_LOOK)


def resume(node: int) -> None:
    """Has a stopped node's process go on (SIGCONT); one that was not stopped goes on as before. Raises as ``stop``."""
    os.kill(_pid(node), signal.SIGCONT)


def kill(node: int) -> None:
    """Ends a node's process by SIGKILL, a stopped one too. Waits for its end; the script may notice the loss later.

    Raises as ``stop``.
    """
    pid = _pid(node)
    process = os.pidfd_open(pid)
    try:
        os.kill(pid, signal.SIGKILL)
        descriptors.wait_readable([process])
    finally:
        os.close(process)


def _has_stopped(pid: int) -> bool:
    """Returns whether no thread of a process runs any more."""
    with suppress(OSError):  # a thread, or the process, has ended meanwhile
        return all(process_stat(f"{pid}/task/{thread}")[0] in _STILL for thread in os.listdir(f"/proc/{pid}/task"))
    return not os.path.exists(f"/proc/{pid}")


def _pid(node: int) -> int:
    session = current.session()
    session.link.check(session.places.at(node).outbox)
    hello = session.nodes[node].hello
    if session.shares_process:
        raise DisttensorError(f"node {node} is a thread of this process (launcher='inproc'), which must not be stopped")
    if hello.host != socket.gethostname():
        raise DisttensorError(f"node {node} runs on {hello.host}, and only processes of this host can be stopped here")
    return hello.pid
