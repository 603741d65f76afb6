"""What happens when processes die, with real nodes."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch
from aftermath import aftermath, children, within
from limits import HANG
from processes import alive_after
from test_error_matrix import in_any_thread, run, usable, wherever
from variants import variants

import disttensor as dt
from disttensor import testing

Script = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def cluster() -> Iterator[None]:
    with dt.init_master_worker(nodes=2, threads=1):
        yield


def pid_of(node: int) -> int:
    return int(dt.nodes()[node]["pid"])


def use(x: torch.Tensor, how: Callable[[torch.Tensor], object] = lambda x: x.sum().item()) -> None:
    """Until it raises; the test's time limit ends it otherwise."""
    while True:
        how(x)


@pytest.mark.row("M19")
@pytest.mark.fault(1)
@pytest.mark.usefixtures("cluster")
def test_a_killed_node_is_lost_and_the_other_is_not() -> None:
    x, y = torch.ones(3, device="node:1"), torch.ones(3, device="node:0")
    assert x.sum().item() == 3
    with aftermath(0):
        host, pid = dt.nodes()[1]["host"], pid_of(1)
        os.kill(pid, signal.SIGKILL)
        with within(1.0), pytest.raises(dt.NodeLost, match=rf"node 1 \(host {host}, pid {pid}\).*SIGKILL") as caught:
            use(x)
        assert (caught.value.rank, caught.value.host, caught.value.pid) == (1, host, pid)
        assert (y + 1).sum().item() == 6
        with pytest.raises(dt.NodeLost):
            x.cpu()
        with pytest.raises(dt.NodeLost):
            y.to("node:1")
        assert (y + 2).sum().item() == 9
        assert [n["alive"] for n in dt.nodes()] == [True, False]


@in_any_thread
@wherever
def test_a_node_is_lost_wherever_it_is_used(place: str, thread: str) -> None:
    x: torch.Tensor | None = None

    def lose() -> None:
        testing.cut(1)
        while True:
            x.exp().sum().item()

    cause = "its connection ended|not connected"  # whether it is heard of first, or met by a message
    with pytest.raises(dt.NodeLost, match=cause):  # noqa: PT012, SIM117 - the end of the session tells it as well
        with dt.init_master_worker(nodes=2, launcher="inproc"):
            x = torch.ones(3, device="node:1")
            with pytest.raises(dt.NodeLost, match=f"node 1 .*({cause})"):
                run(thread, place, lose)
            usable("node:0")
            x.cpu()


@pytest.mark.row("M19")
@pytest.mark.fault(3)
@pytest.mark.usefixtures("cluster")
def test_waiting_for_a_node_that_dies_ends() -> None:
    pid = pid_of(1)

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(dt.NodeLost, match="SIGKILL"):
        dt.run(die, node=1)
    assert alive_after(1.0, [pid]) == []


@pytest.mark.fault(30)
@pytest.mark.usefixtures("cluster")
def test_a_node_that_dies_takes_its_transfers_with_it() -> None:
    x = torch.ones(1 << 20, device="node:1")
    x.cpu()
    with aftermath(0):
        os.kill(pid_of(1), signal.SIGKILL)
        with within(1.0), pytest.raises(dt.NodeLost):
            use(x, torch.Tensor.cpu)


def shared_by(pids: set[int]) -> set[str]:
    """The files of shared memory that some processes have mapped or open."""
    found: set[str] = set()
    for pid in pids:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            found.update(re.findall(r"/dev/shm/\S+", line))
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                found.update(re.findall(r"/dev/shm/\S+", os.readlink(link)))
    return found


MASTER = f"""
    import sys, torch, disttensor as dt
    dt.init_master_worker(nodes=3, timeout={HANG})
    x = torch.ones(4, 4, device="node:1")
    print(*(n["pid"] for n in dt.nodes()), flush=True)
    x.sum().item()
    while True:
        x = x * 1.0
"""


@pytest.mark.row("M20")
@pytest.mark.fault(16)
@pytest.mark.parametrize("mode", variants(["busy", "idle"]))
def test_no_worker_outlives_a_killed_master(mode: str, tmp_path: Path) -> None:
    """Nor does anything else of its: secrets and sockets, which would be in its TMPDIR, and shared memory."""
    script = MASTER if mode == "busy" else MASTER.replace("while True:", "while sys.stdin.read():")
    master = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )  # fmt: skip
    assert master.stdout is not None
    pids = [int(p) for p in master.stdout.readline().split()]
    assert len(pids) == 3
    below = children(master.pid)  # fork servers and what else there is, too
    assert set(pids) <= below
    used = shared_by({master.pid, *below})
    with within(2.0):
        master.kill()
        master.wait()
        assert alive_after(HANG, below) == []
        assert [path for path in used if os.path.exists(path)] == []
        assert [path for path in tmp_path.iterdir() if not path.name.startswith("torchinductor_")] == []  # torch's
    master.stdout.close()
    assert master.stdin is not None
    master.stdin.close()


