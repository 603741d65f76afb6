"""A save that is killed, at whichever step, leaves the last complete checkpoint to be loaded: by torch itself."""

from __future__ import annotations

import itertools
import logging
import os
import select
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from limits import HANG
from telling import said

import disttensor as dt
from disttensor import mesh
from disttensor.checkpoint import async_save, load, save

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

#: What Python tells an audit hook before it changes a folder.
CHANGES = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree", "os.truncate"}


class Moments:
    """Copies of a folder as it was at each step of what is done to it: what a kill at that step would leave."""

    def __init__(self, folder: Path, copies: Path) -> None:
        self.folder, self.copies, self.steps = folder, copies, list[str]()
        self.on = False
        self._lock = threading.Lock()  # whoever comes to a step while the folder is copied waits
        self._own = threading.local()
        sys.addaudithook(self._note)  # which can't be taken back

    def _note(self, event: str, args: tuple[Any, ...]) -> None:
        if (
            self.on
            and not hasattr(self._own, "copying")
            and event in CHANGES
            and str(args[0]).startswith(str(self.folder))
        ):
            writes = event != "open" or (isinstance(args[1], str) and args[1][0] in "wax") or args[2] & 3
            if writes:
                self.copy(f"{event} {args[0]}")

    def copy(self, step: str) -> None:
        with self._lock:
            self._own.copying = True
            shutil.copytree(self.folder, self.copies / str(len(self.steps)))
            self.steps.append(step)
            del self._own.copying

    @contextmanager
    def watched(self) -> Iterator[None]:
        """In this block, also just after each wait for the disk."""
        fsync = os.fsync

        def and_copy(descriptor: int) -> None:
            fsync(descriptor)
            if self.on:
                self.copy("fsync")

        os.fsync, self.on = and_copy, True
        try:
            yield
        finally:
            os.fsync, self.on = fsync, False


def loaded(folder: Path) -> tuple[float, ...]:
    """What torch finds in a checkpoint: of each tensor its only value, where it has only one."""
    state = {"x": torch.zeros(100), "y": torch.zeros(3), "z": torch.zeros(2), "step": 0}
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    tensors = [state[name] for name in "xyz"]
    assert all((x == x[0]).all() for x in tensors), tensors
    return (*(x[0].item() for x in tensors), state["step"])


def program(value: float) -> dict[str, Any]:
    """A state of tensors on a mesh, on a node and here."""
    there = mesh(dp=3).device
    return {
        "x": torch.full((100,), value).to(there),
        "y": torch.full((3,), value, device="node:1"),
        "z": torch.full((2,), value),
        "step": value,
    }


@contextmanager
def threads() -> Iterator[None]:
    """A session whose nodes are threads of this process, so that all steps are taken here."""
    with dt.init_master_worker(nodes=3, launcher="inproc"):
        yield


def test_threads_that_save_to_one_folder_have_their_turns_or_are_refused_by_name(tmp_path: Path) -> None:
    """Again and again, one of them beside the script: none waits for good, and what is there is one save's, whole."""
    states: list[dict[str, Any]] = []
    ended: list[int] = []
    refused: list[OSError] = []

    def saves(k: int) -> None:
        for _ in range(10):
            try:
                if k:
                    async_save(states[k], tmp_path / "c").wait()
                else:
                    save(states[k], tmp_path / "c")
            except OSError as error:
                assert "one save at a time writes a checkpoint" in str(error)  # noqa: PT017 - or it is its turn
                refused.append(error)
            else:
                ended.append(k)

    with threads():
        states += [program(float(k)) for k in range(2)]
        both = [threading.Thread(target=saves, args=(k,), daemon=True) for k in range(2)]
        for one in both:
            one.start()
        for one in both:
            one.join(HANG)
        assert not any(one.is_alive() for one in both)
        assert len(ended) + len(refused) == 20
        assert ended
        assert loaded(tmp_path / "c") in ((0.0,) * 4, (1.0,) * 4)


