"""Two hosts on one machine: namespaces with a name, a network, processes and shared memory of their own each, and a
veth pair between them as the slow link. For scripts that ``run`` starts; all ends with them, however they end, as
everything they start is in a namespace of processes of which they are the first.

It needs no sshd; host_kit.py has hosts with real daemons, for commands as users type them.

    left:  10.77.0.1, the master and some nodes                right:  10.77.0.2, the other nodes
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from checkout import search_path

from disttensor.runtime.host.launch_spec import PLAN, Host, LaunchSpec, text_of
from disttensor.runtime.launch.starters.ssh import SSH

LEFT, RIGHT = "10.77.0.1", "10.77.0.2"
#: Bytes of a packet's headers: Ethernet's, IPv4's, and TCP's with its time stamps.
HEADERS = 14 + 20 + 32
#: Where `cut` and `mend` find the process whose namespaces are the right host.
_OTHER = "TWO_HOSTS_RIGHT"
#: In ssh's place: it goes where it should, without a network.
_SSH = """\
#!/bin/sh
case " $* " in *" -G "*)
    for host; do :; done
    [ "$host" = right ] && echo hostname {right} || echo hostname {left}
    exit
esac
while [ "$1" != -- ]; do shift; done
[ "$2" = left ] && exec sh -c "$3"
exec nsenter --target {pid} --net --uts --mount --pid=/proc/{pid}/ns/pid_for_children sh -c "$3"
"""
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


def run(script: Path, timeout: float = 250) -> subprocess.CompletedProcess[str]:
    """Runs a script on the left host."""
    command = [*_UNSHARE, sys.executable, str(script)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": search_path()}
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=env, cwd=script.parent)


def crossed(interface: str = "left") -> tuple[int, int]:
    """How many bytes have gone from the left host to the right one, and back; by an interface's counters.

    Without the headers of packets: into how many the kernel cuts the same bytes, and how often it acknowledges them,
    depends on what else the machine does.
    """
    statistics = Path(f"/sys/class/net/{interface}/statistics")

    def counted(way: str) -> int:
        of, packets = (int((statistics / f"{way}_{what}").read_text()) for what in ("bytes", "packets"))
        return of - HEADERS * packets

    return counted("tx"), counted("rx")


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
def hosts(left: int, right: int) -> Iterator[None]:
    """While it lasts, sessions have that many nodes on each host, the first ones and the master on the left."""
    _shell(_settle("left"))
    there = [*_UNSHARE, "sh", "-c", f"{_settle('right')} && echo ready && exec sleep infinity"]
    with tempfile.TemporaryDirectory() as folder, subprocess.Popen(there, stdout=subprocess.PIPE) as other:
        try:
            assert other.stdout is not None
            if not other.stdout.readline():
                raise RuntimeError("the right host did not start")
            _shell(f"ip link add name left type veth peer name right netns {other.pid}")
            _shell(f"ip address add {LEFT}/24 dev left && ip link set left up")
            up = f"ip address add {RIGHT}/24 dev right && ip link set right up"
            subprocess.run(["nsenter", "--target", str(other.pid), "--net", "sh", "-c", up], check=True)
            os.environ[_OTHER] = str(other.pid)
            ssh = Path(folder) / "ssh"
            ssh.write_text(_SSH.format(left=LEFT, right=RIGHT, pid=other.pid))
            ssh.chmod(0o700)
            os.environ[SSH] = str(ssh)
            spec = LaunchSpec("ssh", hosts=(Host("left", left), Host("right", right)))
            os.environ[PLAN] = text_of(spec)
            yield
        finally:
            other.kill()


def _settle(name: str) -> str:
    """A host's name, shared memory, and loopback interface; /sys shows interfaces of where it was mounted."""
    mounts = "mount -t tmpfs none /dev/shm && mount -t sysfs none /sys"
    return f"echo {name} >/proc/sys/kernel/hostname && {mounts} && ip link set lo up"


def _shell(command: str) -> None:
    subprocess.run(["sh", "-c", command], check=True)
