"""Local nodes: started, watched and ended as promised. Real processes, with stubs for workers."""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from aftermath import within
from checkout import search_path
from limits import HANG
from output_kit import unfolded
from processes import alive_after

from disttensor.runtime.host.memory_limit import MemoryKills
from disttensor.runtime.host.output_options import Output
from disttensor.runtime.launch import (
    Exited,
    Launcher,
    Started,
    get_launcher,
    launcher_names,
    register_launcher,
    registry,
)
from disttensor.runtime.launch.output.lines import Tail
from disttensor.runtime.launch.starters.local import LocalLauncher
from disttensor.runtime.launch.starters.server_launcher import ServerLauncher
from disttensor.runtime.launch.tree.control import CREDIT, Began, Ended, News, NodeOutput, Order, OutputAck, Start
from disttensor.runtime.launch.tree.framed import FramedSocket
from disttensor.runtime.launch.tree.server import ForkedWorker
from disttensor.runtime.launch.tree.spawn import spawn_server
from disttensor.runtime.process.page import Page
from disttensor.runtime.protocol.bundle import Bundle
from disttensor.runtime.protocol.errors import ForkError, StartError

pytestmark = pytest.mark.cold  # stubs import no torch, and some of this is about imports

STUBS = ("stub_workers",)
Launch = Callable[..., tuple[LocalLauncher, list[int]]]


def bundles(*jobs: str) -> list[Bundle]:
    return [Bundle(job=job, rank=rank, address="none") for rank, job in enumerate(jobs)]


def collect(launcher: LocalLauncher, count: int, timeout: float = HANG) -> list[Started | Exited]:
    """Events until there are ``count``."""
    deadline, events = time.monotonic() + timeout, list[Started | Exited]()
    while len(events) < count:
        left = deadline - time.monotonic()
        assert left > 0, f"only {events}"
        if select.select([launcher], [], [], left)[0]:
            events += launcher.events()
    return events


@pytest.fixture
def launch() -> Iterator[Launch]:
    """Starts such workers; gives the launcher and their pids. (From the test itself: capfd isn't there before.)"""
    with contextlib.ExitStack() as stack:

        def start(*jobs: str) -> tuple[LocalLauncher, list[int]]:
            launcher = LocalLauncher("stub_workers:act", STUBS)
            stack.callback(launcher.stop, 0)
            launcher.start(bundles(*jobs))
            return launcher, [e.pid for e in collect(launcher, len(jobs))]

        yield start


def lines_of(capfd: pytest.CaptureFixture[str], count: int) -> tuple[list[str], list[str]]:
    """What was relayed to stdout and stderr, once ``count`` lines have come."""
    deadline = time.monotonic() + HANG
    # capfd's own reading loses what comes meanwhile, as it shares the file's position with the writers
    while sum(len(unfolded(os.pread(fd, 1 << 20, 0).decode().splitlines(True))) for fd in (1, 2)) < count:
        assert time.monotonic() < deadline, capfd.readouterr()
        time.sleep(0.005)
    out, err = capfd.readouterr()
    return sorted(unfolded(out.splitlines())), sorted(unfolded(err.splitlines()))


def test_a_rank_that_runs_and_one_that_is_free_again(launch: Launch) -> None:
    launcher, _ = launch("serve", "serve")
    launcher.kill(1)
    assert [type(e) for e in collect(launcher, 1)] == [Exited]
    launcher.kill(1)  # nobody is there: nothing happens
    launcher.start([bundles("serve", "serve")[1]])
    assert [type(e) for e in collect(launcher, 1)] == [Started]
    with pytest.raises(ValueError, match=r"node 0 runs already; nodes that run: \[0, 1\]"):
        launcher.start(bundles("serve"))


def test_orders_that_a_busy_server_takes_late_reach_it() -> None:
    """More than fits the socket, as those of a hundred nodes while the server imports torch: the rest follows."""
    here, there = socket.socketpair()
    launcher = ServerLauncher(here, None)
    with FramedSocket[Order](Order, there.detach()) as server:
        most = 1000
        launcher.start(bundles(*["serve" * 200] * most))  # the server does nothing meanwhile
        begun = 0
        while orders := server.hear():
            for order in orders:
                assert isinstance(order, Start)
                server.send_message(Began(order.bundle.rank, 1))
            launcher.events()
            begun += len(orders)
        assert begun == most
    launcher.stop(0)


def test_a_crash_has_a_traceback(launch: Launch) -> None:
    launcher, _ = launch()
    launcher.start(bundles("crash"))
    ended = collect(launcher, 2)[1]
    assert isinstance(ended, Exited)
    assert ended.cause == "killed by SIGSEGV"
    assert ended.tail[0] == "Fatal Python error: Segmentation fault"