@pytest.mark.fault(12)
def test_an_error_that_nobody_asked_about_fails_the_script() -> None:
    script = """
        import torch, disttensor as dt
        dt.init_master_worker(nodes=1)
        torch.nn.functional.embedding(torch.tensor([7], device="node:0"), torch.ones(3, 2, device="node:0"))
        print("end of script")
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=HANG)
    assert done.returncode == 1
    assert done.stdout == "end of script\n"
    assert "IndexError" in done.stderr
    assert "nothing in the script asked" in done.stderr


@pytest.mark.usefixtures("cluster")
def test_the_fork_servers_death_is_the_loss_of_its_nodes(caplog: pytest.LogCaptureFixture) -> None:
    x, y = torch.ones(3, device="node:0"), torch.ones(3, device="node:1")
    os.kill(psutil.Process(pid_of(0)).ppid(), signal.SIGKILL)
    for tensor in (x, y):
        with pytest.raises(dt.NodeLost, match=r"fork server .*SIGKILL"):
            use(tensor)
    assert "disttensor-flush" in [thread.name for thread in threading.enumerate()]
    # the loop of ``use`` may wait so often that the script is told of it
    assert [record.getMessage() for record in caplog.records if record.module != "waits"] == []


def test_the_thread_that_flushes_outlives_an_error(caplog: pytest.LogCaptureFixture) -> None:
    with dt.init_master_worker(nodes=1, launcher="inproc"):
        failed, sent = threading.Event(), threading.Event()

        def fail_once() -> None:
            if threading.current_thread().name == "disttensor-flush" and not failed.is_set():
                failed.set()
                raise OSError("a defect")

        def note() -> None:
            if threading.current_thread().name == "disttensor-flush":
                sent.set()

        with testing.at("receive", fail_once):
            x = torch.ones(3, device="node:0")  # wakes it
            assert failed.wait(20)
        with testing.at("send", note, after=True):
            y = x + 1
            while not sent.wait(0.05):
                y = x + 1
        assert y.sum().item() == 6
    assert "a defect" in caplog.text


KILL = """
import os, select, signal, threading, time, torch, disttensor as dt

def kill(node):
    pid = dt.nodes()[node]["pid"]
    fd = os.pidfd_open(pid)
    os.kill(pid, signal.SIGKILL)
    select.select([fd], [], [])
"""


@pytest.mark.fault(12)
def test_a_node_whose_loss_nobody_noticed_fails_the_script(script: Script) -> None:
    done = script(f"""{KILL}
dt.init_master_worker(nodes=2)
x = torch.ones(2, device="node:1") + 1
kill(1)
print("end of script")
""")
    assert (done.returncode, done.stdout) == (1, "end of script\n")
    assert "a node was lost" in done.stderr
    assert "node 1" in done.stderr
    assert "SIGKILL" in done.stderr


@pytest.mark.parametrize("end", variants(["pass", "dt.shutdown()"]))
def test_a_loss_that_was_said_is_not_said_again(script: Script, end: str) -> None:
    done = script(f"""{KILL}
dt.init_master_worker(nodes=2)
x = torch.ones(2, device="node:0")
kill(0)
try:
    while True:
        x.sum().item()
except dt.NodeLost:
    print("said")
{end}
""")
    assert (done.returncode, done.stdout, done.stderr) == (0, "said\n", "")


def test_a_lost_node_hides_nothing_that_failed_on_another(script: Script) -> None:
    done = script(f"""{KILL}
dt.init_master_worker(nodes=2)
x = torch.ones(2, device="node:0") + 1
torch.nn.functional.embedding(torch.tensor([7], device="node:1"), torch.ones(3, 2, device="node:1"))
kill(0)
try:
    dt.shutdown()
except IndexError as e:
    print(e.__notes__[-1])
""")
    assert "node 0" in done.stdout
    assert "SIGKILL" in done.stdout
    assert (done.returncode, done.stderr) == (0, "")


def test_a_node_that_is_busy_at_the_end_is_named(script: Script) -> None:
    done = script("""
import os, threading, torch, disttensor as dt
def sleep():
    import time
    open("started", "w").close()  # a pipe: returns when the script has opened it
    time.sleep(3600)
os.mkfifo("started")
dt.init_master_worker(nodes=2)
threading.Thread(target=dt.run, args=(sleep,), kwargs={"node": 0}, daemon=True).start()
open("started").close()
torch.nn.functional.embedding(torch.tensor([7], device="node:1"), torch.ones(3, 2, device="node:1"))
""")
    assert done.returncode == 1
    assert "node 0 was still busy" in done.stderr
    assert "IndexError" in done.stderr


def test_interrupts_leave_the_session_usable() -> None:
    script = """
        import os, signal, threading, torch, disttensor as dt
        dt.init_master_worker(nodes=1)
        x = torch.ones(4, 4, device="node:0")
        hits = 0
        for i in range(20):
            timer = threading.Timer(0.002 * (i % 7 + 1), os.kill, (os.getpid(), signal.SIGINT))
            try:
                timer.start()
                y = x
                while True:
                    y = y * 1.0
            except KeyboardInterrupt:
                hits += 1
            timer.join()
        print(hits, (x + 1).sum().item())
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=HANG)
    assert done.stdout == "20 32.0\n", done.stderr
    assert done.stderr == ""


FORKS = """
    import gc, multiprocessing, os, sys, torch, disttensor as dt
    from aftermath import aftermath
    dt.init_master_worker(nodes=1)
    kept = [torch.ones(4, device="node:0") + k for k in range(10)]

    def use():
        try:
            (kept[0] + 1).sum().item()
        except dt.errors.ForkError:
            kept.clear()
            gc.collect()
            sys.exit(7)
        sys.exit(1)

    with aftermath(0):  # the child's end frees nothing
        if {os}:
            child = os.fork()
            if child == 0:
                try:
                    use()
                except SystemExit as e:
                    os._exit(e.code)
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        else:
            child = multiprocessing.get_context("fork").Process(target=use)
            child.start()
            child.join()
            code = child.exitcode
            child.close()
    print(code, [x.sum().item() for x in kept] == [4.0 * (k + 1) for k in range(10)])
"""


@pytest.mark.fault(21)
@pytest.mark.parametrize("by", ["os", "multiprocessing"])
def test_a_forked_child_is_refused_and_harms_nothing(by: str, script: Script) -> None:
    done = script(textwrap.dedent(FORKS.format(os=by == "os")), PYTHONWARNINGS="ignore")
    assert (done.stdout, done.stderr) == ("7 True\n", "")
