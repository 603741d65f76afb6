"""What is left on hosts by ssh when the script or dtrun ends by a signal, or its terminal hangs up: nothing."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator

import pytest
from checkout import ROOT
from host_kit import ADDRESSES, Hosts, hosts_by_ssh, signal_to

pytestmark = [pytest.mark.ssh]

#: Hides what the machine has in /tmp, where others come and go: what is there afterwards is of this host.
OWN_TMP = """\
set -e
mkdir -p /run/folder /run/root
mount --bind {folder} /run/folder
mount --bind {root} /run/root
mount -t tmpfs none /tmp
mkdir -p {folder} {root}
mount --bind /run/folder {folder}
mount --bind /run/root {root}
"""


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with hosts_by_ssh(tmp_path_factory.mktemp("hosts")) as both:
        both.environment.pop("TMPDIR", None)
        for host in ADDRESSES:
            done = both.run("sh", "-c", OWN_TMP.format(folder=both.folder, root=ROOT), host=host)
            assert done.returncode == 0, done.stderr
        yield both


#: Two nodes on each host, with connections and shared memory between all of them, in the middle of work.
WORKING = """
import os, sys
import torch
import disttensor as dt

dt.init_master_worker({arguments}threads=1)
xs = [torch.ones(1 << 20, device=f"node:{{k}}") for k in range(4)]
for k in range(4):
    xs[k].copy_(xs[(k + 1) % 4].to(f"node:{{k}}"))
dt.all_reduce(xs)
xs[3].cpu()
print("ready", os.getpid(), flush=True)
while True:
    dt.all_reduce(xs)
    xs[0].sum().item()
"""

HOSTS = "left:2,right:2"


def seen(hosts: Hosts) -> dict[str, set[str]]:
    """What each host has that could be left behind, but for processes: files, and sockets that are open or named."""
    found = {}
    for host in ADDRESSES:
        files = hosts.run("find", "/dev/shm", "/tmp", str(hosts.folder), "-xdev", host=host)
        sockets = hosts.run("sh", "-c", "cat /proc/net/tcp /proc/net/tcp6 /proc/net/unix", host=host)
        assert files.returncode == sockets.returncode == 0
        lines = [line.split() for line in sockets.stdout.splitlines()]
        # of TCP connections state and addresses (6: the other end has closed, and the kernel forgets it in a minute);
        # of Unix sockets those with names
        tcp = [" ".join(words[1:4]) for words in lines if words[0].rstrip(":").isdigit() and words[3] != "06"]
        unix = [words[7] for words in lines if len(words) == 8 and words[0] != "Num"]
        kept = {*files.stdout.splitlines(), *tcp, *unix}
        found[host] = {name for name in kept if not name.startswith("/tmp/torchinductor_")}  # torch's cache, to be kept
    return found


def working(hosts: Hosts, how: str) -> tuple[str, ...]:
    """The command line of a session with this way of starting it."""
    script = hosts.folder / "working.py"
    script.write_text(WORKING.format(arguments="" if "dtrun" in how else f"hosts={HOSTS!r}, "))
    command = ("dtrun", "--hosts", HOSTS, str(script)) if "dtrun" in how else ("python", str(script))
    if "terminal" not in how:
        return command
    given = [
        f"{name}={hosts.environment[name]}" for name in ("PATH", "PYTHONPATH", "OMP_NUM_THREADS", "DISTTENSOR_SSH")
    ]
    return (hosts.environment["DISTTENSOR_SSH"], "-tt", "left", "env", *given, f"HOME={hosts.folder}", *command)


#: (what is started, the signal, whom it comes to): ssh's client has the terminal of dtrun on the other host.
ENDS = [
    ("the script", signal.SIGKILL, "script"),
    ("the script", signal.SIGTERM, "started"),
    ("dtrun", signal.SIGKILL, "script"),
    ("dtrun", signal.SIGKILL, "started"),
    ("dtrun", signal.SIGTERM, "started"),
    ("dtrun", signal.SIGHUP, "started"),
    ("dtrun in a terminal", signal.SIGKILL, "started"),
    ("dtrun in a terminal", signal.SIGHUP, "started"),
    ("the script in a terminal", signal.SIGKILL, "started"),
]


@pytest.mark.parametrize(("how", "number", "whom"), ENDS, ids=[f"{how}-{n.name}-{whom}" for how, n, whom in ENDS])
def test_nothing_is_left(hosts: Hosts, how: str, number: signal.Signals, whom: str) -> None:
    """On either host: no process, no shared memory, no file, no socket, ten seconds later."""
    command = working(hosts, how)
    before = seen(hosts)
    with hosts.start(*command, host="right" if "terminal" in how else "left", stdin=subprocess.PIPE) as process:
        assert process.stdout is not None
        word, _, pid = process.stdout.readline().partition(" ")
        assert word == "ready", process.communicate()[1]
        if whom == "script":
            hosts.run("kill", f"-{number.value}", pid.strip())
        else:
            signal_to(process, number)
        hosts.settle(10)
        process.communicate()
    assert {host: found - before[host] for host, found in seen(hosts).items()} == {"left": set(), "right": set()}


def test_what_is_left_would_be_seen(hosts: Hosts) -> None:
    before = seen(hosts)
    leave = """
import socket, time
open("/dev/shm/left", "w"), open("/tmp/left", "w")
listening, named = socket.create_server(("127.0.0.1", 0)), socket.socket(socket.AF_UNIX)
named.bind("/tmp/named")
print("ready", flush=True)
time.sleep(600)
"""
    (hosts.folder / "leave.py").write_text(leave)
    with hosts.start("python", "leave.py", host="right") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n", process.communicate()[1]
        new = {host: found - before[host] for host, found in seen(hosts).items()}
        assert hosts.pids("right") != []
        signal_to(process, signal.SIGKILL)
    assert new["left"] == {f"{hosts.folder}/leave.py"}
    assert {"/dev/shm/left", "/tmp/left", "/tmp/named"} < new["right"]
    assert sum(":" in line for line in new["right"]) == 1  # where it listened
    hosts.run("rm", "/dev/shm/left", "/tmp/left", "/tmp/named", host="right")
    hosts.settle(10)
