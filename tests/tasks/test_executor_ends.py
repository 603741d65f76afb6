"""What becomes of calls that an Executor, ``submit`` and ``map`` have under way when a session, a script or a fork
ends."""

from __future__ import annotations

import contextlib
import logging
import re
import subprocess
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import pytest
from began import Began, tell
from doors import Door, until

import disttensor as dt

Script = Callable[..., "subprocess.CompletedProcess[str]"]


def loop(port: int) -> None:
    tell(port)
    while True:
        pass


def test_shutdown_finishes_what_an_executor_has() -> None:
    dt.init_master_worker(nodes=1, launcher="inproc")
    with Door() as door:
        executor = dt.tasks.Executor()
        first = executor.submit(until, door.port)
        futures = [executor.submit(pow, k, 2) for k in range(3)]
        first.add_done_callback(lambda _: futures.append(executor.submit(pow, 3, 2)))  # it waits for this one, too
        opening = threading.Thread(target=door.open)
        opening.start()
        dt.shutdown()
        opening.join()
    with pytest.raises(dt.DisttensorError, match="the session was shut down"):
        executor.submit(pow, 1, 1)
    executor.shutdown()
    assert [future.result(0) for future in (first, *futures)] == ["!", 0, 1, 4, 9]


def test_a_session_that_does_not_wait_tells_the_futures_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    begun = threading.Event()

    def script() -> list[Future[object]]:
        with Began(begun.set) as port:
            made = [executor.submit(loop, port), *[executor.submit(pow, k, 2) for k in range(3)]]
        assert begun.is_set()
        return made

    with contextlib.suppress(KeyError), dt.init_master_worker(nodes=1, threads=1):
        executor = dt.tasks.Executor()
        futures = script()
        raise KeyError("mine")
    executor.shutdown()
    with pytest.raises(dt.DisttensorError, match="the session was shut down before the function had ended"):
        futures[0].result(0)
    for future in futures[1:]:
        with pytest.raises(
            dt.DisttensorError, match=r"shut down before this call had begun: pow\(\), issued at \S*:\d+"
        ):
            future.result(0)
    (record,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert re.search(
        r"before 4 calls of an Executor had ended; .* issued at \S*test_executor_ends", record.getMessage()
    )
    executor.shutdown()


def test_functions_on_nodes_that_are_threads_are_not_cancelled_which_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with dt.init_master_worker(nodes=1, launcher="inproc"), Door() as door:
        work, behind = dt.submit(until, door.port, node=0), dt.submit(pow, 2, 3, node=0)
        assert not work.cancel()
        assert not behind.cancel()
        assert dt.tasks.interrupt(0) == 0
        door.open()
        assert (work.result(), behind.result()) == ("!", 8)
        assert not work.cancelled()
        assert not work.cancel()
    (record,) = caplog.records
    assert record.getMessage() == (
        "a function on node 0 was cancelled, and goes on: functions can't be interrupted on nodes that are threads of "
        "the script (launcher='inproc')"
    )


LATE = """
import atexit, os, signal, sys, threading, time
from began import Began, tell
from doors import Door, until
import disttensor as dt

def at_the_end(act):
    "Calls act when the interpreter has begun to end, and waits for executors."
    closed = dt.tasks.Executor()
    closed.shutdown()
    def wait():
        said = ""
        while "interpreter" not in said:
            try:
                closed.submit(abs, 1)
            except RuntimeError as error:
                said = str(error)
        act()
    threading.Thread(target=wait, daemon=True).start()

def note(k):
    with open({file!r}, "a") as file:
        file.write(f"{{k}} ")

def loop(port):
    tell(port)
    while True:
        pass
"""

DUE = """
@atexit.register
def last():
    try:
        kept.submit(id, None)
    except RuntimeError as error:
        print(error)

dt.init_master_worker(nodes=2, threads=1)
with Began(lambda: None) as port:  # node 1 is busy for ever
    items = dt.map(lambda k: loop(port) if k else k, [0, 1], nodes=[1])
    next(items)
dt.submit(loop, 0, node=1).add_done_callback(print)
door = Door()
kept = dt.tasks.Executor([0])
futures = [kept.submit(until, door.port), *[kept.submit(note, k) for k in range(3)]]
other = dt.tasks.Executor([0])
other.map(note, [3, 4])
other.shutdown(wait=False)
dt.tasks.Executor([0]).submit(note, 5)
dt.submit(note, 6, node=0)
futures.append(kept.submit(time.sleep, 0.3))
atexit.register(lambda: print([future.done() for future in futures]))  # before the session's end
at_the_end(door.open)
"""


def test_the_interpreters_end_finishes_what_an_executor_has(script: Script, tmp_path: Path) -> None:
    """As that of concurrent.futures: test_interpreter_shutdown, test_submit_after_interpreter_shutdown and
    test_hang_gh83386 of CPython's. What ``submit`` and ``map`` have under way does not hold it up, and is named."""
    file = tmp_path / "noted"
    done = script(LATE.format(file=str(file)) + DUE)
    assert done.returncode == 0
    assert re.fullmatch(
        r"node 1 was still busy at the end, with what was issued at \S+:\d+ in <module>.*\n", done.stderr
    )
    dones, callback, refused = done.stdout.splitlines()
    assert dones == str([True] * 5)
    assert callback == "<Work done: loop() on node 1>"
    assert refused == "cannot schedule new futures after interpreter shutdown"
    assert sorted(file.read_text().split()) == list("0123456")


PRESSED = """
dt.init_master_worker(nodes=1, threads=1)
executor = dt.tasks.Executor()
with Began(lambda: None) as port:
    running, queued = executor.submit(loop, port), [executor.submit(note, k) for k in range(3)]
running.add_done_callback(lambda f: print(type(f.exception()).__name__, flush=True))
queued[2].add_done_callback(lambda f: print(f.cancelled(), flush=True))

at_the_end(lambda: os.kill(os.getpid(), signal.SIGINT))
"""


def test_ctrl_c_at_the_interpreters_end_ends_that_and_says_so(script: Script, tmp_path: Path) -> None:
    file = tmp_path / "noted"
    done = script(LATE.format(file=str(file)) + PRESSED)
    assert done.returncode == 1, done.stderr
    assert re.search(r"CancelledError: Ctrl-C at the end of the script has cancelled \d+ calls of an Exec", done.stderr)
    assert sorted(done.stdout.split()) == ["CancelledError", "True"]
    assert not file.exists()


FORKED = """
from concurrent.futures import Future

dt.init_master_worker(nodes=2, threads=1)
executor, door = dt.tasks.Executor([0]), Door()
running = executor.submit(until, door.port)
door.wait()  # a future is running before its function is on its node
queued, work = executor.submit(pow, 2, 3), dt.submit(pow, 3, 2, node=0)
items = dt.map(pow, [2, 3], [2, 2], nodes=[1])
first = next(items)
child = os.fork()
if child == 0:
    waits = dict(
        running=running.result, queued=queued.result, work=work.result, wait=work.wait, items=lambda: list(items),
        submit=lambda: executor.submit(pow, 1, 1), another=lambda: dt.submit(pow, 1, 1), executor=dt.tasks.Executor,
    )
    assert isinstance(work.exception(), dt.errors.ForkError)
    for name, wait in waits.items():
        try:
            print("not refused:", name, wait())
        except dt.errors.ForkError:
            pass
    print("child:", work.is_completed(), work.cancel(), work.cancelled(), flush=True)
    executor.shutdown()
    sys.exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
door.open()
print(running.result(), queued.result(), work.result(), first, list(items))
print(executor.submit(pow, 2, 2).result(), dt.submit(pow, 2, 5, node=1).result())
"""


def test_a_forked_child_learns_that_it_has_none_of_them(script: Script) -> None:
    done = script(LATE.format(file="") + FORKED, PYTHONWARNINGS="ignore")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "child: True False False\n7\n! 8 9 4 [9]\n4 32\n"


#: A script whose first callback finds no thread, as where the system has no more of them.
THREADLESS = """
import threading
import disttensor as dt

start = threading.Thread.start

def lacking(thread):
    if thread.name == "disttensor-callbacks":
        threading.Thread.start = start
        raise RuntimeError("can't start new thread")
    start(thread)

with dt.init_master_worker(nodes=1, threads=1):
    called = threading.Event()
    threading.Thread.start = lacking
    try:
        dt.submit(pow, 2, 3, node=0).add_done_callback(print)
    except RuntimeError as error:
        print(error)
    dt.submit(pow, 2, 3, node=0).add_done_callback(lambda future: called.set())
    print(called.wait(60))
"""


def test_a_thread_that_the_system_lacks_is_tried_again(script: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    """Callbacks were called by nobody from then on, and the session's end raised."""
    done = script(THREADLESS)
    assert (done.returncode, done.stdout) == (0, "can't start new thread\nTrue\n"), done.stderr
