"""What the handlers of signals do between a session's beginning and its end."""

from __future__ import annotations

import signal
import sys
import weakref

import pytest
from handlers import TimeUp, handled, time_up

from disttensor.runtime.process.signals import SIGNALS, Interrupts, uninterrupted


def test_what_a_finalizer_would_swallow_arrives_again() -> None:
    class Dies:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGALRM)

    def callback(_: object) -> None:
        signal.raise_signal(signal.SIGALRM)

    hook, interrupts = sys.unraisablehook, Interrupts()
    with handled(time_up):
        interrupts.look()
        owner = Dies()
        del owner
        with pytest.raises(TimeUp):
            interrupts.check()
        watched = weakref.ref(owned := TimeUp(), callback)
        del owned
        with pytest.raises(TimeUp):
            interrupts.check()
        assert watched() is None
        assert not interrupts.pending
        interrupts.restore()
    assert sys.unraisablehook == hook


@pytest.mark.parametrize("number", SIGNALS)
def test_a_handler_kept_from_a_session_works_after_it(number: signal.Signals) -> None:
    interrupts = Interrupts()
    with handled(time_up, number):
        interrupts.look()
        kept = signal.getsignal(number)
        interrupts.restore()
        assert signal.getsignal(number) is time_up
        signal.signal(number, kept)
        with pytest.raises(TimeUp):
            signal.raise_signal(number)
        Interrupts().look()  # the next session
        with pytest.raises(TimeUp):
            signal.raise_signal(number)


def test_handlers_that_call_each_other() -> None:
    interrupts, seen = Interrupts(), []
    with handled(time_up):
        interrupts.look()
        before = signal.getsignal(signal.SIGALRM)

        def mine(number: int, frame: object) -> None:
            seen.append(number)
            assert callable(before)
            before(number, frame)

        signal.signal(signal.SIGALRM, mine)
        interrupts.look()

        @uninterrupted
        def untouched() -> list[int]:
            signal.raise_signal(signal.SIGALRM)
            signal.raise_signal(signal.SIGALRM)
            return list(seen)

        assert untouched() == []
        with pytest.raises(TimeUp):
            interrupts.check()
        assert seen == [signal.SIGALRM]
        interrupts.check()  # once is enough
        interrupts.restore()
        assert signal.getsignal(signal.SIGALRM) is mine
