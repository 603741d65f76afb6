"""Who dies when, in the tree of a root: each level is killed, and what is below it ends. Nodes are stubs."""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from typing import Any

import psutil
import pytest
from checkout import search_path
from limits import HANG
from processes import alive_after
from test_launch import bundles, collect
from test_root import Tree, asked, tree
from variants import variants

from disttensor.runtime.host.silence import Silence
from disttensor.runtime.launch import Exited
from disttensor.runtime.launch.starters.root_launcher import RootLauncher
from disttensor.runtime.launch.tree.agent import EX_ROOT_GONE
from disttensor.runtime.launch.tree.control import AgentNews, Beat, Began, Look, Ready, Seen, Start
from disttensor.runtime.launch.tree.framed import MARK, FramedSocket
from disttensor.runtime.protocol.errors import StartError

pytestmark = pytest.mark.cold  # stubs import no torch, and some of this is about imports

__all__ = ["tree"]


class Levels:
    """The processes of a tree of two hosts with two nodes each."""

    def __init__(self, launcher: RootLauncher) -> None:
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


def test_root_terminated(tree: Tree) -> None:
    launcher = tree(2, 2)
    levels = Levels(launcher)
    os.kill(levels.root, signal.SIGTERM)
    with pytest.raises(StartError, match=r"the root of the nodes' hosts .* has ended, and its nodes with it"):
        collect(launcher, 5)
    assert alive_after(5, levels.all) == []


@pytest.mark.parametrize("number", variants([signal.SIGKILL, signal.SIGTERM]))
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


def test_an_agent_ends_with_its_wire() -> None:
    """Whoever holds the other end: on another host no parent's death ends it."""
    program = "import sys\nfrom disttensor.runtime.launch.tree import agent\nsys.exit(agent.main(['stub_workers']))"
    environment = {**os.environ, "PYTHONPATH": search_path()}
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as agent:
        assert agent.stdin is not None
        assert agent.stdout is not None
        assert agent.stdout.read(len(MARK)) == MARK
        agent.stdin.close()
        alive = alive_after(10, [agent.pid])
        agent.kill()
    assert alive == []
    assert agent.returncode == EX_ROOT_GONE


def test_stopped_agent(tree: Tree) -> None:
    """One that does not answer does not keep the others, or the root, from ending."""
    launcher = tree(2, 2)
    levels = Levels(launcher)
    os.kill(levels.agents["b"], signal.SIGSTOP)
    launcher.stop(0)
    assert alive_after(10, levels.all) == []


def become(pids: Iterable[int], stopped: bool) -> None:
    """Waits until all of these processes are stopped, or none is."""
    deadline = time.monotonic() + HANG
    while {psutil.Process(pid).status() == psutil.STATUS_STOPPED for pid in pids} != {stopped}:
        assert time.monotonic() < deadline


@pytest.mark.fault(23)
def test_cut_off_agent(tree: Tree) -> None:
    """Its root is silent, and no wire has ended."""
    launcher = tree(2, 2, silence=Silence(0.5, 1, 2))
    levels = Levels(launcher)
    os.kill(levels.root, signal.SIGSTOP)
    assert alive_after(20, levels.below("a") + levels.below("b")) == []
    os.kill(levels.root, signal.SIGCONT)
    causes = {e.cause for e in collect(launcher, 4) if isinstance(e, Exited)}
    assert len(causes) >= 1


@pytest.mark.fault(6, 23)
def test_nodes_of_a_host_that_hears_nothing_are_stopped_until_it_does(tree: Tree) -> None:
    """The master may take them for lost at any moment: whatever arrives then must not be run."""
    launcher = tree(2, 2, silence=Silence(0.5, 500, 1000))
    levels = Levels(launcher)
    nodes = levels.nodes.values()
    os.kill(levels.root, signal.SIGSTOP)
    become(nodes, stopped=True)
    for pid in nodes:
        os.kill(pid, signal.SIGCONT)  # somebody else, who does not know
    become(nodes, stopped=True)
    os.kill(levels.root, signal.SIGCONT)
    become(nodes, stopped=False)
    assert select.select([launcher], [], [], 0.5)[0] == []  # nobody is lost
    os.kill(levels.root, signal.SIGSTOP)
    become(nodes, stopped=True)
    os.kill(levels.root, signal.SIGCONT)
    launcher.stop(0)
    assert alive_after(0, levels.all) == []


