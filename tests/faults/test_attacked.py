"""Nodes that stand still, never end, flood the script, or lie: what it costs, and whom. With real nodes."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hostile_workers
import psutil
import pytest
import torch
import warm
from aftermath import Clock, aftermath, children, probe, within
from began import Began, tell
from checkout import search_path
from deafen import deafen_ends
from limits import HANG
from processes import alive_after
from telling import warned
from variants import variants

import disttensor as dt
from disttensor import testing
from disttensor.runtime.launch.starters.local import LocalLauncher
from disttensor.runtime.master import patience
from disttensor.runtime.master.node import PACED
from disttensor.runtime.protocol.bundle import PROTOCOL
from disttensor.runtime.protocol.errors import BrokenError
from disttensor.runtime.transport.zmq import ZmqSpoke


def program(text: str) -> subprocess.Popen[str]:
    """A script of its own, which is told to go on by a line."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": search_path()}
    return subprocess.Popen(
        [sys.executable, "-u", "-c", textwrap.dedent(text)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=env,
    )


def in_thread(run: Callable[[], object], raised: list[BaseException]) -> threading.Thread:
    def body() -> None:
        try:
            run()
        except BaseException as e:
            raised.append(e)

    thread = threading.Thread(target=body)
    thread.start()
    return thread


# ---- who stands still ------------------------------------------------------------------------------------------------

COUNTS = """
    import select, sys, torch, disttensor as dt
    dt.init_master_worker(nodes=2, threads=1)
    x, y = (torch.zeros(3, dtype=torch.int64, device=f"node:{node}") for node in range(2))
    print(*(node["pid"] for node in dt.nodes()), flush=True)
    count = 0
    told = False
    while not told:  # once more after the pause, at least
        told = bool(select.select([sys.stdin], [], [], 0.01)[0])
        x += 1
        y += x.to("node:1")
        count += 1
        assert y.tolist() == [count * (count + 1) // 2] * 3
        if count == 20:
            print("busy", flush=True)
    print([node["alive"] for node in dt.nodes()], count >= 20, flush=True)
"""


def tree(pid: int) -> list[int]:
    """A process and all below it."""
    return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]


#: Which processes are stopped: of the script's pid and the nodes'.
STOPPED: dict[str, Callable[[int, list[int]], list[int]]] = {
    "the script": lambda script, nodes: [script],
    "a node": lambda script, nodes: nodes[1:],
    "all of them": lambda script, nodes: tree(script),
}


@pytest.mark.fault(5, 6, 17)
@pytest.mark.parametrize("seconds", [6, pytest.param(30, marks=pytest.mark.slow)])
def test_who_stands_still_for_a_while_loses_nothing(seconds: int) -> None:
    running = {name: program(COUNTS) for name in STOPPED}
    stopped: dict[str, list[int]] = {}
    for name, script in running.items():
        assert script.stdout is not None
        nodes = [int(pid) for pid in script.stdout.readline().split()]
        assert script.stdout.readline() == "busy\n"
        stopped[name] = STOPPED[name](script.pid, nodes)
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for pids in stopped.values():
            for pid in pids:
                os.kill(pid, number)
        if number == signal.SIGSTOP:
            time.sleep(seconds)  # not to wait for something: this is how long they stand still
    for name, script in running.items():
        said, errors = script.communicate("\n", timeout=HANG)
        assert (said, script.returncode) == ("[True, True] True\n", 0), errors
        stood = re.findall(r"this script stood still for (\d+) s .*are all there\n", errors)
        if name == "a node":  # who waits for it is told, from 10 s on
            warned = errors.splitlines()
            assert bool(warned) == (seconds > 10), errors
            assert all(re.match(r"node 1 .*its process is stopped \(state T\): `kill -CONT", line) for line in warned)
        else:
            assert len(stood) == errors.count("\n") == 1, errors
            assert seconds - 1 <= int(stood[0]), errors


# ---- who floods the script -------------------------------------------------------------------------------------------

