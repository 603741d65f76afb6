"""The seam: who listens to a point is told of each event, and what it observes goes on whatever a listener does."""

from __future__ import annotations

import logging
import threading
from array import array
from collections.abc import Iterator
from typing import Any

import pytest
from fake_hub import HELLO, FakeHub
from virtual_time import VirtualClock

from disttensor.runtime.master.link_state import LinkState
from disttensor.runtime.master.losses import Losses
from disttensor.runtime.master.replies import Replies
from disttensor.runtime.master.requests import Requests
from disttensor.runtime.master.sender import Sender
from disttensor.runtime.master.side_channels import SideChannels
from disttensor.runtime.master.waiting import Waiting
from disttensor.runtime.node.worker import NodeWorker
from disttensor.runtime.process.observing import (
    BatchApplied,
    CommandBegun,
    CommandDone,
    CommandIssued,
    IssueNotes,
    MessageBegun,
    MessageSent,
    NodeGone,
    Point,
    ReportTaken,
    ScriptSeam,
    SwitchedPoint,
    WaitEnded,
)
from disttensor.runtime.protocol import codec
from disttensor.runtime.protocol import commands as c
from disttensor.runtime.protocol.bundle import Bundle
from disttensor.runtime.protocol.errors import DisttensorError, NodeLost, ProtocolError
from disttensor.runtime.transport.base import Spoke

#: Where a command was issued.
SITE = compile("0", "train.py", "exec"), 2


# ---- a point ---------------------------------------------------------------------------------------------------------


def test_listeners_come_and_go() -> None:
    point, one, two = Point[int]("heard"), list[int](), list[int]()
    point.notify(1)
    with point.heard_by(one.append):
        point.notify(2)
        point.add(two.append)
        point.notify(3)
    point.notify(4)
    point.remove(one.append)  # it has left already
    assert (one, two, repr(point)) == ([2, 3], [3, 4], "<Point heard listeners=1>")


def test_who_has_to_know_hears_whether_there_are_listeners() -> None:
    """The switch is called without the point's lock, as it may take another one."""
    point, heard, seen = SwitchedPoint[int]("heard"), list[bool](), list[int]()

    def switch() -> None:
        assert not point._changing.locked()
        heard.append(bool(point.listeners))

    point.switch = switch
    with point.heard_by(seen.append):
        point.notify(1)
    point.add(fall)
    point.notify(2)
    assert (heard, seen) == ([True, False, True, False], [1])


def fall(event: int) -> None:
    raise ValueError("it fell")


def test_one_that_listens_twice_leaves_once() -> None:
    point, seen = Point[int]("heard"), list[int]()
    point.add(seen.append)
    with point.heard_by(seen.append):
        point.notify(1)
    point.notify(2)
    assert seen == [1, 1, 2]


def test_a_listener_that_raises_is_named_once_and_told_no_more(caplog: pytest.LogCaptureFixture) -> None:
    point, calls, seen = Point[int]("heard"), list[int](), list[int]()

    def clumsy(event: int) -> None:
        calls.append(event)
        raise ValueError("it fell")

    point.add(clumsy)
    point.add(seen.append)
    with caplog.at_level(logging.WARNING, "disttensor"):
        point.notify(1)
        point.notify(2)
    assert (calls, seen) == ([1], [1, 2])
    (said,) = caplog.records
    assert "clumsy of 'heard' failed, and is told of no more events" in said.getMessage()
    assert said.exc_info is not None
    assert str(said.exc_info[1]) == "it fell"


def test_a_forked_child_has_no_listeners() -> None:
    seam, seen = ScriptSeam(), list[Any]()
    points = seam.points().values()
    for point in points:
        point.add(seen.append)
        point._changing.acquire()  # as a thread of the parent has it
    seam.forked()
    for point in points:
        point.notify(1)
        point.add(seen.append)
    assert (seen, len(points)) == ([], 6)


# ---- the script's end ------------------------------------------------------------------------------------------------


class End:
    """The parts of a link, by a clock of its own."""

    def __init__(self, hub: FakeHub, clock: VirtualClock) -> None:
        self.state = state = LinkState(hub, 2, clock=clock)
        for node in state.nodes:
            node.connection.greet(HELLO)
        self.requests = Requests(state)
        self.losses = Losses(state, self.requests, SideChannels(clock), None, lambda error: None)
        self.replies = Replies(state, self.requests, self.losses)
        self.waiting = Waiting(state, self.requests, self.losses, self.replies)
        self.sender = Sender(state, self.requests, self.losses, self.replies, self.waiting)


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
def end(hub: FakeHub, clock: VirtualClock) -> Iterator[End]:
    made = End(hub, clock)
    yield made
    made.state.interrupts.restore()


