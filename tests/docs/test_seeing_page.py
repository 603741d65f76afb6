"""docs/SEEING.md shows what its programs print, except figures, as these differ from run to run."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from checkout import ROOT
from job_folders import job_folder
from limits import HANG
from screen import Screen
from test_readme import python

PAGE = (ROOT / "docs" / "SEEING.md").read_text()
#: The program, and what it prints, which has empty lines.
SHOWN = re.compile(r"```python\n((?:(?!```).)*)```\s*prints\n\n((?:    [^\n]*\n|\n(?=    ))+)", re.DOTALL)
#: What each of the page's programs is about.
PROGRAMS = ("status", "profile", "memory", "check_finite", "whence", "prometheus", "tensorboard")
#: The host on which the page's output was printed.
HOST = "vm"
#: The folder in which its programs have run.
FOLDER = "/tmp/demo"


def without_figures(text: str) -> str:
    """A text in which each figure is one word, and the columns have no widths."""
    text = re.sub(r"(\w\(\)) [\d.]+ s", r"\1", text)  # said once it has taken a second
    text = re.sub(r"\d[\d,]*(\.\d+)?( (bytes|[KMG]iB)|%)?|(?<= )-(?= )", "N", text)  # "-" is not known yet
    return "\n".join(" ".join(line.split()) for line in text.splitlines())


@pytest.mark.parametrize(("program", "shown"), SHOWN.findall(PAGE), ids=PROGRAMS)
def test_a_program_prints_what_the_page_shows(program: str, shown: str, tmp_path: Path) -> None:
    if "import EventAccumulator" in program:
        pytest.importorskip("tensorboard", reason="tensorboard is not installed here")
    (tmp_path / "train.py").write_text(program)
    printed = python("train.py", cwd=tmp_path).replace(str(tmp_path), FOLDER)
    printed = re.sub(rf"\b{re.escape(socket.gethostname())}\b", HOST, printed)
    assert without_figures(printed) == without_figures(shown)


# ---- a program that hangs --------------------------------------------------------------------------------------------

#: The section, its program, and what it shows: the line of the wait, a stack, the warning.
SECTION = PAGE.partition("\n## It hangs\n")[2].partition("\n## ")[0]
((HANGING, SEEN),) = re.findall(r"```python\n(.*?)```(.*)", SECTION, re.DOTALL)
LINE, STACK, STALL = (block.strip("\n") for block in re.findall(r"(?m)(?:^    .*\n|^\n(?=    ))+", SEEN))
#: Runs it as `python train.py`, with less patience.
HURRIED = """\
import os, runpy, sys
from disttensor.seeing import progress, stall
progress.SHOWN, progress.ALL, progress.AGAIN, stall.STILL = 0.5, 0.5, 0.5, 1.5
sys.argv = ["train.py"]
runpy.run_path(os.path.abspath("train.py"), run_name="__main__")
"""


def without_times(text: str) -> str:
    """A text without times, which are said from a second on, the numbers of threads, and empty lines."""
    text = re.sub(r"(, for| since)? [\d.:]+ (s|min)\b", "", re.sub(r"thread 0x\w+", "thread", text))
    return re.sub(r"\n\n+", "\n", without_figures(text))


def test_a_program_that_hangs_is_seen(tmp_path: Path) -> None:
    """By the line of its wait, by `dtrun stack` from another terminal, and by a warning."""
    (tmp_path / "train.py").write_text(HANGING)
    environment = {name: value for name, value in os.environ.items() if name not in ("CI", "DISTTENSOR_PROGRESS")}
    environment |= {"TERM": "xterm", "PYTHONPATH": str(ROOT)}
    screen = Screen(130)
    with job_folder() as folder:
        environment["XDG_RUNTIME_DIR"] = str(folder)
        script = subprocess.Popen(
            [sys.executable, "-c", HURRIED], stdin=subprocess.DEVNULL, stdout=screen.fd, stderr=screen.fd, cwd=tmp_path,
            env=environment,
        )  # fmt: skip
        try:
            (line,) = [without_times(row) for row in LINE.splitlines()]
            await_rows(screen, line)
            stack = python("-m", "disttensor.run", "stack", str(script.pid), "-n", "0", cwd=tmp_path)
            stack = stack.replace(str(tmp_path), FOLDER).replace(f"on {socket.gethostname()}", f"on {HOST}")
            assert_in_order(STACK.splitlines()[1:], without_times(stack))
            await_rows(screen, *without_times(STALL).splitlines())
        finally:
            script.send_signal(signal.SIGINT)
            script.wait(HANG)
    screen.close()


def await_rows(screen: Screen, *rows: str) -> None:
    """Waits until a terminal has these rows, one below the other."""
    while "\n".join(rows) not in (there := without_times("\n".join(screen.look()))):
        assert screen.await_more(), there


def assert_in_order(rows: list[str], text: str) -> None:
    """Rows of a text, between which others may be where "..." stands."""
    for row in map(without_times, rows):
        if row not in ("", "..."):
            before, found, text = text.partition(row)
            assert found, (row, before)
