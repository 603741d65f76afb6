"""Queues of work and dictionaries against nodes that ask what they like: nothing is lost, doubled, or kept for them."""

from __future__ import annotations

from typing import Any

import cloudpickle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from quick import inputs

from disttensor.runtime.protocol import shared_objects as s
from disttensor.runtime.protocol import values
from disttensor.runtime.protocol.errors import ProtocolError
from disttensor.runtime.shared import objects as held
from disttensor.runtime.shared.callers import back
from disttensor.runtime.shared.objects import SCRIPT, Objects
from disttensor.runtime.shared.tables import Table
from disttensor.runtime.shared.values import pack, unpack
from disttensor.runtime.shared.work_queue_handles import WorkQueue as Handle
from disttensor.runtime.shared.work_queues import Answers, WorkQueueState

ITEM = pack([1, "two"])
SIZE = ITEM.nbytes + held.OVERHEAD


class Asking:
    """Objects, and what each request was answered."""

    def __init__(self, maxsize: int = 0, tries: int = 3) -> None:
        self.objects = Objects()
        self.objects.make(Table)  # so that no object of these has the number 0
        self.answers = self.objects.make(Answers)
        self.queue = self.objects.make(lambda all, n: WorkQueueState(all, n, maxsize, tries, self.answers))
        self.table = self.objects.make(Table)
        for number in (self.queue, self.table):
            self.objects.share(number)
        self.said: dict[tuple[int, int], list[s.ObjectAnswer]] = {}
        self._call = 0

    def ask(self, party: int, kind: Any, of: int | None = None, **more: Any) -> list[s.ObjectAnswer]:
        """Asks; returns the list of the answers, which has one when it has come."""
        self._call += 1
        answers = self.said[party, self._call] = []
        number = self.queue if of is None else of
        self.objects.ask(party, kind(self._call, (number,), **more), answers.append)
        return answers

    def one(self, *args: Any, **more: Any) -> s.ObjectAnswer:
        (answer,) = self.ask(*args, **more)
        return answer


def lease(a: Asking, party: int, holder: int = 1, wait: bool = False) -> list[s.ObjectAnswer]:
    return a.ask(party, s.Lease, holder=holder, who="f()", wait=wait)


def test_what_is_another_s_is_not_touched() -> None:
    a = Asking()
    a.one(SCRIPT, s.Put, item=ITEM)
    (mine,) = lease(a, 1)
    assert (mine.said, mine.trusted) == (s.OK, True)
    assert a.one(2, s.TaskDone, holder=1, item=ITEM).said == s.EMPTY
    assert a.one(1, s.TaskDone, holder=2, item=ITEM).said == s.EMPTY
    for party, holder, number in ((2, 1, None), (1, 2, None), (1, 1, mine.count + 1), (2, 1, mine.count)):
        a.one(party, s.Return, holder=holder, lease=number, counted=True, why="has lied")
    state = a.one(SCRIPT, s.Inspect)
    assert (state.count, state.left) == (0, 1)
    assert a.one(1, s.Take).said == s.REFUSED
    assert a.one(1, s.Put, item=ITEM, back=True).said == s.REFUSED
    assert a.one(1, s.TaskDone, holder=1).said == s.OK
    assert a.one(SCRIPT, s.Inspect).left == 0


def test_a_result_waits_for_room_among_the_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond a node's share; it is leased meanwhile, and who gives it back instead has done nothing."""
    monkeypatch.setattr(held, "MAX_HELD", 2 * SIZE)
    a = Asking()
    for _ in range(4):
        a.one(SCRIPT, s.Put, item=ITEM)
    for holder in range(4):
        lease(a, 1, holder)
    done = [a.ask(1, s.TaskDone, holder=holder, item=ITEM) for holder in range(4)]
    assert [len(x) for x in done] == [1, 1, 0, 0]
    assert a.one(SCRIPT, s.Inspect).left == 2
    a.one(1, s.Return, holder=3)
    assert [x.said for x in done[3]] == [s.EMPTY]
    assert a.one(SCRIPT, s.Inspect).count == 1
    assert a.one(SCRIPT, s.Take, of=a.answers).said == s.OK
    assert [x.said for x in done[2]] == [s.OK]
    assert a.one(SCRIPT, s.Inspect).left == 1
    big = a.one(1, s.TaskDone, holder=9, item=s.Item(bytes(s.MAX_ITEM + 1)))
    assert big.said == s.REFUSED