def test_what_is_issued(end: End, hub: FakeHub, clock: VirtualClock) -> None:
    """Of a node's queue, also past a route, and of a mesh's that is made meanwhile. A free is issued by no line."""
    node, seen = end.state.nodes[1].outbox, list[CommandIssued]()
    node.add(c.Sync(1), SITE)
    with end.state.seam.issued.heard_by(seen.append):
        node.add(c.On(7, c.Call(1, 2, ())), SITE)
        node.put(c.Sync(3), None)
        mesh = end.sender.fan_out((0, 1))
        mesh.add(c.Sync(4), SITE)
        node.dead.append(5)
        end.sender.flush(node)
        node.add_route(+1)
        node.add(c.Sync(5), SITE)
    node.add(c.Sync(6), SITE)
    node.add_route(-1)
    node.put(c.Sync(7), SITE)
    end.sender.flush(node)
    now = clock.now()
    assert seen == [
        CommandIssued(now, (1,), "7", c.Call(1, 2, ()), SITE),
        CommandIssued(now, (1,), "", c.Sync(3), None),
        CommandIssued(now, (0, 1), "", c.Sync(4), SITE),
        CommandIssued(now, (1,), "", c.Sync(5), SITE),
    ]
    arrived = [x for rank, message in hub.sent if rank == 1 for x in codec.decode_batch(message).commands]
    assert [x.request for x in arrived if isinstance(x, c.Sync)] == [1, 3, 4, 5, 6, 7]
    assert any(isinstance(x, c.Free) for x in arrived)


@pytest.mark.parametrize("ranks", [(1,), (0, 1)])
def test_what_is_sent(end: End, hub: FakeHub, clock: VirtualClock, ranks: tuple[int, ...]) -> None:
    """To a node, and to the nodes of a mesh, which have a queue that overlaps theirs."""
    queue = end.sender.fan_out(ranks) if len(ranks) > 1 else end.state.nodes[1].outbox
    seen = list[MessageSent]()
    queue.add(c.Sync(1), SITE)
    end.sender.flush(queue)
    with end.state.seam.sent.heard_by(seen.append):
        end.sender.flush(queue)
        assert not seen  # there is nothing to send
        queue.add(c.Sync(2), SITE)
        queue.add(c.Sync(3))
        end.sender.flush(queue)
    queue.add(c.Sync(4), SITE)
    end.sender.flush(queue)
    messages = dict(hub.sent[len(ranks) : 2 * len(ranks)])
    assert seen == [MessageSent(clock.now(), rank, 1, [SITE, None], messages[rank]) for rank in ranks]
    assert [each.first for each in map(codec.decode_batch, messages.values())] == [1] * len(ranks)