def test_a_save_may_come_while_another_one_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its thread has not started then, and nobody may join it yet."""
    start, came = threading.Thread.start, list[str]()

    def meanwhile() -> None:
        save({"x": torch.ones(100)}, tmp_path / "other")
        came.append("saved")

    def late(thread: threading.Thread) -> None:
        if thread.name == "disttensor-checkpoint":
            other = threading.Thread(target=meanwhile)
            start(other)
            other.join(HANG)
        start(thread)

    with threads():
        state = program(6.0)
        monkeypatch.setattr(threading.Thread, "start", late)
        async_save(state, tmp_path / "c").wait()
        assert came == ["saved"]
        assert loaded(tmp_path / "c") == (6.0,) * 4


def test_the_end_of_a_session_waits_for_the_save(tmp_path: Path) -> None:
    ended = threading.Event()
    with threads():
        work = async_save(program(4.0), tmp_path / "c")
        work.add_done_callback(lambda work: ended.set())
    assert work.is_completed()
    assert ended.wait(HANG)
    assert loaded(tmp_path / "c") == (4.0,) * 4


@pytest.mark.parametrize("way", [save, async_save])
@pytest.mark.parametrize("name", ["a\0b", "a\ud800b"], ids=["null", "surrogate"])
def test_a_path_that_can_not_be_one_is_not_waited_for(
    name: str, way: Callable[..., object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The save raises, and is over: the session's end has nothing to wait for."""

    def warning(text: str, *args: object) -> None:
        assert "the end of the session waits" not in text, text % args

    monkeypatch.setattr(logging.getLogger("disttensor"), "warning", warning)
    with threads(), pytest.raises(ValueError, match=r"null byte|surrogates not allowed"):
        way(program(1.0), tmp_path / name)
    assert os.listdir(tmp_path) == []


class Interrupted(Exception):
    """What the handler of a signal raises."""


@contextmanager
def interrupted_at(step: int) -> Iterator[list[str]]:
    """In this block a signal comes just before a step, by its number, of those that the module of saves takes in this
    thread: a call of a function or a line. Gives the steps."""
    steps: list[str] = []

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        if not frame.f_code.co_filename.endswith("checkpoint/saving.py"):
            return None
        if event in ("call", "line"):
            steps.append(f"{frame.f_code.co_qualname} {frame.f_lineno}")
            if len(steps) == step:
                signal.raise_signal(signal.SIGUSR1)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield steps
    finally:
        sys.settrace(before)


