"""Functions that are interrupted on their nodes: by Ctrl-C at the script, and by ``interrupt``."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from began import Began, tell
from equal import same
from limits import HANG
from spies import spy

import disttensor as dt
from disttensor.session import current


def loop(port: int) -> None:
    tell(port)
    while True:
        pass


def nap(port: int) -> None:
    import time

    tell(port)
    time.sleep(3600)


def lock(port: int) -> None:
    mutex = threading.Lock()
    tell(port)
    with mutex, mutex:
        pass


CHILD = """
import socket, sys, time
socket.create_connection(("127.0.0.1", int(sys.stdin.read()))).close()
time.sleep(3600)
"""


def child(port: int) -> None:
    process = subprocess.Popen([sys.executable, "-c", CHILD], stdin=subprocess.PIPE, text=True)
    try:
        process.communicate(str(port))
    finally:
        process.kill()
        process.wait()


def read(port: int) -> None:
    tell(port)
    os.read(os.pipe()[0], 1)


def stubborn(port: int) -> int:
    try:
        nap(port)
    except KeyboardInterrupt:
        return 7
    return 0


WAYS: list[Callable[[int], None]] = [loop, nap, lock, child, read]


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    with dt.init_master_worker(nodes=2, threads=1):
        for node in (0, 1):  # connections are made at first use: have them before the tests look for leaks
            usable(node, dt.run(os.getpid, node=node))
        yield


def ctrl_c() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def usable(node: int, pid: int) -> None:
    """Computes on the node, and looks that its process is the one that it was, with nothing left."""
    x = torch.linspace(-1, 1, 1000)
    same(torch.exp(x.to(f"node:{node}")), torch.exp(x))
    assert dt.run(os.getpid, node=node) == pid
    dt.synchronize()  # a function that the script itself has ended is no error


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("way", WAYS)
def test_ctrl_c_ends_the_function(way: Callable[[int], None]) -> None:
    pid = dt.run(os.getpid, node=1)
    with Began(ctrl_c) as port, pytest.raises(KeyboardInterrupt):
        dt.run(way, port, node=1)
    usable(1, pid)


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("way", WAYS)
def test_a_thread_that_waits_for_an_interrupted_function_is_told(way: Callable[[int], None]) -> None:
    pid = dt.run(os.getpid, node=1)
    counted: list[int] = []
    with (
        Began(lambda: counted.append(dt.tasks.interrupt(1))) as port,
        pytest.raises(dt.errors.CancelledError) as caught,
    ):
        dt.run(way, port, node=1)
    assert str(caught.value) == f"{way.__name__}() was cancelled"
    notes = "\n".join(caught.value.__notes__)
    assert re.search(r"issued: \S*test_cancelled\.py:\d+ in test_a_thread", notes)
    assert f"in {way.__name__}" in notes
    assert counted == [1]
    assert dt.tasks.interrupt(1) == 0
    usable(1, pid)


@pytest.mark.usefixtures("cluster")
def test_all_nodes_of_a_call_are_interrupted() -> None:
    pids = dt.run(os.getpid, node=[0, 1])
    with Began(ctrl_c, times=2) as port, pytest.raises(KeyboardInterrupt):
        dt.run(loop, port, node=[0, 1])
    for node, pid in enumerate(pids):
        usable(node, pid)


@pytest.mark.usefixtures("cluster")
def test_a_function_on_a_stream_is_interrupted() -> None:
    pid = dt.run(os.getpid, node=0)
    for interrupt, error in ((ctrl_c, KeyboardInterrupt), (lambda: dt.tasks.interrupt(0), dt.errors.CancelledError)):
        with dt.Stream("node:0"), Began(interrupt) as port, pytest.raises(error):
            dt.run(loop, port, node=0)
        usable(0, pid)


@pytest.mark.usefixtures("cluster")
def test_what_a_function_makes_of_it_is_its_result() -> None:
    with Began(lambda: dt.tasks.interrupt(1)) as port:
        assert dt.run(stubborn, port, node=1) == 7


@pytest.mark.usefixtures("cluster")
def test_a_function_that_waits_for_its_turn_does_not_begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pid = dt.run(os.getpid, node=1)
    link = current.session().link
    raised, began, told = list[BaseException](), threading.Event(), list[int]()

    def cancels(rank: int, request: int) -> object:
        told.append(request)
        return cancel(rank, request)

    def first(port: int) -> None:
        try:
            dt.run(loop, port, node=1)
        except BaseException as e:
            raised.append(e)

    def waits(*args: object, **kwargs: object) -> object:
        if threading.current_thread() is not thread:  # which may come to wait when its function has long begun
            assert dt.tasks.interrupt(1) == 2  # the second function has been sent by now
        return wait(*args, **kwargs)

    with Began(began.set) as port:
        thread = threading.Thread(target=first, args=(port,))
        thread.start()
        assert began.wait(HANG)
        wait = spy(monkeypatch, link.waiting, "wait", waits)
        cancel = spy(monkeypatch, link, "cancel", cancels)
        with pytest.raises(dt.errors.CancelledError, match=r"^Path\.touch\(\) was cancelled before it began\n"):
            dt.run(Path.touch, tmp_path / "begun", node=1)
        monkeypatch.undo()
        thread.join()
    assert [str(e) for e in raised] == ["loop() was cancelled"]
    assert not (tmp_path / "begun").exists()
    assert told[0] > told[1]  # or the second begins once the first has been interrupted
    usable(1, pid)


PROGRAM = """
import itertools, os, random, signal, threading, torch, disttensor as dt

def work(n):
    return sum(range(n))

def forever():
    while True:
        pass

def strike():
    rng = random.Random(0)
    while not over.wait(rng.uniform(0, 0.01)):
        dt.tasks.interrupt(0)

dt.init_master_worker(nodes=1, threads=1)
x, over, rng, ended = torch.arange(5.0, device="node:0"), threading.Event(), random.Random(1), [0, 0]
pid = dt.run(os.getpid, node=0)
thread = threading.Thread(target=strike)
thread.start()
stream = dt.Stream("node:0")
for i in itertools.count():
    if i >= 400 and min(ended) > 3:  # a machine that is busy elsewhere lets few interrupts come in time
        break
    n = rng.randrange(200_000)
    try:
        with stream if i % 2 else dt.node(0):
            assert dt.run(work, n, node=0) == n * (n - 1) // 2
        ended[0] += 1
    except dt.errors.CancelledError:
        ended[1] += 1
    assert (x + i).tolist() == [i, i + 1, i + 2, i + 3, i + 4]
over.set()
thread.join()
assert dt.run(os.getpid, node=0) == pid
threading.Timer(0.2, os.kill, [os.getpid(), signal.SIGINT]).start()
try:
    dt.run(forever, node=0)
except KeyboardInterrupt:
    print("interrupted")
"""


def test_interrupts_at_any_moment_end_no_node(script: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    done = script(PROGRAM)
    assert (done.returncode, done.stdout, done.stderr) == (0, "interrupted\n", "")
