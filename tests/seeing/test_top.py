"""`dtrun top`: what stands on terminals of any size, and what keys do there."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pyte
import pytest
from checkout import ROOT
from job_folders import job_folder
from limits import HANG

from disttensor.cli.top import _ENTER, _LEAVE, SORTS, Screen
from disttensor.runtime.host import job_sockets
from disttensor.runtime.host.job_sockets import (
    JobAnswer,
    JobRequest,
    JobSummary,
    Killed,
    OutputAnswer,
    OutputLine,
    ProcessStack,
    StackAnswer,
    StatusAnswer,
)
from disttensor.runtime.host.job_window import JobWindow


def node(rank: int, **other: Any) -> dict[str, Any]:
    """A node as a status has it."""
    there = {
        "rank": rank, "host": "a", "pid": 5000 + rank, "devices": ["cpu"], "state": "running", "what": "aten::mm",
        "line": "train.py:33", "seconds": 0.2, "waits_for": None, "note": "", "behind": 1204, "tensors": 212,
        "bytes": 58 << 30, "rss": 1400 << 20, "cpu": 0.98, "age": 0.1, "said": 0.1,
    }  # fmt: skip
    return {**there, **other}


def status(nodes: list[dict[str, Any]]) -> dict[str, Any]:
    wait = {"thread": "MainThread", "node": 1, "seconds": 1.2, "line": "train.py:41", "code": "loss.item()"}
    script = {
        "name": "train.py", "host": "a", "pid": 4711, "waits": [wait], "commands": 12431, "rss": 900 << 20,
        "uploads": 0, "fetches": 0,
    }  # fmt: skip
    return {"script": script, "nodes": nodes}


FOUR = [
    node(0),
    node(1, state="waiting", what="", waits_for=0, behind=12, cpu=0.02),
    node(2, host="b", state="running", what="a_function_with_a_long_name_that_no_row_of_80_has_room_for()", behind=8),
    node(3, host="b", state="lost", what="", line="", note="killed by SIGKILL", cpu=None),
]


def texts(screen: Screen, width: int, height: int) -> list[str]:
    found = [text for _, text in screen.lines(width, height)]
    assert len(found) == height
    assert max(map(len, found)) <= width
    return found


def test_eighty_columns() -> None:
    screen = Screen()
    screen.status, screen.seconds = status(FOUR), 751
    screen.output.append(OutputLine(1, 1, "epoch 3 ..."))
    assert texts(screen, 80, 12) == [
        "train.py  pid 4711  4 nodes on 2 hosts, 1 lost  up 00:12:31  12,431 commands",
        "NODE  HOST  STATE                                 BEHIND  CPU   RSS         HELD",
        "main  a     waits 1.2 s for node 1 loss.item(...       -    -  900M            -",
        "0     a     running aten::mm train.py:33           1,204  98%  1.4G  212 / 58.0G",
        "1     a     waiting for node 0 train.py:33            12   2%  1.4G  212 / 58.0G",
        "2     b     running a_function_with_a_long_na...       8  98%  1.4G  212 / 58.0G",
        "3     b     LOST: killed by SIGKILL                    -    -     -            -",
        "[node 1] epoch 3 ...",
        "",
        "",
        "",
        "q quit  n node  s sort  p stack  l output  k kill",
    ]


def test_nodes_whose_script_is_on_another_host() -> None:
    """Of these only the script knows what is behind and held."""
    screen = Screen()
    screen.status = status([node(rank, host="b", line="", behind=None, tensors=None, bytes=None) for rank in (2, 3)])
    screen.status["script"].update(waits=[], commands=None, rss=None)
    for _ in SORTS:
        shown = [re.sub(" {2,}", "  ", text) for text in texts(screen, 80, 8)]
        assert shown[:5] == [
            "train.py  pid 4711  2 nodes on 1 host  up 00:00:00",
            "NODE  HOST  STATE  BEHIND  CPU  RSS  HELD",
            "main  a  runs there: `dtrun top` there has more  -  -  -  -",
            "2  b  running aten::mm  -  98%  1.4G  -",
            "3  b  running aten::mm  -  98%  1.4G  -",
        ]
        screen.sort += 1


def test_two_hundred_columns_have_room_for_all() -> None:
    screen = Screen()
    screen.status = status(FOUR)
    shown = texts(screen, 200, 30)
    assert shown[0].endswith("12,431 commands" + "q quit  n node  s sort  p stack  l output  k kill".rjust(200 - 76))
    assert "a_function_with_a_long_name_that_no_row_of_80_has_room_for() train.py:33" in shown[5]


@pytest.mark.parametrize(("width", "height"), [(80, 24), (200, 50), (200, 100), (20, 4), (40, 8)])
def test_the_chosen_one_of_64_nodes_is_seen(width: int, height: int) -> None:
    screen = Screen()
    screen.status = status([node(rank) for rank in range(64)])
    for rank in [*range(64), None]:
        screen.choose_next()
        assert screen.chosen == rank
        rows = [text for style, text in screen.lines(width, height) if style == "\x1b[7m"]
        assert [row.split()[0] for row in rows] == ([] if rank is None else [f"{rank}"])
        texts(screen, width, height)
    if height == 24:
        assert "and 45 more; n chooses the next node" in texts(screen, width, height)


def test_nodes_are_sorted_by_what_is_chosen() -> None:
    screen = Screen()
    screen.status = status([node(0, behind=1), node(1, behind=5), node(2, behind=3)])
    assert [each["rank"] for each in screen.nodes] == [0, 1, 2]
    screen.sort = 1
    assert [each["rank"] for each in screen.nodes] == [1, 2, 0]
    assert texts(screen, 80, 24)[-1].startswith("by behind  ")


def test_what_a_job_says_does_nothing_to_the_terminal() -> None:
    screen = Screen()
    screen.status = status([node(0, note="\x1b[2J\x07evil\r\nline")])
    screen.output.append(OutputLine(1, 0, "\x1b]0;title\x07out\tput"))
    assert all(text.isprintable() for text in texts(screen, 200, 24))


# ---- on a terminal ---------------------------------------------------------------------------------------------------


class Job:
    """A job that answers, without a session."""

    def __init__(self) -> None:
        self.asked: list[JobRequest] = []

    def __call__(self, request: JobRequest) -> JobAnswer:
        self.asked.append(request)
        match request.what:
            case "status":
                found = status([node(rank) for rank in range(64)])
                return StatusAnswer(msgspec.Raw(msgspec.json.encode(found)), "", 0, 751.0)
            case "output":
                return OutputAnswer((OutputLine(7, 1, "epoch 3 ..."),) if request.after < 7 else (), False)
            case "stack":
                text = 'thread 0x1 runs a function: f():\n  File "train.py", line 1 in f'
                return StackAnswer((ProcessStack(request.nodes[0], "a", 1, True, "node 0 on a: running f()", text),))
            case "kill":
                return Killed(request.nodes)
        return JobSummary(4711, "train.py", 64, 0, ("a",), 751.0, "runs")


class Terminal:
    """A terminal in which dtrun runs."""

    def __init__(self, columns: int, rows: int) -> None:
        self.screen = pyte.Screen(columns, rows)
        self._stream = pyte.ByteStream(self.screen)
        self.raw = b""
        self._ours, self.fd = pty.openpty()
        termios.tcsetwinsize(self.fd, (rows, columns))
        self.before = termios.tcgetattr(self.fd)
        env = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "dtrun", "top", str(os.getpid())], env=env, preexec_fn=self._take,
            stdin=self.fd, stdout=self.fd, stderr=self.fd,
        )  # fmt: skip

    def _take(self) -> None:
        os.setsid()
        fcntl.ioctl(self.fd, termios.TIOCSCTTY, 0)

    def type(self, keys: str) -> None:
        os.write(self._ours, keys.encode())

    def resize(self, columns: int, rows: int) -> None:
        self.screen.resize(rows, columns)
        self.screen.reset()
        termios.tcsetwinsize(self._ours, (rows, columns))

    def wait(self, until: Callable[[list[str]], bool]) -> list[str]:
        """What is on it as soon as this is true of it."""
        deadline = time.monotonic() + HANG
        while not until(list(self.screen.display)):
            assert select.select([self._ours], [], [], max(0.0, deadline - time.monotonic()))[0], self.screen.display
            self.raw += (piece := os.read(self._ours, 1 << 16))
            self._stream.feed(piece)
        return [line.rstrip() for line in self.screen.display]

    def end(self) -> int:
        """The exit code, once it has ended, and the terminal is as it was."""
        pidfd = os.pidfd_open(self.process.pid)
        while ready := select.select([self._ours, pidfd], [], [], HANG)[0]:
            if self._ours in ready:  # first, and until all is there: who draws waits for room
                self.raw += os.read(self._ours, 1 << 16)
            else:
                break
        os.close(pidfd)
        code = self.process.wait(0)
        assert termios.tcgetattr(self.fd) == self.before
        assert self.raw.count(_ENTER.encode()) == self.raw.count(_LEAVE.encode()) == 1
        return code

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._ours)
        os.close(self.fd)


@pytest.fixture
def job() -> Iterator[Job]:
    window, it = JobWindow(), Job()
    with job_folder():
        window.open(it)
        yield it
        window.close()


@contextlib.contextmanager
def terminal(columns: int = 80, rows: int = 24) -> Iterator[Terminal]:
    it = Terminal(columns, rows)
    try:
        it.wait(lambda lines: lines[0].startswith("train.py  pid 4711  64 nodes"))
        yield it
    finally:
        it.close()


def test_keys_and_a_resize(job: Job) -> None:
    with terminal() as it:
        assert it.wait(lambda lines: any(line.startswith("[node 1] epoch 3") for line in lines))[-1].startswith(
            "q quit"
        )
        it.type("n")
        it.wait(lambda lines: lines[-1].startswith("node 0  q quit"))
        assert any(it.screen.buffer[y][0].reverse for y in range(24))
        it.type("s")
        it.wait(lambda lines: lines[-1].startswith("node 0  by behind"))
        it.type("p")
        shown = it.wait(lambda lines: "thread 0x1 runs a function" in lines[2])
        assert shown[1] == "node 0 on a: running f()"
        it.type("p")
        it.wait(lambda lines: lines[1].startswith("NODE"))
        it.type("l")
        it.wait(lambda lines: not lines[1].startswith("NODE"))
        it.type("l")
        it.resize(200, 50)
        shown = it.wait(lambda lines: lines[0].rstrip().endswith("k kill") and lines[49].startswith("node 0"))
        assert len([line for line in shown if "running aten::mm train.py:33" in line]) > 30
        it.type("k")
        it.wait(lambda lines: lines[49].startswith("kill node 0? y n"))
        it.type("x")
        it.wait(lambda lines: lines[49].startswith("node 0"))
        it.type("ky")
        it.wait(lambda lines: any(request.what == "kill" for request in job.asked))
        it.type("q")
        assert it.end() == 0
    assert [request.nodes for request in job.asked if request.what == "kill"] == [(0,)]


@pytest.mark.parametrize("how", ["ctrl-c", "term", "job"])
def test_the_terminal_is_as_before_however_it_ends(job: Job, how: str, request: pytest.FixtureRequest) -> None:
    with terminal() as it:
        match how:
            case "ctrl-c":
                it.type("\x03")
            case "term":
                it.process.send_signal(signal.SIGTERM)
            case _:
                (found,) = job_sockets.find_jobs()
                os.unlink(found.path)
        assert it.end() == {"ctrl-c": 130, "term": 143, "job": 0}[how]
        if how == "job":
            assert b"has ended" in it.raw


def test_without_a_terminal(job: Job) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "dtrun", "top", str(os.getpid())], stdin=subprocess.DEVNULL, capture_output=True,
        text=True, timeout=HANG, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.stderr == "dtrun: error: top needs a terminal; `dtrun status` prints once\n"
    assert done.returncode == 2
