"""``dt.seeing.status()`` of real nodes: each has a row, whatever it is at, and says how old that is."""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from began import Began, tell
from limits import HANG

import disttensor as dt
from disttensor import testing
from disttensor.seeing import JobStatus, NodeStatus

HERE = os.path.basename(__file__)


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    with dt.init_master_worker("tcp", nodes=3, threads=1):
        xs = [torch.ones(4, device=f"node:{k}") for k in range(3)]
        dt.all_reduce(xs)
        for here in xs:  # connections are made at first use: have them before the tests look for leaks
            for there in range(3):
                here.to(f"node:{there}").cpu()
        dt.synchronize()
        yield


def seen(until: Callable[[JobStatus], bool]) -> JobStatus:
    """The first status of which this is true."""
    for _ in range(int(HANG / 0.2)):
        status = dt.seeing.status(timeout=0.2)
        if until(status):
            return status
    pytest.fail(f"it never came:\n{status}")


def node(rank: int, until: Callable[[NodeStatus], bool]) -> NodeStatus:
    """The row of a node, as soon as this is true of it."""
    return seen(lambda status: until(status.nodes[rank])).nodes[rank]


def line(function: Callable[..., object], after: int = 0) -> str:
    """The line of a function of this file, as rows have it."""
    return f"{HERE}:{function.__code__.co_firstlineno + after}"


def reading(fifo: str, port: int) -> None:
    """Waits in the kernel, without the GIL."""
    with open(fifo, "rb", buffering=0) as source:
        tell(port)
        source.read(1)


def holding(fifo: str, port: int) -> None:
    """Waits in C code that holds the GIL."""
    import ctypes

    with open(fifo, "rb", buffering=0) as source:
        tell(port)
        ctypes.PyDLL(None).read(source.fileno(), ctypes.create_string_buffer(1), 1)


class Busy:
    """A node that is in a function until the end of the block."""

    def __init__(self, function: Callable[[str, int], None], folder: Path, rank: int) -> None:
        self._fifo = str(folder / "fifo")
        os.mkfifo(self._fifo)
        self._function, self._rank = function, rank
        self._there = threading.Event()

    def __enter__(self) -> None:
        with Began(self._there.set) as port:
            self.work = dt.submit(self._function, self._fifo, port, node=self._rank)
            self._sink = os.open(self._fifo, os.O_WRONLY)
        assert self._there.wait(HANG)

    def __exit__(self, *_: object) -> None:
        os.write(self._sink, b"x")
        os.close(self._sink)
        self.work.result()


@pytest.mark.usefixtures("cluster")
def test_a_node_whose_streams_have_ended_is_idle() -> None:
    """Without a further message, by which it would be seen at the latest."""
    with dt.Stream("node:1"):
        work = dt.submit(time.sleep, 0.05, node=1)
    dt.synchronize(1)  # which the stream's thread answers, before it counts that as done
    deadline = time.monotonic() + HANG
    while ((row := dt.seeing.status(timeout=HANG).nodes[1]).state, row.behind) != ("idle", 0):
        assert time.monotonic() < deadline, row
    assert work.result() is None


@pytest.mark.usefixtures("cluster")
def test_nodes_that_have_nothing_to_do() -> None:
    kept = torch.ones(1000, device="node:1")
    status = seen(
        lambda status: (
            all((it.state, it.behind, it.tensors is None) == ("idle", 0, False) for it in status.nodes)
            and (status.nodes[1].bytes or 0) >= kept.nbytes
        )
    )
    assert [(it.rank, it.note) for it in status.nodes] == [(k, "") for k in range(3)]
    assert [it.pid for it in status.nodes] == [it.pid for it in dt.nodes()]
    for it in status.nodes:
        assert it.rss is not None
        assert it.rss > 1 << 20
        assert it.age is not None
        assert it.said is not None
        assert min(it.age, it.said) >= 0
    assert status.script.pid == os.getpid()
    assert status.script.rss > 1 << 20
    assert json.loads(json.dumps(status.to_dict()))["nodes"][1]["state"] == "idle"


@pytest.mark.usefixtures("cluster")
def test_the_last_line_and_the_peaks_of_a_node() -> None:
    dt.run(print, "epoch 3", node=1)
    it = node(1, lambda it: it.last_line != "")
    assert it.last_line == "epoch 3"
    assert it.peak_rss is not None
    assert it.rss is not None
    assert it.peak_rss >= it.rss
    assert re.search(r"^last lines of output\nnode  line\n(0 .*\n)?1     epoch 3$", repr(dt.seeing.status()), re.M)
    torch.node.reset_peak_memory_stats("node:1")
    held = torch.ones(1 << 18, device="node:1")
    it = node(1, lambda it: it.peak is not None and it.peak >= 1 << 20)
    del held
    assert dt.seeing.status().scalars()["node/1/peak"] == it.peak


