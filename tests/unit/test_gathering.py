"""What observers gather at a node for the script, and how the script asks for it: without processes."""

from __future__ import annotations

import math
import os
from array import array
from functools import partial
from typing import Any

import pytest
from fake_hub import HELLO, FakeHub
from virtual_time import VirtualClock

from disttensor.runtime.master.link_state import LinkState
from disttensor.runtime.master.looking_in import CommandTimes, LookingIn, NodeEvent
from disttensor.runtime.master.side_channels import SideChannels
from disttensor.runtime.node import gathering
from disttensor.runtime.node.gathering import Gathering
from disttensor.runtime.process.clock import clock_name
from disttensor.runtime.process.observing import (
    BatchApplied,
    CollectiveDone,
    CommandBegun,
    CommandDone,
    FunctionDone,
    GraphReplayed,
    MessageBegun,
    MessageSent,
    NodeSeam,
    TransferDone,
)
from disttensor.runtime.protocol import codec, side
from disttensor.runtime.protocol.errors import DisttensorError, NodeLost, ProtocolError

Noted = side.Noted

#: An event of each kind, the point at which it is told, and what is noted of it.
EVENTS: list[tuple[side.Point, Any, Noted]] = [
    ("applied", BatchApplied(2.0, 1.0, 3, 7, 2, 99), Noted("applied", 2.0, 1.0, "", 7, "2 commands", bytes=99)),
    ("commands", CommandBegun(1.0, 3, "5", 7, "aten::mm", None), Noted("begun", 1.0, 1.0, "5", 7, "aten::mm")),
    ("commands", CommandDone(2.0, 1.0, 3, "5", 7, "aten::mm", None), Noted("done", 2.0, 1.0, "5", 7, "aten::mm")),
    (
        "collective",
        CollectiveDone(2.0, 1.0, 3, "collective", 7, "all_reduce", "ring", (0, 3), 64, True),
        Noted("collective", 2.0, 1.0, "collective", 7, "all_reduce", bytes=64, failed=True),
    ),
    (
        "function",
        FunctionDone(2.0, 1.0, 3, "", 7, "f()", 9, True),
        Noted("function", 2.0, 1.0, "", 7, "f()", failed=True),
    ),
    ("graph", GraphReplayed(2.0, 1.0, 3, "", 7, 4, 2, False), Noted("graph", 2.0, 1.0, "", 7, "4")),
    ("timed", CommandDone(2.0, 1.0, 3, "5", 7, "aten::mm", None), Noted("done", 2.0, 1.0, "5", 7, "aten::mm")),
    (
        "transferred",
        TransferDone(2.0, 1.0, 3, 1, True, 8, 64, "tcp", "transfers"),
        Noted("sent", 2.0, 1.0, what="tcp transfers", transfer=8, peer=1, bytes=64),
    ),
    (
        "transferred",
        TransferDone(2.0, 1.0, 3, -1, False, 8, 64, "tcp", "collectives"),
        Noted("received", 2.0, 1.0, what="tcp collectives", transfer=8, peer=-1, bytes=64),
    ),
]


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
def seam(clock: VirtualClock) -> NodeSeam:
    return NodeSeam(3, clock)


@pytest.mark.parametrize(("point", "event", "noted"), EVENTS)
def test_what_is_noted(seam: NodeSeam, clock: VirtualClock, point: side.Point, event: Any, noted: Noted) -> None:
    gathered = Gathering(seam)
    gathered.watch([point], 10)
    seam.points()[point].notify(event)
    answer = gathered.gather(5, 0)
    assert answer == side.Gathered(5, clock.now(), 0, (noted,), False, clock_name())
    assert side.decode_answer(side.encode(answer)) == answer


def test_all_points_of_a_node_can_be_watched(seam: NodeSeam) -> None:
    assert list(side.POINTS) == list(seam.points()) == sorted({point for point, *_ in EVENTS})
    gathered = Gathering(seam)
    for points in (side.POINTS, side.POINTS[1:3], side.POINTS[2:4], (), side.POINTS):
        for _ in range(2):  # a word may come twice
            gathered.watch(points, 10)
            assert {name: len(point.listeners) for name, point in seam.points().items()} == {
                name: int(name in points) for name in side.POINTS
            }


