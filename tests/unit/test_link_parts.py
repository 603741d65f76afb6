"""The parts of a link: each is made alone, of those before it, and reads nothing that another keeps to itself."""

from __future__ import annotations

import ast
import os
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from fake_hub import HELLO, FakeHub
from sources import Source, below, refuse
from spies import spy

from disttensor.runtime.host.launcher import Exited, Launcher, Started
from disttensor.runtime.master import waiting
from disttensor.runtime.master.command_queue import MAX_DATA
from disttensor.runtime.master.idle import IdleFlush
from disttensor.runtime.master.link_state import LinkState
from disttensor.runtime.master.losses import Losses
from disttensor.runtime.master.replies import Replies
from disttensor.runtime.master.requests import Requests
from disttensor.runtime.master.sender import BUSY, Sender
from disttensor.runtime.master.side_channels import SideChannels
from disttensor.runtime.master.waiting import Waiting
from disttensor.runtime.process.own_time import Standstill
from disttensor.runtime.protocol import codec
from disttensor.runtime.protocol import commands as c
from disttensor.runtime.protocol.bundle import Bundle
from disttensor.runtime.protocol.errors import DisttensorError, ForkError, NodeLost

#: Seconds for what takes a moment; longer is a hang.
SOON = 20


class FakeLauncher(Launcher):
    """Says how nodes have ended, when it is asked."""

    def __init__(self, *exited: Exited) -> None:
        self.exited, self.ended, self.looked = list(exited), list[int](), list[int]()
        self.descriptor = os.eventfd(1, os.EFD_NONBLOCK)  # it always has something to say

    def start(self, bundles: Sequence[Bundle]) -> None: ...

    def stop(self, grace: float) -> None:
        os.close(self.descriptor)

    def fileno(self) -> int:
        return self.descriptor

    def events(self) -> list[Started | Exited]:
        events, self.exited = self.exited, []
        return [*events]

    def end_worker(self, rank: int) -> None:
        self.ended.append(rank)

    def look(self, rank: int) -> None:
        self.looked.append(rank)


@pytest.fixture
def state(hub: FakeHub) -> Iterator[LinkState]:
    """Two nodes, both there."""
    made = LinkState(hub, 2)
    for node in made.nodes:
        node.connection.greet(HELLO)
    yield made
    made.interrupts.restore()


class Parts:
    """The parts up to ``Sender``, for those that stand behind them."""

    def __init__(self, state: LinkState, launcher: Launcher | None = None) -> None:
        self.told: list[NodeLost] = []
        self.side = SideChannels()
        self.requests = Requests(state)
        self.losses = Losses(state, self.requests, self.side, launcher, self.told.append)
        self.replies = Replies(state, self.requests, self.losses)
        self.waiting = Waiting(state, self.requests, self.losses, self.replies)
        self.sender = Sender(state, self.requests, self.losses, self.replies, self.waiting)


# ---- each alone ------------------------------------------------------------------------------------------------------


def test_the_state(state: LinkState) -> None:
    box = state.nodes[1].outbox
    state.check(box)
    state.nodes[1].lose(NodeLost(1, "a", 1, "it fell"))
    with state.unheard(), pytest.raises(NodeLost, match="it fell"):
        state.check(box)
    assert state.told_losses == set()
    with pytest.raises(NodeLost, match="it fell"):
        state.check(box)
    assert state.told_losses == {1}
    assert state.there() == [state.nodes[0]]
    state.closed = True
    with pytest.raises(DisttensorError, match="shut down"):
        state.check(state.nodes[0].outbox)
    state.forked()
    with pytest.raises(ForkError):
        state.check(state.nodes[0].outbox)


def test_requests(state: LinkState) -> None:
    requests, told = Requests(state), list[str]()
    one, two = requests.new(0), requests.new(1, c.Answer)
    three = requests.new_told(1, c.Result, lambda: told.append("over"))
    assert (len(requests), list(requests)) == (3, [one, two, three])
    assert requests.waited_for(1, c.Result) == [three.id]
    requests.answer(two, 1, c.Answer(two.id, "1"))
    assert (two.done, two.reply) == (True, c.Answer(two.id, "1"))
    requests.withdraw(one)
    assert requests.get(one.id) is None
    assert state.nodes[0].connection.unawaited == {one.id}
    assert requests.is_under_way(state.nodes[0], one.id)
    requests.lose(1)
    assert (three.done, three.reply, told, len(requests)) == (True, None, ["over"], 0)
    four = requests.new(0)
    requests.end()
    assert four.done