FLOODED = """
    import os, re, resource, signal, torch, disttensor as dt, aftermath, hostile_workers

    def resident():
        return int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) // 1024

    def honest():
        assert (x.exp().cpu() == torch.arange(10.0).exp()).all()

    dt.init_master_worker(nodes=1 + len(hostile_workers.SAYINGS), threads=1)
    x = torch.arange(10.0, device="node:0")
    honest()
    before = resident()
    for node, saying in enumerate(hostile_workers.SAYINGS, 1):
        y = torch.ones(10, device=f"node:{node}")
        clock = aftermath.Clock()
        try:
            dt.run(hostile_workers.flood, saying, node=node)
            while True:
                honest()
                y.sum().item()
        except dt.NodeLost as e:
            clock.check(1.0, f"the loss of one that says {saying}")
            print(f"{saying}:", str(e).splitlines()[0], flush=True)
        honest()
    try:
        os.kill(os.getpid(), signal.SIGINT)
        while True:
            honest()
    except KeyboardInterrupt:
        honest()
        print("interrupted, grown by", resident() - before, "MB")
"""


@pytest.mark.fault(35)
def test_a_node_that_floods_the_script_is_lost_and_nothing_else() -> None:
    script = program(FLOODED)
    said, errors = script.communicate(timeout=HANG)
    lines = said.splitlines()
    assert len(lines) == len(hostile_workers.SAYINGS) + 1, said + errors
    for node, (saying, line) in enumerate(zip(hostile_workers.SAYINGS, lines, strict=False), 1):
        assert re.match(rf"{saying}: node {node} \(.*\) is lost: broke the protocol: ", line), line
    assert int(lines[-1].removeprefix("interrupted, grown by ").removesuffix(" MB")) < 200
    assert (script.returncode, errors.count("SystemExit")) == (1, 1)  # a failure that nobody asked about, told once


#: What is asked of a node whose replies of a kind are pickles.
ASKED: dict[str, Callable[[torch.Tensor], object]] = {
    "": lambda x: x.sum().item(),
    "Result": lambda x: dt.run(int, node=1),
    "Answer": lambda x: x.sum().item(),
    "Failed": lambda x: x.gather(0, torch.tensor([7], device="node:1")).sum().item(),
}