@pytest.mark.usefixtures("cluster")
def test_a_stopped_node_has_a_row() -> None:
    pid = dt.nodes()[1].pid
    testing.stop(1)
    try:
        it = node(1, lambda it: it.state == "stopped")
        assert it.note == f"`kill -CONT {pid}` has it go on"
        assert it.age is not None
        assert it.said is None or it.said >= it.age  # what it said before stays
        assert re.search(rf"^1 .* stopped: `kill -CONT {pid}` has it go on", repr(dt.seeing.status()), re.MULTILINE)
    finally:
        testing.resume(1)
    assert node(1, lambda it: it.state == "idle").note == ""


@pytest.mark.usefixtures("cluster")
def test_a_node_that_is_far_behind_has_a_row_and_says_what_it_has(tmp_path: Path) -> None:
    x = torch.ones(4, device="node:2")
    dt.synchronize()
    with Busy(reading, tmp_path, 2):
        ys = [x + k for k in range(9_500)]  # kept: each that is dropped is a command more
        it = node(2, lambda it: it.said is not None and it.said < HANG and it.state == "running")
        assert (it.what, it.line) == ("reading()", line(Busy.__enter__, 2))
        assert 9_500 <= it.behind < 10_000
        assert dt.seeing.status().scalars()["node/2/behind"] == it.behind
    assert ys[-1].sum().item() == 4 * 9_500


@pytest.mark.usefixtures("cluster")
def test_a_node_in_c_code_that_holds_the_gil_has_a_row(tmp_path: Path) -> None:
    with Busy(holding, tmp_path, 2):
        it = node(2, lambda it: it.note != "")
        assert re.fullmatch(r"no other thread of it has run for \d+ s, as this one holds the GIL", it.note)
        assert (it.state, it.what, it.line) == ("running", "holding()", line(Busy.__enter__, 2))
        assert it.seconds > 1
        assert it.age is not None
        assert it.said is None or it.said > it.age  # it has not said so just now
        assert dt.seeing.status(timeout=HANG).nodes[2].note  # such a one is not waited for


@pytest.mark.usefixtures("cluster")
def test_who_waits_for_whom(tmp_path: Path) -> None:
    """A collective in which one node does not take part yet; the script waits for the end of it."""
    mesh = dt.mesh(dp=2, nodes=[0, 1])
    xs = [torch.ones(4, device=f"node:{k}") for k in (0, 1)]
    with Busy(reading, tmp_path, 1):
        dt.all_reduce(xs)
        thread = threading.Thread(target=lambda: xs[0].tolist(), name="the one that waits")
        thread.start()
        it = node(0, lambda it: it.waits_for == 1)
        assert (it.state, it.what, it.line) == ("waiting", "all_reduce", line(test_who_waits_for_whom, 6))
        status = seen(lambda status: bool(status.script.waits))
        (wait,) = status.script.waits
        assert (wait.thread, wait.node, wait.code) == ("the one that waits", 0, "xs[0].tolist()")
        assert wait.line == line(test_who_waits_for_whom, 7)
        (row,) = (row for row in status.meshes if row.nodes == (0, 1))
        expected = f"dp=0 waiting for dp=1; dp=1 running reading() {line(Busy.__enter__, 2)}"
        assert (row.name, row.says) == ("dp=2", expected)
        (shown,) = (text for text in repr(status).splitlines() if text.startswith("dp=2 "))
        assert "2 nodes  dp=0 waiting for dp=1; dp=1 running reading()" in shown
        expanded = dt.seeing.status(mesh)
        assert (expanded.coordinates, expanded.meshes) == (("dp=0", "dp=1"), ())
        assert [it.rank for it in expanded.nodes] == [0, 1]
        assert re.search(r"^dp=0  \S+ +waiting for node 1 in all_reduce", repr(expanded), re.MULTILINE)
    thread.join()
    assert xs[1].tolist() == [2.0] * 4


@pytest.mark.usefixtures("cluster")
def test_transfers_under_way_are_told_once_by_their_sender(tmp_path: Path) -> None:
    """One that the other node has not begun to receive."""
    x = torch.ones(8 << 20, device="node:0")
    with Busy(reading, tmp_path, 1):
        moved = x.to("node:1")
        status = seen(lambda status: any(it.target == "node 1" for it in status.transfers))
        (it,) = (it for it in status.transfers if it.target == "node 1" and it.source == "node 0")
        assert (it.use, it.under_way) == ("transfers", 1)
        assert it.bytes >= x.nbytes
        (large,) = status.copies
        assert (large.source, large.target, large.channel, large.bytes) == ("node 0", "node 1", "tcp", x.nbytes)
        assert large.line == line(test_transfers_under_way_are_told_once_by_their_sender, 5)
        assert large.done is None or 0 <= large.done < x.nbytes
        assert re.search(
            rf"^large transfers\n.*\nnode 0  node 1  tcp .* {re.escape(large.line)} *$", repr(status), re.M
        )
    assert moved.sum().item() == 8 << 20
