"""Two hosts on one machine: namespaces with a name, a network, processes and shared memory of their own each, and a
veth pair between them as the slow link. For scripts that ``run`` starts; all ends with them, however they end, as
everything they start is in a namespace of processes of which they are the first.

    left:  10.77.0.1, the master and some nodes                right:  10.77.0.2, the other nodes
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Container, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from disttensor import init
from disttensor.runtime.bundle import Bundle
from disttensor.runtime.channel.base import ChannelContext
from disttensor.runtime.launch import local
from disttensor.runtime.transport.zmq import ZmqHub
from disttensor.runtime.worker import main

LEFT, RIGHT = "10.77.0.1", "10.77.0.2"
#: Where a worker finds the process whose namespaces are the right host.
_OTHER = "TWO_HOSTS_RIGHT"
_UNSHARE = ["unshare", "--net", "--uts", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child"]


def why_not() -> str:
    """What is missing for it on this machine; empty if nothing is."""
    for tool in ("unshare", "nsenter", "ip"):
        if shutil.which(tool) is None:
            return f"there is no {tool}"
    tried = subprocess.run(
        [*_UNSHARE, "ip", "link", "add", "name", "left", "type", "veth"], capture_output=True, text=True
    )
    return tried.stderr.strip() or f"exit code {tried.returncode}" if tried.returncode else ""


def run(script: Path, timeout: float = 55) -> subprocess.CompletedProcess[str]:
    """Runs a script on the left host."""
    path = os.pathsep.join(filter(None, [os.path.dirname(__file__), os.environ.get("PYTHONPATH")]))
    command = [*_UNSHARE, sys.executable, str(script)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=env, cwd=script.parent)


def crossed(interface: str = "left") -> tuple[int, int]:
    """How many bytes have gone from the left host to the right one, and back; by an interface's counters."""
    statistics = Path(f"/sys/class/net/{interface}/statistics")
    return int((statistics / "tx_bytes").read_text()), int((statistics / "rx_bytes").read_text())


def cut(end: str) -> None:
    """Nothing crosses the link any more, and nobody is told: an end of it ("left" or "right") is down."""
    _turn(end, "down")


def mend(end: str) -> None:
    """It does again."""
    _turn(end, "up")


def _turn(end: str, how: str) -> None:
    where = f"nsenter --target {os.environ[_OTHER]} --net " if end == "right" else ""
    _shell(f"{where}ip link set {end} {how}")


@contextlib.contextmanager
def hosts(right: Container[int]) -> Iterator[None]:
    """While it lasts, nodes of these ranks start on the right host, the others and the master are on the left one."""
    _shell(_settle("left"))
    there = [*_UNSHARE, "sh", "-c", f"{_settle('right')} && echo ready && exec sleep infinity"]
    with subprocess.Popen(there, stdout=subprocess.PIPE) as other:
        try:
            assert other.stdout is not None
            if not other.stdout.readline():
                raise RuntimeError("the right host did not start")
            _shell(f"ip link add name left type veth peer name right netns {other.pid}")
            _shell(f"ip address add {LEFT}/24 dev left && ip link set left up")
            up = f"ip address add {RIGHT}/24 dev right && ip link set right up"
            subprocess.run(["nsenter", "--target", str(other.pid), "--net", "sh", "-c", up], check=True)
            os.environ[_OTHER] = str(other.pid)
            with _patched(right):
                yield
        finally:
            other.kill()


def _settle(name: str) -> str:
    """A host's name, shared memory, and loopback interface; /sys shows interfaces of where it was mounted."""
    mounts = "mount -t tmpfs none /dev/shm && mount -t sysfs none /sys"
    return f"echo {name} >/proc/sys/kernel/hostname && {mounts} && ip link set lo up"


def _shell(command: str) -> None:
    subprocess.run(["sh", "-c", command], check=True)


@contextlib.contextmanager
def _patched(right: Container[int]) -> Iterator[None]:
    """The master listens on the link, and nodes start where they should: as a launcher for several hosts would do."""

    class Hub(ZmqHub):
        def __init__(self, **options: Any) -> None:
            super().__init__(LEFT, **options)

    class Launcher(local.LocalLauncher):
        def start(self, bundles: Sequence[Bundle]) -> None:
            for bundle in bundles:
                over_there = bundle.rank in right
                self._entry = f"{__name__}:on_the_right" if over_there else local.WORKER
                super().start([msgspec.structs.replace(bundle, data_host=RIGHT if over_there else LEFT)])

    def context(rank: int, job: str, host: str) -> ChannelContext:
        return ChannelContext(rank, job, LEFT)

    before = init.ZmqHub, init.ChannelContext, local.LocalLauncher
    init.ZmqHub, init.ChannelContext, local.LocalLauncher = Hub, context, Launcher  # type: ignore[misc, assignment]
    try:
        yield
    finally:
        init.ZmqHub, init.ChannelContext, local.LocalLauncher = before  # type: ignore[misc]


def on_the_right(lifeline: int) -> int:
    """What a worker of the right host runs: it moves there, and a child of it is the node."""
    libc = ctypes.CDLL(None, use_errno=True)
    names = [f"/proc/{os.environ[_OTHER]}/ns/{kind}" for kind in ("net", "uts", "pid_for_children", "mnt")]
    for fd in [os.open(name, os.O_RDONLY) for name in names]:
        if libc.setns(fd, 0):
            raise OSError(ctypes.get_errno(), "setns")
        os.close(fd)
    child = os.fork()
    if child == 0:
        return main(lifeline)
    os.close(lifeline)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
