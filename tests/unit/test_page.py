"""The page that a node shares with the process above it: what it is at, its end included."""

from __future__ import annotations

import contextlib
import threading

import pytest

from disttensor.runtime.process import page as page_module
from disttensor.runtime.process.page import (
    COLLECTIVE,
    COMMANDS,
    FUNCTION,
    IDLE,
    NOBODY,
    RECEIVE,
    SLOTS,
    STREAMS,
    Page,
    WorkTally,
)


def test_the_page_names_the_function_while_it_runs() -> None:
    page = Page()
    assert page.running == -1
    page.begin_command(4, COMMANDS)
    with page.function(1 << 41 | 7):
        assert page.running == 1 << 41 | 7
    with pytest.raises(KeyError), page.function(8):
        raise KeyError
    assert page.running == -1
    assert page.read()[:2] == (8, COMMANDS)


def test_the_page_says_for_how_long() -> None:
    page = Page()
    assert page.read() == (0, IDLE, 0, 0.0, 0.0)
    assert not page.has_begun
    page.begin_command(5, COLLECTIVE)
    seq, kind, _, seconds, deaf = page.read()
    assert (seq, kind, deaf) == (5, COLLECTIVE, 0.0)
    assert 0 <= page.read()[3] - seconds < 60
    page.live()
    assert page.has_begun
    assert 0 <= page.read()[4] < 60
    page.rest()
    assert page.read()[:4] == (5, IDLE, NOBODY, 0.0)


def test_the_page_names_functions_that_run_beside() -> None:
    """Of other threads, each with its own; more than there is room for are left out."""
    page = Page()
    assert page.beside == ()
    page.begin_command(4, COMMANDS)
    with page.function_beside(5), page.function_beside(1 << 41 | 7):
        page.rest()
        assert [each.number for each in page.beside] == [5, 1 << 41 | 7]
        assert {each.thread for each in page.beside} == {threading.get_ident()}
        first, second = page.beside
        assert first.seconds >= second.seconds >= 0
    with pytest.raises(KeyError), page.function_beside(8):
        raise KeyError
    assert page.beside == ()
    with contextlib.ExitStack() as many:
        for number in range(SLOTS + 3):
            many.enter_context(page.function_beside(number))
        assert sorted(each.number for each in page.beside) == list(range(SLOTS))
    assert page.beside == ()
    assert page.read()[:2] == (4, IDLE)


def test_only_the_process_above_pauses() -> None:
    page = Page.shared()
    assert not page.paused
    page.paused = True
    page.begin_command(1, FUNCTION)
    page.live()
    page.rest()
    assert page.paused
    page.paused = False
    assert not page.paused


def test_the_page_counts_the_time_of_work_and_not_that_of_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("disttensor.runtime.process.page._now", lambda: now[0])
    page = Page()
    for kind, seconds, before in (
        (COMMANDS, 2, 0),
        (RECEIVE, 30, 2),
        (COMMANDS, 1, 2),
        (FUNCTION, 4, 3),
        (COLLECTIVE, 50, 7),
        (COMMANDS, 1, 7),
    ):
        page.begin_command(1, kind)
        assert page.busy == before
        now[0] += seconds
    page.rest()
    now[0] += 100
    page.begin_command(2, COMMANDS)
    assert page.busy == 8


class Hours:
    """A clock in place of the page's, by which a test lets time pass."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(page_module, "_now", lambda: self.now)
        monkeypatch.setattr(page_module.time, "monotonic", lambda: self.now)


def test_a_node_notes_how_long_it_has_worked_without_a_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it waits for is no work, and what goes on counts."""
    clock, page = Hours(monkeypatch), Page()
    assert page.tally() == WorkTally()
    page.begin_command(1, COMMANDS)
    clock.now += 3
    page.live()
    assert page.tally() == (103, 3, 0, 0)
    page.begin_command(2, COLLECTIVE)
    clock.now += 10
    page.live()
    assert page.tally() == (113, 3, 0, 0)
    with page.function(3):
        clock.now += 2
    page.rest()
    clock.now += 50
    page.sending = lambda: (1 << 40, 2.5)
    assert page.tally().at == 113
    page.live()
    assert page.tally() == (165, 5, 1 << 40, 2.5)


def test_collectives_beside_are_no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node with streams takes part in them in a thread of its own: it works, but for the time that they take."""
    clock, page = Hours(monkeypatch), Page()
    page.begin_command(1, STREAMS)
    clock.now += 3
    with page.collective_beside():
        clock.now += 5
        page.live()
        assert page.tally().worked == 3
        clock.now += 1
    clock.now += 2
    page.live()
    assert page.tally().worked == 5


def test_a_tally_that_fails_is_left_for_the_next_time() -> None:
    """The thread that notes it must not end: the node would."""
    page = Page()

    def changed() -> tuple[int, float]:
        raise RuntimeError("dictionary changed size during iteration")

    page.sending = changed
    page.live()
    assert page.has_begun
    assert page.tally() == WorkTally()