def begin(seam: NodeSeam, *numbers: int) -> None:
    for number in numbers:
        seam.commands.notify(CommandBegun(1.0, 3, "", number, "aten::mm", None))


def numbers(answer: side.Gathered) -> list[int]:
    return [each.number for each in answer.events]


def test_what_the_script_has_is_forgotten_and_what_it_may_not_have_is_said_again(seam: NodeSeam) -> None:
    gathered = Gathering(seam)
    gathered.watch(["commands"], 4)
    begin(seam, 10, 11)
    for _ in range(2):
        answer = gathered.gather(1, 0)
        assert (answer.first, numbers(answer)) == (0, [10, 11])
    begin(seam, 12)
    answer = gathered.gather(2, 2)
    assert (answer.first, numbers(answer)) == (2, [12])
    begin(seam, 13, 14, 15, 16)  # more than there is room for
    answer = gathered.gather(3, 3)
    assert (answer.first, numbers(answer)) == (3, [13, 14, 15, 16])
    begin(seam, 17)
    answer = gathered.gather(3, 3)
    assert (answer.first, numbers(answer)) == (4, [14, 15, 16, 17])


def test_what_is_too_much_for_a_message_comes_in_parts(seam: NodeSeam, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gathering, "PART", 2)
    gathered = Gathering(seam)
    gathered.watch(["commands"], 10)
    begin(seam, 10, 11, 12)
    assert [(numbers(it), it.more) for it in (gathered.gather(1, 0), gathered.gather(2, 2))] == [
        ([10, 11], True), ([12], False),
    ]  # fmt: skip


def test_each_part_fits_into_a_message_of_the_side_channel(seam: NodeSeam) -> None:
    """A node that is fast notes 200,000 commands in a second; a text may be as long as a reason."""
    gathered = Gathering(seam)
    gathered.watch(["timed", "function"], 1000, 1_000_000)
    for first in range(0, 200_000, 50):
        begin_message(seam, first, 50, *map(float, range(51)))
    for number in range(1000):
        seam.function.notify(FunctionDone(1.0, 0.0, 3, "", number, "é" * codec.MAX_REASON, 9, False))
    begin_message(seam, 200_000, 1)
    events, first, more = 0, 0, True
    while more:
        answer = gathered.gather(1, first)
        assert len(side.encode(answer)) <= codec.MAX_MESSAGE
        events, more = events + len(answer.events), answer.more
        first = answer.first + sum(map(side.events_in, answer.events))
    assert events == 4000 + 1000


def begin_message(seam: NodeSeam, number: int, commands: int, *moments: float) -> array[float]:
    noted = array("d", moments)
    seam.timed.notify(MessageBegun(3, number, commands, noted))
    return noted


def told(answer: side.Gathered) -> list[tuple[str, int, list[float]]]:
    return [(each.kind, each.number, [*side.moments_in(each)]) for each in answer.events]


def test_times_of_commands_are_told_when_a_message_is_over_or_when_they_are_asked_for(seam: NodeSeam) -> None:
    gathered = Gathering(seam)
    gathered.watch(["timed"], 0, 100)
    moments = begin_message(seam, 10, 3)
    assert told(gathered.gather(1, 0)) == []
    moments.append(1.0)
    for request in (2, 3):  # that it has begun is told once; this answer may be lost
        assert told(gathered.gather(request, 0)) == [("timing", 10, [1.0])]
    moments.extend([2.0, 3.0])
    answer = gathered.gather(4, 1)
    assert (answer.first, told(answer)) == (1, [("timing", 10, [1.0, 2.0, 3.0])])
    moments.append(4.0)
    begin_message(seam, 13, 1, 5.0, 6.0)
    answer = gathered.gather(5, 3)
    assert (answer.first, told(answer)) == (3, [("timed", 12, [3.0, 4.0]), ("timed", 13, [5.0, 6.0])])
    assert side.decode_answer(side.encode(answer)) == answer
    begin_message(seam, 14, 1, 7.0)
    gathered.watch([], 0, 100)
    assert told(gathered.gather(6, 5)) == [("timing", 14, [7.0])]
    begin_message(seam, 15, 1, 8.0, 9.0)
    assert told(gathered.gather(7, 6)) == []