@pytest.mark.fault(34)
@pytest.mark.parametrize("kind", ASKED)
def test_pickles_of_a_node_with_its_key_are_not_opened(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with dt.init_master_worker(nodes=2, threads=1):
        x = torch.ones(3, device="node:1")
        x.sum().item()
        monkeypatch.chdir(tmp_path)
        with within(1.0):
            with contextlib.suppress(dt.DisttensorError):  # its own result may be armed already
                dt.run(hostile_workers.arm, kind, node=1)
            with pytest.raises(RuntimeError):
                ASKED[kind](x)
        probe(0)
        assert not list(tmp_path.iterdir())


# ---- who lies about transfers ----------------------------------------------------------------------------------------

#: Where node 1's tensor goes, and what is raised where one with another number has come.
WAYS: dict[str, tuple[Callable[[torch.Tensor], object], type[dt.DisttensorError]]] = {
    "to the script": (torch.Tensor.cpu, dt.errors.BrokenError),
    "between nodes": (lambda x: x.to("node:0").sum().item(), dt.errors.RemoteError),
}


@pytest.fixture
def liar() -> Iterator[torch.Tensor]:
    """A tensor on node 1 of two, whose connections are made."""
    with dt.init_master_worker("tcp", nodes=2, threads=1):
        x = torch.ones(10_000, device="node:1")  # smaller ones come to the script without a transfer
        for run, _ in WAYS.values():
            run(x)
        yield x


@pytest.mark.fault(35)
@pytest.mark.parametrize("way", WAYS)
def test_a_wrong_number_of_a_transfer_ends_its_connection_only(way: str, liar: torch.Tensor) -> None:
    dt.run(hostile_workers.send_as, 1_000_003, 1, node=1)
    run, error = WAYS[way]
    with within(1.0), pytest.raises(error, match=r"rank 1 sent transfer \d+ where \d+ was due"):
        run(liar)
    assert (liar + 1).sum().item() == 20_000  # what its commands answer is not what it sends
    probe(0)


def test_a_number_that_nobody_was_told_holds_a_node_up_until_the_sender_ends(liar: torch.Tensor) -> None:
    """It has a place in no order, so it may be meant for later; behind it nothing is read."""
    y = torch.ones(3, device="node:0")
    dt.run(hostile_workers.send_as, 7, 0, node=1)
    waiting = liar.to("node:0") * 2
    with pytest.raises(TimeoutError):
        dt.synchronize(0, timeout=0.5)
    dt.kill(1)
    assert (y + 1).sum().item() == 6
    with pytest.raises(dt.NodeLost, match=r"node 1 .* is lost: killed by disttensor\.kill"):
        waiting.sum().item()
    with pytest.raises(dt.NodeLost):
        liar.sum().item()


# ---- who lies from the start -----------------------------------------------------------------------------------------

#: What is refused in a Hello, in words.
REFUSED = {
    "addresses": "an address of a data channel is at most 4096 printable characters",
    "devices": "60001 devices are over the limit of 64 CUDA devices",
    "host": r"the node's host is at most 255 printable characters",
}


@pytest.fixture
def hostile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Has workers be those of an entry of hostile_workers; gives where node 1 says when it did so."""

    def choose(entry: str) -> Path:
        make = LocalLauncher.__init__
        monkeypatch.setattr(LocalLauncher, "__init__", lambda self: make(self, f"hostile_workers:{entry}"))
        monkeypatch.setenv(hostile_workers.STAMP, str(tmp_path / "stamp"))
        return tmp_path / "stamp"

    return choose


@contextlib.contextmanager
def no_session_is_left() -> Iterator[None]:
    """After a session that does not start this process has nothing of it: no process, and no descriptors."""
    before, opened = children(os.getpid(), warm.held()[0]), len(os.listdir("/proc/self/fd"))
    yield
    assert alive_after(HANG, children(os.getpid(), warm.held()[0]) - before) == []
    assert len(os.listdir("/proc/self/fd")) <= opened + 8


@pytest.mark.fault(35)
@pytest.mark.parametrize("lie", REFUSED)
def test_a_worker_whose_hello_is_a_lie_is_refused_by_name(lie: str, hostile: Callable[[str], Path]) -> None:
    stamp = hostile(lie)
    with no_session_is_left():
        with pytest.raises(dt.errors.StartError, match=f"node 1.*broke the protocol: {REFUSED[lie]}") as caught:
            dt.init_master_worker("tcp", nodes=2, threads=1)
        Clock(stamp.read_text()).check(1.0, lie)
    assert len(str(caught.value)) < 2000
    assert "\x1b" not in str(caught.value)


#: What is said of a node of another version.
VERSIONS = {
    "torch": rf"node 1 on .* has torch 1.2.3, .* has torch {re.escape(torch.__version__)}: install one version",
    "protocol": rf"node 1 on .* has protocol {PROTOCOL + 1}, .* \(protocol {PROTOCOL}\): install one version",
}


@pytest.mark.fault(39)
@pytest.mark.parametrize("other", VERSIONS)
def test_another_version_is_refused_before_the_others_have_come(other: str, hostile: Callable[[str], Path]) -> None:
    stamp = hostile(other)
    with no_session_is_left():
        with pytest.raises(dt.errors.StartError, match=VERSIONS[other]):
            dt.init_master_worker("tcp", nodes=2, threads=1)
        Clock(stamp.read_text()).check(1.0, other)


@pytest.mark.fault(42)
def test_one_of_eight_does_not_start(hostile: Callable[[str], Path]) -> None:
    """One error has all that there is to say, and the others are ended."""
    stamp = hostile("broken")
    with no_session_is_left():
        with pytest.raises(
            dt.errors.StartError, match=rf"^node 1 on {re.escape(socket.gethostname())} did not start: "
        ) as caught:
            dt.init_master_worker("tcp", nodes=8, threads=1)
        Clock(stamp.read_text()).check(5.0, "the error")
    *lines, last = str(caught.value).splitlines()
    assert last == "  ImportError: no such library"
    assert lines[1] == "its last output:"
    assert len(lines) == 2 + 19


@pytest.mark.fault(31)
def test_data_ports_that_cannot_be_reached_are_named_at_the_first_copy(hostile: Callable[[str], Path]) -> None:
    """Neither end can call the other; both go on with what their commands make."""
    hostile("unreachable")
    with dt.init_master_worker("tcp", nodes=3, threads=1), aftermath(2):
        x = torch.ones(3, device="node:0")
        unreached = f"cannot reach rank [01] at {re.escape(hostile_workers.UNREACHABLE)}"
        with within(10.0), pytest.raises(dt.DisttensorError, match=unreached):
            x.to("node:1").sum().item()
        for node in range(2):
            assert torch.ones(3, device=f"node:{node}").sum().item() == 3
        del x


@pytest.mark.fault(26)
@pytest.mark.parametrize(
    "silence", [(1, 2, 60), pytest.param((10, 15, 60), marks=pytest.mark.slow)], ids=["short", "default"]
)
def test_a_node_whose_replies_are_lost(silence: tuple[float, float, float]) -> None:
    """It gets its commands and answers; a filter of the kernel's drops what arrives here."""
    lost = silence[1]
    with dt.init_master_worker(nodes=3, threads=1, silence=silence), aftermath(1, 2):
        x = torch.ones(3, device="node:0")
        probe(0)
        ends = psutil.Process(dt.nodes()[0]["pid"]).net_connections("tcp")
        assert sum(deafen_ends(end.laddr.port, at=False) for end in ends) >= 1
        unheard = "nothing that it was sent has arrived"
        with within(lost + 2.5 + 0.5), pytest.raises(dt.NodeLost, match=unheard) as caught:  # two looks
            x.sum().item()
        assert "node 0" in str(caught.value)
        with within(0.5), pytest.raises(dt.NodeLost):
            dt.synchronize(node=0)
        del x, caught


# ---- who dies in the middle of a tensor ------------------------------------------------------------------------------


def await_full(pid: int) -> None:
    """Waits until a connection of a process's has more to send than the other end takes: a tensor is half written."""
    deadline = time.monotonic() + HANG
    while True:
        inodes = {c[8:-1] for c in _links(pid) if c.startswith("socket:[")}
        lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        if any(line[9] in inodes and int(line[4].partition(":")[0], 16) > 1 << 16 for line in lines):
            return
        assert time.monotonic() < deadline, "nothing is half written"


def _links(pid: int) -> Iterator[str]:
    for entry in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            yield os.readlink(f"/proc/{pid}/fd/{entry}")


@pytest.mark.fault(30)
@pytest.mark.parametrize("dies", ["sender", "receiver"])
def test_a_node_that_dies_in_the_middle_of_a_tensor(dies: str) -> None:
    """What it would have filled is poison, the source of what it would have got is as it was; both ranks are named."""
    with dt.init_master_worker("tcp", nodes=3, threads=1):
        source, target = (0, 1) if dies == "receiver" else (1, 0)
        kept = torch.arange(1 << 24, device="node:0")  # more than sockets hold
        x = torch.arange(1 << 24, device=f"node:{source}")
        x[: 1 << 14].to(f"node:{target}").cpu()
        pids = [int(node["pid"]) for node in dt.nodes()]
        probe(0)
        with aftermath(2):
            os.kill(pids[target], signal.SIGSTOP)
            moved = x.to(f"node:{target}")
            await_full(pids[source])
            with within(5.0):
                os.kill(pids[1], signal.SIGKILL)
                os.kill(pids[0], signal.SIGCONT)
                with pytest.raises(dt.NodeLost, match=r"node 1 .*SIGKILL") as caught:
                    moved.sum().item()
            if dies == "sender":
                assert "rank 1" in str(caught.value) + "".join(getattr(caught.value, "__notes__", ())), caught.value
            with pytest.raises(dt.NodeLost):  # still
                (moved + 1).cpu()
            assert torch.equal((x if dies == "receiver" else kept).cpu(), torch.arange(1 << 24))
            probe(0)
            del moved, caught


@pytest.mark.fault(14)
@pytest.mark.usefixtures("cluster")
def test_a_node_that_starts_again_is_refused_and_its_tensors_stay_lost() -> None:
    x = torch.ones(3, device="node:1")
    bundle = dt.run(hostile_workers.credentials, node=1)
    with aftermath(0):
        os.kill(int(dt.nodes()[1]["pid"]), signal.SIGKILL)
        with pytest.raises(dt.NodeLost, match="SIGKILL"):
            dt.run(hold, node=1)
        with within(1.0):
            with pytest.raises(BrokenError, match="does not come back"):
                ZmqSpoke(*bundle)
            with pytest.raises(dt.NodeLost, match="SIGKILL"):
                x.cpu()
        assert [node["alive"] for node in dt.nodes()] == [True, False]


# ---- who never ends --------------------------------------------------------------------------------------------------


@pytest.fixture
def cluster() -> Iterator[None]:
    with dt.init_master_worker(nodes=2, threads=1):
        probe(0)  # connections are made at first use: have them before the test looks for leaks
        yield


def nap() -> None:
    import time

    time.sleep(3600)


def hold() -> None:
    import ctypes
    import os

    ctypes.PyDLL(None).read(os.pipe()[0], ctypes.create_string_buffer(1), 1)  # nobody writes; no other thread runs


def reading(fifo: str) -> tuple[int, int]:
    """Reads a byte in C code that knows nothing of signals; gives what read(2) has returned, and errno."""
    import ctypes
    import os

    source = os.open(fifo, os.O_RDONLY)
    read = ctypes.CDLL(None, use_errno=True).read
    return read(source, ctypes.create_string_buffer(1), 1), ctypes.get_errno()


def search() -> None:
    import re

    re.match(r"(a*)*b", "a" * 64)


#: How a node comes to answer nothing: what is done to it, and what has to be said of it, with the lines shown.
STUCK: dict[str, tuple[Callable[[], None] | None, list[str]]] = {
    "stopped": (None, [r"its process is stopped \(state T\): `kill -CONT {pid}`"]),
    "asleep": (nap, [r"it runs a function \(command \d+\), issued at {line}", r"test_attacked\.py.* in nap"]),
    "holds the GIL": (hold, [r"it runs a function", "it holds the GIL", r"issued at {line}", r" in hold"]),
    "searches": (search, [r"it runs a function", "it holds the GIL", r"issued at {line}", r" in search"]),
}


@pytest.mark.usefixtures("cluster")
def test_a_look_ends_no_call_of_c_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The signal that asks for the stacks has the kernel go on with what it can go on with."""
    monkeypatch.setattr(patience, "PATIENCE", 0.3)
    fifo = str(tmp_path / "fifo")
    os.mkfifo(fifo)
    results: list[Any] = []
    with warned(r"it runs a function", r"test_attacked\.py.* in reading") as said:

        def run() -> None:
            results.append(dt.run(reading, fifo, node=1))
            said.there.set()  # it has ended, before anything was written

        waiting = threading.Thread(target=run)
        waiting.start()
        with open(fifo, "wb", buffering=0) as sink:
            assert said.there.wait(HANG), said.texts
            sink.write(b"x")
        waiting.join()
    assert results == [(1, 0)]


@pytest.mark.fault(4, 7)
@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("way", STUCK)
def test_a_node_that_never_answers_is_explained_and_can_be_ended(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert patience.PATIENCE == 10.0
    monkeypatch.setattr(patience, "PATIENCE", 0.3)
    with aftermath(0):
        never_answers(way, *STUCK[way])


def never_answers(way: str, function: Callable[[], None] | None, patterns: list[str], node: int = 1) -> None:
    pid = int(dt.nodes()[node]["pid"])
    x = torch.ones(3, device=f"node:{node}")
    assert x.sum().item() == 3
    wait = lambda: dt.run(function, node=node) if function else x.sum().item()  # noqa: E731
    line = rf"\S*test_attacked\.py:{wait.__code__.co_firstlineno}\b"
    raised: list[BaseException] = []
    if function is None:
        testing.stop(node)
    about = [rf"^node {node} \(host \S+, pid {pid}\) has not answered for \d+ s: "]
    about += [pattern.format(pid=pid, line=line) for pattern in patterns]
    waiting: list[threading.Thread] = []
    try:
        with warned(*about) as said:
            waiting.append(in_thread(wait, raised))
            assert said.there.wait(HANG), said.texts
        with pytest.raises(TimeoutError, match=rf"node {node} has not answered within 0\.2 s"):
            dt.synchronize(node, timeout=0.2)
        waiting.append(in_thread(lambda: (x + 1).cpu(), raised))
        probe(0)
    finally:
        dt.kill(node)
        for thread in waiting:
            thread.join(HANG)
    assert [type(e) for e in raised] == [dt.NodeLost] * 2
    for e in raised:
        assert re.search(rf"node {node} .*killed by disttensor\.kill, at \S*test_attacked\.py:\d+", str(e))
    assert alive_after(HANG, [pid]) == []
    with pytest.raises(dt.NodeLost):
        dt.kill(node)


class Sleeper:
    def nap(self) -> None:
        sinking(30)


def sinking(depth: int) -> None:
    if depth:
        sinking(depth - 1)
    else:
        nap()


#: Ways in which a function runs in another thread than the one that takes commands, and what it is called then.
BESIDE: dict[str, tuple[Callable[[], Any], str]] = {
    "an actor's method": (lambda: dt.actor(Sleeper, node=1).nap(), r"Sleeper\.nap\(\)"),
    "beside": (lambda: dt.submit(sinking, 30, node=1, beside=True), r"sinking\(\)"),
    "on a node with streams": (lambda: dt.submit(sinking, 30, node=1), r"sinking\(\)"),
}


@pytest.mark.fault(4, 7)
@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("way", BESIDE)
def test_a_function_of_another_thread_is_explained(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is shown with its frames down to the outermost one of the user's, and the end of its node names it."""
    monkeypatch.setattr(patience, "PATIENCE", 0.3)
    begin, what = BESIDE[way]
    line = rf"\S*test_attacked\.py:{begin.__code__.co_firstlineno} in <lambda>"
    with aftermath(0):
        stream = dt.Stream(node=1)  # kept: a node without one runs functions where it takes commands
        with dt.stream(stream):
            assert torch.ones(3, device="node:1").sum().item() == 3
        raised: list[BaseException] = []
        sunk = r"  File .* in nap\n  File .* in sinking\n  File .* in sinking\n  \[the same line 29 more times\]"
        shown = rf"for \d+ s\n{sunk}(\n  File .* in nap)?$"
        with warned(rf"it runs a function \(command \d+\) on a stream, issued at {line}, {shown}") as said:
            waiting = in_thread(lambda: begin().result(), raised)
            assert said.there.wait(HANG), said.texts
        assert not re.search(r"spoke\.py|lane", said.texts[-1])
        os.kill(dt.nodes()[1]["pid"], signal.SIGKILL)
        waiting.join(HANG)
        assert [type(e) for e in raised] == [dt.NodeLost]
        assert re.search(rf"SIGKILL.* while it ran {what}, issued at {line}", str(raised[0])), raised


@pytest.mark.parametrize("backend", variants(["auto", "tcp"]))
def test_who_takes_part_in_a_collective_is_said_to_wait_for_the_one_that_does_not(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of three of which one stands still, whichever the script asks. One may wait for one that waits for it."""
    monkeypatch.setattr(patience, "PATIENCE", 0.3)
    with dt.init_master_worker(backend, nodes=3, threads=1):
        xs = [torch.ones(4, device=f"node:{node}") for node in range(3)]
        dt.all_reduce(xs)
        dt.synchronize()
        testing.stop(2)
        raised: list[BaseException] = []
        awaited: dict[int, int] = {}
        try:
            for node in (0, 1):
                words = rf"^node {node} .*: it takes part in a collective \(command \d+\), .*; it waits for node (\d)"
                with warned(words) as said:
                    if not node:
                        dt.all_reduce(xs)
                    thread = in_thread(xs[node].tolist, raised)
                    assert said.there.wait(HANG), said.texts
                awaited[node] = next(int(found[1]) for text in said.texts if (found := re.search(words, text)))
        finally:
            testing.resume(2)
        thread.join(HANG)
        assert awaited in ({0: 2, 1: 2}, {0: 1, 1: 2}, {0: 2, 1: 0})
        assert [x.tolist() for x in xs] == [[9.0] * 4] * 3
        assert raised == []


def stuck(port: int) -> None:
    import ctypes

    mutex, lock = ctypes.create_string_buffer(64), ctypes.CDLL(None).pthread_mutex_lock
    told = False
    while True:
        with contextlib.suppress(KeyboardInterrupt):  # that comes before it is in C
            if not told:
                tell(port)
                told = True
            lock(mutex)  # the second time no signal ends it, and the GIL is free


def work(seconds: float) -> None:
    import time

    time.sleep(seconds)


@pytest.mark.usefixtures("cluster")
def test_a_node_that_is_slow_beside_the_others_is_named_with_by_how_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "PATIENCE", 0.3)
    for node, seconds in ((0, 1e-3), (1, 2e-2)):
        for _ in range(PACED):
            dt.run(work, seconds, node=node)
    raised: list[BaseException] = []
    slow = r"its commands have taken \S+ (ms|s) each, those of the other nodes \S+ (us|ms): it is \d+\.\d times as slow"
    for node in (1, 0):
        with warned(rf"^node {node} ") as said, Began(lambda: said.there.wait(HANG)) as port:
            thread = in_thread(lambda: dt.run(told_and_asleep, port, node=node), raised)  # noqa: B023 - joined here
        dt.tasks.interrupt(node)
        thread.join(HANG)
        assert said.there.is_set(), said.texts
        assert bool(re.search(slow, said.texts[-1])) == (node == 1)
    assert [type(e) for e in raised] == [dt.errors.CancelledError] * 2


def told_and_asleep(port: int) -> None:
    tell(port)
    nap()


@pytest.mark.usefixtures("cluster")
def test_what_goes_on_although_it_was_cancelled_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "UNHEEDED", 0.2)
    x, pid = torch.ones(3, device="node:1"), dt.nodes()[1]["pid"]
    raised: list[BaseException] = []
    patterns = [
        rf"^node 1 \(host \S+, pid {pid}\): stuck\(\), issued at \S*test_attacked\.py:\d+ in ",
        r"was cancelled \d+ s ago and goes on; .*disttensor\.kill\(1\) ends the node",
        r"test_attacked\.py.* in stuck",
    ]
    with warned(*patterns) as said, Began(lambda: dt.tasks.interrupt(1)) as port:
        thread = in_thread(lambda: dt.run(stuck, port, node=1), raised)
        assert said.there.wait(HANG), said.texts
    probe(0)
    dt.kill(1)
    thread.join(HANG)
    assert [type(e) for e in raised] == [dt.NodeLost]
    with pytest.raises(dt.NodeLost):
        dt.tasks.interrupt(1)
    with pytest.raises(dt.NodeLost):
        x.sum().item()