def test_a_callback_of_a_groups_request_that_raises_ends_nothing_else(
    state: LinkState, caplog: pytest.LogCaptureFixture
) -> None:
    """It is called in whichever thread takes the last answer, which waits for something else."""
    requests, told = Requests(state), list[str]()
    one = requests.new_of_group((0,))
    one.call_at_end(lambda: told.remove("nothing"))
    one.call_at_end(lambda: told.append("next"))
    requests.answer(one, 0, c.TookPart((one.id,)))
    assert told == ["next"]
    assert "a done callback failed" in caplog.text
    requests.end()


def test_a_request_of_a_group(state: LinkState) -> None:
    """It ends with the last answer that is due: one of a lost node is not."""
    requests, told = Requests(state), list[str]()
    one, two, three, four = (requests.new_of_group((0, 1)) for _ in range(4))
    one.call_at_end(lambda: told.append("one"))
    assert (one.node, one.ranks, one.is_answered(0), one.is_decided()) == (0, [0, 1], False, False)
    assert [*requests.take_parts(0, (one.id,))] == []
    assert (one.node, one.ranks, one.done, one.is_answered(0), one.is_answered(1)) == (1, [1], False, True, False)
    assert [*requests.take_parts(0, (one.id, 99))] == [one.id, 99]  # it has told of one, and there is no 99
    assert [*requests.take_parts(1, (one.id,))] == []
    assert (one.done, one.failed, one.well, told, requests.get(one.id)) == (True, False, True, ["one"], None)
    one.call_at_end(lambda: told.append("late"))
    assert told == ["one", "late"]
    poisoned = c.Poisoned(two.id, 1, 5)
    requests.answer(two, 1, poisoned)
    assert (two.done, two.is_decided(), two.causes, one.causes) == (False, True, {1: poisoned}, {})
    requests.lose(0)
    assert (two.done, two.failed, two.well, two.gone) == (True, True, False, {0})
    assert (three.done, three.is_decided(), three.ranks) == (False, True, [1])
    assert [*requests.take_parts(1, (three.id,))] == []
    assert (three.done, three.gone) == (True, {0})
    requests.end()
    assert (four.done, four.well, four.ranks) == (True, False, [1])
    state.nodes[1].lose(NodeLost(1, "a", 1, "it fell"))
    with state.unheard(), pytest.raises(NodeLost):
        requests.new_of_group((0, 1))
    assert [*requests] == [four]


def test_losses_with_nobody_to_explain_them(state: LinkState) -> None:
    told = list[NodeLost]()
    losses = Losses(state, Requests(state), SideChannels(), None, told.append)
    state.nodes[1].connection.knowing.add(0)
    losses.disconnected(1, "its cable was cut", 0)
    losses.disconnected(1, "again", 0)
    assert [str(each.cause) for each in told] == ["its cable was cut"]
    assert losses.errors == told
    assert [node.outbox.queue[::2] for node in state.nodes if node.lost is None] == [
        [c.Lost(1, "its cable was cut")] if node.rank == 0 else [] for node in state.nodes if node.lost is None
    ]  # one that does not know the node has no use for its loss
    assert not losses.unexplained


def test_losses_that_a_launcher_explains(state: LinkState) -> None:
    launcher = FakeLauncher(Exited(1, 5, "exit code 3", 3, ("a last line",)))
    losses = Losses(state, Requests(state), SideChannels(), launcher, lambda error: None)
    losses.disconnected(1, "its connection ended", 0)
    assert (list(losses.unexplained), losses.errors) == ([1], [])
    losses.explain()
    assert [error.cause for error in losses.errors] == ["exit code 3"]
    losses.look(state.nodes[0])
    losses.ask_launcher()
    assert (launcher.ended, launcher.looked) == ([1], [0])  # the process may be stopped, or cut off
    launcher.stop(0)


