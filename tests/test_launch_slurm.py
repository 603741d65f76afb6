"""Nodes that Slurm has started, on a real one (slurm_kit.py): `make slurm`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from slurm_kit import Slurm, cluster, why_not

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    if missing := why_not():
        pytest.skip(f"no Slurm here: {missing}")
    with cluster(tmp_path_factory.mktemp("slurm")) as found:
        yield found


@pytest.fixture(autouse=True)
def nothing_left(slurm: Slurm) -> Iterator[None]:
    """Fails a test that leaves a job or a process on one of the hosts."""
    yield
    slurm.settle()


def test_the_kit(slurm: Slurm) -> None:
    """What the other tests rely on: tasks on one host and on two, batch jobs, their exit codes and their ends."""
    assert slurm.run("srun", "-n", "4", "--overcommit", "hostname").stdout.split() == ["left"] * 4
    assert sorted(slurm.run("srun", "-N", "2", "hostname").stdout.split()) == ["left", "right"]
    batch = slurm.run("sbatch", "--wait", "--output=batch.txt", "--wrap=hostname; exit 3")
    assert batch.returncode == 3
    assert (slurm.folder / "batch.txt").read_text() == "left\n"
    submitted = slurm.run("sbatch", "--parsable", "--output=/dev/null", "--wrap=srun sleep 1000")
    assert slurm.jobs() == [submitted.stdout.strip()]
    assert slurm.run("scancel", submitted.stdout.strip()).returncode == 0
