"""`dtrun ps`, `status`, `stack`, `logs`, `trace`, `kill`: of jobs that run, from another terminal."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from began import Began, tell
from checkout import ROOT
from job_folders import job_folder
from limits import HANG
from report_pages import read_page
from trace_schema import read, slices

import disttensor as dt
from disttensor import testing
from disttensor.cli import jobs
from disttensor.cli.command import main
from disttensor.runtime.host import job_sockets
from disttensor.seeing import asked_trace
from disttensor.session import current

Captured = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def runtime() -> Iterator[Path]:
    with job_folder() as folder:
        yield folder


@pytest.fixture(scope="module")
def cluster(runtime: Path) -> Iterator[None]:
    with dt.init_master_worker("tcp", nodes=3, threads=1):
        for k in range(3):
            torch.ones(4, device=f"node:{k}").sum().item()
        yield


def dtrun(capsys: Captured, *words: str, code: int = 0) -> str:
    """What a command prints, to stderr where it can't be done."""
    capsys.readouterr()
    assert main(words) == code
    found = capsys.readouterr()
    return found.err if code == 2 else found.out


def job(text: str, folder: Path) -> subprocess.Popen[str]:
    """A job of another script, which runs until its input ends."""
    script = folder / "other.py"
    script.write_text(text)
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


OTHER = """
import sys
import disttensor as dt
with dt.init_master_worker(nodes=1, launcher="inproc"):
    print("ready", flush=True)
    sys.stdin.read()
"""


def sleeper(port: int, fifo: str) -> None:
    password = "hunter2"  # which no stack shows
    with open(fifo, "rb", buffering=0) as source:
        tell(port)
        source.read(1)
    assert password


def in_c(port: int, fifo: str) -> None:
    """Waits in C code that holds the GIL."""
    import ctypes

    with open(fifo, "rb", buffering=0) as source:
        tell(port)
        ctypes.PyDLL(None).read(source.fileno(), ctypes.create_string_buffer(1), 1)


class Sleeps:
    """An actor."""

    def work(self, port: int, fifo: str) -> None:
        sleeper(port, fifo)


@pytest.mark.usefixtures("cluster")
def test_ps_has_a_row_for_each_job(capsys: Captured, tmp_path: Path) -> None:
    assert re.fullmatch(
        rf"pid +script +nodes  hosts +up +state\n{os.getpid()} +\S+ +3 +\S+ +00:0\d:\d\d  runs\n", dtrun(capsys, "ps")
    )
    with job(OTHER, tmp_path) as other:
        shown = dtrun(capsys, "ps")
        assert re.search(rf"(?m)^{other.pid} +other\.py +1 +\S+ +00:0\d:\d\d  runs$", shown)
        assert len(shown.splitlines()) == 3
        several = dtrun(capsys, "status", code=2)
        assert several.startswith("dtrun: error: 2 jobs run on this host; say which, by its number: ")
        assert f"{other.pid} (other.py)" in several
        for name in (str(other.pid), "other.py", "other"):
            assert dtrun(capsys, "status", name).startswith(f"other.py on {os.uname().nodename}, pid {other.pid}: ")
        assert "no job 1 of yours runs on this host; there is" in dtrun(capsys, "status", "1", code=2)
        other.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, other.pid, os.WSTOPPED)
        stopped = jobs.PS
        try:
            jobs.PS = 0.05
            assert f"stopped: `kill -CONT {other.pid}` has it go on" in dtrun(capsys, "ps")
        finally:
            jobs.PS = stopped
        path = next(each.path for each in job_sockets.find_jobs() if each.pid == other.pid)
        other.kill()
        other.wait()
        assert os.path.exists(path)
        assert str(other.pid) not in dtrun(capsys, "ps")
        assert not os.path.exists(path)


@pytest.mark.usefixtures("cluster")
def test_kill_ends_a_job(capsys: Captured, tmp_path: Path) -> None:
    with job(OTHER, tmp_path) as other:
        assert dtrun(capsys, "kill", str(other.pid)) == f"job {other.pid} has ended\n"
        assert other.wait() == -signal.SIGTERM
    assert [each.pid for each in job_sockets.find_jobs()] == [os.getpid()]