@pytest.mark.fault(18)
@pytest.mark.parametrize("way", [save, async_save])
def test_an_interrupt_at_every_step(
    way: Callable[..., object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next save has its turn, and the session's end nothing to wait for."""
    came: list[int] = []

    def handler(number: int, frame: object) -> None:
        came.append(number)
        raise Interrupted

    def warning(text: str, *args: object) -> None:
        assert "the end of the session waits" not in text, f"{last}: {text % args}"

    monkeypatch.setattr(logging.getLogger("disttensor"), "warning", warning)
    former, last = signal.signal(signal.SIGUSR1, handler), ""
    try:
        with threads():
            x = torch.ones(1, device="node:0")
            for step in itertools.count(1):
                came.clear()
                with suppress(Interrupted), interrupted_at(step) as steps:
                    way({"n": step}, tmp_path / "c")
                if len(steps) < step:
                    break
                with suppress(Interrupted):  # one that was held back comes at the next message
                    while not came:
                        x.sum().item()
                last = steps[step - 1]
    finally:
        signal.signal(signal.SIGUSR1, former)
    assert step > 40
    assert len([name for name in os.listdir(tmp_path / "c") if name.startswith(".s")]) == 0


@pytest.mark.fault(47)
def test_the_end_of_a_session_raises_what_nobody_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replace = os.replace

    def full(source: str, target: str) -> None:
        if target.endswith(".metadata"):
            raise OSError(28, "No space left on device")
        replace(source, target)

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space left") as raised, threads():
        async_save(program(4.0), tmp_path / "c")
    assert f"the checkpoint {tmp_path / 'c'} was not written" in said(raised.value)
    assert not (tmp_path / "c").exists()
    with threads():
        work = async_save(program(4.0), tmp_path / "c")
        assert isinstance(work.exception(), OSError)  # it has been asked for: the end raises nothing


@pytest.mark.fault(46)
def test_at_every_step(tmp_path: Path) -> None:
    """More than 100 steps of saves in place of others, the nodes' steps too: at each torch loads the former checkpoint,
    whole, or the new one; and at the first save no checkpoint, or the new one."""
    folder, copies = tmp_path / "c", tmp_path / "copies"
    copies.mkdir()
    with threads():
        every_step(folder, copies)


def every_step(folder: Path, copies: Path) -> None:
    save(program(1.0), folder)
    moments = Moments(folder, copies)
    turns = []
    for value in (2.0, 3.0, 4.0, 5.0, 6.0):
        with moments.watched():
            if value % 2:
                save(program(value), folder)
            else:
                async_save(program(value), folder).wait()
        turns.append(len(moments.steps))
    assert len(moments.steps) >= 100, moments.steps
    assert {step.partition(" ")[0] for step in moments.steps} >= {"open", "os.mkdir", "os.rename", "os.remove", "fsync"}
    value, seen = 1.0, set()
    for at, step in enumerate(moments.steps):
        if at == turns[0]:
            turns.pop(0)
            value += 1
        found = loaded(copies / str(at))
        assert found in ((value,) * 4, (value + 1,) * 4), step
        seen.add(found[0])
        if at % 10 == 0:
            state = program(0.0)
            load(state, copies / str(at))
            assert (state["y"].tolist(), state["x"].at(dp=1).unique().tolist()) == ([found[0]] * 3, [found[0]])
    assert seen == {1.0, 2.0, 3.0, 4.0, 5.0, 6.0}
    # whatever a killed save has left, the next one removes
    last = copies / str(max(at for at, step in enumerate(moments.steps) if "hashes_" in step))
    left = set(os.listdir(last))
    save(program(9.0), last)
    assert loaded(last) == (9.0,) * 4
    assert not left & set(os.listdir(last)) - {".metadata"}


SCRIPT = """
import os, sys
import torch
import disttensor as dt

def hold(fifo):
    import os
    fsync = os.fsync
    def held(descriptor):
        with open(fifo) as opened:
            opened.read()
        fsync(descriptor)
    os.fsync = held

with dt.init_master_worker(nodes=2, threads=1):
    folder, fifo = sys.argv[1:]
    x = torch.full((100,), 1.0, device="node:1")
    dt.checkpoint.save({"x": x}, folder)
    dt.run(hold, fifo, node=1)
    x += 1
    work = dt.checkpoint.async_save({"x": x, "y": torch.ones(1, device="node:0")}, folder)
    print(x[0].item(), *(node["pid"] for node in dt.nodes()), flush=True)     # goes on beside the save
    sys.stdin.readline()
    try:
        work.wait()
    except dt.NodeLost as error:
        print("lost", error.rank, *(note for note in error.__notes__ if "checkpoint" in note), sep="|", flush=True)
    found = {"x": torch.zeros(100)}
    dt.checkpoint.load(found, folder)
    print(found["x"][0].item(), sorted(os.listdir(folder)) == sys.stdin.readline().split(), flush=True)
    dt.checkpoint.save({"x": torch.full((100,), 3.0, device="node:0")}, folder)
    os._exit(0)
"""


@contextmanager
def saving(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], Path, list[int], list[str]]]:
    """A program that is in the middle of a save: itself, the folder, its nodes' pids, and the files of the former
    checkpoint."""
    folder, fifo = tmp_path / "c", tmp_path / "fifo"
    os.mkfifo(fifo)
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, str(tmp_path / "script.py"), str(folder), str(fifo)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes) as running:  # type: ignore[call-overload]
        try:
            value, *pids = running.stdout.readline().split()
            assert value == "2.0", running.stderr.read()
            metadata = dcp.FileSystemReader(folder).read_metadata()
            number = metadata.storage_meta.save_id.partition("-")[2]
            before = sorted(name for name in os.listdir(folder) if number in name or name == ".metadata")
            # what the save under way has written so far is there besides
            assert len(os.listdir(folder)) > len(before)
            yield running, folder, [int(pid) for pid in pids], before
        finally:
            running.kill()


def x_of(folder: Path) -> float:
    state = {"x": torch.zeros(100)}
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    return state["x"][0].item()


@pytest.mark.fault(46)
def test_a_node_is_killed_while_it_writes(tmp_path: Path) -> None:
    """The Work says so; what was written is removed, and the former checkpoint loads, here and by torch."""
    with saving(tmp_path) as (running, folder, pids, before):
        os.kill(pids[1], signal.SIGKILL)
        said_, err = running.communicate("\n" + " ".join(before) + "\n", timeout=HANG)
        lines = said_.splitlines()
        assert lines[0].startswith("lost|1|"), err
        assert f"the checkpoint {folder} was not written" in lines[0]
        assert lines[1] == "1.0 True"
        assert x_of(folder) == 3.0


