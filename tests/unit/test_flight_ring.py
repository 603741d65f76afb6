"""The flight record of one end: its ring, what a page says of what is under way, and bytes that are no record."""

from __future__ import annotations

import random
import struct
import threading
import time
from typing import Any

import pytest

from disttensor.runtime.launch.tree.agent_check import check_news
from disttensor.runtime.launch.tree.control import AgentHello, Ended, Seen
from disttensor.runtime.master.outbox import Outbox
from disttensor.runtime.process import flight
from disttensor.runtime.process.flight import KEPT, KINDS, LOST, MOST, REPORTED, SENDING, SENT, SIZE, Ring, Trail
from disttensor.runtime.process.page import COLLECTIVE, COMMANDS, FUNCTION, NOBODY, RECEIVE, SLOTS, STREAMS, WORDS, Page
from disttensor.runtime.protocol import commands as c
from disttensor.runtime.protocol.errors import ProtocolError

#: Where a command was issued.
SITE = compile("0", "train.py", "exec"), 2


def test_a_ring_keeps_the_last_records() -> None:
    ring = Ring()
    assert flight.own(ring) == []
    for number in range(1, KEPT + 8):
        ring.write(ring.slot(), float(number), number, 10 * number, 0.5, 3, SENT)
        if number in (1, KEPT):
            assert [it.number for it in flight.own(ring)] == [*range(1, number + 1)]
    found = flight.own(ring)
    assert [it.number for it in found] == [*range(8, KEPT + 8)]
    assert found[-1][1:] == (KEPT + 7, 10 * (KEPT + 7), 0.5, 3, SENT)
    assert len(ring.copy()) == SIZE == 32 * KEPT


def test_threads_write_at_once() -> None:
    ring, threads, each = Ring(), 4, 300
    begin = threading.Barrier(threads)

    def write(first: int) -> None:
        begin.wait()
        for number in range(first, first + each):
            ring.write(ring.slot(), 1.0, number, 0, 0.0, 0, SENDING)

    writers = [threading.Thread(target=write, args=(1 + k * each,)) for k in range(threads)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert sorted(it.number for it in flight.own(ring)) == [*range(1, 1 + threads * each)]


def test_a_trail_has_the_lines_of_what_was_sent() -> None:
    box = Outbox(0)
    for k in range(KEPT // 4):
        for site in (None, SITE) if k % 2 else (None, None):
            box.add(c.Free(1, ()), site)
        box.pack()
        box.record_leaving(float(2 * k + 1))
        box.ready.popleft()
        box.trail.write(box.trail.slot(), float(2 * k + 2), 2 * k + 2, 7, 0.0, 0, REPORTED)
    found = box.trail.records()
    assert len(found) == KEPT // 2
    assert [(it.kind, it.number, it.figure, site) for it, site in found[:4]] == [
        (SENT, 0, 2, None), (REPORTED, 2, 0, None), (SENT, 2, 2, SITE), (REPORTED, 4, 0, None)
    ]  # fmt: skip
    for _ in range(KEPT - 1):  # in the places of what was sent
        box.trail.write(box.trail.slot(), 1e6, 1, 0, 0.0, 0, LOST)
    assert {site for _, site in box.trail.records()} == {None}


def test_a_page_says_what_is_under_way() -> None:
    """As its process would leave it, wherever it is killed."""
    page = Page.shared()
    assert flight.decode(page.flight()) == []
    before = time.time()
    page.begin_command(3, COMMANDS)
    assert [(it.number, it.kind, it.seconds, it.peer) for it in flight.decode(page.flight())] == [
        (3, COMMANDS, -1.0, NOBODY)
    ]
    with page.function(4):
        pass
    with page.function(5), page.function_beside(6):
        first, *others = flight.decode(page.flight())
        assert (first.number, first.kind, first.seconds >= 0) == (4, FUNCTION, True)
        assert [(it.number, it.kind, it.seconds) for it in others] == [(5, FUNCTION, -1.0), (6, FUNCTION, -1.0)]
    page.begin_command(7, COLLECTIVE)
    page.await_peer(1)
    last = flight.decode(page.flight())[-1]
    assert (last.number, last.kind, last.peer) == (7, COLLECTIVE, 1)
    assert before - 1 < last.at <= time.time() + 1
    page.begin_command(8, STREAMS)
    page.rest()
    assert [it.number for it in flight.decode(page.flight())] == [4, 5, 6]


def test_a_function_that_fails_has_a_record() -> None:
    page = Page()
    for enter in (page.function, page.function_beside):
        with pytest.raises(ValueError, match="it fell"), enter(9):
            raise ValueError("it fell")
    page.rest()
    assert [(it.number, it.kind) for it in flight.decode(page.flight())] == [(9, FUNCTION)] * 2


def test_the_kinds_of_a_page_are_those_of_the_record() -> None:
    assert (KINDS[COMMANDS], KINDS[FUNCTION], KINDS[COLLECTIVE], KINDS[RECEIVE]) == (
        "message", "function", "collective", "receive"
    )  # fmt: skip
    assert KINDS.index("sent") == SENT == len(WORDS)
    assert KINDS[SENDING] == "send"


@pytest.mark.parametrize("peer", [0, 5, 1000, -1, -2])
def test_a_peer_fits(peer: int) -> None:
    ring = Ring()
    ring.write(ring.slot(), 1.0, 0, 0, 0.0, peer & flight.COUNT, RECEIVE)
    assert flight.own(ring)[0].peer == peer


def test_whatever_is_no_record_is_left_out() -> None:
    chance = random.Random(5)
    page = Page()
    for number in range(1, 4):
        page.ring.write(page.ring.slot(), float(number), number, 0, 0.0, 0, COMMANDS)
    whole = page.flight()
    nan = struct.pack("<dqQfHBx", 1.0, 1, 0, float("nan"), 0, COMMANDS)
    odd = struct.pack("<dqQfHBx", float("inf"), 1, 0, 0.0, 0, COMMANDS) + struct.pack(
        "<dqQfHBx", 1.0, 1, 0, 0.0, 0, 200
    )
    assert [it.number for it in flight.decode(whole + nan + odd + b"rest")] == [1, 2, 3]
    for size in (0, 15, 16, 47):
        assert flight.decode(whole[:size]) == []
    for _ in range(200):
        found = flight.decode(chance.randbytes(chance.randrange(200)))
        assert all(it.kind < len(KINDS) for it in found)
    assert len(flight.decode(chance.randbytes(2 * MOST))) <= MOST // 32
    assert len(flight.encode(page.ring, [flight.under_way(1.0, 1, NOBODY, FUNCTION)] * 500)) <= MOST
    assert SLOTS + 1 <= (MOST - 16 - SIZE) // 32


@pytest.mark.parametrize("news", [Ended(1, 5, 0, "", (), flight=bytes(MOST + 1)), Seen(1, "R", flight=bytes(MOST + 1))])
def test_an_agent_that_says_more_is_refused(news: Any) -> None:
    class Branch:
        agent_hello = AgentHello(1)

    class Seats:
        def branch_of(self, rank: int) -> Any:
            return branch

    branch: Any = Branch()
    seats: Any = Seats()
    with pytest.raises(ProtocolError, match=f"a flight record of {MOST + 1} bytes of node 1: at most {MOST}"):
        check_news(branch, news, seats, {}, ())


def test_a_trail_takes_little_room() -> None:
    """What docs/SEEING.md says: 32 bytes for each record, and two numbers for each in lists of its own."""
    assert Trail().lines == [None] * KEPT
    assert SIZE + 2 * 8 * KEPT == 96_000