def test_the_times_of_the_last_commands_are_kept_whatever_else_is(
    seam: NodeSeam, monkeypatch: pytest.MonkeyPatch
) -> None:
    gathered = Gathering(seam)
    gathered.watch(["timed", "commands"], 2, 5)
    for number in (10, 13, 16):
        begin_message(seam, number, 3, 1.0, 2.0, 3.0, 4.0)
    answer = gathered.gather(1, 0)
    assert (answer.first, [number for _, number, _ in told(answer)]) == (6, [16])
    begin(seam, 17, 18)
    assert [each.number for each in gathered.gather(2, 0).events] == [16, 17, 18]
    begin(seam, 19)  # what is older than the event that goes is gone with it
    answer = gathered.gather(3, 0)
    assert (answer.first, numbers(answer)) == (10, [18, 19])
    for number in (20, 22):
        begin_message(seam, number, 2, 1.0, 2.0, 3.0)
    monkeypatch.setattr(gathering, "PART_BYTES", 24)
    answer = gathered.gather(4, 12)
    assert (answer.first, [number for _, number, _ in told(answer)], answer.more) == (12, [20], True)
    answer = gathered.gather(5, 14)
    assert (answer.first, [number for _, number, _ in told(answer)], answer.more) == (14, [22], False)


# ---- the script's end ------------------------------------------------------------------------------------------------


class Looker:
    """The script's end, and nodes 0 and 1 whose hub a test has."""

    def __init__(self, clock: VirtualClock) -> None:
        self.hub, self.beside, self.clock = FakeHub(), FakeHub(), clock
        self.state = LinkState(self.hub, 2, clock=clock)
        for node in self.state.nodes:
            node.connection.greet(HELLO)
        self.side = SideChannels(clock)
        self.side.hub = self.beside
        self.looking = LookingIn(self.state, self.side)

    def words(self, rank: int) -> list[side.Word]:
        """What a node has been told since the last call."""
        sent, self.beside.sent = self.beside.sent, [each for each in self.beside.sent if each[0] != rank]
        return [side.decode(message) for to, message in sent if to == rank]

    def answer(
        self, rank: int, request: int, *events: Noted, first: int = 0, more: bool = False, clock: str = "another"
    ) -> None:
        gathered = side.Gathered(request, self.clock.now() + 100, first, events, more, clock)
        self.beside.arrived.append((rank, side.encode(gathered)))


@pytest.fixture
def looker(clock: VirtualClock) -> Looker:
    return Looker(clock)


SITE = compile("0", "train.py", "exec"), 2


def test_a_fetch_takes_what_is_new_in_all_its_parts_with_lines_and_the_clock(
    looker: Looker, clock: VirtualClock
) -> None:
    looker.looking.watch([1], ["graph", "commands"], 5)
    assert looker.words(1) == [side.Watch(("commands", "graph"), 5)]
    sent = looker.state.seam.sent
    sent.notify(MessageSent(0.0, 1, 6, [None, SITE], b""))
    sent.notify(MessageSent(0.0, 0, 6, [SITE, SITE], b""))  # it is not watched
    one, two = Noted("begun", 1.0, 1.0, "", 7, "aten::mm"), Noted("graph", 2.0, 1.0, "", 6, "4")
    unknown, late = Noted("done", 2.0, 1.0, "", 8, "aten::mm"), Noted("sent", 3.0, 2.0, transfer=9, peer=0, bytes=64)
    clock.plan(2, lambda: looker.answer(1, 1, one, two, more=True))
    clock.plan(4, lambda: looker.answer(1, 2, unknown, late, first=5))
    found = looker.looking.fetch(1)
    assert found.events == (
        NodeEvent(1, "begun", 1.0, 1.0, "", 7, "aten::mm", -1, -1, 0, False, SITE),
        NodeEvent(1, "graph", 2.0, 1.0, "", 6, "4", -1, -1, 0, False, None),
        NodeEvent(1, "done", 2.0, 1.0, "", 8, "aten::mm", -1, -1, 0, False, None),
        NodeEvent(1, "sent", 3.0, 2.0, "", -1, "", 9, 0, 64, False, None),
    )
    assert found.dropped == 3
    assert abs(found.ahead - 100) <= found.within <= 1.1
    assert looker.words(1) == [side.Gather(1, 0), side.Gather(2, 2)]
    looker.looking.watch([1], [])
    assert (looker.words(1), sent.listeners) == ([side.Watch((), 100_000)], ())
    clock.plan(1, lambda: looker.answer(1, 3, first=7))
    assert looker.looking.fetch(1).events == ()
    assert looker.words(1) == [side.Gather(3, 7)]