@pytest.mark.usefixtures("cluster")
def test_status_is_a_table_or_json(capsys: Captured) -> None:
    kept = torch.ones(1000, device="node:1")
    shown = dtrun(capsys, "status")
    assert re.search(r"(?m)^node +host +state", shown)
    assert len(re.findall(r"(?m)^[012] +\S+ +(?:idle|running)", shown)) == 3
    found = json.loads(dtrun(capsys, "status", "--json"))
    assert [node["rank"] for node in found["nodes"]] == [0, 1, 2]
    assert found["script"]["pid"] == os.getpid()
    assert kept.nbytes == 4000


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("how", ["main", "beside", "stream", "actor", "c"])
def test_stack_names_the_thread_that_works_first(capsys: Captured, tmp_path: Path, how: str) -> None:
    fifo = str(tmp_path / "fifo")
    os.mkfifo(fifo)
    there = threading.Event()
    with Began(there.set) as port:
        match how:
            case "main":
                work = dt.submit(sleeper, port, fifo, node=1)
            case "beside":
                work = dt.submit(sleeper, port, fifo, node=1, beside=True)
            case "stream":
                with dt.Stream(1):
                    work = dt.submit(sleeper, port, fifo, node=1)
            case "actor":
                actor = dt.actor(Sleeps, node=1)
                work = actor.work(port, fifo)
            case _:
                work = dt.submit(in_c, port, fifo, node=1)
        line = sys._getframe().f_lineno
        sink = os.open(fifo, os.O_WRONLY)
    assert there.wait(HANG)
    try:
        shown = dtrun(capsys, "stack", "-n", "1")
    finally:
        os.write(sink, b"x")
        os.close(sink)
        work.result()
    title, first = shown.split("\n\n")[:2]
    assert title.startswith(f"node 1 on {os.uname().nodename}, pid {dt.nodes()[1].pid}: running ")
    name = {"actor": "work()", "c": "in_c()"}.get(how, "sleeper()")
    head, *frames = first.splitlines()
    issued = re.fullmatch(
        rf"thread 0x\w+ runs a function: (?:Sleeps\.)?{re.escape(name)}, issued at "
        rf"{Path(__file__).name}:(\d+), for [\d.]+ s:",
        head,
    )
    assert issued, shown
    assert line - 20 < int(issued[1]) < line
    assert f'File "{__file__}"' in frames[0]
    assert "hunter2" not in shown


@pytest.mark.usefixtures("cluster")
def test_stack_has_the_script_too(capsys: Captured) -> None:
    shown = dtrun(capsys, "stack")
    assert shown.startswith("the script, ")
    assert re.search(r"(?m)^thread MainThread:$", shown)
    assert f'File "{__file__}"' in shown
    assert re.findall(r"(?m)^node (\d) on", shown) == ["0", "1", "2"]
    assert re.findall(r"(?m)^node (\d) on", dtrun(capsys, "stack", "-n", "0,2")) == ["0", "2"]
    assert "node 9 does not exist: there are 0 to 2" in dtrun(capsys, "stack", "-n", "9", code=2)
    assert "numbers of nodes are needed, such as 1,3 or 0-7" in dtrun(capsys, "stack", "-n", "x", code=2)


@pytest.mark.usefixtures("cluster")
def test_stack_has_the_last_messages_of_nodes(capsys: Captured) -> None:
    torch.ones(4, device="node:1").sum().item()
    line = sys._getframe().f_lineno - 1
    shown = dtrun(capsys, "stack", "-n", "1")
    rows = shown.partition("\n\nlast messages:\n")[2].splitlines()
    assert rows[0].split() == ["ago", "who", "what", "commands", "bytes", "took", "line"]
    assert 3 < len(rows) < 10
    for who in ("script +sent", "node 1 +message"):
        assert any(re.search(rf"^ *[\d.]+ s  {who} .* {Path(__file__).name}:{line}$", row) for row in rows), shown
    found = json.loads(dtrun(capsys, "stack", "--json"))
    assert [it["rank"] for it in found["processes"]] == [-1, 0, 1, 2]
    assert "MainThread" in found["processes"][0]["text"]
    node = found["record"]["nodes"][1]
    sent, applied = ([(it["first"], it["last"]) for it in node[part] if it["kind"] == kind]
                     for part, kind in (("sent", "sent"), ("applied", "message")))  # fmt: skip
    assert sent == applied != []
    assert found["record"]["why"] == "`dtrun stack` asks for it"
    assert "not allowed with argument" in dtrun(capsys, "stack", "--json", "--native", code=2)


@pytest.mark.usefixtures("cluster")
def test_a_stopped_node_has_a_title_and_no_stack(capsys: Captured) -> None:
    pid = dt.nodes()[2].pid
    testing.stop(2)
    try:
        shown = dtrun(capsys, "stack", "-n", "2")
    finally:
        testing.resume(2)
    title, messages = shown.split("\n\n")
    assert title == f"node 2 on {os.uname().nodename}, pid {pid}: stopped: `kill -CONT {pid}` has it go on"
    assert messages.startswith("last messages:\n")


