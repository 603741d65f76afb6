"""Another worker in a lost node's place, as the link and a node see it: no sockets, no processes."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import pytest
from fake_hub import HELLO, FakeHub
from node_kit import ADD, FULL, Node

from disttensor.runtime.channel.opened import Channels
from disttensor.runtime.host.launcher import Exited, Launcher
from disttensor.runtime.master.connection import Life, Progress
from disttensor.runtime.master.link import Link
from disttensor.runtime.master.mesh_home import MeshHome
from disttensor.runtime.node.side_channel import SideChannel
from disttensor.runtime.protocol import commands as c
from disttensor.runtime.protocol import side
from disttensor.runtime.protocol.bundle import Bundle
from disttensor.runtime.protocol.errors import DisttensorError, NodeLost
from disttensor.runtime.protocol.keys import pair_key
from disttensor.runtime.transport.inproc import InprocHub

NEW_REF = itertools.count(1000).__next__
DEFINE = c.Define(0, "aten::neg", (c.Hole(True),), (), 1)
STREAM = c.MakeStream(9, "cpu", 0)
#: A failure of a command that has used what an earlier worker in node 1's place had.
GONE = c.Failed(3, "the use of a tensor", "builtins.RuntimeError", "tensor 7 was held by", "", lost=1, incarnation=0)


class Told(Launcher):
    """Tells of ends when it is asked."""

    def __init__(self) -> None:
        self.exited, self.ended, self.descriptor = list[Exited](), list[int](), os.eventfd(1, os.EFD_NONBLOCK)

    def start(self, bundles: Sequence[Bundle]) -> None: ...

    def stop(self, grace: float) -> None:
        os.close(self.descriptor)

    def fileno(self) -> int:
        return self.descriptor

    def events(self) -> list[Exited]:
        exited, self.exited = self.exited, []
        return exited

    def end_worker(self, rank: int) -> None:
        self.ended.append(rank)


class Script:
    """A link to three nodes, all there, and what is said by them."""

    def __init__(self) -> None:
        self.hub, self.told = FakeHub(), list[NodeLost]()
        self.link = Link(self.hub, 3, None, self.told.append)
        for rank in range(3):
            self.hub.say(rank, HELLO)
        self.link.replies.drain()
        self.node = self.link.nodes[1]

    def issue(self, queue: Any, *commands: c.Command) -> None:
        for command in commands:
            queue.add(command)
        self.link.sender.flush(queue)

    def lose(self, why: str = "it fell") -> None:
        self.link.losses.lose(1, why)

    def begin(self) -> None:
        """Another worker begins and says hello; its node is not given out yet."""
        connection = self.link.reconnect(1, f"key {len(self.node.former) + 1}")
        self.hub.say(1, HELLO, done=connection.first)
        self.link.replies.drain()

    def again(self, state: Sequence[c.Command] = ()) -> None:
        self.begin()
        self.link.resume(1, NEW_REF, state)
        self.link.sender.flush_all()

    def sent(self, rank: int) -> list[c.Command]:
        """What a node was sent since this was asked last."""
        found = self.hub.commands(rank)
        self.hub.sent = [each for each in self.hub.sent if each[0] != rank]
        return found


@pytest.fixture
def script() -> Iterator[Script]:
    made = Script()
    yield made
    made.link.close()


def test_a_connection_of_a_node_that_is_not_lost_is_not_replaced(script: Script) -> None:
    with pytest.raises(DisttensorError, match="node 1 is not lost: it is there"):
        script.link.reconnect(1, "key")
    script.lose()
    script.link.reconnect(1, "key")
    with pytest.raises(DisttensorError, match="node 1 is not lost: it is not there yet"):
        script.link.reconnect(1, "key")
    assert script.hub.readmitted == [(1, "key")]


def test_numbers_go_on_and_name_one_connection(script: Script) -> None:
    box = script.node.outbox
    script.issue(box, c.Free(1, ()), c.Free(2, ()))
    first = script.node.progress
    assert first == Progress(1, 0, 0, 2)
    script.hub.say(1, done=2)
    script.link.replies.drain()
    assert script.node.progress.has_reached(first)
    script.issue(box, c.Free(3, ()))
    second = script.node.progress
    script.lose()
    script.again()
    assert script.node.connection.first == 3
    assert not script.node.progress.has_reached(second), "it was sent to a worker that is gone"
    assert not script.node.progress.has_reached(first), "another worker has done nothing of that"
    assert [script.node.incarnation(n).number for n in (0, 1)] == [0, 1]
    assert [error.incarnation for error in script.told] == [0]
    script.lose("again")
    script.again()
    assert str(script.told[1]).startswith("node 1 (host host, pid 1, incarnation 1) is lost: again")
    assert script.node.connection.number == 2


def test_the_end_of_a_former_workers_other_connection_loses_nobody(script: Script) -> None:
    """What the script holds for all has a connection of its own, whose end may be noted late."""
    script.lose()
    script.again()
    script.link.losses.disconnected(1, "late", 0)
    assert script.node.lost is None
    script.link.losses.disconnected(1, "now", 1)
    assert [error.incarnation for error in script.told] == [0, 1]


def test_progress_is_read_without_a_message(script: Script) -> None:
    script.issue(script.node.outbox, c.Free(1, ()))
    before = len(script.hub.sent)
    assert [node.progress.sent for node in script.link.nodes] == [0, 1, 0]
    assert len(script.hub.sent) == before


@pytest.mark.parametrize("done", [2, 4])
def test_a_report_of_another_connections_commands_breaks_the_protocol(script: Script, done: int) -> None:
    script.issue(script.node.outbox, c.Free(1, ()), c.Free(2, ()), c.Free(3, ()))
    script.lose()
    script.link.reconnect(1, "key")
    script.hub.say(1, HELLO, done=done)
    script.link.replies.drain()
    assert script.node.life is Life.LOST
    assert "broke the protocol" in script.told[-1].cause


def test_what_a_worker_is_told_first(script: Script) -> None:
    """What gets to be known for good, in its order; then what is issued."""
    box = script.node.outbox
    script.node.connection.knowing.update((0, 2))
    script.node.know(0, DEFINE)
    script.node.standing[9] = (STREAM,)
    script.node.standing["graph", 1] = (c.Define(5, "aten::abs", (c.Hole(True),), (), 1), c.EndGraph(1, (), (), (), ""))
    script.issue(box, c.Free(1, ()))
    script.lose()
    assert [each for each in script.sent(0) if isinstance(each, c.Lost)] == []  # it is queued yet
    script.sent(1)
    script.again([c.Default(1)])
    script.issue(box, c.Free(2, ()))
    sent = script.sent(1)
    assert isinstance(sent[0], c.Again)
    assert (sent[0].rank, sent[0].incarnation) == (1, 1)
    assert sent[1:] == [
        c.Default(1), DEFINE, c.Define(5, "aten::abs", (c.Hole(True),), (), 1), STREAM, c.EndGraph(1, (), (), (), ""),
        c.Forget((5,)), c.Free(2, ()),
    ]  # fmt: skip
    for rank in (0, 2):
        told = script.sent(rank)
        assert [type(each) for each in told] == [c.Lost, c.Again], "the others, once, and behind the loss"
        assert told[1] == sent[0]
    script.lose()
    script.again()
    bounds = [each for each in script.sent(1) if isinstance(each, c.Again)]
    assert [(each.rank, each.incarnation) for each in bounds] == [(1, 1), (1, 2)]
    assert bounds[0] == sent[0]
    assert bounds[0].before < bounds[1].before


@pytest.mark.parametrize("when", ["lost", "begun"])
def test_what_is_issued_while_a_node_is_lost_is_thrown_away(script: Script, when: str) -> None:
    box = script.node.outbox
    script.lose()
    if when == "begun":
        script.begin()
    ref = NEW_REF()
    box.add(c.Free(ref, ()))  # a thread that has not looked at the limit yet
    with pytest.raises(NodeLost):
        script.link.requests.new(1)
    box.add(c.Free(ref, ()))  # another one
    if when == "lost":
        script.begin()
    script.link.resume(1, NEW_REF)
    script.link.sender.flush_all()
    told = script.sent(1)
    assert [type(each) for each in told] == [c.Again]
    assert ref < cast(c.Again, told[0]).before
    script.issue(box, c.Free(5, ()))
    assert script.sent(1) == [c.Free(5, ())]


@pytest.mark.parametrize("also", [False, True])
def test_a_mesh_goes_on_when_all_of_its_nodes_are_there(script: Script, also: bool) -> None:
    fan, pair = script.link.sender.fan_out((0, 1, 2)), script.link.sender.fan_out((0, 2))
    script.issue(fan, c.Free(1, ()))
    script.lose()
    if also:
        script.link.losses.lose(2, "it fell, too")
    for rank in range(3):
        script.sent(rank)
    home = MeshHome(fan, itertools.count(-1, -1), script.link.nodes)
    number = home.define("aten::neg", DEFINE.args, (), 1, None)  # a plan knows it from now on
    fan.add(c.Free(2, ()))
    with pytest.raises(NodeLost):
        script.link.sender.flush(fan)
    script.again()
    if also:
        with pytest.raises(NodeLost, match="it fell, too"):
            script.link.sender.flush(fan)
        connection = script.link.reconnect(2, "key of 2")
        script.hub.say(2, HELLO, done=connection.first)
        script.link.replies.drain()
        script.link.resume(2, NEW_REF)
    script.issue(fan, c.Free(3, ()))
    script.issue(pair, c.Free(4, ()))
    for rank in range(3):
        got = [each for each in script.sent(rank) if not isinstance(each, (c.Lost, c.Again))]
        assert got == [home.defined[number], c.Free(3, ()), *([c.Free(4, ())] if rank != 1 else [])]


def test_a_loss_that_the_script_knows_of_is_not_told_again(script: Script) -> None:
    script.hub.say(0, c.Failed(0, "aten::add", "builtins.RuntimeError", "lost", "", lost=1))
    script.issue(script.link.nodes[0].outbox, c.Free(1, ()))
    script.link.replies.drain()
    failure = script.link.failures[0, 0]
    assert failure.incarnation == 0
    script.lose()
    script.link.told_losses.add(1)
    script.again()
    assert script.link.told_losses == set()
    assert script.link.losses.errors == []
    assert failure.observed
    script.lose("again")
    assert [error.cause.partition(";")[0] for error in script.link.losses.errors] == ["again"]


@pytest.mark.parametrize(
    ("rank", "lost", "incarnation", "is_taken"),
    [(1, 1, 0, True), (0, 1, 0, True), (0, 1, -1, True), (1, 1, -1, False), (1, 1, 1, False), (0, 1, 2, False)],
)
def test_a_node_names_only_losses_that_can_be(
    script: Script, rank: int, lost: int, incarnation: int, is_taken: bool
) -> None:
    script.lose()
    script.again()
    node = script.link.nodes[rank]
    script.issue(node.outbox, c.Free(1, ()))
    seq = node.outbox.sent - 1
    script.hub.say(
        rank, c.Failed(seq, "a use", "builtins.RuntimeError", "gone", "", lost=lost, incarnation=incarnation),
        done=node.outbox.first,
    )  # fmt: skip
    script.link.replies.drain()
    assert (node.life is Life.THERE) is is_taken
    if is_taken:
        assert script.link.failures[rank, seq].incarnation == (1 if incarnation < 0 else incarnation)


def test_a_late_report_names_the_loss_of_then(script: Script) -> None:
    """A command that was issued before the script told of another worker has failed by the loss of the one before."""
    box = script.link.nodes[0].outbox
    script.issue(box, c.Free(1, ()))
    script.lose()
    script.again()
    script.issue(box, c.Free(2, ()))
    for seq, incarnation in ((0, 0), (box.sent - 1, 1)):
        script.hub.say(0, c.Failed(seq, "a use", "builtins.RuntimeError", "gone", "", lost=1))
        script.link.replies.drain()
        assert script.link.failures[0, seq].incarnation == incarnation


def test_another_worker_begins_when_the_end_of_the_lost_one_is_told() -> None:
    """And when no order to end the rank is left: it would end the other one."""
    launcher, hub = Told(), FakeHub()
    link = Link(hub, 2, cast(Launcher, launcher), lambda error: None)
    for rank in range(2):
        hub.say(rank, HELLO)
    link.replies.drain()
    node = link.nodes[1]
    link.losses.kill(1, "the script has killed it")
    with pytest.raises(TimeoutError, match=r"has not told of the end of node 1 within 0 s"):
        link.losses.wait_for_end(node, 0)
    launcher.exited.append(Exited(1, 1, "killed", -9, ()))
    link.losses.wait_for_end(node, 60)
    assert launcher.ended == [1]
    link.reconnect(1, "key")
    assert not node.connection.ended
    link.losses.ask_launcher()
    assert launcher.ended == [1]
    link.close()
    launcher.stop(0)


# ---- on a node -------------------------------------------------------------------------------------------------------


@pytest.fixture
def node() -> Iterator[Node]:
    made = Node()
    yield made
    made.close()


@pytest.mark.parametrize("rank", [0, 4])
def test_the_use_of_what_is_gone(node: Node, rank: int) -> None:
    """Reported once, by the first use; the node goes on. ``rank``: the node's own place, or that of a mate."""
    node.do(FULL, ADD, c.Call(1, 200, (1.0,)), c.Again(rank, 1, 100), c.Again(rank, 2, 150))
    first = node.failed(c.Call(2, 201, (1, 191)))  # 200 and 10
    assert (first.lost, first.incarnation) == (rank, 0)
    assert "tensor 10 was" in first.message
    assert f"incarnation 0 of node {rank}" in first.message
    assert node.do(c.Call(2, 202, (2, 192))) == [], "the same tensor: its poison is passed on"
    assert node[201] == node[202] == node[10]
    second = node.failed(c.Call(2, 203, (3, 83)))  # 120
    assert second.incarnation == 1
    assert node.failed(c.Call(2, 204, (4, 44))).lost == -1, "160 is not gone: nobody has made it"
    node.do(c.Free(10, ()), c.Call(1, 11, (1.0,)), c.Call(2, 205, (5, 194)))
    assert 10 not in node
    assert float(node[205][0, 0]) == 2, "what is made below the bound by a command that came late is there"


