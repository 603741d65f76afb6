"""Waits for functions that others end: Ctrl-C, a node that stands still; and functions that heed no cancel."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from began import Began, tell
from doors import Door, until
from limits import HANG
from side_channels import not_yet_connected
from telling import warned

import disttensor as dt
from disttensor import testing


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    with dt.init_master_worker(nodes=2, threads=1):
        for node in range(2):  # connections are made at first use: have them before the tests look for leaks
            torch.ones(1 << 14).to(f"node:{node}").cpu()
        yield


def add(a: Any, b: Any) -> Any:
    return a + b


def tell_and_wait(told: str, door: str) -> None:
    """Waits in one call of C's, which tells when it has begun: nothing can interrupt it between the two."""
    os.system(f"echo begun > {told}; read line < {door}")


def loop(port: int) -> None:
    tell(port)
    while True:
        pass


def forever() -> None:
    while True:
        pass


@contextlib.contextmanager
def ctrl_c_in_a_wait() -> Iterator[None]:
    """Ctrl-C comes once the block's thread waits for a node; the block has to end by it."""
    waiting = threading.Event()

    def press() -> None:
        if waiting.wait(HANG):
            os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=press)
    thread.start()
    try:
        with testing.at("wait", waiting.set), pytest.raises(KeyboardInterrupt):
            yield
    finally:
        thread.join()


WAITS: dict[str, Callable[[Any], object]] = {
    "result": lambda work: work.result(),
    "result with a limit": lambda work: work.result(HANG),
    "wait": lambda work: work.wait(),
    "exception": lambda work: work.exception(),
    "as_completed": lambda work: next(dt.futures.as_completed([work])),
    "an argument of another node's": lambda work: dt.submit(add, work, "?", node=0),
}


@pytest.mark.parametrize("name", WAITS)
def test_ctrl_c_ends_the_wait_and_not_the_function(name: str) -> None:
    with Door() as door:
        work = dt.submit(until, door.port, node=1)
        for _ in range(2):
            with ctrl_c_in_a_wait():
                WAITS[name](work)
            assert not work.is_completed()
        door.open()
        assert work.result() == "!"
    assert dt.submit(add, 1, 2, node=0).result() == 3
    dt.synchronize()


class Keeper:
    """Keeps what it was told, after a while."""

    def __init__(self, door: int = 0) -> None:
        self.lines = [until(door)] if door else []

    def add(self, line: str, door: int = 0) -> list[str]:
        self.lines.append(until(door) if door else line)
        return list(self.lines)


def leave(actor: Any) -> None:
    with actor:
        pass


ACTOR_WAITS: dict[str, Callable[[Any, Any, Any], object]] = {
    "what runs": lambda actor, running, queued: running.result(),
    "what is queued": lambda actor, running, queued: queued.exception(),
    "both": lambda actor, running, queued: list(dt.futures.as_completed([queued, running])),
    "an argument of another node's": lambda actor, running, queued: dt.submit(len, running, node=0),
    "the end of its block": lambda actor, running, queued: leave(actor),
    "its end": lambda actor, running, queued: actor.close().wait(),
}


@pytest.mark.parametrize("name", ACTOR_WAITS)
def test_ctrl_c_twice_ends_the_wait_and_not_the_actor(name: str) -> None:
    with Door() as door:
        actor = dt.actor(Keeper, node=1)
        running, queued = actor.add("", door.port), actor.add("a")
        for _ in range(2):
            with ctrl_c_in_a_wait():
                ACTOR_WAITS[name](actor, running, queued)
            assert not running.is_completed()
            assert not queued.is_completed()
        door.open()
        assert queued.result() == ["!", "a"]
        assert running.result() == ["!"]
    if "end" in name:
        assert actor.close().wait()
    else:
        assert actor.add("b").result() == ["!", "a", "b"]
    assert dt.run(add, 1, 2, node=1) == 3
    dt.synchronize()


