"""Nodes' output as users see it and choose it."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from checkout import ROOT
from limits import HANG
from output_kit import unfolded
from screen import Screen

import disttensor as dt


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"tee": "3"}, "tee and redirects need a log_dir"),
        ({"log_dir": "x", "tee": "4"}, "'4' names no streams: 0 is none, 1 stdout, 2 stderr, 3 both"),
        ({"log_dir": "x", "launcher": "inproc"}, "log_dir needs nodes that are processes"),
    ],
)
def test_mistakes(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        dt.init_master_worker(**arguments)
    assert not Path("x").exists()


SCRIPT = """
import os, disttensor as dt
os.umask(0o022)
def say(rank=None):
    print("hello" if rank is None else f"I am {rank}")
with dt.init_master_worker(nodes=3, threads=1, log_dir="logs"):
    dt.run(say, node=range(3))
    dt.run(say, dt.tasks.Each([0, 1, 2]), node=range(3))
"""


def test_a_session(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], cwd=tmp_path, capture_output=True, text=True, timeout=HANG)
    assert done.returncode == 0, done.stderr
    # as the nodes said it: under load they may be too far apart for one line
    lines = [line for rank in range(3) for line in (f"[node {rank}] I am {rank}", f"[node {rank}] hello")]
    assert sorted(unfolded(done.stdout.splitlines())) == lines
    assert (tmp_path / "logs/2/stdout.log").read_text() == "hello\nI am 2\n"
    modes = {path.stat().st_mode & 0o777 for path in (tmp_path / "logs").rglob("*.log")}
    assert (modes, (tmp_path / "logs").stat().st_mode & 0o777) == ({0o600}, 0o700)


ON_A_TERMINAL = """
import disttensor as dt
from disttensor.session import current as state
dt.init_master_worker(nodes=2, threads=1)
for i in range(3):
    print(f"\\r{i * 50:3}%|" + "#" * i, end="", flush=True)
    dt.run(print, "at", i, node=1)
    state.session().launcher.flush(10)
print("\\r100%|##|")
"""


def test_a_bar_of_the_script_is_not_torn() -> None:
    screen = Screen()
    with contextlib.closing(screen):
        command = [sys.executable, "-c", ON_A_TERMINAL]
        environment = {k: v for k, v in os.environ.items() if k not in ("CI", "JPY_PARENT_PID")} | {"TERM": "xterm"}
        subprocess.run(command, stdout=screen.fd, stderr=screen.fd, env=environment, timeout=HANG, check=True)
        assert screen.look() == ["[node 1] at 0", "[node 1] at 1", "[node 1] at 2", "100%|##|"]


PAGE = (ROOT / "docs/OUTPUT.md").read_text()


@pytest.mark.slow
def test_the_page(tmp_path: Path) -> None:
    """Its commands print what stands below them."""
    [program] = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "hello.py").write_text(program)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    steps = re.findall(r"    \$ (.*)\n((?:    (?!\$).*\n)*)", PAGE)
    assert len(steps) == 5
    for command, expected in steps:
        done = subprocess.run(
            command,
            shell=True,
            cwd=tmp_path,
            env={**os.environ, "PATH": path},
            capture_output=True,
            text=True,
            timeout=HANG,
        )
        assert done.returncode == 0, done.stderr
        assert sorted(unfolded(done.stdout.splitlines())) == sorted(unfolded(textwrap.dedent(expected).splitlines()))
