"""The guard against leaks: it finds what the processes of a test have left, and nothing of anybody else's."""

from __future__ import annotations

import gc
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from leaks import MARK, Held, check, unmarked
from processes import alive_after

from disttensor.runtime.channel.shm.segments import DESCRIPTOR, Mapping

# what a zygote (warm.py) has in its environment is this process's mark, whatever a program is told
pytestmark = pytest.mark.cold

#: A process starts another one, in a session of its own, and ends: that one is nobody's child any more.
ORPHAN = """
import subprocess, sys
stays = subprocess.Popen([sys.executable, "-c", sys.argv[1]], start_new_session=True, stdout=subprocess.PIPE, text=True)
print(stays.pid, stays.stdout.readline())
"""
STAY = "import signal; print('here', flush=True); signal.pause()"

#: Sends a segment as a node would, and stays.
SENDER = """
import signal, sys
from disttensor.runtime.channel.shm.segments import Segment
segment = Segment(1 << 16)
sys.stdout.buffer.write(segment.describe())
sys.stdout.flush()
signal.pause()
"""


def orphan(environment: dict[str, str], program: str = STAY) -> int:
    command = [sys.executable, "-c", ORPHAN, program]
    return int(subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True).stdout.split()[0])


def ended(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    assert not alive_after(30, [pid])


@pytest.fixture
def before() -> Held:
    return Held.now()


def fails(before: Held) -> str:
    """What the guard says."""
    with pytest.raises(pytest.fail.Exception) as caught:
        check(before, "a test", limit=0.0)
    return str(caught.value)


def test_a_process_that_was_left_by_its_parent_is_found(before: Held) -> None:
    pid = orphan(dict(os.environ))
    try:
        assert f"process {pid}: {sys.executable}" in fails(before)
    finally:
        ended(pid)
    assert not Held.now().since(before)


def test_a_child_without_the_mark_is_found(before: Held) -> None:
    with subprocess.Popen(["sleep", "600"], env=unmarked(os.environ)) as child:
        try:
            assert f"process {child.pid}: sleep 600" in fails(before)
        finally:
            child.kill()


def test_a_zombie_is_found(before: Held) -> None:
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    assert f"process {child}: a zombie" in fails(before)
    os.waitpid(child, 0)


@pytest.mark.parametrize("marks", [None, "0123456789abcdef"], ids=["another program", "another run of these tests"])
def test_what_is_of_others_is_nobodys_leak(before: Held, marks: str | None) -> None:
    """A process, and a file of shared memory that it has open, has mapped, or leaves there."""
    environment = unmarked(os.environ) | ({} if marks is None else {MARK: marks})
    name = f"sem.mp-{os.urandom(4).hex()}"
    use = (
        f"import mmap, signal; f = open('/dev/shm/{name}', 'wb+'); f.truncate(4096); m = mmap.mmap(f.fileno(), 4096); "
    )
    pid = orphan(environment, use + STAY)
    path = Path("/dev/shm", name)
    try:
        assert path.exists()
        assert not Held.now().since(before)
        ended(pid)
        assert path.exists()
        assert not Held.now().since(before)
    finally:
        path.unlink(missing_ok=True)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.fixture
def sender() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", SENDER], stdout=subprocess.PIPE) as process:
        yield process
        process.kill()


def test_a_segment_of_a_killed_process_is_found_where_it_is_kept(before: Held, sender: subprocess.Popen[bytes]) -> None:
    """It has no name: it is there as long as this process has it mapped."""
    assert sender.stdout is not None
    said = sender.stdout.read(DESCRIPTOR)
    kept = Mapping.of(said, 1 << 16)
    sender.kill()
    sender.wait()
    sender.stdout.close()
    assert fails(before).startswith("a test left behind: shared memory /memfd:disttensor (deleted)")
    del kept
    assert not Held.now().since(before)


def test_threads_and_sockets_are_found(before: Held) -> None:
    goes = threading.Event()
    thread = threading.Thread(target=goes.wait, name="stays")
    thread.start()
    with socket.socket() as sock:
        inode = os.readlink(f"/proc/self/fd/{sock.fileno()}")
        assert fails(before) == f"a test left behind: open {inode}; thread 'stays'"
    goes.set()
    thread.join()


class Garbage:
    """Holds a socket until it is collected."""

    def __init__(self) -> None:
        self.me, self.sock = self, socket.socket()

    def __del__(self) -> None:
        self.sock.close()


def test_descriptors_of_any_kind_are_found_where_they_are_asked_for() -> None:
    before, all_before = Held.now(), Held.now(descriptors=True)
    with open(os.devnull) as file:
        assert f"descriptor {file.fileno()} of {os.devnull}" in fails(all_before)
        assert not Held.now(descriptors=True).since(before)
    assert not Held.now(descriptors=True).since(all_before)


def test_what_is_ending_may_end(before: Held, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process, a thread that waits for it, and what that thread held, which is garbage only then."""
    child = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
    assert child.stdin is not None

    def hold() -> None:
        garbage = Garbage()
        child.wait()
        del garbage

    threading.Thread(target=hold).start()
    collect = gc.collect

    def let_go() -> None:
        """The guard has seen all three, and collects what is garbage already."""
        collect()
        child.stdin.close()

    monkeypatch.setattr(gc, "collect", let_go)
    check(before, "a test")
    assert child.stdin.closed
