"""`dtrun ps`, `status`, `stack`, `logs`, `kill` on hosts where only nodes run, whose script is on another one.

Agents, fork servers and the root are real. Nodes are stubs, but in one test.
"""

from __future__ import annotations

import json
import os
import re
import select
import signal
import socket
import stat
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path

import elsewhere
import pytest
import seen_workers
import torch
from job_folders import job_folder
from limits import HANG

import disttensor as dt
from disttensor.cli import jobs
from disttensor.cli.command import main
from disttensor.runtime.host import job_sockets
from disttensor.runtime.host.job_sockets import FoundJob, JobRequest, JobSocketError
from disttensor.runtime.host.launch_spec import Host, LaunchSpec
from disttensor.runtime.host.launcher import Exited, Sight, Started
from disttensor.runtime.launch.starters.root_launcher import RootLauncher
from disttensor.runtime.process.lifetime import process_stat
from disttensor.runtime.protocol.bundle import Bundle, ScriptPlace

Captured = pytest.CaptureFixture[str]

#: The script that the stubs are told of.
SCRIPT = ScriptPlace("train.py", "a", 4711)
#: What nodes 1 to 4 are at, on host b; node 0 is on the script's host.
AT = ("idle", "busy", "beside", "waiting")


class Tree:
    """A root with nodes on hosts."""

    def __init__(self, hosts: dict[str, int], script: ScriptPlace | None) -> None:
        spec = LaunchSpec(
            elsewhere.NAME,
            hosts=tuple(Host(name, slots) for name, slots in hosts.items()),
            options={"preload": seen_workers.MODULE},
            starter=elsewhere.STARTER,
        )
        self.launcher = RootLauncher(spec, seen_workers.ENTRY)
        count = sum(hosts.values())
        self.launcher.start([
            Bundle(("idle", *AT)[rank % 5], rank, "none", nodes=count, script=script) for rank in range(count)
        ])  # fmt: skip
        self.pids = {it.rank: it.pid for it in self.until(Started, count)}

    def until(self, kind: type, count: int = 1) -> list[Started | Exited | Sight]:
        """Waits for so many events of a kind."""
        found = list[Started | Exited | Sight]()
        while len(found) < count:
            assert select.select([self.launcher], [], [], HANG)[0]
            events = self.launcher.events()
            assert kind is Exited or not any(isinstance(it, Exited) for it in events), events
            found += [it for it in events if isinstance(it, kind)]
        return found


@pytest.fixture(scope="module")
def runtime() -> Iterator[Path]:
    with job_folder() as folder:
        yield folder


@pytest.fixture(scope="module")
def tree(runtime: Path) -> Iterator[Tree]:
    it = Tree({elsewhere.HERE: 1, "b": 4}, ScriptPlace("train.py", socket.gethostname(), 4711))
    yield it
    it.launcher.stop(0)
    assert not (runtime / "b" / "disttensor").exists()