@pytest.mark.fault(23)
def test_nodes_do_not_go_on_by_what_was_on_its_way_for_long() -> None:
    """When a link heals, all arrives that was sent before the host was given up: beats, and commands behind them."""
    program = "import sys\nfrom disttensor.runtime.launch.tree import agent\nsys.exit(agent.main(['stub_workers']))"
    command = [sys.executable, "-c", program]
    silence, pipe = Silence(0.3, 2, 1000), subprocess.PIPE
    environment = {**os.environ, "PYTHONPATH": search_path()}
    with (
        subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, stderr=pipe) as agent,
        contextlib.ExitStack() as stack,
    ):
        stack.callback(agent.kill)
        assert agent.stdin is not None
        assert agent.stdout is not None
        assert os.read(agent.stdout.fileno(), len(MARK)) == MARK
        wire = FramedSocket(AgentNews, os.dup(agent.stdout.fileno()), os.dup(agent.stdin.fileno()))
        stack.callback(wire.close)

        heard: list[AgentNews] = []

        def hear(kind: type[Any]) -> Any:
            while not any(isinstance(news, kind) for news in heard):
                assert select.select([wire], [], [], HANG)[0]
                heard.extend(wire.hear())
                assert not wire.ended
            return heard.pop(next(i for i, news in enumerate(heard) if isinstance(news, kind)))

        def look(at: float) -> tuple[Beat, Seen]:
            """What an agent answers to a beat, and whether its node is paused then."""
            for order in (Beat(silence, at), Look(0)):
                wire.send_message(order)
            wire.push(HANG)
            return hear(Beat), hear(Seen)

        hear(Ready)
        wire.send_message(Start(bundles("serve")[0], "stub_workers:act"))
        wire.push(HANG)
        pid = hear(Began).pid
        beat, seen = look(0.0)
        assert not seen.paused
        become([pid], stopped=True)
        beat, seen = look(beat.at - 2 * silence.lost)
        assert seen.paused
        assert not look(beat.at)[1].paused


@pytest.mark.fault(23)
def test_a_silent_host_is_lost(tree: Tree) -> None:
    launcher = tree(2, 2, silence=Silence(0.5, 3, 1000))
    levels = Levels(launcher)
    os.kill(levels.agents["b"], signal.SIGSTOP)
    ended = [e for e in collect(launcher, 2) if isinstance(e, Exited)]
    assert {(e.rank, e.host) for e in ended} == {(2, "b"), (3, "b")}
    for event in ended:
        assert re.fullmatch(r"silent for \d s: b is stopped or gone, or the network to it is", event.cause)
    os.kill(levels.agents["b"], signal.SIGCONT)
    assert alive_after(10, levels.below("b")) == []  # it learns that it was given up
    assert alive_after(0, levels.below("a")) == levels.below("a")


@pytest.mark.fault(17)
def test_a_root_that_stood_still_gives_nobody_up(tree: Tree) -> None:
    """It has heard nothing for long, because it did not run."""
    launcher = tree(2, 2, silence=Silence(0.5, 2, 1000))
    levels = Levels(launcher)
    os.kill(levels.root, signal.SIGSTOP)
    become(levels.nodes.values(), stopped=True)
    assert select.select([launcher], [], [], 2.5)[0] == []  # longer than after which it would give them up
    os.kill(levels.root, signal.SIGCONT)
    become(levels.nodes.values(), stopped=False)
    assert select.select([launcher], [], [], 0.5)[0] == []
