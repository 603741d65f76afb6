"""Who stood still, and who only got no core, or no GIL: by the kernel's account, and by what it has to say."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable

import pytest
from limits import HANG

from disttensor.runtime.process import own_time
from disttensor.runtime.process.own_time import Standstill


def looked(meanwhile: Callable[[], object], late: Callable[[], object] = lambda: None) -> float:
    """What a thread says that did ``meanwhile`` between two looks, while this one did something else."""
    found: list[float] = []
    ready = threading.Event()

    def look() -> None:
        standstill = Standstill()
        ready.set()
        meanwhile()
        found.append(standstill.look())
        standstill.close()

    thread = threading.Thread(target=look)
    thread.start()
    assert ready.wait(HANG)
    late()
    thread.join(HANG)
    return found[0]


def test_a_thread_that_waits_for_the_gil_does_not_stand_still() -> None:
    """Whatever holds it sleeps: the process has used no time of a core."""
    held = ctypes.PyDLL(None)  # which keeps the GIL in its calls
    assert looked(lambda: time.sleep(0.001), lambda: held.usleep(700_000)) == 0.0


def test_a_thread_that_sleeps_stands_still() -> None:
    """As one of a process that is stopped does: neither runs, nor waits for anything that this process has."""
    assert looked(lambda: time.sleep(0.4)) >= 0.4


#: Seconds that pass, of these on a core or on the kernel's queue, switches; and whether that is a standstill.
ACCOUNTS = [
    (30.0, 0.01, 3, True),  # stopped
    (30.0, 29.9, 5, False),  # no core
    (30.0, 12.0, 5, False),  # no core for a part of it
    (6.0, 1.0, 200, True),  # waited for the GIL, and for a core, until it was stopped
    (11.0, 0.2, 2000, False),  # no GIL
    (0.1, 0.0, 0, False),  # nothing
]


@pytest.mark.parametrize(("seconds", "ran", "switches", "still"), ACCOUNTS)
def test_accounts(monkeypatch: pytest.MonkeyPatch, seconds: float, ran: float, switches: int, still: bool) -> None:
    now = [(100.0, 5.0, 70)]
    monkeypatch.setattr(Standstill, "_now", lambda self: now[-1])
    monkeypatch.setattr(own_time.time, "monotonic", lambda: now[-1][0])
    standstill = Standstill()
    now.append((100.0 + seconds, 5.0 + ran, 70 + switches))
    assert standstill.look() == (pytest.approx(seconds) if still else 0.0)
    if seconds > 1:
        assert standstill.look() == 0.0  # once
    standstill.close()
