"""docs/LAUNCHING.md: its commands, typed as they stand there, print what stands below them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from checkout import ROOT
from limits import HANG
from ports import free_port

PAGE = (ROOT / "docs" / "LAUNCHING.md").read_text()
PROGRAM, PLAIN, CHECK, SESSION, PODS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
SHOWN = re.findall(r"^    \$ (.*)\n    (?!\$)(.+)\n", PAGE, re.MULTILINE)
LATER = re.findall(r"^    \$ (.*--connection-file.*)\n", PAGE, re.MULTILINE)


class Shell:
    """Runs commands of the page."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "hello.py").write_text(PROGRAM)
        (folder / "bin").mkdir()
        for name, module in (("python", ""), ("dtrun", "-m dtrun")):
            (folder / "bin" / name).write_text(f'#!/bin/sh\nexec {sys.executable} {module} "$@"\n')
            (folder / "bin" / name).chmod(0o700)
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("DISTTENSOR_")},
            "PYTHONPATH": str(ROOT),
            "PATH": f"{folder}/bin:{os.environ['PATH']}",
            "HOME": str(folder),
            "OMP_NUM_THREADS": "1",
        }

    def start(self, command: str) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        return subprocess.Popen(
            command, shell=True, cwd=self.folder, env=self.environment, stdout=pipe, stderr=pipe, text=True
        )

    def run(self, command: str) -> str:
        with self.start(command) as process:
            out, err = process.communicate(timeout=HANG)
        assert process.returncode == 0, err
        return out


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    return Shell(tmp_path)


@pytest.mark.parametrize(("command", "shown"), SHOWN[:2], ids=[command for command, _ in SHOWN[:2]])
def test_on_a_laptop(shell: Shell, command: str, shown: str) -> None:
    assert shell.run(command) == f"{shown}\n"


@pytest.mark.slow  # as test_bootstrap_page.py::test_dtrun_on_every_host
def test_on_every_machine(shell: Shell) -> None:
    ((command, shown),) = SHOWN[2:]
    port = str(free_port())
    command = command.replace("--master-addr a", "--master-addr localhost").replace("29500", port)
    with shell.start(command.replace("hello.py", "--node-rank 1 hello.py")) as other:
        assert shell.run(command) == f"{shown}\n"
        assert other.communicate(timeout=HANG) == ("", "")
    assert (shell.folder / ".config/disttensor/secret").stat().st_mode & 0o777 == 0o600


@pytest.mark.slow  # as test_bootstrap_page.py::test_later
def test_machines_that_come_later(shell: Shell) -> None:
    first, later = LATER
    (shell.folder / "hello.py").write_text(PROGRAM.replace("x =", "dt.wait_for_nodes(2)\nx ="))
    with shell.start(first) as process:
        assert shell.run(later) == ""
        assert process.communicate(timeout=HANG)[0] == "12.0 from 2 nodes\n"


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The page's own launcher can be imported."""
    (tmp_path / "plain.py").write_text(PLAIN)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("plain", None)


def test_a_launcher_of_ones_own(own: None) -> None:
    exec(CHECK, {})


@pytest.mark.slow
def test_a_session_with_it(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "plain.py").write_text(PLAIN)
    (tmp_path / "session.py").write_text(SESSION)
    assert shell.run("python session.py") == "6.0\n"


def test_a_command_of_ones_own(shell: Shell, tmp_path: Path) -> None:
    """The page's package, with a kubectl that runs here what would run in a pod."""
    (tmp_path / "pods.py").write_text(PODS)
    info = tmp_path / "pods-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: pods\nVersion: 1\n")
    ((group, point),) = re.findall(r'\[project\.entry-points\."(.*)"\]\n(.*)\n', PAGE)
    (info / "entry_points.txt").write_text(f"[{group}]\n{point.replace(chr(34), '')}\n")
    kubectl = tmp_path / "bin" / "kubectl"
    kubectl.write_text('#!/bin/sh\ntest "$1 $2 $3 $4 $5 $6" = "exec -i -n x 127.0.0.1 --" && exec "$7" "$8" "$9"\n')
    kubectl.chmod(0o700)
    shell.environment["PYTHONPATH"] = f"{tmp_path}:{ROOT}"
    command = next(
        found for found in re.findall(r"^    \$ (dtrun --launcher pods .*)\n", PAGE, re.MULTILINE) if "--check" in found
    )
    table = shell.run(command.replace("pod-a,pod-b", "127.0.0.1") + " --launcher-option namespace=x")
    assert table.splitlines()[1].split()[-1] == "ok"


def test_all_pages_are_named() -> None:
    """From here one gets to the page of every way of launching."""
    linked = set(re.findall(r"\]\((\w+\.md)\)", PAGE))
    assert {name for name in linked if not (ROOT / "docs" / name).exists()} == set()