@pytest.mark.parametrize("children", [True, False])
def test_the_process_of_a_node_is_the_one_that_its_launcher_has_started_here(state: LinkState, children: bool) -> None:
    launcher = FakeLauncher(Exited(1, 5, "exit code 3", 3, ()))
    launcher.starts_children = children
    told = [[Started(0, 4), Started(1, 5)], launcher.events()]
    launcher.events = iter(told).__next__  # type: ignore[method-assign]
    losses = Losses(state, Requests(state), SideChannels(), launcher, lambda error: None)
    losses.ask_launcher()
    assert [node.connection.process for node in state.nodes] == ([4, 5] if children else [0, 0])
    losses.ask_launcher()
    assert [node.connection.process for node in state.nodes] == ([4, 0] if children else [0, 0])
    launcher.stop(0)


def test_replies(hub: FakeHub, state: LinkState) -> None:
    requests = Requests(state)
    losses = Losses(state, requests, SideChannels(), None, lambda error: None)
    replies, request = Replies(state, requests, losses), requests.new(0, c.Answer)
    hub.say(0, c.Answer(request.id, "7"))
    hub.say(1, c.Answer(request.id, "8"))
    replies.drain()
    assert request.reply == c.Answer(request.id, "7")
    assert [(error.rank, "nobody has asked for" in error.cause) for error in losses.errors] == [(1, True)]
    assert hub.were_cut == [1]
    hub.ended.append(0)
    replies.drain()
    assert [error.cause for error in losses.errors[1:]] == ["its connection ended"]


