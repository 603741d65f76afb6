"""Handlers of signals, for as long as a block."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator


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
