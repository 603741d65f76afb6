"""Two jobs on one host, of one user and of two, at the same time: neither reads, ends or harms what is the other's."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from limits import HANG
from other_user import UID, as_other_user, why_not
from ports import free_port
from processes import alive_after
from strangers import PROBE, Job, children, started
from variants import variants

#: Whose the two jobs are: the one that is there, and the one that comes second.
SAME, SECOND, FIRST = "me, me", "me, other", "other, me"
USERS = pytest.mark.parametrize("whose", [SAME, *variants([SECOND, FIRST])])

#: A job that does nothing.
SHORT = """
import disttensor as dt, torch
with dt.init_master_worker(threads=1):
    print(torch.ones(3, device="node:0").sum().item())
"""

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that everybody may write to, as /tmp; pytest's own are one user's."""
    made = Path(tempfile.mkdtemp(prefix="two-jobs-"))
    made.chmod(0o1777)
    (made / "probe.py").write_text(PROBE)
    (made / "short.py").write_text(SHORT)
    yield made
    shutil.rmtree(made)


@pytest.fixture
def start(folder: Path) -> Iterator[Start]:
    """Starts dtrun as a user; whatever is left of it is killed."""
    with contextlib.ExitStack() as stack:

        def dtrun(user: str, *command: str) -> subprocess.Popen[str]:
            if user == "other" and (missing := why_not()):
                pytest.skip(missing)
            home = folder / f"home of {user}"
            if not home.exists():
                home.mkdir()
                if user == "other":
                    os.chown(home, UID, UID)
            process = stack.enter_context(
                started(*command, folder=folder, home=home, before=as_other_user() if user == "other" else ())
            )
            stack.callback(process.kill)
            return process

        yield dtrun


@contextlib.contextmanager
def probing(start: Start, folder: Path, user: str, name: str, *options: str) -> Iterator[Job]:
    """A job that computes when it is told to."""
    fifo = folder / name
    os.mkfifo(fifo)
    fifo.chmod(0o666)
    with Job(start(user, *options, "probe.py", str(fifo)), fifo) as job:
        yield job


@USERS
def test_one_is_killed_and_the_other_goes_on(whose: str, start: Start, folder: Path) -> None:
    """With all that a job has on its host: sockets, shared memory, log files in folders of one name, helpers."""
    users = whose.split(", ")
    with (
        probing(start, folder, users[0], "first", "-n", "2", "--log-dir", "first logs") as first,
        probing(start, folder, users[1], "second", "-n", "2", "--log-dir", "second logs") as second,
    ):
        pids = children(first.process.pid)
        assert len(pids) >= 5  # dtrun, its fork server, the script, two nodes
        assert not {*pids} & {*children(second.process.pid)}
        first.probe()
        second.probe()
        first.process.kill()
        assert alive_after(10, pids) == []
        second.probe()
        second.end()
        assert second.process.communicate(timeout=HANG) == ("", "")
        assert second.process.returncode == 0


#: Names that a job takes on its host: the options that name it, and what whoever comes second is told.
TAKEN: dict[str, tuple[Callable[[Path], tuple[str, ...]], dict[str, str]]] = {
    "log files": (
        lambda folder: ("-n", "2", "--log-dir", str(folder / "logs")),
        {
            "first": "Another job writes to this file now: name another folder (log_dir=, dtrun --log-dir): "
            "'{folder}/logs/0/stdout.log'",
            "stranger": "Permission denied: name another folder (log_dir=, dtrun --log-dir): '{folder}/logs/0'",
        },
    ),
    "port": (
        lambda folder: ("--nnodes", "1:2", "-n", "1", "--master-addr", "localhost", "--master-port", str(free_port())),
        {"first": "{port} of this host is taken, perhaps by another job: name another one on all hosts (dtrun "},
    ),
    "connection file": (
        lambda folder: ("--nnodes", "1:2", "-n", "1", "--connection-file", str(folder / "job")),
        {
            "first": "{folder}/job is the connection file of process ",
            "stranger": "the connection file {folder}/job cannot be read: Permission denied; give this job another "
            "path (dtrun --connection-file,",
            "root": "the connection file {folder}/job belongs to user 65534, and this process to 0; give this job "
            "another path (dtrun --connection-file,",
        },
    ),
}


@pytest.mark.parametrize("name", TAKEN)
@USERS
def test_who_comes_second_is_told_what_is_taken(name: str, whose: str, start: Start, folder: Path) -> None:
    """In one sentence, with the option that names another; the first goes on, and what it has stays as it is."""
    users = whose.split(", ")
    option, told = TAKEN[name]
    options = option(folder)
    kind = {SAME: "first", SECOND: "stranger", FIRST: "root"}[whose]
    with probing(start, folder, users[0], "fifo", *options) as first:
        before = listed(folder)
        second = start(users[1], *options, "short.py")
        out, err = second.communicate(timeout=HANG)
        assert (out, second.returncode) == ("", 1)
        said = told.get(kind, told["first"]).format(folder=folder, port=options[-1])
        assert err.count(said) == 1, err
        assert "StartError: " in err.splitlines()[-1] or said in err.splitlines()[-1]
        assert listed(folder) == before
        first.probe()
        first.end()
        assert first.process.communicate(timeout=HANG) == ("", "")
    if whose == SAME:  # it is free again, also where a job was killed
        third = start(users[0], *options, "short.py")
        assert third.communicate(timeout=HANG) == ("3.0\n", "")


def listed(folder: Path) -> dict[str, tuple[int, int, int, str]]:
    """Files by name: inode, owner, mode, and what is in them."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if "home of" not in str(path) and "__pycache__" not in str(path):
            state = path.stat()
            text = path.read_text() if path.is_file() else ""
            found[str(path)] = (state.st_ino, state.st_uid, state.st_mode, text)
    return found


def kill(job: Job) -> None:
    """Kills all processes of a job."""
    pids = children(job.process.pid)
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):  # by the end of those before it
            os.kill(pid, signal.SIGKILL)
    assert alive_after(HANG, pids) == []


def test_what_a_killed_job_had_is_free(start: Start, folder: Path) -> None:
    """Its port and its log files at once; its connection file has to be removed, and that is said."""
    options = "--nnodes", "1:2", "-n", "1", "--log-dir", "logs"
    by_port = "--master-addr", "localhost", "--master-port", str(free_port())
    with probing(start, folder, "me", "fifo", *options, *by_port) as first:
        kill(first)
    second = start("me", *options, *by_port, "short.py")
    assert second.communicate(timeout=HANG) == ("3.0\n", "")
    by_file = "--connection-file", "job"
    with probing(start, folder, "me", "another", *options, *by_file) as third:
        kill(third)
    fourth = start("me", *options, *by_file, "short.py")
    out, err = fourth.communicate(timeout=HANG)
    assert (out, fourth.returncode) == ("", 1)
    assert f"{folder}/job was left over by process " in err
    assert "which has ended: remove it" in err
