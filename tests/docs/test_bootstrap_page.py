"""The commands of docs/BOOTSTRAP.md, run as they stand there (with the path of the file made one's own)."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import warm
from checkout import ROOT
from limits import HANG

PAGE = (ROOT / "docs/BOOTSTRAP.md").read_text()
PROGRAM = re.search(r"```python\n(import torch.*?)```", PAGE, re.DOTALL)[1]
WAITING = re.search(r"```python\n(dt\.wait_for_nodes.*?)```", PAGE, re.DOTALL)[1]

Run = "subprocess.Popen[str]"


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    for child in psutil.Process().children(recursive=True):
        if child.pid not in warm.held()[0]:
            child.kill()


def section(title: str) -> list[str]:
    """The commands of a section."""
    text = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE)[1]
    return re.findall(r"^    ((?:dtrun|torchrun) .*)$", text, re.MULTILINE)


def start(home: Path, command: str, **environment: str) -> subprocess.Popen[str]:
    """Starts a command of the page."""
    words = shlex.split(command.replace("~", str(home)))
    modules = {"dtrun": ["-m", "dtrun"], "torchrun": ["-m", "torch.distributed.run"]}
    words = [sys.executable, *modules.get(words[0], [words[0]]), *words[1:]]
    foreign = ("DISTTENSOR_", "MASTER_", "RANK", "WORLD_SIZE")
    env = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    env |= {"HOME": str(home), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment}
    pipe = subprocess.PIPE
    return subprocess.Popen(words, cwd=home, env=env, stdout=pipe, stderr=pipe, text=True)


def printed(*processes: subprocess.Popen[str]) -> list[str]:
    """What all together have printed; they have ended well."""
    results = [process.communicate(timeout=HANG) for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes), results
    return [line for out, _ in results for line in out.splitlines()]


@pytest.mark.row("M1", "M23", "G2", "G3", "G4")
def test_one_script(home: Path) -> None:
    """Of which the nodes run nothing after the call. Ranks 2 and 0 are told by torch's variables where they meet."""
    script = PROGRAM.replace("RANK", "int(__import__('sys').argv[1])")
    told = re.sub(r"init_method=.*\)", 'init_method="env://")', PROGRAM)
    (home / "script.py").write_text(f"{script}\nprint('the end')\n")
    (home / "told.py").write_text(f"{told}\nprint('the end')\n")
    variables = {"MASTER_ADDR": "localhost", "MASTER_PORT": "29531", "WORLD_SIZE": "3"}
    ranks = [start(home, "script.py 1"), *(start(home, "told.py", RANK=rank, **variables) for rank in "20")]
    assert printed(*ranks) == ["the sum is 12.0", "the end"]


@pytest.mark.row("G3")
@pytest.mark.slow
def test_torchrun(home: Path) -> None:
    (home / "script.py").write_text(re.sub(r"init_method=.*\)", 'init_method="env://")', PROGRAM))
    [command] = section("torchrun")
    assert printed(start(home, command)) == ["the sum is 12.0"]


@pytest.mark.row("M23", "G5")
def test_workers_by_hand(home: Path) -> None:
    (home / "script.py").write_text(re.sub(r"init_method=.*\)", f'init_method="file://{home}/job", nodes=3)', PROGRAM))
    workers = [start(home, command) for command in section("Workers by hand")]
    assert len(workers) == 2
    assert printed(start(home, "script.py"), *workers) == ["the sum is 12.0"]


PLAIN = re.sub(r"init_master_worker\(.*\)", "init_master_worker()", PROGRAM)


def test_dtrun_on_every_host(home: Path) -> None:
    (home / "script.py").write_text(PLAIN.replace("dt.shutdown", "print(dt.session.node_count()); dt.shutdown"))
    first, second = (start(home, command) for command in section("dtrun on every host"))
    assert printed(first, second) == ["the sum is 12.0", "4"]


def test_later(home: Path) -> None:
    (home / "script.py").write_text(
        PLAIN.replace("dt.shutdown", f"{WAITING}print(dt.session.node_count())\ndt.shutdown")
    )
    [command] = section("Later, and fewer")
    job = start(home, command)
    worker = re.search(r"`(dtrun worker -n 2 [^`]*)`", PAGE)[1]
    assert printed(job, start(home, worker)) == ["the sum is 12.0", "4"]