@pytest.fixture
def on_b(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> FoundJob:
    """Has the commands of a test look on host b."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", elsewhere.runtime_of("b"))
    (found,) = job_sockets.find_jobs()
    return found


def dtrun(capsys: Captured, *words: str, code: int = 0) -> str:
    """What a command prints, to stderr where it can't be done."""
    capsys.readouterr()
    assert main(words) == code
    found = capsys.readouterr()
    return found.err if code == 2 else found.out


def shown_when(look: Callable[[], str], pattern: str) -> str:
    """What is shown, once that is there: a node may have begun a moment ago."""
    for _ in range(1000):
        if re.search(pattern, shown := look()):
            return shown
    raise AssertionError(shown)


def there(command: str = "status", more: str = "has more") -> str:
    return f"its script, train.py, runs on {socket.gethostname()}: `dtrun {command} 4711` there {more}"


@pytest.mark.usefixtures("tree")
def test_the_scripts_host_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """The window of the script answers there."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", elsewhere.runtime_of(elsewhere.HERE))
    assert job_sockets.find_jobs() == []


def test_ps_says_where_the_script_is(on_b: FoundJob, capsys: Captured) -> None:
    assert not on_b.has_script
    assert on_b.pid == job_sockets.pid_of(on_b) != os.getpid()
    assert stat.S_IMODE(os.stat(on_b.path).st_mode) == 0o600
    assert stat.S_IMODE(os.stat(os.path.dirname(on_b.path)).st_mode) == 0o700
    _, row = dtrun(capsys, "ps").splitlines()
    state = f"its script runs on {socket.gethostname()}, pid 4711"
    assert re.fullmatch(rf"{on_b.pid} +train\.py +4 +b +00:0\d:\d\d  {state}", row)


def test_status_has_what_is_seen_from_outside(on_b: FoundJob, tree: Tree, capsys: Captured) -> None:
    shown = shown_when(lambda: dtrun(capsys, "status"), r"(?m)^4 +waiting for")
    assert shown.splitlines()[0] == there()
    figures = r" +\d+% +[\d.]+ MiB +[\d.]+ MiB"
    took = r"(?: [\d.]+ s)?"
    works, waits = f"running a function{took}", f"waiting for node 0 in a collective{took}"
    for rank, words in enumerate(("idle", works, works, waits), 1):
        assert re.search(rf"(?m)^{rank} +{words}{figures}$", shown), shown
    assert "last lines of output\nnode  line\n1     unfinished\n" in shown
    found = json.loads(dtrun(capsys, "status", "--json"))
    assert [(it["rank"], it["pid"]) for it in found["nodes"]] == [(rank, tree.pids[rank]) for rank in range(1, 5)]
    with dt.init_master_worker(nodes=1, launcher="inproc"):
        whole = dt.seeing.status(timeout=0).to_dict()
    assert set(found) == set(whole)  # a reader finds the same names
    assert set(found["script"]) == set(whole["script"])
    assert {name for it in found["nodes"] for name in it} == {each.name for each in fields(dt.seeing.NodeStatus)}


def test_a_stopped_node_is_named(on_b: FoundJob, tree: Tree, capsys: Captured) -> None:
    os.kill(tree.pids[1], signal.SIGSTOP)
    try:
        shown = shown_when(lambda: dtrun(capsys, "status"), r"(?m)^1 +stopped")
        stack = dtrun(capsys, "stack", "-n", "1")
    finally:
        os.kill(tree.pids[1], signal.SIGCONT)
    assert f"stopped: `kill -CONT {tree.pids[1]}` has it go on" in shown
    assert stack == f"node 1 on b, pid {tree.pids[1]}: stopped: `kill -CONT {tree.pids[1]}` has it go on\n"


@pytest.mark.parametrize("rank", [2, 3])
def test_stacks_name_the_thread_that_works_first(on_b: FoundJob, tree: Tree, capsys: Captured, rank: int) -> None:
    def look() -> str:
        return dtrun(capsys, "stack", "-n", f"{rank}")

    title, first, *others = shown_when(look, "in sleeper").split("\n\n")
    assert re.fullmatch(rf"node {rank} on b, pid {tree.pids[rank]}: running a function(?: [\d.]+ s)?", title)
    head, *frames = first.splitlines()
    assert re.fullmatch(r"thread 0x\w+ runs a function, for [\d.]+ s:", head)
    assert re.fullmatch(rf'  File "{seen_workers.__file__}", line \d+ in sleeper', frames[0])
    assert any(" works on its streams:" in it for it in others) == (rank == 3)
    assert not any("hunter2" in it or "fork_child" in it for it in (first, *others))


def test_the_root_gets_the_sights_that_it_has_asked_for_and_no_others(
    on_b: FoundJob, tree: Tree, capsys: Captured
) -> None:
    """It would take one more as a lie, and lose the host."""
    launcher = tree.launcher
    for rank, stacks in ((1, False), (2, True), (2, False)):
        dtrun(capsys, "status")
        (launcher.look if stacks else launcher.glance)(rank)
        dtrun(capsys, "stack", "-n", "2")
        (sight,) = tree.until(Sight)
        assert (sight.rank, sight.stacks, bool(sight.stack)) == (rank, stacks, stacks)  # type: ignore[union-attr]
    dtrun(capsys, "status")
    launcher.flush(HANG)  # all that was sent before has come
    assert launcher.events() == []


def test_logs_are_the_last_lines(on_b: FoundJob, capsys: Captured) -> None:
    shown = dtrun(capsys, "logs")
    assert sorted(shown.splitlines()) == [f"[node {rank}] begins to be {at}" for rank, at in enumerate(AT, 1)]
    assert dtrun(capsys, "logs", "-n", "2") == "[node 2] begins to be busy\n"


def test_what_only_the_script_can_do_is_refused(on_b: FoundJob, capsys: Captured, tmp_path: Path) -> None:
    def refused(*words: str) -> str:
        return dtrun(capsys, *words, code=2).removeprefix(f"dtrun: error: job {on_b.pid}: ").rstrip()

    assert refused("kill") == there("kill", "ends the job, and here -n a node")
    assert refused("trace", "-o", str(tmp_path / "t.json")) == there("trace", "records the job")
    for command in ("stack", "kill", "logs"):
        assert refused(command, "-n", "0") == f"node 0 is not on this host, which has 1, 2, 3, 4; {there()}"


def test_a_stopped_agent_is_named(on_b: FoundJob, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "PS", 0.05)
    os.kill(on_b.pid, signal.SIGSTOP)
    try:
        shown = dtrun(capsys, "ps")
        with pytest.raises(JobSocketError, match="the agent of this host is stopped"):
            job_sockets.ask(on_b, JobRequest("status"), 0.05)
    finally:
        os.kill(on_b.pid, signal.SIGCONT)
    assert f"stopped: `kill -CONT {on_b.pid}` has it go on" in shown


def test_a_node_is_killed_there(on_b: FoundJob, tree: Tree, capsys: Captured) -> None:
    assert dtrun(capsys, "kill", "-n", "2") == f"job {on_b.pid}: killed node 2\n"
    (ended,) = tree.until(Exited)
    assert isinstance(ended, Exited)
    assert (ended.rank, ended.host, ended.cause) == (2, "b", "killed by SIGKILL")
    assert re.search(r"(?m)^2 +lost: killed by SIGKILL +", dtrun(capsys, "status", code=jobs.EX_LOST))
    assert "  4, 1 lost  " in dtrun(capsys, "ps")
    assert "node 2 has ended already" in dtrun(capsys, "kill", "-n", "2", code=2)
    assert dtrun(capsys, "stack", "-n", "2").endswith("lost: killed by SIGKILL\n")


def test_the_socket_of_a_killed_agent_goes_with_its_nodes(on_b: FoundJob, tree: Tree) -> None:
    """The last test that has the tree."""
    ended = os.pidfd_open(int(process_stat(tree.pids[1])[1]))  # of the fork server
    os.kill(on_b.pid, signal.SIGKILL)
    assert select.select([ended], [], [], HANG)[0]
    os.close(ended)
    assert not os.path.exists(os.path.dirname(on_b.path))


@pytest.mark.parametrize("why", ["the script's variable", "the host's variable", "a folder of others"])
def test_a_host_may_have_none(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with job_folder() as folder:
        match why:
            case "the host's variable":
                monkeypatch.setenv(job_sockets.NO_SOCKET, "1")
            case "a folder of others":
                (folder / "b" / "disttensor").mkdir(parents=True)
                (folder / "b" / "disttensor").chmod(0o777)
        tree = Tree({"b": 1}, None if why == "the script's variable" else SCRIPT)
        try:
            tree.launcher.glance(0)
            tree.until(Sight)
            assert [*folder.glob("**/*.sock")] == []
        finally:
            tree.launcher.stop(0)


def use_until_lost() -> None:
    while True:
        dt.synchronize(0)


def test_a_job_of_real_nodes(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    with job_folder(), monkeypatch.context() as patch:
        elsewhere.register()
        with dt.init_master_worker("tcp", launcher=elsewhere.NAME, hosts="b:1", threads=1):
            assert torch.ones(3, device="node:0").sum().item() == 3
            name = dt.seeing.status(timeout=0).script.name
            patch.setenv("XDG_RUNTIME_DIR", elsewhere.runtime_of("b"))
            where = f"its script, {name}, runs on {socket.gethostname()}: `dtrun status {os.getpid()}` there has more\n"
            assert dtrun(capsys, "status").startswith(where)
            assert dtrun(capsys, "kill", "-n", "0").endswith(": killed node 0\n")
            with pytest.raises(dt.errors.NodeLost, match="killed by SIGKILL"):
                use_until_lost()  # its agent has the order, and the node may answer before it comes to that
        assert job_sockets.find_jobs() == []
