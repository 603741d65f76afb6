"""The end of what several nodes do, in parts: what each node's answer, its loss and the session's end make of it."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
from fake_hub import HELLO, FakeHub

from disttensor.collectives.issue import CollectiveWork
from disttensor.futures.listening import EndOfAll, GroupEnd
from disttensor.runtime.master.link import Link
from disttensor.runtime.protocol import commands as c
from disttensor.runtime.protocol.errors import BrokenError, DisttensorError, NodeLost, PoisonedError


class Script:
    """A script with three nodes that say what a test has them say."""

    def __init__(self) -> None:
        self.hub = FakeHub()
        self.link = Link(self.hub, 3, None, lambda error: None)
        for rank in range(3):
            self.hub.say(rank, HELLO)
        self.link.replies.drain()

    def end(self) -> GroupEnd:
        """The end of something that the nodes have been sent."""
        made = GroupEnd(cast(Any, SimpleNamespace(link=self.link)), (0, 1, 2))
        for node in self.link.nodes:
            node.outbox.add(c.Sync(made.request.id))
            self.link.sender.flush(node.outbox)
        return made


@pytest.fixture
def script() -> Iterator[Script]:
    made = Script()
    yield made
    made.link.close()


def test_it_ends_with_the_last_node(script: Script) -> None:
    end = script.end()
    for rank in (2, 0):
        script.hub.say(rank, c.TookPart((end.request.id,)), done=1)
        assert not end.has_ended()
    with pytest.raises(TimeoutError, match="node 1 has not answered within"):
        end.wait_for_all(0.001)
    script.hub.say(1, c.TookPart((end.request.id,)), done=1)
    assert end.wait_for_each(1.0) is None
    end.wait(0)
    assert end.has_ended()


def test_one_reply_ends_several(script: Script) -> None:
    ends = [script.end() for _ in range(2)]
    both, told = EndOfAll(cast(Any, SimpleNamespace(link=script.link)), 0, ends), list[str]()
    both.call_at_end(lambda: told.append("over"))
    for rank in range(3):
        assert (told, both.node) == ([], rank)
        script.hub.say(rank, c.TookPart(tuple(end.request.id for end in ends)), done=2)
        script.link.replies.drain()
    assert told == ["over"]
    assert both.is_completed()
    assert EndOfAll(cast(Any, SimpleNamespace(link=script.link)), 0, []).is_completed()


def test_the_first_cause_in_the_order_of_nodes_counts(script: Script) -> None:
    end = script.end()
    late, early = c.Poisoned(end.request.id, 2, 0), c.Poisoned(end.request.id, 0, 0)
    script.hub.say(2, late, done=1)
    with pytest.raises(TimeoutError, match="node 0 has not answered"):
        end.wait_for_each(0.001)
    script.hub.say(0, early, done=1)
    assert end.wait_for_each(1.0) == early
    script.hub.say(1, c.TookPart((end.request.id,)), done=1)
    end.wait_for_all(1.0)
    with pytest.raises(PoisonedError) as raised:
        end.wait(0)
    assert (raised.value.rank, raised.value.seq) == (0, 0)


def test_an_error_that_is_a_timeout_is_not_the_waits(script: Script) -> None:
    """The time limit of ``exception`` is told by what it raises, and the nodes' error by what it returns."""
    end, error = script.end(), TimeoutError("a node's own")
    questions = SimpleNamespace(failure=lambda *_: error)
    end.session = cast(Any, SimpleNamespace(link=script.link, questions=questions))
    work = CollectiveWork(end, ("all_reduce", "of", "nodes"), lambda: None)
    with pytest.raises(TimeoutError, match="node 0 has not answered within"):
        work.exception(0.001)
    for rank in range(3):
        script.hub.say(rank, c.Poisoned(end.request.id, 0, 0), done=1)
    assert work.exception(1.0) is error
    assert repr(work) == "<Work done: all_reduce of nodes>"


def test_a_lost_node_has_no_answer(script: Script) -> None:
    end = script.end()
    script.link.losses.lose(1, "it fell")
    assert not end.has_ended()
    script.hub.say(0, c.TookPart((end.request.id,)), done=1)
    with script.link.unheard(), pytest.raises(NodeLost, match="it fell"):
        end.wait_for_each(1.0)
    script.hub.say(2, c.TookPart((end.request.id,)), done=1)
    end.wait_for_all(1.0)
    with pytest.raises(BrokenError, match="node 1"):
        end.wait(0)


def test_a_lost_node_whose_place_is_taken(script: Script) -> None:
    end = script.end()
    script.link.losses.lose(1, "it fell")
    script.link.reconnect(1, "another key")
    script.hub.say(1, HELLO, done=script.link.nodes[1].connection.first)
    script.link.replies.drain()
    script.link.resume(1, lambda: 1)
    for rank in (0, 2):
        script.hub.say(rank, c.TookPart((end.request.id,)), done=1)
    with pytest.raises(BrokenError, match="node 1 was lost, in whose place another worker is now"):
        end.wait_for_each(1.0)


def test_the_sessions_end_ends_it(script: Script) -> None:
    end = script.end()
    script.link.close()
    assert end.has_ended()
    with pytest.raises(DisttensorError, match="shut down"):
        end.wait_for_each(1.0)
    with pytest.raises(BrokenError):
        end.wait(0)


def test_an_end_told_twice_fails_the_node(script: Script) -> None:
    end = script.end()
    script.hub.say(0, c.TookPart((end.request.id, end.request.id)), done=1)
    with script.link.unheard(), pytest.raises(NodeLost, match="broke the protocol: node 0 answers a request to node"):
        end.wait_for_each(1.0)
