"""Nodes with which a script has nothing to do cost nothing: opcodes are counted, with 2 nodes and with 1,000. And what
was left in a queue that the idle flush does not look at leaves all the same."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import mode
from typing import Any

import pytest
from fake_hub import HELLO, FakeHub
from opcodes import Counter, opcodes, without_a_collector

from disttensor.runtime.master.command_queue import CommandQueue
from disttensor.runtime.master.idle import ROUNDS
from disttensor.runtime.master.link import Link
from disttensor.runtime.master.outbox import Outbox
from disttensor.runtime.process.clock import Clock
from disttensor.runtime.protocol import codec
from disttensor.runtime.protocol import commands as c

#: Seconds for what takes a moment; longer is a hang.
SOON = 60
FEW, MANY = 2, 1000
#: Rounds of the idle flush after which no queue is looked at: one with something to do, those with nothing, some more.
ASLEEP = 2 * ROUNDS


class Rounds(Clock):
    """The idle flush's clock. It does a round, from one of its waits to the next, when the test says so, and the
    opcodes of each are counted."""

    def __init__(self) -> None:
        self.counts: list[int] = []
        self._counter = Counter("/runtime/master/")
        self._before = -1
        self._now = 1000.0
        self._go, self._did = threading.Semaphore(0), threading.Semaphore(0)
        self._ended = False

    def run(self, rounds: int) -> None:
        for _ in range(rounds):
            self._go.release()
            self.await_round()

    def await_round(self) -> None:
        assert self._did.acquire(timeout=SOON)

    def end(self) -> None:
        self._ended = True
        self._go.release()

    def now(self) -> float:
        return self._now

    def sleep(self, seconds: float) -> None:
        self._pass(seconds)

    def wait(self, event: threading.Event, seconds: float) -> bool:
        self._pass(seconds)
        return event.is_set()

    def _pass(self, seconds: float) -> None:
        if self._ended:
            sys.settrace(None)
            super().sleep(seconds)
            return
        if self._before < 0:
            frame = sys._getframe(2)
            while frame is not None and "/runtime/master/" in frame.f_code.co_filename:
                self._counter.join(frame)
                frame = frame.f_back  # type: ignore[assignment]
        else:
            self.counts.append(self._counter.count - self._before)
        self._before = self._counter.count
        self._did.release()
        self._go.acquire()
        self._now += seconds


@pytest.fixture(autouse=True)
def no_collector() -> Iterator[None]:
    with without_a_collector():
        yield


@contextmanager
def link_of(nodes: int) -> Iterator[tuple[Link, FakeHub, Rounds]]:
    hub, clock = FakeHub(), Rounds()
    link = Link(hub, nodes, None, lambda error: None, clock=clock)
    for node in link.nodes:
        node.connection.greet(HELLO)
    try:
        clock.await_round()  # else the first one may find what the test does first, or not
        yield link, hub, clock
    finally:
        clock.end()
        link.close()
        link.interrupts.restore()


def issue(link: Link, queue: CommandQueue, command: c.Command) -> None:
    """As the hot path does."""
    commands = queue.commands
    commands += (command, None)
    if len(commands) >= queue.limit:
        link.sender.at_limit(queue)


# ---- what it costs ---------------------------------------------------------------------------------------------------


def looks(nodes: int, mesh: bool) -> list[int]:
    """Returns the opcodes of each round in which one node is used, or a mesh of two, then of those in which none is."""
    with link_of(nodes) as (link, _, clock):
        queue = link.sender.fan_out((0, 1)) if mesh else link.nodes[0].outbox
        for number in range(3):
            queue.add(c.Sync(number))
            clock.run(3)
        clock.run(ASLEEP)
        return clock.counts


@pytest.mark.parametrize("mesh", [False, True])
def test_a_look_has_no_cost_for_a_node_with_nothing_queued(mesh: bool) -> None:
    few = looks(FEW, mesh)
    assert looks(MANY, mesh) == few
    assert min(few) > 0


def test_a_look_has_no_cost_for_a_node_that_was_used_before() -> None:
    with link_of(MANY) as (link, _, clock):
        clock.run(ASLEEP)
        usual = mode(clock.counts)
        for node in link.nodes:
            node.outbox.add(c.Sync(1))
        clock.run(ASLEEP)
        clock.counts.clear()
        clock.run(6 * ROUNDS)
        assert mode(clock.counts) == usual
        # twice a second queues are looked at that were used, as what is dead rouses none
        assert sum(count > MANY for count in clock.counts) <= 6


def made(link: Link) -> None:
    link.sender.fan_out((0, 1)).add(c.Sync(1))


def flushed(link: Link) -> None:
    link.nodes[0].outbox.add(c.Sync(1))
    link.sender.flush_all()


def lost(link: Link) -> None:
    made(link)
    link.losses.lose(0, "it fell")


@pytest.mark.parametrize("what", [made, flushed, lost])
def test_no_node_that_has_nothing_to_do_with_it_costs(what: Callable[[Link], None]) -> None:
    """A mesh of two nodes that is made, a flush of all nodes, and a loss."""
    counts = []
    for nodes in (FEW, MANY):
        with link_of(nodes) as (link, _, _):
            what(link)  # once, as the first time some things are made
        with link_of(nodes) as (link, _, _):
            counts.append(opcodes(what, link))
    assert counts[0] == counts[1]


@pytest.mark.parametrize("nodes", [2, 64])
def test_a_message_to_a_mesh_is_encoded_once(nodes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    encode, calls = codec.encode, list[object]()

    def counted(value: Any) -> bytes:
        calls.append(value)
        return encode(value)

    with link_of(nodes) as (link, hub, _):
        monkeypatch.setattr(codec, "encode", counted)
        issue(link, link.sender.fan_out(tuple(range(nodes))), c.Sync(1))
        assert len(calls) == 1
        assert [rank for rank, _ in hub.sent] == list(range(nodes))
        assert len({id(message) for _, message in hub.sent}) == 1  # numbered once, too


# ---- nothing is left behind ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["issue", "add", "put"])
def test_what_is_appended_to_a_queue_that_sleeps_leaves_by_itself(way: str) -> None:
    with link_of(FEW) as (link, hub, clock):
        queue, number = link.nodes[1].outbox, 0
        for _ in range(3):
            clock.run(ASLEEP)
            assert queue.asleep
            for _ in range(3):
                number += 1
                if way == "issue":
                    issue(link, queue, c.Sync(number))
                else:
                    getattr(queue, way)(c.Sync(number))
            clock.run(3)
            assert hub.commands(1) == [c.Sync(each + 1) for each in range(number)]
            assert not queue.asleep


def test_what_dies_in_a_queue_that_sleeps_is_freed() -> None:
    with link_of(FEW) as (link, hub, clock):
        queue = link.nodes[1].outbox
        queue.add(c.Sync(1))
        clock.run(ASLEEP)
        assert queue.asleep
        queue.dead.append(5)
        clock.run(ASLEEP)
        assert hub.commands(1) == [c.Sync(1), c.Free(5, ())]


@pytest.mark.parametrize("way", ["by itself", "with the next flush of all"])
def test_what_dies_in_a_mesh_to_which_nothing_was_issued_is_freed(way: str) -> None:
    """A tensor there may be made of its members' ones, without a command."""
    with link_of(3) as (link, hub, clock):
        mesh = link.sender.fan_out((0, 1))
        mesh.dead.append(5)
        if way == "by itself":
            clock.run(ASLEEP)
        else:
            link.sender.flush_all()
        assert [hub.commands(rank) for rank in range(3)] == [[c.Free(5, ())], [c.Free(5, ())], []]
        assert not link.unissued


