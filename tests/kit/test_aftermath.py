"""The after-check of faults finds what is left of each kind, and lets go what ends; times leave a busy machine out."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import aftermath as kit
import pytest
import torch
from aftermath import Clock, aftermath, within

import disttensor as dt


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    with dt.init_master_worker(nodes=2, threads=1):
        for node in range(2):
            kit.probe(node)
        yield


class Unraisable:
    def __del__(self) -> None:
        raise ValueError("in a finalizer")


def opened() -> Callable[[], None]:
    ends = os.pipe()

    def close() -> None:
        for end in ends:
            os.close(end)

    return close


def opened_on_a_node() -> Callable[[], None]:
    def leave() -> list[int]:
        import os

        return list(os.pipe())

    def close(ends: list[int]) -> None:
        import os

        for end in ends:
            os.close(end)

    ends = dt.run(leave, node=1)
    return lambda: dt.run(close, ends, node=1)


def threaded() -> Callable[[], None]:
    event = threading.Event()
    thread = threading.Thread(target=event.wait)
    thread.start()

    def end() -> None:
        event.set()
        thread.join()

    return end


def forked() -> Callable[[], None]:
    def start() -> int:
        import subprocess

        return subprocess.Popen(["sleep", "600"]).pid

    def end(pid: int) -> None:
        import os

        os.kill(pid, 9)
        os.waitpid(pid, 0)

    pid = dt.run(start, node=0)
    return lambda: dt.run(end, pid, node=0)


def kept() -> Callable[[], None]:
    tensors = [torch.ones(3, device="node:1") + 1]
    return tensors.clear


def raised() -> Callable[[], None]:
    Unraisable()
    return lambda: None


LEFT = {
    "a descriptor": (opened, "the script has 2 more of: descriptor of pipe"),
    "a descriptor of a node": (opened_on_a_node, "node 1 has 2 more of: descriptor of pipe"),
    "a thread": (threaded, "the script has 1 more of: thread"),
    "a process": (forked, r"process \d+ is still there"),
    "a tensor": (kept, r"node 1 has \d+ tensors, and had \d+"),
    "an exception": (raised, "in a finalizer"),
}


@pytest.mark.parametrize("what", LEFT)
def test_what_is_left_is_found(what: str) -> None:
    make, said = LEFT[what]
    undo: list[Callable[[], None]] = []
    with pytest.raises(AssertionError, match=said), aftermath(0, 1, seconds=0.0):
        undo.append(make())
    undo[0]()
    with aftermath(0, 1):
        pass


def test_what_is_just_ending_may_end() -> None:
    with aftermath(0, 1):
        ends = opened()
        timer = threading.Timer(0.2, ends)
        timer.start()


def test_a_node_that_computes_something_else_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AssertionError, match="node 0 computes something else"), aftermath(0):
        monkeypatch.setattr(torch, "equal", lambda a, b: False)


def test_times_leave_out_what_others_have_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = tmp_path / "cpu"
    line = "some avg10=0.31 avg60=0.18 avg300=0.75 total={}\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=0\n"
    told.write_text(line.format(5_000_000))
    monkeypatch.setattr(kit, "PRESSURE", told)
    with pytest.raises(AssertionError, match=r"this took 0\.\d s, and its row of .* says 0.01 s"), within(0.01):
        threading.Event().wait(0.2)
    clock = Clock()
    threading.Event().wait(0.2)
    assert clock.read() > 0.1
    told.write_text(line.format(1_000_000_000))
    clock.check(0.1, "this")
    told.unlink()
    assert kit.starved() == 0.0  # not counted: nothing is left out
