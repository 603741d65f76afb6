"""The socket at which a script is asked how it is: whose it is, who may ask, and what nobody can do there."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import select
import socket
import stat
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from job_folders import job_folder
from limits import HANG
from other_user import UID, as_other_user, why_not

import disttensor as dt
from disttensor.cli.command import main
from disttensor.runtime.host import job_sockets, job_window, socket_folder
from disttensor.runtime.host.job_sockets import FoundJob, JobRequest, JobSocketError, Killed, Refusal, ask
from disttensor.runtime.host.job_window import JobWindow
from disttensor.runtime.host.socket_folder import NotOurs
from disttensor.runtime.process.lifetime import process_stat
from disttensor.runtime.protocol import bundle

asked: list[JobRequest] = []


def answer(request: JobRequest) -> Killed:
    asked.append(request)
    return Killed(request.nodes)


@pytest.fixture
def runtime() -> Iterator[Path]:
    with job_folder() as folder:
        yield folder


@pytest.fixture
def window(runtime: Path) -> Iterator[FoundJob]:
    """A window of this process."""
    asked.clear()
    it, before = JobWindow(), os.umask(0)
    try:
        it.open(answer)
    finally:
        os.umask(before)
    (job,) = job_sockets.find_jobs()
    yield job
    it.close()
    assert not os.path.exists(job.path)
    assert job_sockets.find_jobs() == []


def connected(job: FoundJob) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(job.path)  # waits while there is no room
    connection.settimeout(HANG)
    return connection


def heard(connection: socket.socket) -> bytes:
    """All that comes until the other end hangs up."""
    found = b""
    while piece := connection.recv(1 << 16):
        found += piece
    return found


def test_it_is_this_users_alone_whatever_the_umask(window: FoundJob, runtime: Path) -> None:
    assert window == FoundJob(os.getpid(), str(runtime / "disttensor" / f"{os.getpid()}.sock"))
    assert stat.S_IMODE(os.stat(window.path).st_mode) == 0o600
    assert stat.S_IMODE(os.stat(runtime / "disttensor").st_mode) == 0o700


def test_it_answers(window: FoundJob) -> None:
    assert ask(window, JobRequest("kill", (1, 2))) == Killed((1, 2))
    assert asked == [JobRequest("kill", (1, 2))]
    assert job_sockets.pid_of(window) == os.getpid()


@pytest.mark.parametrize(
    "said",
    [
        b"\n",
        b"{}\n",
        b'{"what": "run"}\n',
        b'{"what": "kill", "nodes": ["__import__(1)"]}\n',
        b'{"what": "kill", "code": "1"}\n',
        b'{"what": "status"}\n{"what": "status"}\n',
        b"\x80\x04\x95\n\x00cos\nsystem\n",  # a pickle
        b"[" * job_sockets.MOST_REQUEST,
    ],
)
def test_what_is_no_request_is_refused(window: FoundJob, said: bytes) -> None:
    with connected(window) as connection:
        connection.sendall(said)
        assert b'"type":"Refusal"' in heard(connection)
    assert asked == []
    assert ask(window, JobRequest("kill")) == Killed(())


def test_who_says_nothing_is_cut_off(window: FoundJob, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_window, "SILENT", 0.05)
    with connected(window) as connection:
        assert heard(connection) == b""


def test_there_are_so_many_at_once_and_no_more(window: FoundJob) -> None:
    with contextlib.ExitStack() as stack:
        first = [stack.enter_context(connected(window)) for _ in range(job_window.MOST)]
        with connected(window) as further:
            assert heard(further) == b""
        for connection in first:
            connection.sendall(b'{"what": "kill"}\n')
            assert b"Killed" in heard(connection)
    assert ask(window, JobRequest("kill")) == Killed(())


def test_an_error_is_an_answer(runtime: Path) -> None:
    def fails(request: JobRequest) -> Killed:
        raise ValueError("no such thing")

    window = JobWindow()
    window.open(fails)
    try:
        (job,) = job_sockets.find_jobs()
        assert ask(job, JobRequest("status")) == Refusal("ValueError: no such thing")
    finally:
        window.close()


def test_a_job_that_does_not_answer(runtime: Path) -> None:
    held, window = threading.Event(), JobWindow()

    def waits(request: JobRequest) -> Killed:
        held.wait(HANG)
        return Killed(())

    window.open(waits)
    try:
        (job,) = job_sockets.find_jobs()
        with pytest.raises(JobSocketError, match=r"has not answered within 0\.05 s: its script is stopped, or holds"):
            ask(job, JobRequest("status"), 0.05)
    finally:
        held.set()
        window.close()


def test_sockets_of_dead_jobs_are_removed(runtime: Path) -> None:
    path = runtime / "disttensor" / "4711.sock"
    path.parent.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        assert job_sockets.find_jobs() == [FoundJob(4711, str(path))]
    assert path.exists()
    assert job_sockets.find_jobs() == []
    assert not path.exists()
    with pytest.raises(JobSocketError, match="job 4711 has ended"):
        ask(FoundJob(4711, str(path)), JobRequest("status"))


#: Waits to be killed; says which node it has.
WORKS = """
import disttensor as dt
dt.init_master_worker(nodes=1, threads=1)
print(dt.nodes()[0]["pid"], flush=True)
input()
"""


def test_a_killed_script_leaves_no_socket(runtime: Path) -> None:
    """Its fork server removes that, and the folder if no other job's socket is there."""
    with subprocess.Popen([sys.executable, "-c", WORKS], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as script:
        server = int(process_stat(int(script.stdout.readline()))[1])  # type: ignore[union-attr]
        assert [each.pid for each in job_sockets.find_jobs()] == [script.pid]
        pidfd = os.pidfd_open(server)
        script.kill()
        assert select.select([pidfd], [], [], HANG)[0]
        os.close(pidfd)
    assert not (runtime / "disttensor").exists()


def test_a_folder_that_goes_meanwhile_is_made_anew(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def make_folder() -> str:
        made.append(make())
        if len(made) == 1:
            os.rmdir(made[0])
        return made[-1]

    made, make = list[str](), socket_folder.make_folder
    monkeypatch.setattr(socket_folder, "make_folder", make_folder)
    window = JobWindow()
    window.open(answer)
    assert [each.pid for each in job_sockets.find_jobs()] == [os.getpid()]
    window.close()
    assert len(made) == 2
    assert not (runtime / "disttensor").exists()


def test_a_living_socket_of_this_number_is_left_alone(window: FoundJob) -> None:
    second = JobWindow()
    with pytest.raises(OSError, match="is another job's"):
        second.open(answer)
    second.close()
    assert ask(window, JobRequest("kill")) == Killed(())


def test_a_forked_child_does_not_hold_it(runtime: Path) -> None:
    """Else nobody would see that the job has ended, as long as the child lives."""
    window = JobWindow()
    window.open(answer)
    (job,) = job_sockets.find_jobs()
    listener = window._socket
    assert listener is not None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        number = listener.fileno()
        window.forked()
        window.close()
        try:
            os.fstat(number)
        except OSError:
            os._exit(0 if os.path.exists(job.path) else 2)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert ask(job, JobRequest("kill")) == Killed(())
    window.close()


# ---- others ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["open", "link", "file", "foreign"])
def test_a_folder_that_others_have_made_or_may_use_is_refused(runtime: Path, what: str) -> None:
    folder = runtime / "disttensor"
    match what:
        case "open":
            folder.mkdir()
            folder.chmod(0o770)
        case "link":
            (runtime / "elsewhere").mkdir(mode=0o700)
            folder.symlink_to(runtime / "elsewhere")
        case "file":
            folder.touch(mode=0o700)
        case "foreign":
            if missing := why_not():
                pytest.skip(missing)
            folder.mkdir(mode=0o700)
            os.chown(folder, UID, UID)
    with pytest.raises(NotOurs, match=f"{folder} is |others may use {folder}"):
        JobWindow().open(answer)
    assert job_sockets.find_jobs() == []


def test_a_runtime_folder_that_is_missing_or_another_users_is_not_used(
    runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after su, which may leave the variable as it was."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime / "missing"))
    mine = str(runtime / f"disttensor-{os.getuid()}")
    assert socket_folder.folders() == [mine]
    assert socket_folder.make_folder() == mine
    monkeypatch.setenv("XDG_RUNTIME_DIR", "relative")
    assert socket_folder.folders() == [mine]


#: Connects, and says what comes.
STRANGER = """
import socket, sys
with socket.socket(socket.AF_UNIX) as s:
    s.connect(sys.argv[1])
    try:
        s.sendall(b'{"what": "kill"}\\n')
        print("heard", s.recv(100))
    except ConnectionError:
        print("heard", b"")
"""


def test_one_that_cannot_be_opened_leaves_nothing(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    before = os.listdir("/proc/self/fd")
    monkeypatch.setattr(threading.Thread, "start", fail)
    window = JobWindow()
    with pytest.raises(RuntimeError, match="new thread"):
        window.open(lambda request: Killed(()))
    assert os.listdir("/proc/self/fd") == before
    assert not (runtime / "disttensor").exists()


@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_another_user_hears_nothing(window: FoundJob, runtime: Path) -> None:
    """Not even where the folder's and the socket's modes would let it in."""

    def stranger() -> subprocess.CompletedProcess[str]:
        command = [*as_other_user(), sys.executable, "-c", STRANGER, window.path]
        return subprocess.run(command, capture_output=True, text=True, timeout=HANG)

    assert "PermissionError" in stranger().stderr
    for folder in (runtime, runtime / "disttensor"):
        folder.chmod(0o777)
    os.chmod(window.path, 0o666)
    done = stranger()
    assert (done.stdout, asked) == ("heard b''\n", []), done.stderr
    (runtime / "disttensor").chmod(0o700)


# ---- sessions whose nodes are threads --------------------------------------------------------------------------------


def dtrun(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    """What a command prints, to stderr where it can't be done."""
    capsys.readouterr()
    assert main(words) == code
    found = capsys.readouterr()
    return found.err if code == 2 else found.out


@pytest.mark.usefixtures("runtime")
def test_nodes_that_are_threads(capsys: pytest.CaptureFixture[str]) -> None:
    with dt.init_master_worker(nodes=2, launcher="inproc"):
        assert torch.ones(3, device="node:1").sum().item() == 3
        assert len(re.findall(r"(?m)^[01] +\S+ +(?:idle|unseen) ", dtrun(capsys, "status"))) == 2
        shown = dtrun(capsys, "stack")
        assert re.search(r"(?m)^thread node 1:$", shown)
        assert shown.count("it is a thread of the script: its stack is there") == 2
        assert "its nodes are threads of the script, and print where that" in dtrun(capsys, "logs", code=2)
        assert "`dtrun kill` without -n ends the job" in dtrun(capsys, "kill", "-n", "0", code=2)
    assert job_sockets.find_jobs() == []


def test_a_job_may_have_no_socket(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor have its nodes' hosts, which hear nothing of the script."""
    told, make = list[object](), bundle.Bundle

    def told_of(**named: Any) -> bundle.Bundle:
        told.append(named["script"])
        return make(**named)

    monkeypatch.setattr(bundle, "Bundle", told_of)
    monkeypatch.setenv(job_sockets.NO_SOCKET, "1")
    with dt.init_master_worker(nodes=1, launcher="inproc"):
        assert job_sockets.find_jobs() == []
    assert [*runtime.iterdir()] == []
    assert told == [None]


@pytest.mark.parametrize(("mode", "level"), [(0o755, "WARNING"), (0o000, "INFO")])
def test_a_job_runs_without_a_socket_and_says_why_once(
    runtime: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, mode: int, level: str
) -> None:
    """Where somebody else could use the folder that is a warning; where there can be none, or no thread, it is not."""
    caplog.set_level(logging.INFO, "disttensor")
    if mode:
        (runtime / "disttensor").mkdir()
        (runtime / "disttensor").chmod(mode)
    else:
        monkeypatch.setattr(socket_folder.os, "mkdir", no_room)
    with dt.init_master_worker(nodes=1, launcher="inproc"):
        assert torch.ones(3, device="node:0").sum().item() == 3
    (record,) = (each for each in caplog.records if "don't see this job" in each.getMessage())
    assert record.levelname == level


def no_room(*_: object) -> None:
    raise OSError(28, "No space left on device")
