"""Actors as objects that nodes share: calls in order and at most once, handles that are counted, nodes that lie."""

from __future__ import annotations

import weakref
from typing import Any

import pytest

from disttensor.runtime.node import actors as node_actors
from disttensor.runtime.protocol import shared_objects as s
from disttensor.runtime.protocol.errors import ProtocolError
from disttensor.runtime.shared import actor_calls
from disttensor.runtime.shared.actors import ActorState
from disttensor.runtime.shared.handles import ServiceRoute
from disttensor.runtime.shared.objects import Objects
from disttensor.runtime.shared.values import pack

ITEM, RESULT = pack(((), {})), pack("done")


class Living:
    """What keeps an actor on its node."""


class Stage:
    """Objects, and what each request of a node was answered."""

    def __init__(self) -> None:
        self.objects = Objects()
        self.living: list[Any] = []
        self.said: dict[tuple[int, int], s.ObjectAnswer] = {}  #: by party and call

    def actor(self, node: int, name: str = "A") -> int:
        living = Living()
        self.living.append(living)
        number = self.objects.make(lambda all, n: ActorState(all, n, node, name, weakref.ref(living)))
        self.objects.share(number)
        return number

    def ask(self, party: int, *requests: s.Asking) -> None:
        for request in requests:

            def answer(told: s.ObjectAnswer, key: tuple[int, int] = (party, request.call)) -> None:
                assert key not in self.said, "two answers"
                self.said[key] = told

            self.objects.ask(party, request, answer)

    def heard(self, party: int, call: int) -> int | None:
        found = self.said.get((party, call))
        return None if found is None else found.said

    def is_kept(self, at: int = 0) -> bool:
        """Whether an actor is kept, once the script has let go of it."""
        found = weakref.ref(self.living[at])
        self.living[at] = None
        return found() is not None


@pytest.fixture
def stage() -> Stage:
    return Stage()


def test_calls_are_given_one_at_a_time_in_order(stage: Stage) -> None:
    a = stage.actor(1)
    stage.ask(0, s.Invoke(1, (a,), "one", ITEM), s.Invoke(2, (a,), "two", ITEM))
    stage.ask(2, s.Invoke(1, (a,), "three", ITEM))
    given = []
    ended: tuple[int | None, s.Item | None] = (None, None)
    for call in range(3):
        stage.ask(1, s.Serve(call, (a,), *ended))
        answer = stage.said[1, call]
        given.append(answer.why)
        ended = answer.count, RESULT
        assert sum(key[0] != 1 for key in stage.said) == call  # those that have ended
    stage.ask(1, s.Serve(3, (a,), *ended, raised=True))
    assert given == ["one", "two", "three"]
    assert [stage.heard(0, 1), stage.heard(0, 2), stage.heard(2, 1), stage.heard(1, 3)] == [s.OK, s.OK, s.RAISED, None]
    assert stage.said[0, 1].item == RESULT


def test_what_only_the_actors_node_may_ask(stage: Stage) -> None:
    a = stage.actor(1)
    stage.ask(2, s.Serve(1, (a,)), s.AwaitAnswer(2, (a,), 7), s.Retire(3, (a,)))
    stage.ask(0, s.Serve(1, (a,), 0, RESULT))
    assert {told.said for told in stage.said.values()} == {s.REFUSED}
    stage.ask(1, s.Serve(1, (a,)), s.Serve(2, (a,)))  # two threads that serve one
    assert (stage.heard(1, 1), stage.heard(1, 2)) == (None, s.REFUSED)
    stage.ask(0, s.Invoke(5, (a,), "one", ITEM))
    number = stage.said[1, 1].count
    stage.ask(1, s.Serve(3, (a,), number + 1, RESULT))  # the end of another call
    assert (stage.heard(0, 5), stage.heard(1, 3)) == (None, s.REFUSED)
    stage.ask(1, s.Serve(4, (a,), number, RESULT), s.Serve(5, (a,), number, RESULT))
    assert (stage.heard(0, 5), stage.heard(1, 5)) == (s.OK, s.REFUSED)


def test_handles_that_it_was_not_given(stage: Stage) -> None:
    a = stage.actor(1)
    living = Living()
    alone = stage.objects.make(lambda all, n: ActorState(all, n, 1, "alone", weakref.ref(living)))  # no function has it
    stage.ask(0, s.Invoke(1, (a,), "one", ITEM, (a, 77)), s.Invoke(2, (a,), "one", ITEM, (alone,)))
    stage.ask(0, s.Invoke(3, (alone,), "one", ITEM))
    assert [stage.heard(0, call) for call in (1, 2, 3)] == [s.REFUSED] * 3
    stage.ask(0, *(s.Drop(call, (a,)) for call in range(10, 15)))  # more than it has
    stage.objects.change(a, lambda actor: actor.hand(2))
    stage.ask(0, s.Drop(20, (a,)))
    assert stage.is_kept()


def test_a_handle_is_counted_from_one_who_has_it_to_the_other(stage: Stage) -> None:
    a, b = stage.actor(1, "A"), stage.actor(2, "B")
    stage.objects.change(b, lambda actor: actor.hand(0))
    stage.ask(0, s.Invoke(1, (a,), "keep", ITEM, (b,)), s.Drop(2, (b,)))
    assert stage.is_kept(1)  # by the call that waits
    found = stage.objects._objects[b]
    stage.ask(1, s.Serve(1, (a,)))
    assert stage.said[1, 1].handles == (b,)
    assert found._kept is not None  # type: ignore[attr-defined]  # by node 1
    stage.ask(1, s.Serve(2, (a,), stage.said[1, 1].count, RESULT), s.Drop(3, (b,)))
    assert found._kept is None  # type: ignore[attr-defined]