def test_what_a_mesh_leaves_at_its_members_leaves_by_itself() -> None:
    """A queue that is opened packs what overlaps it, of which only its own node's part is sent with it."""
    with link_of(3) as (link, hub, clock):
        mesh, node = link.sender.fan_out((0, 1)), link.nodes[0].outbox
        issue(link, mesh, c.Sync(1))
        issue(link, mesh, c.Sync(2))
        issue(link, node, c.Sync(3))
        assert hub.commands(0) == [c.Sync(1), c.Sync(2), c.Sync(3)]
        assert hub.commands(1) == [c.Sync(1)]
        clock.run(3)
        assert hub.commands(1) == [c.Sync(1), c.Sync(2)]
        clock.run(ASLEEP)
        assert mesh.asleep
        assert [each.used for each in link.queues] == [True, True, True, False]


def test_a_queue_stays_awake_while_its_window_is_full() -> None:
    with link_of(FEW) as (link, hub, clock):
        queue = link.nodes[1].outbox
        queue.add(c.Sync(1))
        clock.run(3)
        queue.sent += 1_000_000  # as if so many were in flight
        queue.put(c.Sync(2))
        clock.run(ASLEEP)
        assert (queue.full, queue.asleep) == (True, False)
        queue.sent -= 1_000_000
        clock.run(3)
        assert hub.commands(1) == [c.Sync(1), c.Sync(2)]


def test_a_queue_in_which_something_is_does_not_fall_asleep() -> None:
    """The thread that has appended it may have read the limit before."""
    queue = Outbox(0)
    queue.add(c.Sync(1))
    assert not queue.sleep()
    assert not queue.asleep
    queue.discard()
    assert queue.sleep()
    assert queue.asleep
    assert queue.add(c.Sync(2))
