"""The examples under mpiexec, with MPICH and Open MPI: what they print when MPI carries their tensors."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from mpi_kit import KINDS, Mpi
from printed import as_shown
from test_patterns import told
from test_readme import ROOT
from variants import variants

pytestmark = [pytest.mark.mpi]


@pytest.fixture(params=KINDS)
def mpi(request: pytest.FixtureRequest, tmp_path: Path) -> Mpi:
    return Mpi(request.param, tmp_path)


@pytest.mark.row("G1")
def test_data_parallel(mpi: Mpi) -> None:
    text = (ROOT / "examples" / "data_parallel.py").read_text()
    done = mpi.run(text, "--backend", "mpi", n=5)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert float(re.fullmatch(r"test accuracy (.*)%", lines[5])[1]) >= 90
    assert lines[6] == "same losses: True"


@pytest.mark.parametrize(("name", "n"), variants([("point_to_point", 3), ("all_reduce", 5)]))
def test_patterns(mpi: Mpi, name: str, n: int) -> None:
    """One of mpiexec's processes is the master."""
    path = ROOT / "examples" / "patterns" / f"{name}.py"
    done = mpi.run(path.read_text(), "--backend", "mpi", n=n)
    assert (done.returncode, done.stderr) == (0, "")
    assert as_shown(done.stdout, told(path)) == told(path)
