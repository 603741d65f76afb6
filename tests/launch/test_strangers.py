"""Strangers at every port of a job, however it was started: no code of theirs runs, and nothing is told or harmed."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from limits import HANG
from strangers import PROBE, RANKS, Job, besiege, check_told, children, started, written
from variants import variants


class Case:
    """How a job is started in a folder, and whose ports there may be that are not disttensor's."""

    def __init__(
        self,
        *options: str,
        backend: str = "",
        ranks: bool = False,
        joins: tuple[str, ...] = (),
        more: str = "",
    ) -> None:
        """``more``: what the script does as well, once its nodes are there."""
        self.options, self.joins = options, joins
        self.script = (
            RANKS if ranks else PROBE.replace("torch.set_num_threads(1)\n", f"torch.set_num_threads(1)\n{more}\n")
        )
        self.arguments = [backend] if backend else []

    @contextlib.contextmanager
    def running(self, folder: Path) -> Iterator[tuple[Job, list[int]]]:
        """The job, and its processes."""
        script, fifo = written(folder, self.script)
        with contextlib.ExitStack() as stack:

            def start(*command: str) -> subprocess.Popen[str]:
                process = stack.enter_context(started(*command, folder=folder, home=folder))
                stack.callback(process.kill)
                return process

            jobs = [start(*self.options, str(script), str(fifo), *self.arguments)]
            if self.joins:
                jobs.append(start("worker", *self.joins))
            with Job(jobs[0], fifo) as job:
                yield job, [pid for process in jobs for pid in children(process.pid)]
                job.end()
            for process in jobs:
                errors = process.communicate(timeout=HANG)[1]
                assert process.returncode == 0
                if process is jobs[0]:
                    check_told(job, errors)
                else:
                    assert errors == ""


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
    "endpoint": (Case("-n", "1", more="endpoint = dt.tasks.Endpoint('endpoint')"), nobodys),
    "gloo": (Case("-n", "2", backend="gloo"), gloos),
    "process group": (Case("--process-group", "-n", "2", ranks=True), torchs),
}


@pytest.mark.parametrize("name", variants(list(CASES)))
@pytest.mark.cold  # torch's store is found by its command line
def test_strangers_at_every_port(name: str, tmp_path: Path) -> None:
    case, may_listen = CASES[name]
    with case.running(tmp_path) as (job, pids):
        theirs = besiege(job, pids, tmp_path / "marker")
        assert all(may_listen(port.pid, job) for port in theirs), theirs
        assert bool(theirs) == (may_listen is not nobodys)
        job.probe()