def test_a_put_that_waits_for_its_node_s_share_goes_on_when_something_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where nothing else happens at the queue: all that was in is leased, and whoever works waits for more."""
    monkeypatch.setattr(held, "MAX_HELD", 2 * SIZE)
    a = Asking()
    puts = [a.ask(1, s.Put, item=ITEM) for _ in range(3)]
    assert [lease(a, 2)[0].said, lease(a, 2)[0].said] == [s.OK, s.OK]
    waiting = lease(a, 2, wait=True)
    assert ([len(x) for x in puts], waiting) == ([1, 1, 0], [])
    a.one(2, s.TaskDone, holder=1)
    assert [x.said for x in (*puts[2], *waiting)] == [s.OK, s.OK]


def test_a_function_that_a_node_has_put_in_is_not_unpickled() -> None:
    ran: list[int] = []
    told = [cloudpickle.dumps(ran.append)]
    item = s.Item(values.encode(object(), [], refers=lambda _: told), ())
    a = Asking()
    handle = Handle.__new__(Handle)
    for party, trusted in ((1, False), (SCRIPT, True)):
        a.one(party, s.Put, item=item)
        (answer,) = lease(a, 2, holder=party + 5)
        assert answer.trusted is trusted
        assert answer.item is not None
        if trusted:
            assert callable(unpack(answer.item, lambda told: handle._found(True, told)))
        else:
            with pytest.raises(ProtocolError, match="a function that the script has not put in"):
                unpack(answer.item, lambda told: handle._found(False, told))


def test_what_nobody_is_there_to_have_is_put_back() -> None:
    """An item that was leased, and a key that was taken out, where nobody has set it meanwhile."""
    a = Asking()
    a.one(SCRIPT, s.Put, item=ITEM)
    undo = back(s.Lease(1, (a.queue,), 1, "f()", True), lease(a, 1)[0], 99)
    assert isinstance(undo, s.Return)
    a.objects.ask(1, undo, lambda _: None)
    assert a.one(SCRIPT, s.Inspect).count == 1
    more = {"key": b"k", "shown": b"K"}
    for do in (s.POP, s.POP_LAST):
        a.one(1, s.DictEntry, of=a.table, do=s.SET, item=ITEM, **more)
        asked = {"do": do, **more} if do == s.POP else {"do": do}
        taken = a.one(1, s.DictEntry, of=a.table, **asked)
        undo = back(s.DictEntry(1, (a.table,), **asked), taken, 100 + do)  # type: ignore[arg-type]
        assert undo is not None
        assert a.one(1, s.DictEntry, of=a.table, do=s.GET, **more).said == s.EMPTY
        a.objects.ask(1, undo, lambda _: None)
        found = a.one(1, s.DictEntry, of=a.table, do=s.GET, **more)
        assert (found.said, found.item) == (s.OK, ITEM)
    assert a.one(SCRIPT, s.KeysPage, of=a.table).keys == (b"K",)
    assert back(s.DictEntry(1, (a.table,), s.GET, b"k"), s.ObjectAnswer(1, s.OK, item=ITEM), 2) is None


#: What parties do, the usual more often; each with a party, and a holder there.
ACTS = st.sampled_from(
    ["put"] * 4 + ["lease"] * 3 + ["done"] * 2 + ["wait", "result", "return", "try", "gone", "take", "join", "withdraw"]
)
STEPS = st.lists(st.tuples(ACTS, st.sampled_from([1, SCRIPT, 2]), st.integers(1, 2)), min_size=20, max_size=40)


@settings(max_examples=inputs(150), deadline=None)
@given(STEPS, st.integers(1, 3), st.sampled_from([0, 0, 2]), st.booleans(), st.sampled_from([2, 1000]))
def test_each_item_is_done_or_given_up_once(
    steps: list[tuple[str, int, int]], tries: int, maxsize: int, early: bool, share: int
) -> None:
    """Whatever they do, in whichever order: nobody waits for what is there, and at the end each item was done or given
    up, and nothing is kept. ``share``: how many items a node may have in."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(held, "MAX_HELD", share * SIZE)
        walk(steps, tries, maxsize, early)


