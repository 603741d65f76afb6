"""Who dies when, in the tree of a root: each level is killed, and what is below it ends. Nodes are stubs."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from checkout import search_path
from processes import alive_after
from stub_workers import LIGHT
from test_launch import SECRET, collect, told
from test_root import Tree, asked, tree

from disttensor.runtime.errors import StartError
from disttensor.runtime.launch import Exited
from disttensor.runtime.launch.planned import PlannedLauncher

__all__ = ["tree"]


class Levels:
    """The processes of a tree of two hosts with two nodes each."""

    def __init__(self, launcher: PlannedLauncher) -> None:
        launcher.start(asked("serve", "stubborn", "serve", "stubborn"))
        self.nodes = {e.rank: e.pid for e in collect(launcher, 4)}
        self.root = launcher._server_pid
        servers = [psutil.Process(self.nodes[rank]).ppid() for rank in (0, 2)]
        self.servers = dict(zip("ab", servers, strict=True))
        self.agents = {host: psutil.Process(pid).ppid() for host, pid in self.servers.items()}
        assert [psutil.Process(pid).ppid() for pid in self.agents.values()] == [self.root] * 2

    def below(self, host: str) -> list[int]:
        nodes = [self.nodes[0], self.nodes[1]] if host == "a" else [self.nodes[2], self.nodes[3]]
        return [self.agents[host], self.servers[host], *nodes]

    @property
    def all(self) -> list[int]:
        return [self.root, *self.below("a"), *self.below("b")]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_root_killed(tree: Tree, number: int) -> None:
    launcher = tree(2, 2)
    levels = Levels(launcher)
    os.kill(levels.root, number)
    with pytest.raises(StartError, match=r"the root of the nodes' hosts .* has ended, and its nodes with it"):
        collect(launcher, 5)
    assert alive_after(5, levels.all) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_agent_killed(tree: Tree, number: int) -> None:
    launcher = tree(2, 2)
    levels = Levels(launcher)
    os.kill(levels.agents["b"], number)
    ended = {e.rank: e for e in collect(launcher, 2) if isinstance(e, Exited)}
    assert {(e.rank, e.pid, e.host) for e in ended.values()} == {(k, levels.nodes[k], "b") for k in (2, 3)}
    assert alive_after(5, levels.below("b")) == []
    assert alive_after(0, levels.below("a")) != []
    launcher.stop(0)
    assert alive_after(0, levels.all) == []


def test_fork_server_killed(tree: Tree) -> None:
    launcher = tree(2, 2)
    levels = Levels(launcher)
    os.kill(levels.servers["b"], signal.SIGKILL)
    ended = [e for e in collect(launcher, 2) if isinstance(e, Exited)]
    assert {e.host for e in ended} == {"b"}
    assert {e.cause for e in ended} == {
        "no node can be started there: the fork server has ended (killed by SIGKILL), and its nodes with it"
    }
    assert alive_after(5, levels.below("b")) == []


def test_stopped_agent(tree: Tree) -> None:
    """One that does not answer does not keep the others, or the root, from ending."""
    launcher = tree(2, 2)
    levels = Levels(launcher)
    os.kill(levels.agents["b"], signal.SIGSTOP)
    launcher.stop(0)
    assert alive_after(10, levels.all) == []


def test_cut_off_agent(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its root is silent, and no wire has ended."""
    launcher = tree(2, 2, lease="4")  # more than a root that is well takes between two beats
    levels = Levels(launcher)
    os.kill(levels.root, signal.SIGSTOP)
    assert alive_after(20, levels.below("a") + levels.below("b")) == []
    os.kill(levels.root, signal.SIGCONT)
    causes = {e.cause for e in collect(launcher, 4) if isinstance(e, Exited)}
    assert len(causes) >= 1


@pytest.mark.cold
def test_no_secret_in_sight(tree: Tree) -> None:
    for pid in Levels(tree(2, 2)).all:
        for name in ("cmdline", "environ"):
            assert SECRET.encode() not in Path(f"/proc/{pid}/{name}").read_bytes()


def test_cycles_leak_nothing(tree: Tree) -> None:
    gc.collect()  # what earlier tests have left to the collector has descriptors, too
    before = os.listdir("/proc/self/fd"), psutil.Process().children()
    for _ in range(4):
        launcher = tree(1, 1)
        launcher.start(asked("serve", "serve"))
        collect(launcher, 2)
        launcher.stop(0)
    tree(1).stop(0)  # while it still starts
    assert (os.listdir("/proc/self/fd"), psutil.Process().children()) == before


MASTER = (
    LIGHT
    + """
import os, select, sys, time
from disttensor.runtime.bundle import Bundle
from disttensor.runtime.launch.plan import Host, Plan
from disttensor.runtime.launch.planned import PlannedLauncher
jobs = ["serve", "stubborn", "serve"]
plan = Plan("nearby", hosts=(Host("a", 2), Host("b", 1)), options={"preload": "stub_workers"})
launcher = PlannedLauncher(plan, "stub_workers:act")
launcher.start([Bundle(job=j, rank=k, address="none", nodes=3) for k, j in enumerate(jobs)])
pids = []
while len(pids) < 3:
    select.select([launcher], [], [])
    pids += [e.pid for e in launcher.events()]
os.write(1, ("pids " + " ".join(map(str, [launcher._server_pid, *pids])) + "\\n").encode())
sys.stdin.read()
"""
)


@contextlib.contextmanager
def master(**options: Any) -> Iterator[subprocess.Popen[str]]:
    search = search_path()
    command = [sys.executable, "-c", MASTER]
    environment = {**os.environ, "PYTHONPATH": search}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment, **options) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGHUP])
def test_master_killed(number: int) -> None:
    with master() as process:
        found = told(process, "children", "pids")
        agents = [p.pid for p in psutil.Process(found["pids"][0]).children(recursive=True)]
        process.send_signal(number)
        assert alive_after(5, found["pids"] + agents + found["children"]) == []
