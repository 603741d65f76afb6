"""docs/PROCESS_GROUPS.md: its programs and commands print what stands below them."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from checkout import ROOT
from limits import HANG
from printed import as_shown

PAGE = (ROOT / "docs" / "PROCESS_GROUPS.md").read_text()
*FUNCTIONS, SCRIPT = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
PRINTED = re.findall(r"^prints\n\n((?:    .*\n)+)", PAGE, re.MULTILINE)
COMMANDS = re.findall(r"^    \$ (.*)\n((?:    (?!\$).*\n)+)", PAGE, re.MULTILINE)


def dtrun(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Types a line of the page."""
    (folder / "train.py").write_text(SCRIPT)
    (folder / "dtrun").write_text(f'#!/bin/sh\nexec {sys.executable} -m dtrun "$@"\n')
    (folder / "dtrun").chmod(0o700)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": f"{folder}:{os.environ['PATH']}"}
    return subprocess.run(
        command, shell=True, cwd=folder, env=environment, capture_output=True, text=True, timeout=HANG
    )


def shown(number: int) -> str:
    return re.sub("^    ", "", COMMANDS[number][1], flags=re.MULTILINE)


@pytest.mark.parametrize(("program", "printed"), list(zip(FUNCTIONS, PRINTED, strict=True)), ids=["list", "mesh"])
def test_a_function(script: Callable[..., subprocess.CompletedProcess[str]], program: str, printed: str) -> None:
    done = script(program)
    printed = re.sub("^    ", "", printed, flags=re.MULTILINE)
    assert as_shown(done.stdout, printed) == printed, done.stderr


def test_a_script(tmp_path: Path) -> None:
    done = dtrun(COMMANDS[0][0], tmp_path)
    assert (done.returncode, as_shown(done.stdout, shown(0))) == (0, shown(0)), done.stderr


def test_one_that_fails(tmp_path: Path) -> None:
    done = dtrun(COMMANDS[1][0], tmp_path)
    assert done.returncode == 3
    assert done.stderr.replace(f"on {socket.gethostname()} ", "on myhost ").endswith(shown(1))