def test_waiting(hub: FakeHub, state: LinkState, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = Parts(state)
    request = parts.requests.new(0, c.Answer)
    hub.say(0, c.Answer(request.id, "7"))
    assert parts.waiting.wait(request) == c.Answer(request.id, "7")
    late = parts.requests.new(0, c.Answer)
    with pytest.raises(TimeoutError, match=r"node 0 has not answered within 0\.001 s"):
        parts.waiting.wait(late, 0.001)
    monkeypatch.setattr(waiting, "TICK", SOON)
    lost, about = parts.requests.new(1), threading.Event()

    def polls(*args: Any) -> Any:
        about.set()
        return poll(*args)

    def lose() -> None:
        assert about.wait(SOON)
        parts.losses.lose(1, "it fell")

    poll = spy(monkeypatch, parts.waiting, "_poll", polls)
    other = threading.Thread(target=lose)
    other.start()
    with pytest.raises(NodeLost, match="it fell"):
        parts.waiting.wait(lost)
    other.join()


def test_the_sender(hub: FakeHub, state: LinkState) -> None:
    parts, boxes = Parts(state), [node.outbox for node in state.nodes]
    boxes[0].add(c.Sync(1))
    parts.sender.flush(boxes[0])
    parts.sender.together([(0, c.Send(1, 2, 1, 0), None), (1, c.Recv(1, 3, 0, (), 0, "cpu", 0), None)])
    assert [type(command) for command in hub.commands(0)] == [c.Sync, c.Send]
    assert [type(command) for command in hub.commands(1)] == [c.Recv]
    mesh = parts.sender.fan_out((0, 1))
    boxes[1].add(c.Sync(4))
    mesh.add(c.Sync(5))
    parts.sender.flush_all()
    assert [command.request for command in hub.commands(1) if isinstance(command, c.Sync)] == [4, 5]
    hub.broken.add(1)
    boxes[1].add(c.Sync(6))
    with pytest.raises(NodeLost, match="node 1 is gone"):
        parts.sender.flush(boxes[1])
    request = parts.requests.new(0, c.Answer)
    boxes[0].add(c.Sync(request.id))
    hub.say(0, c.Answer(request.id, "7"))
    assert parts.sender.exchange(boxes[0], request, SOON) == c.Answer(request.id, "7")


def test_what_leaves_together_without_hurry_takes_fewer_messages(hub: FakeHub, state: LinkState) -> None:
    """A small collective keeps its nodes busy for longer than most commands, so more of them gather meanwhile."""
    parts, boxes = Parts(state), [node.outbox for node in state.nodes]

    def counts(hurry: bool) -> list[list[int]]:
        """Has 20 leave, behind an answer; returns how many commands each message of a node has, for both."""
        sent = len(hub.sent)
        for box in boxes:
            box.restart()
        for number in range(20):
            parts.sender.together([(rank, c.Sync(number), None) for rank in (0, 1)], hurry)
        parts.sender.flush_all()
        for rank, box in enumerate(boxes):
            hub.say(rank, done=box.sent)
        parts.replies.drain()
        sizes = [(rank, len(codec.decode_batch(message).commands)) for rank, message in hub.sent[sent:]]
        return [[size for of, size in sizes if of == rank] for rank in (0, 1)]

    assert counts(hurry=False) == [[1, 4, 15]] * 2, "queues that nobody looks at"
    assert counts(hurry=False) == [[2, 8, 10]] * 2
    assert counts(hurry=True) == [[1] * 20] * 2
    boxes[0].restart()
    boxes[1].block()
    parts.sender.together([(rank, c.Sync(1), None) for rank in (0, 1)], hurry=False)
    assert [box.batch for box in boxes] == [16, 2], "one that is blocking stays so"


def test_what_begins_a_function_leaves_at_once_unless_the_node_is_busy(hub: FakeHub, state: LinkState) -> None:
    parts, box = Parts(state), state.nodes[0].outbox

    def begin(first: int, count: int, nbytes: int = 0) -> list[int]:
        """Begins so many; returns how many commands each message has that leaves."""
        sent = len(hub.sent)
        for number in range(first, first + count):
            parts.sender.issue_call(0, c.Sync(number), None, nbytes)
        return [len(codec.decode_batch(message).commands) for _, message in hub.sent[sent:]]

    box.set_flush_threshold(8)  # of four commands
    assert begin(0, BUSY) == [1] * BUSY
    box.set_flush_threshold(8)
    assert begin(BUSY, 6) == [4]
    parts.sender.flush_all()
    hub.say(0, done=BUSY)
    parts.replies.drain()
    assert begin(BUSY + 6, 3) == [1, 1], "six and two are under way"
    assert begin(BUSY + 9, 1, MAX_DATA) == [2], "much data does not wait"
    assert [command.request for command in hub.commands(0) if isinstance(command, c.Sync)] == [*range(BUSY + 10)]
    box.lose(NodeLost(0))
    with pytest.raises(NodeLost):
        parts.sender.issue_call(0, c.Sync(99), None, 0)


def test_a_script_that_ends_as_soon_as_it_goes_on_has_stood_still(
    hub: FakeHub, state: LinkState, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Standstill, "look", lambda self: 6.0 if state.closed else 0.0)
    parts = Parts(state)
    idle = IdleFlush(state, parts.requests, parts.losses, parts.replies, parts.sender, parts.side)
    state.closed = True
    state.wake.set()
    idle.join()
    assert [record.getMessage()[:30] for record in caplog.records] == ["this script stood still for 6 "]


def test_the_idle_flush(hub: FakeHub, state: LinkState) -> None:
    parts = Parts(state)
    idle = IdleFlush(state, parts.requests, parts.losses, parts.replies, parts.sender, parts.side)
    state.nodes[1].outbox.add(c.Sync(1))
    assert hub.has_sent.wait(SOON)
    assert hub.commands(1) == [c.Sync(1)]
    state.closed = True
    state.wake.set()
    idle.join()


# ---- between them ----------------------------------------------------------------------------------------------------


def peeks(file: Source) -> Iterator[str]:
    """What a file reads of others' underscore names."""
    for node in file.nodes(ast.Attribute):
        whose = ast.unparse(node.value)
        own = whose in ("self", "cls", "super()") or whose.startswith("torch")
        if node.attr.startswith("_") and not node.attr.endswith("__") and not own:
            yield f"{file.at(node.lineno)} reads {ast.unparse(node)}"


def test_no_part_reads_what_another_keeps_to_itself() -> None:
    refuse((each for file in below("runtime/master") for each in peeks(file)), "an underscore name is its object's own")


def test_what_a_part_keeps_to_itself_is_seen() -> None:
    text = "class A:\n    def f(self, b):\n        self._x = b.__doc__\n        return self.b._y + b._z()\n"
    assert [each.split()[-1] for each in peeks(Source("runtime/master/a.py", text))] == ["self.b._y", "b._z"]