@pytest.mark.usefixtures("cluster")
def test_native_stacks_are_those_of_py_spy(capsys: Captured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "--native needs py-spy: pip install py-spy" in dtrun(capsys, "stack", "--native", code=2)
    spy = tmp_path / "py-spy"
    spy.write_text('#!/bin/sh\necho "spied $*"\n')
    spy.chmod(0o755)
    shown = dtrun(capsys, "stack", "-n", "0", "--native")
    assert f"spied dump --native --pid {dt.nodes()[0].pid}" in shown


def prints(text: str) -> None:
    print(text)


def flush() -> None:
    """Returns when what nodes have printed is with who shows it."""
    launcher = current.session().launcher
    assert launcher is not None
    launcher.flush(HANG)


@pytest.mark.usefixtures("cluster")
def test_logs_are_the_last_lines_of_nodes(capsys: Captured) -> None:
    dt.run(prints, "first\n  second", node=1)
    dt.run(prints, "\x1b[31mthird\x1b[0m", node=2)
    flush()
    shown = dtrun(capsys, "logs", "-n", "1-2")  # node 0 says that they share cores
    assert shown == "[node 1] first\n[node 1]   second\n[node 2] third\n"
    assert dtrun(capsys, "logs", "-n", "2") == "[node 2] third\n"
    (here,) = job_sockets.find_jobs()
    followed = jobs.lines(here, (1,), follow=True)
    assert [next(followed).text for _ in range(2)] == ["first", "  second"]
    dt.run(prints, "fourth", node=1)
    flush()
    assert next(followed).text == "fourth"


@pytest.mark.usefixtures("cluster")
def test_a_node_that_was_killed_is_lost_and_status_says_so(capsys: Captured) -> None:
    """The last test that has the cluster."""
    assert dtrun(capsys, "kill", "-n", "2") == f"job {os.getpid()}: killed node 2\n"
    shown = dtrun(capsys, "status", code=jobs.EX_LOST)
    assert re.search(r"(?m)^2 .* lost: killed by `dtrun kill`", shown)
    assert re.search(rf"(?m)^{os.getpid()} .* 3, 1 lost ", dtrun(capsys, "ps"))
    assert "NodeLost: node 2 " in dtrun(capsys, "kill", "-n", "2", code=2)
    assert dtrun(capsys, "stack", "-n", "2").startswith("node 2 on ")


# ---- other jobs, and none --------------------------------------------------------------------------------------------


@pytest.fixture
def empty() -> Iterator[Path]:
    with job_folder() as folder:
        yield folder


@pytest.mark.usefixtures("empty")
def test_without_a_job_there_is_nothing_to_see(capsys: Captured) -> None:
    assert dtrun(capsys, "ps") == ""
    for command in ("status", "stack", "logs", "kill", "top"):
        assert dtrun(capsys, command, code=2) == "dtrun: error: no job of yours runs on this host\n"


@pytest.mark.parametrize("command", ["ps", "status", "top", "stack", "logs", "kill"])
def test_a_script_of_a_commands_name(
    command: str, capsys: Captured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "logs").mkdir(exist_ok=True)  # a folder of that name is no script
    (tmp_path / command).with_suffix(".py").touch()
    assert jobs.taken_by(command) == ""
    if command == "logs":
        (tmp_path / command / "__main__.py").touch()
    else:
        (tmp_path / command).touch()
    assert dtrun(capsys, command, code=2) == (
        f"dtrun: error: {command} is a command of dtrun, and a script in this folder: `dtrun ./{command}` runs the "
        "script; for the command, go to another folder\n"
    )


@pytest.mark.usefixtures("cluster")
def test_a_timeline_of_a_job_that_runs(capsys: Captured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The job goes on as it was; the file is made by who has asked, for itself alone."""
    x, path = torch.ones(8, 8, device="node:0"), tmp_path / "t.json.gz"
    heard = list[str]()

    def meanwhile(seconds: float) -> None:
        """What goes on while the command sleeps."""
        if seconds == 2.5:
            (x @ x).sum().item()
            heard.append(dtrun(capsys, "trace", "-o", str(tmp_path / "other.json"), code=2))
            raise KeyboardInterrupt  # which ends it early

    monkeypatch.setattr(jobs, "time", SimpleNamespace(sleep=meanwhile, monotonic=time.monotonic))
    said = dtrun(capsys, "trace", "-o", str(path), "--seconds", "2.5")
    assert said.startswith(f"{path}: 2.5 s of job {os.getpid()}; ")
    assert "a profile is recorded already, begun from another terminal" in heard[0]
    assert slices(read(path), name="aten::mm", pid=2)
    assert path.stat().st_mode & 0o777 == 0o600
    assert [each.name for each in tmp_path.iterdir()] == ["t.json.gz"]
    page = tmp_path / "t.html"
    assert "any browser opens it" in dtrun(capsys, "trace", "-o", str(page), "--seconds", "1")
    assert [node["rank"] for node in read_page(page.read_bytes()).values["nodes"]][:2] == [0, 1]
    assert page.stat().st_mode & 0o777 == 0o600
    assert "takes up to 3600 s, not 0" in dtrun(capsys, "trace", "-o", str(path), "--seconds", "0", code=2)
    monkeypatch.setattr(asked_trace, "MOST_DATA", 10)
    assert "bytes, and 10 can be told: take fewer" in dtrun(capsys, "trace", "-o", str(path), "--seconds", "1", code=2)
    missing = tmp_path / "missing" / "t.json"
    assert f"{missing}.part can't be written: " in dtrun(capsys, "trace", "-o", str(missing), code=2)
    assert not current.session().link.seam.issued.listeners
