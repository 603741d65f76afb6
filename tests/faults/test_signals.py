"""Handlers of signals that raise or use tensors, wherever the signal arrives; in-process nodes."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch

import disttensor as dt
from disttensor import state
from disttensor.runtime.interrupts import SIGNALS, Interrupts, whole
from disttensor.session import Session

pytestmark = pytest.mark.usefixtures("clean")

#: Seconds for what takes a moment; longer is a hang.
SOON = 20

#: Where a signal arrives: what has the method, and its name.
WHERE: dict[str, Callable[[Session], tuple[object, str]]] = {
    "send": lambda s: (s.link.hub, "send"),
    "drain": lambda s: (s.link.hub, "drain"),
    "pack": lambda s: (s.link.outboxes[1], "pack"),
    "bury": lambda s: (s.link.outboxes[1], "_bury"),
    "acknowledge": lambda s: (s.link.outboxes[1], "acknowledge"),
    "isend": lambda s: (s.channel, "isend"),
}


class TimeUp(Exception):
    pass


def time_up(number: int, frame: object) -> None:
    raise TimeUp


@contextlib.contextmanager
def handled(handler: Callable[..., object], number: signal.Signals = signal.SIGALRM) -> Iterator[None]:
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


class Alarm:
    """A signal that arrives in a method, once each time it is set."""

    def __init__(self, where: str, first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        self.set = False
        owner, name = WHERE[where](state.session())
        method = getattr(owner, name)

        def alarmed(*args: object) -> object:
            if first:
                self._ring()
            result = method(*args)
            if not first:
                self._ring()
            return result

        monkeypatch.setattr(owner, name, alarmed)

    def _ring(self) -> None:
        if self.set and threading.current_thread() is threading.main_thread():
            self.set = False
            signal.raise_signal(signal.SIGALRM)


@pytest.mark.parametrize("first", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("where", WHERE)
def test_a_handler_that_raises_splits_nothing(where: str, first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    x, issued = torch.zeros(3, device="node:1"), 0
    dt.synchronize()
    alarm = Alarm(where, first, monkeypatch)
    with handled(time_up):
        for _ in range(5):
            alarm.set = True
            with contextlib.suppress(TimeUp):
                while True:
                    issued += 1
                    x.add_(1)
                    torch.ones(3).to("node:1")
    assert x.tolist() == [issued] * 3  # each arrived, and once


@pytest.mark.parametrize("first", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("where", WHERE)
def test_a_handler_that_uses_tensors(where: str, first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    x, issued, seen = torch.zeros(3, device="node:1"), 0, []
    dt.synchronize()
    alarm = Alarm(where, first, monkeypatch)

    def checkpoint(number: int, frame: object) -> None:
        seen.append(((x + torch.ones(3).to("node:1")).sum().item(), dt.run(len, "abc", node=1), x.cpu()))

    with handled(checkpoint):
        for n in range(5):
            alarm.set = True
            while len(seen) <= n:
                issued += 1
                x.add_(1)
                torch.ones(3).to("node:1")
    assert [size for _, size, _ in seen] == [3] * 5
    assert x.tolist() == [issued] * 3


_released = threading.Event()


def _hold() -> str:
    """Runs on a node; the master's main thread waits for it."""
    for _ in range(100):  # poll misses a signal that comes just before it
        signal.pthread_kill(threading.main_thread().ident, signal.SIGALRM)  # type: ignore[arg-type]
        if _released.wait(SOON / 100):
            return "released"
    return "forgotten"


@pytest.mark.parametrize("node", [0, 1])
def test_a_handler_that_waits_while_its_thread_waits(node: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On node 0 it takes in the answer that the thread below it waits for, which has to hear of that."""
    x, seen = torch.ones(3, device=f"node:{node}"), []
    dt.synchronize()
    monkeypatch.setattr("disttensor.runtime.link.TICK", 100 * SOON)

    def use(number: int, frame: object) -> None:
        if node == 0:
            _released.set()
        seen.append((x + 1).tolist())
        _released.set()

    _released.clear()
    with handled(use):
        assert dt.run(_hold, node=0) == "released"
    assert seen
    assert all(values == [2, 2, 2] for values in seen)


def test_what_no_safe_point_follows_arrives_again() -> None:
    @whole
    def finalizer() -> None:
        signal.raise_signal(signal.SIGALRM)

    with handled(time_up):
        torch.ones(3, device="node:1").sum().item()
        with pytest.raises(TimeUp):  # noqa: PT012
            finalizer()
            threading.Event().wait(SOON)


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

        @whole
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
