"""The transfer that channels hand out: it ends once, and who asks later hears of it as well."""

from __future__ import annotations

import pytest

from disttensor.runtime.channel.ticket import Ticket
from disttensor.runtime.protocol.errors import BrokenError


def test_what_ended_well_does_not_fail_later() -> None:
    ticket, calls = Ticket(), []
    ticket.add_done_callback(lambda: calls.append(ticket.is_completed()))
    ticket.finish()
    ticket.fail(BrokenError, "too late")
    ticket.wait(0)
    assert calls == [True]


def test_what_failed_does_not_end_well_later() -> None:
    ticket = Ticket()
    ticket.fail(BrokenError, "the first")
    ticket.fail(BrokenError, "the second")
    ticket.finish()
    for _ in range(2):
        with pytest.raises(BrokenError, match="the first"):
            ticket.wait(0)


def test_a_callback_that_comes_after_the_end_is_called() -> None:
    ticket, calls = Ticket(), []
    ticket.finish()
    ticket.add_done_callback(lambda: calls.append(1))
    assert calls == [1]


def test_a_callback_that_raises_keeps_no_other_from_its_turn(caplog: pytest.LogCaptureFixture) -> None:
    ticket, calls = Ticket(), []
    ticket.add_done_callback(lambda: calls.append(1 // 0))
    ticket.add_done_callback(lambda: calls.append(1))
    ticket.finish()
    assert calls == [1]
    assert "ZeroDivisionError" in caplog.text


def test_waiting_has_an_end() -> None:
    ticket = Ticket()
    with pytest.raises(TimeoutError, match="still under way"):
        ticket.wait(0.01)
    ticket.finish()
    ticket.wait()
