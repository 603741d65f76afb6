"""The roll call of nodes: all are asked at once, nobody waits for who can't answer, and what was said last stays."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from fake_hub import HELLO, FakeHub
from virtual_time import VirtualClock

from disttensor.runtime.host.launcher import Launcher, Sight
from disttensor.runtime.host.sights import DEAF, hindrance
from disttensor.runtime.master.connection import Life
from disttensor.runtime.master.doing import activities
from disttensor.runtime.master.link_state import LinkState
from disttensor.runtime.master.losses import Losses
from disttensor.runtime.master.node import Node
from disttensor.runtime.master.requests import Requests
from disttensor.runtime.master.roll_call import RollCall
from disttensor.runtime.master.side_channels import SideChannels
from disttensor.runtime.process.page import COMMANDS, FUNCTION, IDLE, NOBODY, STREAMS, Beside
from disttensor.runtime.protocol import commands as c
from disttensor.runtime.protocol import side
from disttensor.runtime.protocol.bundle import Bundle
from disttensor.runtime.protocol.errors import NodeLost

NODES = 64
SITE = compile("0", "train.py", "exec"), 2


def sight(rank: int, state: str = "S", deaf: float = 0.0, lived: float = 10.0, **fields: Any) -> Sight:
    given: dict[str, Any] = {"paused": False, "seq": 0, "kind": IDLE, "peer": NOBODY, "seconds": 0.0, **fields}
    return Sight(rank=rank, state=state, deaf=deaf, rss=1 << 20, stack="", stacks=False, lived=lived, **given)


class Watcher(Launcher):
    """Sees nodes; a test says what, of which, and when."""

    def __init__(self, clock: VirtualClock) -> None:
        self.clock, self.asked, self.seen = clock, list[int](), list[Sight]()
        self.states: dict[int, str] = {}
        self.blind: set[int] = set()  #: nodes whose host says nothing
        self.after = 0.01

    def start(self, bundles: Sequence[Bundle]) -> None: ...

    def stop(self, grace: float) -> None: ...

    def fileno(self) -> int:
        return -1

    def events(self) -> list[Any]:
        seen, self.seen = self.seen, []
        return seen

    def look(self, rank: int) -> None:
        raise AssertionError("nobody wants the stacks")

    def glance(self, rank: int) -> None:
        self.asked.append(rank)
        if rank not in self.blind:
            self.clock.plan(self.after, lambda: self.seen.append(sight(rank, self.states.get(rank, "S"))))


class World:
    """The script's end of 64 nodes, of which a test says what they answer."""

    def __init__(self, clock: VirtualClock, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock, self.hub, self.beside = clock, FakeHub(), FakeHub()
        self.state = LinkState(self.hub, NODES, clock=clock)
        for node in self.state.nodes:
            node.connection.greet(HELLO)
        self.side = SideChannels(clock)
        self.side.hub = self.beside
        self.launcher = Watcher(clock)
        self.losses = Losses(self.state, Requests(self.state), self.side, self.launcher, lambda error: None)
        self.roll_call = RollCall(self.state, self.losses, self.side)
        wait = "disttensor.runtime.host.descriptors.wait_readable"
        monkeypatch.setattr(wait, lambda what, seconds, clock: clock.sleep(seconds))

    def questions(self, rank: int) -> list[int]:
        """The numbers of the Describes that a node has been sent since the last call."""
        sent, self.beside.sent = self.beside.sent, [each for each in self.beside.sent if each[0] != rank]
        words = [side.decode(message) for to, message in sent if to == rank]
        return [word.request for word in words if isinstance(word, side.Describe)]

    def say(self, rank: int, request: int, done: int = 0) -> None:
        held = (side.DeviceTensors("cpu", 2, 64),)
        self.beside.arrived.append((rank, side.encode(side.Described(request, done, held, (), 0, 0.0))))

    def answer_all(self, but: Sequence[int] = ()) -> None:
        """Has all nodes describe themselves a moment from now."""

        def act() -> None:
            for node in self.state.nodes:
                for request in self.questions(node.rank) if node.rank not in but else ():
                    self.say(node.rank, request)

        self.clock.plan(0.02, act)

    def node(self, rank: int) -> Node:
        return self.state.nodes[rank]

    def refresh(self, timeout: float = 0.5) -> float:
        """Returns how long it took by the clock."""
        began = self.clock.now()
        self.roll_call.refresh(self.state.nodes, timeout)
        return self.clock.now() - began


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    made = World(VirtualClock(), monkeypatch)
    yield made
    made.state.interrupts.restore()
    made.beside.close()
    made.hub.close()


def test_all_nodes_are_asked_at_once(world: World) -> None:
    world.answer_all()
    assert world.refresh() < 0.1
    assert world.launcher.asked == list(range(NODES))
    now = world.clock.now()
    for node in world.state.nodes:
        at = node.connection
        assert at.seen == sight(node.rank)
        assert at.described is not None
        assert at.described.held == (side.DeviceTensors("cpu", 2, 64),)
        assert 0 <= now - at.seen_at < 0.1
        assert 0 <= now - at.described_at < 0.1
        assert at.sight is None  # whoever waits for stacks goes on waiting


def test_a_stopped_node_is_not_waited_for_and_what_it_has_said_stays_with_its_age(world: World) -> None:
    world.answer_all()
    world.refresh()
    world.clock.sleep(60)
    world.launcher.states[5] = "T"
    world.answer_all(but=[5])
    assert world.refresh() < 0.1
    at, now = world.node(5).connection, world.clock.now()
    assert at.seen is not None
    assert (at.seen.state, hindrance(at.seen)) == ("T", "stopped")
    assert now - at.seen_at < 0.1
    assert at.described is not None
    assert 60 <= now - at.described_at < 60.2


def test_a_node_that_says_nothing_costs_the_timeout_and_keeps_its_last_row(world: World) -> None:
    """Neither its process nor its host: that of a network that is cut."""
    world.answer_all()
    world.refresh()
    world.clock.sleep(7)
    world.launcher.blind.add(3)
    world.answer_all(but=[3])
    assert world.refresh(0.5) == pytest.approx(0.5)
    at, now = world.node(3).connection, world.clock.now()
    assert 7 < now - at.seen_at < 7.7
    assert all(now - node.connection.seen_at < 0.6 for node in world.state.nodes if node.rank != 3)


def test_a_node_that_can_not_answer_is_asked_once_and_its_late_answer_counts(world: World) -> None:
    world.answer_all(but=[7])
    world.refresh(0.3)
    (request,) = world.questions(7)
    world.answer_all(but=[7])
    assert world.refresh(0.3) == pytest.approx(0.3)
    assert world.questions(7) == []
    world.say(7, request, done=9)
    world.answer_all(but=[7])
    world.refresh(0.3)
    described = world.node(7).connection.described
    assert described is not None
    assert described.done == 9
    assert len(world.questions(7)) == 1  # and it is asked again


def test_nobody_describes_another_and_nothing_else_is_a_description(world: World) -> None:
    world.answer_all(but=[7])
    world.refresh(0.1)
    (request,) = world.questions(7)
    world.say(8, request)
    world.beside.arrived.append((7, side.encode(side.Gathered(request, 0.0, 0, (), False))))
    world.answer_all(but=[7])
    world.refresh(0.1)
    assert world.node(7).connection.described is None
    world.say(7, request)
    world.answer_all()
    world.refresh(0.1)
    assert world.node(7).connection.described is not None


def test_who_does_not_describe_itself_is_seen_again(world: World) -> None:
    """So a wait for one that holds the GIL ends as soon as that can be told."""
    world.answer_all(but=[9])
    world.clock.plan(3, lambda: world.launcher.states.update({9: "T"}))
    assert 3 <= world.refresh(60) < 4
    assert world.launcher.asked.count(9) > 3
    assert world.launcher.asked.count(8) == 1


def test_who_is_gone_or_has_not_come_is_not_asked(world: World) -> None:
    world.losses.lose(1, "it fell")
    world.node(2).connection.life = Life.AWAITED
    world.answer_all()
    assert world.refresh() < 0.1
    assert {1, 2}.isdisjoint(world.launcher.asked)
    assert (world.questions(1), world.questions(2)) == ([], [])


def test_what_was_asked_of_a_lost_node_is_forgotten(world: World) -> None:
    world.refresh(0.1)
    (request,) = world.questions(1)
    world.losses.lose(1, "it fell")
    world.say(1, request)
    world.answer_all()
    world.refresh(0.1)
    assert world.node(1).connection.described is None


def test_launchers_that_see_nothing(world: World) -> None:
    class Blind(Watcher):
        look, glance = Launcher.look, Launcher.glance  # type: ignore[assignment]

    class Looking(Watcher):
        glance = Launcher.glance  # type: ignore[assignment]

        def look(self, rank: int) -> None:
            Watcher.glance(self, rank)

    world.losses.launcher = Blind(world.clock)
    world.answer_all()
    assert world.refresh() < 0.1
    assert world.node(0).connection.seen is None
    world.losses.launcher = Looking(world.clock)  # one of before there were glances
    world.answer_all()
    world.refresh()
    assert world.node(0).connection.seen is not None
    world.losses.launcher = world.side.hub = None  # nodes that are threads
    assert world.refresh() == 0


def test_a_sight_with_stacks_is_for_who_waits_and_without_is_not(world: World) -> None:
    at = world.node(0).connection
    at.see(sight(0), 5.0)
    assert (at.sight, at.seen_at) == (None, 5.0)
    whole = Sight(0, "R", False, 0, IDLE, NOBODY, 0.0, 0.0, 0, "Thread ...")
    at.see(whole, 6.0)
    assert (at.sight, at.seen, at.seen_at) == (whole, whole, 6.0)
    at.see(sight(0), 7.0)
    assert at.sight is whole


def test_the_use_of_cores_is_that_between_two_sights(world: World) -> None:
    at = world.node(0).connection
    assert at.cpu is None
    at.see(sight(0, lived=10.0, cpu=5.0), 1.0)
    assert at.cpu == 0.5
    at.see(sight(0, lived=11.0, cpu=7.0), 2.0)
    assert at.cpu == 2.0
    at.see(sight(0, lived=11.05, cpu=7.0), 2.05)  # too soon to tell
    assert at.cpu == 2.0
    at.see(sight(0, lived=11.5, cpu=7.0), 2.5)
    assert at.cpu == 0.0


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        (sight(0), ""),
        (sight(0, "R", deaf=DEAF), ""),
        (sight(0, "S", deaf=DEAF + 1), "deaf"),
        (sight(0, "D"), "device"),
        (sight(0, "T", deaf=9.0), "stopped"),
        (sight(0, "t"), "stopped"),
        (sight(0, "T", paused=True), "paused"),
    ],
)
def test_what_hinders_a_node(seen: Sight, expected: str) -> None:
    assert hindrance(seen) == expected


