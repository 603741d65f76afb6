"""Handlers of signals that raise or use tensors, wherever the signal arrives; in-process nodes."""

from __future__ import annotations

import contextlib
import signal
import threading

import pytest
import torch
from handlers import TimeUp, handled, time_up

import disttensor as dt
from disttensor import testing

pytestmark = pytest.mark.usefixtures("clean")

#: Seconds for what takes a moment; longer is a hang.
SOON = 20

#: More than travels with the commands: it comes to the point "upload".
MUCH = torch.ones(20_000)
#: Where a signal arrives.
WHERE = ["send", "receive", "pack", "bury", "acknowledge", "upload"]


class Alarm:
    """A signal that arrives at a point, once each time it is set."""

    def __init__(self) -> None:
        self.set = False

    def ring(self) -> None:
        if self.set and threading.current_thread() is threading.main_thread():
            self.set = False
            signal.raise_signal(signal.SIGALRM)


@pytest.mark.fault(18)
@pytest.mark.parametrize("first", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("where", WHERE)
def test_a_handler_that_raises_splits_nothing(where: str, first: bool) -> None:
    x, issued = torch.zeros(3, device="node:1"), 0
    dt.synchronize()
    alarm = Alarm()
    with handled(time_up), testing.at(where, alarm.ring, after=not first):
        for _ in range(5):
            alarm.set = True
            with contextlib.suppress(TimeUp):
                while True:
                    issued += 1
                    x.add_(1)
                    MUCH.to("node:1")
    assert x.tolist() == [issued] * 3  # each arrived, and once


@pytest.mark.parametrize("first", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("where", WHERE)
def test_a_handler_that_uses_tensors(where: str, first: bool) -> None:
    x, issued, seen = torch.zeros(3, device="node:1"), 0, []
    dt.synchronize()
    alarm = Alarm()

    def checkpoint(number: int, frame: object) -> None:
        seen.append(((x + torch.ones(3).to("node:1")).sum().item(), dt.run(len, "abc", node=1), x.cpu()))

    with handled(checkpoint), testing.at(where, alarm.ring, after=not first):
        for n in range(5):
            alarm.set = True
            while len(seen) <= n:
                issued += 1
                x.add_(1)
                MUCH.to("node:1")
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
def test_a_handler_that_waits_while_its_thread_waits(node: int) -> None:
    """On node 0 it takes in the answer that the thread below it waits for, which has to hear of that."""
    x, seen = torch.ones(3, device=f"node:{node}"), []
    dt.synchronize()

    def use(number: int, frame: object) -> None:
        if node == 0:
            _released.set()
        seen.append((x + 1).tolist())
        _released.set()

    _released.clear()
    with handled(use), testing.limits(tick=100 * SOON):
        assert dt.run(_hold, node=0) == "released"
    assert seen
    assert all(values == [2, 2, 2] for values in seen)
