"""Strangers at every port of a job, however it was started: no code of theirs runs, and nothing is told or harmed."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from checkout import ROOT
from limits import HANG
from strangers import PROBE, RANKS, Job, besiege, children, written
from variants import variants


class Case:
    """How a job is started in a folder, and whose ports there may be that are not disttensor's."""

    def __init__(self, *options: str, backend: str = "", ranks: bool = False, joins: tuple[str, ...] = ()) -> None:
        self.options, self.ranks, self.joins = options, ranks, joins
        self.arguments = [backend] if backend else []

    @contextlib.contextmanager
    def running(self, folder: Path) -> Iterator[tuple[Job, list[int]]]:
        """The job, and its processes."""
        script, fifo = written(folder, RANKS if self.ranks else PROBE)
        with contextlib.ExitStack() as stack:

            def start(*command: str) -> subprocess.Popen[str]:
                process = stack.enter_context(
                    subprocess.Popen(
                        [sys.executable, "-m", "dtrun", *command],
                        cwd=folder,
                        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HOME": str(folder)},
                        stdin=subprocess.DEVNULL,
                        stdout=subprocess.PIPE,
                        stderr=subprocess.PIPE,
                        text=True,
                    )
                )
                stack.callback(process.kill)
                return process

            started = [start(*self.options, str(script), str(fifo), *self.arguments)]
            if self.joins:
                started.append(start("worker", *self.joins))
            with Job(started[0], fifo) as job:
                yield job, [pid for process in started for pid in children(process.pid)]
                job.end()
            for process in started:
                assert process.communicate(timeout=HANG)[1] == ""
                assert process.returncode == 0


def nobodys(pid: int, job: Job) -> bool:
    return False


def gloos(pid: int, job: Job) -> bool:
    """The script and nodes have gloo's groups."""
    return pid in job.pids


def torchs(pid: int, job: Job) -> bool:
    """Ranks have gloo's groups, and a process of dtrun's has torch's store."""
    return pid in job.pids or "store_host.py" in Path(f"/proc/{pid}/cmdline").read_text()


#: The ports: the control and side channels of a session and its data channels are in each of the first three.
CASES: dict[str, tuple[Case, Callable[[int, Job], bool]]] = {
    "joined": (  # and the tunnel of a root
        Case("--nnodes", "2", "-n", "1", "--connection-file", "job", joins=("--connection-file", "job")),
        nobodys,
    ),
    "local": (Case("-n", "2"), nobodys),
    "gloo": (Case("-n", "2", backend="gloo"), gloos),
    "process group": (Case("--process-group", "-n", "2", ranks=True), torchs),
}


@pytest.mark.parametrize("name", variants(list(CASES)))
def test_strangers_at_every_port(name: str, tmp_path: Path) -> None:
    case, may_listen = CASES[name]
    with case.running(tmp_path) as (job, pids):
        theirs = besiege(job, pids, tmp_path / "marker")
        assert all(may_listen(port.pid, job) for port in theirs), theirs
        assert bool(theirs) == (may_listen is not nobodys)
        job.probe()