class Starved(MemoryKills):
    """A system that has killed a process for want of memory."""

    def words(self, peak: int) -> str:
        return f" (likely out of memory: {peak})"


@pytest.mark.parametrize(
    ("ordered", "code", "says"),
    [
        (None, -signal.SIGKILL, "killed by SIGKILL (likely out of memory: 5)"),
        (signal.SIGTERM, -signal.SIGKILL, "killed by SIGKILL (likely out of memory: 5)"),
        (signal.SIGKILL, -signal.SIGKILL, "killed by SIGKILL"),
        (None, -signal.SIGTERM, "killed by SIGTERM"),
        (None, 3, "exit code 3"),
    ],
)
def test_what_the_launcher_kills_did_not_lack_memory(ordered: int | None, code: int, says: str) -> None:
    with subprocess.Popen(["sleep", "inf"], start_new_session=True) as process:
        node = ForkedWorker(0, process.pid, -1, (), Tail(), -1, Page())
        try:
            if ordered is not None:
                node.signal(ordered)
            node.signal_group(signal.SIGKILL)  # what it has left behind: no order
            assert node.end_in_words(code, 5, Starved()) == says
        finally:
            os.close(node.pidfd)


def test_log_directory_that_cannot_be_made(launch: Launch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    launcher, _ = launch()
    launcher.show(Output(log_dir=str(tmp_path / "file" / "logs")))
    launcher.start(bundles("serve"))
    [event] = collect(launcher, 1)
    assert isinstance(event, Exited)
    assert "could not be started: [Errno 20] Not a directory" in event.cause


@pytest.mark.fault(42)
def test_preload_that_fails(capfd: pytest.CaptureFixture[str]) -> None:
    launcher = LocalLauncher("stub_workers:act", ("no_such_module",))
    with within(5.0):
        launcher.start(bundles("serve"))
        with pytest.raises(StartError, match="ModuleNotFoundError: No module named 'no_such_module'"):
            collect(launcher, 1)
    with pytest.raises(StartError, match="no_such_module"):
        launcher.start(bundles("serve"))
    launcher.stop(0)


@pytest.mark.fault(44)
def test_too_few_descriptors() -> None:
    launcher = LocalLauncher("stub_workers:act", STUBS)
    assert launcher._server is not None
    # its fork server's alone: this process may have more open already
    resource.prlimit(launcher._server.pid, resource.RLIMIT_NOFILE, (30, 30))
    with within(5.0):
        launcher.start(bundles(*["serve"] * 10))
        events = collect(launcher, 10)
    failed = [e for e in events if isinstance(e, Exited)]
    assert failed
    assert "Too many open files: a node takes 5 of the 30 that one process may have" in failed[0].cause
    assert failed[0].rank > 2
    launcher.stop(0)
    assert alive_after(HANG, [e.pid for e in events if isinstance(e, Started)]) == []


@pytest.mark.fault(44)
def test_a_fork_server_raises_its_own_limit_where_it_may() -> None:
    launcher = LocalLauncher("stub_workers:act", STUBS)
    assert launcher._server is not None
    _, highest = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.prlimit(launcher._server.pid, resource.RLIMIT_NOFILE, (20, highest))
    launcher.start(bundles(*["serve"] * 5))
    events = collect(launcher, 5)
    assert [type(e) for e in events] == [Started] * 5
    launcher.stop(0)
    assert alive_after(HANG, [e.pid for e in events]) == []


def test_server_killed(launch: Launch, capfd: pytest.CaptureFixture[str]) -> None:
    """Its workers end with it, by the kernel: one that does not look at its life-line, too."""
    launcher, pids = launch("serve", "stubborn")
    out, _ = lines_of(capfd, 3)
    os.kill(launcher._server_pid, signal.SIGKILL)
    with pytest.raises(StartError, match=r"fork server \(pid \d+\) has ended.*killed by SIGKILL"):
        collect(launcher, 1)
    assert alive_after(HANG, pids) == []
    for child in map(int, out[1].split()[3:]):  # of a node's, which only the server could have found
        os.kill(child, signal.SIGKILL)


def test_stop_ends_everybody(launch: Launch, capfd: pytest.CaptureFixture[str]) -> None:
    launcher, pids = launch("stubborn", "serve", "quiet")
    out, _ = lines_of(capfd, 3)
    pids += [int(word) for word in out[0].split()[3:]]
    launcher.stop(0.1)
    assert alive_after(0, pids) == []
    causes = {e.rank: e.cause for e in launcher.events() if isinstance(e, Exited)}
    assert causes == {0: "killed by SIGKILL", 1: "killed by SIGTERM", 2: "killed by SIGTERM"}


def test_workers_hold_nothing_of_others(launch: Launch, capfd: pytest.CaptureFixture[str]) -> None:
    _, pids = launch("serve", "serve", "serve")
    lines_of(capfd, 6)  # they have come so far
    open_files = [
        {os.readlink(f.path) for f in os.scandir(f"/proc/{pid}/fd") if f.name != "0"} for pid in pids
    ]  # pipes only: nothing of the control socket, of pidfds or of the server's own pipes
    assert all(len(files) == 4 and all(f.startswith("pipe:") for f in files) for files in open_files), open_files
    assert not set.intersection(*open_files)
    assert [os.readlink(f"/proc/{pid}/fd/0") for pid in pids] == ["/dev/null"] * 3


@pytest.mark.parametrize("source", ["random", "numpy.random"])
def test_siblings_draw_other_numbers(source: str) -> None:
    launcher = LocalLauncher("stub_workers:act", (*STUBS, source))
    try:
        launcher.start(bundles("draw", "draw"))
        drawn = {e.tail[0] for e in collect(launcher, 4) if isinstance(e, Exited)}
    finally:
        launcher.stop(0)
    assert len(drawn) == 2
    assert all(text.startswith(f"drew by {source} ") for text in drawn)


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_fork(launch: Launch) -> None:
    launcher, _ = launch("serve")
    fd = launcher.fileno()
    pid = os.fork()
    if pid == 0:
        checks = 0
        with contextlib.suppress(ForkError):
            launcher.start(bundles("serve", "serve")[1:])
            checks += 1
        with contextlib.suppress(ForkError):
            launcher.events()
            checks += 1
        with contextlib.suppress(OSError):
            os.fstat(fd)
            checks += 1
        launcher.stop(0)
        os._exit(checks)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    launcher.kill(0, signal.SIGTERM)
    assert [e.cause for e in collect(launcher, 1) if isinstance(e, Exited)] == ["killed by SIGTERM"]


def test_output_that_goes_up() -> None:
    """To a boss that shows it: as it came, and not more at a time than that one takes."""
    sock, process = spawn_server(STUBS, output=Output(upward=True))
    wire: FramedSocket[News] = FramedSocket(News, sock.detach())
    wire.send_message(Start(bundles("flood")[0], "stub_workers:act"))
    text, untold, rounds, ended = b"", 0, 0, False
    while not ended:
        assert select.select([wire], [], [], HANG)[0]
        for news in wire.hear():
            if isinstance(news, NodeOutput):
                assert (news.rank, news.fd) == (0, 1)
                text += news.data
                untold += len(news.data)
            ended = isinstance(news, Ended)
        assert untold <= CREDIT + (2 << 16)  # one more piece, and what is left in the pipe when the node ends
        if untold > CREDIT:  # nothing more comes before this
            wire.send_message(OutputAck(untold))
            untold, rounds = 0, rounds + 1
    assert text == b"".join(b"%06d %s\n" % (i, b"x" * 40) for i in range(40_000))
    assert rounds >= 4
    wire.close()
    assert process.wait(HANG) == 0


MASTER = """
import os, select, sys, time
from disttensor.runtime.protocol.bundle import Bundle
from disttensor.runtime.launch.starters.local import LocalLauncher
def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())  # at once, between the nodes' lines
_, preload, *jobs = sys.argv
launcher = LocalLauncher("stub_workers:act", (preload,))
launcher.start([Bundle(job=j, rank=k, address="none") for k, j in enumerate(jobs)])
if preload == "slow_to_import":
    say("pids", launcher._server.pid)
    time.sleep(600)
pids = []
while len(pids) < len(jobs):
    select.select([launcher], [], [])
    pids += [e.pid for e in launcher.events()]
child = os.fork()
if child == 0:
    time.sleep(600)
say("forked", child)
say("pids", launcher._server_pid, *pids)
sys.stdin.read()
"""


@contextlib.contextmanager
def master(*arguments: str, path: str = "", **options: Any) -> Iterator[subprocess.Popen[str]]:
    """A process that has started nodes and then waits. It has no __main__ guard and no file."""
    search = search_path(path)
    environment = {**os.environ, "PYTHONPATH": search}
    process = subprocess.Popen(
        [sys.executable, "-c", MASTER, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        **options,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def told(process: subprocess.Popen[str], *words: str) -> dict[str, list[int]]:
    """The numbers behind these words, from lines that the process or its nodes print."""
    assert process.stdout is not None
    found: dict[str, list[int]] = {}
    while not set(words) <= set(found):
        line = process.stdout.readline()
        assert line, f"the output ended; found {found}"
        for word in words:
            if word in line:
                found[word] = [int(n) for n in line.split(word)[1].split()]
    return found


def test_master_killed() -> None:
    with master("stub_workers", "serve", "stubborn", "serve") as process:
        found = told(process, "children", "pids", "forked")
        process.kill()
        # a forked child of the master's is still there, and holds nothing that keeps the nodes alive
        assert alive_after(HANG, found["pids"] + found["children"]) == []
        os.kill(found["forked"][0], signal.SIGKILL)


@pytest.mark.cold
def test_master_killed_while_the_server_imports(tmp_path: Path) -> None:
    tmp_path.joinpath("slow_to_import.py").write_text("import time\ntime.sleep(600)\n")
    with master("slow_to_import", "serve", path=str(tmp_path)) as process:
        pids = told(process, "pids")["pids"]
        process.kill()
        assert alive_after(HANG, pids) == []


def test_reader_that_stalls() -> None:
    with master("stub_workers", "flood", "flood") as process:
        found = told(process, "pids", "forked")
        process.kill()  # nobody has read: the pipe is full and nodes and server have much to say
        assert alive_after(HANG, found["pids"]) == []
        os.kill(found["forked"][0], signal.SIGKILL)


def test_all_output_arrives_whole() -> None:
    with master("stub_workers", "flood", "flood") as process:
        assert process.stdout is not None
        seen: dict[str, list[str]] = {"[node 0]": [], "[node 1]": []}
        child = 0
        while sum(map(len, seen.values())) < 80_000 or not child:
            line = process.stdout.readline()
            if line.startswith("forked"):
                child = int(line.split()[1])
            for part in unfolded([line] if line.startswith("[") else []):
                seen[part[:8]].append(part[9:15])
                assert part.endswith(" " + "x" * 40 + "\n")
        os.kill(child, signal.SIGKILL)
    assert all(numbers == [f"{i:06}" for i in range(40_000)] for numbers in seen.values())


def test_without_standard_descriptors() -> None:
    """A daemon's master: 0, 1 and 2 are closed, and the launcher's own must not take their place."""
    code = (
        "import os, select, sys\nfor fd in 0, 1, 2: os.close(fd)\n"
        "from disttensor.runtime.protocol.bundle import Bundle\n"
        "from disttensor.runtime.launch.starters.local import LocalLauncher\n"
        "l = LocalLauncher('stub_workers:act', ('stub_workers',))\n"
        "l.start([Bundle(job='three', rank=0, address='none')])\n"
        "events = []\n"
        "while len(events) < 2:\n    select.select([l], [], [])\n    events += l.events()\n"
        "l.stop(0)\nos._exit(events[1].code)"
    )
    environment = {**os.environ, "PYTHONPATH": search_path()}
    assert subprocess.run([sys.executable, "-c", code], env=environment, timeout=HANG).returncode == 3


def test_registry() -> None:
    assert get_launcher("local") is LocalLauncher
    assert issubclass(LocalLauncher, Launcher)
    with pytest.raises(ValueError, match=r"unknown launcher 'moon'; known launchers: .*local"):
        get_launcher("moon")


def test_a_name_for_a_launcher_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered", {})

    class Mine(LocalLauncher):
        pass

    for _ in range(2):
        register_launcher("mine", Mine)
    assert get_launcher("mine") is Mine
    assert "mine" in launcher_names()
    for name in ("mine", "local", "nearby", "auto", "inproc"):
        with pytest.raises(ValueError, match=f"the launcher name '{name}' is taken; .*: join, local, mine"):
            register_launcher(name, LocalLauncher)
    with pytest.raises(TypeError, match="launcher 'x' has to be a subclass of Launcher, not 7"):
        register_launcher("x", 7)  # type: ignore[arg-type]


#: Two children, of which one may not be sent signals, as one that has become another user's.
ANOTHERS = """
import os, subprocess
from disttensor.runtime.process import lifetime

ours, theirs = (subprocess.Popen(["sleep", "600"]).pid for _ in range(2))
kill = os.kill

def refuse(pid, number):
    if pid == theirs:
        raise PermissionError("not permitted")
    kill(pid, number)

lifetime.os.kill = refuse
lifetime.end_children(0, 0.1)
print(lifetime.children() == [theirs])
kill(theirs, 9)
"""


def test_a_child_that_must_not_be_killed_is_left(script: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    done = script(ANOTHERS)
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr
