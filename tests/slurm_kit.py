"""A real Slurm on this machine: Debian's munged, slurmctld and two slurmd, in namespaces as two hosts.

    left:  10.78.0.1, munged, slurmctld, slurmd; where users type commands        right:  10.78.0.2, slurmd

Each host has a name, a network, processes and shared memory of its own; they share the file system, as clusters do. All
of it ends with the first processes of the namespaces, so nothing is left however a test ends. Needs root.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ADDRESSES = {"left": "10.78.0.1", "right": "10.78.0.2"}
#: What each host says it has: more than this machine, so that a node of it gets more than one task without being asked.
CPUS = 4

_UNSHARE = ["unshare", "--net", "--uts", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child"]

_CONFIGURATION = """\
ClusterName=disttensor
SlurmctldHost=left(10.78.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_min_interval=0,batch_sched_delay=0
MpiDefault=none
ReturnToService=2
KillWait=3
InactiveLimit=0
SlurmdParameters=config_overrides
NodeName=left NodeAddr=10.78.0.1 CPUs={cpus}
NodeName=right NodeAddr=10.78.0.2 CPUs={cpus}
PartitionName=all Nodes=left,right Default=YES OverSubscribe=FORCE:8 MaxTime=60
"""

#: The first process of a host: it reaps what others leave to it. slurmd wants something that looks like cgroups.
_FIRST = """\
set -e
echo {name} >/proc/sys/kernel/hostname
mount -t tmpfs none /dev/shm
mount -t sysfs none /sys
mount -t tmpfs none /sys/fs/cgroup
mount --bind {folder}/hosts /etc/hosts
ip link set lo up
echo ready
sleep infinity &
wait
"""


def why_not() -> str:
    """What is missing for it on this machine; empty if nothing is."""
    if os.getuid():
        return "this user is not root"
    for tool in ("unshare", "nsenter", "ip", "munged", "slurmctld", "slurmd", "srun", "sbatch"):
        if shutil.which(tool, path=f"{os.environ['PATH']}:/usr/sbin:/sbin") is None:
            return f"there is no {tool}"
    probe = [*_UNSHARE, "ip", "link", "add", "name", "a", "type", "veth"]
    tried = subprocess.run(probe, capture_output=True, text=True)
    return tried.stderr.strip() or f"exit code {tried.returncode}" if tried.returncode else ""


class Slurm:
    """A cluster of two hosts; ``folder`` is seen by both."""

    def __init__(self, folder: Path, hosts: dict[str, subprocess.Popen[bytes]]) -> None:
        self.folder = folder
        self.pids = {name: process.pid for name, process in hosts.items()}
        self.environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith(("DISTTENSOR_", "SLURM_", "PMI_", "OMPI_"))},
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}:/usr/sbin:/sbin",
            "PYTHONPATH": os.pathsep.join((str(ROOT), os.path.dirname(__file__))),
            "SLURM_CONF": str(folder / "slurm.conf"),
            "OMP_NUM_THREADS": "1",
        }

    def on(self, host: str, command: Sequence[str]) -> list[str]:
        """The command line that runs ``command`` on that host."""
        at = f"/proc/{self.pids[host]}/ns"
        namespaces = [f"--net={at}/net", f"--uts={at}/uts", f"--mount={at}/mnt", f"--pid={at}/pid_for_children"]
        return ["nsenter", *namespaces, f"--wd={self.folder}", *command]

    def start(self, *command: str, host: str = "left", **environment: str) -> subprocess.Popen[str]:
        """Starts a command in a session of its own."""
        return subprocess.Popen(
            self.on(host, command),
            env={**self.environment, **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(
        self, *command: str, timeout: float = 60, host: str = "left", **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command to its end."""
        with self.start(*command, host=host, **environment) as process:
            try:
                out, err = process.communicate(timeout=timeout)
            except BaseException:
                process.kill()
                raise
        return subprocess.CompletedProcess(command, process.returncode, out, err)

    def jobs(self) -> list[str]:
        """The ids of jobs that have not ended."""
        return self.run("squeue", "--noheader", "--format=%i").stdout.split()

    def settle(self, timeout: float = 20.0) -> None:
        """Waits until no job is left, and no process of one on either host."""

        def over() -> bool:
            return not self.jobs() and not [p for host in ADDRESSES for p in self.processes(host)]

        _await(self, over, timeout, "jobs have not ended")

    def processes(self, host: str) -> list[str]:
        """The command lines of what runs on a host, other than Slurm's daemons and the host's first processes."""
        listed = self.run("ps", "-eo", "pid=,stat=,args=", host=host).stdout.splitlines()
        lines = [line.split(maxsplit=2) for line in listed]
        known = ("bash -c set -e", "sleep infinity", "munged", "slurmctld", ": slurmscriptd", "slurmd -D", "ps -eo")
        return [args for _, state, args in lines if state[0] != "Z" and not args.startswith(known)]

    def logs(self) -> str:
        """The last lines of what the daemons have to say."""
        return "\n".join("\n".join(log.read_text().splitlines()[-20:]) for log in sorted(self.folder.glob("*.log")))


@contextlib.contextmanager
def cluster(folder: Path) -> Iterator[Slurm]:
    """Slurm on both hosts, ready for jobs; its files are in ``folder``, which nobody else can read."""
    folder.chmod(0o700)
    for name in ("munge", "state", "spool-left", "spool-right"):
        (folder / name).mkdir(mode=0o700)
    (folder / "slurm.conf").write_text(_CONFIGURATION.format(folder=folder, cpus=CPUS))
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    (folder / "hosts").write_text("127.0.0.1 localhost\n" + "".join(f"{a} {n}\n" for n, a in ADDRESSES.items()))
    key = folder / "munge" / "key"
    key.touch(mode=0o600)
    key.write_bytes(os.urandom(128))
    with contextlib.ExitStack() as stack:
        hosts = {name: stack.enter_context(_host(name, folder)) for name in ADDRESSES}
        slurm = Slurm(folder, hosts)
        _link(slurm)
        munge = [f"--{name}-file={folder}/munge/{name}" for name in ("key", "log", "pid", "seed")]
        for host, daemon in (
            ("left", ["munged", "--foreground", "--force", f"--socket={folder}/munge/socket", *munge]),
            ("left", ["slurmctld", "-D"]),
            ("left", ["slurmd", "-D"]),
            ("right", ["slurmd", "-D"]),
        ):
            stack.enter_context(_daemon(slurm, host, daemon))
            if daemon[0] == "munged":
                _await(slurm, (folder / "munge" / "socket").exists)
        _await(slurm, lambda: slurm.run("sinfo", "--noheader", "--format=%D %t").stdout.split() == ["2", "idle"])
        yield slurm


@contextlib.contextmanager
def _host(name: str, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    first = ["bash", "-c", _FIRST.format(name=name, folder=folder)]
    with subprocess.Popen([*_UNSHARE, *first], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            if not process.stdout.readline():
                raise RuntimeError(f"host {name} did not start")
            yield process
        finally:
            # The first process of the namespace: with it all others there end, and unshare when they have.
            with contextlib.suppress(OSError, ValueError):
                first_pid = int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text())
                os.kill(first_pid, signal.SIGKILL)
                process.wait(10)
            process.kill()


def _link(slurm: Slurm) -> None:
    """A pair of connected interfaces, one on each host."""
    pid = slurm.pids["right"]
    lines = [f"ip link add name eth0 type veth peer name eth0 netns {pid}"]
    for host, commands in (("left", lines), ("right", [])):
        up = [f"ip address add {ADDRESSES[host]}/24 dev eth0", "ip link set eth0 up"]
        # the pids of namespaces are known outside of them only
        net = ["nsenter", f"--net=/proc/{slurm.pids[host]}/ns/net"]
        subprocess.run([*net, "sh", "-c", " && ".join([*commands, *up])], check=True)


@contextlib.contextmanager
def _daemon(slurm: Slurm, host: str, command: list[str]) -> Iterator[None]:
    with open(slurm.folder / f"{command[0]}-{host}.log", "wb") as log:
        process = subprocess.Popen(
            slurm.on(host, command), env=slurm.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
    try:
        yield
    finally:
        process.kill()
        process.wait()


def _await(slurm: Slurm, true: Callable[[], bool], timeout: float = 30.0, what: str = "Slurm did not start") -> None:
    deadline = time.monotonic() + timeout
    while not true():
        if time.monotonic() > deadline:
            left = {host: slurm.processes(host) for host in ADDRESSES}
            raise RuntimeError(f"{what}; there are {left}\n{slurm.logs()}")
        time.sleep(0.05)
