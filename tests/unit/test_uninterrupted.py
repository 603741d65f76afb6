"""What the handlers of signals do between a session's beginning and its end."""

from __future__ import annotations

import signal
import sys
import threading
import weakref
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from handlers import TimeUp, handled, time_up

from disttensor.runtime.endpoints.wires import Wires
from disttensor.runtime.process.signals import LOOK, SIGNALS, Interrupts, uninterrupted, wait_in_looks
from disttensor.runtime.protocol.shared_objects import Withdraw
from disttensor.runtime.shared.waiting import AnswerSlot


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


def test_a_noted_signal_that_another_thread_takes_at_a_safe_point_arrives_once() -> None:
    """The idle flush reminds of it between the look at what is noted and the taking of it."""
    seen: list[int] = []
    interrupts = Interrupts()

    class Raced(list[tuple[int, object]]):
        def __bool__(self) -> bool:
            if found := len(self) > 0:
                thread = threading.Thread(target=interrupts.remind)
                thread.start()
                thread.join()
            return found

    with handled(lambda number, frame: seen.append(number)):
        interrupts.pending = Raced([(signal.SIGALRM, lambda number, frame: seen.append(-1))])
        interrupts.check()
        assert seen == [signal.SIGALRM]  # it has arrived again, at the handler that is set


# ---- a signal that comes just before a wait in the kernel ------------------------------------------------------------


class SignalledLate:
    """Waits as the kernel does when a signal came after Python's last look for signals: it ends nothing."""

    def __init__(self, wait: Callable[[float], object]) -> None:
        self._wait = wait

    def __call__(self, timeout: float | None = None) -> object:
        if timeout is None or not 0 <= timeout <= 1:
            pytest.fail(f"a wait of {timeout} s: so late is the signal seen")
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
        try:
            signal.pthread_kill(threading.get_ident(), signal.SIGALRM)
            return self._wait(timeout)
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGALRM])

    def acquire(self, timeout: float = -1) -> object:
        return self(timeout)

    wait = __call__


def wait_for_an_answer(timeout: float | None) -> None:
    slot = AnswerSlot(Withdraw(1))
    slot._come = SignalledLate(lambda seconds: threading.Event().wait(seconds))  # type: ignore[assignment]
    slot.wait(timeout)


def wait_for_a_message(timeout: float | None) -> None:
    wires = SimpleNamespace(is_own_thread=lambda: False, cond=SignalledLate(threading.Event().wait))
    Wires.wait(wires, lambda: False, timeout)  # type: ignore[arg-type]


def wait_for_an_event(timeout: float | None) -> None:
    event = threading.Event()
    wait_in_looks(SignalledLate(event.wait), event.is_set, timeout)


@pytest.mark.parametrize("timeout", [None, 1e6])
@pytest.mark.parametrize("wait", [wait_for_an_answer, wait_for_a_message, wait_for_an_event])
def test_it_ends_the_wait(wait: Callable[[float | None], None], timeout: float | None) -> None:
    with handled(time_up), pytest.raises(TimeUp):
        wait(timeout)


def test_a_wait_in_looks_ends_in_time() -> None:
    event = threading.Event()
    assert not wait_in_looks(event.wait, event.is_set, 0)
    assert not wait_in_looks(event.wait, event.is_set, 0.12)
    seen: list[float] = []
    assert wait_in_looks(seen.append, lambda: len(seen) == 3)
    assert seen == [LOOK] * 3
    event.set()
    assert wait_in_looks(event.wait, event.is_set, 0)
