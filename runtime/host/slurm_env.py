"""Slurm as its jobs see it, by the environment that it gives them. Slurm itself is not asked."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from .interfaces import interfaces, is_loopback, listening_as

#: The most hosts of a job; Slurm's own limit is 64 Ki.
_HOSTS = 1 << 20


@dataclass(frozen=True)
class SlurmTask:
    """One of the tasks that one ``srun`` has started together."""

    name: str  #: the step's name, unlike any other's: cluster, job and step
    rank: int
    size: int
    local_rank: int  #: its number among the tasks of its host
    local_size: int
    host: int  #: the number of its host among the step's hosts; task 0 is on host 0
    hosts: int  #: the number of the step's hosts


def task(environ: Mapping[str, str] = os.environ) -> SlurmTask | None:
    """Returns the task that this process is; None for a process that no srun has started.

    A batch script is no task, although Slurm gives it a rank of 0: it has no step's id.
    """
    try:
        rank, size = int(environ["SLURM_PROCID"]), int(environ["SLURM_STEP_NUM_TASKS"])
        job, step, restarts = environ["SLURM_JOB_ID"], environ["SLURM_STEP_ID"], environ.get("SLURM_RESTART_COUNT")
        host, hosts = int(environ["SLURM_NODEID"]), int(environ["SLURM_STEP_NUM_NODES"])
        local_rank, local_size = int(environ["SLURM_LOCALID"]), per_host(environ["SLURM_STEP_TASKS_PER_NODE"])[host]
    except (KeyError, ValueError, IndexError):
        return None
    name = f"{environ.get('SLURM_CLUSTER_NAME', 'cluster')}-{job}.{step}" + (f".{restarts}" if restarts else "")
    return SlurmTask(name, rank, size, local_rank, local_size, host, hosts)


def one_of_several(environ: Mapping[str, str] = os.environ) -> SlurmTask | None:
    """Returns the task that this process is, if the same srun has started others, which could be its nodes."""
    found = task(environ)
    return found if found is not None and found.size > 1 else None


def divided(gpus: int, cores: int, environ: Mapping[str, str] = os.environ) -> str:
    """Returns which of the GPUs and cores that this task sees are its own, as "gpus,cores".

    Slurm may have divided a host's. ``gpus`` and ``cores``: how many it sees. Empty in a process that is not a task.
    """
    found = task(environ)

    def own(seen: int, on_host: str) -> bool:  # ``on_host``: of the step's
        count = _number(environ.get(on_host, ""))
        return found is not None and bool(seen) and count is not None and seen * found.local_size <= count

    told = {"gpus": own(gpus, "SLURM_GPUS_ON_NODE"), "cores": own(cores, "SLURM_CPUS_ON_NODE")}
    return ",".join(name for name, is_own in told.items() if is_own)


def task_count(environ: Mapping[str, str] = os.environ) -> int:
    """Returns the number of tasks of the allocation around this process; 0 without one, or when nobody has said."""
    if "SLURM_JOB_ID" not in environ:
        return 0
    if (told := _number(environ.get("SLURM_NTASKS", ""))) is not None:
        return told
    try:
        return sum(per_host(environ.get("SLURM_TASKS_PER_NODE", "")))
    except ValueError:
        return 0


def per_host(text: str) -> list[int]:
    """Parses Slurm's counts per host: ``2(x3),1`` is 2, 2, 2, 1. Raises ValueError for more hosts than there can be."""
    found: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        if len(found) + int(times or 1) > _HOSTS:
            raise ValueError(f"{text[:100]!r} counts the tasks of more than {_HOSTS} hosts")
        found += [int(count)] * int(times or 1)
    return found


def _number(text: str) -> int | None:
    """Parses a count that is not negative; None for another text."""
    try:
        return int(text) if text.isdecimal() else None
    except ValueError:  # thousands of digits
        return None


def connection_file(name: str, environ: Mapping[str, str] = os.environ) -> str:
    """Returns the path of a job's connection file on all hosts: in DISTTENSOR_CONNECTION_DIR, or the user's home."""
    folder = environ.get("DISTTENSOR_CONNECTION_DIR") or "~/.config/disttensor"
    return os.path.join(os.path.abspath(os.path.expanduser(folder)), f"slurm-{name}")


def own_addresses(environ: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """Returns the addresses of this host for the other hosts of its cluster.

    Those of the name that Slurm knows it by, if that resolves, else of its own name, else all that it has.
    """
    for name in (environ.get("SLURMD_NODENAME", ""), socket.gethostname()):
        try:
            found = [address for address in listening_as(name) if not is_loopback(address)] if name else []
        except ValueError:
            continue
        if found:
            return tuple(found)
    everything = [address for addresses in interfaces().values() for address in addresses]
    return tuple(address for address in everything if not is_loopback(address)) or tuple(everything)
