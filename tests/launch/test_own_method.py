"""A package outside brings a launch method, by an entry point; its command starts nodes for scripts and for dtrun."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from checkout import search_path
from limits import HANG

#: The package: hosts are pods, which a program leads to, here a shell of this machine's.
PODS = """
from disttensor.runtime.launch import LaunchMethod
from disttensor.runtime.launch.starters.command import CommandStarter

class PodStarter(CommandStarter):
    @classmethod
    def reach(cls, spec, host, line):
        return [spec.options.get("program", "/bin/sh"), "-c", f"POD={host}; export POD; {line}"]

    @classmethod
    def addresses(cls, spec):
        return {host.name: "127.0.0.1" for host in spec.hosts}

METHOD = LaunchMethod("pods", starter=PodStarter, options=("program",))
"""

PROGRAM = """
import os, torch
import disttensor as dt

def pod():
    return os.environ.get("POD")

with dt.init_master_worker({arguments}):
    print(torch.arange(4.0, device="node:1").sum().item(), dt.run(pod, node=range(dt.session.node_count())))
"""

#: A launcher of one's own, which dtrun starts nothing for.
PLAIN = """
from disttensor.runtime.launch import LaunchMethod, get_launcher

class PlainLauncher(get_launcher("local")):
    @classmethod
    def of(cls, spec):
        print("plain:", sorted(spec.options))
        return cls()

METHOD = LaunchMethod("plain", launcher=PlainLauncher, hosts="here")
"""


@pytest.fixture
def package(tmp_path: Path) -> Callable[[str, str], dict[str, str]]:
    """Installs a module that has the entry point of a launch method, as pip would; gives the variables to find it."""

    def install(name: str, text: str) -> dict[str, str]:
        folder = tmp_path / "site"
        info = folder / f"{name}-1.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
        (info / "entry_points.txt").write_text(f"[disttensor.launchers]\n{name} = {name}:METHOD\n")
        (folder / f"{name}.py").write_text(text)
        return {"PYTHONPATH": search_path(folder), "OMP_NUM_THREADS": "1"}

    return install


def dtrun(*words: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "dtrun", *words],
        env={**os.environ, **environment}, cwd=folder, capture_output=True, text=True, timeout=HANG, check=False,
    )  # fmt: skip


def test_nodes_are_started_by_its_command(
    package: Callable[[str, str], dict[str, str]],
    script: Callable[..., subprocess.CompletedProcess[str]],
    tmp_path: Path,
) -> None:
    environment = package("pods", PODS)
    done = script(PROGRAM.format(arguments='launcher="pods", hosts="a,b"'), **environment)
    assert done.stdout == "6.0 ['a', 'b']\n", done.stderr
    (tmp_path / "job.py").write_text(PROGRAM.format(arguments=""))
    done = dtrun("--launcher", "pods", "--hosts", "a:2", "job.py", folder=tmp_path, **environment)
    assert (done.stdout, done.stderr, done.returncode) == ("6.0 ['a', 'a']\n", "", 0)


def test_its_hosts_are_checked(package: Callable[[str, str], dict[str, str]], tmp_path: Path) -> None:
    environment = package("pods", PODS)
    done = dtrun("--check", "--launcher", "pods", "--hosts", "a,b", folder=tmp_path, **environment)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert [line.split()[0] for line in done.stdout.splitlines()[1:]] == ["a", "b"]
    done = dtrun("--check", "--launcher", "nearby", "--hosts", "a", folder=tmp_path, **environment)
    assert "--launcher nearby has none" in done.stderr


def test_what_fails_is_named(package: Callable[[str, str], dict[str, str]], tmp_path: Path) -> None:
    environment = package("pods", PODS)
    (tmp_path / "job.py").write_text(PROGRAM.format(arguments=""))
    way = ("--launcher", "pods", "--hosts", "a:3")
    done = dtrun(*way, "--launcher-option", "program=/bin/false", "job.py", folder=tmp_path, **environment)
    assert "node 0 on a did not start: false ended (exit code 1) before an agent was there" in done.stderr
    assert done.returncode == 1
    done = dtrun(*way, "--launcher-option", "programs=x", "job.py", folder=tmp_path, **environment)
    assert "launcher='pods' has no option 'programs' (known: program); did you mean 'program'?" in done.stderr
    done = dtrun("--launcher", "pods", "job.py", folder=tmp_path, **environment)
    assert "--launcher pods needs --hosts a:4,b:4" in done.stderr
    done = dtrun("--launcher", "pod", "job.py", folder=tmp_path, **environment)
    assert "--launcher pod is unknown (known: join, local, mpi, pods, ray, slurm, ssh); did you" in done.stderr


def test_one_that_needs_no_root(package: Callable[[str, str], dict[str, str]], tmp_path: Path) -> None:
    environment = package("plain", PLAIN)
    (tmp_path / "job.py").write_text(PROGRAM.format(arguments=""))
    way = ("--launcher", "plain", "-n", "2", "--launcher-option", "x=1")
    done = dtrun(*way, "job.py", folder=tmp_path, **environment)
    assert (done.stdout, done.stderr, done.returncode) == ("plain: ['x']\n6.0 [None, None]\n", "", 0)
    done = dtrun(*way[:4], "--hosts", "a", "job.py", folder=tmp_path, **environment)
    assert "with --launcher plain the hosts are known from elsewhere" in done.stderr
