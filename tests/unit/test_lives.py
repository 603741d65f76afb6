"""The life of a connection (runtime/master/connection.py), as a link sees it: no sockets, no nodes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import product
from typing import cast

import pytest
from spies import spy

from disttensor.runtime.host.launcher import Exited, Launcher
from disttensor.runtime.master import losses
from disttensor.runtime.master.connection import CHANGES, Life, NodeConnection
from disttensor.runtime.master.idle import IdleFlush
from disttensor.runtime.master.link import Link
from disttensor.runtime.protocol import codec
from disttensor.runtime.protocol import commands as c
from disttensor.runtime.protocol.errors import NodeLost, StartError
from disttensor.runtime.transport.inproc import InprocHub

AWAITED, THERE, UNEXPLAINED, LOST = Life
HELLO = c.Hello(
    1, "job", 1, "host", "2.13.0", "3.11.0", ("cpu",), False, c.Addresses("a:1"),
    c.Abilities("AVX2", False, False, False),
)  # fmt: skip
#: What is said by and of the node whose life is looked at; the other one is there all the time.
RANK = 1


class Starter:
    """A launcher that tells what it is given."""

    def __init__(self) -> None:
        self.told: list[object] = []
        self.died = False
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def events(self) -> list[object]:
        if self.died:
            raise StartError("the root has died")
        told, self.told = self.told, []
        return told

    def end_worker(self, rank: int) -> None:
        pass

    def fileno(self) -> int:
        return self._fd

    def close(self) -> None:
        os.close(self._fd)


class Script:
    """A link to two nodes, and what happens to one of them."""

    def __init__(self) -> None:
        self.hub, self.starter, self.told = InprocHub(2), Starter(), list[NodeLost]()
        self.link = Link(self.hub, 2, cast(Launcher, self.starter), self.told.append)
        self.spokes = [self.hub.spoke(rank) for rank in range(2)]
        self.node = self.link.nodes[RANK]
        self.take(1 - RANK, codec.encode(c.Report(0, (HELLO,))))

    def take(self, rank: int, message: bytes) -> None:
        """The link takes in what a node says, unless that has been cut off."""
        if not self.spokes[rank].closed:
            self.spokes[rank].send(message)
        self.link.replies.lock_and_take_in()

    def hello(self) -> None:
        self.take(RANK, codec.encode(c.Report(0, (HELLO,))))

    def nonsense(self) -> None:
        self.take(RANK, b"\xc1")

    def disconnected(self) -> None:
        self.link.losses.disconnected(RANK, "its connection ended", 0)

    def exited(self) -> None:
        self.starter.told.append(Exited(RANK, 1, "exit code 3", 3, ()))
        self.link.losses.ask_launcher()

    def died(self) -> None:
        self.starter.died = True
        self.link.losses.ask_launcher()

    def silent(self) -> None:
        with pytest.MonkeyPatch.context() as patch:
            spy(patch, self.hub, "cut_deaf", lambda: [RANK])
            self.link.idle._cut_off()

    def late(self) -> None:
        """The launcher has told nothing of the node for as long as it may."""
        for rank, (cause, _) in self.link.losses.unexplained.items():
            self.link.losses.unexplained[rank] = cause, 0.0
        self.link.losses.give_up_late()

    def kill(self) -> None:
        with suppress(NodeLost):
            self.link.losses.kill(RANK, "the script has killed it")

    def check(self) -> None:
        """What else is known of the node is what its life says."""
        node, life, closing = self.node, self.node.life, self.link.closing
        assert (node.lost is None) == (life is not LOST)
        assert (RANK in self.link.losses.unexplained) == (life is UNEXPLAINED) or closing
        assert (node.said_hello is None) >= (life is AWAITED)
        assert (node.said_hello is not None) >= (life is THERE)
        assert (node in self.link.there()) == (node.said_hello is not None and life is not LOST)
        assert [error.rank for error in self.told].count(RANK) == (life is LOST)

    def end(self) -> None:
        self.link.close()
        self.starter.close()
        for spoke in self.spokes:
            spoke.close()


#: What happens, and the lives that it changes; a second hello breaks the protocol.
EVENTS: dict[str, tuple[Callable[[Script], None], dict[Life, Life]]] = {
    "hello": (Script.hello, {AWAITED: THERE, THERE: LOST}),
    "nonsense": (Script.nonsense, dict.fromkeys(Life, LOST)),
    "disconnected": (Script.disconnected, {AWAITED: UNEXPLAINED, THERE: UNEXPLAINED}),
    "exited": (Script.exited, dict.fromkeys(Life, LOST)),
    "the launcher died": (Script.died, dict.fromkeys(Life, LOST)),
    "silent": (Script.silent, dict.fromkeys(Life, LOST)),
    "late": (Script.late, {UNEXPLAINED: LOST}),
    "kill": (Script.kill, dict.fromkeys(Life, LOST)),
}
#: The events that lead to each life.
WAYS: dict[Life, tuple[str, ...]] = {
    AWAITED: (), THERE: ("hello",), UNEXPLAINED: ("disconnected",), LOST: ("exited",)
}  # fmt: skip


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Script]]:
    """Makes scripts that do nothing by themselves, and in which no time passes."""
    monkeypatch.setattr(IdleFlush, "_run", lambda idle: None)
    monkeypatch.setattr(losses, "EXIT_CAUSE_TIMEOUT", float("inf"))
    scripts: list[Script] = []

    def make() -> Script:
        while scripts:
            scripts.pop().end()
        scripts.append(Script())
        return scripts[0]

    yield make
    for script in scripts:
        script.end()


def test_each_life_changes_by_each_event_as_is_written_down(
    made: Callable[[], Script], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, become = set(), NodeConnection.become

    def noted(connection: NodeConnection, life: Life) -> None:
        seen.add((connection.life, life))
        become(connection, life)

    monkeypatch.setattr(NodeConnection, "become", noted)
    for life, way in WAYS.items():
        for name, (event, changes) in EVENTS.items():
            script = made()
            for step in way:
                EVENTS[step][0](script)
            assert script.node.life is life
            script.check()
            event(script)
            assert script.node.life is changes.get(life, life), f"{name} of a node that is {life.value}"
            script.check()
    assert {(before, after) for before, after in seen if before is not after} == {
        (before, after) for before in CHANGES for after in CHANGES[before]
    }, "each that is legal happens"


def test_all_sequences_of_three_events(made: Callable[[], Script]) -> None:
    for names in product(EVENTS, repeat=3):
        script = made()
        for name in names:
            EVENTS[name][0](script)
            script.check()


@pytest.mark.parametrize("life", [AWAITED, THERE, UNEXPLAINED])
def test_nobody_is_lost_while_a_session_ends(life: Life, made: Callable[[], Script]) -> None:
    for event, _ in EVENTS.values():
        script = made()
        for step in WAYS[life]:
            EVENTS[step][0](script)
        script.link.closing = True
        event(script)
        assert script.node.life is (THERE if (life, event) == (AWAITED, Script.hello) else life)
        script.check()


def test_without_a_launcher_the_end_of_a_connection_is_a_loss(made: Callable[[], Script]) -> None:
    script = made()
    script.link.losses.launcher = None
    script.disconnected()
    assert script.node.life is LOST
    script.check()


def test_another_change_is_refused() -> None:
    connection = NodeConnection(3)
    connection.life = LOST
    with pytest.raises(AssertionError, match="node 3 is lost, and can't become there"):
        connection.become(THERE)
    assert connection.life is LOST
    assert set(CHANGES) == set(Life)