@pytest.mark.fault(46)
def test_the_script_is_killed_while_nodes_write(tmp_path: Path) -> None:
    with saving(tmp_path) as (running, folder, pids, before):
        ends = [os.pidfd_open(pid) for pid in pids]
        running.kill()
        for end in ends:
            assert select.select([end], [], [], HANG)[0]  # no node stays behind
            os.close(end)
        assert x_of(folder) == 1.0
        assert set(before) < set(os.listdir(folder))


ENDS = """
import os, signal, sys, threading
import torch
import disttensor as dt
from disttensor.checkpoint import saving

saving._SAYS = 0.01
how, folder, fifo = sys.argv[1:]
fsync = os.fsync

def held(descriptor):
    with open(fifo) as opened:
        opened.read()
    os.fsync = fsync
    if how == "fails":
        raise OSError(28, "No space left on device")
    fsync(descriptor)

def main():
    x = torch.ones(100, device="node:1")
    x.sum().item()
    os.fsync = held
    if how == "thread":
        saves = threading.Thread(target=lambda: dt.checkpoint.save({"x": x}, folder), daemon=True)
        saves.start()
        while not os.path.isdir(folder) or not os.listdir(folder):
            saves.join(0.001)
    else:
        dt.checkpoint.async_save({"x": x}, folder)

if how == "error":
    with dt.init_master_worker(nodes=2, launcher="inproc"):
        main()
        raise ValueError("the program's own")
dt.init_master_worker(nodes=2, launcher="inproc")
main()
"""


@pytest.mark.fault(19)
@pytest.mark.parametrize(
    ("how", "code", "text"),
    [
        ("ends", 0, ""),
        ("thread", 0, ""),
        ("error", 1, "ValueError: the program's own"),
        ("fails", 1, "No space left on device"),
        ("interrupted", 1, "Ctrl-C at the script's end, while it waited"),
    ],
)
def test_the_end_of_a_script_waits_for_the_save(how: str, code: int, text: str, tmp_path: Path) -> None:
    """As long as it takes, which it says. One that fails, or that Ctrl-C gives up, is named, and the exit code is 1."""
    folder, fifo = tmp_path / "c", tmp_path / "fifo"
    os.mkfifo(fifo)
    (tmp_path / "script.py").write_text(ENDS)
    command = [sys.executable, str(tmp_path / "script.py"), how, str(folder), str(fifo)]
    with subprocess.Popen(command, text=True, stderr=subprocess.PIPE) as running:
        try:
            assert running.stderr is not None
            waits = f"waits for the checkpoint {folder}, which is not written yet (saved at"
            before = ""
            while waits not in before:  # it has come to its end
                line = running.stderr.readline()
                assert line, before
                before += line
            if how == "interrupted":
                running.send_signal(signal.SIGINT)
            else:
                with open(fifo, "w"):
                    pass
            rest = running.stderr.read()
            assert running.wait(HANG) == code, rest
        finally:
            running.kill()
    assert text in rest
    if how in ("fails", "interrupted"):
        assert f"the checkpoint {folder} was not written" in rest
        assert not (folder / ".metadata").exists()
    else:
        assert x_of(folder) == 1.0


OTHER = """
import os, sys
from disttensor.checkpoint.folder import Folder
folder = Folder(sys.argv[1])
folder.begin()
child = os.fork()  # it has a copy of what is locked
if child == 0:
    folder.forked()
    sys.stdin.read()
    os._exit(0)
print(os.getpid(), flush=True)
sys.stdin.readline()
os._exit(1)
"""


@pytest.mark.fault(46)
def test_another_job_is_named_and_once_it_is_gone_is_replaced(tmp_path: Path) -> None:
    """Whatever it has forked lives on."""
    folder = tmp_path / "c"
    with threads():
        save(program(1.0), folder)
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        command = [sys.executable, "-c", OTHER, str(folder)]
        with subprocess.Popen(command, text=True, **pipes) as running:  # type: ignore[call-overload]
            try:
                pid = running.stdout.readline().strip()
                with pytest.raises(OSError, match=rf"is being saved to by process {pid} on host \S+, since"):
                    save(program(2.0), folder)
                assert loaded(folder) == (1.0,) * 4
                running.kill()
                running.wait()
                save(program(3.0), folder)
            finally:
                running.kill()
                running.stdin.close()
    assert loaded(folder) == (3.0,) * 4
    assert not [name for name in os.listdir(folder) if name.startswith(".s")]