def test_what_a_node_is_at(world: World) -> None:
    node = world.node(0)
    node.outbox.add(c.Sync(1), SITE)
    node.outbox.add(c.Sync(2), SITE)
    node.outbox.pack()
    (work,) = activities(node, sight(0))
    assert (work.kind, work.sent) == (IDLE, None)
    (work,) = activities(node, sight(0, seq=1, kind=COMMANDS, seconds=3.0))
    assert work.sent is not None
    assert (work.number, work.seconds, work.beside, work.sent.operator, work.sent.site) == (1, 3.0, False, "Sync", SITE)
    (work,) = activities(node, sight(0, seq=99, kind=COMMANDS))  # one that it was never sent
    assert work.sent is None
    beside = (Beside(0, 5.0, 11), Beside(1, 2.0, 12))
    first, second = activities(node, sight(0, kind=STREAMS, beside=beside))
    assert [(it.kind, it.number, it.beside) for it in (first, second)] == [(FUNCTION, 0, True), (FUNCTION, 1, True)]
    assert [it.beside for it in activities(node, sight(0, seq=1, kind=COMMANDS, beside=beside))] == [False, True, True]
    node.lose(NodeLost(0, "a", 1, "it fell"))
    assert activities(node, sight(0, kind=FUNCTION))[0].sent is not None  # what it was at is known still
