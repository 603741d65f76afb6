"""A function ends when it is interrupted, and what runs after it is never hit."""

from __future__ import annotations

import contextlib
import os
import random
import select
import signal
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from limits import HANG

from disttensor.runtime.node import interruption, process_groups
from disttensor.runtime.node.interruption import AHEAD, Interruption
from disttensor.runtime.node.process_groups import _Group
from disttensor.runtime.process.gc_pause import no_collection
from disttensor.runtime.protocol.errors import BrokenError, CancelledError


def forever(began: threading.Event | None = None) -> None:
    if began is not None:
        began.set()
    while True:
        time.sleep(0.001)


def in_main(body: Callable[[], None]) -> None:
    try:
        body()
    except KeyboardInterrupt:  # which would end the run of the tests
        pytest.fail("an interrupt has hit what runs after the function")


def in_thread(body: Callable[[], None]) -> None:
    raised: list[BaseException] = []

    def run() -> None:
        try:
            body()
        except BaseException as e:
            raised.append(e)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(HANG)
    assert not thread.is_alive()
    if raised:
        in_main(partial(_raise, raised[0]))


def _raise(error: BaseException) -> None:
    raise error


@pytest.fixture(params=[in_main, in_thread])
def place(request: pytest.FixtureRequest) -> Callable[[Callable[[], None]], None]:
    return request.param


def canceller(functions: Interruption, request: int, began: threading.Event) -> threading.Thread:
    thread = threading.Thread(target=lambda: began.wait(HANG) and functions.cancel(request))
    thread.start()
    return thread


def slowly(call: Callable[..., object]) -> Callable[..., object]:
    """Calls it after another thread has had its turn."""

    def run(*args: object) -> object:
        time.sleep(0)
        return call(*args)

    return run


def nothing_left(functions: Interruption) -> bool:
    return not (functions._running or functions._struck or functions._expected)


def test_a_function_is_interrupted(place: Callable[[Callable[[], None]], None]) -> None:
    functions = Interruption()

    def body() -> None:
        began = threading.Event()
        thread = canceller(functions, 7, began)
        with pytest.raises(CancelledError, match=r"^f\(\) was cancelled$") as caught:
            functions.run(7, "f()", lambda: forever(began))
        assert isinstance(caught.value.__cause__, KeyboardInterrupt)
        thread.join()

    place(body)
    assert nothing_left(functions)


def test_what_it_does_about_that_is_its_own(place: Callable[[Callable[[], None]], None]) -> None:
    functions = Interruption()

    def caught(began: threading.Event, error: Exception | None) -> int:
        try:
            forever(began)
        except KeyboardInterrupt:
            if error is not None:
                raise error from None
        return 3

    def body() -> None:
        began = threading.Event()
        thread = canceller(functions, 1, began)
        assert functions.run(1, "f()", lambda: caught(began, None)) == 3
        thread.join()
        began = threading.Event()
        thread = canceller(functions, 2, began)
        with pytest.raises(ValueError, match="its own"):
            functions.run(2, "f()", lambda: caught(began, ValueError("its own")))
        thread.join()

    place(body)
    assert nothing_left(functions)


class Slow(dict[int, Any]):
    """One where another thread has its turn after each look whether something is there."""

    def __contains__(self, key: object) -> bool:
        found = super().__contains__(key)
        time.sleep(0)
        return found


def test_two_threads_cancel_one_function(place: Callable[[Callable[[], None]], None]) -> None:
    functions = Interruption()
    functions._struck = Slow()

    def body() -> None:
        for request in range(20):
            began, both = threading.Event(), threading.Barrier(2)

            def cancel(request: int = request, both: threading.Barrier = both) -> None:
                both.wait(HANG)
                functions.cancel(request)

            threads = [threading.Thread(target=cancel) for _ in range(2)]

            def started(began: threading.Event = began, threads: list[threading.Thread] = threads) -> None:
                for thread in threads:
                    thread.start()
                forever(began)

            with pytest.raises(CancelledError):
                functions.run(request, "f()", started)
            for thread in threads:
                thread.join()

    place(body)
    assert nothing_left(functions)


class Aborted(_Group):
    """The group of a function whose collectives by NCCL are aborted when it has begun, as another rank has failed."""

    def __init__(self, began: threading.Event) -> None:
        self._began, self._name, self._interrupt = began, "group", None
        self._idle, self._ended, self._aborted = threading.Event(), False, False
        mailbox = SimpleNamespace(get=lambda key, over: began.wait(HANG))
        self._channel = SimpleNamespace(mailbox=mailbox)  # type: ignore[assignment]

    def _over(self) -> BrokenError | None:
        return BrokenError("rank 1 has failed") if self._began.is_set() else None

    def _cut(self) -> None:
        self._aborted = True