def of_times(number: int, *moments: float, kind: str = "timed") -> Noted:
    return Noted(kind, 0.0, 0.0, number=number, moments=side.moments_of(moments))


def test_a_fetch_takes_the_times_of_commands(looker: Looker, clock: VirtualClock) -> None:
    looker.looking.watch([1], ["timed"], 5, 7)
    assert looker.words(1) == [side.Watch(("timed",), 5, 7)]
    looker.state.nodes[1].outbox.sent = 9
    clock.plan(1, lambda: looker.answer(1, 1, of_times(6, 1.0, 2.0, 2.0), more=True))
    clock.plan(2, lambda: looker.answer(1, 2, of_times(8, 3.0, kind="timing"), first=4))
    found = looker.looking.fetch(1)
    assert (found.events, found.dropped) == ((), 2)
    assert found.times == (
        CommandTimes(6, array("d", [1.0, 2.0, 2.0]), True), CommandTimes(8, array("d", [3.0]), False)
    )  # fmt: skip
    assert [[*each.commands] for each in found.times] == [[6, 7], [8]]
    assert looker.words(1) == [side.Gather(1, 0), side.Gather(2, 2)]


@pytest.mark.parametrize(
    ("lie", "why"),
    [
        (Noted("timed", 0.0, 0.0, number=6, moments=bytes(17)), "17 bytes are not the moments of commands"),
        (of_times(6, 1.0), "8 bytes are not"),
        (of_times(6, 2.0, 1.0), "go back, or are none"),
        (of_times(6, 1.0, math.nan, 2.0), "go back, or are none"),
        (of_times(6, 1.0, math.inf), "go back, or are none"),
        (of_times(-1, 1.0, 2.0), "of number -1, and it was sent 9"),
        (of_times(8, 1.0, 2.0, 3.0), "of number 9, and it was sent 9"),
        (of_times(9, 1.0, kind="timing"), "of number 9, and it was sent 9"),
    ],
)
def test_times_that_can_not_be_are_refused_and_the_node_is_named(
    looker: Looker, clock: VirtualClock, lie: Noted, why: str
) -> None:
    looker.looking.watch([1], ["timed"], 5, 7)
    looker.state.nodes[1].outbox.sent = 9
    clock.plan(1, lambda: looker.answer(1, 1, lie))
    with pytest.raises(ProtocolError, match=f"node 1 has told of its commands what can't be: .*{why}"):
        looker.looking.fetch(1)


def test_a_worker_in_the_place_of_another_is_asked_for_all_that_it_has_noted(
    looker: Looker, clock: VirtualClock
) -> None:
    looker.looking.watch([1], ["graph"], 5)
    noted = Noted("graph", 2.0, 1.0, "", 6, "4")
    clock.plan(1, lambda: looker.answer(1, 1, noted, noted, first=3))
    assert looker.looking.fetch(1).dropped == 3
    node = looker.state.nodes[1]
    node.lose(NodeLost(1, "a", 1, "it fell"))
    node.begin_connection().greet(HELLO)
    with looker.state.lock:
        node.resume(0, ())
    looker.words(1)
    clock.plan(1, lambda: looker.answer(1, 2, noted))
    found = looker.looking.fetch(1)
    assert looker.words(1) == [side.Gather(2, 0)]
    assert (len(found.events), found.dropped) == (1, 0)


