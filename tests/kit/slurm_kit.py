"""A real Slurm on this machine: Debian's munged, slurmctld and two slurmd, in namespaces as two hosts (host_kit.py).

left:  munged, slurmctld, slurmd; where users type commands        right:  slurmd
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

import host_kit
from host_kit import ADDRESSES, Hosts, two_hosts

#: What each host says it has: more than this machine, so that it gets more than one task without being asked.
CPUS = 4

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
GresTypes=gpu
NodeName=left NodeAddr=10.78.0.1 CPUs={cpus} Gres=gpu:2
NodeName=right NodeAddr=10.78.0.2 CPUs={cpus} Gres=gpu:2
PartitionName=all Nodes=left,right Default=YES OverSubscribe=FORCE:8 MaxTime=60
PartitionName=gpu Nodes=left,right OverSubscribe=FORCE:8 MaxTime=60
"""


def why_not() -> str:
    """What is missing for it on this machine; empty if nothing is."""
    return host_kit.why_not("munged", "slurmctld", "slurmd", "srun", "sbatch")


class Slurm(Hosts):
    """A cluster of two hosts."""

    daemons = (*Hosts.daemons, "munged", "slurmctld", ": slurmscriptd", "slurmd -D")

    def __init__(self, folder: Path, pids: dict[str, int]) -> None:
        super().__init__(folder, pids)
        self.environment["SLURM_CONF"] = str(folder / "slurm.conf")

    def batch(self, *command: str, timeout: float = 120) -> tuple[str, int]:
        """Submits a batch job and waits for its end; gives its id and exit code. (sbatch --wait looks rarely.)"""
        submitted = self.run("sbatch", "--parsable", *command)
        job = submitted.stdout.strip()
        if not job:
            raise RuntimeError(submitted.stderr)
        self.wait_until(lambda: job not in self.jobs(), timeout, f"job {job} has not ended")
        code = re.findall(r"ExitCode=(\d+)", self.run("scontrol", "show", "job", job).stdout)
        return job, int(code[0])

    def jobs(self) -> list[str]:
        """The ids of jobs that have not ended."""
        return self.run("squeue", "--noheader", "--format=%i").stdout.split()

    def over(self) -> bool:
        return not self.jobs() and super().over()


@contextlib.contextmanager
def cluster(folder: Path) -> Iterator[Slurm]:
    """Slurm on both hosts, ready for jobs; its files are in ``folder``, which nobody else can read."""
    folder.chmod(0o700)
    for name in ("munge", "state", *(f"spool-{host}" for host in ADDRESSES)):
        (folder / name).mkdir(mode=0o700)
    (folder / "slurm.conf").write_text(_CONFIGURATION.format(folder=folder, cpus=CPUS))
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")  # any: it finds no controller, and needs none
    # GPUs that nobody uses: a task is only told which it has
    (folder / "gres.conf").write_text("Name=gpu File=/dev/null\nName=gpu File=/dev/zero\n")
    munge = folder / "munge"
    (munge / "key").touch(mode=0o600)
    (munge / "key").write_bytes(os.urandom(128))
    files = [f"--{name}-file={munge}/{name}" for name in ("key", "log", "pid", "seed")]
    with two_hosts(folder) as pids, contextlib.ExitStack() as daemons:
        slurm = Slurm(folder, pids)
        daemons.enter_context(
            slurm.daemon("left", "munged", "--foreground", "--force", f"--socket={munge}/socket", *files)
        )
        slurm.wait_until((munge / "socket").exists, 30, "munged did not start")
        daemons.enter_context(slurm.daemon("left", "slurmctld", "-D"))
        for host in ADDRESSES:
            daemons.enter_context(slurm.daemon(host, "slurmd", "-D"))

        def idle() -> bool:
            hosts = slurm.run("sinfo", "--Node", "--noheader", "--format=%N %t").stdout.splitlines()
            return set(hosts) == {f"{host} idle" for host in ADDRESSES}

        slurm.wait_until(idle, 30, "Slurm did not start")
        yield slurm