def test_a_function_that_goes_on_without_what_nccl_should_have_made(
    place: Callable[[Callable[[], None]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody tells it that the results are missing, and it may never end by itself."""
    functions = Interruption()
    monkeypatch.setattr(process_groups, "_PATIENCE", 0.01)

    def body() -> None:
        began = threading.Event()
        group = Aborted(began)
        watcher = threading.Thread(target=group._watch)
        watcher.start()
        broken = pytest.raises(BrokenError, match="rank 1 has failed")
        with broken, group.using(None, lambda: functions.cancel(7)):
            functions.run(7, "f()", lambda: forever(began))
        watcher.join()

    place(body)
    assert nothing_left(functions)


@pytest.mark.parametrize("without_effect", [0, 3])
def test_a_wait_in_the_kernel_ends(without_effect: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where signals came after Python's last look for them and before the wait began: those don't end it."""
    functions, began, reads = Interruption(), threading.Event(), os.pipe()
    sent = []

    def send(thread: int, number: int, send: Callable[[int, int], None] = signal.pthread_kill) -> None:
        sent.append(number)
        if len(sent) > without_effect:
            send(thread, number)

    monkeypatch.setattr(interruption.signal, "pthread_kill", send)

    def wait() -> None:
        began.set()
        select.select([reads[0]], [], [])

    late = threading.Timer(HANG / 10, os.write, [reads[1], b"x"])
    late.start()
    thread = canceller(functions, 1, began)
    with pytest.raises(CancelledError):
        functions.run(1, "f()", wait)
    late.cancel()
    late.join()
    thread.join()
    assert select.select([reads[0]], [], [], 0)[0] == []  # nothing had to be written
    os.close(reads[1])
    assert os.read(reads[0], 1) == b""
    os.close(reads[0])


def test_an_interrupt_of_its_own_is_none_of_the_scripts() -> None:
    def own() -> None:
        raise KeyboardInterrupt("its own")

    functions = Interruption()
    with pytest.raises(KeyboardInterrupt, match="its own"):
        functions.run(1, "f()", own)
    assert nothing_left(functions)


def test_what_is_cancelled_ahead_does_not_begin() -> None:
    functions = Interruption()
    functions.cancel(2)
    assert functions.run(1, "f()", lambda: 5) == 5
    with pytest.raises(CancelledError, match=r"^g\(\) was cancelled before it began$"):
        functions.run(2, "g()", lambda: pytest.fail("it began"))
    assert functions.run(2, "g()", lambda: 6) == 6
    for request in range(3 * AHEAD):
        functions.cancel(request)  # told after all of them have ended
    assert len(functions._ahead) == AHEAD
    assert nothing_left(functions)


def test_an_interrupt_that_comes_when_its_function_has_ended_hits_nothing(
    place: Callable[[Callable[[], None]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    functions = Interruption()
    began, sending, gone_on, sent = (threading.Event() for _ in range(4))

    def held(send: Callable[..., object]) -> Callable[..., object]:
        def strike(*args: object) -> object:
            sending.set()
            assert gone_on.wait(HANG)
            try:
                return send(*args)
            finally:
                sent.set()

        return strike

    def sleep(seconds: float, sleep: Callable[[float], None] = time.sleep) -> None:
        if sending.is_set():
            gone_on.set()  # the function's thread waits for the interrupt
        sleep(seconds)

    monkeypatch.setattr(interruption, "_set_exception", held(interruption._set_exception))
    monkeypatch.setattr(interruption.signal, "pthread_kill", held(signal.pthread_kill))
    monkeypatch.setattr(interruption.time, "sleep", sleep)

    def short() -> int:
        began.set()
        assert sending.wait(HANG)
        return 3

    def body() -> None:
        thread = canceller(functions, 1, began)
        assert functions.run(1, "f()", short) == 3
        gone_on.set()  # or it went on without it
        assert sent.wait(HANG)
        assert sum(range(1000)) == 499500
        thread.join()

    place(body)
    assert nothing_left(functions)


def test_interrupts_at_any_moment_hit_the_function_or_nothing(
    place: Callable[[Callable[[], None]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interruption, "_set_exception", slowly(interruption._set_exception))
    monkeypatch.setattr(interruption.signal, "pthread_kill", slowly(signal.pthread_kill))
    functions, over = Interruption(), threading.Event()
    now = [0]
    rng = random.Random(0)

    def strike() -> None:
        while not over.is_set():
            functions.cancel(now[0] + 1)  # that which runs, or is about to
            time.sleep(0)  # or the next one was cancelled before the interrupt came, and took it for its own
            for _ in range(rng.randrange(300)):
                pass

    def short() -> int:
        return sum(range(rng.randrange(300)))

    def body() -> None:
        thread = threading.Thread(target=strike)
        thread.start()
        ends = {True: 0, False: 0}
        try:
            for request in range(1, 3000):
                now[0] = request - 1
                try:
                    functions.run(request, "f()", short)
                    ends[True] += 1
                except CancelledError:
                    ends[False] += 1
        finally:
            over.set()
            thread.join(HANG)
        assert min(ends.values()) > 0, ends

    place(body)
    assert nothing_left(functions)


def test_a_function_that_raises_keeps_nothing_alive() -> None:
    """Its error is in no cycle with frames, which would keep a function's tensors until a collection."""

    class Held:
        pass

    held = Held()
    alive = weakref.ref(held)

    def function(held: Held) -> None:
        raise OSError

    with contextlib.suppress(OSError), no_collection():
        Interruption().run(1, "function", partial(function, held))
    del held
    assert alive() is None