def test_an_answer_about_what_is_gone(node: Node) -> None:
    node.do(c.Again(0, 1, 100))
    replies = node.do(c.Digest(5, 10))
    assert [type(reply) for reply in replies] == [c.Failed, c.Poisoned]
    assert node.do(c.Query(6, 10))[-1] == c.Poisoned(6, 0, 1)


def test_late_words_of_a_loss_end_nothing_of_the_worker_that_came(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    expired: list[int] = []
    channels: Channels = node.executor.channels
    monkeypatch.setattr(channels.data[0], "expire", lambda rank, why: expired.append(rank))
    take = cast(Callable[[side.Word, Any], None], SideChannel.__new__(SideChannel)._handle_word)
    cast(Any, take).__self__._channels = channels
    take(side.Gone(4, "it fell"), None)
    assert expired == [4] * len([*channels])
    expired.clear()
    node.do(c.Again(4, 1, 100))
    take(side.Gone(4, "it fell"), None)
    assert expired == []
    take(side.Gone(4, "again", 1), None)
    assert expired == [4] * len([*channels])


# ---- keys, and connections within a process --------------------------------------------------------------------------


def test_each_worker_has_keys_of_its_own() -> None:
    secret = bytes(range(32))
    keys = [
        pair_key(secret, "job", a, b, pair) for a, b in ((0, 1), (-1, 1)) for pair in ((0, 0), (0, 1), (1, 0), (0, 2))
    ]
    assert len(set(keys)) == len(keys)
    assert pair_key(secret, "job", 0, 1, (3, 4)) == pair_key(secret, "job", 1, 0, (4, 3))
    assert pair_key(secret, "job", 0, 1) == keys[0]


def test_nothing_of_a_connection_that_was_replaced_is_given_out() -> None:
    hub = InprocHub(2)
    try:
        former, other = hub.spoke(0), hub.spoke(1)
        former.send(b"hello")
        assert hub.drain() == [(0, b"hello")]
        former.send(b"late")
        other.send(b"hello")
        hub.readmit(0, "")
        assert former.closed
        mine = hub.spoke(0)
        mine.send(b"hello again")
        assert hub.drain() == [(1, b"hello"), (0, b"hello again")]
        assert hub.gone() == []
        hub.send(0, b"for it")
        assert mine.recv(1.0) == b"for it"
    finally:
        hub.close()
