"""What the environment of a Slurm job says, without Slurm; test_launch_slurm.py has a real one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from disttensor.cli.checked_options import parse, spec_of
from disttensor.runtime.host import slurm_env
from disttensor.runtime.host.launch_spec import LaunchSpec
from disttensor.runtime.launch.rendezvous.rendezvous import find_rendezvous
from disttensor.runtime.launch.starters.slurm import SlurmStarter
from disttensor.startup.rendezvous import rendezvous_of

#: Task 3 of `srun -N2 -n4`, as Slurm 22.05 tells it.
STEP = {
    "SLURM_CLUSTER_NAME": "hal",
    "SLURM_JOB_ID": "17",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_NTASKS": "4",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "3,1",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURMD_NODENAME": "localhost",
}
#: A batch script: Slurm gives it a rank, but it is no task.
BATCH = {name: STEP[name] for name in ("SLURM_CLUSTER_NAME", "SLURM_JOB_ID", "SLURM_JOB_NUM_NODES", "SLURM_NTASKS")} | {
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
}


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """What sets variables of a job; nothing of one is there before."""
    for name in STEP:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DISTTENSOR_CONNECTION_DIR", str(tmp_path))
    return monkeypatch


def enter(job: pytest.MonkeyPatch, variables: Mapping[str, str]) -> None:
    for name, value in variables.items():
        job.setenv(name, value)


def test_a_task() -> None:
    assert slurm_env.task(STEP) == slurm_env.SlurmTask("hal-17.0", 3, 4, 0, 1, 1, 2)
    assert slurm_env.task(
        {**STEP, "SLURM_PROCID": "1", "SLURM_LOCALID": "1", "SLURM_NODEID": "0"}
    ) == slurm_env.SlurmTask("hal-17.0", 1, 4, 1, 3, 0, 2)
    assert slurm_env.task({**STEP, "SLURM_RESTART_COUNT": "2"}).name == "hal-17.0.2", "of the job that runs now"  # type: ignore[union-attr]


@pytest.mark.parametrize("environ", [{}, BATCH, {**STEP, "SLURM_PROCID": "x"}])
def test_no_task(environ: dict[str, str]) -> None:
    assert slurm_env.task(environ) is None


def test_a_task_without_others() -> None:
    """`srun -n 1 dtrun` starts local nodes; a single node of a master elsewhere is a task as any."""
    alone = {**STEP, "SLURM_STEP_NUM_TASKS": "1"}
    assert slurm_env.task(alone) is not None
    assert slurm_env.one_of_several(alone) is None
    assert slurm_env.one_of_several(STEP) == slurm_env.task(STEP)


def test_how_many_tasks() -> None:
    assert slurm_env.task_count({}) == 0
    assert slurm_env.task_count({"SLURM_NTASKS": "5"}) == 0, "outside of a job it says nothing"
    assert slurm_env.task_count(BATCH) == 4
    assert slurm_env.task_count({"SLURM_JOB_ID": "1", "SLURM_TASKS_PER_NODE": "4(x2),1"}) == 9
    assert slurm_env.per_host("2(x3),1") == [2, 2, 2, 1]


def test_what_slurm_has_divided() -> None:
    job = {**STEP, "SLURM_NODEID": "0", "SLURM_CPUS_ON_NODE": "12", "SLURM_GPUS_ON_NODE": "3"}  # for three tasks
    assert slurm_env.divided(1, 4, {}) == ""
    assert slurm_env.divided(3, 12, job) == ""
    assert slurm_env.divided(1, 4, job) == "gpus,cores"
    assert slurm_env.divided(0, 4, job) == "cores"
    assert slurm_env.divided(1, 12, {**job, "SLURM_GPUS_ON_NODE": "1"}) == "", "all tasks have the same one"


@pytest.mark.row("I15")
def test_seats(job: pytest.MonkeyPatch) -> None:
    """Node k is task k + 1; on the first host, the master is the first task."""
    far = find_rendezvous("slurm://", environ=STEP)
    assert far is not None
    assert far.assigned == (2, 0, 1)
    assert far.path.endswith("/disttensor/slurm-hal-17.0")
    near = find_rendezvous(
        "slurm:///shared/file", environ={**STEP, "SLURM_PROCID": "2", "SLURM_LOCALID": "2", "SLURM_NODEID": "0"}
    )
    assert near is not None
    assert (near.path, near.assigned) == ("/shared/file", (1, 1, 2))
    with pytest.raises(ValueError, match=r"needs the tasks of one srun: srun -n 5 python script\.py"):
        find_rendezvous("slurm://", environ=BATCH)
    enter(job, {**STEP, "SLURM_PROCID": "0", "SLURM_NODEID": "0"})
    script = rendezvous_of("slurm://", None, None, None)
    assert script is not None
    assert (script.rank, script.size, script.assigned) == (0, 4, (-1, -1, 2))


def test_the_plan_of_a_step(job: pytest.MonkeyPatch, tmp_path: Path) -> None:
    enter(job, {**STEP, "SLURM_PROCID": "0", "SLURM_NODEID": "0"})
    plan = spec_of(parse([__file__]))
    assert (plan.launcher, plan.least, plan.most) == ("join", 3, 3)
    assert plan.options["connection_file"] == str(tmp_path / "slurm-hal-17.0")
    assert plan.interface


def test_the_plan_of_an_allocation(job: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="how many nodes is Slurm to start"):
        spec_of(parse(["--launcher", "slurm", __file__]))
    enter(job, BATCH)
    plan = spec_of(parse(["--launcher", "slurm", "--interface", "lo", __file__]))
    assert (plan.launcher, plan.most, plan.interface) == ("slurm", 4, ("lo",))
    plan = spec_of(parse(["--launcher", "slurm", "-n", "3", "--launcher-option", "srun=--exclusive", __file__]))
    assert plan.most == 6
    assert plan.options["srun"].split() == ["--nodes=2", "--ntasks-per-node=3", "--exclusive"]


def test_mpiexec_inside_of_a_job(job: pytest.MonkeyPatch) -> None:
    """A srun that tells what mpiexec tells means Slurm, unless MPI is asked for; mpiexec's own processes are MPI's."""
    from disttensor.runtime.host import mpi_env

    for told, options, launcher in (
        ((3, 4), [], "slurm"),
        ((3, 4), ["--backend", "mpi"], "mpi"),
        ((3, 4), ["--launcher", "mpi"], "mpi"),
        ((0, 8), [], "mpi"),
    ):
        enter(job, STEP)
        job.setattr(mpi_env, "place", lambda told=told: told)
        assert parse([*options, __file__]).launcher == launcher


@pytest.mark.parametrize("path", ["/home/me/job", "/home/\udcff\n/job", "/a?b=1#c%41 d/job"])
def test_srun_is_told_of_a_file_of_any_name(path: str) -> None:
    """And of any interpreter: its tasks find what was meant."""
    starter = SlurmStarter.__new__(SlurmStarter)
    starter.spec = LaunchSpec("slurm", most=2, python="/py \udcff", options={"connection_file": path})
    command = starter.srun_command()
    assert "/py \udcff" in command
    found = find_rendezvous(command[command.index("--init-method") + 1], environ=STEP)
    assert found is not None
    assert found.path == path
