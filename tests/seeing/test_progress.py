"""What is shown while the script waits, and what is said when nothing goes on any more."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from fake_hub import HELLO
from limits import HANG
from screen import Screen
from virtual_time import VirtualClock

import disttensor as dt
from disttensor.runtime.host.launcher import Sight
from disttensor.runtime.launch.output.transient_line import TerminalLine
from disttensor.runtime.master.connection import Life
from disttensor.runtime.master.node import Node
from disttensor.runtime.process import undertakings
from disttensor.runtime.process.page import COLLECTIVE, FUNCTION, NOBODY
from disttensor.runtime.process.undertakings import Undertakings
from disttensor.seeing import QueueStatus, progress, stall
from disttensor.seeing.progress import LOOK, SHOWN, WaitsShown
from disttensor.seeing.reading import read_node
from disttensor.seeing.stall import STILL, circle_of
from disttensor.session import current

HERE = os.path.basename(__file__)
MAIN = threading.main_thread().ident


class Job:
    """A session without nodes' processes, whose time a test lets pass."""

    def __init__(self, screen: Screen, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock, self.screen = VirtualClock(), screen
        self.waits: dict[Any, tuple[int | None, float]] = {}
        self.nodes = [Node(rank) for rank in range(3)]
        self.asked: list[int] = []
        for node in self.nodes:
            node.connection.hello = HELLO
            node.connection.become(Life.THERE)
        link = SimpleNamespace(
            clock=self.clock,
            lock=nullcontext(),
            waiting=SimpleNamespace(under_way=self.waits),
            roll_call=SimpleNamespace(ask=lambda nodes: self.asked.extend(node.rank for node in nodes)),
        )
        session: Any = SimpleNamespace(link=link, nodes=self.nodes, router=SimpleNamespace(data={}), flight="")
        self.undertakings = Undertakings(self.clock)
        self.queues: tuple[QueueStatus, ...] = ()
        monkeypatch.setattr(undertakings, "mine", self.undertakings)
        monkeypatch.setattr(progress, "process_time", lambda: 0.0)  # this one's time goes on without any work
        monkeypatch.setattr(progress, "queues_of", lambda session: self.queues)
        self.progress = WaitsShown(session, TerminalLine(screen.fd))
        self.undertakings.on_end = self.progress.end_wait

    def wait(self, node: int = 0, thread: int | None = MAIN) -> None:
        """Begins a wait of the script."""
        self.waits[_Request(node)] = thread, self.clock.now()

    def pass_time(self, seconds: float) -> list[str]:
        """What is on the screen afterwards."""
        end = self.clock.now() + seconds
        while (left := end - self.clock.now()) > 0:
            self.clock.sleep(min(LOOK, left))
            self.progress.look()
        return self.rows()

    def rows(self) -> list[str]:
        return [row for row in self.screen.look() if row]

    def see(self, rank: int, kind: int, peer: int = NOBODY, cpu: float = 0.0) -> None:
        """Has a node be seen at something."""
        sight = Sight(rank, "S", False, 0, kind, peer, 70.0, 0.0, 1 << 20, "", (), False, cpu, 100.0)
        self.nodes[rank].connection.see(sight, self.clock.now())


class _Request:
    def __init__(self, node: int) -> None:
        self.node = node


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    screen = Screen(120)
    yield Job(screen, monkeypatch)
    screen.close()


def test_a_wait_is_shown_after_two_seconds_and_until_its_end(job: Job) -> None:
    job.wait(1)
    assert job.pass_time(SHOWN - 0.1) == []
    (text,) = job.pass_time(LOOK)
    assert re.fullmatch(rf"waiting 2 s at {HERE}:\d+ for node 1: idle", text)
    job.see(1, FUNCTION)
    job.nodes[1].outbox.sent = 1205
    (text,) = job.pass_time(10)
    assert re.fullmatch(rf"waiting 12 s at {HERE}:\d+ for node 1: running 1:10 min, 1,205 commands behind", text)
    assert {*job.asked} == {1}
    job.waits.clear()
    job.progress.end_wait()
    assert job.rows() == []
    assert job.pass_time(10) == []


def test_waits_of_other_threads_are_not_shown(job: Job) -> None:
    job.wait(thread=1)
    assert job.pass_time(5) == []


def test_what_takes_long_says_how_far_it_has_come(job: Job) -> None:
    ready = 5
    with job.undertakings.during(lambda: f"starting 8 nodes: {ready} ready"):
        (text,) = job.pass_time(3)
        assert re.fullmatch(rf"starting 8 nodes: 5 ready \(3 s at {HERE}:\d+\)", text)
        ready = 6
        (text,) = job.pass_time(1)
        assert text.startswith("starting 8 nodes: 6 ready (4 s")
    assert job.rows() == []
    assert job.pass_time(5) == []


def test_a_wait_for_what_tasks_share_is_shown(job: Job) -> None:
    with job.undertakings.during(lambda: "an item of Channel begun", is_wait=True):
        assert job.pass_time(SHOWN - 0.1) == []
        (text,) = job.pass_time(12)
        assert re.fullmatch(rf"waiting 14 s at {HERE}:\d+ for an item of Channel begun", text)
    assert job.rows() == []
    assert job.pass_time(5) == []


@pytest.mark.parametrize("ended_by", ["its own thread", "another thread"])
def test_the_end_of_another_threads_wait_leaves_the_line(job: Job, ended_by: str) -> None:
    job.wait()
    shown = job.pass_time(5)
    assert len(shown) == 1
    if ended_by == "another thread":
        another = threading.Thread(target=job.progress.end_own_wait)
        another.start()
        another.join()
    else:
        job.progress.end_own_wait()
    assert job.rows() == (shown if ended_by == "another thread" else [])


def test_a_map_is_shown_while_it_is_waited_for(job: Job) -> None:
    with job.undertakings.during(lambda: "map of step: 12 of 20 done", holds=False):
        assert job.pass_time(5) == []
        job.wait(2)
        (text,) = job.pass_time(3)
        assert text.startswith("map of step: 12 of 20 done (3 s at ")


def test_an_error_in_what_is_shown_ends_it_and_nothing_else(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    def words() -> str:
        raise RuntimeError("no words")

    with job.undertakings.during(words):
        job.pass_time(9)
    (record,) = caplog.records
    assert record.getMessage() == "what the script waits for is not shown any more"


# ---- nothing goes on -------------------------------------------------------------------------------------------------


def stuck(job: Job) -> None:
    job.wait(0)
    job.see(0, COLLECTIVE, peer=1)
    job.see(1, COLLECTIVE, peer=0)
    for node in job.nodes[:2]:
        node.outbox.sent = 1


def test_a_circle_is_named_once_and_whole(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    stuck(job)
    job.queues = QueueStatus("Channel", "batches", 0, 2, 0), QueueStatus("Lock", "", 0, 0, 0)
    job.pass_time(STILL - 1)
    assert caplog.messages == []
    job.pass_time(3 * STILL)
    (text,) = caplog.messages
    first, script, *rest = text.splitlines()
    assert re.fullmatch(r"nothing has gone on anywhere for 6\d s:", first)
    assert re.fullmatch(rf"  the script: waits for node 0, 6\d s at {HERE}:\d+: .*", script)
    assert rest == [
        "  node 0: waiting for node 1 1:10 min",
        "  node 1: waiting for node 0 1:10 min",
        "  Channel batches: 2 wait for an item or a turn",
        "  they wait for each other in a circle, which does not end by itself: node 0 -> node 1 -> node 0",
    ]
    assert {*job.asked} == {0, 1, 2}


@pytest.mark.parametrize("nodes", ["idle", "lost", "at work"])
def test_a_wait_for_what_tasks_share_may_last_while_no_node_is_at_work(
    job: Job, caplog: pytest.LogCaptureFixture, nodes: str
) -> None:
    if nodes == "at work":
        job.see(1, FUNCTION)
        job.nodes[1].outbox.sent = 1
    elif nodes == "lost":
        job.nodes[1].connection.become(Life.LOST)
    with job.undertakings.during(lambda: "an item of Channel begun", is_wait=True):
        job.pass_time(3 * STILL)
    if nodes != "at work":
        assert caplog.messages == []
        return
    (text,) = caplog.messages
    assert re.match(rf".* for an item of Channel begun, 6\d s at {HERE}:\d+: ", text.splitlines()[1])
    assert text.splitlines()[2:] == ["  node 1: running 1:10 min"]


@pytest.mark.parametrize("gets_on", ["a command is done", "it runs", "another wait"])
def test_progress_anywhere_counts(job: Job, caplog: pytest.LogCaptureFixture, gets_on: str) -> None:
    stuck(job)
    job.pass_time(STILL - 5)
    match gets_on:
        case "a command is done":
            job.nodes[2].outbox.done = job.nodes[2].outbox.sent = 7
        case "it runs":
            job.see(2, FUNCTION, cpu=1.0)
        case "another wait":
            job.waits.clear()
            job.pass_time(1)
            job.wait(1)
    job.pass_time(STILL - 5)
    assert caplog.messages == []
    job.pass_time(10)
    assert len(caplog.messages) == 1


def test_circles() -> None:
    assert circle_of({0: 1, 1: 2, 2: 0}, 0) == [0, 1, 2]
    assert circle_of({0: 1, 1: 2, 2: 1}, 0) == [1, 2]
    assert circle_of({1: -1}, 1) == [1, -1]
    assert circle_of({1: -1}, None) == []
    assert circle_of({0: 1, 2: 1}, 0) == []


def test_many_nodes_are_not_all_named(job: Job) -> None:
    session: Any = job.progress._session
    job.see(0, FUNCTION)
    row = read_node(session, job.nodes[0])
    lines = stall._lines(60.0, "waits for node 0", 0, [row] * 64, ())
    assert lines[-1] == "  and 54 other nodes"


# ---- a session -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["node 0: unseen", "an item of Channel begun"])
def test_a_wait_of_a_session_is_shown_and_erased(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    screen, seen = Screen(120), list[str]()
    inner, outer = os.pipe()
    monkeypatch.setattr(progress, "SHOWN", 0.6)  # by then the wait is a long one
    monkeypatch.setattr(progress, "transient_line", lambda: TerminalLine(screen.fd))
    with dt.init_master_worker(nodes=1, launcher="inproc"):

        def open_when_shown() -> None:
            while not seen:
                screen.await_more()
                seen.extend(row for row in screen.look() if f" for {what}" in row)
            os.write(outer, b"x")
            begun.put(b"x")

        begun = dt.tasks.Channel(name="begun")
        held = dt.submit(os.read, inner, 1, node=0)
        watcher = threading.Thread(target=open_when_shown)
        watcher.start()
        assert (held.result(timeout=HANG) if what.startswith("node") else begun.get(timeout=HANG)) == b"x"
        watcher.join()
        assert screen.look() == []
        assert re.match(rf"waiting \d s at {HERE}:\d+ for {what}", seen[0])
        link = current.session().link
    assert [undertakings.mine.on_end, link.waiting.on_long_wait] == [progress._nothing] * 2
    assert link.idle.looks == []
    for fd in (inner, outer):
        os.close(fd)
    screen.close()