def test_ctrl_c_twice_while_an_actor_is_made() -> None:
    with Door() as door:
        actor = dt.actor(Keeper, door.port, node=1)
        for wait in (actor.ready.result, actor.add("a").result):
            with ctrl_c_in_a_wait():
                wait()
        door.open()
        assert actor.add("b").result() == ["!", "a", "b"]
    dt.synchronize()


def test_ctrl_c_ends_another_function_of_its_node_and_not_a_method() -> None:
    with Door() as door:
        actor = dt.actor(Keeper, node=1)
        running = actor.add("", door.port)
        for _ in range(2):
            with ctrl_c_in_a_wait():
                dt.run(forever, node=1)
            assert not running.is_completed()
        door.open()
        assert running.result() == ["!"]
    assert actor.add("a").result() == ["!", "a"]
    dt.synchronize()


def test_what_ctrl_c_has_left_can_be_cancelled() -> None:
    begun = threading.Event()
    with Began(begun.set) as port:
        work = dt.submit(loop, port, node=1)
        assert begun.wait(HANG)
    with ctrl_c_in_a_wait():
        work.result()
    assert work.cancel()
    with pytest.raises(dt.errors.CancelledError, match=r"^loop\(\) was cancelled"):
        work.result()
    assert work.cancelled()
    assert dt.run(add, 1, 2, node=1) == 3


@pytest.mark.parametrize("beside", [False, True])
def test_a_cancel_before_the_side_channel_is_up_comes_when_it_is(beside: bool) -> None:
    begun = threading.Event()
    with not_yet_connected():
        with Began(begun.set) as port:
            work = dt.submit(loop, port, node=1, beside=beside)
            behind = dt.submit(add, work, 2, node=1)
            assert begun.wait(HANG)
        assert behind.cancel()
        assert work.cancel()
        with pytest.raises(TimeoutError):
            work.result(0.05)
    for each in (work, behind):
        with pytest.raises(dt.errors.CancelledError, match="was cancelled"):
            each.result(HANG)
    assert dt.run(add, 1, 2, node=1) == 3


def test_a_node_that_stands_still_is_waited_for_as_long_as_was_said() -> None:
    testing.stop(1)
    try:
        endless, work = dt.submit(forever, node=1), dt.submit(add, 1, 2, node=1)
        with pytest.raises(TimeoutError, match=r"add\(\) on node 1 has not ended within 0\.05 s; it goes on"):
            work.result(0.05)
        assert endless.cancel()
        assert dt.submit(add, 1, 2, node="any").result() == 3  # the other one goes on
    finally:
        testing.resume(1)
    assert work.result() == 3
    with pytest.raises(dt.errors.CancelledError, match=r"forever\(\) was cancelled"):
        endless.result()


def test_who_heeds_no_cancel_is_named(tmp_path: Path) -> None:
    """What waits in the kernel, beside a node's own thread, is not interrupted, as no C library is."""
    told, door = tmp_path / "told", tmp_path / "door"
    for path in (told, door):
        os.mkfifo(path)
    with testing.limits(unheeded=0.1), warned("goes on") as log:
        work = dt.submit(tell_and_wait, str(told), str(door), node=1, beside=True)
        assert told.read_text() == "begun\n"
        assert work.cancel()
        assert log.there.wait(HANG)
        assert not work.is_completed()
        door.write_text("go on\n")  # back in Python, it is interrupted
        with pytest.raises(dt.errors.CancelledError, match=r"tell_and_wait\(\) was cancelled"):
            work.result()
    (text,) = [text for text in log.texts if "goes on" in text]
    pid = dt.nodes()[1]["pid"]
    assert re.match(
        rf"node 1 \(host \S+, pid {pid}\): tell_and_wait\(\), issued at \S*test_submit_waits\.py:\d+ in ", text
    )
    assert re.search(r"was cancelled \d+ s ago and goes on; .*disttensor\.kill\(1\) ends the node", text)