@pytest.mark.parametrize(
    ("there", "back", "wrong"),
    [(0.005, 0.005, 0.0), (0.0, 0.005, 0.0025), (0.005, 0.0, 0.0025), (0.005, 0.001, 0.002)],
)
def test_a_clock_behind_a_delay(looker: Looker, clock: VirtualClock, there: float, back: float, wrong: float) -> None:
    """Of words that take as long there as back it is known; else to half of what both take, and that bound is told."""

    def arrive(answer: side.Gathered) -> None:
        looker.beside.arrived.append((1, side.encode(answer)))
        os.eventfd_write(looker.beside.event, 1)

    def read(request: int) -> None:
        clock.plan(back, partial(arrive, side.Gathered(request, clock.now() + 100, 0, (), False, "another")))

    looker.looking.watch([1], ["graph"], 5)
    clock.plan(there, partial(read, 1))
    found = looker.looking.fetch(1)
    assert abs(found.ahead - 100) == pytest.approx(wrong, abs=1e-6)
    assert found.within == pytest.approx((there + back) / 2, abs=1e-6)


def test_a_clock_that_both_have_is_not_measured(looker: Looker, clock: VirtualClock) -> None:
    looker.looking.watch([1], ["graph"], 5)
    for name, shares in (("", False), (clock_name(), True), ("another", False)):
        clock.plan(1, partial(looker.answer, 1, looker.side._last + 1, clock=name))
        found = looker.looking.fetch(1)
        assert found.shares_clock is shares
        assert (found.ahead, found.within) == (0.0, 0.0) if shares else found.ahead > 50


def test_a_node_that_comes_back_is_told_again_what_it_is_to_note_and_what_it_was_asked(
    looker: Looker, clock: VirtualClock
) -> None:
    looker.looking.watch([1], ["graph"], 5)
    clock.plan(1, lambda: looker.beside.ended.append(1))
    clock.plan(2, lambda: looker.answer(1, 1))
    looker.looking.fetch(1)
    assert looker.words(1) == [side.Watch(("graph",), 5), side.Gather(1, 0)] * 2


def test_nobody_answers_for_another_and_nonsense_answers_nothing(looker: Looker, clock: VirtualClock) -> None:
    looker.looking.watch([1], ["graph"])

    def lie() -> None:
        looker.answer(0, 1, Noted("graph", 2.0, 1.0))
        looker.answer(1, 7, Noted("graph", 2.0, 1.0))
        looker.beside.arrived.append((1, b"\xc1"))

    clock.plan(1, lie)
    with pytest.raises(TimeoutError, match="node 1 has not answered on its side channel within 5 s"):
        looker.looking.fetch(1, 5)
    looker.answer(1, 1, Noted("graph", 2.0, 1.0))  # nobody waits for it any more
    clock.plan(1, lambda: looker.answer(1, 2, Noted("graph\x1b[2J", 2.0, 1.0), more=True))
    clock.plan(2, lambda: looker.answer(1, 3, first=1, more=True))  # for ever, if it were asked again
    (event,) = looker.looking.fetch(1).events
    assert "\x1b" not in event.kind


def test_who_can_not_be_watched(looker: Looker, clock: VirtualClock) -> None:
    with pytest.raises(ValueError, match="there is no point 'sent' of a node; there are applied, collective, commands"):
        looker.looking.watch([1], ["sent"])
    looker.looking.watch([1], ["graph"])
    with looker.state.lock:
        clock.plan(1, lambda: looker.state.nodes[1].lose(NodeLost(1, "a", 1, "it fell")))
    with pytest.raises(NodeLost, match="it fell"):
        looker.looking.fetch(1)
    looker.side.hub = None
    for use in (lambda: looker.looking.watch([0], ["graph"]), lambda: looker.looking.fetch(0)):
        with pytest.raises(DisttensorError, match=r"nodes that are threads of the script .* have no side channel"):
            use()