def test_several_messages_at_once(end: End, hub: FakeHub) -> None:
    box, seen = end.state.nodes[0].outbox, list[MessageSent]()
    data = bytes(codec.MAX_MESSAGE // 2)
    for n in range(3):
        box.add(c.Piece(b"", data, False), (SITE[0], n))
    with end.state.seam.sent.heard_by(seen.append):
        end.sender.flush(box, wait=False)
    assert [each.message for each in seen] == [message for _, message in hub.sent]
    assert len(seen) > 1
    numbered = [(n, site) for each in seen for n, site in enumerate(each.sites, each.number)]
    assert numbered == [(n, (SITE[0], n)) for n in range(3)]


def test_what_can_not_be_sent_is_not_told_of(end: End, hub: FakeHub) -> None:
    box, seen = end.state.nodes[0].outbox, list[MessageSent]()
    hub.broken.add(0)
    box.add(c.Sync(1))
    with end.state.seam.sent.heard_by(seen.append), pytest.raises(NodeLost):
        end.sender.flush(box)
    assert not seen


def test_a_report_is_told_of_before_its_answer(end: End, hub: FakeHub, clock: VirtualClock) -> None:
    box, request, seen = end.state.nodes[0].outbox, end.requests.new(0, c.Answer), list[tuple[ReportTaken, bool]]()
    box.add(c.Sync(request.id))
    end.sender.flush(box)
    hub.say(0, c.Answer(request.id, "7"), done=1)
    (_, message), *_ = hub.arrived
    with end.state.seam.reported.heard_by(lambda event: seen.append((event, request.done))):
        end.replies.drain()
    assert seen == [(ReportTaken(clock.now(), 0, 1, 0.0, message), False)]
    assert request.done


def test_waits(end: End, hub: FakeHub, clock: VirtualClock) -> None:
    seen, began = list[WaitEnded](), clock.now()
    with end.state.seam.waited.heard_by(seen.append):
        late, answered = end.requests.new(1, c.Answer), end.requests.new(0, c.Answer)
        with pytest.raises(TimeoutError):
            end.waiting.wait(late, 5)
        clock.plan(7, lambda: hub.say(0, c.Answer(answered.id, "7")))
        end.waiting.wait(answered)
    assert seen == [WaitEnded(began + 5, began, 1, late.id), WaitEnded(began + 12, began + 5, 0, answered.id)]


def test_losses(end: End, clock: VirtualClock) -> None:
    seen = list[NodeGone]()
    with end.state.seam.lost.heard_by(seen.append):
        end.losses.lose(1, "it fell")
        end.losses.lose(1, "again")
    assert seen == [NodeGone(clock.now(), 1, end.losses.errors[0])]


def test_listeners_that_raise_break_nothing(
    end: End, hub: FakeHub, clock: VirtualClock, caplog: pytest.LogCaptureFixture
) -> None:
    def clumsy(event: object) -> None:
        raise ValueError("it fell")

    seam, box, request = end.state.seam, end.state.nodes[0].outbox, end.requests.new(0, c.Answer)
    for point in (seam.sent, seam.reported, seam.waited, seam.lost):
        point.add(clumsy)  # type: ignore[attr-defined]
    box.add(c.Sync(request.id))
    hub.say(0, c.Answer(request.id, "7"), done=1)
    with caplog.at_level(logging.WARNING, "disttensor"):
        assert end.sender.exchange(box, request, 60) == c.Answer(request.id, "7")
        end.losses.lose(1, "it fell")
    assert [text.partition(" of ")[2].split()[0] for text in caplog.messages] == [
        "'sent'", "'reported'", "'waited'", "'lost'",
    ]  # fmt: skip
    with pytest.raises(DisttensorError, match="it fell"):
        end.state.check(end.state.nodes[1].outbox)


# ---- a node's end ----------------------------------------------------------------------------------------------------


class Script(Spoke):
    """Gives a node its messages, and calls what a test does while the node asks for one of them."""

    def __init__(self, *messages: bytes) -> None:
        self.messages, self.taken = messages, 0
        self.before: dict[int, Any] = {}

    def recv(self, timeout: float | None = None) -> bytes | None:
        if self.taken in self.before:
            self.before[self.taken]()
        self.taken += 1
        return self.messages[self.taken - 1]

    def send(self, message: bytes) -> None: ...

    def close(self) -> None: ...


def served(clock: VirtualClock, script: Script) -> NodeWorker:
    """A node whose commands take a second each, by the clock; it has not begun."""
    node = NodeWorker(Bundle(job="observed", rank=3, address="", backend="inproc"), script)
    node.seam.clock = clock
    apply = node.executor.apply

    def slow(batch: c.Batch) -> None:
        apply(batch)
        clock.sleep(len(batch.commands))

    node.executor.apply = slow  # type: ignore[method-assign]
    return node


def serve(node: NodeWorker) -> None:
    thread = threading.Thread(target=node.serve)
    thread.start()
    thread.join()
    assert node.executor.stopped


def batches(*lengths: int) -> list[bytes]:
    """Messages of so many Frees, and one of the Stop."""
    firsts = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    made = [c.Batch(first, (c.Free(first, ()),) * n) for first, n in zip(firsts, lengths, strict=False)]
    return [codec.encode(each) for each in (*made, c.Batch(firsts[-1], (c.StopNode(),)))]


def test_of_one_thread_a_line_is_noted_now_and_then(end: End, clock: VirtualClock) -> None:
    """When it comes to a queue's limit, or to the edge of a part of it; each line once a second thread issues."""
    node, notes, lines = end.state.nodes[1].outbox, IssueNotes(room=100), [(*SITE,) for _ in range(5)]
    end.state.note_issued(notes)
    note_lines = end.sender.lines_noter(notes)
    assert note_lines() == clock.now()
    node.add(c.Sync(0), lines[0])
    end.sender.at_limit(node)
    clock.sleep(1)
    node.add(c.Sync(1), lines[1])
    node.add(c.Sync(2), lines[2])
    now = note_lines()
    me, noted = threading.get_ident(), [(now - 1, [lines[0]], (1,)), (now, [lines[2]], (1,))]
    assert notes.lines == [x for each in noted for x in (*each, me)]
    assert not notes.complete

    def other() -> None:
        node.add(c.Sync(3), lines[3])
        end.sender.at_limit(node)
        node.add(c.Sync(4), lines[4])

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert notes.lines[8:] == [now, [lines[3]], (1,), thread.ident]
    assert notes.complete
    assert notes.noted == {((1,), thread.ident): [now, lines[4]]}
    end.state.note_issued(None)
    assert node.commands is node.queue


def test_the_time_the_line_and_the_thread_of_what_is_issued_are_noted(
    end: End, hub: FakeHub, clock: VirtualClock
) -> None:
    """Where several threads issue: past a route, too, and of a mesh's that is made meanwhile; those who listen besides
    hear of the same time."""
    node, seen, notes = end.state.nodes[1].outbox, list[CommandIssued](), IssueNotes(room=2)
    node.add(c.Sync(1), SITE)
    notes.complete = True
    end.state.note_issued(notes)
    for command, add in ((c.Sync(2), node.add), (c.Sync(3), node.put)):
        clock.sleep(1)
        add(command, SITE if add == node.add else None)
    now = clock.now()
    end.sender.fan_out((0, 1)).add(c.Sync(4), SITE)
    node.dead.append(5)
    end.sender.flush(node)
    thread = threading.Thread(target=node.add, args=(c.Sync(9), SITE))
    thread.start()
    thread.join()
    node.add_route(+1)
    node.add(c.Sync(5), SITE)
    node.add(c.Sync(6), SITE)
    node.add_route(-1)
    with end.state.seam.issued.heard_by(seen.append):
        clock.sleep(1)
        node.add(c.Sync(7), SITE)
    assert len(node.commands) == len(node.queue)
    end.state.note_issued(None)
    node.add(c.Sync(8), SITE)
    end.sender.flush(node)
    me, there = threading.get_ident(), thread.ident
    assert notes.noted == {
        ((1,), me): [now - 1, SITE, now, None, now, SITE, now, SITE, now + 1, SITE],
        ((0, 1), me): [now, SITE],
        ((1,), there): [now, SITE],
    }
    assert seen == [CommandIssued(now + 1, (1,), "", c.Sync(7), SITE)]
    arrived = [x for rank, message in hub.sent if rank == 1 for x in codec.decode_batch(message).commands]
    assert [x.request for x in arrived if isinstance(x, c.Sync)] == [1, 2, 3, 4, 9, 5, 6, 7, 8]
    notes.drop_oldest()
    assert notes.noted[(1,), me] == [now, SITE, now + 1, SITE]
    assert len(notes.noted[(0, 1), me]) == 2


def test_what_a_node_has_applied(clock: VirtualClock) -> None:
    """Somebody begins to listen while it serves, and ends that."""
    script, seen, began = Script(*batches(1, 2, 1, 1)), list[BatchApplied](), clock.now()
    node = served(clock, script)
    script.before = {1: lambda: node.seam.applied.add(seen.append), 3: lambda: node.seam.applied.remove(seen.append)}
    serve(node)
    sizes = [len(message) for message in script.messages]
    assert seen == [
        BatchApplied(began + 3, began + 1, 3, 1, 2, sizes[1]),
        BatchApplied(began + 4, began + 3, 3, 3, 1, sizes[2]),
    ]


def test_each_command_that_a_node_has_applied(clock: VirtualClock) -> None:
    script, seen, began = Script(*batches(1, 2, 1)), list[CommandBegun | CommandDone](), clock.now()
    node = served(clock, script)
    point, free = node.seam.commands, c.Free(1, ())
    script.before = {1: lambda: point.add(seen.append), 2: lambda: point.remove(seen.append)}
    serve(node)
    assert seen == [
        CommandBegun(began + 1, 3, "", 1, "Free", free),
        CommandDone(began + 2, began + 1, 3, "", 1, "Free", free),
        CommandBegun(began + 2, 3, "", 2, "Free", free),
        CommandDone(began + 3, began + 2, 3, "", 2, "Free", free),
    ]


def test_when_a_node_has_begun_with_each_command(clock: VirtualClock) -> None:
    script, seen, began = Script(*batches(1, 2, 1)), list[Any](), clock.now()
    node = served(clock, script)
    other = node.executor.other

    def slow(command: c.Command) -> None:
        other(command)
        clock.sleep(1)

    node.executor.other = slow  # type: ignore[method-assign]
    point = node.seam.timed
    script.before = {1: lambda: point.add(seen.append), 2: lambda: point.remove(seen.append)}
    serve(node)
    # its first command takes a second here, and another one in ``served``
    assert seen == [MessageBegun(3, 1, 2, array("d", [began + 2, began + 3, began + 4]))]
    with pytest.raises(ProtocolError, match="batch 99 came where"):
        node.executor.apply_timed(c.Batch(99, ()), array("d"), clock.now)