def nobody_waits_in_vain(queue: WorkQueueState) -> None:
    assert not any(queue._room(wait) for wait in queue.putting)
    assert not (queue.taking and (queue.items or queue._over))
    assert not any(queue.all.room(wait.party, wait.size) for wait in queue._finishing)
    assert not (queue._joining and not queue._unfinished)


def walk(steps: list[tuple[str, int, int]], tries: int, maxsize: int, early: bool) -> None:
    a = Asking(maxsize, tries)
    queue = a.objects._objects[a.queue]
    assert isinstance(queue, WorkQueueState)
    put, done, given_up, results = list[list[s.ObjectAnswer]](), 0, 0, 0
    for act, party, holder in steps:
        nobody_waits_in_vain(queue)
        match act:
            case "put":
                put.append(a.ask(party, s.Put, item=ITEM))
            case "lease" | "wait":
                lease(a, party, holder, wait=act == "wait")
            case "done" | "result":
                a.ask(party, s.TaskDone, holder=holder, item=ITEM if act == "result" else None)
            case "return" | "try":
                a.ask(party, s.Return, holder=holder, counted=act == "try", why="has ended" if act == "try" else "")
            case "gone" if party != SCRIPT:
                for key in [key for key in a.said if key[0] == party and not a.said[key]]:
                    a.said[key].append(s.ObjectAnswer(key[1], s.ENDED))  # it is not told
                a.objects.lost(party, "killed")
            case "take":
                a.ask(party, s.Take, of=a.answers, wait=False)
            case "join":
                a.ask(party, s.JoinQueue)
            case "withdraw":
                for key in [key for key in a.said if key[0] == party and not a.said[key]]:
                    a.objects.withdraw(*key)
    if early:
        a.one(SCRIPT, s.Close)
    for party in (1, 2):
        for key in [key for key in a.said if key[0] == party and not a.said[key]]:
            a.said[key].append(s.ObjectAnswer(key[1], s.ENDED))
        a.objects.lost(party, "killed")
    for key in [key for key in a.said if key[0] == SCRIPT and not a.said[key]]:
        a.objects.withdraw(*key)
    for holder in (1, 2):
        a.one(SCRIPT, s.Return, holder=holder)
    a.one(SCRIPT, s.Close)
    while lease(a, SCRIPT, 3)[0].said == s.OK:
        assert a.one(SCRIPT, s.TaskDone, holder=3, item=ITEM).said == s.OK
    while (answer := a.one(SCRIPT, s.Take, of=a.answers)).said != s.SHUT:
        assert answer.said in (s.OK, s.DROPPED)
    for answers in a.said.values():
        assert len(answers) == 1
    for (_, call), (answer,) in a.said.items():
        assert answer.call == call
        results += answer.said == s.OK and answer.of == a.answers
        given_up += answer.said == s.DROPPED
    kinds = [answer.said for answers in put for answer in answers]
    done = next(queue._numbers) - given_up  # of those that were put in
    assert kinds.count(s.OK) <= done + given_up  # a node that has put one may have gone before it was told
    assert results <= done
    state = a.one(SCRIPT, s.Inspect)
    assert (state.count, state.left) == (0, 0)
    assert not any(a.objects._held.values())
    assert not a.objects._waits
    assert not queue._leases


@pytest.mark.row("I23")
def test_what_a_node_may_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held, "MAX_HELD", 3 * SIZE)
    a = Asking()

    def sets(party: int, key: bytes) -> int:
        return a.one(party, s.DictEntry, of=a.table, do=s.SET, key=key, shown=key, item=ITEM).said

    assert [sets(1, key) for key in (b"a", b"b", b"c")] == [s.OK, s.OK, s.REFUSED]
    assert [sets(1, b"b"), sets(2, b"c"), sets(SCRIPT, b"b"), sets(1, b"d")] == [s.OK] * 4
    assert sets(1, b"e") == s.REFUSED
    pages = a.one(SCRIPT, s.KeysPage, of=a.table)
    assert (pages.keys, pages.closed) == ((b"a", b"b", b"c", b"d"), True)
    assert a.one(1, s.DictEntry, of=a.table, do=s.CLEAR).said == s.OK
    assert not any(a.objects._held.values())
    for entry in ({"do": s.SET}, {"do": s.SET, "item": s.Item(bytes(s.MAX_ITEM + 1))}):
        assert a.one(1, s.DictEntry, of=a.table, key=b"x", **entry).said == s.REFUSED
    assert a.one(1, s.Take, of=a.table).said == s.REFUSED