@pytest.mark.parametrize("lost", [0, 1])
def test_a_lost_node_has_no_handles(stage: Stage, lost: int) -> None:
    a, b = stage.actor(1, "A"), stage.actor(2, "B")
    stage.objects.change(b, lambda actor: actor.hand(0))
    stage.ask(0, s.Invoke(1, (a,), "keep", ITEM, (b,)), s.Drop(2, (b,)))
    if lost == 1:
        stage.ask(1, s.Serve(1, (a,)))
    stage.objects.lost(lost, "it is gone")
    assert not stage.is_kept(1)


def test_the_loss_of_its_node_is_told_to_all_who_call(stage: Stage) -> None:
    a = stage.actor(1)
    stage.ask(1, s.Serve(1, (a,)))
    stage.ask(0, s.Invoke(1, (a,), "runs", ITEM), s.Invoke(2, (a,), "waits", ITEM))
    stage.ask(2, s.Invoke(1, (a,), "waits", ITEM))
    stage.objects.lost(2, "another one")
    assert stage.heard(0, 1) is None
    stage.objects.lost(1, "it is gone")
    stage.ask(0, s.Invoke(3, (a,), "late", ITEM))
    assert [(stage.said[0, k].said, stage.said[0, k].count) for k in (1, 2, 3)] == [(s.LOST, 1)] * 3
    assert (2, 1) not in stage.said  # nobody is there
    assert not stage.objects._waits


def test_one_that_has_ended_tells_all_but_the_call_that_it_does(stage: Stage) -> None:
    a, b = stage.actor(1, "A"), stage.actor(1, "B")
    stage.ask(1, s.Serve(1, (a,)), s.Serve(2, (b,)))
    stage.ask(0, s.Invoke(1, (a,), "runs", ITEM), s.Invoke(2, (a,), "waits", ITEM))
    stage.ask(1, s.Retire(3, (a,)), s.Retire(4, (b,)))
    assert [stage.heard(0, 1), stage.heard(0, 2), stage.heard(1, 2)] == [None, s.SHUT, s.SHUT]
    stage.ask(1, s.Serve(5, (a,), stage.said[1, 1].count, RESULT))
    assert [stage.heard(0, 1), stage.heard(1, 5)] == [s.OK, s.SHUT]
    stage.objects.change(b, lambda actor: actor.fail(RESULT))  # it is over already
    stage.ask(0, s.Invoke(3, (b,), "late", ITEM))
    assert stage.heard(0, 3) == s.SHUT


def test_a_circle_is_refused_and_nothing_else(stage: Stage) -> None:
    names = [stage.actor(node, name) for node, name in enumerate("ABC")]
    for node, a in enumerate(names):
        stage.ask(node, s.Serve(100, (a,)))
        stage.ask(9, s.Invoke(node, (a,), "ask", ITEM))
    for node in range(3):  # each calls the next one and waits
        stage.ask(node, s.Invoke(1, (names[(node + 1) % 3],), "ask", ITEM))
        if node == 1:  # and had waited for itself, but not any more
            stage.ask(node, s.Invoke(3, (names[1],), "ask", ITEM))
        stage.ask(node, s.AwaitAnswer(2, (names[node],), 1))
        assert [stage.heard(each, 1) for each in range(3)] == [None, None, s.REFUSED if node == 2 else None]
    assert stage.said[2, 1].why.startswith("actors wait for each other: C -> A -> B -> C;")
    stage.ask(0, s.AwaitAnswer(4, (names[0],)), s.AwaitAnswer(5, (names[0],), 77))  # what was answered, or never asked
    assert stage.heard(0, 1) is None


def test_what_a_node_says_of_a_handle(stage: Stage) -> None:
    reach = actor_calls.Reach(0, ServiceRoute("a job", ()), actor_calls.About("A", 1, "host", 2, ["step"]))
    for told in (["Actor", 0, "A", 1, "host", 2, ["step"]], ["Actor", 0, "A"], ["Actor", 0, 1, "A", 1, "host", 2]):
        with pytest.raises(ValueError, match="is not a handle of an actor that came with it"):
            reach.resolve([], told)
    with pytest.raises(ProtocolError, match="MiB may"):
        s.decode_raised(bytes(s.MAX_RAISED + 1))


def test_who_waits_is_told_once_there_is_a_number() -> None:
    """The number comes before the actor is made, while it waits, or between two waits."""
    told: list[Any] = []
    node_actors.number(("job", 1), 7)
    made = node_actors.ActorInstance("first", 0, ("job", 1))
    made.awaits(lambda number: told.append(("first", number)))
    late = node_actors.ActorInstance("second", 0, ("job", 2))
    late.awaits(lambda number: told.append(("not any more", number)))
    late.awaits(None)
    late.awaits(lambda number: told.append(("second", number)))
    assert told == [("first", 7)]
    node_actors.number(("job", 2), 8)
    assert told == [("first", 7), ("second", 8)]
    late.awaits(lambda number: told.append(("again", number)))
    assert told[2:] == [("again", 8)]
