"""The copies of one script that a launcher of processes has started, by the environment that it gives them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from . import mpi_env, slurm_env


class Copies(NamedTuple):
    """Several processes of one script, each of which would start a session of its own."""

    by: str  #: the command that has started them
    number: int
    instead: str  #: what makes them one job


def copies(environ: Mapping[str, str]) -> Copies | None:
    """Returns of which copies of a script this process is one; None for a process that is the only one.

    A batch script of Slurm's has a rank, but not a step with tasks: it is the only one of its script.
    """
    size = environ.get("WORLD_SIZE", "")
    if "RANK" in environ and size.isdecimal() and int(size) > 1:
        by = "torchrun" if "TORCHELASTIC_RUN_ID" in environ else "something that sets RANK and WORLD_SIZE"
        return Copies(by, int(size), 'init_method="env://" makes them one job, of which rank 0 is the script')
    if (task := slurm_env.one_of_several(environ)) is not None:
        instead = f'`srun -n {task.size} dtrun script.py` makes them one job, and so does init_method="slurm://"'
        return Copies("srun", task.size, instead)
    told = mpi_env.place_of(environ)
    if told is not None and told[1] > 1:
        return Copies("mpiexec", told[1], f"`mpiexec -n {told[1]} dtrun script.py` makes them one job")
    return None
